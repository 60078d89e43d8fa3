"""What TierTune is doing, in one sentence, and the few facts behind it. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tiertune_agent.fields import Json, read
from tiertune_agent.tuners.base import present
from tiertune_connector.units import format_count

DOES = {
    "auto": "TierTune changes by itself what is on auto, where the figures say so.",
    "recommend": "TierTune recommends changes and waits for approval.",
    "observe": "TierTune only watches and changes nothing.",
}
FROZEN = "Frozen: nothing changes."
CALENDAR = "By the policy's calendar TierTune changes nothing by itself now; who approves or rolls back may."
ADVISES = "TierTune measures and advises; it cannot change anything there."


@dataclass(frozen=True)
class Fact:
    """One label; ``level``: ok, info, warn or bad."""

    name: str
    value: str
    level: str = "info"


@dataclass(frozen=True)
class Headline:
    level: str
    sentence: str
    more: str
    """What TierTune may do about it, and what waits."""
    facts: tuple[Fact, ...]


def headline(fleet: Json, modes: Mapping[str, str], *, traffic: bool, waiting: int) -> Headline:
    """``modes``: of the tuners that may change something, by name; ``traffic``: whether requests came lately.

    ``waiting``: open proposals.
    """
    stores, sources = [
        [store for store in fleet["stores"] if bool(store["observed"]) == observed] for observed in (False, True)
    ]
    unheard, unseen = fleet["unheard"]["stores"], fleet["unheard"]["sources"]
    observes = bool(sources or unseen)
    tunes = bool(stores or unheard) or not observes
    told = [_stores(stores, unheard)] if tunes else []
    if observes:
        told.append(_sources(sources, unseen))
    if tunes:
        mode = Fact("Mode", ", ".join(f"{what} {mode}" for what, mode in modes.items()))
        told += [mode, _frozen(fleet["frozen"]), _bypass(stores, fleet["bypass_unheard"])]
    opened = sum(fleet["incidents"].values())
    facts = (*told, Fact("Incidents", f"{opened} open" if opened else "none", "bad" if opened else "ok"))
    what, known = ("store", stores) if tunes else ("source", sources)
    up = [one for one in known if one["reachable"]]
    levels = {fact.level for fact in facts}
    worst = next((level for level in ("bad", "warn") if level in levels), "ok")
    if not known:
        return Headline("info", f"Waiting for the first {what} to answer.", "", facts)
    if not up:
        return Headline("bad", f"No {what} answers, so nothing is measured or changed.", "", facts)
    if not tunes:
        return Headline(worst, "Engines are observed; there is no store of TierTune.", ADVISES, facts)
    sentence = _sharing(up, len(stores) + len(unheard), traffic=traffic)
    return Headline(worst, sentence, _doing(fleet, modes, waiting), facts)


def few(listed: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``, ``a, b and 5 more``."""
    shown = [*listed[:2], f"{len(listed) - 2} more"] if len(listed) > 3 else listed
    return " and ".join(filter(None, [", ".join(shown[:-1]), *shown[-1:]]))


def _sharing(up: Sequence[Json], number: int, *, traffic: bool) -> str:
    """``up``: stores that answer, of ``number``."""
    bypassed = [store["name"] for store in up if store["bypass"]]
    remote = [store for store in up if present(store, "remote")]
    dead = [store["name"] for store in remote if read(store, "tiers.remote.health") == "dead"]
    off = [store["name"] for store in remote if read(store, "tuning.tiers.remote.fetch") == "off"]
    if len(bypassed) == number:
        return "All stores are bypassed: they answer miss, and engines recompute everything."
    if silent := number - len(up):
        return f"{silent} of {number} stores {'does' if silent == 1 else 'do'} not answer."
    if bypassed:
        return f"Bypassed at {few(bypassed)}: engines there recompute everything."
    if dead:
        return f"The remote tier is dead at {few(dead)}, and what it holds is recomputed."
    if not traffic:
        return "Stores are up, without traffic yet."
    fetching = f"fetching from the remote tier is {f'off at {few(off)}' if off else 'on'}"
    return f"Engines share KV chunks; {fetching if remote else 'there is no remote tier'}."


def _doing(fleet: Json, modes: Mapping[str, str], waiting: int) -> str:
    if not fleet["leader"]:
        return "This agent stands by: another one leads."
    does = next(does for mode, does in DOES.items() if mode in modes.values() or mode == "observe")
    asks = f" {format_count(waiting, 'change')} to approve." if waiting else ""
    frozen = fleet["frozen"]
    return (does if not frozen else FROZEN if frozen["since"] else CALENDAR) + asks


def _stores(stores: Sequence[Json], unheard: Sequence[str]) -> Fact:
    silent = [*(store["name"] for store in stores if not store["reachable"]), *unheard]
    number = len(stores) + len(unheard)
    up = number - len(silent)
    level = "info" if not stores else "ok" if not silent else "warn" if up else "bad"
    return Fact("Stores", f"{up} of {number} up{f', no answer from {few(silent)}' if silent else ''}", level)


def _sources(sources: Sequence[Json], unheard: Sequence[str]) -> Fact:
    up, number = sum(source["reachable"] for source in sources), len(sources) + len(unheard)
    return Fact("Observed", f"{up} of {number} answer", "ok" if up == number else "warn")


def _frozen(frozen: Json | None) -> Fact:
    if not frozen:
        return Fact("Changes", "allowed", "ok")
    if not frozen["since"]:
        return Fact("Changes", f"only commanded ones, {frozen['reason']}", "warn")
    until = f" until {frozen['until'][:16].replace('T', ' ')} UTC" if frozen["until"] else ""
    return Fact("Changes", f"frozen{until}, by {frozen['who']}: {frozen['reason']}", "warn")


def _bypass(stores: Sequence[Json], unheard: Sequence[Json]) -> Fact:
    on = [store["name"] for store in stores if store["bypass"]]
    late = [store["name"] for store in stores if store["pending_bypass"] not in (None, store["bypass"])]
    late += [store["name"] for store in unheard]
    if late:
        return Fact("Bypass", f"not yet acknowledged by {few(late)}", "warn")
    return Fact("Bypass", f"on for {few(on)}", "warn") if on else Fact("Bypass", "off", "ok")
