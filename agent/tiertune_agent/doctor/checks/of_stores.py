"""Checks of what stores report of themselves: reachable, clocks, versions, health of tiers. Pure."""

from tiertune_agent.doctor.checks.of_agent import ALSO_LOOKED_FOR
from tiertune_agent.doctor.facts import AllFacts, StoreFacts
from tiertune_agent.doctor.finding import Found, Told, check, of_store
from tiertune_agent.fields import Json, read
from tiertune_agent.incidents.detectors import GROWS_BY
from tiertune_connector.units import format_count, format_duration, format_size

SKEW_S = 2.0
"""Smaller differences between clocks do no harm."""
SETTLED_S = 120.0
"""A younger store may still be taking its memory, and its engines may still be starting."""
SHORT_BY = 0.1
"""Share of a capacity that may be missing, as slots are whole chunks."""


@check("error")
def store_unreachable(facts: AllFacts) -> Found:
    """A store that only wants a token, or that the agent reaches, is no fault: the report lists it as not checked."""
    for store in facts.stores:
        if not (store.answers or store.closed or store.heard):
            wrong = f"no store answers at {store.url}: {store.problem}"
            yield store.name, wrong, ALSO_LOOKED_FOR["store_unreachable"]


@check("warning")
def clock_skew(facts: AllFacts) -> Found:
    """Against the agent's clock; without one, against this host's."""
    base, whose = facts.agent.clock, "the agent's" if facts.agent.answers else "this host's"
    for store in facts.answering:
        ahead_s, doubt_s = store.clock.ahead_s - base.ahead_s, store.clock.doubt_s + base.doubt_s
        if abs(ahead_s) > SKEW_S + doubt_s:
            way = "ahead of" if ahead_s > 0 else "behind"
            wrong = f"its clock is {format_duration(abs(ahead_s))} {way} {whose}"
            yield store.name, wrong, "run a time service (chrony, systemd-timesyncd) on both hosts"


@check("warning")
def version_mismatch(facts: AllFacts) -> Found:
    for store in facts.answering:
        own = str(store.status.get("version") or "")
        if own and own != facts.version:
            wrong = f"it runs version {own}, this command is version {facts.version}"
            yield store.name, wrong, "install one version everywhere: stop the agents first, start them last"


@of_store("error")
def engines_refused(store: StoreFacts) -> Told:
    mends = {
        "protocol": "install one version of tiertune beside the engines and at the store",
        "chunk_size": "set the same chunk_tokens at all engines of the model, and restart them",
    }
    for reason, count in store.counted.split("rejected_hellos_total", "reason").items():
        times = format_count(count, "time")
        wrong = f"engines were turned away {times} since it started ({reason}): they recompute everything"
        yield wrong, mends.get(reason, "look at the engines' logs: they tell why")


@of_store("error")
def tier_dead(store: StoreFacts) -> Told:
    for tier, state in store.tiers.items():
        servers = _dead_servers(state)
        dead = [f"{one.get('server') or 'a server'}: {one.get('reason') or 'no reason told'}" for one in servers]
        if state.get("health") in ("dead", "recovering") or dead:
            reason = "; ".join(dead) or str(state.get("reason") or "no reason told")
            yield f"{tier} is {state['health']}: {reason}", _DEAD.get(tier, ALSO_LOOKED_FOR["tier_dead"])


_DEAD = {
    "remote": "start the remote, or mend its address, password, rights, tls or way; requests meanwhile recompute",
    "disk": "make room on the disk or mend it; the store tries again by itself",
}


@of_store("warning")
def tier_slow(store: StoreFacts) -> Told:
    """Its last operation timed out, or it is full."""
    for tier, state in store.tiers.items():
        if state.get("health") == "slow" and not _dead_servers(state):
            reason = str(state.get("reason") or "no reason told")
            yield f"{tier} is slow: {reason}", _FULL if "full: " in reason else _SLOW


_SLOW = "look at its host and at the network between; measure it: doctor --storage"
_FULL = "make room (df -h; Redis: maxmemory-policy allkeys-lru), or lower its capacity; what it has is read meanwhile"


def _dead_servers(state: Json) -> list[Json]:
    return [one for one in state.get("servers") or () if one.get("health") == "dead"]


@of_store("warning")
def capacity_not_effective(store: StoreFacts) -> Told:
    pools = [(pool, read(pool, "dram.applied.capacity_bytes") or 0) for pool in store.pools.values()]
    grows_s = sum(wanted for _, wanted in pools) / GROWS_BY  # one after another
    if float(store.status.get("uptime_s") or 0.0) < SETTLED_S + grows_s:
        return
    for pool, wanted in pools:
        has = read(pool, "dram.effective.capacity_bytes")
        if has is not None and has < (1 - SHORT_BY) * wanted:
            wrong = f"dram has {format_size(has)} of {format_size(wanted)} for {pool.get('model') or 'a pool'}"
            mend = "the host has no more memory: lower the capacity, or raise the container's limit"
            yield wrong, mend


@of_store("warning")
def no_engine(store: StoreFacts) -> Told:
    uptime_s = float(store.status.get("uptime_s") or 0.0)
    if "clients" in store.status and not store.clients and uptime_s > SETTLED_S:
        wrong = f"no engine is connected; it has been up for {format_duration(uptime_s)}"
        yield wrong, "name its socket in kv_connector_extra_config, under the same user, on the same host"
