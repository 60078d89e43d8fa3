"""Half an hour of everything at once: faults at random over a store with every tier, engines that check each byte."""

import os

import pytest

from connector.stores import short_folder
from e2e.soak import assert_flat, soak
from long.results import SOAK, record

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(2700)]
SECONDS = float(os.environ.get("TIERTUNE_SOAK_SECONDS", "1800"))
SEED = int(os.environ.get("TIERTUNE_SOAK_SEED", "1"))


def test_half_an_hour_of_faults_gives_no_wrong_byte_and_keeps_no_memory():
    """Resizes, switches, flushes, kills and stops: whatever is read is what was written; memory is flat."""
    with short_folder() as home:
        figures = soak(home, seconds=SECONDS, seed=SEED)
    record("soak", f"seed {SEED}", figures, file=SOAK)
    assert figures["engines"]["chunks"] > 10 * SECONDS
    assert len(figures["faults"]) == 11, "every kind of fault was there"
    assert_flat(figures)
