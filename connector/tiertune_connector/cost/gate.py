"""Fetch or recompute, per request: the cut of leading chunks with the lowest predicted time.

A request waits for its fetch and for the backlog ahead of it in parallel, then for its own prefill: with a cut c its
time to the first token is max(fetch(c), backlog) + prefill(rest after c).

The seconds of a fetch from the remote are in doubt: with a standard error d of their logarithm, the fetch takes exp(d)
or exp(-d) times its prediction, each as likely, and the gate weighs the mean of both. So a doubtful fetch is dearer,
and a backlog hides it only if the backlog lasts as long as a slow fetch. The copy to the device is not in doubt.

A second of prefill, or of the link to the remote, also makes others wait: the gate weighs the cut at its price for all
(``others``). The seconds that it reports are the request's own.

Recomputing a prefix gets dearer with its length faster than fetching it. So within a run of chunks in one tier the time
saved is convex, except where the backlog ceases to hide the slow or the quick fetch. Only these can be best: no fetch,
the two cuts around either point (or the first cut that is long enough to be fetched), and the ends of runs. The
prompt's last chunk is a run of its own: it saves less if the prompt ends within or with it, as its last token is always
computed. A step may take its overhead however few tokens are left (`PrefillCost`); then the last chunks take nothing
off it. Runs end where that begins, and a chunk before.
"""

from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from math import exp

import msgspec

from tiertune_connector.cost.fetch import FetchEstimate, Predicted
from tiertune_connector.cost.others import ALONE, Others

REMOTE = "remote"
MANY = 1 << 31
"""More chunks than any prompt has."""


class Reason(StrEnum):
    """Why the chunks of a tier were fetched or not; cheaper and slower count the others' seconds too."""

    NO_HIT = "no_hit"
    CHEAPER = "cheaper"
    SLOWER = "slower"
    TOO_SHORT = "too_short"
    OFF = "off"
    NO_ROOM = "no_room"
    UNKNOWN_COST = "unknown_cost"


class GateSettings(msgspec.Struct, frozen=True):
    """Bounds that the tuning sets for one tier."""

    fetch_on: bool = True
    margin: float = 1.0
    """A fetch must be predicted this many times cheaper than recomputing."""
    min_fetch_tokens: int = 0
    """Fewer tokens than this are not worth a fetch from the tier."""
    deadline_factor: float = 1.5
    """A load may take this many times its prediction."""


class Candidate(msgspec.Struct, frozen=True):
    """What one tier offers a request: chunks that lie there and are not computed yet, whatever is decided.

    The seconds are those of the chunks fetched; if none is, of all that are offered. They are the request's own: a
    fetch that relieves others may take longer than recomputing.
    """

    tier: str
    chunks: int
    fetched: int
    """How many of the chunks the decision fetches."""
    reason: Reason
    fetch_s: Predicted
    """Predicted seconds of fetching; None: unknown."""
    recompute_s: Predicted
    """Predicted seconds of recomputing, plus those of the backlog that fetch and copy to the device overlap, minus
    those of the copy; None: unknown."""
    backlog_s: float = 0.0
    """Predicted seconds that the request waits for others while the fetch goes on."""
    prefills: int = 0
    """Other requests with unfinished prefills on the engine: a second of prefill costs as many more of waiting."""

    def cut_to(self, fetched: int, elsewhere: int) -> "Candidate":
        """As if only so many were fetched: predictions in proportion; ``elsewhere`` were had without this fetch."""
        if (fetched, elsewhere) == (self.fetched, 0):
            return self
        share = fetched / self.fetched if fetched else 1.0
        fetch_s, recompute_s = (seconds and share * seconds for seconds in (self.fetch_s, self.recompute_s))
        return msgspec.structs.replace(
            self, chunks=self.chunks - elsewhere, fetched=fetched, fetch_s=fetch_s, recompute_s=recompute_s
        )


