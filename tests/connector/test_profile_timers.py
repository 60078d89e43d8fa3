"""Timers and stages over devices that a test drives: no synchronisation, every second told once."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.stores import Clock, at_once
from tiertune_connector import profile
from tiertune_connector.profile.stages import Profiler
from tiertune_connector.profile.timers import PENDING, Timer, wall_timer


class Device:
    """A stream: work and events in the order of their launch, done when the test lets them be."""

    def __init__(self):
        self.launched, self.done, self.capturing = 0.0, 0.0, False
        self.events = 0

    def launch(self, seconds):
        """Work for the device."""
        self.launched += seconds

    def finish(self, upto=None):
        self.done = self.launched if upto is None else upto

    def event(self):
        self.events += 1
        return Event(self)

    def timer(self, _name=None):
        return Timer(self.event, capturing=lambda: self.capturing, stream=lambda: self)


class Event:
    """As torch's: it happens when the device has done all that was launched before it."""

    def __init__(self, device):
        self.device, self.at = device, None

    def record(self, stream=None):
        assert stream is self.device, "an event of another stream"
        assert not self.device.capturing, "an event in a graph"
        self.at = self.device.launched

    def query(self):
        return self.device.done >= self.at

    def elapsed_time(self, end):
        assert self.query(), "would wait"
        assert end.query(), "would wait"
        return (end.at - self.at) * 1e3


@pytest.fixture
def device():
    return Device()


class TestTimer:
    def test_seconds_are_told_when_the_device_has_come_past(self, device):
        """Each measurement once, under its key, without waiting for the device."""
        timer = device.timer()
        for step, seconds in ((1, 0.5), (2, 0.25)):
            mark = timer.start(step)
            device.launch(seconds)
            timer.stop(mark)
        assert timer.poll() == []
        device.finish(upto=0.5)
        assert timer.poll() == [(1, 0.5)]
        device.finish()
        assert timer.poll() == [(2, 0.25)]
        assert timer.poll() == []

    def test_events_are_used_again(self, device):
        """A thousand steps take the events of those that are under way at once."""
        timer = device.timer()
        for step in range(1000):
            timer.stop(timer.start(step))
            device.finish()
            timer.poll()
        assert device.events == 2

    def test_a_device_that_hangs_does_not_fill_memory(self, device):
        """With too many pending measurements new ones are left out."""
        timer = device.timer()
        device.launch(1.0)
        for step in range(PENDING + 7):
            timer.stop(timer.start(step))
        assert device.events == 2 * PENDING
        device.finish()
        assert [step for step, _ in timer.poll()] == list(range(PENDING))

    def test_a_graph_under_capture_is_left_alone(self, device):
        """No event is recorded into it, from the first or from the second mark."""
        timer = device.timer()
        device.capturing = True
        timer.stop(timer.start(1))
        device.capturing = False
        mark = timer.start(2)
        device.capturing = True
        timer.stop(mark)
        device.finish()
        assert timer.poll() == []

    def test_a_wall_clock_does_the_same_on_the_cpu(self, clock):
        """There what was called is done."""
        timer = wall_timer(clock)
        mark = timer.start("a")
        clock.now += 0.5
        timer.stop(mark)
        assert timer.poll() == [("a", 0.5)]
        assert timer.poll() == []


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


@pytest.fixture
def profiler(clock, device):
    return Profiler(wall=clock, device_timer=device.timer)


def told(profiler: Profiler) -> dict[tuple[str, str], tuple[float, int]]:
    profiler.harvest()
    return {(r.stage, r.phase): (pytest.approx(r.gpu_seconds), r.tokens) for r in profiler.totals.take()}


