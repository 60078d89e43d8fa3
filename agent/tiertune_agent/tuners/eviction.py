"""Which eviction algorithm for a pool? Another one if its ghost, at the pool's own capacity, hits clearly more.

Of a managed remote, whose algorithm is Redis's own, only whether it evicts what it must.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import ClassVar

from pydantic import Field

from tiertune_agent.fields import Json, JsonDict, in_force, read
from tiertune_agent.records import REMOTE, Target, Window, Windows, ended, sum_known, total
from tiertune_agent.tuners.base import Answer, Current, NoChange, Period, Proposal, Tuner, TunerSettings, pool_targets
from tiertune_agent.tuners.evidence import ENOUGH_WINDOWS, Ratio, Summand, ratio
from tiertune_agent.tuners.ghosts import Tokens, ghost_tokens, nearest
from tiertune_connector.eviction import CANDIDATES
from tiertune_connector.tuning import CandidateAlgorithm
from tiertune_connector.units import Duration, format_count, format_size

LEAST_GAIN = 0.0025
"""Share of all tokens by which ghosts may err about the best algorithm (their mean regret is 0.1 points at most)."""
LATELY = 0.2
"""Share of a period's hits (or misses) that an algorithm other than LRU must gain: quickly, in the newest period,
before traffic turns; or by and by, summed over all that is remembered."""
SURE = 1.0
"""Standard errors that such a gain must exceed, so that it is no accident of thin traffic. Waiting for more would cost
more than mistakes do."""
EQUAL = 0.005
"""Share of all tokens: of candidates whose gains differ by less, the first one named is taken."""
DECAY = 0.7
"""Weight of what was seen a period earlier: the best algorithm of an hour is seldom that of the next."""
MEMORY = 10
"""Periods; anything older would weigh less than a thirtieth."""
SAME_SIZE = 0.05
"""Ghosts whose sizes differ by at most this share are of one size; if they differ by more, the capacity changed."""
REMOTE_POLICY = "remote.policy"
WANTED = "allkeys-lru"


class EvictionSettings(TunerSettings):
    looks: ClassVar[int] = 4

    period: Period = 1800.0
    hold_off: Duration = 21600.0
    candidates: tuple[CandidateAlgorithm, ...] = Field(default=CANDIDATES, min_length=1)
    """Algorithms to choose from; of two that gain the same within half a point, the first is taken."""
    min_gain: float = Field(default=0.03, ge=0.0, le=1.0)
    """Least gain of an algorithm other than LRU, as a share of the hits, or of the misses if these are fewer. It must
    also gain a fifth of a period's, in the newest period or summed over all that is remembered."""


@dataclass(frozen=True)
class GhostWindow:
    """One window: tokens by algorithm, all at the pool's capacity."""

    age: float
    """Periods from its end to the end of the newest window."""
    periods: float
    """Its length; at most one, as a longer window says no more about what lasts."""
    tokens: Mapping[str, Tokens]
    requests: float | None
    """None: nobody counted any."""


@dataclass(frozen=True)
class Rival:
    """A candidate beside the present algorithm, on the same windows."""

    name: str
    present: float
    """Share of the tokens that the present algorithm hits."""
    gain: Ratio
    lately: float
    """Gain within the newest period."""
    present_lately: float
    remembered: float
    """Weighted number of periods that ``gain`` covers."""

    @property
    def relative(self) -> float:
        return _relative(self.gain.value, self.present)

    @property
    def relative_lately(self) -> float:
        return _relative(self.lately, self.present_lately)

    @property
    def summed(self) -> float:
        """The whole gain, as a share of a period's hits (or misses)."""
        return self.relative * self.remembered


