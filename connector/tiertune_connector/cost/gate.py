"""Fetch or recompute, per request: the cut of leading chunks with the lowest predicted time.

Recomputing a prefix gets dearer with its length faster than fetching it, so within a run of chunks in one tier the
time saved is convex in the cut: only nothing and the ends of runs can be best. (A backlog that part of a run's fetch
would fit into breaks this; the ends of runs are then still safe.)
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import NamedTuple, Protocol

import msgspec

REMOTE = "remote"


class Reason(StrEnum):
    """Why the chunks of a tier were fetched or not."""

    NO_HIT = "no_hit"
    CHEAPER = "cheaper"
    SLOWER = "slower"
    TOO_SHORT = "too_short"
    OFF = "off"
    UNKNOWN_COST = "unknown_cost"


class Estimate(Protocol):
    """What a fetch costs."""

    def seconds(self, chunks: int, nbytes: int) -> float: ...


class GateSettings(msgspec.Struct, frozen=True):
    """Bounds that the tuning sets for one tier."""

    fetch_on: bool = True
    margin: float = 1.0
    """A fetch must be predicted this many times cheaper than recomputing."""
    min_fetch_tokens: int = 0
    """Fewer tokens than this are not worth a fetch from the tier."""
    deadline_factor: float = 1.5
    """A load may take this many times its prediction."""


@dataclass(frozen=True)
class Candidate:
    """What one tier offers a request: chunks that lie there and are not computed yet, whatever is decided."""

    tier: str
    chunks: int
    fetched: int
    """How many of the chunks the decision fetches."""
    reason: Reason
    fetch_s: float | None
    """Predicted seconds of fetching all its chunks; None: unknown."""
    recompute_s: float | None
    """Predicted seconds of recomputing them, and of the backlog that a fetch overlaps; None: unknown."""


@dataclass(frozen=True)
class Decision:
    """``cut`` leading chunks of the prompt come from tiers or are computed already; the rest is recomputed.

    ``tier`` is the last tier fetched from (where none is: the last one that offered). The seconds are those of the
    chunks fetched (where none is: of all that were offered).
    """

    cut: int
    tier: str
    reason: Reason
    fetch_s: float | None
    recompute_s: float | None
    candidates: tuple[Candidate, ...] = ()

    @property
    def fetches(self) -> bool:
        return any(candidate.fetched for candidate in self.candidates)


class Outcome(NamedTuple):
    """What became of a fetch: ``kind`` is won or lost, with the seconds saved or lost."""

    kind: str
    saved_s: float
    lost_s: float


def outcome(decision: Decision | Candidate, actual_s: float) -> Outcome:
    """Judge a fetch that took ``actual_s`` against the predicted recompute (an unknown one saves nothing)."""
    gain = (decision.recompute_s or 0.0) - actual_s
    return Outcome("won", gain, 0.0) if gain > 0 else Outcome("lost", 0.0, -gain)


def decide(
    tiers: Sequence[str],
    *,
    computed_tokens: int,
    prompt_tokens: int,
    chunk_tokens: int,
    chunk_bytes: int,
    fetch: Mapping[str, Estimate | None],
    prefill: Callable[[int, int], float | None],
    settings: Mapping[str, GateSettings],
    backlog_s: float = 0.0,
) -> Decision:
    """Choose how many leading chunks to have; ``tiers[i]`` holds chunk i of the prompt, from its head, gaplessly.

    The first ``computed_tokens`` have KV on the GPU already and cost nothing. ``prefill(h, n)`` predicts the seconds of
    computing tokens h to n of the prompt, without backlog; a fetch overlaps ``backlog_s``. A tier that ``fetch`` or
    ``settings`` does not name has an unknown cost, or the default settings. Where a cost is unknown, local chunks are
    fetched and remote ones are not.
    """
    first = computed_tokens // chunk_tokens
    request = _Request(computed_tokens, prompt_tokens, chunk_tokens, chunk_bytes, fetch, prefill, settings, backlog_s)
    runs = _runs(tiers, first)
    best, counts, gained = first, dict[str, int](), 0.0
    for tier, start, end in runs:
        if request.refusal(tier) is not None:
            break
        counts[tier] = counts.get(tier, 0) + end - start
        if any(request.too_short(name, count) for name, count in counts.items()):
            continue
        gain = request.gain(first, end, counts)
        if gain is None or gain > gained:
            best, gained = end, gain or gained
    return _decision(request, runs, first, best)


Run = tuple[str, int, int]
"""A tier, and the first and the end of a run of chunks in it."""


def _runs(tiers: Sequence[str], first: int) -> list[Run]:
    runs, end = [], first
    for tier, chunks in groupby(tiers[first:]):
        start, end = end, end + sum(1 for _ in chunks)
        runs.append((tier, start, end))
    return runs


class _Request(NamedTuple):
    """One request's costs, as given to ``decide``."""

    computed: int
    prompt: int
    chunk_tokens: int
    chunk_bytes: int
    fetch: Mapping[str, Estimate | None]
    prefill: Callable[[int, int], float | None]
    settings: Mapping[str, GateSettings]
    backlog_s: float

    def bounds(self, tier: str) -> GateSettings:
        return self.settings.get(tier, _DEFAULT)

    def refusal(self, tier: str) -> Reason | None:
        """Why no chunk of the tier may be fetched."""
        if not self.bounds(tier).fetch_on:
            return Reason.OFF
        return Reason.UNKNOWN_COST if tier == REMOTE and self.unknown(tier) else None

    def unknown(self, tier: str) -> bool:
        return self.fetch.get(tier) is None or self.prefill_s(0) is None

    def too_short(self, tier: str, chunks: int) -> bool:
        return chunks * self.chunk_tokens < self.bounds(tier).min_fetch_tokens

    def prefill_s(self, cut: int) -> float | None:
        """Predicted prefill with ``cut`` leading chunks; at least the last token is always computed."""
        return self.prefill(min(max(self.computed, cut * self.chunk_tokens), self.prompt - 1), self.prompt)

    def recompute_s(self, start: int, end: int) -> float | None:
        """Predicted seconds that having chunks ``start`` to ``end`` takes off the prefill."""
        without, with_chunks = self.prefill_s(start), self.prefill_s(end)
        return None if without is None or with_chunks is None else without - with_chunks

    def fetch_s(self, tier: str, chunks: int) -> float | None:
        estimate = self.fetch.get(tier)
        return None if estimate is None else estimate.seconds(chunks, chunks * self.chunk_bytes)

    def gain(self, first: int, end: int, counts: Mapping[str, int]) -> float | None:
        """Predicted seconds saved by a cut at ``end``, fetches taken times their margins; None: unknown."""
        saved = self.recompute_s(first, end)
        if saved is None:
            return None
        fetched = sum(self.bounds(tier).margin * (self.fetch_s(tier, count) or 0.0) for tier, count in counts.items())
        return saved - max(0.0, fetched - self.backlog_s)


