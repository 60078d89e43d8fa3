"""The slots of a slab file by number: when each was used, which are free, and which are still to be wiped."""

from array import array
from math import isnan, nan
from typing import NamedTuple


class Last(NamedTuple):
    """What is known of a chunk that leaves."""

    used_at: float | None
    """When it came or was last read; None: in an earlier run."""
    used: bool
    """Whether it was read since it came; True for one of an earlier run, as nobody knows."""


class DiskSlots:
    """Callers that change it hold its tier's lock."""

    def __init__(self) -> None:
        self.left: list[int] = []
        """Slots of gone chunks, newest last, with headers and room still to be wiped."""
        self.wiping: set[int] = set()
        """Slots being wiped now."""
        self.overwriting: set[int] = set()
        """Slots that a new chunk took over unwiped, until it is whole."""
        self.unwiped = 0
        """Slots whose header a failing disk kept: they may be back after a restart."""
        self._free: list[int] = []
        self._used_at = array("d")
        """When each slot's chunk came or was last read; NaN: in an earlier run."""
        self._unread = bytearray()
        """1 if the chunk came in this run and was not read since."""

    def add(self) -> int:
        """Add a slot at the end of the file."""
        self._used_at.append(nan)
        self._unread.append(0)
        return len(self._used_at) - 1

    def take(self) -> int:
        """A slot that nobody uses, preferably one whose room on disk a new chunk can take over."""
        if self.left:
            slot = self.left.pop()
            self.overwriting.add(slot)
            return slot
        return self._free.pop() if self._free else self.add()

    def came(self, slot: int, now: float) -> None:
        """A slot's chunk is whole."""
        self.use(slot, now)
        self._unread[slot] = 1

    def use(self, slot: int, now: float) -> None:
        """A slot's chunk was read for a request."""
        self.overwriting.discard(slot)
        self._used_at[slot], self._unread[slot] = now, 0

    def leave(self, slot: int) -> Last:
        """A slot's chunk has gone, or did not come."""
        self.overwriting.discard(slot)
        self.left.append(slot)
        used_at = self._used_at[slot]
        return Last(None if isnan(used_at) else used_at, used=not self._unread[slot])

    def to_wipe(self) -> int | None:
        """The slot left last, for the caller to wipe; None: there is none."""
        slot = self.left.pop() if self.left else None
        if slot is not None:
            self.wiping.add(slot)
        return slot

    def wiped(self, slot: int, *, sure: bool) -> None:
        """A slot was wiped and is free; ``sure`` is the answer of `Slab.wipe`."""
        self.wiping.discard(slot)
        self._free.append(slot)
        self.unwiped += not sure
