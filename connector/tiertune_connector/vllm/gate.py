"""The gate as an engine uses it: how far to fetch a prompt, and what to bring near while it waits.

Its own prefill cost is weighed against the store's fetch costs. Imports no vLLM; scheduler thread.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import ceil
from typing import TYPE_CHECKING

from msgspec.structs import replace

from tiertune_connector.client.store_client import StoreClient
from tiertune_connector.cost import Backlog, FetchEstimate, GateDecision, Others, PrefillCost, deadline_s, decide
from tiertune_connector.cost.gate import REMOTE, Reason
from tiertune_connector.protocol.reporting import DRAM
from tiertune_connector.vllm.facts import Facts
from tiertune_connector.vllm.lookups import Ask
from tiertune_connector.vllm.settings import EngineSettings

if TYPE_CHECKING:
    from concurrent.futures import Future

    from tiertune_connector.client.store_client import Loaded

PREFETCHES = 8
"""Waiting requests whose chunks are brought into DRAM at once."""
FADE = 0.9
"""Weight that earlier copies keep with each new one."""
PUT_OFF = 1.5
"""Steps of others that a fetch costs its request beside its own seconds: it is over within one of them, and the copy to
the device takes part in the next. Where steps are scheduled ahead, that it has ended is read as many steps later."""
DECLINED = 0.99
"""Factor on the copies' seconds at each decision to fetch nothing for their sake: else a slow one would be the last."""


@dataclass(slots=True, eq=False)
class OwnLoad:
    """A load that this engine began."""

    tier: str
    ends_at: float
    """Predicted end, behind the loads before it."""
    least_at: float
    """Earliest end, however soon those are over: as predicted without them."""


class OwnLoads:
    """Loads that this engine began, in order: a store may not have known of them when it told its costs."""

    def __init__(self) -> None:
        self._loads: dict[str, deque[OwnLoad]] = {}
        """By tier."""

    def began(self, tier: str, seconds: float, now: float) -> OwnLoad:
        """A load from ``tier`` is under way, and predicted to take ``seconds``."""
        loads, until = self._under_way(tier, now), now + seconds
        after = loads[-1].ends_at if loads else now
        load = OwnLoad(tier, max(until, after), until if until < after else now)
        loads.append(load)
        return load

    def ended(self, load: OwnLoad, now: float) -> None:
        """A load is over. If it is early, as others brought its chunks or it failed, all behind it gain.

        If a load takes longer, the store's costs say so.
        """
        loads = self._under_way(load.tier, now)
        if load in loads:
            place = loads.index(load)
            early_s = load.ends_at - (max(now, loads[place - 1].ends_at) if place else now)
            for later in islice(loads, place + 1, None):
                ends_at = max(later.least_at, later.ends_at - early_s)
                early_s = later.ends_at - ends_at
                later.ends_at = ends_at
            loads.remove(load)

    def behind(self, costs: Mapping[str, FetchEstimate], told_at: float, now: float) -> dict[str, FetchEstimate]:
        """The costs that a store gave at ``told_at``, updated for what is on its way now.

        What was on its way then has moved on since, and this engine may have begun loads unknown to the store.
        """
        return {tier: _behind(cost, self._under_way(tier, now), told_at, now) for tier, cost in costs.items()}

    def _under_way(self, tier: str, now: float) -> deque[OwnLoad]:
        """Those from a tier that have not ended yet, as far as is known."""
        loads = self._loads.setdefault(tier, deque())
        while loads and loads[0].ends_at <= now:
            loads.popleft()
        return loads


