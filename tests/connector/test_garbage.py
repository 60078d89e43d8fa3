"""Cyclic garbage is found among new objects, and among all of them now and then.

Each in a process of its own: what other tests leave would be counted as well, and be freed meanwhile.
"""

import subprocess
import sys

RING = """
import gc, weakref
from tiertune_connector.serve import garbage

class Ring:
    "Refers to itself, so that counting references never frees it."
    def __init__(self):
        self.itself = self
"""


def proven(steps):
    """What is asserted in these steps holds."""
    command = [sys.executable, "-c", RING + steps]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert not ended.returncode, ended.stderr


def test_new_garbage_is_freed_and_what_lives_is_looked_at_no_more():
    """However much lives, the next look goes through what came since."""
    proven("""
garbage._NEW = 100
collector = garbage.GarbageCollector()
living = [Ring() for _ in range(1000)]
gone = weakref.ref(Ring())
collector.tidy()
assert not gc.isenabled()
assert gone() is None
assert gc.get_freeze_count() >= len(living)
before = gc.get_freeze_count()
living.append(Ring())
collector.tidy()
assert gc.get_freeze_count() == before, "little is new: nothing is done"
""")


def test_what_becomes_garbage_later_is_found_when_there_is_twice_as_much():
    """Not before: that is what makes the others quick."""
    proven("""
few = 100_000
assert len(gc.get_objects()) < few // 3, "the interpreter's own decide nothing"
ring = Ring()
late = weakref.ref(ring)
garbage._NEW, garbage._FEW = 100, few
collector = garbage.GarbageCollector()
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
""")
