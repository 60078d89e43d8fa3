"""Copies and their sums: whole, and as far as has come."""

import gc
import sys
import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.stores import eventually, no_more_threads
from tiertune_connector.chunk import checksum
from tiertune_connector.copying import copier as module
from tiertune_connector.copying.copier import Copier, PartialCopy

WINDOW = 2 << 20
LENGTHS = st.integers(0, 3) | st.integers(900, 9000)


COPIER = Copier()


def copy_read(out, data):
    return COPIER.read(PartialCopy(), out, data, len(data))


WAYS = (COPIER.write, copy_read)


@pytest.fixture(scope="module", autouse=True)
def small_windows():
    """So that examples have many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_WINDOW_BYTES", 1000)
        yield
    COPIER.close()


def payload(nbytes, seed=0):
    return np.frombuffer(np.random.default_rng(seed).bytes(nbytes), np.uint8)


def copies(copy, data, out=None):
    """It is made whole, and its sum is that of the payload."""
    out = np.zeros(len(data), np.uint8) if out is None else out
    assert copy(out, data) == checksum(data.tobytes())
    assert out.tobytes() == data.tobytes()


@given(nbytes=LENGTHS, seed=st.integers(0, 9))
def test_a_copy_is_summed_as_it_is_made(nbytes, seed):
    """Also where it ends within a window: the bytes are the same, and the sum is that of a whole payload."""
    for copy in WAYS:
        copies(copy, payload(nbytes, seed))


@given(nbytes=st.integers(900, 9000), seed=st.integers(0, 9))
def test_the_engines_side_is_what_is_summed(nbytes, seed):
    """Bytes that change while they are copied: who reads sums what it has got, who writes what it had."""
    data, at = payload(nbytes, seed), seed * nbytes // 10

    def torn(out, window):
        out[:] = window
        out[min(at, len(out) - 1)] ^= 1

    sums, outs = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.np, "copyto", torn)
        for copy in WAYS:
            outs.append(np.zeros(nbytes, np.uint8))
            sums.append(copy(outs[-1], data))
    assert sums == [checksum(data.tobytes()), checksum(outs[1].tobytes())]
    assert sums[0] != sums[1]


@pytest.mark.parametrize("copy", WAYS)
@pytest.mark.parametrize("nbytes", [WINDOW - 1, WINDOW, 2 * WINDOW - 1, 2 * WINDOW, 3 * WINDOW + 77])
def test_long_payloads_are_copied_whole(monkeypatch, nbytes, copy):
    """In windows as they are."""
    monkeypatch.setattr(module, "_WINDOW_BYTES", WINDOW)
    copies(copy, payload(nbytes))


@given(ends=st.lists(st.integers(0, 7000), max_size=6), seed=st.integers(0, 9))
def test_a_copy_in_parts_is_the_same_copy(ends, seed):
    """Wherever the parts end, and whether or not they go forward: each byte is copied once, and summed."""
    data = payload(7000, seed)
    out, copy, done = np.zeros(7000, np.uint8), PartialCopy(), 0
    for end in ends:
        done = max(done, end)
        assert COPIER.read(copy, out, data, end) == checksum(data[:done].tobytes())
        assert out[:done].tobytes() == data[:done].tobytes()
        assert not out[done:].any()
    assert COPIER.read(copy, out, data, len(data)) == checksum(data.tobytes())
    assert out.tobytes() == data.tobytes()


@given(nbytes=LENGTHS, done=st.integers(0, 3000))
def test_no_window_is_short(nbytes, done):
    """Short copies are slow on some processors: what is left over goes with the last window."""
    data, out, copy = payload(nbytes), np.zeros(nbytes, np.uint8), PartialCopy()
    done = min(done, nbytes)
    COPIER.read(copy, out, data, done)
    lengths = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.np, "copyto", lambda _, window: lengths.append(len(window)))
        COPIER.read(copy, out, data, nbytes)
    assert sum(lengths) == nbytes - done
    assert all(1000 <= length < 2000 for length in lengths) or (len(lengths) == 1 and lengths[0] < 1000)


@pytest.mark.parametrize("copy", WAYS)
@pytest.mark.parametrize("nbytes", [0, 1, 1000, 1001, 2001, 6001])
def test_a_payload_of_another_length_is_refused(nbytes, copy):
    """Else it would be cut, or repeated, and its sum would be right."""
    with pytest.raises(ValueError, match="does not go into"):
        copy(np.zeros(6000, np.uint8), np.zeros(nbytes, np.uint8))


class Watched:
    """Stands for numpy's copy: which thread copied which window, and each kind of thread can be held at its first."""

    def __init__(self, monkeypatch):
        self.by = []
        self.held = {"main": threading.Event(), "helper": threading.Event()}
        self.began = {"main": threading.Event(), "helper": threading.Event()}
        self.failing = ""
        self._copyto = np.copyto
        monkeypatch.setattr(module.np, "copyto", self)

    def __call__(self, out, window):
        who = "helper" if threading.current_thread().name.startswith("tiertune-copy") else "main"
        self.began[who].set()
        assert self.held[who].wait(10)
        if who == self.failing:
            raise MemoryError
        self._copyto(out, window)
        self.by.append(who)


