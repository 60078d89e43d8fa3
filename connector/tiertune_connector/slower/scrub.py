"""Reads once, in the background, what an earlier run left on disk: damage is found before a request asks for it.

A starting store looks at headers alone, to be ready at once; whoever reads a chunk verifies its payload anyway.
"""

import logging
import mmap
import threading
from dataclasses import dataclass

from tiertune_connector.counters import Counters
from tiertune_connector.tiers.base import Outcome
from tiertune_connector.tiers.disk import DiskTier
from tiertune_connector.units import Clock

log = logging.getLogger(__name__)
_SHARE = 0.1
"""Share of the time, at most, that it keeps the disk busy."""
_LONGEST_PAUSE_S = 5.0
_FAILED = (Outcome.CORRUPT, Outcome.ERROR)


@dataclass(eq=False)
class Scrubber:
    """One pass over a disk tier.

    ``clock`` gives monotonic seconds.
    """

    disk: DiskTier
    counters: Counters
    clock: Clock

    def __post_init__(self) -> None:
        self._buffer: mmap.mmap | None = None

    def step(self) -> Outcome | None:
        """Verify one chunk more; a damaged one is dropped and counted. None: all were verified."""
        chunk = self.disk.next_unread()
        if chunk is None:
            return None
        namespace, key, nbytes = chunk
        if self._buffer is None or len(self._buffer) < nbytes:
            self._buffer = mmap.mmap(-1, nbytes)
        started = self.clock()
        outcome, _ = self.disk.read(namespace, key, memoryview(self._buffer)[:nbytes], use=False)
        self.counters.observe("tier_operation_seconds", ("disk", "scrub", outcome.value), self.clock() - started)
        if outcome in _FAILED:
            self.counters.add("tier_errors_total", ("disk", "scrub", outcome.value))
        return outcome

    def run(self, stopping: threading.Event) -> None:
        """Verify all chunks; told to stop, end after the one that is being read. For a thread of its own."""
        pause_s, seen = 0.0, dict[Outcome, int]()
        while not stopping.wait(pause_s):
            started, pause_s = self.clock(), _LONGEST_PAUSE_S
            with self.counters.surviving("scrub", "a chunk of an earlier run could not be verified"):
                outcome = self.step()
                if outcome is None:
                    break
                seen[outcome] = seen.get(outcome, 0) + 1
                pause_s = min(_LONGEST_PAUSE_S, (self.clock() - started) * (1 / _SHARE - 1))
        self._buffer = None
        if seen:
            log.info("chunks of an earlier run: %s", ", ".join(f"{number} {name}" for name, number in seen.items()))
