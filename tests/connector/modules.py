"""A PyTorch module without PyTorch."""


class FakeModule:
    """Forward hooks as torch runs them: those for always also when the forward raises."""

    def __init__(self, forward, device="cpu"):
        self.forward, self.device = forward, device
        self.before, self.after = {}, {}

    def parameters(self):
        return iter([self])

    def register_forward_pre_hook(self, hook):
        return Handle(self.before, hook)

    def register_forward_hook(self, hook, *, with_kwargs, always_call):
        assert with_kwargs
        assert always_call
        return Handle(self.after, hook)

    def __call__(self, *args, **kwargs):
        output = None
        try:
            for hook in list(self.before.values()):
                hook(self, args)
            output = self.forward(*args, **kwargs)
        finally:
            for hook in list(self.after.values()):
                hook(self, args, kwargs, output)
        return output


class Handle:
    def __init__(self, hooks, hook):
        self.hooks = hooks
        hooks[id(self)] = hook

    def remove(self):
        self.hooks.pop(id(self), None)
