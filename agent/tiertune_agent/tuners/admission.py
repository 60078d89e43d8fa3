"""Which chunks are worth writing to a slower tier? All, or only those used a second time while in DRAM.

Writing everything gives a tier the most to hit, so it is right while writing costs nothing. It can cost in three ways,
each of which alone justifies ``second_access`` if it costs more than that can lose at worst:

- Money for the network. At worst no fetch saves anything any more, so the money must exceed what all fetches save.
  Without a price of GPU time nothing tells what that is worth.
- Drops. A full queue drops chunks by chance. If more chunks are used twice than are written now, ``second_access``
  writes as many, none by chance, and a chunk used twice is at least as likely to be used again.
- Thrash. In a full tier every chunk written displaces another. If almost none is read before it leaves, at worst those
  few hits are lost, and what is written stays longer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

from tiertune_agent.fields import JsonDict, read
from tiertune_agent.records import GIB, Histogram, Rates, Windows, grouped, sum_known, total
from tiertune_agent.tuners.base import Answer, Current, NoChange, Period, Proposal, Tuner, TunerSettings, since_change
from tiertune_agent.tuners.evidence import ENOUGH_WINDOWS, ERRORS, Ratio, Summand, ratio
from tiertune_connector.tuning import SLOWER
from tiertune_connector.units import Duration, format_count, format_size

LEAST = 0.05
"""Least share of chunks dropped, or of bytes read again, that counts; less is as good as none."""
HALF_BUSY = 0.5
"""Share of the writers' time above which writing is not free."""
WRITERS = 2
"""Chunks that a store writes to a tier at once."""
FULL = 0.95


class AdmissionSettings(TunerSettings):
    period: Period = 1800.0
    hold_off: Duration = 21600.0


@dataclass(frozen=True)
class Passage:
    """What one window saw of a tier."""

    writes: float
    """Chunks, with those that the tier had already; their bytes do not move."""
    written_bytes: float
    sent_bytes: float
    """The same as they went over the network: a codec may have made them fewer."""
    write_s: float
    """Seconds that the writers spent."""
    dropped: float
    """Chunks that found the queue full."""
    requests: float | None
    """Of the whole store; None: it counted none."""
    prompt_tokens: float
    """Of all requests of the store."""
    asked_tokens: float
    """Of the chunks that requests found in the tier, whatever the gate decided."""
    asked_bytes: float
    recompute_s: float
    """Predicted, for those chunks."""
    saved_s: float
    """Seconds saved minus seconds lost."""
    evicted: float
    once: float
    """Chunks that left DRAM without having been used there."""
    twice: float
    """Chunks that left DRAM after a use, minus those that had come from slower tiers."""
    seconds: float
    readable: bool
    """Whether requests might ask the tier at its end: else nothing is found, whatever was written."""


@dataclass(frozen=True)
class AdmissionEvidence:
    """What all windows together say."""

    requests: int | None
    """Of the whole store; None: it counted none."""
    once: float | None
    """Unused share of the chunks that left DRAM, without those from slower tiers; None if nothing left."""
    spare: Ratio
    """Chunks used twice minus chunks written, per window."""
    dropped: Ratio
    """Share of the offers to write a chunk."""
    reused: Ratio
    """Bytes found in the tier per byte written."""
    saved_s: Ratio
    """Per GiB written."""
    written_bytes: float
    busy: float
    """Share of the writers' time."""
    full: bool

    def document(self) -> JsonDict:
        told: JsonDict = {}
        for name, value in vars(self).items():
            told |= value.document(name) if isinstance(value, Ratio) else {name: value}
        return told


class AdmissionTuner(Tuner):
    name = "admission"
    key = "admission"
    scope = "store"
    tiers = SLOWER
    settings: AdmissionSettings

    def evaluate(self, history: Windows, current: Current) -> Answer:
        tier = current.target.tier
        field = f"admission.{tier}"
        now = read(current.tuning, field) or "always"
        if read(current.tuning, f"tiers.{tier}.write") == "off":
            return NoChange(f"{now} stays: nothing is written to {tier}")
        passages = [seen for seen in passed(since_change(history, current), tier) if seen.writes or seen.dropped]
        if len(passages) < ENOUGH_WINDOWS:
            return NoChange(
                f"{now} stays, not enough data: chunks were written to {tier} in "
                f"{format_count(len(passages), 'window')}, {ENOUGH_WINDOWS} are needed"
            )
        sums = summed(passages, full=is_full(current, tier, passages))
        told, price = _told(tier, sums), current.rates.network_gib if tier == "remote" else 0.0
        if sums.once is None:
            return NoChange(f"{now} stays: DRAM evicted nothing, so any admission is right; {told}", sums.document())
        spent = price * sent(passages)
        pays, why = _fewer(sums, sums.once, spent, current.rates) if now == "always" else _more(sums, price)
        if not pays:
            return NoChange(f"{now} stays: {why}; {told}", sums.document())
        after = "second_access" if now == "always" else "always"
        return Proposal(field, now, after, f"{why}; {told}", sums.document(), sums.requests)


