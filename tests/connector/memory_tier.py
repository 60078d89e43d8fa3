"""A dictionary as a tier: the shortest that fulfils the contract, and a double whose faults a test can set."""

import threading
from collections.abc import Callable, Sequence

from tiertune_connector.chunk import NOBODY, Origin, checksum
from tiertune_connector.tiers.base import Came, Counted, Outcome, Read, Usage, unheard


class MemoryTier:
    """Unbounded. ``fault``, if set, is called before each operation and may sleep or return an outcome."""

    name = "remote"
    why = ""

    def __init__(self) -> None:
        self.fault: Callable[[str], Outcome | None] = lambda _operation: None
        self._lock = threading.Lock()
        self._chunks: dict[tuple[str, bytes], tuple[bytes, int, Origin]] = {}

    def present(self, namespace: str, keys: Sequence[bytes]) -> Counted:
        if fault := self.fault("present"):
            return fault, 0
        with self._lock:
            missing = (i for i, key in enumerate(keys) if (namespace, key) not in self._chunks)
            return Outcome.OK, next(missing, len(keys))

    def read(self, namespace: str, key: bytes, out: memoryview, came: Came = unheard) -> Read:
        if fault := self.fault("read"):
            return fault, NOBODY
        with self._lock:
            found = self._chunks.get((namespace, key))
        if found is None:
            return Outcome.MISS, NOBODY
        payload, expected, origin = found
        if len(payload) != len(out) or checksum(payload) != expected:
            self._chunks.pop((namespace, key), None)
            return Outcome.CORRUPT, NOBODY
        out[:] = payload
        came(len(out))
        return Outcome.OK, origin

    def write(self, namespace: str, key: bytes, payload: memoryview, origin: Origin) -> Outcome:
        if fault := self.fault("write"):
            return fault
        with self._lock:
            if (namespace, key) in self._chunks:
                return Outcome.THERE
            self._chunks[namespace, key] = bytes(payload), checksum(payload), origin
        return Outcome.OK

    def flush(self, namespace: str | None = None, tenant: bytes | None = None) -> Counted:
        if fault := self.fault("flush"):
            return fault, 0
        with self._lock:
            doomed = [
                place
                for place, (_, _, origin) in self._chunks.items()
                if namespace in (None, place[0]) and tenant in (None, origin.tenant)
            ]
            for place in doomed:
                del self._chunks[place]
        return Outcome.OK, len(doomed)

    def usage(self) -> Usage:
        with self._lock:
            return Usage(sum(len(payload) for payload, _, _ in self._chunks.values()), None, len(self._chunks))

    def close(self) -> None:
        """Nothing outlives the object."""
