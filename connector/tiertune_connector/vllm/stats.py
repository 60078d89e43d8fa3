"""Metrics of an engine on vLLM's own `/metrics`, beside the store's. Imports no vLLM; runs on the scheduler thread.

`docs/engine-metrics.md` says what to know about them.
"""

from collections.abc import Iterable, Sequence
from math import isfinite

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
    _metric("counter", "fetched_tokens_total", "Tokens of chunks that loads began to fetch, failed ones too.", "tier"),
    _metric("counter", "saved_seconds_total", "Predicted recompute seconds less the fetch's, where positive.", "tier"),
    _metric("counter", "lost_seconds_total", "Fetch seconds less predicted recompute's, where positive.", "tier"),
    _metric("counter", "stored_chunks_total", "Chunks that vLLM finished, by what the store did.", "result"),
    _metric("gauge", "store_connected", "1 while the store is there."),
)
CONNECTED: Key = ("engine_store_connected", ())
"""The only gauge."""
_WORDS = frozenset(
    (*TIERS, NONE, *RESULTS, *Reason, "hit", "miss", "fetch", "recompute", "won", "lost", "late", "failed", "unknown")
)
"""Values of labels; a store of another version may say others, which are counted as OTHER."""


class EngineStats:
    """Plain counting of what vLLM takes step by step."""

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._increases: dict[Key, float] = {}
        self._told: bool | None = None
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
            gain_s = gained_s(report) or 0.0
            self._add(f"engine_{'saved' if gain_s > 0 else 'lost'}_seconds_total", tier, abs(gain_s))

    def stored(self, result: str, chunks: int = 1) -> None:
        """``result``: one of RESULTS."""
        self._add("engine_stored_chunks_total", (result,), chunks)

    def take(self, *, connected: bool) -> dict[Key, float]:
        """What was counted since the last call, and the gauge: all of it if any of it changed, else nothing."""
        if not self._increases and connected == self._told:
            return {}
        taken = {**self._increases, CONNECTED: float(connected)}
        self._increases, self._told = {}, connected
        return taken

    def _add(self, name: str, labels: Labels, value: float = 1.0) -> None:
        """Count only positive finite values: vLLM's API server ends on anything else."""
        if not (value > 0 and isfinite(value)):
            return
        key = name, tuple(label if label in _WORDS else OTHER for label in labels)
        self._increases[key] = self._increases.get(key, 0.0) + value
