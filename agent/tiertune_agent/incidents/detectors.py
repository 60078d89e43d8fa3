"""What is wrong with a store although it answers: pure detectors over its state, its windows and its decisions."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from math import inf
from operator import itemgetter
from typing import Any

from tiertune_agent.collector.adapters.mapped import CHUNKS
from tiertune_agent.fields import capacity_field, in_force, read
from tiertune_agent.records import (
    CHANGED,
    OBSERVED,
    STANDING,
    Decision,
    Histogram,
    Snapshot,
    State,
    Window,
    Windows,
    covered_s,
    direction,
    grouped,
    sum_known,
    total,
)
from tiertune_agent.tuners.base import pools, present, served
from tiertune_connector.catalogue import BY_NAME
from tiertune_connector.tuning import SLOWER, TIERS
from tiertune_connector.units import format_count, format_duration, format_size

OBSERVED_S = 600.0
"""Fewer seconds of windows prove nothing about a tier."""
FEW = 20
"""Requests or chunks: no incident, nor a finding of the doctor's, rests on fewer."""
GRACE = timedelta(minutes=2)
"""Effective values and engines follow a change within this time."""
GROWS_BY = 1 << 30
"""Bytes a second, at least, by which memory is provisioned in the background."""
PROBE_BYTES = 256 << 10
"""Most bytes that one probe of a store writes, and reads twice: no request asked for them."""
OFF_BY = 0.1
"""Share by which an effective capacity may differ: slots are whole chunks, segments are shared among pools."""
YOUNG_S = 30.0
"""Chunks that left within this time of their last use were in use: a chat's next turn takes about a minute."""
AGAIN = 0.1
"""Least share of prompt tokens found in tiers below that proves that what left was wanted back."""
TURNS = 3
"""Reversals of one field, in the hours looked at, that count as thrashing."""
READ = frozenset(
    {
        *("prompt_tokens_total", "requests_total", "tier_lookup_tokens_total", "tier_transfer_bytes_total"),
        *("tier_evictions_total", "tier_evicted_idle_seconds", "gate_candidate_requests_total"),
        *("gate_candidate_tokens_total", "gate_requests_total", "gate_fetched_tokens_total", "probes_total"),
        *(OBSERVED, CHUNKS),
    }
)
"""Metrics that detectors read from windows."""


@dataclass(frozen=True)
class Sight:
    """All that is known of one store: ``windows`` of the last hour, ``decisions`` of the last hours, oldest first."""

    snapshot: Snapshot
    windows: Windows
    decisions: Sequence[Decision]
    now: datetime
    emptied: Collection[tuple[str, str]] = ()
    """Stores and fields of their capacities that a decision set to zero."""
    served: bool = False
    """Whether another store found chunks in the remote in the last hour: it reads what this one writes."""

    def of(self, tier: str) -> list[Window]:
        return [window for window in self.windows if window.tier == tier]


def incidents(sight: Sight) -> dict[str, str]:
    """A message with figures for each kind; empty if nothing is wrong: such an incident is over."""
    return {kind: "; ".join(detector(sight)) for kind, detector in DETECTORS.items()}


def unused_tiers(sight: Sight) -> Iterator[str]:
    """Tiers that cost and never serve: written but not read, without capacity, behind a threshold that none passes."""
    found = sum(total(sight.of(tier), "tier_lookup_tokens_total", result="hit") for tier in SLOWER)
    serves = {"remote": sight.served, "dram": sight.served or found > 0}  # to slower tiers and back it is through DRAM
    for tier in TIERS:
        if present(sight.snapshot.status, tier):
            field, here = capacity_field(tier), [] if serves.get(tier) else sight.of(tier)
            if (sight.snapshot.store, field) not in sight.emptied:
                yield from without_capacity(tier, read(sight.snapshot.tuning, field))
            off = tier == "remote" and read(sight.snapshot.tuning, "tiers.remote.fetch") == "off"
            yield from (f"{told}, fetch is off" if off else told for told in never_read(tier, here))
    yield from _never_long_enough(sight)


def without_capacity(tier: str, capacity: Any) -> Iterator[str]:  # noqa: ANN401 (JSON)
    if capacity == 0:
        yield f"{tier} is configured, but its capacity is 0"


