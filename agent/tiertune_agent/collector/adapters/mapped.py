"""What every adapter returns: rows with the names of a store's metrics, as far as they are known. Pure."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tiertune_agent.collector.counters import SOMEWHERE, Rows
from tiertune_agent.fields import JsonDict
from tiertune_agent.records import added_up

STAGE = "all"
CHUNKS = "observed_chunks_total"
PREFILL_S, PREFILL_TOKENS = "observed_prefill_seconds_total", "observed_prefill_tokens_total"
WAIT_S, LOADED_TOKENS = "observed_wait_seconds_total", "observed_loaded_tokens_total"
MOST = 2.0**63
"""Limit of whole numbers in a database."""
REASONS = 16
"""Number of reasons for failures that are told apart."""
_WORD = re.compile(r"[A-Za-z0-9_]{1,40}")


@dataclass
class Mapped:
    """Rows as in a store's reading. What is not reported has none: only a reported zero is a zero."""

    rows: Rows = field(default_factory=dict)
    tiers: dict[str, str] = field(default_factory=dict)
    """The source's tiers, with its own names for them."""
    models: tuple[str, ...] = ()
    unknown: list[str] = field(default_factory=list)
    """What is not reported, in words for people."""

    def put(self, name: str, value: float | None, **labels: str) -> None:
        """Add a row, unless the value is None or cannot be a count, such as an unsigned gauge that fell below 0."""
        if value is not None and 0 <= value < MOST:
            self.rows[name, tuple(labels.items())] = float(value)

    def found(self, tier: str, hit: float | None, asked: float | None, origin: str = "unknown") -> None:
        """Add tokens that a tier was asked for, and those that it had; both must be counted at the same events."""
        name = "tier_lookup_tokens_total"
        self.put(name, hit, tier=tier, result="hit", origin=origin, stage=STAGE)
        if hit is not None and asked is not None:
            self.put(name, asked - hit, tier=tier, result="miss", origin="", stage=STAGE)

    def found_somewhere(self, hit: float | None) -> None:
        """Add tokens that were found in some tier."""
        if hit:
            self.tiers[SOMEWHERE] = "hits that are not told by tier"
            self.found(SOMEWHERE, hit, None)

    def moved(self, tier: str, read: float | None, written: float | None) -> None:
        """Add bytes read and written."""
        self.put("tier_transfer_bytes_total", read, tier=tier, operation="read")
        self.put("tier_transfer_bytes_total", written, tier=tier, operation="write")

    def chunks(self, tier: str, *, tried: float | None, written: float | None, read: float | None) -> None:
        """Add chunks, in place of unknown bytes: those that were to be stored, those that were, and those loaded."""
        for operation, value in (("try", tried), ("write", written), ("read", read)):
            self.put(CHUNKS, value, tier=tier, operation=operation)

    def failures(self, tier: str, operation: str, counts: Mapping[str, float]) -> None:
        """Add failures by the source's reasons; one that is no plain word, or one too many, counts as ``other``."""
        words = [reason for reason in sorted(counts) if _WORD.fullmatch(reason)][:REASONS]
        told = added_up((reason if reason in words else "other", count) for reason, count in counts.items())
        for reason, count in told.items():
            self.failed(tier, operation, reason, count)

    def failed(self, tier: str, operation: str, reason: str, count: float | None) -> None:
        self.put("tier_errors_total", count, tier=tier, operation=operation, reason=reason)

    def waited(self, seconds: float | None, tokens: float | None) -> None:
        """Add seconds that requests waited for chunks, and the tokens of these."""
        if seconds is not None and tokens is not None:
            self.put("stage_gpu_seconds_total", seconds, stage=STAGE, phase="kv_wait")
            self.put("stage_tokens_total", tokens, stage=STAGE, phase="kv_wait")
            self.put(WAIT_S, seconds)
            self.put(LOADED_TOKENS, tokens)

    def state(self) -> JsonDict:
        """Each tier as in a store's status. Whether it is healthy is unknown."""
        return {
            tier: {
                "health": "observed",
                "reason": own,
                "resident_bytes": self._row("tier_resident_bytes", tier=tier),
                "capacity_bytes": self._row("tier_capacity_bytes", tier=tier, state="effective"),
            }
            for tier, own in self.tiers.items()
        }

    def _row(self, name: str, **labels: str) -> float | None:
        value = self.rows.get((name, tuple(labels.items())))
        return value if isinstance(value, float) else None


@dataclass(frozen=True)
class Hints:
    """What a source does not report, but its operator may know; None or empty: unknown."""

    chunk_bytes: int | None = None
    tier: str = ""


def times(chunks: float | None, hints: Hints) -> float | None:
    """Bytes of so many chunks; None if unknown."""
    return None if chunks is None or hints.chunk_bytes is None else chunks * hints.chunk_bytes


def one_tier(tiers: Iterable[str]) -> str:
    """The one tier that all of these are; empty: there is none, or they are several."""
    found = set(tiers)
    return found.pop() if len(found) == 1 else ""
