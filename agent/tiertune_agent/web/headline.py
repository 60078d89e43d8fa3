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


Modes = Mapping[str, Mapping[str, str]]
"""Of the tuners that may change something: by name, and by the place where they hold."""


def headline(fleet: Json, modes: Modes, *, traffic: bool, waiting: int) -> Headline:
    """``traffic``: whether requests came lately; ``waiting``: open proposals."""
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
        mode = Fact("Mode", ", ".join(f"{what} {_mode(places)}" for what, places in modes.items()))
        told += [mode, _frozen(fleet), _bypass(stores, fleet["bypass_unheard"])]
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


def _doing(fleet: Json, modes: Modes, waiting: int) -> str:
    if not fleet["leader"]:
        return "This agent stands by: another one leads."
    held = {mode: {at for places in modes.values() for at, its in places.items() if its == mode} for mode in DOES}
    strongest = next((mode for mode, places in held.items() if places), "observe")
    frozen, rests = fleet["frozen"], held[strongest] and held[strongest] <= set(_resting(fleet))
    does = FROZEN if frozen and frozen["since"] else CALENDAR if frozen or rests else DOES[strongest]
    return does + (f" {format_count(waiting, 'change')} to approve." if waiting else "")


def tuned(fleet: Json) -> dict[str, Json]:
    """All that may be tuned, by name: the stores, and the remote if it is managed."""
    found = {store["name"]: store for store in fleet["stores"] if not store["observed"]}
    return {**found, **({"the remote": fleet["remote"]} if fleet["remote"] else {})}


def _resting(fleet: Json) -> list[str]:
    """Places where the policy's calendar lets nothing be changed now."""
    return [name for name, place in tuned(fleet).items() if place["frozen"]]


def _mode(places: Mapping[str, str]) -> str:
    """The mode of one tuner; if it has several, the strongest first."""
    *some, last = [mode for mode in DOES if mode in places.values()]
    at = [f"{mode} at {few([name for name, its in places.items() if its == mode])}, " for mode in some]
    return f"{''.join(at)}{'else ' if some else ''}{last}"


def _stores(stores: Sequence[Json], unheard: Sequence[str]) -> Fact:
    silent = [*(store["name"] for store in stores if not store["reachable"]), *unheard]
    number = len(stores) + len(unheard)
    up = number - len(silent)
    level = "info" if not stores else "ok" if not silent else "warn" if up else "bad"
    return Fact("Stores", f"{up} of {number} up{f', no answer from {few(silent)}' if silent else ''}", level)


def _sources(sources: Sequence[Json], unheard: Sequence[str]) -> Fact:
    up, number = sum(source["reachable"] for source in sources), len(sources) + len(unheard)
    return Fact("Observed", f"{up} of {number} answer", "ok" if up == number else "warn")


def _frozen(fleet: Json) -> Fact:
    frozen, resting = fleet["frozen"], _resting(fleet)
    if not frozen and resting:
        return Fact("Changes", f"only commanded ones at {few(resting)}, by the policy's calendar; else allowed", "warn")
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