def never_read(tier: str, windows: Windows) -> Iterator[str]:
    """A message if the tier is written or evicts, and nothing is read from it, as far as that is reported."""
    seconds, probed = covered_s(windows), PROBE_BYTES * total(windows, "probes_total")
    hits = known(windows, "tier_lookup_tokens_total", result="hit")
    loaded = known(windows, "tier_transfer_bytes_total", operation="read")
    gave = known(windows, CHUNKS, operation="read")
    unknown = hits is loaded is gave is None
    if seconds < OBSERVED_S or unknown or hits or gave or (loaded or 0.0) > 2 * probed:
        return
    written = total(windows, "tier_transfer_bytes_total", operation="write")
    stored, went = total(windows, CHUNKS, operation="write"), total(windows, "tier_evictions_total")
    if written > probed or max(stored, went) >= FEW:
        chunks = f"{stored:.0f} chunks were written" if stored else f"{went:.0f} chunks were evicted"
        told = f"{format_size(written)} were written" if written else chunks
        yield f"{tier} is dead weight: {told} in {format_duration(seconds)}, nothing was read"


def known(windows: Windows, name: str, **labels: str) -> float | None:
    """The sum of what is known; None if nothing is."""
    return sum_known(window.known(name, **labels) for window in windows)


def _never_long_enough(sight: Sight) -> Iterator[str]:
    here = sight.of("remote")
    found = total(here, "gate_candidate_requests_total")
    short = total(here, "gate_requests_total", reason="too_short")
    if found < FEW or short < found:
        return
    tokens = total(here, "gate_candidate_tokens_total") / found
    floor = read(sight.snapshot.tuning, "tiers.remote.min_fetch_tokens")
    within = format_duration(covered_s(here))
    yield (
        f"remote is dead weight: all {found:.0f} requests that found chunks there in {within} were under "
        f"min_fetch_tokens, {floor}; they found {tokens:,.0f} tokens on average"
    )


def vain_knobs(sight: Sight) -> Iterator[str]:
    """Decisions that a store accepted, but does not follow."""
    told = [one for one in sight.decisions if one.state != State.FAILED or _vain(one)]  # others changed nothing
    last = {decision.field: decision for decision in told}
    for decision in last.values():
        follows = in_force(sight.snapshot.tuning, decision.field) == decision.after
        if decision.state == State.FAILED and not follows:
            yield f"decision {decision.id}: {decision.reason}"
        stands = decision.state in STANDING and follows
        if stands and decision.made_at + GRACE <= sight.now:
            yield from _unfollowed(sight, decision)


def _vain(failed: Decision) -> bool:
    """Whether the store accepted it without effect; of a split, the part: what else it set was set back."""
    part = f"{failed.target}: " if failed.evidence.get("split") else ""
    return f"{part}accepted without effect" in failed.reason


def _unfollowed(sight: Sight, decision: Decision) -> Iterator[str]:
    target, status, knob = decision.target, sight.snapshot.status, decision.field.rpartition(".")[2]
    told = f"decision {decision.id} set {decision.field} to {decision.after}"
    if knob == "eviction":
        found = read(status, f"pools.{target.namespace}.{target.tier}.effective.eviction")
        if found not in (None, decision.after):
            yield f"{told}, the pool still runs {found}"
    elif knob == "capacity_bytes":
        mine = {
            digest: pool
            for digest, pool in pools(status).items()
            if target.namespace in ("", digest) and target.tier in pool
        }
        sizes = [read(pool, f"{target.tier}.effective.capacity_bytes") or 0 for pool in mine.values()]
        allowed = OFF_BY * decision.after + sum(pool.get("chunk_bytes") or 0 for pool in mine.values())
        over = sum(sizes) - decision.after
        asked = not mine.keys().isdisjoint(served(status))  # pools that a restart found may have what they hold
        since_s = min((sight.now - decision.made_at).total_seconds(), status.get("uptime_s") or inf)  # or a restart
        grown = since_s >= GRACE.total_seconds() + decision.after / GROWS_BY
        if sizes and (over > allowed or (over < -allowed and asked and grown)):
            yield f"{told} bytes, effective are {format_size(sum(sizes))}"
    elif decision.field == "tiers.remote.fetch" and decision.after == "off":
        later = [window for window in sight.of("remote") if window.start >= decision.made_at + GRACE]
        fetched = total(later, "gate_fetched_tokens_total")
        if fetched:
            yield f"{told}, yet {fetched:,.0f} tokens were fetched since"


