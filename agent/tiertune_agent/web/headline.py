"""What TierTune is doing, in one sentence, and the few facts behind it. Pure."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tiertune_agent.fields import Json, read
from tiertune_agent.tuners.base import present

DOES = {
    "auto": "TierTune changes settings by itself where the figures say so",
    "recommend": "TierTune recommends changes and waits for approval",
    "observe": "TierTune only watches and changes nothing",
}


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


def headline(
    fleet: Json, modes: Mapping[str, str], *, traffic: bool, waiting: int, switched_off: Collection[str]
) -> Headline:
    """``modes``: of the tuners that may change something, by name; ``traffic``: whether requests came lately.

    ``waiting``: open proposals; ``switched_off``: stores where a decision switched fetching off.
    """
    stores, sources = [
        [store for store in fleet["stores"] if bool(store["observed"]) == observed] for observed in (False, True)
    ]
    unheard, unseen = fleet["unheard"]["stores"], fleet["unheard"]["sources"]
    up = [store for store in stores if store["reachable"]]
    if (sources or unseen) and not stores and not unheard:
        return _only_observed(sources, fleet, traffic=traffic)
    facts = (
        _stores(stores, up, unheard),
        *([_sources(sources, unseen)] if sources or unseen else []),
        Fact("Mode", ", ".join(f"{what} {mode}" for what, mode in modes.items())),
        _frozen(fleet["frozen"]),
        _bypass(stores, fleet["bypass_unheard"]),
        _incidents(fleet["incidents"]),
    )
    if not stores:
        return Headline("info", "Waiting for the first store to answer.", "", facts)
    if not up:
        return Headline("bad", "No store answers, so TierTune can neither measure nor change anything.", "", facts)
    sentence = _joined(_answering(stores, up, unheard), _sharing(up, traffic=traffic, switched_off=switched_off))
    return Headline(_worst(facts), sentence, _joined(_doing(fleet, modes), _waiting(waiting)), facts)


def _only_observed(sources: Sequence[Json], fleet: Json, *, traffic: bool) -> Headline:
    up = [source for source in sources if source["reachable"]]
    facts = (_sources(sources, fleet["unheard"]["sources"]), _incidents(fleet["incidents"]))
    if not sources:
        return Headline("info", "Waiting for the first source to answer.", "", facts)
    if not up:
        return Headline("bad", "No observed source answers, so nothing is measured.", "", facts)
    subject = "One source is" if len(up) == 1 else f"{len(up)} sources are"
    idle = "" if traffic else ", without traffic yet"
    more = "TierTune measures and advises; it cannot change anything there."
    return Headline(_worst(facts), f"{subject} observed{idle}; there is no store of TierTune.", more, facts)


def _worst(facts: Iterable[Fact]) -> str:
    levels = {fact.level for fact in facts}
    return next((level for level in ("bad", "warn") if level in levels), "ok")


def names(stores: Iterable[Json]) -> str:
    """``a``, ``a and b``, ``a, b and c``, ``a, b and 5 more``."""
    return _few([str(store["name"]) for store in stores])


def _few(listed: Sequence[str]) -> str:
    return _listed([*listed[:2], f"{len(listed) - 2} more"] if len(listed) > 3 else listed)


def _listed(words: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def _answering(stores: Sequence[Json], up: Sequence[Json], unheard: Sequence[str]) -> str:
    silent = [store for store in stores if not store["reachable"]]
    told = [f"{names(silent)} {'does' if len(silent) == 1 else 'do'} not answer"] if silent else []
    if unheard:
        told.append(f"{'nothing' if silent else 'Nothing'} is known of {_few(unheard)} yet")
    return f"{', and '.join(told)} ({len(up)} of {len(stores) + len(unheard)} up)." if told else ""


def _sharing(up: Sequence[Json], *, traffic: bool, switched_off: Collection[str]) -> str:
    bypassed = [store for store in up if store["bypass"]]
    if len(bypassed) == len(up):
        return "All stores are bypassed: they answer miss, and engines recompute everything."
    if bypassed:
        return f"{names(bypassed)} {'is' if len(bypassed) == 1 else 'are'} bypassed: engines there recompute."
    remote = [store for store in up if present(store, "remote")]
    off = [store for store in remote if read(store, "tuning.tiers.remote.fetch") == "off"]
    subject = _serving(len(up), traffic=traffic)
    if not remote:
        return f"{subject}; there is no remote tier."
    dead = [store for store in remote if read(store, "tiers.remote.health") == "dead"]
    if dead:
        return f"{subject}; the remote tier is dead {_where(dead, remote)}, and what it holds is recomputed."
    if not off:
        return f"{subject}; fetching from the remote tier is on."
    because = ", because recomputing is faster now" if all(store["name"] in switched_off for store in off) else ""
    return f"{subject}; fetching from the remote tier is off {_where(off, remote)}{because}."


def _where(some: Sequence[Json], every: Sequence[Json]) -> str:
    return "everywhere" if len(some) == len(every) else f"on {names(some)}"


def _serving(number: int, *, traffic: bool) -> str:
    if number == 1:
        return "One store shares KV chunks among its engines" if traffic else "One store is up, no traffic yet"
    return f"{number} stores share KV chunks" if traffic else f"{number} stores are up, no traffic yet"


def _joined(*sentences: str) -> str:
    return " ".join(sentence for sentence in sentences if sentence)


def _doing(fleet: Json, modes: Mapping[str, str]) -> str:
    if not fleet["leader"]:
        return "This agent stands by: another one leads."
    if fleet["frozen"]:
        return f"Frozen: nothing changes{_until(fleet['frozen'])}."
    auto = [what for what, mode in modes.items() if mode == "auto"]
    rest = set(modes.values()) - {"auto"}
    if auto and rest:
        does = "recommends" if "recommend" in rest else "watches"
        return f"TierTune sets {_listed(auto)} by itself and only {does} everything else."
    return f"{DOES['auto' if auto else 'recommend' if 'recommend' in rest else 'observe']}."


def _waiting(number: int) -> str:
    if not number:
        return ""
    return "One change waits for approval." if number == 1 else f"{number} changes wait for approval."


def _until(frozen: Json) -> str:
    return f" until {str(frozen['until'])[:16].replace('T', ' ')} UTC" if frozen["until"] else ""


def _stores(stores: Sequence[Json], up: Sequence[Json], unheard: Sequence[str]) -> Fact:
    number = len(stores) + len(unheard)
    level = "info" if not stores else "ok" if len(up) == number else "warn" if up else "bad"
    return Fact("Stores", f"{len(up)} of {number} up", level)


def _sources(sources: Sequence[Json], unheard: Sequence[str]) -> Fact:
    up, number = sum(source["reachable"] for source in sources), len(sources) + len(unheard)
    return Fact("Observed", f"{up} of {number} answer", "ok" if up == number else "warn")


def _frozen(frozen: Json | None) -> Fact:
    if not frozen:
        return Fact("Changes", "allowed", "ok")
    who = "" if frozen["who"] == "policy" else f"by {frozen['who']}: "
    return Fact("Changes", f"frozen{_until(frozen)}, {who}{frozen['reason']}", "warn")


def _bypass(stores: Sequence[Json], unheard: Sequence[Json]) -> Fact:
    on = [store for store in stores if store["bypass"]]
    late = [store for store in stores if store["pending_bypass"] not in (None, store["bypass"])] + [*unheard]
    if late:
        return Fact("Bypass", f"not yet acknowledged by {names(late)}", "warn")
    return Fact("Bypass", f"on for {names(on)}", "warn") if on else Fact("Bypass", "off", "ok")


def _incidents(kinds: Mapping[str, int]) -> Fact:
    number = sum(kinds.values())
    return Fact("Incidents", f"{number} open" if number else "none", "bad" if number else "ok")
