"""What auto would have done: wishes of tuners that may not change anything by themselves. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache, lru_cache, partial

from tiertune_agent.fields import Json, JsonDict
from tiertune_agent.policy.document import advises
from tiertune_agent.records import FLEET, Decision, Prospect, State, Target, Windows, sum_known, total
from tiertune_agent.tuners.advice import ADVICE
from tiertune_agent.tuners.base import TypicalCandidate, served
from tiertune_agent.tuners.remote_fetch import asked, estimated
from tiertune_agent.verdicts.trials import cost_of, measure, shapes
from tiertune_agent.web.curves import Ghosts
from tiertune_agent.web.look import NOTHING, Seen
from tiertune_agent.web.text import figure, seconds, span
from tiertune_connector.units import format_count
from tiertune_connector.whatif.chain import Shape

SHOWN = 20
BySize = Callable[[frozenset[str] | None, tuple[Shape, Shape], datetime, datetime], float | None]


@dataclass(frozen=True)
class Wish:
    """One change that would have been made at ``at``."""

    decision: Decision
    at: datetime
    until: datetime
    """When it was made or given up; now, if it is still wished."""
    won_s: float | None
    """Seconds that it would have won between the two, as far as windows are read; None: not known."""
    over_s: float
    why: str
    """Why that is not known."""
    at_most: bool = False
    """Whether it may be less, because what a slower tier would have served is counted as computed."""

    @property
    def change(self) -> str:
        name = self.decision.field.rpartition(".")[2]
        return f"{figure(name, self.decision.before)} → {figure(name, self.decision.after)}"

    @property
    def sentence(self) -> str:
        """What it would have won, and what became of the wish."""
        return f"{self._won} {self._became}"

    @property
    def _won(self) -> str:
        if self.won_s is None:
            return f"What it would have won is unknown: {self.why}."
        verb = "won" if self.won_s >= 0 else "lost"
        most = "at most " if self.at_most and self.won_s > 0 else ""
        return f"It would have {verb} {most}{seconds(abs(self.won_s))} in {span(self.over_s)}."

    @property
    def _became(self) -> str:
        one = self.decision
        if one.state == State.PROPOSED:
            return "It waits for approval." if one.mode == "recommend" else "The policy only observes here."
        if one.applied_at:
            return f"It was made {span((one.applied_at - self.at).total_seconds())} later, by {one.approved_by}."
        became = {State.REJECTED: f"rejected by {one.approved_by}", State.EXPIRED: "no longer wished"}
        return f"It was {became.get(one.state, str(one.state).replace('_', ' '))} at {self.until:%H:%M} UTC."

    def document(self) -> JsonDict:
        """As the API tells it."""
        told = self.decision.document()
        kept = {name: told[name] for name in ("tuner", "store", "tier", "pool", "field", "from", "to", "mode", "state")}
        spell = {"at": self.at.isoformat(), "until": self.until.isoformat(), "over_s": self.over_s}
        won = {"won_s": self.won_s, "at_most": self.at_most, "sentence": self.sentence}
        return {"decision": self.decision.id, **kept, **spell, **won}


@dataclass(frozen=True)
class Unmade:
    wishes: tuple[Wish, ...]

    @property
    def shown(self) -> tuple[Wish, ...]:
        """On the page."""
        return self.wishes[:SHOWN]

    @property
    def won_s(self) -> float | None:
        """Sum over wishes whose seconds are known; None if there are none."""
        return sum_known(wish.won_s for wish in self.wishes)

    @property
    def sentence(self) -> str:
        if not self.wishes:
            return "Nothing: no tuner that waits for approval, or only observes, wished a change in the last day."
        told = f"On auto, TierTune would have made {format_count(len(self.wishes), 'change')}"
        won = self.won_s
        if won is None:
            return f"{told}; what these would have won is not known."
        unknown = sum(wish.won_s is None for wish in self.wishes)
        rest = f"; of {unknown} it is not known" if unknown else ""
        most = "at most " if won > 0 and any(wish.at_most for wish in self.wishes) else ""
        return f"{told}, and {'won' if won >= 0 else 'lost'} {most}{seconds(abs(won))} lately{rest}."

    def document(self) -> JsonDict:
        """As the API tells it."""
        return {"sentence": self.sentence, "won_s": self.won_s, "would": [wish.document() for wish in self.wishes]}


@lru_cache(maxsize=1)  # who looks within a second sees the same
def unmade(seen: Seen) -> Unmade:
    """Of several wishes of one field only the newest counts; seconds are those of the last windows."""
    newest: dict[tuple[str, Target, str], Decision] = {}
    for decision in seen.waited:
        if not advises(decision.tuner) and not decision.field.startswith(ADVICE):  # also for former tuners
            newest.setdefault((decision.tuner, decision.target, decision.field), decision)
    by_size = cache(partial(_size_won, seen.prospects))  # many hosts wish the same
    wishes = sorted(
        (_wish(decision, seen, by_size) for decision in newest.values()),
        key=lambda wish: (wish.decision.state != State.PROPOSED, -(wish.won_s or 0.0), -wish.decision.id),
    )
    return Unmade(tuple(wishes))


def _wish(decision: Decision, seen: Seen, by_size: BySize) -> Wish:
    at = decision.created_at
    until = seen.now if decision.state == State.PROPOSED else decision.applied_at or decision.updated_at
    start = max(at, seen.since)
    over = max(timedelta(), until - start)
    if not over:
        return Wish(decision, at, until, None, 0.0, "it is longer ago than is looked at")
    won_s, why = _won(decision, seen, start, until, by_size)
    return Wish(decision, at, until, won_s, over.total_seconds(), why, measure(decision) == "eviction")


def _won(decision: Decision, seen: Seen, start: datetime, until: datetime, by_size: BySize) -> tuple[float | None, str]:
    kind, store = measure(decision), seen.stores.get(decision.target.store, NOTHING)
    if kind == "size":
        there, hosts = _served(decision.target.store, seen.fleet["stores"])
        won = by_size(there, shapes(decision), start, until)
        # A shape applies to every host, so one host would win an even part.
        return (won / hosts, "") if won is not None else (None, "no simulation of both sizes was told since")
    windows = [one for one in store.windows if start <= one.start < until]
    if kind == "fetch":
        remote = [one for one in windows if one.tier == decision.target.tier and not one.namespace]
        return _by_fetches(str(decision.after), remote, store.typical)
    if kind == "eviction":
        pool = next((one for one in store.ghosts if one.namespace == decision.target.namespace), None)
        return _by_ghosts(decision, pool, windows)
    return None, "nobody simulates this setting"


def _served(name: str, stores: Sequence[Json]) -> tuple[frozenset[str] | None, int]:
    """Namespaces that a store serves, and how many serve any of them. The fleet: all (None), and it counts as one."""
    if name == FLEET:
        return None, 1
    mine = frozenset[str]().union(*(served(store) for store in stores if store["name"] == name))
    return mine, max(1, sum(not store["observed"] and not mine.isdisjoint(served(store)) for store in stores))


def _size_won(
    prospects: Sequence[Prospect],
    there: frozenset[str] | None,
    sizes: tuple[Shape, Shape],
    start: datetime,
    until: datetime,
) -> float | None:
    """Seconds to the first token of all requests of these namespaces (None: of all) that the second would have won."""
    won, told = 0.0, False
    served = (one for one in prospects if there is None or one.namespace in there)
    for prospect in (one for one in served if start <= one.start < until):
        old, new = (cost_of(prospect, shape) for shape in sizes)
        if old is not None and new is not None:
            won, told = won + prospect.requests * (old - new), True
    return won if told else None


def _by_fetches(after: str, windows: Windows, typical: TypicalCandidate | None) -> tuple[float | None, str]:
    """Switching off saves what fetches lost; switching on gains what they are estimated to."""
    if after == "off":
        seen = [evidence for window in windows if (evidence := asked(window))]
        return (sum(one.lost_s - one.saved_s for one in seen), "") if seen else (None, "no request was fetched since")
    gained = [one for window in windows if (one := estimated(window, typical)) and one.requests]
    return (sum(one.gain_s for one in gained), "") if gained else (None, "no request is counted while fetching is off")


def _by_ghosts(decision: Decision, pool: Ghosts | None, windows: Windows) -> tuple[float | None, str]:
    """Seconds to compute the tokens that the other algorithm would have hit beyond the present one.

    This is the most that it would have won: tokens in a slower tier only cost a fetch.
    """
    size, within = decision.evidence.get("capacity_bytes"), {window.start for window in windows}
    before, after = (pool and pool.near(str(name), size) for name in (decision.before, decision.after))
    more = [tokens for at, tokens, _ in pool.more(after, before) if at in within] if pool and before and after else []
    if not more:
        return None, "no simulation of both algorithms was told since"
    tiers = [window for window in windows if not window.namespace]
    tokens = total(tiers, "gate_candidate_tokens_total")
    recompute_s = total(tiers, "gate_candidate_seconds_total", kind="recompute")
    if not tokens or not recompute_s:
        return None, "nobody told what computing a token takes"
    return sum(more) * recompute_s / tokens, ""
