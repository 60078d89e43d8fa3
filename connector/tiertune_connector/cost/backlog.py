"""Prefill work that is ahead of a request: a fetch costs nothing while the request waits for it. Pure."""

from dataclasses import dataclass, field
from typing import NamedTuple

from tiertune_connector.cost.prefill import PrefillCost

BLOCK = 32
"""Consecutive arrivals whose work is summed; about the square root of a long queue."""


class _Left(NamedTuple):
    """The part of a prompt not computed yet."""

    prompt_tokens: int
    tokens: int
    flops: float


_NOTHING = _Left(0, 0, 0.0)


@dataclass(slots=True)
class _Block:
    """Requests that arrived one after another, and the sums over them."""

    left: dict[str, _Left] = field(default_factory=dict)
    tokens: int = 0
    flops: float = 0.0

    def put(self, request: str, left: _Left) -> None:
        before = self.left.get(request, _NOTHING)
        self.left[request] = left
        self.tokens += left.tokens - before.tokens
        self.flops += left.flops - before.flops

    def drop(self, request: str) -> None:
        self.put(request, _NOTHING)
        del self.left[request]


class Backlog:
    """Requests whose prefill is not finished, in the order of their arrival; those that decode cost nothing here."""

    def __init__(self, prefill: PrefillCost) -> None:
        self._prefill = prefill
        self._arrivals = 0
        self._places: dict[str, int] = {}
        self._blocks: dict[int, _Block] = {}

    def __len__(self) -> int:
        return len(self._places)

    def others(self, request: str) -> int:
        """How many other requests are not finished, ahead of this one and behind it."""
        return len(self._places) - (request in self._places)

    def arrived(self, request: str, prompt_tokens: int) -> None:
        """A request arrived, behind all others."""
        self.left(request)
        if prompt_tokens <= 0:
            return
        place = self._arrivals // BLOCK
        self._arrivals += 1
        self._places[request] = place
        flops = self._prefill.shape.flops(0, prompt_tokens)
        self._blocks.setdefault(place, _Block()).put(request, _Left(prompt_tokens, prompt_tokens, flops))

    def computed(self, request: str, end_token: int) -> None:
        """Tokens of the prompt up to ``end_token`` have KV, computed or soon fetched; a failed fetch may lower it.

        At the prompt's end the request is forgotten. Unknown requests are ignored: they decode.
        """
        place = self._places.get(request)
        if place is None:
            return
        block = self._blocks[place]
        prompt = block.left[request].prompt_tokens
        if end_token < prompt:
            block.put(request, _Left(prompt, prompt - end_token, self._prefill.shape.flops(end_token, prompt)))
        else:
            self.left(request)

    def left(self, request: str) -> None:
        """The request ended, whether computed or not."""
        place = self._places.pop(request, None)
        if place is None:
            return
        self._blocks[place].drop(request)
        if not self._blocks[place].left:
            del self._blocks[place]

    def seconds(self, request: str) -> float:
        """Predicted seconds of the prefills ahead of ``request``.

        0 if the cost is unknown or the request is not waiting: a backlog only makes fetches cheaper, so in doubt there
        is none.
        """
        mine = self._places.get(request)
        if mine is None:
            return 0.0
        ahead = [(len(block.left), block.tokens, block.flops) for place, block in self._blocks.items() if place < mine]
        for other, left in self._blocks[mine].left.items():
            if other == request:
                break
            ahead.append((1, left.tokens, left.flops))
        if not ahead:
            return 0.0
        requests, tokens, flops = map(sum, zip(*ahead, strict=True))
        return self._prefill.work_s(flops, tokens, requests) or 0.0
