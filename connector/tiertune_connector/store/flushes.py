"""Flushes: chunks are dropped everywhere, and what was on its way before one ended does not come after it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from tiertune_connector.sessions.namespaces import Namespaces
from tiertune_connector.slower.lane import Lane
from tiertune_connector.slower.writers import Write
from tiertune_connector.tiers.base import Outcome
from tiertune_connector.tiers.dram import DramTier

_PATIENCE_S = 2.0


class Flushes:
    """Thread-safe by the store's lock, which is DRAM's."""

    def __init__(self, dram: DramTier, lanes: Mapping[str, Lane], namespaces: Namespaces) -> None:
        self.era = 0
        """Flushes begun and ended: noted with whatever is on its way."""
        self._dram = dram
        self._lanes = lanes
        self._namespaces = namespaces
        self._lock = dram.lock
        self._under_way = 0

    def current(self, era: int) -> bool:
        """Whether nothing was flushed since, nor is being flushed."""
        return era == self.era and not self._under_way

    def drop(
        self, namespace: str | None = None, tenant: bytes | None = None, epoch: int | None = None
    ) -> dict[str, tuple[Outcome, int]]:
        """Drop chunks everywhere: how many per tier; where it is not OK, some may be left. Waits for slower tiers.

        What was on its way between tiers, or reserved, before the flush ended does not come after it.
        """
        digests: Sequence[str | None] = [namespace] if epoch is None else self._namespaces.of(epoch, namespace)
        with self._one():
            dropped = sum(self._dram.flush(digest, tenant)[1] for digest in digests)  # first: it feeds the others
            told = {"dram": (Outcome.OK, dropped)}
            for name, lane in self._lanes.items():
                told[name] = _drop(lane, digests, tenant)
        return told

    @contextmanager
    def _one(self) -> Iterator[None]:
        """A flush begins, and ends."""
        with self._lock:
            self.era += 1
            self._under_way += 1
        try:
            yield
        finally:
            with self._lock:
                self.era += 1
                self._under_way -= 1


def _drop(lane: Lane, digests: Sequence[str | None], tenant: bytes | None) -> tuple[Outcome, int]:
    """Drop a slower tier's chunks and what waits to be written to it; how many, and whether that was all. Waits."""

    def matches(write: Write) -> bool:
        return (None in digests or write.namespace in digests) and tenant in (None, write.origin.tenant)

    ended = lane.writers.drop_queued(matches, _PATIENCE_S)
    outcome, count = Outcome.OK if ended else Outcome.TIMEOUT, 0
    for digest in digests:
        told, dropped = lane.flush(digest, tenant)
        outcome, count = outcome if told is Outcome.OK else told, count + dropped
    return outcome, count
