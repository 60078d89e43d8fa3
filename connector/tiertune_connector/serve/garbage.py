"""Collects cyclic garbage in a process that holds many objects for long: looks among new ones only.

Python's own collector goes through all objects whenever there are a quarter more, and stops the process meanwhile: for
a quarter of a second in a store of 100,000 chunks, none of which is ever garbage to it.
"""

import gc

_NEW = 5_000
"""New objects still alive: going through as many takes some milliseconds."""
_FEW = 1_000_000
"""Objects of some 180,000 chunks: while fewer are kept, they are never all looked through."""


class GarbageCollector:
    """Replaces Python's own, which it switches off. One per process."""

    def __init__(self) -> None:
        self._most = _FEW
        self._since = 0
        """Objects that came since the kept ones were counted."""
        gc.disable()

    def tidy(self) -> None:
        """Look for garbage among the new objects, if they are enough; what is left is not looked at again.

        Some of it may become garbage: all is looked through once there is twice as much.
        """
        new = gc.get_count()[0]
        if new < _NEW:
            return
        self._since += new
        if self._since > _FEW:  # counting takes a while too
            self._since = 0
            if gc.get_freeze_count() > self._most:
                gc.unfreeze()
                self._most = 0
        gc.collect()
        gc.freeze()
        if not self._most:
            self._most = 2 * max(_FEW, gc.get_freeze_count())
