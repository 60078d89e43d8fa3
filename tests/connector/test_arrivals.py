"""What loads that waited for a slower tier teach about it."""

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
