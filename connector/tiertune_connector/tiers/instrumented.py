"""The one wrapper that counts what a tier does; tiers themselves know no metrics."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tiertune_connector.chunk import Origin
from tiertune_connector.counters import Counters
from tiertune_connector.tiers.base import Came, Counted, Outcome, Read, Tier, unheard
from tiertune_connector.units import Clock

Told = TypeVar("Told")
_FAILED = frozenset({Outcome.CORRUPT, Outcome.TIMEOUT, Outcome.ERROR})


@dataclass(eq=False)
class InstrumentedTier:
    """Passes on what moves or drops chunks, or asks for them, and records its seconds, bytes and outcome.

    ``clock`` gives monotonic seconds.
    """

    inner: Tier
    counters: Counters
    clock: Clock

    def present(self, namespace: str, keys: Sequence[bytes]) -> Counted:
        return self._counted("present", lambda: self.inner.present(namespace, keys))

    def read(self, namespace: str, key: bytes, out: memoryview, came: Came = unheard) -> Read:
        return self._counted("read", lambda: self.inner.read(namespace, key, out, came), len(out))

    def write(self, namespace: str, key: bytes, payload: memoryview, origin: Origin) -> Outcome:
        outcome, _ = self._counted(
            "write", lambda: (self.inner.write(namespace, key, payload, origin), None), len(payload)
        )
        return outcome

    def flush(self, namespace: str | None = None, tenant: bytes | None = None) -> Counted:
        return self._counted("flush", lambda: self.inner.flush(namespace, tenant))

    def _counted(
        self, operation: str, inner: Callable[[], tuple[Outcome, Told]], payload: int = 0
    ) -> tuple[Outcome, Told]:
        started, name = self.clock(), self.inner.name
        outcome, told = inner()
        seconds = self.clock() - started
        self.counters.observe("tier_operation_seconds", (name, operation, outcome.value), seconds)
        if outcome is Outcome.OK and payload:
            self.counters.add("tier_transfer_bytes_total", (name, operation), payload)
        elif outcome in _FAILED:
            self.counters.add("tier_errors_total", (name, operation, outcome.value))
        return outcome, told
