"""A minute of everything at once; `make test-long` has half an hour of it."""

import pytest

from connector.stores import short_folder
from e2e.soak import assert_flat, soak

SECONDS, SEED = 60.0, 20_26


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.timeout(240)
def test_a_minute_of_faults_gives_no_wrong_byte_and_keeps_no_memory():
    """Resizes, switches, flushes, kills and stops at random: whatever is read is what was written."""
    with short_folder() as home:
        figures = soak(home, seconds=SECONDS, seed=SEED)
    print(figures)  # noqa: T201 (told where it fails)
    assert figures["engines"]["chunks"] > 1000
    assert figures["engines"]["parts"] > 100
    assert len(figures["faults"]) == 11, "every kind of fault was there"
    assert_flat(figures)
