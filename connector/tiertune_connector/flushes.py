"""Flushes: what was on its way before one ended must not come after it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import RLock

from tiertune_connector.lane import Lane, Write
from tiertune_connector.tiers.base import Outcome

_PATIENCE_S = 2.0


class Flushes:
    """Guarded by the store's lock."""

    def __init__(self, lock: RLock) -> None:
        self.era = 0
        """Flushes begun and ended: noted with whatever is on its way."""
        self._lock = lock
        self._under_way = 0

    def current(self, era: int) -> bool:
        """Whether nothing was flushed since, nor is being flushed."""
        return era == self.era and not self._under_way

    @contextmanager
    def one(self) -> Iterator[None]:
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


def flush_lane(lane: Lane, digests: Sequence[str | None], tenant: bytes | None) -> tuple[Outcome, int]:
    """Drop a slower tier's chunks and what waits to be written to it; how many, and whether that was all. Waits."""

    def matches(write: Write) -> bool:
        return (None in digests or write.namespace in digests) and tenant in (None, write.origin.tenant)

    ended = lane.drop_queued(matches, _PATIENCE_S)
    outcome, count = Outcome.OK if ended else Outcome.TIMEOUT, 0
    for digest in digests:
        told, dropped = lane.flush(digest, tenant)
        outcome, count = outcome if told is Outcome.OK else told, count + dropped
    return outcome, count
