"""Which engine computed a chunk here: what comes back from a slower tier is not another one's because it was there."""

from array import array
from collections.abc import Sequence

REMEMBERED = 1 << 20
"""Chunks, in 8 MiB; the latest, where several have the same place."""
_NAMED = 1 << 16
"""Engines, at most. Their numbers stand where a digest has its lowest bits: those are the place's."""


class Authors:
    """Guarded by the store's lock. What it does not know, as after a restart, is nobody's."""

    def __init__(self) -> None:
        self._places = array("q", bytes(8 * REMEMBERED))
        """The higher bits of a chunk's digest, and below them its engine's number."""
        self._engines = [""]
        self._numbers: dict[str, int] = {}

    def wrote(self, namespace: str, key: bytes, engine: str) -> None:
        """An engine stored a chunk that it had computed."""
        number = self._numbers.get(engine)
        if number is None:
            if len(self._engines) == _NAMED:
                return
            number = self._numbers[engine] = len(self._engines)
            self._engines.append(engine)
        digest = hash(namespace) ^ hash(key)
        self._places[digest & REMEMBERED - 1] = digest & -_NAMED | number

    def of(self, namespace: str, keys: Sequence[bytes]) -> list[str]:
        """The engines of those chunks that it knows."""
        places, engines, inner, mask = self._places, [], hash(namespace), REMEMBERED - 1
        for key in keys:
            digest = inner ^ hash(key)
            found = places[digest & mask]
            if 0 <= found ^ digest < _NAMED:
                engines.append(self._engines[found & _NAMED - 1])
        return engines
