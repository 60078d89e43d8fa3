"""What a slower tier's threads report of their chunks, and what it teaches about its cost."""

import pytest

from tiertune_connector.slower.transit import Transit
from tiertune_connector.tiers.base import Outcome

CHUNK = 1 << 20


@pytest.fixture
def transit(clock):
    """Of a tier whose chunks have come in a tenth of a second each."""
    made = Transit(clock)
    for _ in range(8):
        brought(made, clock, 0.1, Outcome.OK)
    return made


def brought(transit, clock, seconds, outcome):
    transit.asked(CHUNK)
    clock.now += seconds
    transit.ended(CHUNK, outcome)


def fetched_s(transit):
    return transit.estimate().seconds(1, CHUNK)


def test_what_timed_out_costs_more_and_what_failed_no_less(transit, clock):
    """A tier that hangs is believed to be slow; one that refuses at once is not believed to be fast."""
    before = fetched_s(transit)
    brought(transit, clock, 0.0, Outcome.ERROR)
    assert fetched_s(transit) == pytest.approx(before)
    brought(transit, clock, 10.0, Outcome.TIMEOUT)
    assert fetched_s(transit) > 2 * before


def test_an_answer_without_bytes_tells_the_round_trip(transit):
    """Part of what chunks took is the way there and back, of which their number and not their size pays."""
    before = transit.estimate().seconds(1, 1)
    transit.answered(1e-2)
    assert transit.estimate().seconds(1, 1) == pytest.approx(1e-2, rel=0.1)
    assert transit.estimate().seconds(1, 1) != pytest.approx(before, rel=0.1)
