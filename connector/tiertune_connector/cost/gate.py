"""Fetch or recompute, per request: the cut of leading chunks with the lowest predicted time.

A request waits for its fetch and for the backlog ahead of it in parallel, then for its own prefill: with a cut c its
time to the first token is max(fetch(c), backlog) + prefill(rest after c).

The seconds of a fetch from the remote are in doubt: with a standard error d of their logarithm, the fetch takes exp(d)
or exp(-d) times its prediction, each as likely, and the gate weighs the mean of both. So a doubtful fetch is dearer,
and a backlog hides it only if the backlog lasts as long as a slow fetch. The copy to the device is not in doubt, nor
that a request that fetches is put off by steps of others.

A second of prefill, or of the link to the remote, also makes others wait: the gate weighs the cut at its price for all
(`Others`). The seconds that it reports are the request's own.

All cuts are weighed at once, and the shortest of the best is taken. The prompt's last token is always computed.
"""

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from math import exp
from typing import NamedTuple

import msgspec
import numpy as np

from tiertune_connector.cost.fetch import FetchEstimate, Predicted
from tiertune_connector.cost.prefill import Floats

REMOTE = "remote"
MANY = 1 << 31
"""More chunks than any prompt has."""


HELD_UP = 0.5
"""Share of waiting transfers that make their request wait: the others have prefills ahead of them anyway."""


class Others(NamedTuple):
    """Requests beside one's own; without any, costs are its own.

    Whoever takes an engine or a link makes those behind it wait. A gate that looks only at its own request takes what
    is free now, and with many requests all are worse off. So every second of an engine or a link costs one second more
    for each request that will be behind. They are not here yet, but on average as many come during a request as it
    found ahead of it (Little's law, if they come and go in turn). This also keeps finite all queues that can be
    (max-weight: serve by the length of the queues; Tassiulas and Ephremides 1992).
    """

    prefills: int = 0
    """Those whose prefill on its engine is not finished."""
    transfers: int = 0
    """Those whose transfer on the link to the remote is not finished."""

    @property
    def prefill_price(self) -> float:
        """Seconds that all together, the request and those behind it, pay for one of prefill."""
        return 1.0 + self.prefills

    @property
    def transfer_price(self) -> float:
        """The same for a second of a transfer; its own wait costs only the request."""
        return 1.0 + HELD_UP * self.transfers


ALONE = Others()


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
    """A load may take this many times what a slow one is predicted to take."""


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
    """Predicted seconds of recomputing, plus those of the backlog that fetch, copy to the device and being put off
    overlap, minus those of the latter two; None: unknown."""
    backlog_s: float = 0.0
    """Predicted seconds that the request waits for others while the fetch goes on."""
    prefills: int = 0
    """Other requests with unfinished prefills on the engine: a second of prefill costs as many more of waiting."""
    doubt: float = 0.0
    """Standard error of the logarithm of ``fetch_s``; 0 for local tiers."""

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
    """Seconds that the load may take: those of a slow one times the largest factor of the tiers fetched from.

    It was chosen because it pays in the mean of slow and quick: without the slow ones it would not.
    ``unknown_s`` if there is no prediction. Never less than ``floor_s``, nor than the request waits anyway.
    """
    fetched = [candidate for candidate in decision.candidates if candidate.fetched]
    factor = max((settings.get(each.tier, _DEFAULT).deadline_factor for each in fetched), default=1.0)
    slow_s = sum(exp(each.doubt) * (each.fetch_s or 0.0) for each in fetched)
    allowed_s = unknown_s if decision.fetch_s is None else factor * max(slow_s, decision.fetch_s)
    return max(floor_s, allowed_s, decision.backlog_s)


