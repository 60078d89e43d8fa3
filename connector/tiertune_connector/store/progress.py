"""Tells a client step by step what of its load has come, so that it copies while the rest is on its way."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from tiertune_connector.protocol.messages import Load, LoadPart, SlotRef
from tiertune_connector.slower.arrivals import Arrival
from tiertune_connector.tiers.slots import Slot

Coming = tuple[Slot, Arrival | None]
"""A chunk's slot, and how it gets there; None: it is there."""
STEP_BYTES = 4 << 20
"""Told together: a message costs store and client some 50 microseconds, copying this much a millisecond."""


@dataclass(eq=False)
class Progress:
    """Progress of one load, until closed. Thread-safe.

    ``slots`` are those of the chunks of load ``load``; ``tell`` must not wait, and raises nothing.
    """

    load: int
    slots: Sequence[Slot]
    tell: Callable[[LoadPart], None]

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._here: dict[int, int] = {}
        self._untold: dict[int, int] = {}
        self._untold_bytes = 0
        self._closed = False

    def came(self, position: int, nbytes: int) -> None:
        """A chunk's first ``nbytes`` are in its slot. Call without the store's lock."""
        with self._lock:
            before = self._here.get(position, 0)
            if self._closed or nbytes <= before:
                return
            self._here[position] = self._untold[position] = nbytes
            self._untold_bytes += nbytes - before
            if self._untold_bytes >= STEP_BYTES:
                moved, self._untold, self._untold_bytes = self._untold, {}, 0
                refs = [SlotRef.of(self.slots[position]) for position in moved]
                self.tell(LoadPart(self.load, list(moved), refs, list(moved.values())))

    def close(self) -> None:
        """The load is answered: tell nothing from now on."""
        with self._lock:
            self._closed = True


@contextmanager
def told(asked: Load, coming: Sequence[Coming], tell: Callable[[LoadPart], None]) -> Iterator[None]:
    """Tell what was here of a load's chunks, and what comes meanwhile, if the client wants to hear it."""
    if not asked.parts:
        yield
        return
    progress = Progress(asked.id, [slot for slot, _ in coming], tell)
    for position, (slot, arrival) in enumerate(coming):
        if arrival is not None:
            arrival.heard.append(partial(progress.came, position))
        progress.came(position, slot.nbytes if arrival is None else arrival.nbytes)
    try:
        yield
    finally:
        progress.close()
