"""What loads that waited for a slower tier teach about it."""

from concurrent.futures import Future
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from tiertune_connector.slower.arrivals import Arrival, Arrivals
from tiertune_connector.tiers.base import Outcome
from tiertune_connector.tiers.breaker import Breaker


@dataclass(frozen=True, eq=False)
class Lane:
    name: str
    breaker: Breaker
    transit: SimpleNamespace
    hangs: bool = True


@pytest.mark.parametrize(("timeouts", "expected"), [(0, [(0.1, 4.0)]), (3, [])])
def test_how_long_a_dead_tier_was_waited_for_is_no_cost(timeouts, expected):
    """A load that gives up teaches that a fetch takes longer, but for one from a tier that hangs."""
    breaker, told = Breaker(), []
    for _ in range(timeouts):
        breaker.record(Outcome.TIMEOUT)
    assert breaker.open == bool(timeouts)
    transit = SimpleNamespace(given_up=lambda *given: told.append(given))
    lane = Lane("remote", breaker, transit)
    arrivals = Arrivals(None, {"remote": lane}, lambda: 5.0, None)
    late = Arrival(("a", b"key"), lane, None, era=0, since=1.0, predicted_s=0.1)
    assert arrivals.waited([late], 1.0) == {"remote": 4.0}
    assert told == expected


def test_what_comes_from_another_tier_than_the_dead_one_is_not_given_up():
    """A disk that hangs costs nothing of what the remote brings."""
    aborted = []
    transit = SimpleNamespace(ended=lambda *_: None)
    lanes = {tier: Lane(tier, Breaker(), transit) for tier in ("disk", "remote")}
    dram = SimpleNamespace(abort=lambda _namespace, key, _slot, *, quarantine: aborted.append((key, quarantine)))
    arrivals = Arrivals(dram, lanes, lambda: 5.0, None)
    for tier, lane in lanes.items():
        place = "a", tier.encode()
        arrival = arrivals._coming[place] = Arrival(place, lane, SimpleNamespace(nbytes=1), 0, 1.0, None)
        arrival.done = Future()
    arrivals.give_up(lanes["disk"])
    assert aborted == [(b"disk", False)]
    assert arrivals.coming("a", [b"disk", b"remote"]) == {"remote": 1}
