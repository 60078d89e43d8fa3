"""Prefill work that is ahead of a request: a fetch costs nothing while the request waits for it. Pure."""

from itertools import islice

from tiertune_connector.cost.prefill import PrefillCost


class Backlog:
    """Requests whose prefill is not finished, in the order of their arrival; those that decode cost nothing here."""

    def __init__(self, prefill: PrefillCost) -> None:
        self._prefill = prefill
        self._prompts: dict[str, int] = {}
        """Tokens of each prompt."""
        self._tokens: dict[str, int] = {}
        self._flops: dict[str, float] = {}
        """Those not computed yet; all three are in the same order."""

    def __len__(self) -> int:
        return len(self._prompts)

    def others(self, request: str) -> int:
        """How many other requests are not finished, ahead of this one and behind it."""
        return len(self._prompts) - (request in self._prompts)

    def arrived(self, request: str, prompt_tokens: int) -> None:
        """A request arrived, behind all others."""
        self.left(request)
        if prompt_tokens > 0:
            self._keep(request, 0, prompt_tokens)

    def computed(self, request: str, end_token: int) -> None:
        """Tokens of the prompt up to ``end_token`` have KV, computed or soon fetched; a failed fetch may lower it.

        At the prompt's end the request is forgotten. Unknown requests are ignored: they decode.
        """
        prompt = self._prompts.get(request)
        if prompt is None:
            return
        if end_token < prompt:
            self._keep(request, end_token, prompt)
        else:
            self.left(request)

    def left(self, request: str) -> None:
        """The request ended, whether computed or not."""
        if self._prompts.pop(request, 0):
            del self._tokens[request], self._flops[request]

    def seconds(self, request: str) -> float:
        """Predicted seconds of the prefills ahead of ``request``.

        0 if the cost is unknown or the request is not waiting: a backlog only makes fetches cheaper, so in doubt there
        is none.
        """
        ahead = list(self._prompts).index(request) if request in self._prompts else 0
        tokens, flops = sum(islice(self._tokens.values(), ahead)), sum(islice(self._flops.values(), ahead))
        return (self._prefill.work_s(flops, tokens, ahead) or 0.0) if ahead else 0.0

    def _keep(self, request: str, first: int, prompt: int) -> None:
        self._prompts[request] = prompt
        self._tokens[request] = prompt - first
        self._flops[request] = self._prefill.shape.flops(first, prompt)
