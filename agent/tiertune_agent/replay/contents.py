"""What every request finds in the tiers. Contents do not depend on what is fetched: every chain is written through."""

from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tiertune_agent.replay.fleet import FleetPools
from tiertune_agent.replay.scenario import ByHand, Scenario
from tiertune_agent.replay.traces import Trace, TraceError

if TYPE_CHECKING:
    from tiertune_agent.replay.tuned import ReplayAgent

LONGEST_DAYS = 366
"""Most days that a replay plays: longer times are not in seconds."""
_STICKY = np.uint64(0x9E3779B97F4A7C15)


class ReplayedRequest(NamedTuple):
    """One request and the tiers of its longest gapless prefix."""

    at_s: float
    """Seconds from the first request."""
    prompt_tokens: int
    tiers: list[str]
    engine: int = 0


def arrivals(trace: Trace, scenario: Scenario) -> list[float]:
    """Seconds from the first request to each; TraceError if they exceed ``LONGEST_DAYS``."""
    times: list[float] = ((trace.t - trace.t[0]) * scenario.time_factor).tolist()
    if times[-1] > LONGEST_DAYS * 86400:
        raise TraceError(
            f"{trace.name}: column 't' and time_factor make {times[-1] / 86400:,.0f} days, and a replay plays "
            f"{LONGEST_DAYS} at most: times are in seconds"
        )
    return times


def route(trace: Trace, scenario: Scenario, rng: np.random.Generator) -> list[int] | None:
    """The engine of every request; None if it depends on the outcome of earlier requests."""
    count = len(trace)
    if scenario.routing == "least_loaded":
        return None
    if scenario.routing == "sticky":
        return stick(trace, scenario.engines)
    by_chance = scenario.routing == "random"
    engines = rng.integers(0, scenario.engines, count) if by_chance else np.arange(count) % scenario.engines
    placed: list[int] = engines.tolist()
    return placed


def stick(trace: Trace, engines: int) -> list[int]:
    """The engine of every request, picked by a hash of its session."""
    hashed = (trace.session.astype(np.uint64) * _STICKY) >> np.uint64(33)
    placed: list[int] = (hashed % np.uint64(engines)).tolist()
    return placed


def contents(
    trace: Trace,
    scenario: Scenario,
    engines: Iterable[int],
    fleet: FleetPools,
    conductor: "ReplayAgent | None" = None,
) -> Iterator[ReplayedRequest]:
    """Play the trace through the fleet's pools lazily: a request is looked up only when the iterator is asked for it.

    ``conductor`` is told of each request before its lookup, and before somebody changes the fleet by hand; it may
    change the fleet then. The next of ``engines`` is read only then, too, as it may depend on the outcome of earlier
    requests.
    """
    requests = zip(arrivals(trace, scenario), trace.input_len.tolist(), trace.chains, engines, strict=True)
    by_hand = sorted(((event.at_s, event.by_hand) for event in scenario.events if event.by_hand), key=itemgetter(0))
    for index, (at_s, prompt, chain, engine) in enumerate(requests):
        while by_hand and by_hand[0][0] <= at_s:
            done_s, change = by_hand.pop(0)
            if conductor is not None:
                conductor.until(done_s)
            _do(change, fleet)
        if conductor is not None:
            conductor.request(index, at_s, engine)
        tiers = fleet.find(engine, chain)
        yield ReplayedRequest(at_s, prompt, tiers, engine)
        fleet.write_through(engine, chain, tiers)


def _do(by_hand: ByHand, fleet: FleetPools) -> None:
    fleet.resize(dram=int(by_hand.dram_factor * fleet.dram_pools[0].capacity))
    if by_hand.eviction is not None:
        fleet.switch(by_hand.eviction)
