"""The gate as an engine uses it: its own prefill cost against the store's fetch costs. Imports no vLLM."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil

from msgspec.structs import replace

from tiertune_connector.cost import FetchEstimate, GateDecision, GateSettings, Others, PrefillCost, deadline_s, decide
from tiertune_connector.cost.gate import MANY, REMOTE
from tiertune_connector.vllm.facts import Facts
from tiertune_connector.vllm.settings import EngineSettings

FADE = 0.9
"""Weight that earlier copies keep with each new one."""
DECLINED = 0.99
"""Factor on the copies' seconds at each decision to fetch nothing: else one slow copy would be the last."""


@dataclass(slots=True, eq=False)
class OwnLoad:
    """A load that this engine began."""

    tier: str
    ends_at: float
    """Predicted end, behind the loads before it."""
    least_at: float
    """Earliest end, however soon those are over: as predicted without them."""


class EngineGate:
    """Decides one request, and says how long its load may take."""

    def __init__(self, prefill: PrefillCost, facts: Facts, settings: EngineSettings, *, chunk_bytes: int) -> None:
        """``chunk_bytes`` of a prompt's chunk: one of the store's for each of the engine's `whole_groups`."""
        self._prefill = prefill
        self._chunk_tokens = facts.namespace.chunk_tokens
        self._chunk_bytes = chunk_bytes
        self._groups = facts.whole_groups
        self._settings = settings
        self._loads: dict[str, deque[OwnLoad]] = {}
        """By tier, in order."""
        self._copied = (0.0, 0.0)
        """Bytes of chunks copied from staging to the devices, and seconds per rank; fading."""

    def copied(self, nbytes: int, seconds: float) -> None:
        """``nbytes`` of chunks came from staging to the devices in ``seconds``, the ranks' mean."""
        self._copied = (FADE * self._copied[0] + nbytes, FADE * self._copied[1] + seconds)

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

    def choose(
        self,
        tiers: Sequence[str],
        *,
        computed_tokens: int,
        prompt_tokens: int,
        costs: Mapping[str, FetchEstimate],
        settings: Mapping[str, GateSettings],
        backlog_s: float = 0.0,
        prefills: int = 0,
        most: int = MANY,
    ) -> GateDecision:
        """Decide how many leading chunks of the prompt to have; ``tiers`` says where each is, from the prompt's head.

        Those within the first ``computed_tokens`` are on the device or in staging: their tiers do not matter.
        ``backlog_s`` is the prefill work ahead of the request; ``prefills`` counts the engine's other unfinished
        requests. The remote's cost says how many transfers are under way. There is room for ``most`` leading chunks.
        """
        remote = costs.get(REMOTE)
        nbytes, seconds = self._copied
        decision = decide(
            tiers,
            computed_tokens=computed_tokens,
            prompt_tokens=prompt_tokens,
            chunk_tokens=self._chunk_tokens,
            chunk_bytes=self._chunk_bytes,
            fetch={tier: replace(cost, per_chunk_s=self._groups * cost.per_chunk_s) for tier, cost in costs.items()},
            prefill=self._prefill.seconds,
            settings=settings,
            backlog_s=backlog_s,
            others=Others(prefills, remote.transfers if remote else 0),
            copy_s=self._chunk_bytes * seconds / nbytes if nbytes else 0.0,
            most=most,
        )
        if decision.candidates and not decision.fetches:
            self._copied = nbytes, DECLINED * seconds
        return decision

    def _under_way(self, tier: str, now: float) -> deque[OwnLoad]:
        """Own loads from a tier that have not ended yet, as far as is known."""
        loads = self._loads.setdefault(tier, deque())
        while loads and loads[0].ends_at <= now:
            loads.popleft()
        return loads

    def deadline_s(self, decision: GateDecision, settings: Mapping[str, GateSettings]) -> float:
        """Seconds that the load may take: one of unknown cost has `load_deadline`, none less than its floor."""
        own = self._settings
        return deadline_s(decision, settings, unknown_s=own.load_deadline, floor_s=own.load_deadline_floor)


def _behind(cost: FetchEstimate, own: Sequence[OwnLoad], told_at: float, now: float) -> FetchEstimate:
    told_s = max(0.0, cost.queue_s - (now - told_at))
    queue_s = max(told_s, own[-1].ends_at - now if own else 0.0)
    transfers = ceil(cost.transfers * told_s / cost.queue_s) if told_s else 0
    transfers = max(transfers, len(own))
    if (queue_s, transfers) == (cost.queue_s, cost.transfers):
        return cost
    return replace(cost, queue_s=queue_s, transfers=transfers)
