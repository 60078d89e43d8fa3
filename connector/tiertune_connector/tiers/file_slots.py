"""The slots of a slab file that are no chunk's: free, or with something still to be wiped."""

from collections.abc import Callable


class FileSlots:
    """Slots by number. Nothing waits for the disk; callers hold its tier's lock."""

    def __init__(self, add: Callable[[], int]) -> None:
        """``add`` makes a slot more, at the end of the file."""
        self.left: list[int] = []
        """Slots of gone chunks, newest last, with headers and room still to be wiped."""
        self.wiping: set[int] = set()
        """Slots being wiped now."""
        self.unwiped: list[int] = []
        """Free slots whose header a failing disk kept: it may be back after a restart, unless a flush wipes it."""
        self.overwriting: set[int] = set()
        """Slots that a new chunk took over unwiped, until it is whole."""
        self._free: list[int] = []
        self._add = add

    def take(self) -> int:
        """A slot to write, preferably one whose room a new chunk can take over."""
        if stale := self.left or (not self._free and self.unwiped):
            slot = stale.pop()
            self.overwriting.add(slot)
            return slot
        return self._free.pop() if self._free else self._add()

    def leave(self, slot: int) -> None:
        """A slot's chunk has gone or did not come."""
        self.overwriting.discard(slot)
        self.left.append(slot)

    def to_wipe(self) -> int | None:
        """The slot left last, for the caller to wipe; None: there is none."""
        slot = self.left.pop() if self.left else None
        if slot is not None:
            self.wiping.add(slot)
        return slot

    def wiped(self, slot: int, *, sure: bool) -> None:
        """A slot was wiped and is free; ``sure`` is the answer of `Slab.wipe`."""
        self.wiping.discard(slot)
        (self._free if sure else self.unwiped).append(slot)

    def wipe_again(self) -> None:
        """Have wiped what a failing disk kept."""
        self.left += self.unwiped
        self.unwiped.clear()
