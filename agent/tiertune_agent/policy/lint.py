"""Finds what to mend in a policy file, with file, line and column: for the command, the API and the page."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tiertune_agent.fields import read
from tiertune_agent.policy.document import LoadedPolicy, Override, Policy, Rule, load
from tiertune_agent.policy.present import STRENGTH
from tiertune_agent.records import REMOTE
from tiertune_connector.documents import DocumentError, place_of

_PLACED = re.compile(r"(?P<place>.+?:\d+:\d+): (?P<message>.*)", re.DOTALL)
SIZES_OF_REMOTE = ("budgets.remote", "tuners.tier_size.min.remote", "tuners.tier_size.max.remote")
"""Keys that size the remote."""
LIMITS = ("budgets.remote", "budgets.total", "tuners.tier_size.max.remote")
"""Keys of which one must say how large a managed remote may get."""
UNMANAGED = "the remote is sized only where remote.manage is on"
ENDLESS = "it is as from, on every day: the freeze never ends, and nothing is ever changed by itself"
ELSEWHERE = "the remote is the whole fleet's, which this fits not"


@dataclass(frozen=True)
class Finding:
    """``level``: error (the file cannot be in force), or note (a key is read, but not acted on)."""

    level: str
    place: str
    """``file:line:column``, or the file alone if the place is unknown."""
    message: str


@lru_cache(maxsize=1)
def notes(loaded: LoadedPolicy) -> tuple[Finding, ...]:
    """Notes on a sound policy; kept until another one is asked about, as finding their places reads the whole text."""
    return tuple(
        Finding("note", f"{loaded.source}:{place_of(loaded.text, note.partition(':')[0])}", note)
        for note in without_effect(loaded.policy)
    )


def checked(path: Path) -> tuple[Sequence[Finding], str]:
    """Check a file: notes and no problem, or errors and the problem that lists them."""
    try:
        return notes(load(path)), ""
    except DocumentError as error:
        return list(errors(str(error), str(path))), str(error)


def errors(problem: str, source: str) -> Iterator[Finding]:
    """Errors of a file that cannot be in force; ``problem`` is the text of its DocumentError, one per line."""
    for line in problem.splitlines():
        placed = _PLACED.fullmatch(line)
        yield Finding("error", placed["place"], placed["message"]) if placed else Finding("error", source, line)


def without_effect(policy: Policy) -> list[str]:
    """Keys that the file sets without effect: they are read, but not acted on."""
    rule = policy.for_target(REMOTE)
    unmanaged = () if rule.remote.manage else SIZES_OF_REMOTE
    told = [*_without_effect(policy), *_vain(policy, unmanaged, UNMANAGED)]
    if rule.remote.manage and all(read(rule.model_dump(), key) is None for key in LIMITS):
        told.append(f"{_managing(policy)}: the remote keeps its size: say how large it may get, by {', '.join(LIMITS)}")
    for index, override in enumerate(policy.overrides):
        if override.match.fits(REMOTE):
            vain = _vain(override, unmanaged, UNMANAGED)
        else:
            vain = _vain(override, (*SIZES_OF_REMOTE, "remote.manage"), ELSEWHERE)
        told += [
            f"overrides.{index}.{note}" for note in (*_without_effect(override), *_outranked(policy, override), *vain)
        ]
    return told


def _outranked(policy: Policy, override: Override) -> list[str]:
    """An override's mode that is to calm tuners which have a stronger one of their own."""
    laid = [one.tuners for one in policy.overrides if one.match == override.match]
    own = [
        f"tuners.{key}.mode ({settings.mode})"
        for key, settings in policy.tuners
        if settings.mode and STRENGTH.index(settings.mode) > STRENGTH.index(override.mode)
        if not any("mode" in getattr(tuners, key).model_fields_set for tuners in laid)
    ]
    if not own or "mode" not in override.model_fields_set:
        return []
    return [f"mode: a tuner's own mode outranks it: {', '.join(own)}; set that here, too"]


def manages(loaded: LoadedPolicy) -> str:
    """Where a sound policy has the remote managed, as ``file:line:column``; empty: nowhere."""
    if not loaded.policy.for_target(REMOTE).remote.manage:
        return ""
    return f"{loaded.source}:{place_of(loaded.text, _managing(loaded.policy))}"


def _managing(policy: Policy) -> str:
    """The key that says last whether the remote is managed."""
    key = "remote.manage"
    fitting = (index for index, one in enumerate(policy.overrides) if one.match.fits(REMOTE) and _sets(one, key))
    return [key, *(f"overrides.{index}.{key}" for index in fitting)][-1]


def _without_effect(rule: Rule) -> list[str]:
    notes = _vain(rule, ["objectives"], "no tuner aims at an objective in this version")
    advice = [key for key, settings in rule.tuners if settings.advisory and settings.mode == "auto"]
    hours = enumerate(rule.guard.freeze)
    notes += [f"guard.freeze.{index}.to: {ENDLESS}" for index, each in hours if each.endless]
    return notes + [f"tuners.{key}.mode: it only recommends, also on auto, in this version" for key in advice]


def _vain(rule: Rule, keys: Sequence[str], why: str) -> list[str]:
    return [f"{key}: {why}" for key in keys if _sets(rule, key)]


def _sets(rule: Rule, key: str) -> bool:
    return read(rule.model_dump(exclude_unset=True), key) is not None
