"""What a client's copies of several chunks take on this host, without a client: for where none has told."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tiertune_connector.copying.copier import Copier, PartialCopy
from tiertune_connector.copying.crew import Crew, usual_helpers

if TYPE_CHECKING:
    from tiertune_connector.chunk import Bytes

PART_BYTES = 8 << 20
"""Of a chunk: what a probe of several takes is little, and long enough to be shared as whole ones are."""


class CopyProbe:
    """Copies of chunks out of shared memory, summed, as many at a time as an engine's connector makes.

    Not thread-safe. ``clock`` gives seconds.
    """

    def __init__(self, clock: Callable[[], float], *, helpers: int | None = None) -> None:
        """``helpers`` as an engine's connector has them; None: as it usually has on this host."""
        helpers = usual_helpers() if helpers is None else helpers
        self.most = helpers + 1
        """Chunks that are copied at a time."""
        self._clock = clock
        self._crew = Crew(helpers)
        self._copier = Copier()
        self._rows: dict[int, Bytes] = {}

    def close(self) -> None:
        self._crew.close()
        self._copier.close()
        self._rows.clear()

    def copy(self, chunks: Sequence[memoryview]) -> tuple[int, float]:
        """Bytes that were copied of at most ``most`` chunks, which nobody writes meanwhile, and seconds."""
        parts = [np.frombuffer(chunk, np.uint8)[:PART_BYTES] for chunk in chunks[: self.most]]
        for place, part in enumerate(parts):
            if len(self._rows.get(place, ())) < len(part):
                self._rows[place] = np.ones(len(part), np.uint8)  # touched: an engine's staging is, too

        def copy(place: int) -> int:
            part = parts[place]
            return self._copier.read(PartialCopy(), self._rows[place][: len(part)], part, len(part))

        started = self._clock()
        self._crew.each(copy, range(len(parts)))
        return sum(map(len, parts)), self._clock() - started
