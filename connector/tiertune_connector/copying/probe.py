"""Measures a client's copies of several chunks on this host, without a client, for when none has reported."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tiertune_connector.copying.copier import Copier, PartialCopy
from tiertune_connector.copying.crew import Crew, usual_helpers
from tiertune_connector.units import Clock

if TYPE_CHECKING:
    from tiertune_connector.chunk import Bytes

PART_BYTES = 8 << 20
"""Most of a chunk to copy: a probe of several is short, but long enough to be shared like whole ones."""


class CopyProbe:
    """Copies chunks out of shared memory, summed, as many at a time as an engine's connector does.

    Not thread-safe. ``clock`` gives seconds.
    """

    def __init__(self, clock: Clock, *, helpers: int | None = None) -> None:
        """``helpers`` as in an engine's connector; None: the usual number on this host."""
        helpers = usual_helpers() if helpers is None else helpers
        self.most = helpers + 1
        """Chunks copied at a time."""
        self._clock = clock
        self._crew = Crew(helpers)
        self._copier = Copier()
        self._rows: dict[int, Bytes] = {}

    def close(self) -> None:
        self._crew.close()
        self._copier.close()
        self._rows.clear()

    def copy(self, chunks: Sequence[memoryview]) -> tuple[int, float]:
        """Copy at most ``most`` chunks, which nobody may write meanwhile; returns bytes and seconds."""
        parts = [np.frombuffer(chunk, np.uint8)[:PART_BYTES] for chunk in chunks[: self.most]]
        for place, part in enumerate(parts):
            if len(self._rows.get(place, ())) < len(part):
                self._rows[place] = np.ones(len(part), np.uint8)  # touched, like an engine's staging

        def copy(place: int) -> int:
            part = parts[place]
            return self._copier.read(PartialCopy(), self._rows[place][: len(part)], part, len(part))

        started = self._clock()
        self._crew.each(copy, range(len(parts)))
        return sum(map(len, parts)), self._clock() - started
