"""Cyclic garbage is found among new objects, and among all of them now and then."""

import gc
import weakref

import pytest

from tiertune_connector.serve.garbage import GarbageCollector

pytestmark = pytest.mark.slow


class Ring:
    """Refers to itself, so that counting references never frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def own_collector():
    """Python's, back again afterwards."""
    gc.collect()
    yield
    gc.unfreeze()
    gc.enable()


def test_new_garbage_is_freed_and_what_lives_is_looked_at_no_more():
    """However much lives, the next look goes through what came since."""
    collector = GarbageCollector(new=100)
    living = [Ring() for _ in range(1000)]
    gone = weakref.ref(Ring())
    collector.tidy()
    assert not gc.isenabled()
    assert gone() is None
    assert gc.get_freeze_count() >= len(living)
    before = gc.get_freeze_count()
    collector.tidy()
    assert gc.get_freeze_count() == before, "little is new: nothing is done"


def test_what_becomes_garbage_later_is_found_when_there_is_twice_as_much(monkeypatch):
    """Not before: that is what makes the others quick."""
    frozen, few = gc.get_freeze_count, 100_000  # what other tests left may go meanwhile: thousands of objects
    others = frozen() + len(gc.get_objects())  # a million in a long run, and not of this test
    monkeypatch.setattr(gc, "get_freeze_count", lambda: frozen() - others)
    ring = Ring()
    late = weakref.ref(ring)
    collector = GarbageCollector(new=100, few=few)
    living = [Ring() for _ in range(few * 3 // 5)]
    collector.tidy()
    del ring
    for _ in range(2):  # many are new, and then few are kept
        living += [Ring() for _ in range(few * 3 // 5 - 200)]
        collector.tidy()
        assert late() is not None
    living += [Ring() for _ in range(few)]
    collector.tidy()
    assert late() is None
    assert len(living) > 2 * few
