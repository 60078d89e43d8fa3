"""Slows the remote down: a link in front of the real tier, whose bandwidth can change while it runs."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from tiertune_connector.chunk import Origin
from tiertune_connector.tiers.base import Came, Outcome, Tier, Usage, unheard
from tiertune_connector.units import Clock


class LinkRate:
    """Bytes per second of a host's link to the remote, shared through a file: the demo sets it, the host follows."""

    def __init__(self, path: Path) -> None:
        self._rate = np.memmap(path, np.float64, "r+" if path.exists() else "w+", shape=(1,))

    @property
    def bytes_per_s(self) -> float:
        """0: no limit."""
        return float(self._rate[0])

    @bytes_per_s.setter
    def bytes_per_s(self, rate: float) -> None:
        self._rate[0] = rate


class ThrottledTier:
    """Passes every call on. Payloads (of probes, too) queue for the link, reads and writes separately.

    ``present`` moves hardly a byte and is not slowed.
    """

    def __init__(
        self,
        inner: Tier,
        rate: Callable[[], float],
        *,
        clock: Clock,
        sleep: Callable[[float], None],
    ) -> None:
        """``rate`` returns bytes per second, 0 for no limit; ``clock`` monotonic seconds."""
        self.name = inner.name
        self._inner = inner
        self._rate = rate
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at = {"read": 0.0, "write": 0.0}

    @property
    def why(self) -> str:
        return self._inner.why

    def present(self, namespace: str, keys: Sequence[bytes]) -> tuple[Outcome, int]:
        return self._inner.present(namespace, keys)

    def read(self, namespace: str, key: bytes, out: memoryview, came: Came = unheard) -> tuple[Outcome, Origin]:
        found = self._inner.read(namespace, key, out)
        if found[0] is Outcome.OK:
            self._transfer("read", len(out))
            came(len(out))
        return found

    def write(self, namespace: str, key: bytes, payload: memoryview, origin: Origin) -> Outcome:
        self._transfer("write", len(payload))
        return self._inner.write(namespace, key, payload, origin)

    def flush(self, namespace: str | None = None, tenant: bytes | None = None) -> tuple[Outcome, int]:
        return self._inner.flush(namespace, tenant)

    def usage(self) -> Usage:
        return self._inner.usage()

    def close(self) -> None:
        self._inner.close()

    def _transfer(self, way: str, nbytes: int) -> None:
        rate = self._rate()
        if rate <= 0:
            return
        with self._lock:
            now = self._clock()
            self._free_at[way] = max(self._free_at[way], now) + nbytes / rate
            rest = self._free_at[way] - now
        self._sleep(rest)