_DEFAULT = GateSettings()


def _decision(request: _Request, runs: Sequence[Run], first: int, cut: int) -> Decision:
    if not runs:
        return Decision(first, "", Reason.NO_HIT, 0.0, 0.0)
    candidates = _candidates(request, runs, cut)
    fetching = cut > first
    chosen = [run for run in runs if run[2] <= cut] if fetching else runs
    tier, _, end = chosen[-1]
    counts: dict[str, int] = {}
    for name, start, stop in chosen:
        counts[name] = counts.get(name, 0) + stop - start
    fetch_s = _sum(request.fetch_s(name, count) for name, count in counts.items())
    recompute_s = request.recompute_s(first, end)
    if recompute_s is not None and fetch_s is not None:
        recompute_s += min(request.backlog_s, fetch_s)
    reason = next(candidate.reason for candidate in candidates if candidate.tier == tier)
    return Decision(cut, tier, reason, fetch_s, recompute_s, candidates)


def _candidates(request: _Request, runs: Sequence[Run], cut: int) -> tuple[Candidate, ...]:
    candidates, backlog_s = [], request.backlog_s
    for tier in dict.fromkeys(tier for tier, _, _ in runs):
        own = [(start, end) for name, start, end in runs if name == tier]
        chunks = sum(end - start for start, end in own)
        fetched = sum(end - start for start, end in own if end <= cut)
        fetch_s = request.fetch_s(tier, chunks)
        recompute_s = _sum(request.recompute_s(start, end) for start, end in own)
        if recompute_s is not None and fetch_s is not None:
            overlap = min(backlog_s, fetch_s)
            recompute_s, backlog_s = recompute_s + overlap, backlog_s - overlap
        reason = _reason(request, tier, chunks, fetched)
        candidates.append(Candidate(tier, chunks, fetched, reason, fetch_s, recompute_s))
    return tuple(candidates)


def _reason(request: _Request, tier: str, chunks: int, fetched: int) -> Reason:
    if fetched:
        return Reason.UNKNOWN_COST if request.unknown(tier) else Reason.CHEAPER
    refusal = request.refusal(tier)
    if refusal is not None:
        return refusal
    return Reason.TOO_SHORT if request.too_short(tier, chunks) else Reason.SLOWER


def _sum(parts: Iterable[float | None]) -> float | None:
    total = 0.0
    for part in parts:
        if part is None:
            return None
        total += part
    return total
