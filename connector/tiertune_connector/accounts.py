"""What the store counts of lookups, gates, evictions and state: the numbers that dashboards and the agent read."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from tiertune_connector.chunk import writer_id
from tiertune_connector.counters import Counters
from tiertune_connector.lane import Lane
from tiertune_connector.serve.protocol import StepReport, TierReport
from tiertune_connector.serve.reporting import gained_s
from tiertune_connector.session import Found, Session
from tiertune_connector.tiers.breaker import STATES, Breakers
from tiertune_connector.tiers.disk import DiskTier
from tiertune_connector.tiers.dram import DramTier, Evicted

Gauge = tuple[str, tuple[str, ...], float]
LENGTHS = (0, 1024, 4096, 16384)
"""Classes of fetches by their tokens, each from so many on: short ones may lose where long ones pay."""


class Accounts:
    """Turns events of the store into metrics of the catalogue."""

    def __init__(self, counters: Counters, store: str, dram: DramTier) -> None:
        self.models: dict[str, str] = {}
        """Model name of each namespace seen."""
        self._counters = counters
        self._writer = writer_id(store)
        self._dram = dram

    def pool_labels(self, namespace: str) -> tuple[str, str]:
        return namespace, self.models.get(namespace, "")

    def prompt(self, session: Session, tokens: int, *, salted: bool = False) -> None:
        labels = self.pool_labels(session.digest)
        self._counters.add("prompt_tokens_total", (session.stage, *labels), tokens)
        self._counters.add("requests_total", ("yes" if salted else "no", *labels))

    def lookup(self, session: Session, found: Found, *, gpu_chunks: int | None = None, staging_chunks: int = 0) -> None:
        """Count hits and misses by tier; of the engine's own memory too if it told how many leading chunks it had.

        A chunk that a faster tier has is not asked of a slower one.
        """
        left = len(found.keys)
        for tier, chunks in () if gpu_chunks is None else (("gpu", gpu_chunks), ("staging", staging_chunks)):
            had = min(chunks, left)
            for result, count in (("hit", had), ("miss", left - had)):
                if count:
                    self._looked_up(session, tier, result, "self" if result == "hit" else "", count)
            left -= had
        first = len(found.keys) - left
        for tier in found.asked:
            origins: dict[str, int] = {}
            for key, where in zip(found.keys[first:], found.tiers[first:], strict=False):
                if where == tier:
                    origin = self._origin(session, tier, key)
                    origins[origin] = origins.get(origin, 0) + 1
            for origin, count in origins.items():
                self._looked_up(session, tier, "hit", origin, count)
                left -= count
            if left:
                self._looked_up(session, tier, "miss", "", left)

    def gate(self, tier: TierReport, chunk_bytes: int) -> None:
        """What a gate decided about one tier for one request, and what became of it."""
        add, observe, name = self._counters.add, self._counters.observe, (tier.tier,)
        decision = "fetch" if tier.fetched_tokens else "recompute"
        add("gate_requests_total", (tier.tier, decision, tier.reason))
        add("gate_outcomes_total", (tier.tier, tier.outcome))
        add("gate_candidate_requests_total", name)
        add("gate_candidate_tokens_total", name, tier.tokens)
        add("gate_candidate_bytes_total", name, tier.chunks * chunk_bytes)
        add("gate_fetched_tokens_total", name, tier.fetched_tokens)
        for kind, seconds in (("fetch", tier.fetch_s), ("recompute", tier.recompute_s)):
            if seconds is not None:
                add("gate_candidate_seconds_total", (tier.tier, kind), max(0.0, seconds))
                observe("gate_predicted_seconds", (tier.tier, kind), seconds)
        if tier.actual_s is None:
            return
        observe("gate_actual_seconds", (tier.tier, "fetch"), tier.actual_s)
        gain_s = gained_s(tier)
        if gain_s is not None:
            add("saved_seconds_total" if gain_s > 0 else "lost_seconds_total", name, abs(gain_s))
            length = str(max(least for least in LENGTHS if least <= tier.fetched_tokens))
            add("gate_length_requests_total", (tier.tier, length))
            add("gate_length_seconds_total", (tier.tier, length, "saved" if gain_s > 0 else "lost"), abs(gain_s))

    def first_token(self, tier: str, group: str, seconds: float, tokens: float) -> None:
        """A request of a holdout, or of those beside it, had its first token after so long."""
        sums = {
            "requests": 1.0,
            "seconds": seconds,
            "tokens": tokens,
            "seconds2": seconds * seconds,
            "tokens2": tokens * tokens,
            "seconds_tokens": seconds * tokens,
        }
        for name, value in sums.items():
            self._counters.add("holdout_sums_total", (tier, group, name), value)

    def steps(self, steps: Sequence[StepReport]) -> None:
        for step in steps:
            self._counters.add("stage_gpu_seconds_total", (step.stage, step.phase), step.gpu_seconds)
            self._counters.add("stage_tokens_total", (step.stage, step.phase), step.tokens)

    def over_quota(self, namespace: str) -> None:
        """A chunk was not taken because its tenant's quota is full; of whom is not told here."""
        self._counters.add("quota_refused_chunks_total", self.pool_labels(namespace))

    def evicted(self, tier: str, chunks: Sequence[Evicted], now: float) -> None:
        for chunk in chunks:
            labels = self.pool_labels(chunk.namespace)
            self._counters.add("tier_evictions_total", (tier, chunk.algorithm, chunk.reason, *labels))
            if not chunk.used:
                self._counters.add("tier_evicted_unused_total", (tier, *labels))
            if chunk.used_at is not None and chunk.reason == "room":
                self._counters.observe("tier_evicted_idle_seconds", (tier, *labels), max(0.0, now - chunk.used_at))

    def _looked_up(self, session: Session, tier: str, result: str, origin: str, chunks: int) -> None:
        labels = (tier, result, origin, session.stage, *self.pool_labels(session.digest))
        self._counters.add("tier_lookup_tokens_total", labels, chunks * session.chunk_tokens)

    def _origin(self, session: Session, tier: str, key: bytes) -> str:
        pool = self._dram.pools.get(session.digest)
        slot = pool.pool.get(key) if pool and tier == "dram" else None
        if slot is None:
            # What this host wrote to the remote and lost again is rare; it is not told apart.
            return "other_host" if tier == "remote" else "same_host"
        if slot.origin.writer != self._writer:
            return "other_host"
        return "self" if slot.engine == session.engine else "same_host"


