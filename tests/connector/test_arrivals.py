"""What loads that waited for a slower tier teach about it."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from tiertune_connector.slower.arrivals import Arrival, Arrivals
from tiertune_connector.tiers.base import Outcome
from tiertune_connector.tiers.breaker import Breaker


@pytest.mark.parametrize(("timeouts", "expected"), [(0, [(0.1, 4.0)]), (3, [])])
def test_how_long_a_dead_tier_was_waited_for_is_no_cost(timeouts, expected):
    """A load that gives up teaches that a fetch takes longer, but for one from a tier that hangs."""
    breaker, told = Breaker(), []
    for _ in range(timeouts):
        breaker.record(Outcome.TIMEOUT)
    assert breaker.open == bool(timeouts)
    lane = SimpleNamespace(breaker=breaker, transit=SimpleNamespace(given_up=lambda *given: told.append(given)))
    arrivals = Arrivals(None, {"remote": lane}, None, lambda: 5.0, None)
    late = Arrival("remote", None, era=0, since=1.0, predicted_s=0.1)
    assert arrivals.waited([late], 1.0) == {"remote": 4.0}
    assert told == expected


def test_what_comes_from_another_tier_than_the_dead_one_is_not_given_up():
    """A disk that hangs costs nothing of what the remote brings."""
    aborted = []
    lane = SimpleNamespace(breaker=Breaker(), transit=SimpleNamespace(ended=lambda *_: None))
    dram = SimpleNamespace(abort=lambda _namespace, key, _slot, *, quarantine: aborted.append((key, quarantine)))
    arrivals = Arrivals(dram, {"disk": lane, "remote": lane}, None, lambda: 5.0, None)
    for tier in arrivals.lanes:
        arrival = Arrival(tier, SimpleNamespace(nbytes=1), era=0, since=1.0, predicted_s=None)
        arrival.done = Future()
        arrivals._coming["a", tier.encode()] = arrival
    arrivals.give_up("disk", hangs=True)
    assert aborted == [(b"disk", False)]
    assert arrivals.coming("a", [b"disk", b"remote"]) == {"remote": 1}
