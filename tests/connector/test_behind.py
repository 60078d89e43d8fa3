"""Writing behind: which chunks are admitted to which slower tier."""

import pytest

from connector.stores import chain, payload, view
from tiertune_connector.behind import WriteBehind
from tiertune_connector.chunk import NOBODY
from tiertune_connector.tiers.dram import DramTier
from tiertune_connector.tiers.segment import PAGE
from tiertune_connector.tuning import parse_tuning

A = "a" * 32


class FakeLane:
    """Takes everything and keeps what it was given."""

    class breaker:  # noqa: N801 (as the lane's attribute)
        open = False

    def __init__(self):
        self.keys = []

    def write_behind(self, write, *, at_most):
        assert at_most > 0
        self.keys.append(write.key)

    def queued(self):
        return 0


@pytest.fixture
def tier(clock):
    tier = DramTier(segment_bytes=16 * PAGE, clock=clock)
    tier.attach(A, PAGE, "lru")
    tier.retune(16 * PAGE, {})
    while tier.settle():
        pass
    yield tier
    tier.close()


def tuning(**admission):
    tiers = {"dram": {"capacity_bytes": 16 * PAGE}, "disk": {"capacity_bytes": PAGE, "write": "commit"}}
    return parse_tuning({"tiers": {**tiers, "remote": {"write": "commit"}}, "admission": admission})


def test_a_copy_to_one_tier_is_no_use_for_another(tier):
    """Everything goes to disk, to remote only what was used a second time: writing to disk is no use."""
    lanes = {"disk": FakeLane(), "remote": FakeLane()}
    behind, (key,) = WriteBehind(tier, lanes), chain("k", 1)
    tier.write(A, key, view(payload(key, PAGE)), NOBODY)
    slot = tier.pools[A].pool.get(key)
    rules = tuning(disk="always", remote="second_access")
    behind.used(rules, A, [(key, slot)])
    assert (lanes["disk"].keys, lanes["remote"].keys) == ([key], [])
    slot.uses += 1
    behind.used(rules, A, [(key, slot)])
    assert (lanes["disk"].keys, lanes["remote"].keys) == ([key], [key])


def test_what_leaves_tells_whether_it_was_used(tier):
    """A chunk that nobody read after it came, written behind or not, leaves unused; a pin for a reader is a use."""
    left = []
    tier.on_evicted = left.extend
    keys = chain("k", 2)
    for key in keys:
        tier.write(A, key, view(payload(key, PAGE)), NOBODY)
        tier.pin(A, key, use=key == keys[1])
        tier.unpin(A, key)
    tier.retune(0, {})
    while tier.settle():
        pass
    assert sorted(chunk.used for chunk in left) == [False, True]
