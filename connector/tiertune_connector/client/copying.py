"""Copies between an engine's memory and the store's, with the sum that tells whether they are whole.

What is summed is the engine's side: what it has before it is written, what it has after it was read.
"""

from collections.abc import Iterator

import numpy as np
import xxhash

from tiertune_connector.chunk import Bytes

_WINDOW_BYTES = 2 << 20
"""Copied and summed while the processor still has it, so that memory is read once. More than a core's second cache:
less than that the C library copies by ``rep movsb`` on AMD, which is slow from a page to beside one."""


class PartialCopy:
    """A copy into an engine's memory of what is still on its way, as far as it has come. Not thread-safe."""

    def __init__(self) -> None:
        self.nbytes = 0
        """Copied so far."""
        self._digest = xxhash.xxh3_64()

    def advance(self, out: Bytes, data: Bytes, nbytes: int) -> int:
        """Go on until ``nbytes`` are copied: the `checksum` of all that is in ``out`` by then.

        ``data`` and ``out`` are contiguous uint8 of one shape (n,), the same in every call; ValueError if the shapes
        differ.
        """
        _check(out, data)
        for window in _windows(self.nbytes, nbytes):
            np.copyto(out[window], data[window])
            self._digest.update(out[window])  # type: ignore[arg-type] # an array is a buffer
        self.nbytes = max(self.nbytes, nbytes)
        return self._digest.intdigest()


def copy_summed(out: Bytes, data: Bytes) -> int:
    """Copy an engine's ``data`` into ``out``, both contiguous uint8 of one shape (n,): the `checksum` of ``data``.

    ValueError if the shapes differ.
    """
    _check(out, data)
    digest = xxhash.xxh3_64()
    for window in _windows(0, len(data)):
        digest.update(data[window])  # type: ignore[arg-type] # an array is a buffer
        np.copyto(out[window], data[window])
    return digest.intdigest()


def _windows(start: int, end: int) -> Iterator[slice]:
    """What is less than a window is added to the last one."""
    while start < end:
        stop = end if end - start < 2 * _WINDOW_BYTES else start + _WINDOW_BYTES
        yield slice(start, stop)
        start = stop


def _check(out: Bytes, data: Bytes) -> None:
    if out.shape != data.shape:
        raise ValueError(f"{data.shape} does not go into {out.shape}")