class EvictionTuner(Tuner):
    name = "eviction"
    key = "eviction"
    scope = "pool"
    settings: EvictionSettings

    def targets(self, store: str, status: Json) -> list[Target]:
        return pool_targets(store, "dram", status)

    def evaluate(self, history: Windows, current: Current) -> Answer:
        """From ``whatif_tokens_total``. Ghosts do not depend on what is in force: windows before a change count too."""
        field = f"pools.{current.target.namespace}.dram.eviction"
        algorithm = in_force(current.tuning, field) or "lru"
        here = [window for window in history if window.tier == "dram"]
        evicted = total(here, "tier_evictions_total")
        if here and not evicted:
            span = format_count(len(here), "window")
            return NoChange(f"{algorithm} stays: nothing was evicted in {span}, so any algorithm is right")
        capacity = read(current.status, f"pools.{current.target.namespace}.dram.effective.capacity_bytes")
        size, seen = ghosts(history, capacity, self.settings.period)
        if len(seen) < ENOUGH_WINDOWS:
            told = f"{format_count(evicted, 'chunk')} left, but " if here else ""
            return NoChange(
                f"{algorithm} stays, not enough data: {told}ghosts of the pool's size told something in "
                f"{format_count(len(seen), 'window')}, {ENOUGH_WINDOWS} are needed"
            )
        if not any(algorithm in each.tokens for each in seen):
            return self._without_ghost(field, algorithm, size, seen)
        return self._best(field, algorithm, size, seen)

    def _best(self, field: str, algorithm: str, size: int, seen: Sequence[GhostWindow]) -> Answer:
        names = [name for name in self.settings.candidates if name != algorithm]
        found = [rival for name in names if (rival := compared(seen, algorithm, name))]
        rivals = sorted(found, key=lambda rival: -rival.gain.value)
        if not rivals:
            return NoChange(f"{algorithm} stays: no ghost of another candidate is there to compare it with")
        at = f"at {format_size(size)}"
        evidence = {"capacity_bytes": size, "rivals": [_figures(rival) for rival in rivals]}
        clear = [rival for rival in found if not self._against(rival)]
        if not clear:
            told = _told(rivals[0], algorithm)
            return NoChange(f"{algorithm} stays: {at}, {told}: {self._against(rivals[0])}", evidence)
        most = max(rival.gain.value for rival in clear)
        chosen = next(rival for rival in clear if rival.gain.value > most - EQUAL)
        reason = f"{at}, {_told(chosen, algorithm)}"
        if chosen.name != "lru" and isfinite(chosen.summed):
            reason += f"; in all {chosen.summed:.0%} of a period's {_fewer(chosen.present)}"
        return Proposal(field, algorithm, chosen.name, reason, evidence, _requests(seen))

    def _against(self, rival: Rival) -> str:
        """Why it is not chosen; empty: it is. LRU only has to lead, as it is never far from the best."""
        gain, few = rival.gain.value, _fewer(rival.present)
        lately = f"in the last period that is {rival.relative_lately:.1%} of the {_fewer(rival.present_lately)}"
        summed = f"in all {rival.summed:.1%} of a period's {few}"
        doubts = (
            (gain <= 0, "no candidate would hit more"),
            (gain < LEAST_GAIN, f"a switch takes {LEAST_GAIN * 100:g} points"),
            (rival.lately <= 0, "but it does not lead in the last period"),
            (rival.name == "lru", ""),
            (
                rival.relative < self.settings.min_gain,
                f"that is {rival.relative:.1%} of the {few}, a switch takes {self.settings.min_gain:.1%}",
            ),
            (
                rival.relative_lately < LATELY and rival.summed < LATELY,
                f"{lately}, {summed}, a switch takes {LATELY:.0%} of either",
            ),
            (gain <= SURE * rival.gain.error, f"not more than {SURE:g} standard error"),
        )
        return next((why for holds, why in doubts if holds), "")

    def _without_ghost(self, field: str, algorithm: str, size: int, seen: Sequence[GhostWindow]) -> Answer:
        """Replace FIFO, which needs no ghost: it never measured above LRU (and is no candidate). Others stay."""
        names = self.settings.candidates
        shares = {name: hits.value for name in names if (hits := _hits(seen, name)).windows}
        if algorithm != "fifo" or not shares:
            return NoChange(f"{algorithm} stays: it has no ghost, so nothing tells what another one would gain")
        best = max(shares, key=lambda name: shares[name])
        reason = (
            f"fifo has no ghost, but was never measured above lru; at {format_size(size)}, {best} would hit "
            f"{shares[best]:.1%} of the tokens in {len(seen)} windows, as much as any candidate"
        )
        evidence = {"capacity_bytes": size, "shares": shares}
        return Proposal(field, algorithm, best, reason, evidence, _requests(seen))


