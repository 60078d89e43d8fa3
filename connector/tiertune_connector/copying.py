"""Copies between an engine's memory and the store's, with the sum that tells whether they are whole."""

import numpy as np
import xxhash

from tiertune_connector.chunk import Bytes

_WINDOW_BYTES = 2 << 20
"""Summed, then copied while the processor still has it, so that memory is read once. More than a core's second cache:
less than that the C library copies by ``rep movsb``, which some processors do slowly from a page to beside one."""


class PartialCopy:
    """A copy of what is still on its way, as far as it has come. Not thread-safe."""

    def __init__(self) -> None:
        self.nbytes = 0
        """Copied so far."""
        self._digest = xxhash.xxh3_64()

    def advance(self, out: Bytes, data: Bytes, nbytes: int) -> int:
        """Go on until ``nbytes`` are copied: the `checksum` of all that is.

        ``data`` and ``out`` are contiguous uint8 of one shape (n,), the same in every call, and nobody writes to the
        first ``nbytes`` of ``data`` meanwhile; ValueError if the shapes differ.
        """
        if out.shape != data.shape:
            raise ValueError(f"{data.shape} does not go into {out.shape}")
        while (left := nbytes - self.nbytes) > 0:
            end = self.nbytes + (left if left < 2 * _WINDOW_BYTES else _WINDOW_BYTES)
            window = data[self.nbytes : end]
            self._digest.update(window)  # type: ignore[arg-type] # an array is a buffer
            np.copyto(out[self.nbytes : end], window)
            self.nbytes = end
        return self._digest.intdigest()


def copy_checked(out: Bytes, data: Bytes) -> int:
    """Copy ``data`` into ``out``, both contiguous uint8 of one shape (n,), and return the `checksum` of it.

    ValueError if the shapes differ.
    """
    return PartialCopy().advance(out, data, len(out))