@dataclass(eq=False)
class EngineGate:
    """The gate's answer for a request, given what the engine knows of those before it.

    ``chunk_bytes`` of a prompt's chunk: one of the store's for each of the engine's `whole_groups`.
    """

    client: StoreClient
    prefill: PrefillCost
    facts: Facts
    settings: EngineSettings
    chunk_bytes: int
    decode_s: Callable[[], float] = lambda: 0.0
    """Seconds of the steps in which others decode now."""

    def __post_init__(self) -> None:
        self.backlog = Backlog(self.prefill)
        self.loads = OwnLoads()
        self._chunk_tokens = self.facts.namespace.chunk_tokens
        self._copied = (0.0, 0.0)
        """Bytes of chunks copied from staging to the devices, and seconds per rank; fading."""
        self._prefetching: list[Ask] = []

    def copied(self, nbytes: int, seconds: float) -> None:
        """``nbytes`` of chunks came from staging to the devices in ``seconds``, the ranks' mean."""
        self._copied = (FADE * self._copied[0] + nbytes, FADE * self._copied[1] + seconds)

    def choose(self, ask: Ask, own_chunks: int) -> GateDecision:
        """How far to fetch, now that the engine wants the request and has ``own_chunks`` of it itself."""
        decision = self.decide(ask, own_chunks)
        ask.load_s = self.deadline_s(ask, decision)
        parts = _parts(decision)
        if ask.prefetch is not None:  # what is missing is on its way already
            copied_s = sum(parts.pop(tier, 0.0) for tier in _near(ask.prefetch, self._within_reach(ask, own_chunks)))
            parts = {DRAM: copied_s, **(parts if ask.prefetch.done() else {})}
            self.ended(ask)
        self._begin(ask, parts)
        # What it fetches or has will not be computed, but for the prompt's last token: nobody waits for that.
        self.backlog.computed(ask.request, min(decision.cut * self._chunk_tokens, ask.prompt_tokens - 1))
        return decision

    def prefetch(self, ask: Ask, room: int) -> None:
        """While the request waits, bring what it will probably fetch into DRAM, without holding it there.

        At most the ``room`` chunks for which staging has room.
        """
        for other in [other for other in self._prefetching if other.prefetch is None or other.prefetch.done()]:
            self._prefetching.remove(other)
            if other.cut_tokens is None:  # else it was chosen since, and its loads still count
                self.ended(other)
        if ask.cut_tokens is not None or len(self._prefetching) >= PREFETCHES:
            return
        decision, tiers = self.decide(ask, 0), ask.reply.result().tiers
        room -= sum(other.prefetched for other in self._prefetching)
        if not decision.fetches or decision.cut > room or set(tiers[: decision.cut]) <= {DRAM}:
            return
        self._begin(ask, {tier: seconds for tier, seconds in _parts(decision).items() if tier != DRAM})
        ask.prefetched = decision.cut
        ask.prefetch = self.client.load(ask.chain[: decision.cut], deadline_s=self.deadline_s(ask, decision))
        ask.prefetch.add_done_callback(lambda loaded: self.client.release(loaded.result()))
        self._prefetching.append(ask)

    def ended(self, ask: Ask) -> None:
        """Nothing more comes for the request, so others no longer wait behind it, unless a prefetch still goes on."""
        if ask.prefetch is not None and not ask.prefetch.done():
            return
        now = time.monotonic()
        for load in ask.under_way:
            self.loads.ended(load, now)
        ask.under_way.clear()

    def decide(self, ask: Ask, own_chunks: int) -> GateDecision:
        """The best choice now, of which nobody else is told; the engine has ``own_chunks`` of the prompt itself.

        The remote's cost says how many transfers are under way.
        """
        found, reached = ask.reply.result(), self._within_reach(ask, own_chunks)
        costs = self._costs(ask, reached)
        groups, remote, (nbytes, seconds) = self.facts.whole_groups, costs.get(REMOTE), self._copied
        copy_s = self.chunk_bytes * seconds / nbytes if nbytes else 0.0
        choice = partial(
            decide,
            found.tiers,
            computed_tokens=own_chunks * self._chunk_tokens,
            prompt_tokens=ask.prompt_tokens,
            chunk_tokens=self._chunk_tokens,
            chunk_bytes=self.chunk_bytes,
            fetch={tier: replace(cost, per_chunk_s=groups * cost.per_chunk_s) for tier, cost in costs.items()},
            prefill=self.prefill.each_s,
            settings=found.gate,
            backlog_s=self.backlog.seconds(ask.request),
            others=Others(self.backlog.others(ask.request), remote.transfers if remote else 0),
            put_off_s=(PUT_OFF + self.facts.ahead) * self.decode_s(),
            most=len(reached),
        )
        decision = choice(copy_s=copy_s)
        slower = not decision.fetches and any(one.reason is Reason.SLOWER for one in decision.candidates)
        if copy_s and slower and choice(copy_s=0.0).fetches:
            self._copied = nbytes, DECLINED * seconds
        return decision

    def deadline_s(self, ask: Ask, decision: GateDecision) -> float:
        """Seconds that the load may take: one of unknown cost has `load_deadline`, none less than its floor."""
        own, tuned = self.settings, ask.reply.result().gate
        return deadline_s(decision, tuned, unknown_s=own.load_deadline, floor_s=own.load_deadline_floor)

    def _begin(self, ask: Ask, parts: Mapping[str, float]) -> None:
        """Count loads from tiers, with predicted seconds."""
        now = time.monotonic()
        ask.under_way += [self.loads.began(tier, seconds, now) for tier, seconds in parts.items() if seconds]

    def _within_reach(self, ask: Ask, own_chunks: int) -> Sequence[str]:
        """The tiers of the leading chunks that have room, the engine's own first."""
        found = ask.reply.result()
        return found.tiers[: found.reach(own_chunks, self.facts.needs)]

    def _costs(self, ask: Ask, reached: Sequence[str]) -> Mapping[str, FetchEstimate]:
        """What a fetch costs now: behind other loads, but not behind the request's own prefetch."""
        told = ask.reply.result().costs
        if ask.prefetch is None:
            return self.loads.behind(told, ask.sent_at, time.monotonic())
        near = _near(ask.prefetch, reached)  # tiers whose chunks were all prefetched cost what DRAM costs
        return {tier: told.get(DRAM, cost) if tier in near else cost for tier, cost in told.items()}


def _behind(cost: FetchEstimate, own: Sequence[OwnLoad], told_at: float, now: float) -> FetchEstimate:
    told_s = max(0.0, cost.queue_s - (now - told_at))
    queue_s = max(told_s, own[-1].ends_at - now if own else 0.0)
    transfers = ceil(cost.transfers * told_s / cost.queue_s) if told_s else 0
    return replace(cost, queue_s=queue_s, transfers=max(transfers, len(own)))


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
