"""Slows the remote down: a link in front of the real tier, whose bandwidth can change while it runs."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tiertune_connector.chunk import Origin
from tiertune_connector.tiers.base import Came, Outcome, Tier, unheard
from tiertune_connector.units import Clock


def link_rate(path: Path) -> npt.NDArray[np.float64]:
    """Bytes per second of a host's link to the remote (one number; 0: no limit), shared through a file.

    The demo sets it, the host follows.
    """
    return np.memmap(path, np.float64, "r+" if path.exists() else "w+", shape=(1,))


class ThrottledTier:
    """A tier that passes every call on. Payloads (of probes, too) queue for the link, reads and writes separately.

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
        self._inner = inner
        self._rate = rate
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at = {"read": 0.0, "write": 0.0}

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (of any member of a tier)
        return getattr(self._inner, name)

    def read(self, namespace: str, key: bytes, out: memoryview, came: Came = unheard) -> tuple[Outcome, Origin]:
        found = self._inner.read(namespace, key, out)
        if found[0] is Outcome.OK:
            self._transfer("read", len(out))
            came(len(out))
        return found

    def write(self, namespace: str, key: bytes, payload: memoryview, origin: Origin) -> Outcome:
        self._transfer("write", len(payload))
        return self._inner.write(namespace, key, payload, origin)

    def _transfer(self, way: str, nbytes: int) -> None:
        rate = self._rate()
        if rate <= 0:
            return
        with self._lock:
            now = self._clock()
            self._free_at[way] = max(self._free_at[way], now) + nbytes / rate
            rest = self._free_at[way] - now
        self._sleep(rest)
