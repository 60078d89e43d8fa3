"""Copies between an engine's memory and the store's, with the sum that tells whether they are whole."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

import numpy as np
import xxhash

from tiertune_connector.chunk import Bytes, checksum

_WINDOW_BYTES = 256 << 10
"""Copied before it is summed: it is still in the processor's own cache then, and memory is read once."""
_ASIDE_BYTES = 4 << 20
"""A shorter payload is soon copied; a second thread would begin late, and empty the cache of whoever serves there."""
_AGAIN = 16
"""The way that was slower lately is tried once in so many copies."""
_WEIGHT = 0.25
"""Of a copy, in what a way takes lately."""


class Copier:
    """Sums long payloads on a second thread while they are copied, where that has been quicker lately.

    It is where a processor has nothing else to do; where all are busy, both threads wait, and memory is read twice.
    Thread-safe: of copies at the same time one has the second thread.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._summer = ThreadPoolExecutor(1, thread_name_prefix="tiertune-sum")
        self._turn = threading.Lock()
        self._paces: dict[bool, float] = {}
        """Seconds per byte lately, summed aside or not."""
        self._copies = 0

    def copy(self, out: Bytes, data: Bytes) -> int:
        """As `copy_checked`."""
        if len(data) < _ASIDE_BYTES or not self._turn.acquire(blocking=False):
            return copy_checked(out, data)
        try:
            aside, started = self._choose(), self._clock()
            digest = self._copy_aside(out, data) if aside else copy_checked(out, data)
            pace = (self._clock() - started) / len(data)
            self._paces[aside] = pace + (1 - _WEIGHT) * (self._paces.get(aside, pace) - pace)
            return digest
        finally:
            self._turn.release()

    def close(self) -> None:
        """After the last copy."""
        self._summer.shutdown()

    def _choose(self) -> bool:
        """Whether the next is summed aside. Each way is tried once before they are compared."""
        self._copies += 1
        quicker = self._paces.get(True, 0.0) <= self._paces.get(False, 0.0)
        return quicker != (self._copies % _AGAIN == 0)

    def _copy_aside(self, out: Bytes, data: Bytes) -> int:
        _check(out, data)
        try:
            summing = self._summer.submit(checksum, data)  # type: ignore[arg-type] # an array is a buffer
        except RuntimeError:  # closed, or the interpreter ends
            return copy_checked(out, data)
        try:
            np.copyto(out, data)
        finally:
            digest = summing.result()
        return digest


class PartialCopy:
    """A copy of what is still on its way, as far as it has come. Not thread-safe."""

    def __init__(self) -> None:
        self.nbytes = 0
        """Copied so far."""
        self._digest = xxhash.xxh3_64()

    def advance(self, out: Bytes, data: Bytes, nbytes: int) -> int:
        """Go on until ``nbytes`` are copied: the `checksum` of all that is.

        ``data`` and ``out`` are contiguous uint8 of one shape (n,), the same in every call; ValueError if the shapes
        differ.
        """
        _check(out, data)
        for start in range(self.nbytes, nbytes, _WINDOW_BYTES):
            window = out[start : min(start + _WINDOW_BYTES, nbytes)]
            np.copyto(window, data[start : start + len(window)])
            self._digest.update(window)  # type: ignore[arg-type] # an array is a buffer
        self.nbytes = max(self.nbytes, nbytes)
        return self._digest.intdigest()


def copy_checked(out: Bytes, data: Bytes) -> int:
    """Copy ``data`` into ``out``, both contiguous uint8 of one shape (n,), and return the `checksum` of it.

    ValueError if the shapes differ.
    """
    return PartialCopy().advance(out, data, len(out))


def _check(out: Bytes, data: Bytes) -> None:
    if out.shape != data.shape:
        raise ValueError(f"{data.shape} does not go into {out.shape}")
