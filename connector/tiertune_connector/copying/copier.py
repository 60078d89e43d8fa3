"""Copies between an engine's memory and the store's, with the checksum that tells whether they are whole.

The engine's side is summed: what it has before a write, and what it has after a read. A second thread shares long
copies, as far as it gets to them.
"""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
import xxhash

from tiertune_connector.chunk import Bytes

_WINDOW_BYTES = 2 << 20
"""Copied and summed while a processor still has it, so that memory is read once. More than a core's second cache: less
than that the C library copies by ``rep movsb`` on AMD, which is slow from a page to beside one."""
_NOTHING: Bytes = np.empty(0, np.uint8)
_SHARED_WINDOWS = 3
"""With fewer, most is done before another thread is awake."""


class Copier:
    """Copies for any number of threads; a thread of its own helps with long copies. Thread-safe."""

    def __init__(self) -> None:
        self._helper: ThreadPoolExecutor | None = _helper()
        """None: closed."""

    def close(self) -> None:
        """Stop helping; copies under way are finished."""
        helper, self._helper = self._helper, None
        if helper:
            helper.shutdown(wait=False)

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
        if len(windows) >= _SHARED_WINDOWS and (helper := self._helper):
            shared = _Shared(out, data, windows, summed, digest)
            try:
                try:
                    helper.submit(shared.help)
                except RuntimeError:  # no thread can be had, or none any more: this one copies it all
                    if self._helper is helper:  # what it queued all the same goes with it
                        self._helper = _helper()
                shared.finish()
            finally:
                try:
                    shared.end()
                except BaseException:  # interrupted as it ended: who helps would wait for the lock for ever
                    shared.end()
                    raise
            return
        for window in windows:
            np.copyto(out[window], data[window])
            digest.update(summed[window])  # type: ignore[arg-type] # an array is a buffer


def _helper() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "tiertune-copy")


class PartialCopy:
    """A copy into an engine's memory of a chunk still coming, as far as it has come. Not thread-safe."""

    def __init__(self) -> None:
        self.nbytes = 0
        """Copied so far."""
        self.digest = xxhash.xxh3_64()


@dataclass(eq=False)
class _Shared:
    """A copy in windows, each copied by the thread that takes it, and then summed in order.

    The copy's owner may be interrupted anywhere (Ctrl-C), even as it takes or releases the lock; helpers are not.
    """

    out: Bytes
    data: Bytes
    windows: Sequence[slice]
    summed: Bytes
    digest: xxhash.xxh3_64

    def __post_init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())  # an RLock knows who holds it
        self._taken = 0
        self._copied = [False] * len(self.windows)
        self._added = 0
        """Windows that are in the digest."""
        self._adding = False
        self._helping = 0
        """Helping threads, without the copy's owner."""
        self._failed = False

    def help(self) -> None:
        """Do what nobody else does, until all is taken. ``finish`` reports failures."""
        with self._changed:
            self._helping += 1
            try:
                while not self._failed and self._step():
                    pass
            except BaseException:
                self._failed = True
                raise
            finally:
                self._helping -= 1
                self._changed.notify_all()

    def finish(self) -> None:
        """Help until all is done; RuntimeError if another thread failed. ``end`` follows."""
        self._changed.acquire()
        while self._added < len(self.windows):
            if self._failed:
                raise RuntimeError("a part could not be copied")
            if not self._step():
                self._changed.wait()

    def end(self) -> None:
        """Leave undone what is not done by now: nobody touches the bytes afterwards. Call again if interrupted."""
        with suppress(RuntimeError):  # if interrupted while not holding it
            self._changed.release()
        with self._changed:
            self._failed = self._added < len(self.windows)
            self._changed.wait_for(lambda: not self._helping)
            self.out = self.data = self.summed = _NOTHING  # whose memory may be unmapped now

    def _step(self) -> bool:
        """Sum what is copied, else copy a window; False if there is neither to do now."""
        ready = self._added
        while ready < len(self._copied) and self._copied[ready]:
            ready += 1
        if ready > self._added and not self._adding:
            self._adding = True
            start, stop = self.windows[self._added].start, self.windows[ready - 1].stop
            with self._apart():
                self.digest.update(self.summed[start:stop])  # type: ignore[arg-type] # an array is a buffer
            self._added, self._adding = ready, False
        elif self._taken < len(self.windows):
            number, self._taken = self._taken, self._taken + 1
            window = self.windows[number]
            with self._apart():
                np.copyto(self.out[window], self.data[window])
            self._copied[number] = True
        else:
            return False
        return True

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Run the block without the lock."""
        self._changed.release()
        try:
            yield
        finally:
            self._changed.acquire()
            self._changed.notify_all()


def _windows(start: int, end: int) -> list[slice]:
    """Windows from ``start`` to ``end``; a rest shorter than one is added to the last."""
    windows = []
    while start < end:
        stop = end if end - start < 2 * _WINDOW_BYTES else start + _WINDOW_BYTES
        windows.append(slice(start, stop))
        start = stop
    return windows