def _fewer(sums: AdmissionEvidence, unused: float, price: float, rates: Rates) -> tuple[bool, str]:
    """Whether second_access is sure to pay, and why (not)."""
    earned = sums.saved_s.value * rates.gpu_hour / 3600
    doubt = ERRORS * sums.saved_s.error * rates.gpu_hour / 3600
    if rates.gpu_hour and earned + doubt < unused * price:
        return (
            True,
            f"fetches save {earned:.3g} per GiB written, of which {unused * price:.3g} is paid for chunks used once",
        )
    drops = sums.dropped
    if drops.value - ERRORS * drops.error > LEAST and sums.spare.above:
        return True, f"the full queue drops {drops.value:.0%} by chance, and chunks used twice alone would fill it"
    reused = sums.reused
    if sums.full and unused > 0.5 and reused.value + ERRORS * reused.error < LEAST:
        return True, f"the tier is full, and {reused.value:.1%} of what is written is read before it leaves"
    if price and not rates.gpu_hour:
        return False, "prices.gpu_hour is 0, so the network's price cannot be weighed against what fetches save"
    return False, "writing everything costs less than what it may save"


def _more(sums: AdmissionEvidence, price: float) -> tuple[bool, str]:
    """Whether writing everything costs nothing, so that it can only hit more, and why (not)."""
    unused = sums.once or 0.0
    wanted = sums.busy / (1 - unused) if unused < 1 else 1.0
    if price > 0:
        return False, f"the network costs {price:g} per GiB"
    if sums.dropped.value > 0:
        return False, "the queue is full at times"
    if sums.full:
        return False, "the tier is full: a chunk more takes the place of another"
    if unused < LEAST:
        return False, "nearly all that leaves DRAM was written"
    if wanted > HALF_BUSY:
        return False, f"writing everything would take {min(wanted, 1):.0%} of the writers' time"
    return True, f"writing everything would take {wanted:.0%} of the writers' time and displaces nothing"


def passed(windows: Windows, tier: str) -> list[Passage]:
    """What was written to the tier and read from it, window by window of the whole store."""
    times = grouped(windows, lambda window: window.start)
    return [_passage(times[start], tier) for start in sorted(times)]


def sent(passages: Sequence[Passage]) -> float:
    """Bytes that went over the network per byte written; 1 without a codec, or if nothing was written."""
    written = sum(seen.written_bytes for seen in passages)
    return sum(seen.sent_bytes for seen in passages) / written if written else 1.0


def summed(passages: Sequence[Passage], *, full: bool) -> AdmissionEvidence:
    left = [sum(seen.once for seen in passages), sum(seen.twice for seen in passages)]
    requests = sum_known(seen.requests for seen in passages)
    return AdmissionEvidence(
        requests=None if requests is None else int(requests),
        once=left[0] / sum(left) if any(left) else None,
        spare=ratio([Summand(seen.twice - seen.writes, 1.0) for seen in passages]),
        dropped=ratio([Summand(seen.dropped, seen.dropped + seen.writes) for seen in passages]),
        reused=ratio([Summand(seen.asked_bytes, seen.written_bytes) for seen in passages if seen.readable]),
        saved_s=ratio([Summand(seen.saved_s, seen.written_bytes / GIB) for seen in passages if seen.readable]),
        written_bytes=sum(seen.written_bytes for seen in passages),
        busy=sum(seen.write_s for seen in passages) / (WRITERS * sum(seen.seconds for seen in passages)),
        full=full,
    )


def _passage(windows: Windows, tier: str) -> Passage:
    here = [window for window in windows if window.tier == tier]
    dram = [window for window in windows if window.tier == "dram"]
    counted, timed = partial(total, here), [*_timed(here, "write"), *_timed(here, "write", "there")]
    unused = total(dram, "tier_evicted_unused_total")
    arrived = sum(value.count for value in _timed([window for window in windows if window.tier in SLOWER], "read"))
    written = counted("tier_transfer_bytes_total", operation="write")
    return Passage(
        writes=sum(value.count for value in timed),
        written_bytes=written,
        sent_bytes=max(0.0, written - counted("tier_spared_bytes_total", operation="write")),
        write_s=sum(value.sum for value in timed),
        dropped=counted("write_behind_dropped_total", reason="queue_full"),
        requests=sum_known(window.gauge("requests_total") for window in windows),
        prompt_tokens=total(windows, "prompt_tokens_total"),
        asked_tokens=counted("gate_candidate_tokens_total"),
        asked_bytes=counted("gate_candidate_bytes_total"),
        recompute_s=counted("gate_candidate_seconds_total", kind="recompute"),
        saved_s=counted("saved_seconds_total") - counted("lost_seconds_total"),
        evicted=counted("tier_evictions_total", reason="room"),
        once=unused,
        twice=max(0.0, total(dram, "tier_evictions_total") - unused - arrived),
        seconds=windows[0].seconds,
        readable=not any(counted("tier_health", state=state) for state in ("bypassed", "recovering", "dead")),
    )


def _timed(windows: Windows, operation: str, outcome: str = "ok") -> list[Histogram]:
    seen = (window.histograms("tier_operation_seconds", operation=operation, outcome=outcome) for window in windows)
    return list(chain.from_iterable(seen))


def is_full(current: Current, tier: str, passages: Sequence[Passage]) -> bool:
    """Whether the tier evicts over half as much as it writes, or else holds nearly its capacity by the status."""
    if sum(seen.evicted for seen in passages) > sum(seen.writes for seen in passages) / 2:
        return True
    state = read(current.status, f"tiers.{tier}") or {}
    held, capacity = state.get("resident_bytes"), state.get("capacity_bytes")
    return bool(held and capacity and held > FULL * capacity)


def _told(tier: str, sums: AdmissionEvidence) -> str:
    used = f"{sums.once:.0%} of what left DRAM was not used again, " if sums.once is not None else ""
    return (
        f"{format_size(sums.written_bytes)} were written to {tier}, {used}{sums.dropped.value:.0%} dropped, "
        f"{sums.reused.value:.2f} bytes found there per byte written, {sums.saved_s.value:.3g} s saved per GiB"
    )