class GateDecision(msgspec.Struct, frozen=True):
    """``cut`` leading chunks of the prompt come from tiers or are computed already; the rest is recomputed.

    ``tier`` is the last tier fetched from (if none is: the last one that offered). The seconds are the sums over the
    candidates fetched from (if none is: over all).
    """

    cut: int
    tier: str
    reason: Reason
    fetch_s: Predicted
    recompute_s: Predicted
    candidates: tuple[Candidate, ...] = ()
    backlog_s: float = 0.0
    """Predicted seconds that the request waits for others anyway."""

    @property
    def fetches(self) -> bool:
        return any(candidate.fetched for candidate in self.candidates)

    def cut_to(self, had: int, fetched: Container[int], tiers: Sequence[str]) -> "GateDecision":
        """What is left of it if the engine had ``had`` leading chunks in the end; ``tiers`` as in ``decide``.

        Of these, the decision's own were fetched if at a place in ``fetched``, and otherwise did not have to be.
        """
        first = self.cut - sum(candidate.fetched for candidate in self.candidates)
        own = range(first, min(had, self.cut))
        came = [tiers[place] for place in own if place in fetched]
        elsewhere = [tiers[place] for place in own if place not in fetched]
        candidates = tuple(
            candidate.cut_to(came.count(candidate.tier), elsewhere.count(candidate.tier))
            for candidate in self.candidates
        )
        return msgspec.structs.replace(self, candidates=candidates)


def gain_s(fetch_s: Predicted, recompute_s: Predicted, actual_s: float, backlog_s: float, prefills: int = 0) -> float:
    """Seconds of prefill that a fetch of ``actual_s`` gained, or lost; the predictions are a candidate's.

    What it took beyond the backlog made only the request wait; what it took off the engine let all behind it wait less.
    """
    saved_s = (recompute_s or 0.0) - min(backlog_s, fetch_s or 0.0)
    return saved_s - waited_s(actual_s, backlog_s, prefills)


def waited_s(actual_s: float, backlog_s: float, prefills: int) -> float:
    """What a request's wait for a fetch beyond its backlog costs, in seconds of prefill."""
    return max(0.0, actual_s - backlog_s) / Others(prefills).prefill_price


def deadline_s(
    decision: GateDecision, settings: Mapping[str, GateSettings], *, unknown_s: float, floor_s: float
) -> float:
    """Seconds that the load may take: its prediction times the largest factor of the tiers fetched from.

    ``unknown_s`` if there is no prediction. Never less than ``floor_s``, nor than the request waits anyway.
    """
    tuned = [settings.get(candidate.tier, _DEFAULT) for candidate in decision.candidates if candidate.fetched]
    factor = max((bounds.deadline_factor for bounds in tuned), default=1.0)
    allowed_s = unknown_s if decision.fetch_s is None else factor * decision.fetch_s
    return max(floor_s, allowed_s, decision.backlog_s)


