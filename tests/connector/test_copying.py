"""Copies and their sums: whole, and as far as has come."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiertune_connector.chunk import checksum
from tiertune_connector.client import copying
from tiertune_connector.client.copying import PartialCopy, copy_summed

WINDOW = 2 << 20
LENGTHS = st.integers(0, 3) | st.integers(900, 9000)


def copy_read(out, data):
    return PartialCopy().advance(out, data, len(data))


WAYS = (copy_summed, copy_read)


@pytest.fixture(scope="module", autouse=True)
def small_windows():
    """So that examples have many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "_WINDOW_BYTES", 1000)
        yield


def payload(nbytes, seed=0):
    return np.frombuffer(np.random.default_rng(seed).bytes(nbytes), np.uint8)


@given(nbytes=LENGTHS, seed=st.integers(0, 9))
def test_a_copy_is_summed_as_it_is_made(nbytes, seed):
    """Also where it ends within a window: the bytes are the same, and the sum is that of a whole payload."""
    data = payload(nbytes, seed)
    for copy in WAYS:
        out = np.zeros(nbytes, np.uint8)
        assert copy(out, data) == checksum(data.tobytes())
        assert out.tobytes() == data.tobytes()


@given(nbytes=st.integers(900, 9000), seed=st.integers(0, 9))
def test_the_engines_side_is_what_is_summed(nbytes, seed):
    """Bytes that change while they are copied: who reads sums what it has got, who writes what it had."""
    data, at = payload(nbytes, seed), seed * nbytes // 10

    def torn(out, window):
        out[:] = window
        out[min(at, len(out) - 1)] ^= 1

    sums, outs = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying.np, "copyto", torn)
        for copy in WAYS:
            outs.append(np.zeros(nbytes, np.uint8))
            sums.append(copy(outs[-1], data))
    assert sums == [checksum(data.tobytes()), checksum(outs[1].tobytes())]
    assert sums[0] != sums[1]


@pytest.mark.parametrize("copy", WAYS)
@pytest.mark.parametrize("nbytes", [WINDOW - 1, WINDOW, 2 * WINDOW - 1, 2 * WINDOW, 3 * WINDOW + 77])
def test_long_payloads_are_copied_whole(monkeypatch, nbytes, copy):
    """In windows as they are."""
    monkeypatch.setattr(copying, "_WINDOW_BYTES", WINDOW)
    data, out = payload(nbytes), np.zeros(nbytes, np.uint8)
    assert copy(out, data) == checksum(data.tobytes())
    assert out.tobytes() == data.tobytes()


@given(ends=st.lists(st.integers(0, 7000), max_size=6), seed=st.integers(0, 9))
def test_a_copy_in_parts_is_the_same_copy(ends, seed):
    """Wherever the parts end, and whether or not they go forward: each byte is copied once, and summed."""
    data = payload(7000, seed)
    out, copy, done = np.zeros(7000, np.uint8), PartialCopy(), 0
    for end in ends:
        done = max(done, end)
        assert copy.advance(out, data, end) == checksum(data[:done].tobytes())
        assert out[:done].tobytes() == data[:done].tobytes()
        assert not out[done:].any()
    assert copy.advance(out, data, len(data)) == checksum(data.tobytes())
    assert out.tobytes() == data.tobytes()


@given(nbytes=LENGTHS, done=st.integers(0, 3000))
def test_no_window_is_short(nbytes, done):
    """Short copies are slow on some processors: what is left over goes with the last window."""
    data, out, copy = payload(nbytes), np.zeros(nbytes, np.uint8), PartialCopy()
    done = min(done, nbytes)
    copy.advance(out, data, done)
    lengths = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying.np, "copyto", lambda _, window: lengths.append(len(window)))
        copy.advance(out, data, nbytes)
    assert sum(lengths) == nbytes - done
    assert all(1000 <= length < 2000 for length in lengths) or (len(lengths) == 1 and lengths[0] < 1000)


@pytest.mark.parametrize("copy", WAYS)
@pytest.mark.parametrize("nbytes", [0, 1, 1000, 1001, 2001, 6001])
def test_a_payload_of_another_length_is_refused(nbytes, copy):
    """Else it would be cut, or repeated, and its sum would be right."""
    with pytest.raises(ValueError, match="does not go into"):
        copy(np.zeros(6000, np.uint8), np.zeros(nbytes, np.uint8))
