"""Metrics of an engine on vLLM's own `/metrics`, beside the store's. Imports no vLLM; runs on the scheduler thread.

`docs/engine-metrics.md` says what to know about them.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import isfinite
from typing import NamedTuple

from tiertune_connector.catalogue import OTHER, Kind, Metric
from tiertune_connector.cost import Reason
from tiertune_connector.protocol.messages import TierReport
from tiertune_connector.protocol.reporting import gained_s
from tiertune_connector.tuning import TIERS

Labels = tuple[str, ...]
Key = tuple[str, Labels]
"""A metric's name, and its labels."""
RESULTS = ("stored", "present", "busy", "full", "over_quota", "bypassed", "unreachable", "late", "failed")
"""What became of chunks that vLLM finished: taken by the store, there already, or why not."""
NONE = "none"
"""Tier label of chunks that are in no tier."""


def _metric(kind: Kind, name: str, text: str, *labels: str) -> Metric:
    return Metric(f"engine_{name}", kind, text, labels)


METRICS = (
    _metric("counter", "lookup_tokens_total", "Prompt tokens asked of the store, by tier found.", "tier", "result"),
    _metric("counter", "late_lookups_total", "Lookups that the store did not answer in time."),
    _metric("counter", "gate_requests_total", "Requests that found chunks in the tier.", "tier", "decision", "reason"),
    _metric("counter", "loads_total", "Fetches that the gate chose, by what became of them.", "tier", "outcome"),
    _metric("counter", "load_seconds_total", "Seconds that these fetches took.", "tier"),
    _metric("counter", "fetched_tokens_total", "Tokens of chunks that loads began to fetch, failed ones too.", "tier"),
    _metric("counter", "saved_seconds_total", "Predicted recompute seconds less the fetch's, where positive.", "tier"),
    _metric("counter", "lost_seconds_total", "Fetch seconds less predicted recompute's, where positive.", "tier"),
    _metric("counter", "stored_chunks_total", "Chunks that vLLM finished, by what the store did.", "result"),
    _metric("gauge", "store_connected", "1 while the store is there."),
    _metric("counter", "telemetry_seconds_total", "Seconds of the scheduler thread spent on measuring and counting."),
    _metric("counter", "traces_total", "Requests traced: spans exported, or dropped.", "result"),
)
CONNECTED: Key = ("engine_store_connected", ())
"""The only gauge."""
BY_NAME = {metric.name: metric for metric in METRICS}
_VALUES: dict[str, frozenset[str]] = {
    "tier": frozenset((*TIERS, NONE)),
    "reason": frozenset(Reason),
    "result": frozenset((*RESULTS, "hit", "miss", "exported", "dropped")),
}
"""Allowed values of labels that come from elsewhere: any other value is counted as OTHER."""


class Change(NamedTuple):
    """A counter's increase, or a gauge's new value."""

    metric: Metric
    labels: Labels
    value: float


class EngineStats:
    """Plain counting. vLLM takes the changes step by step; ``totals`` stay, even if what was taken gets lost."""

    def __init__(self, chunk_tokens: int) -> None:
        self.totals: dict[Key, float] = {}
        """By name and label values, since the start."""
        self._chunk_tokens = chunk_tokens
        self._increases: dict[Key, float] = {}
        self._told: float | None = None
        """What was taken last of the gauge `store_connected`."""

    def looked_up(self, tiers: Sequence[str], chunks: int, *, late: bool = False) -> None:
        """A lookup of ``chunks`` is over; ``tiers`` are those of the leading chunks that were found."""
        for tier in dict.fromkeys(tiers):
            self._add("engine_lookup_tokens_total", (tier, "hit"), tiers.count(tier) * self._chunk_tokens)
        missed = max(0, chunks - len(tiers))
        self._add("engine_lookup_tokens_total", (NONE, "miss"), missed * self._chunk_tokens)
        self._add("engine_late_lookups_total", (), late)

    def gated(self, reports: Iterable[TierReport]) -> None:
        """Count what is reported to the store, once per request: what the gate decided and what came of it."""
        for report in reports:
            tier = (report.tier,)
            decision = "fetch" if report.fetched_tokens else "recompute"
            self._add("engine_gate_requests_total", (report.tier, decision, report.reason))
            if report.actual_s is None:  # nothing was fetched: refused, or chosen and not begun
                continue
            self._add("engine_loads_total", (report.tier, report.outcome))
            self._add("engine_fetched_tokens_total", tier, report.fetched_tokens)
            self._add("engine_load_seconds_total", tier, report.actual_s or 0.0)
            gain_s = gained_s(report) or 0.0
            self._add(f"engine_{'saved' if gain_s > 0 else 'lost'}_seconds_total", tier, abs(gain_s))

    def stored(self, result: str, chunks: int = 1) -> None:
        """``result``: one of RESULTS."""
        self._add("engine_stored_chunks_total", (result,), chunks)

    def connected(self, on: bool) -> None:
        self.totals[CONNECTED] = float(on)

    def counted(self, name: str, labels: Labels, total: float) -> None:
        """Something else has counted ``total`` since the start."""
        self._add(name, labels, total - self.totals.get((name, labels), 0.0))

    def take(self) -> list[Change]:
        """What changed since the last call; includes the gauge whenever anything changed."""
        connected = self.totals.get(CONNECTED)
        if not self._increases and connected == self._told:
            return []
        taken = self._increases | ({} if connected is None else {CONNECTED: connected})
        self._increases, self._told = {}, connected
        return [Change(BY_NAME[name], labels, value) for (name, labels), value in taken.items()]

    def _add(self, name: str, labels: Labels, value: float = 1.0) -> None:
        """Count only positive finite values: vLLM's API server ends on anything else."""
        if not (value > 0 and isfinite(value)):
            return
        key = _key(name, labels)
        self.totals[key] = self.totals.get(key, 0.0) + value
        self._increases[key] = self._increases.get(key, 0.0) + value


@lru_cache(maxsize=1024)
def _key(name: str, labels: Labels) -> Key:
    allowed = (_VALUES.get(label) for label in BY_NAME[name].labels)
    bounded = (
        str(value) if values is None or value in values else OTHER
        for value, values in zip(labels, allowed, strict=True)
    )
    return name, tuple(bounded)
