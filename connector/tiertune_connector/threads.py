"""Threads for work that waits or takes long, some of them there from the start."""

import errno
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Barrier


class Threads(ThreadPoolExecutor):
    """At most so many; made while work waits for one, as long as one can be had: else those that are there do it all.

    The base raises where no thread can be had, with its work queued all the same: it would be done hours later.
    """

    _short = 0
    """How often no thread could be had: whoever does that work counts as idle once more than there are threads."""

    def __init__(self, most: int, name: str, *, ready: int = 1) -> None:
        """OSError if the first ``ready`` of them, which run at once, cannot be had."""
        super().__init__(most, thread_name_prefix=name)
        there = Barrier(ready)
        waiting = [self.submit(there.wait) for _ in range(ready)]
        if len(self._threads) < ready:
            there.abort()
            self.shutdown(wait=False)
            raise OSError(errno.EAGAIN, f"{name}: not all threads ({ready}) can be had")
        wait(waiting)

    def _adjust_thread_count(self) -> None:
        while self._short and self._idle_semaphore.acquire(blocking=False):
            self._short -= 1
        try:
            super()._adjust_thread_count()
        except RuntimeError:
            self._short += 1
