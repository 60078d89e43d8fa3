"""When a tier is asked no more, and when again."""

import pytest

from tiertune_connector.tiers.base import Outcome
from tiertune_connector.tiers.breaker import STATES, Breaker

OK, MISS, ERROR, TIMEOUT = Outcome.OK, Outcome.MISS, Outcome.ERROR, Outcome.TIMEOUT


def after(*outcomes: Outcome) -> Breaker:
    breaker = Breaker()
    for outcome in outcomes:
        breaker.record(outcome)
    return breaker


@pytest.mark.parametrize(
    ("outcomes", "state", "open_", "unsettled"),
    [
        ((), "ok", False, False),
        ((OK, MISS, Outcome.CORRUPT, Outcome.FULL), "ok", False, False),
        ((ERROR,), "ok", False, True),
        ((TIMEOUT,), "slow", False, True),
        ((TIMEOUT, OK), "ok", False, False),
        ((ERROR, ERROR, OK, ERROR, ERROR), "ok", False, True),
        ((ERROR, TIMEOUT, ERROR), "dead", True, False),
        ((TIMEOUT, TIMEOUT, TIMEOUT, TIMEOUT), "dead", True, False),
        ((ERROR, ERROR, ERROR, OK), "recovering", True, True),
        ((ERROR, ERROR, ERROR, OK, TIMEOUT), "dead", True, True),
        ((ERROR, ERROR, ERROR, MISS, OK), "ok", False, False),
    ],
)  # fmt: skip
def test_states(outcomes, state, open_, unsettled):
    """Three failures in a row open it, two successes in a row close it; misses and a full tier are no failures."""
    breaker = after(*outcomes)
    assert (breaker.state, breaker.open, breaker.unsettled) == (state, open_, unsettled)
    assert breaker.state in STATES
    assert bool(breaker.reason) == (bool(outcomes) and outcomes[-1] in (ERROR, TIMEOUT)) or state == "recovering"


def test_a_tier_without_probes_is_tried_again():
    """Its next failure opens the breaker at once; a success settles it. One that is well is left alone."""
    breaker = after(ERROR, ERROR, ERROR)
    breaker.try_again()
    assert (breaker.state, breaker.open) == ("slow", False)
    breaker.record(ERROR)
    assert breaker.state == "dead"
    breaker.try_again()
    breaker.record(OK)
    assert breaker.state == "ok"
    breaker.try_again()
    assert breaker.state == "ok"
