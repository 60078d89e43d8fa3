"""Is it right to fetch from the remote tier at all? Switches fetching off and on, with hysteresis."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile

from pydantic import Field

from tiertune_agent.fields import JsonDict, read
from tiertune_agent.records import Window, Windows
from tiertune_agent.tuners.base import (
    MOST_OF_TIER,
    Answer,
    Current,
    NoChange,
    Period,
    Proposal,
    Tuner,
    TunerSettings,
    TypicalCandidate,
    since_change,
)
from tiertune_agent.tuners.evidence import ENOUGH_WINDOWS, Summand, ratio
from tiertune_agent.tuners.lengths import losing_lengths
from tiertune_connector.tuning import MOST_FETCH_TOKENS
from tiertune_connector.units import format_count, format_duration, format_size

FIELD = "tiers.remote.fetch"
MOST_CANDIDATES = 20
"""Windows over which a typical candidate is a mean."""
Candidates = Sequence[float]
"""What one window counted: requests that found chunks, those whose cost is known, bytes, seconds to recompute them."""


def protects(field: str, after: object) -> bool:
    """Whether a change keeps requests from losing time, which switching fetching off does."""
    return (field, after) == (FIELD, "off")


class RemoteFetchSettings(TunerSettings):
    period: Period = 30.0
    margin: float = Field(default=1.1, ge=1.0, le=10.0)
    """A fetch must be this many times cheaper than recomputing; the stores' gates use it too."""
    disable_after: int = Field(default=4, ge=1, le=MOST_OF_TIER)
    """Windows in a row in which fetching must cost more before it is switched off."""
    enable_after: int = Field(default=4, ge=1, le=MOST_OF_TIER)
    """Windows in a row in which fetching must pay with the margin before it is on again; all that have probes, if of
    the last 240 fewer have any."""
    min_fetch_tokens: int = Field(default=0, ge=0, le=MOST_FETCH_TOKENS)
    """Shorter runs of remote chunks are recomputed; the stores' gates apply it."""


@dataclass(frozen=True)
class Evidence:
    """What one window's candidates were predicted to cost, fetched against recomputed, in seconds summed.

    ``saved_s`` and ``lost_s`` are outcomes of those fetched. Without requests: the cost of one typical candidate by the
    estimate that probes keep fresh.
    """

    start: str
    requests: int
    fetch_s: float
    recompute_s: float
    saved_s: float = 0.0
    lost_s: float = 0.0

    @property
    def gain_s(self) -> float:
        """Seconds by which fetching was cheaper: by outcomes if there are any, else as predicted."""
        return self.saved_s - self.lost_s if self.saved_s or self.lost_s else self.recompute_s - self.fetch_s


class OfRemote(Tuner):
    """A question about a store's remote tier, with the settings of ``remote_fetch``."""

    key = "remote_fetch"
    scope = "tier"
    tiers = ("remote",)
    settings: RemoteFetchSettings


class RemoteFetch(OfRemote):
    name = "remote_fetch"

    def evaluate(self, history: Windows, current: Current) -> Answer:
        """Answer from windows that began after the last change only, so that changing again takes N windows."""
        windows = since_change(history, current)
        return self._on(windows) if read(current.tuning, FIELD) == "on" else self._off(windows, current.typical)

    def _on(self, windows: Windows) -> Answer:
        seen = filter(None, map(asked, reversed(windows)))
        newest = next(seen, None)
        if newest is None:
            where = format_count(len(windows), "window") if windows else "any window yet"
            return NoChange(f"too few candidates: no request found chunks to fetch in remote in {where}")
        streak = [*takewhile(lambda one: one.gain_s < 0, chain([newest], seen))][::-1]
        if not streak:
            return NoChange(f"stays on, fetching pays: {_sums([newest])}", _table([newest]))
        told, evidence, needed = _sums(streak), _table(streak), self.settings.disable_after
        if doubt := _doubt([Summand(one.gain_s, max(1, one.requests)) for one in streak], needed):
            return NoChange(f"stays on: fetching cost more{doubt}: {told}", evidence)
        if short := losing_lengths(windows, needed):
            return NoChange(f"stays on, a floor is enough: {short.reason}", evidence)
        reason = f"in {format_count(len(streak), 'window')} in a row fetching cost more than recomputing: {told}"
        return Proposal(FIELD, "on", "off", reason, evidence, sum(window.requests for window in streak))

    def _off(self, windows: Windows, typical: TypicalCandidate | None) -> Answer:
        margin = self.settings.margin
        seen = filter(None, (estimated(window, typical) for window in reversed(windows)))
        newest = next(seen, None)
        if newest is None:
            return NoChange(f"stays off: {_why_unknown(windows, typical)}")
        told = _each(newest, typical)
        streak = [*takewhile(lambda one: one.fetch_s * margin < one.recompute_s, chain([newest], seen))][::-1]
        if not streak:
            why = f"stays off, fetching would not pay with margin {margin:g}: {told}"
            return NoChange(why, _table([newest]))
        gains = [Summand(one.recompute_s - margin * one.fetch_s, max(1, one.requests)) for one in streak]
        if doubt := _doubt(gains, self._enough(windows, typical)):
            return NoChange(f"stays off: fetching would pay{doubt}: {told}", _table(streak))
        row = f"in {format_count(len(streak), 'window')} in a row fetching would pay (margin {margin:g})"
        return Proposal(FIELD, "off", "on", f"{row}: {told}", _table(streak))

    def _enough(self, windows: Windows, typical: TypicalCandidate | None) -> int:
        """Windows in a row that it takes to be on again: those with probes, if of all that are kept fewer have any."""
        needed = self.settings.enable_after
        if len(windows) < MOST_OF_TIER:
            return needed
        told = sum(bool(window.total("probes_total") or estimated(window, typical)) for window in windows)
        return min(needed, told)