def tier_gauges(lanes: Mapping[str, Lane], health: Callable[[str], tuple[str, str]]) -> Iterator[Gauge]:
    """Health of every tier, and of each server where one has several; queues of the slower ones."""
    for tier in ("dram", *lanes):
        now, _ = health(tier)
        yield from (("tier_health", (tier, state), float(state == now)) for state in STATES)
    for name, lane in lanes.items():
        yield "write_behind_queued", (name,), lane.queued()
        for server, breaker in lane.breaker.servers.items() if isinstance(lane.breaker, Breakers) else ():
            yield from (
                ("tier_server_health", (name, server, state), float(state == breaker.state)) for state in STATES
            )


def pool_gauges(accounts: Accounts, dram: DramTier, disk: DiskTier | None) -> Iterator[Gauge]:
    """Bytes held, pinned and allowed of every local pool."""
    for digest, pool in dram.pools.items():
        labels = accounts.pool_labels(digest)
        effective = min(pool.allowed, pool.provisioned) * pool.stride
        yield "tier_resident_bytes", ("dram", *labels), len(pool.pool) * pool.stride
        yield "tier_pinned_bytes", ("dram", *labels), pool.pool.pinned * pool.stride
        yield "tier_capacity_bytes", ("dram", "desired", *labels), pool.allowed * pool.stride
        yield "tier_capacity_bytes", ("dram", "effective", *labels), effective
    for digest, slab in (disk.slabs if disk else {}).items():
        labels = accounts.pool_labels(digest)
        yield "tier_resident_bytes", ("disk", *labels), len(slab.pool) * slab.slot_bytes
        yield "tier_pinned_bytes", ("disk", *labels), slab.pool.pinned * slab.slot_bytes
        yield "tier_capacity_bytes", ("disk", "effective", *labels), slab.pool.capacity * slab.slot_bytes
    yield "quarantined_slots", (), float(sum(len(pool.quarantined) for pool in dram.pools.values()))
