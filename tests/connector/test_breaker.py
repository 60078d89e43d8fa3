"""When a tier is asked no more, and when again."""

import pytest

from tiertune_connector.tiers.base import Outcome
from tiertune_connector.tiers.breaker import STATES, Breaker

OK, MISS, ERROR, TIMEOUT, FULL = Outcome.OK, Outcome.MISS, Outcome.ERROR, Outcome.TIMEOUT, Outcome.FULL


def after(*outcomes: Outcome) -> Breaker:
    breaker = Breaker()
    for outcome in outcomes:
        breaker.record(outcome)
    return breaker


@pytest.mark.parametrize(
    ("outcomes", "state", "open_", "unsettled"),
    [
        ((), "ok", False, False),
        ((OK, MISS, Outcome.CORRUPT, FULL), "ok", False, False),
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
    assert breaker.unwell == (open_ or unsettled)
    assert breaker.state in STATES
    assert bool(breaker.reason) == (bool(outcomes) and outcomes[-1] in (ERROR, TIMEOUT)) or state == "recovering"


def test_a_tier_without_probes_is_tried_again():
    """It is told as dead until a success, which settles it; a failure opens the breaker at once. A well one is left."""
    breaker = after(ERROR, ERROR, ERROR)
    breaker.try_again()
    assert (breaker.state, breaker.open) == ("dead", False)
    breaker.record(ERROR)
    assert (breaker.state, breaker.open) == ("dead", True)
    breaker.try_again()
    breaker.record(OK)
    assert breaker.state == "ok"
    breaker.try_again()
    assert breaker.state == "ok"


def written(breaker: Breaker, *outcomes: Outcome) -> Breaker:
    for outcome in outcomes:
        breaker.record(outcome, wrote=True)
    return breaker


def test_a_tier_without_room_is_read_and_not_written():
    """Some refusals may be chance; many in a row are told, whatever is read, until a write is taken."""
    breaker = written(Breaker(), *[FULL] * 7, OK, *[FULL] * 7)
    assert (breaker.paused, breaker.state) == (False, "ok")
    written(breaker, FULL)
    breaker.record(OK)
    assert (breaker.paused, breaker.open, breaker.unwell) == (True, False, False)
    assert (breaker.state, breaker.reason) == ("slow", "full: 8 writes in a row found no room")
    breaker.try_again(asking=False)
    assert (breaker.paused, breaker.state) == (False, "slow")
    written(breaker, FULL)
    assert (breaker.paused, breaker.state) == (True, "slow"), "one more is enough"
    breaker.try_again(asking=False)
    written(breaker, OK)
    assert (breaker.paused, breaker.state, breaker.reason) == (False, "ok", "")


def test_an_error_is_told_in_the_mediums_words_and_nothing_else_is():
    """What an earlier error met is not why an operation timed out, and a tier that is well has no reason."""
    breaker = Breaker()
    breaker.record(ERROR, why="Connection refused")
    assert breaker.reason == "an operation ended in error: Connection refused"
    breaker.record(TIMEOUT, why="Connection refused")
    assert breaker.reason == "2 operations in a row ended in timeout"
    breaker.record(OK, why="Connection refused")
    assert (breaker.state, breaker.reason) == ("ok", "")


@pytest.mark.parametrize(("outcome", "state", "least"), [(ERROR, "dead", 3), (FULL, "slow", 8)])
def test_a_reason_stays_the_same_however_long_it_lasts(outcome, state, least):
    """Stores that lost one remote say one thing of it, though some asked it more often: the page tells it once."""
    told = {written(Breaker(), *[outcome] * times).reason for times in (least, least + 1, 100 * least)}
    assert len(told) == 1
    assert written(Breaker(), *[outcome] * least).state == state


def test_a_full_tier_may_die_and_is_full_when_it_is_back():
    """Why it is not written is told by what is worse."""
    breaker = written(Breaker(), *[FULL] * 8, *[ERROR] * 3)
    assert (breaker.state, breaker.reason) == ("dead", "3 operations in a row ended in error")
    breaker.record(OK)
    breaker.record(OK)
    assert (breaker.state, breaker.paused) == ("slow", True)
