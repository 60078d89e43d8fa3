"""Cyclic garbage of a process that holds many objects for long: looked for among the new ones alone.

Python's own collector goes through all objects every time that they have become a quarter more, and stops the process
meanwhile: for a quarter of a second where a store holds 100,000 chunks, none of which is ever garbage to it.
"""

import gc

_NEW = 5_000
"""Objects that have come and not gone: to go through as many takes some milliseconds."""
_FEW = 1_000_000
"""Objects of some 180,000 chunks: as long as less is kept, all of it is never looked through."""


class GarbageCollector:
    """Instead of Python's own, which it switches off. One in a process."""

    def __init__(self, *, new: int = _NEW, few: int = _FEW) -> None:
        self._new = new
        self._few = self._most = few
        self._since = 0
        """Objects that came since it was counted how many are kept."""
        gc.disable()

    def tidy(self) -> None:
        """Look for garbage among what is new, if that is enough; what is left is looked at no more.

        Some of it may become garbage: all is looked through when it has become twice as much.
        """
        new = gc.get_count()[0]
        if new < self._new:
            return
        self._since += new
        if self._since > self._few:  # to count them takes a while too
            self._since = 0
            if gc.get_freeze_count() > self._most:
                gc.unfreeze()
                self._most = 0
        gc.collect()
        gc.freeze()
        if not self._most:
            self._most = 2 * max(self._few, gc.get_freeze_count())