def decide(
    tiers: Sequence[str],
    *,
    computed_tokens: int,
    prompt_tokens: int,
    chunk_tokens: int,
    chunk_bytes: int,
    fetch: Mapping[str, FetchEstimate | None],
    prefill: Callable[[Floats, int], Floats | None],
    settings: Mapping[str, GateSettings],
    backlog_s: float = 0.0,
    others: Others = ALONE,
    copy_s: float = 0.0,
    put_off_s: float = 0.0,
    most: int = MANY,
) -> GateDecision:
    """Choose how many leading chunks to have; ``tiers[i]`` holds chunk i of the prompt, from its head, without gaps.

    The first ``computed_tokens`` have KV on the GPU already and cost nothing. ``prefill(h, n)`` predicts the seconds of
    computing tokens h to n of the prompt, for each h, without backlog; a fetch overlaps ``backlog_s``. ``others`` set
    the price of a prefill and of the link to the remote; local tiers have none. ``copy_s``: seconds of copying a
    fetched chunk to the engine's device, whatever its tier; ``put_off_s``: those that a request loses which does not
    take part in the next step, however little it fetches. A tier that ``fetch`` does not name has an unknown cost,
    one that ``settings`` does not name the default settings. If a cost is unknown, local chunks are fetched and remote
    ones not. At ``most`` so many leading chunks can be had: there is no room for more.
    """
    first = computed_tokens // chunk_tokens
    if first >= len(tiers):
        return GateDecision(first, "", Reason.NO_HIT, 0.0, 0.0, backlog_s=backlog_s)
    had = chunk_tokens * np.arange(first, len(tiers) + 1.0)
    had[0] = computed_tokens
    left_s = prefill(np.minimum(had, prompt_tokens - 1.0), prompt_tokens)
    offers: dict[str, _Offer] = {}
    end = 0
    for tier, chunks in groupby(tiers[first:]):
        start, end = end, end + len(list(chunks))
        offer = offers.get(tier)
        if offer is None:
            bounds, estimate = settings.get(tier, _DEFAULT), fetch.get(tier)
            refusal = Reason.NO_ROOM if first + start >= most else None
            if tier == REMOTE and (estimate is None or left_s is None):
                refusal = Reason.UNKNOWN_COST
            if not bounds.fetch_on:
                refusal = Reason.OFF
            offer = offers[tier] = _Offer(
                tier,
                estimate,
                chunk_bytes,
                margin=bounds.margin,
                price=others.transfer_price if tier == REMOTE else 1.0,
                apart=(copy_s, 0.0 if offers else put_off_s),
                least=-(-bounds.min_fetch_tokens // chunk_tokens),
                refusal=refusal,
            )
        offer.runs.append((start, end))
    fetched = _best(offers.values(), left_s, end, most=most - first, backlog_s=backlog_s, others=others)
    last = tiers[first + fetched - 1 if fetched else -1]
    return _decision(first, fetched, last, offers, left_s, backlog_s=backlog_s, prefills=others.prefills)


@dataclass(slots=True)
class _Offer:
    """One tier's chunks of one request, counted from the first that is not computed."""

    tier: str
    estimate: FetchEstimate | None
    chunk_bytes: int
    margin: float
    price: float
    """Of a second of the transfer, but not of its wait."""
    apart: tuple[float, float]
    """Seconds beside it, of each chunk and of all."""
    least: int
    """Fewer chunks are not worth a fetch."""
    refusal: Reason | None
    """Why none of the chunks may be fetched."""
    runs: list[tuple[int, int]] = field(default_factory=list)

    @property
    def doubt(self) -> float:
        """Of local chunks none: in doubt they are fetched, as when a cost is unknown."""
        return self.estimate.doubt if self.estimate is not None and self.tier == REMOTE else 0.0

    def slow_and_quick(self) -> Sequence[tuple[float, float]]:
        """Seconds of either fetch, at their price: its fixed part, and that of each chunk; 0 if unknown."""
        if self.estimate is None:
            return [(0.0, 0.0)] * 2
        fixed_s = self.margin * (self.price * self.estimate.t0_s + self.estimate.queue_s)
        chunk_s = self.margin * self.price * (self.estimate.per_chunk_s + self.chunk_bytes / self.estimate.bytes_per_s)
        slow, (each_s, all_s) = exp(self.doubt), self.apart
        return (slow * fixed_s + all_s, slow * chunk_s + each_s), (fixed_s / slow + all_s, chunk_s / slow + each_s)

    def enough(self) -> int:
        """The first cut with as many chunks as are worth a fetch."""
        missing = self.least
        for start, end in self.runs:
            if missing <= end - start:
                return start + missing
            missing -= end - start
        return MANY

    def apart_s(self, chunks: int) -> float:
        """Seconds beside the transfer of so many chunks."""
        each_s, all_s = self.apart
        return each_s * chunks + all_s

    def candidate(self, cut: int, left_s: Floats | None, backlog_s: float, prefills: int) -> Candidate:
        taken = [(start, min(end, cut)) for start, end in self.runs if start < cut]
        fetched = sum([end - start for start, end in taken])
        chunks = sum([end - start for start, end in self.runs])
        priced, estimate = fetched or chunks, self.estimate
        fetch_s = None if estimate is None else estimate.seconds(priced, priced * self.chunk_bytes)
        recompute_s = None
        if left_s is not None:
            recompute_s = float(sum([left_s[start] - left_s[end] for start, end in taken or self.runs]))
            if fetch_s is not None:
                apart_s = self.apart_s(priced)
                recompute_s = max(0.0, recompute_s + min(backlog_s, fetch_s + apart_s) - apart_s)
        if fetched:
            reason = Reason.UNKNOWN_COST if fetch_s is None or recompute_s is None else Reason.CHEAPER
        else:
            reason = Reason.TOO_SHORT if chunks < self.least else self.refusal or Reason.SLOWER
        return Candidate(self.tier, chunks, fetched, reason, fetch_s, recompute_s, backlog_s, prefills, self.doubt)


_DEFAULT = GateSettings()


def _best(
    offers: Collection[_Offer], left_s: Floats | None, chunks: int, *, most: int, backlog_s: float, others: Others
) -> int:
    """How many of the ``chunks`` to fetch, at most ``most``."""
    fetch_s = np.zeros((2, chunks + 1))  # of each chunk, if fetches are slow and if they are quick
    for offer in offers:
        for row, (fixed_s, chunk_s) in zip(fetch_s, offer.slow_and_quick(), strict=True):
            for start, end in offer.runs:
                row[start + 1 : end + 1] = chunk_s
            row[offer.runs[0][0] + 1] += fixed_s
    if left_s is None:
        gain = np.arange(chunks + 1.0)  # nobody knows: all that may be fetched
    else:
        slow_s, quick_s = np.maximum(fetch_s.cumsum(axis=1) - backlog_s, 0.0)
        gain = others.prefill_price * (left_s[0] - left_s) - 0.5 * (slow_s + quick_s)
    for offer in offers:
        start = offer.runs[0][0]
        gain[start + 1 : offer.enough()] = 0.0
        if offer.refusal:
            most = min(most, start)
    return int(np.fmax(gain[: max(0, most) + 1], 0.0).argmax())  # a cost that is no number gains nothing


def _decision(
    first: int,
    fetched: int,
    tier: str,
    offers: Mapping[str, _Offer],
    left_s: Floats | None,
    *,
    backlog_s: float,
    prefills: int,
) -> GateDecision:
    candidates, ahead_s = [], backlog_s
    for offer in offers.values():
        candidate = offer.candidate(fetched, left_s, ahead_s, prefills)
        apart_s = offer.apart_s(candidate.fetched or candidate.chunks)
        ahead_s = max(0.0, ahead_s - (candidate.fetch_s or 0.0) - apart_s)
        candidates.append(candidate)
    chosen = [one for one in candidates if one.fetched] or candidates
    fetch_s = _sum([candidate.fetch_s for candidate in chosen])
    recompute_s = _sum([candidate.recompute_s for candidate in chosen])
    reason = candidates[list(offers).index(tier)].reason
    return GateDecision(first + fetched, tier, reason, fetch_s, recompute_s, tuple(candidates), backlog_s)


def _sum(parts: Iterable[Predicted]) -> Predicted:
    total = 0.0
    for part in parts:
        if part is None:
            return None
        total += part
    return total
