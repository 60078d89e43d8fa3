"""The policy as the agent reads it: what lint says of it, which tuners it lets act, and their last answers. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from operator import itemgetter

from tiertune_agent.fields import Json
from tiertune_agent.policy.document import DEFAULT
from tiertune_agent.policy.lint import Finding
from tiertune_agent.policy.match import Match
from tiertune_agent.records import FLEET, Target, grouped
from tiertune_agent.tuners.base import models, pools
from tiertune_agent.web.headline import names
from tiertune_agent.web.look import Seen
from tiertune_agent.web.text import moment
from tiertune_connector.documents import validated


@dataclass(frozen=True)
class TunerAnswers:
    """One tuner's last answers on everything that it was asked about."""

    tuner: str
    modes: tuple[str, ...]
    """More than one if an override sets another."""
    targets: int
    wishes: int
    last: datetime


@dataclass(frozen=True)
class Overlay:
    """One entry of ``overrides``."""

    match: str
    keys: str
    """What it says, dotted."""
    fits: str
    """Stores; empty: none."""


@dataclass(frozen=True)
class PolicyView:
    source: str
    """Empty: no file, the built-in policy."""
    revision: int | None
    since: datetime | None
    """When this revision was first in force."""
    sound: bool
    """Whether the file as it is now is in force."""
    findings: tuple[Finding, ...]
    asked: tuple[TunerAnswers, ...]
    overlays: tuple[Overlay, ...]
    text: list[str]
    """Lines of what is in force."""
    noted: set[int]
    """Numbers of those that have a note; errors are about a newer file."""

    @property
    def last(self) -> datetime | None:
        """When a tuner was last asked by it."""
        return max((one.last for one in self.asked), default=None)


def policy_view(seen: Seen) -> PolicyView:
    policy = seen.policy
    newest = policy["revisions"][0] if policy["revisions"] else None
    findings = tuple(Finding(**one) for one in policy["lint"])
    return PolicyView(
        source="" if policy["source"] == DEFAULT.source else policy["source"],
        revision=newest["id"] if newest else None,
        since=moment(newest["loaded_at"]) if newest else None,
        sound=policy["problem"] is None,
        findings=findings,
        asked=tuple(_asked(seen)),
        overlays=tuple(_overlays(seen)),
        text=policy["text"].splitlines(),
        noted={int(one.place.split(":")[-2]) for one in findings if one.level == "note" and one.place.count(":") > 1},
    )


def _asked(seen: Seen) -> Iterator[TunerAnswers]:
    for tuner, told in sorted(grouped(seen.fleet["answers"], itemgetter("tuner")).items()):
        modes = tuple(sorted({str(answer["mode"] or "none") for answer in told}))
        wishes = sum(bool(answer["change"]) for answer in told)
        yield TunerAnswers(tuner, modes, len(told), wishes, max(moment(answer["at"]) for answer in told))


def _overlays(seen: Seen) -> Iterator[Overlay]:
    for override in seen.policy["overrides"]:
        match = validated(Match, override["match"])
        fitting = [store for store in ({"name": FLEET}, *seen.fleet["stores"]) if any(map(match.fits, _of(store)))]
        told = ", ".join(f"{name} {pattern}" for name, pattern in override["match"].items())
        yield Overlay(told or "everything", ", ".join(_keys(override["says"])), names(fitting))


def _keys(said: Json, above: str = "") -> Iterator[str]:
    for key, value in said.items():
        if isinstance(value, Mapping) and value:
            yield from _keys(value, f"{above}{key}.")
        else:
            yield f"{above}{key}"


def _of(store: Json) -> Iterator[Target]:
    """All that may be set there, as far as overrides tell it apart: the store, and each of its pools."""
    yield Target(store["name"], "", "", models(store))
    for namespace, pool in pools(store).items():
        yield Target(store["name"], "", namespace, (pool.get("model", ""),))