@pytest.fixture
def watched(monkeypatch):
    return Watched(monkeypatch)


@pytest.fixture
def copier():
    copier = Copier()
    yield copier
    copier.close()


@pytest.mark.parametrize("slow", ["main", "helper"])
@pytest.mark.parametrize("way", ["write", "read"])
def test_a_long_copy_is_shared_and_whole_whoever_is_slow(watched, copier, slow, way):
    """The other thread copies what one does not get to; the sum is that of all bytes in their order."""
    data, out = payload(9000), np.zeros(9000, np.uint8)
    quick = "helper" if slow == "main" else "main"
    with ThreadPoolExecutor(1) as caller:
        copy = copier.write if way == "write" else lambda out, data: copier.read(PartialCopy(), out, data, len(data))
        told = caller.submit(copy, out, data)
        assert watched.began[slow].wait(10)
        watched.held[quick].set()
        eventually(lambda: len(watched.by) == 8)
        assert not told.done(), "nobody may touch the bytes afterwards"
        watched.held[slow].set()
        assert told.result(10) == checksum(data.tobytes())
    assert watched.by == [quick] * 8 + [slow]
    assert out.tobytes() == data.tobytes()


@pytest.mark.parametrize("failing", ["main", "helper"])
def test_a_part_that_cannot_be_copied_fails_the_copy_and_the_next_one_is_shared_again(watched, copier, failing):
    """It is told when nobody touches the bytes any more."""
    data, out = payload(9000), np.zeros(9000, np.uint8)
    watched.failing = failing
    with ThreadPoolExecutor(1) as caller:
        told = caller.submit(copier.write, out, data)
        for who in ("main", "helper"):
            assert watched.began[who].wait(10)
        for held in watched.held.values():
            held.set()
        with pytest.raises(MemoryError if failing == "main" else RuntimeError):
            told.result(10)
    watched.failing = ""
    copies(copier.write, data)


class Interrupted:
    """A thread's trace that interrupts it once, at the n-th line of a copy, or of the end of one."""

    def __init__(self, after, *, ending=False):
        self.left, self.ending = after, ending

    def __call__(self, frame, event, _):
        if frame.f_code.co_filename not in (module.__file__, threading.__file__):
            return None
        if self.ending and frame.f_code.co_name == "end":
            self.ending = False
        if event in ("call", "line") and not self.ending:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


def interrupted(copier, data, out, interrupt):
    """Whether a copy, on a thread of its own, was interrupted, or ended before."""

    def copy():
        sys.settrace(interrupt)
        try:
            copier.write(out, data)
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False

    told = Future()
    threading.Thread(target=lambda: told.set_result(copy()), daemon=True).start()
    return told.result(10)


@pytest.mark.parametrize("after", range(1, 120, 7))
def test_a_copy_that_is_interrupted_says_so_and_ends(copier, after):
    """By Ctrl-C, wherever it is: nobody waits, nobody touches its bytes any more, and the next one is shared."""
    data, out = payload(9000), np.zeros(9000, np.uint8)
    copier.write(out, data)  # there is who helps
    assert interrupted(copier, data, out, Interrupted(after))
    out[:] = 0
    copies(copier.write, data, out)
    eventually(copier._helper._work_queue.empty)  # who helps took it


@pytest.mark.parametrize("after", range(1, 30))
def test_an_end_that_is_interrupted_ends_all_the_same(copier, after):
    """By Ctrl-C when all is copied: who comes to help only then is not held up, so that the next copy is shared."""
    data, out, late = payload(9000), np.zeros(9000, np.uint8), threading.Event()
    copier.write(out, data)  # there is who helps
    copier._helper.submit(late.wait)
    interrupted(copier, data, out, Interrupted(after, ending=True))
    late.set()
    assert out.tobytes() == data.tobytes()
    copies(copier.write, data)
    eventually(copier._helper._work_queue.empty)  # who helps took it


def test_a_short_copy_wakes_nobody_and_one_without_a_thread_is_made_alone(monkeypatch, copier):
    """Threads may have run out: the next long copy tries again."""
    copies(copier.write, payload(2999))
    assert not copier._helper._threads
    with monkeypatch.context() as patch:
        no_more_threads(patch)
        for _ in range(3):
            copies(copier.write, payload(9000))
    assert copier._helper._work_queue.empty(), "what was queued for it would stay"
    copies(copier.write, payload(9000))
    (thread,) = copier._helper._threads
    assert thread.is_alive()
    copier.close()
    eventually(lambda: not thread.is_alive())


def test_what_was_copied_is_not_held(copier):
    """Its memory may be unmapped: a view that somebody kept would keep all of it."""
    data, out = payload(9000), np.zeros(9000, np.uint8)
    copier.write(out, data)
    held = weakref.ref(out)
    del out
    gc.collect()
    assert held() is None
