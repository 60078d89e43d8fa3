"""Which engine computed a chunk here, so that the chunk is still that engine's when it returns from a slower tier."""

from array import array
from collections.abc import Sequence

REMEMBERED = 1 << 20
"""Chunks, in 8 MiB; of several with the same place, the latest."""
_NAMED = 1 << 16
"""Engines, at most. Their numbers replace a digest's lowest bits, which the place tells already."""


class Authors:
    """Guarded by the store's lock. Chunks it does not know, as after a restart, are nobody's."""

    def __init__(self) -> None:
        self._places = array("q", bytes(8 * REMEMBERED))
        """Per place, the higher bits of a chunk's digest, then its engine's number."""
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
        """The engines of the chunks, unknown ones left out."""
        places, engines, inner, mask = self._places, [], hash(namespace), REMEMBERED - 1
        for key in keys:
            digest = inner ^ hash(key)
            found = places[digest & mask]
            if 0 <= found ^ digest < _NAMED:
                engines.append(self._engines[found & _NAMED - 1])
        return engines
