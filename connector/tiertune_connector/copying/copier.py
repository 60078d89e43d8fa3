"""Copies between an engine's memory and the store's, with the checksum that tells whether they are whole.

The engine's side is summed: what it has before a write, and what it has after a read. A second thread shares long
copies, as far as it gets to them.
"""

from collections.abc import Sequence

import numpy as np
import xxhash

from tiertune_connector.chunk import Bytes
from tiertune_connector.copying.crew import Crew

_WINDOW_BYTES = 2 << 20
"""Copied and summed while a processor still has it, so that memory is read once. More than a core's second cache: less
than that the C library copies by ``rep movsb`` on AMD, which is slow from a page to beside one."""
_SHARED_WINDOWS = 3
"""With fewer, most is done before another thread is awake."""


class Copier:
    """Copies for any number of threads; a thread of its own helps with long copies. Thread-safe."""

    def __init__(self) -> None:
        self._crew = Crew(1, "tiertune-copy")

    def close(self) -> None:
        """Stop helping."""
        self._crew.close()

    def write(self, out: Bytes, data: Bytes) -> int:
        """Copy an engine's ``data`` into ``out``, both contiguous uint8 of one shape (n,); returns its `checksum`.

        ValueError if the shapes differ.
        """
        digest = xxhash.xxh3_64()
        self._copy(out, data, _windows(0, len(data)), data, digest)
        return digest.intdigest()

    def read(self, partial: "PartialCopy", out: Bytes, data: Bytes, nbytes: int) -> int:
        """Go on until ``nbytes`` are copied into an engine's ``out``; returns the `checksum` of all in it by then.

        ``data`` and ``out`` are contiguous uint8 of one shape (n,), the same in every call of one ``partial``;
        ValueError if the shapes differ.
        """
        self._copy(out, data, _windows(partial.nbytes, nbytes), out, partial.digest)
        partial.nbytes = max(partial.nbytes, nbytes)
        return partial.digest.intdigest()

    def _copy(self, out: Bytes, data: Bytes, windows: Sequence[slice], summed: Bytes, digest: xxhash.xxh3_64) -> None:
        """Copy and sum; ``summed`` is ``out`` or ``data``."""
        if out.shape != data.shape:
            raise ValueError(f"{data.shape} does not go into {out.shape}")

        def copy(window: slice) -> None:
            np.copyto(out[window], data[window])

        def add(window: slice) -> None:
            digest.update(summed[window])  # type: ignore[arg-type] # an array is a buffer

        if len(windows) >= _SHARED_WINDOWS:
            self._crew.each(copy, windows, then=add)
            return
        for window in windows:
            copy(window)
            add(window)


class PartialCopy:
    """A copy into an engine's memory of a chunk still coming, as far as it has come. Not thread-safe."""

    def __init__(self) -> None:
        self.nbytes = 0
        """Copied so far."""
        self.digest = xxhash.xxh3_64()


def _windows(start: int, end: int) -> list[slice]:
    """Windows from ``start`` to ``end``; a rest shorter than one is added to the last."""
    windows = []
    while start < end:
        stop = end if end - start < 2 * _WINDOW_BYTES else start + _WINDOW_BYTES
        windows.append(slice(start, stop))
        start = stop
    return windows
