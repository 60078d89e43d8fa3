"""How far to fetch a prompt, and what to bring near while it waits. Imports no vLLM; scheduler thread."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tiertune_connector.client.store_client import StoreClient
from tiertune_connector.cost import Backlog, FetchEstimate, GateDecision
from tiertune_connector.protocol.messages import LookupReply
from tiertune_connector.protocol.reporting import DRAM
from tiertune_connector.vllm.gate import EngineGate
from tiertune_connector.vllm.lookups import Ask
from tiertune_connector.vllm.telemetry import Telemetry

if TYPE_CHECKING:
    from concurrent.futures import Future

    from tiertune_connector.client.store_client import Loaded

PREFETCHES = 8
"""Waiting requests whose chunks are brought into DRAM at once."""


@dataclass(eq=False)
class Choosing:
    """The gate's answer for a request, given what the engine knows of those before it."""

    client: StoreClient
    gate: EngineGate
    backlog: Backlog
    telemetry: Telemetry
    chunk_tokens: int
    needs: Callable[[int], int] = int
    """The store's chunks that a fetch of so many of the prompt's takes."""
    _prefetching: list[Ask] = field(default_factory=list)

    def choose(self, ask: Ask, own_chunks: int) -> GateDecision:
        """How far to fetch, now that the engine wants the request and has ``own_chunks`` of it itself."""
        decision = self._decide(ask, own_chunks)
        ask.load_s = self.gate.deadline_s(decision, ask.reply.result().gate)
        self.telemetry.decided(ask, decision)
        parts = _parts(decision)
        if ask.prefetch is not None:  # what is missing is on its way already
            copied_s = sum(parts.pop(tier, 0.0) for tier in _near(ask.prefetch, self._within_reach(ask, own_chunks)))
            parts = {DRAM: copied_s, **(parts if ask.prefetch.done() else {})}
            if ask.prefetch.done():
                self.ended(ask)
        self._begin(ask, parts)
        # What it fetches or has will not be computed: nobody waits for that.
        self.backlog.computed(ask.request, decision.cut * self.chunk_tokens)
        return decision

    def prefetch(self, ask: Ask, room: int) -> None:
        """While the request waits, bring what it will probably fetch into DRAM, without holding it there.

        At most the ``room`` chunks for which staging has room.
        """
        self._forget_done()
        if ask.cut_tokens is not None or len(self._prefetching) >= PREFETCHES:
            return
        decision, tiers = self._decide(ask, 0), ask.reply.result().tiers
        room -= sum(other.prefetched for other in self._prefetching)
        if not decision.fetches or decision.cut > room or set(tiers[: decision.cut]) <= {DRAM}:
            return
        self._begin(ask, {tier: seconds for tier, seconds in _parts(decision).items() if tier != DRAM})
        ask.prefetched = decision.cut
        ask.prefetch = self.client.load(
            ask.chain[: decision.cut], deadline_s=self.gate.deadline_s(decision, ask.reply.result().gate)
        )
        ask.prefetch.add_done_callback(lambda loaded: self.client.release(loaded.result()))
        self._prefetching.append(ask)

    def ended(self, ask: Ask) -> None:
        """Nothing more comes for the request, so others no longer wait behind it, unless a prefetch still goes on."""
        if ask.prefetch is not None and not ask.prefetch.done():
            return
        now = time.monotonic()
        for load in ask.under_way:
            self.gate.ended(load, now)
        ask.under_way.clear()

    def _forget_done(self) -> None:
        """Forget prefetches that are over; if a request was chosen since, its loads still count."""
        done = [ask for ask in self._prefetching if ask.prefetch is None or ask.prefetch.done()]
        for ask in done:
            self._prefetching.remove(ask)
            if ask.cut_tokens is None:
                self.ended(ask)

    def _begin(self, ask: Ask, parts: Mapping[str, float]) -> None:
        """Count loads from tiers, with predicted seconds."""
        now = time.monotonic()
        ask.under_way += [self.gate.began(tier, seconds, now) for tier, seconds in parts.items() if seconds]

    def _decide(self, ask: Ask, own_chunks: int) -> GateDecision:
        found, reached = ask.reply.result(), self._within_reach(ask, own_chunks)
        return self.gate.choose(
            found.tiers,
            computed_tokens=own_chunks * self.chunk_tokens,
            prompt_tokens=ask.prompt_tokens,
            costs=self._costs(ask, found, reached),
            settings=found.gate,
            backlog_s=self.backlog.seconds(ask.request),
            prefills=self.backlog.others(ask.request),
            most=len(reached),
        )

    def _within_reach(self, ask: Ask, own_chunks: int) -> Sequence[str]:
        """The tiers of the leading chunks that have room, the engine's own first."""
        found = ask.reply.result()
        return found.tiers[: found.reach(own_chunks, self.needs)]

    def _costs(self, ask: Ask, found: LookupReply, reached: Sequence[str]) -> Mapping[str, FetchEstimate]:
        """What a fetch costs now: behind other loads, but not behind the request's own prefetch."""
        if ask.prefetch is None:
            return self.gate.behind(found.costs, ask.sent_at, time.monotonic())
        near = _near(ask.prefetch, reached)  # tiers whose chunks were all prefetched cost what DRAM costs
        return {tier: found.costs.get(DRAM, cost) if tier in near else cost for tier, cost in found.costs.items()}


def _parts(decision: GateDecision) -> dict[str, float]:
    """Seconds that each tier's part of a fetch is predicted to take."""
    return {
        candidate.tier: candidate.fetch_s
        for candidate in decision.candidates
        if candidate.fetched and candidate.fetch_s is not None
    }


def _near(prefetch: "Future[Loaded]", tiers: Sequence[str]) -> set[str]:
    """Those of ``tiers`` whose chunks are all in DRAM by now, DRAM among them."""
    beyond = tiers[len(prefetch.result().slots) :] if prefetch.done() else tiers
    return (set(tiers) - set(beyond)) | {DRAM}
