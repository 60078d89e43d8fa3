"""Copies and their sums: on one thread, and on two."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiertune_connector import copying
from tiertune_connector.chunk import checksum
from tiertune_connector.copying import Copier, PartialCopy, copy_checked

LONG = 4 << 20


@pytest.fixture
def copier():
    made = Copier()
    yield made
    made.close()


def payload(nbytes, seed=0):
    return np.frombuffer(np.random.default_rng(seed).bytes(nbytes), np.uint8)


@given(nbytes=st.integers(0, 3) | st.integers(200_000, 1_100_000), seed=st.integers(0, 9))
def test_a_copy_is_summed_as_it_is_made(nbytes, seed):
    """Also where it ends within a window: the bytes are the same, and the sum is that of a whole payload."""
    data = np.frombuffer(np.random.default_rng(seed).bytes(nbytes), np.uint8)
    out = np.zeros(nbytes, np.uint8)
    assert copy_checked(out, data) == checksum(data.tobytes())
    assert out.tobytes() == data.tobytes()


@given(ends=st.lists(st.integers(0, 700_000), max_size=6), seed=st.integers(0, 9))
def test_a_copy_in_parts_is_the_same_copy(ends, seed):
    """Wherever the parts end, and whether or not they go forward: each byte is copied once, and summed."""
    data = np.frombuffer(np.random.default_rng(seed).bytes(700_000), np.uint8)
    out, copy, done = np.zeros(700_000, np.uint8), PartialCopy(), 0
    for end in ends:
        done = max(done, end)
        assert copy.advance(out, data, end) == checksum(data[:done].tobytes())
        assert out[:done].tobytes() == data[:done].tobytes()
        assert not out[done:].any()
    assert copy.advance(out, data, len(data)) == checksum(data.tobytes())
    assert out.tobytes() == data.tobytes()


@pytest.mark.parametrize("nbytes", [0, 1, 262_144, 262_145, 524_289, 600_001])
def test_a_payload_of_another_length_is_refused(nbytes):
    """Else it would be cut, or repeated, and its sum would be right."""
    with pytest.raises(ValueError, match="does not go into"):
        copy_checked(np.zeros(600_000, np.uint8), np.zeros(nbytes, np.uint8))


class Paced:
    """A clock by which copies take what is said, whichever way they go."""

    def __init__(self, monkeypatch, *, aside_s, alone_s):
        self.now, self.ways = 0.0, []
        self.aside_s, self.alone_s = aside_s, alone_s
        self.copier = Copier(lambda: self.now)
        monkeypatch.setattr(copying, "copy_checked", lambda _out, _data: self.went(False))
        monkeypatch.setattr(self.copier, "_copy_aside", lambda _out, _data: self.went(True))

    def went(self, aside):
        self.ways.append(aside)
        self.now += self.aside_s if aside else self.alone_s
        return 0

    def copies(self, count):
        self.ways = []
        for _ in range(count):
            self.copier.copy(np.zeros(LONG, np.uint8), np.zeros(LONG, np.uint8))
        return self.ways


@pytest.mark.parametrize("nbytes", [0, LONG - 1, LONG, LONG + 1, 3 * LONG + 77])
def test_both_ways_copy_and_sum_alike(copier, nbytes):
    """Short and long ones, whichever way is chosen for them."""
    data = payload(nbytes)
    for _ in range(4):
        out = np.zeros(nbytes, np.uint8)
        assert copier.copy(out, data) == checksum(data.tobytes())
        assert out.tobytes() == data.tobytes()


@pytest.mark.parametrize("nbytes", [LONG - 1, LONG + 1, 2 * LONG])
def test_both_ways_refuse_another_length(copier, nbytes):
    """However often they are tried."""
    for _ in range(3):
        with pytest.raises(ValueError, match="does not go into"):
            copier.copy(np.zeros(LONG, np.uint8), payload(nbytes))
    data = payload(LONG)
    assert copier.copy(np.zeros(LONG, np.uint8), data) == checksum(data.tobytes())


def test_the_quicker_way_is_taken_and_the_other_tried_now_and_then(monkeypatch):
    """Nothing is known at first, so each is tried; when the machine becomes busy, the way changes."""
    paced = Paced(monkeypatch, aside_s=1.0, alone_s=2.0)
    assert paced.copies(2) == [True, False]
    assert paced.copies(160).count(False) == 10
    paced.aside_s = 4.0
    paced.copies(32)
    assert paced.copies(160).count(True) == 10
    paced.aside_s = 1.0
    paced.copies(160)
    assert paced.copies(160).count(False) == 10


def test_a_copy_beside_another_does_not_wait_for_it(monkeypatch, copier):
    """There is one second thread: who finds it taken sums on its own."""
    going, go_on, data = threading.Event(), threading.Event(), payload(LONG)

    def held(given):
        going.set()
        assert go_on.wait(10)
        return checksum(given)

    monkeypatch.setattr(copying, "checksum", held)
    sums = []
    first = threading.Thread(target=lambda: sums.append(copier.copy(np.zeros(LONG, np.uint8), data)))
    first.start()
    assert going.wait(10)
    assert copier.copy(np.zeros(LONG, np.uint8), data) == checksum(data)
    go_on.set()
    first.join(10)
    assert sums == [checksum(data)]