def decide(
    tiers: Sequence[str],
    *,
    computed_tokens: int,
    prompt_tokens: int,
    chunk_tokens: int,
    chunk_bytes: int,
    fetch: Mapping[str, FetchEstimate | None],
    prefill: Callable[[int, int], Predicted],
    settings: Mapping[str, GateSettings],
    backlog_s: float = 0.0,
    others: Others = ALONE,
    copy_s: float = 0.0,
    most: int = MANY,
) -> GateDecision:
    """Choose how many leading chunks to have; ``tiers[i]`` holds chunk i of the prompt, from its head, without gaps.

    The first ``computed_tokens`` have KV on the GPU already and cost nothing. ``prefill(h, n)`` predicts the seconds of
    computing tokens h to n of the prompt, without backlog; a fetch overlaps ``backlog_s``. ``others`` set the price of
    a prefill and of the link to the remote; local tiers have none. ``copy_s``: seconds of copying a fetched chunk to
    the engine's device, whatever its tier. A tier that ``fetch`` does not name has an unknown cost, one that
    ``settings`` does not name the default settings. If a cost is unknown, local chunks are fetched and remote ones not.
    At ``most`` so many leading chunks can be had: there is no room for more.
    """
    first = computed_tokens // chunk_tokens
    if first >= len(tiers):
        return GateDecision(first, "", Reason.NO_HIT, 0.0, 0.0, backlog_s=backlog_s)
    left_s = _Left(computed_tokens, prompt_tokens, chunk_tokens, prefill)
    bends = left_s.bends(first, len(tiers))
    offers: dict[str, _Offer] = {}
    runs: list[_Run] = []
    end = first
    for tier, chunks in groupby(tiers[first:]):
        start, end = end, end + len(list(chunks))
        offer = offers.get(tier)
        if offer is None:
            bounds, estimate = settings.get(tier, _DEFAULT), fetch.get(tier)
            unknown = estimate is None or left_s[first] is None
            least = -(-bounds.min_fetch_tokens // chunk_tokens)
            costs = estimate, chunk_bytes, others.transfer_price if tier == REMOTE else 1.0
            offer = offers[tier] = _Offer(tier, bounds, *costs, copy_s=copy_s, unknown=unknown, least=least)
            if start >= most:
                offer.refusal = offer.refusal or Reason.NO_ROOM
        offer.runs.append((start, end))
        room = min(end, most)
        for cut in (*(cut for cut in bends if cut < room), room):
            if start < cut:
                runs.append((offer, start, cut))
                start = cut
    cut = _best_cut(first, runs, left_s, backlog_s, others.prefill_price)
    last = tiers[cut - 1 if cut > first else -1]
    return _decision(cut, last, offers, left_s, backlog_s=backlog_s, prefills=others.prefills)


@dataclass(eq=False)
class _Left(dict[int, Predicted]):
    """Predicted prefill by the number of leading chunks had; at least the last token is always computed."""

    computed: int
    prompt: int
    chunk_tokens: int
    prefill: Callable[[int, int], Predicted]

    def __missing__(self, cut: int) -> Predicted:
        there = min(max(self.computed, cut * self.chunk_tokens), self.prompt - 1)
        left_s = self[cut] = self.prefill(there, self.prompt)
        return left_s

    def saved_s(self, start: int, end: int) -> Predicted:
        """Predicted seconds that having chunks ``start`` to ``end`` takes off the prefill."""
        before, after = self[start], self[end]
        return None if before is None or after is None else before - after

    def bends(self, first: int, end: int) -> list[int]:
        """Cuts up to ``end`` after which a chunk may take less off the prefill than the chunk before it."""
        flat, least = end, self[end]
        if least is not None and self[end - 1] == least:
            flat = bisect_left(range(end), True, lo=first, key=lambda cut: (self[cut] or 0.0) <= least)
        return sorted({flat - 1, flat, (self.prompt - 1) // self.chunk_tokens})


class _Offer:
    """One tier's chunks of one request."""

    __slots__ = (
        "_chunk_bytes", "_chunk_s", "_estimate", "_fixed_s",
        "copy_s", "least", "quick", "refusal", "runs", "slow", "tier", "unknown",
    )  # fmt: skip

    def __init__(
        self,
        tier: str,
        bounds: GateSettings,
        estimate: FetchEstimate | None,
        chunk_bytes: int,
        price: float,
        *,
        copy_s: float,
        unknown: bool,
        least: int,
    ) -> None:
        """A second of the transfer, but not of its wait, costs ``price``; then copying each chunk takes ``copy_s``.

        ``unknown``: nobody knows whether a fetch pays; fewer than ``least`` chunks are not worth one.
        """
        self.tier, self.unknown, self.least = tier, unknown, least
        self.refusal: Reason | None = None
        """Why none of the chunks may be fetched."""
        if not bounds.fetch_on:
            self.refusal = Reason.OFF
        elif tier == REMOTE and unknown:
            self.refusal = Reason.UNKNOWN_COST
        self.runs: list[tuple[int, int]] = []
        self._estimate = estimate
        self._chunk_bytes = chunk_bytes
        self.copy_s = copy_s
        self._fixed_s = self._chunk_s = 0.0
        if estimate is not None:
            one_s, two_s = estimate.seconds(1, chunk_bytes), estimate.seconds(2, 2 * chunk_bytes)
            own_s = one_s - estimate.queue_s
            self._chunk_s = bounds.margin * price * (two_s - one_s)
            self._fixed_s = bounds.margin * (price * own_s + estimate.queue_s) - self._chunk_s
        self.slow = self.quick = 1.0
        """Factors on a fetch's prediction; 1 for local chunks: in doubt they are fetched, as when a cost is unknown."""
        if tier == REMOTE and estimate is not None and estimate.doubt:
            self.slow = exp(estimate.doubt)
            self.quick = 1.0 / self.slow

    def price_s(self, chunks: int, factor: float) -> float:
        """Seconds, at their price, of a fetch that takes ``factor`` times its prediction; an unknown cost is 0."""
        if not chunks or self._estimate is None:
            return 0.0
        return factor * (self._fixed_s + self._chunk_s * chunks) + self.copy_s * chunks

    def hidden(self, seconds: float, factor: float) -> int:
        """Chunks whose price is at most ``seconds``."""
        over_s, chunk_s = seconds - factor * self._fixed_s, factor * self._chunk_s + self.copy_s
        return int(min(over_s / chunk_s, MANY)) if over_s > 0 < chunk_s else 0

    def candidate(self, cut: int, left_s: _Left, backlog_s: float, prefills: int) -> Candidate:
        taken = [(start, min(end, cut)) for start, end in self.runs if start < cut]
        fetched = sum([end - start for start, end in taken])
        chunks = sum([end - start for start, end in self.runs])
        priced, estimate = fetched or chunks, self._estimate
        fetch_s = None if estimate is None else estimate.seconds(priced, priced * self._chunk_bytes)
        recompute_s = _sum([left_s.saved_s(start, end) for start, end in taken or self.runs])
        if recompute_s is not None and fetch_s is not None:
            copied_s = self.copy_s * priced
            recompute_s = max(0.0, recompute_s + min(backlog_s, fetch_s + copied_s) - copied_s)
        if fetched:
            reason = Reason.UNKNOWN_COST if self.unknown else Reason.CHEAPER
        else:
            reason = self.refusal or (Reason.TOO_SHORT if chunks < self.least else Reason.SLOWER)
        return Candidate(self.tier, chunks, fetched, reason, fetch_s, recompute_s, backlog_s, prefills)


_Run = tuple[_Offer, int, int]
"""A tier's offer, and first and end of chunks that follow each other in it."""
_DEFAULT = GateSettings()


def _best_cut(first: int, runs: Sequence[_Run], left_s: _Left, backlog_s: float, prefill_price: float) -> int:
    best, gained, slow_s, quick_s = first, 0.0, 0.0, 0.0
    met: dict[_Offer, int] = {}
    short: set[_Offer] = set()
    for offer, start, end in runs:
        if offer.refusal:
            break
        had = met.get(offer, 0)
        if had:
            slow_s -= offer.price_s(had, offer.slow)
            quick_s -= offer.price_s(had, offer.quick)
            short.discard(offer)
        for cut in _worth_weighing(offer, had, start, end, (backlog_s - slow_s, backlog_s - quick_s)):
            met[offer] = chunks = had + cut - start
            if short or chunks < offer.least:
                continue
            saved = left_s.saved_s(first, cut)
            gain = None
            if saved is not None:
                slow_late_s = max(0.0, slow_s + offer.price_s(chunks, offer.slow) - backlog_s)
                quick_late_s = max(0.0, quick_s + offer.price_s(chunks, offer.quick) - backlog_s)
                gain = prefill_price * saved - 0.5 * (slow_late_s + quick_late_s)
            if gain is None or gain > gained:
                best, gained = cut, gain or gained
        slow_s += offer.price_s(met[offer], offer.slow)  # as of the run's end
        quick_s += offer.price_s(met[offer], offer.quick)
        if met[offer] < offer.least:
            short.add(offer)
    return best


def _worth_weighing(offer: _Offer, had: int, start: int, end: int, hidden_s: tuple[float, float]) -> list[int]:
    """Cuts, the run's end last; before it, if the backlog hides only a part of the fetch, the two where it ceases to.

    ``hidden_s`` of the backlog is left for the tier's fetch: if the fetches before are slow, and if they are quick.
    ``had`` of the tier's chunks are in runs before.
    """
    cuts = [end]
    if hidden_s[1] <= 0 or end - start == 1:
        return cuts
    for factor, left_s in zip((offer.slow, offer.quick), hidden_s, strict=True):
        if 0 < left_s < offer.price_s(had + end - start, factor):
            hidden = max(offer.hidden(left_s, factor), offer.least)  # fewer are not fetched
            cut = start + max(0, min(hidden - had, end - start - 1))
            cuts = [cut, cut + 1, *cuts] if cut > start else [cut + 1, *cuts]
        if hidden_s[0] == hidden_s[1] and offer.slow == 1.0:
            break
    return cuts


def _decision(
    cut: int, tier: str, offers: Mapping[str, _Offer], left_s: _Left, *, backlog_s: float, prefills: int
) -> GateDecision:
    candidates, ahead_s = [], backlog_s
    for offer in offers.values():
        candidate = offer.candidate(cut, left_s, ahead_s, prefills)
        copied_s = offer.copy_s * (candidate.fetched or candidate.chunks)
        ahead_s = max(0.0, ahead_s - (candidate.fetch_s or 0.0) - copied_s)
        candidates.append(candidate)
    chosen = [one for one in candidates if one.fetched] or candidates
    fetch_s = _sum([candidate.fetch_s for candidate in chosen])
    recompute_s = _sum([candidate.recompute_s for candidate in chosen])
    reason = candidates[list(offers).index(tier)].reason
    return GateDecision(cut, tier, reason, fetch_s, recompute_s, tuple(candidates), backlog_s)


def _sum(parts: Iterable[Predicted]) -> Predicted:
    total = 0.0
    for part in parts:
        if part is None:
            return None
        total += part
    return total
