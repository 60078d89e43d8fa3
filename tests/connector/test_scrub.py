"""Damage on disk is found in the background, once, without making chunks look used."""

import os
import threading

import pytest

from connector.stores import STRIDE, A, B, Engine, Http, chain, counted, eventually, payload, running, view
from tiertune_connector.chunk import Origin
from tiertune_connector.counters import Counters
from tiertune_connector.slower.scrub import Scrubber
from tiertune_connector.tiers.base import Outcome
from tiertune_connector.tiers.disk import DiskTier
from tiertune_connector.tiers.segment import PAGE

NBYTES = 2 * PAGE
SLOT = 3 * PAGE
KEYS = chain("scrubbed", 6)


def opened(root) -> DiskTier:
    tier = DiskTier(root)
    tier.recover(64 * SLOT, "lru")
    tier.retune(64 * SLOT, {})
    return tier


def flip(root, slot: int, slot_bytes: int = SLOT, namespace: str = A) -> None:
    """A byte of the payload in a slot."""
    (path,) = root.glob(f"{namespace}-*.slab")
    with path.open("r+b") as file:
        file.seek(slot * slot_bytes + PAGE)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


@pytest.fixture
def left(tmp_path):
    """A tier that found six chunks of each of two namespaces, the second of one of them damaged; B's are larger."""
    tier = opened(tmp_path)
    for namespace, nbytes in ((A, NBYTES), (B, 2 * NBYTES)):
        for key in KEYS:
            assert tier.write(namespace, key, view(payload(key, nbytes)), Origin("host-a")) is Outcome.OK
    tier.close()
    flip(tmp_path, 1)
    tier = opened(tmp_path)
    yield tier
    tier.close()


def test_every_chunk_is_read_once_and_what_is_damaged_leaves(left):
    """The others stay, in the order in which they would be evicted."""
    counters, before = Counters(), list(left.pools[A].pool)
    scrubber = Scrubber(left, counters, lambda: 0.0)
    outcomes = [scrubber.step() for _ in range(2 * len(KEYS))]
    assert sorted(outcomes) == [Outcome.CORRUPT] + 11 * [Outcome.OK]
    assert scrubber.step() is None
    assert list(left.pools[A].pool) == [key for key in before if key != KEYS[1]]
    assert left.present(B, KEYS) == (Outcome.OK, 6)
    assert counted(counters, "tier_errors_total") == {("disk", "scrub", "corrupt"): 1}


def test_what_left_meanwhile_is_not_looked_for(left):
    """A flush ends the pass."""
    scrubber = Scrubber(left, Counters(), lambda: 0.0)
    assert scrubber.step() is not None
    left.flush()
    assert scrubber.step() is None


def test_what_this_run_wrote_is_not_read_again(tmp_path):
    """It was summed when it came."""
    tier = opened(tmp_path)
    tier.write(A, KEYS[0], view(payload(KEYS[0], NBYTES)), Origin("host-a"))
    assert Scrubber(tier, Counters(), lambda: 0.0).step() is None
    tier.close()


def test_a_pass_goes_on_after_what_nobody_foresaw(left, monkeypatch):
    """It is counted, and the chunks after it are verified."""
    counters, read, failing = Counters(), left.read, iter([True])
    monkeypatch.setattr("tiertune_connector.slower.scrub._LONGEST_PAUSE_S", 0.0)

    def looked_at(namespace, key, out, *, use):
        if next(failing, False):
            raise RuntimeError("nobody foresaw this")
        return read(namespace, key, out, use=use)

    left.read = looked_at
    Scrubber(left, counters, lambda: 0.0).run(threading.Event())
    assert counted(counters, "internal_errors_total") == {("scrub",): 1}
    assert counted(counters, "tier_errors_total") == {("disk", "scrub", "corrupt"): 1}
    assert left.next_unread() is None


def test_a_store_finds_damage_before_anybody_asks(home):
    """After a restart; the chunk is then a miss, and its room free."""
    with running(home, disk="4MiB") as process, Engine(home / "s.sock") as engine, Http(process.address) as http:
        http.retune(tiers__disk__write="commit")
        engine.put(KEYS)
        eventually(lambda: process.store.lanes["disk"].writers.queued() == 0)
    flip(home / "disk", 1, PAGE + STRIDE, namespace="*")
    with running(home, disk="4MiB") as process, Engine(home / "s.sock") as engine, Http(process.address) as http:
        eventually(lambda: http.total("tier_errors_total", operation="scrub", reason="corrupt") == 1)
        eventually(lambda: http.total("tier_operation_seconds", operation="scrub", outcome="ok") == 5)
        assert len(engine.find(KEYS)) < len(KEYS)
        for key in KEYS:
            assert engine.get([key]) in (0, 1)