def thrash(sight: Sight) -> Iterator[str]:
    """Chunks that leave and are wanted back at once; fields that go back and forth."""
    for of_pool in grouped(sight.windows, lambda window: window.namespace).values():
        for tier, below in (("dram", ("disk", "remote")), ("disk", ("remote",))):
            yield from _young_and_wanted(tier, below, of_pool)
    made = [decision for decision in sight.decisions if decision.state in CHANGED]
    for field, mine in grouped(made, lambda decision: decision.field).items():
        turns = sum(one != other for one, other in pairwise(_ways(mine)))
        if turns >= TURNS:
            yield f"{field} went back and forth {turns} times in {len(mine)} decisions"


def _ways(made: Iterable[Decision]) -> list[object]:
    """Directions in which they moved their field, by time: each there, and back if it was rolled back."""
    moves = []
    for one in made:
        moves.append((one.made_at, direction(one.before, one.after)))
        if one.state == State.ROLLED_BACK:
            moves.append((one.updated_at, direction(one.after, one.before)))
    return [way for _, way in sorted(moves, key=itemgetter(0))]


def _young_and_wanted(tier: str, below: Collection[str], windows: Windows) -> Iterator[str]:
    """``windows``: of one namespace, as what one model wants says nothing of what left another's pool."""
    here = [window for window in windows if window.tier == tier]
    evicted = total(here, "tier_evictions_total")
    idle = median(here, "tier_evicted_idle_seconds")
    prompts = sum(window.before_decode("prompt_tokens_total") for window in windows)  # decode is handed what it finds
    lower = [window for window in windows if window.tier in below]
    again = sum(window.before_decode("tier_lookup_tokens_total", result="hit") for window in lower)
    if evicted >= FEW and idle is not None and idle <= YOUNG_S and prompts and again >= AGAIN * prompts:
        yield (
            f"{tier} thrashes: {evicted:.0f} chunks of {here[0].model} were evicted in "
            f"{format_duration(covered_s(here))}, half of them within {format_duration(idle)} of their last use, and "
            f"{again / prompts:.0%} of its prompt tokens were found in tiers below"
        )


def median(windows: Iterable[Window], name: str) -> float | None:
    """The upper bound of the bucket that holds the middle observation of a histogram; None without observations."""
    counts = Histogram.added([value for window in windows for value in window.histograms(name)]).buckets
    half, bounds, seen = sum(counts.values()) / 2, BY_NAME[name].buckets, 0.0
    for index in sorted(counts):
        seen += counts[index]
        if seen >= half > 0:
            return bounds[min(index, len(bounds) - 1)]
    return None


def unsalted(sight: Sight) -> Iterator[str]:
    bare, salted = (total(sight.windows, "requests_total", salted=text) for text in ("no", "yes"))
    yield from among_tenants(bare, salted, len(sight.snapshot.tuning.get("tenants") or {}))


def among_tenants(bare: float, salted: float, quotas: int) -> Iterator[str]:
    """Requests without a salt among those of tenants: anybody can find their chunks, and no quota pays for them.

    There are tenants if one has a quota, or if others carry salts; in that case a few without a salt prove nothing.
    If engines require a salt, their store never sees requests without one.
    """
    if bare and (quotas or (salted and bare >= FEW)):
        others = f"quotas are set for {format_count(quotas, 'tenant')}" if quotas else "the others carry one"
        yield f"{bare:.0f} of {format_count(bare + salted, 'request')} had no salt, while {others}"


DETECTORS: Mapping[str, Callable[[Sight], Iterator[str]]] = {
    "tier_unused": unused_tiers,
    "knob_without_effect": vain_knobs,
    "thrash": thrash,
    "unsalted_traffic": unsalted,
}
