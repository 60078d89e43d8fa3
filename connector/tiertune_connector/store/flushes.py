"""Flushes drop chunks everywhere, and keep out those that were on their way before the flush ended."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from tiertune_connector.sessions.namespaces import Namespaces
from tiertune_connector.slower.lane import Lane, Lanes
from tiertune_connector.tiers.base import Counted, Outcome
from tiertune_connector.tiers.dram import DramTier

_PATIENCE_S = 2.0
_REMEMBERED = 64
"""Ended flushes that are remembered: what was on its way before all of them counts as flushed."""


@dataclass(frozen=True, eq=False)
class _Flush:
    """Which chunks are dropped."""

    digests: Sequence[str | None]
    """Namespaces; None stands for all."""
    tenant: bytes | None

    def takes(self, namespace: str, tenant: bytes) -> bool:
        return (None in self.digests or namespace in self.digests) and self.tenant in (None, tenant)


@dataclass(eq=False)
class Flushes:
    """Thread-safe by the store's lock, which is DRAM's."""

    dram: DramTier
    lanes: Lanes
    namespaces: Namespaces

    def __post_init__(self) -> None:
        self.era = 0
        """Number of flushes that have ended, noted with whatever is on its way."""
        self._lock = self.dram.lock
        self._under_way = list[_Flush]()
        self._ended = deque[_Flush](maxlen=_REMEMBERED)

    def current(self, era: int, namespace: str, tenant: bytes) -> bool:
        """Whether no flush since ``era`` took such a chunk, nor one under way: on a large remote it may last minutes.

        Call with the store's lock held.
        """
        since = self.era - era
        flushes = (*self._under_way, *islice(reversed(self._ended), since))
        return since <= len(self._ended) and not any(flush.takes(namespace, tenant) for flush in flushes)

    def drop(
        self, namespace: str | None = None, tenant: bytes | None = None, epoch: int | None = None
    ) -> dict[str, Counted]:
        """Drop chunks everywhere; returns how many per tier, and if not OK some may be left. Waits for slower tiers.

        Nothing that was on its way between tiers, or reserved, before the flush ended comes after it.
        """
        digests: Sequence[str | None] = [namespace] if epoch is None else self.namespaces.of(epoch, namespace)
        flush = _Flush(digests, tenant)
        with self._lock:
            self._under_way.append(flush)
        try:
            dropped = sum(self.dram.flush(digest, tenant)[1] for digest in digests)  # first: it feeds the others
            return {"dram": (Outcome.OK, dropped)} | {name: _drop(lane, flush) for name, lane in self.lanes.items()}
        finally:
            with self._lock:
                self.era += 1
                self._under_way.remove(flush)
                self._ended.append(flush)


def _drop(lane: Lane, flush: _Flush) -> Counted:
    """Drop a slower tier's queued writes and its chunks; returns whether that was all, and how many chunks. Waits."""
    ended = lane.writers.drop_queued(lambda write: flush.takes(write.namespace, write.origin.tenant), _PATIENCE_S)
    outcome, count = Outcome.OK if ended else Outcome.TIMEOUT, 0
    for digest in flush.digests:
        told, dropped = lane.flush(digest, flush.tenant)
        outcome, count = outcome if told is Outcome.OK else told, count + dropped
    return outcome, count