class TestStages:
    def test_a_module_is_measured_on_its_device(self, profiler, device):
        """Seconds of the device, tokens that the caller's function finds in the call."""
        module = FakeModule(lambda ids, scale: device.launch(0.5) or [ids] * scale, device="cuda:0")
        profiler.stage("talker").attach(module, tokens=lambda args, kwargs, output: args[0] + len(output))
        assert module(7, scale=2) == [7, 7]
        assert told(profiler) == {("talker", "mixed"): (0.0, 9)}, "tokens are known before the device is done"
        device.finish()
        assert told(profiler) == {("talker", "mixed"): (0.5, 0)}

    def test_on_the_cpu_it_is_wall_time(self, profiler, clock):
        """As a span of code, as a decorator, as a module: what passed while it ran."""
        stage = profiler.stage("vocoder", phase="decode")

        def work():
            clock.now += 0.5

        with stage.span(tokens=3):
            work()
        stage.span(tokens=2)(work)()
        FakeModule(work)()
        attached = stage.attach(module := FakeModule(work))
        module()
        attached.remove()
        module()
        assert told(profiler) == {("vocoder", "decode"): (1.5, 5)}
        attached.remove()
        assert not module.before
        assert not module.after

    def test_stages_inside_others_are_theirs_alone(self, profiler, device):
        """Nested seconds count once, with the innermost stage; stages add up to the device's time."""
        inner = FakeModule(lambda: device.launch(0.25), device="cuda:0")
        outer = FakeModule(lambda: (device.launch(0.5), inner(), inner()), device="cuda:0")
        profiler.stage("thinker").attach(outer)
        profiler.stage("talker").attach(inner)
        outer()
        device.finish()
        assert told(profiler) == {("thinker", "mixed"): (0.5, 0), ("talker", "mixed"): (0.5, 0)}

    def test_a_forward_that_raises_counts_with_its_seconds(self, profiler, clock):
        """No tokens; the error goes on, and the stage works as before."""

        def fail():
            clock.now += 0.5
            raise ValueError("bad input")

        stage = profiler.stage("talker")
        module = FakeModule(fail)
        stage.attach(module, tokens=lambda args, kwargs, output: len(output))
        with pytest.raises(ValueError, match="bad input"):
            module()
        with pytest.raises(ValueError, match="bad input"), stage.span(tokens=4):
            fail()
        module.forward = lambda: [1, 2]
        module()
        assert told(profiler) == {("talker", "mixed"): (1.0, 6)}

    def test_an_interrupted_visit_is_forgotten(self, profiler, clock, device):
        """A second hook that never ran leaves the stages around it right."""
        stage, other = profiler.stage("outer"), profiler.stage("inner")
        module = FakeModule(lambda: None)
        attached = other.attach(module)
        with stage.span():
            clock.now += 0.5
            module.forward = attached.remove  # so that only the first hook runs
            module()
            clock.now += 0.5
        assert told(profiler) == {("outer", "mixed"): (1.0, 0)}

    def test_threads_do_not_nest_in_each_other(self, profiler, clock):
        """Stages of concurrent threads are told apart, even of the same name."""
        stage, entered, leave = profiler.stage("a"), threading.Event(), threading.Event()

        def hold():
            with stage.span(tokens=1):
                entered.set()
                assert leave.wait(10)

        thread = threading.Thread(target=hold)
        thread.start()
        assert entered.wait(10)
        with profiler.stage("b").span(tokens=2):
            clock.now += 0.5
        leave.set()
        thread.join()
        assert told(profiler) == {("a", "mixed"): (0.5, 1), ("b", "mixed"): (0.5, 2)}

    def test_threads_lose_nothing(self, profiler):
        """Many threads through the same stages: all tokens are there."""
        stage = profiler.stage("a")

        def visit(_):
            for _ in range(300):
                with stage.span(tokens=1), profiler.stage("b").span(tokens=2):
                    pass

        at_once(visit, 4)
        assert {key: tokens for key, (_, tokens) in told(profiler).items()} == {
            ("a", "mixed"): 1200,
            ("b", "mixed"): 2400,
        }

    @pytest.mark.parametrize(("name", "phase"), [("", "mixed"), ("x" * 65, "mixed"), ("talker", "thinking")])
    def test_labels_that_no_store_takes_are_refused(self, profiler, name, phase):
        """At once, where they are given."""
        with pytest.raises(ValueError, match=r"stage|phase"):
            profiler.stage(name, phase=phase)

    @given(
        tree=st.recursive(
            st.just([]), lambda inner: st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 8), inner), max_size=4)
        ),
        on_device=st.booleans(),
    )
    def test_stages_add_up_to_the_whole(self, tree, on_device):
        """However stages nest, their seconds sum to the time that passed inside of any, and tokens to those visited."""
        device, clock, visits = Device(), Clock(), []
        profiler = Profiler(wall=clock, device_timer=device.timer)

        def walk(nodes):
            for name, work, inner in nodes:
                with profiler.stage(name).span(tokens=1, device="cuda:0" if on_device else "cpu"):
                    visits.append(work / 8)
                    device.launch(work / 8)
                    clock.now += work / 8
                    walk(inner)

        walk(tree)
        device.finish()
        profiler.harvest()
        reports = profiler.totals.take()
        assert sum(report.gpu_seconds for report in reports) == pytest.approx(sum(visits))
        assert sum(report.tokens for report in reports) == len(visits)


class TestReporting:
    def test_everything_measured_reaches_the_store(self, profiler, clock):
        """Also what was measured before there was one; what it did not take waits."""
        sink = Taking()
        stage = profiler.stage("talker")
        with stage.span(tokens=3):
            clock.now += 0.5
        profiler.report_to(sink, every_s=3600)
        with stage.span(tokens=4):
            clock.now += 0.25
        profiler.close()
        assert sum(report.gpu_seconds for report in sink.taken) == pytest.approx(0.75)
        assert sum(report.tokens for report in sink.taken) == 7

    def test_devices_are_asked_in_the_background_only_when_nobody_else_does(self, profiler, device):
        """While stages run, they ask by the way: another thread's question would break a graph under capture."""
        with profiler.stage("a").span(device="cuda:0"):
            device.launch(0.5)
        device.finish()
        profiler._harvest_if_idle()
        assert profiler.totals.take() == []
        profiler._harvest_if_idle()
        assert [report.gpu_seconds for report in profiler.totals.take()] == [0.5]

    def test_the_package_has_one_profiler_for_the_process(self):
        """What a user names is ready to be used, before there is a store."""
        with profile.stage("only here").span(tokens=5):
            pass
        assert ("only here", 5) in {(report.stage, report.tokens) for report in profile.stage.__self__.totals.take()}


class Taking:
    def __init__(self):
        self.taken = []

    def report_steps(self, steps):
        self.taken += steps
        return True