def asked(window: Window) -> Evidence | None:
    """Evidence of the window's candidates; None if no request found chunks in the tier, or their cost is unknown.

    Also if all that did found less than the floor: these cannot lose, and long ones may come in other windows.
    """
    requests = window.total("gate_candidate_requests_total")
    if requests <= window.total("gate_requests_total", reason="too_short"):
        return None
    evidence = Evidence(
        window.start.isoformat(),
        int(requests),
        fetch_s=window.total("gate_candidate_seconds_total", kind="fetch"),
        recompute_s=window.total("gate_candidate_seconds_total", kind="recompute"),
        saved_s=window.total("saved_seconds_total"),
        lost_s=window.total("lost_seconds_total"),
    )
    return evidence if evidence.recompute_s or evidence.gain_s else None


def estimated(window: Window, typical: TypicalCandidate | None) -> Evidence | None:
    """What fetching would cost by an estimate that was renewed within the window; None if it was not."""
    age = window.gauge("fetch_estimate_age_seconds")
    if age is None or not age < window.seconds:
        return None
    evidence = asked(window)
    if evidence and evidence.recompute_s:
        return evidence
    bandwidth = window.gauge("fetch_estimate_bytes_per_second")
    if typical is None or not bandwidth:
        return None
    fetch_s = (window.gauge("fetch_estimate_t0_seconds") or 0.0) + typical.nbytes / bandwidth
    return Evidence(window.start.isoformat(), 0, fetch_s, typical.recompute_s)


def candidates(before: Sequence[Candidates], windows: Iterable[Window]) -> list[Candidates]:
    """Add those of windows of the remote in which recomputing has a known cost; of all, the last are left."""
    found = list(before)
    for window in windows:
        evidence = asked(window)
        if evidence and evidence.recompute_s:
            known = evidence.requests - window.total("gate_requests_total", reason="unknown_cost")
            nbytes = window.total("gate_candidate_bytes_total")
            found.append((evidence.requests, known, nbytes, evidence.recompute_s))
    return found[-MOST_CANDIDATES:]


def typical_candidate(found: Sequence[Candidates]) -> TypicalCandidate | None:
    """Means over requests; the mean cost is over those whose cost is known."""
    requests, known, nbytes, recompute_s = map(sum, zip(*found, strict=True)) if found else (0.0,) * 4
    return TypicalCandidate(int(requests), nbytes / requests, recompute_s / max(1.0, known)) if requests else None


def _doubt(gains: Sequence[Summand], needed: int) -> str:
    """Why a run of windows, with their gains per request, does not suffice for a switch; empty: it does."""
    if len(gains) < needed:
        return f" in {len(gains)} of the {needed} windows in a row that it takes"
    gain = ratio(gains)
    if gain.windows < ENOUGH_WINDOWS or gain.above or gain.below:  # of few, the policy's count must do
        return ""
    return (
        f", but {abs(gain.value):.2g} s per request is not more than two standard errors ({gain.error:.2g} s) "
        f"over {gain.windows} windows"
    )


def _why_unknown(windows: Windows, typical: TypicalCandidate | None) -> str:
    if not windows:
        return "no window has passed since it was switched off"
    if typical is None:
        return (
            "no request has found chunks in remote yet, and of the prompts of late nobody told what computing one takes"
        )
    age = windows[-1].gauge("fetch_estimate_age_seconds")
    newest = f"the newest measurement is {format_duration(age)} old" if age is not None else "nothing was measured"
    return f"no probe has renewed the estimate in {format_count(len(windows), 'window')}; {newest}"


def _table(evidence: Sequence[Evidence]) -> JsonDict:
    return {"windows": [dict(vars(window)) for window in evidence]}


def _sums(windows: Sequence[Evidence]) -> str:
    names = ("requests", "saved_s", "lost_s", "fetch_s", "recompute_s")
    requests, saved, lost, fetch, recompute = (sum(getattr(window, name) for window in windows) for name in names)
    outcome = f"those fetched saved {saved:.3g} s and lost {lost:.3g} s" if saved or lost else "none was fetched"
    told = "though predicted were" if (saved - lost) * (recompute - fetch) < 0 else "predicted"
    asked = format_count(requests, "request")
    return f"{asked}, {outcome}; {told} {fetch:.3g} s to fetch against {recompute:.3g} s to recompute"


def _each(evidence: Evidence, typical: TypicalCandidate | None) -> str:
    if evidence.requests or typical is None:
        return _sums([evidence])
    size = format_size(typical.nbytes)
    of = f"typical candidate ({size})" if typical.requests else f"mean prompt ({size}; none was found there of late)"
    return (
        f"a {of} would take {evidence.fetch_s:.3g} s to fetch "
        f"by the probes against {evidence.recompute_s:.3g} s to recompute"
    )