class RemotePolicy(Tuner):
    """Chunks do not expire, so a policy that evicts nothing, or only expiring keys, keeps the first chunks for ever."""

    name = "remote_policy"
    key = "eviction"
    scope = "fleet"
    settings: EvictionSettings

    def targets(self, store: str, status: Json) -> list[Target]:  # noqa: ARG002 (the fleet's)
        return [REMOTE]

    def evaluate(self, history: Windows, current: Current) -> Answer:  # noqa: ARG002 (what is set is enough)
        found = str(read(current.tuning, REMOTE_POLICY))
        if found.startswith("allkeys-"):
            return NoChange(f"the remote stays with {found}, which evicts any key")
        told = f"with {found} the remote, once full, refuses every new chunk: chunks do not expire"
        return Proposal(REMOTE_POLICY, found, WANTED, told)


def ghosts(history: Windows, capacity: float | None, period_s: float) -> tuple[int, list[GhostWindow]]:
    """The size nearest to ``capacity`` among the newest ghosts, in bytes, and all windows with ghosts of that size.

    Without a capacity it must be the only size. Windows in which nobody asked for anything are left out.
    """
    newest, size, seen = None, 0, list[GhostWindow]()
    for window in reversed(history):
        sizes = _sizes(window)
        near = nearest(sizes, capacity if newest is None else size)
        if near is None or (newest is not None and abs(near - size) > SAME_SIZE * size):
            continue
        newest, size = newest or ended(window), size or near
        age = (newest - ended(window)).total_seconds() / period_s
        if age > MEMORY:
            break
        requests = window.gauge("requests_total")
        seen.append(GhostWindow(age, min(1.0, window.seconds / period_s), sizes[near], requests))
    return size, seen[::-1]


def compared(seen: Sequence[GhostWindow], present: str, name: str) -> Rival | None:
    """``name`` against ``present``; None if too few windows have ghosts of both."""
    both = [each for each in seen if present in each.tokens and name in each.tokens]
    if len(both) < ENOUGH_WINDOWS:
        return None
    newest = [each for each in both if each.age < 1]
    gain, lately = (_gain(some, present, name) for some in (both, newest))
    mine, mine_lately = (_hits(some, present).value for some in (both, newest))
    remembered = sum(DECAY**each.age * each.periods for each in both)
    return Rival(name, mine, gain, lately.value, mine_lately, remembered)


def _gain(seen: Sequence[GhostWindow], present: str, name: str) -> Ratio:
    """Gain of ``name`` as a share of the tokens, compared window by window: both saw the same requests."""
    parts = []
    for each in seen:
        (hit, asked), (had, of) = each.tokens[name], each.tokens[present]
        parts.append(Summand(hit / asked * of - had, of, DECAY**each.age))
    return ratio(parts)


def _hits(seen: Sequence[GhostWindow], name: str) -> Ratio:
    """Share of the tokens that an algorithm hits, where it has a ghost."""
    return ratio([Summand(*each.tokens[name], DECAY**each.age) for each in seen if name in each.tokens])


def _requests(seen: Sequence[GhostWindow]) -> int | None:
    """Of all windows; None: nobody counted any."""
    told = sum_known(each.requests for each in seen)
    return None if told is None else int(told)


def _relative(gain: float, present: float) -> float:
    """The gain as a share of the hits, or of the misses if these are fewer."""
    least = min(present, 1 - present)
    return gain / least if least > 0 else inf


def _fewer(present: float) -> str:
    return "hits" if present <= 0.5 else "misses"


def _sizes(window: Window) -> dict[int, dict[str, Tokens]]:
    """Tokens by size in bytes and algorithm, of sizes with several algorithms: those of LRU's curve alone compare none.

    In a window of few requests the ghosts of the pool's own size may have seen none, while the curve did.
    """
    found: dict[int, dict[str, Tokens]] = {}
    for (name, size), tokens in ghost_tokens(window).items():
        found.setdefault(size, {})[name] = tokens
    return {size: tokens for size, tokens in found.items() if len(tokens) > 1}


def _told(rival: Rival, present: str) -> str:
    gain = rival.gain
    return (
        f"{rival.name} would hit {rival.present + gain.value:.1%} of the tokens against {rival.present:.1%} of "
        f"{present}, {gain.value * 100:+.2f} points (standard error {gain.error * 100:.2f}, {gain.windows} windows; "
        f"{rival.lately * 100:+.2f} in the last period)"
    )


def _figures(rival: Rival) -> JsonDict:
    gain = rival.gain
    hits = rival.present + gain.value
    told = {"hits": hits, "present": rival.present, "gain": gain.value, "standard_error": gain.error}
    summed = rival.summed if isfinite(rival.summed) else None
    return {"algorithm": rival.name, **told, "windows": gain.windows, "gain_lately": rival.lately, "summed": summed}
