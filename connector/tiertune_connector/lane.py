"""The way to a tier that is slower than memory: guarded by a breaker, its cost measured, its writes queued behind."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from tiertune_connector.chunk import NOBODY, Origin
from tiertune_connector.cost import FetchCost, FetchEstimate
from tiertune_connector.counters import Counters
from tiertune_connector.tiers.base import Outcome, Tier
from tiertune_connector.tiers.breaker import Breaker
from tiertune_connector.tiers.instrumented import InstrumentedTier

PROBE_NAMESPACE = "0" * 32
MAX_PROBE_BYTES = 256 << 10
MAX_QUEUED = 1024


@dataclass(frozen=True)
class Write:
    """A chunk to be written behind; ``done`` is called once, with the outcome or None if it was dropped."""

    namespace: str
    key: bytes
    payload: memoryview
    origin: Origin
    done: Callable[[Outcome | None], None]


class Lane:
    """One slower tier as the store uses it. Thread-safe."""

    def __init__(self, tier: Tier, counters: Counters, clock: Callable[[], float], *, writers: int = 2) -> None:
        """``clock`` gives monotonic seconds."""
        self.name = tier.name
        self.tier = InstrumentedTier(tier, counters, clock)
        self.breaker = Breaker()
        self.readers = ThreadPoolExecutor(8, thread_name_prefix=f"{tier.name}-read")
        self._cost = FetchCost(now=clock())
        self._counters = counters
        self._clock = clock
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._queue: deque[Write] = deque()
        self._writing = 0
        self._closed = False
        self._threads = [threading.Thread(target=self._write, name=f"{tier.name}-write") for _ in range(writers)]
        for thread in self._threads:
            thread.start()

    def estimate(self) -> FetchEstimate | None:
        """What a fetch costs now; None before anything was measured."""
        with self._lock:
            return self._cost.estimate(self._clock())

    def observe(self, chunks: int, nbytes: int, seconds: float) -> None:
        """A load of so many chunks took so long."""
        with self._lock:
            self._cost.observe(chunks, nbytes, seconds, self._clock())

    def present(self, namespace: str, keys: Sequence[bytes]) -> int:
        """Length of the longest leading run that is there; 0 where the tier is not asked, or does not answer."""
        if self.breaker.open or not keys:
            return 0
        outcome, count = self.tier.present(namespace, keys)
        self.record(outcome)
        return count

    def read(self, namespace: str, key: bytes, out: memoryview) -> tuple[Outcome, Origin]:
        """As the tier's; an error at once while the breaker is open."""
        if self.breaker.open:
            return Outcome.ERROR, NOBODY
        outcome, origin = self.tier.read(namespace, key, out)
        self.record(outcome)
        return outcome, origin

    def record(self, outcome: Outcome) -> None:
        with self._lock:
            self.breaker.record(outcome)

    def write_behind(self, write: Write, *, at_most: int = MAX_QUEUED) -> None:
        """Queue a chunk; dropped and counted where the queue is full or the tier dead, for it must not block.

        ``at_most`` may make the queue shorter: what waits is pinned in its pool.
        """
        with self._lock:
            full = len(self._queue) >= min(MAX_QUEUED, at_most)
            reason = "dead" if self.breaker.open else "queue_full" if full else ""
            if not reason and not self._closed:
                self._queue.append(write)
                self._wake.notify()
                return
        self._counters.add("write_behind_dropped_total", (self.name, reason or "closing"))
        write.done(None)

    def queued(self) -> int:
        """Chunks waiting or being written."""
        with self._lock:
            return len(self._queue) + self._writing

    def drop_queued(self, matches: Callable[[Write], bool], timeout_s: float) -> None:
        """Drop the waiting chunks that match, and wait, at most so long, for those being written."""
        with self._lock:
            dropped = [write for write in self._queue if matches(write)]
            self._queue = deque(write for write in self._queue if not matches(write))
            self._wake.wait_for(lambda: self._writing == 0, timeout_s)
        for write in dropped:
            write.done(None)

    def probe(self, nbytes: int) -> Outcome:
        """Read a small chunk of our own, writing it first if it is not there: keeps cost and health fresh."""
        size = max(1, min(nbytes, MAX_PROBE_BYTES))
        buffer = memoryview(np.zeros(size, np.uint8))  # type: ignore[arg-type]
        key = b"probe-%d" % size
        started = self._clock()
        outcome, _ = self.tier.read(PROBE_NAMESPACE, key, buffer)
        seconds = self._clock() - started
        if outcome in (Outcome.MISS, Outcome.CORRUPT):
            outcome = self.tier.write(PROBE_NAMESPACE, key, buffer, NOBODY)
        elif outcome in (Outcome.OK, Outcome.TIMEOUT):
            self.observe(1, size, seconds)
        self.record(outcome)
        self._counters.add("probes_total", (self.name, outcome.value))
        return outcome

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what is queued as far as the time allows, then stop."""
        with self._lock:
            self._closed = True
            self._wake.notify_all()
            self._wake.wait_for(lambda: not self._queue and not self._writing, timeout_s)
            self._queue.clear()
            self._wake.notify_all()
        for thread in self._threads:
            thread.join(timeout_s)
        self.readers.shutdown(wait=False, cancel_futures=True)
        self.tier.close()

    def _write(self) -> None:
        while (write := self._next_write()) is not None:
            outcome = self.tier.write(write.namespace, write.key, write.payload, write.origin)
            write.done(outcome)
            if outcome is not Outcome.OK:
                self._counters.add("write_behind_dropped_total", (self.name, outcome.value))
            with self._lock:
                self.breaker.record(outcome)
                self._writing -= 1
                self._wake.notify_all()

    def _next_write(self) -> Write | None:
        with self._lock:
            self._wake.wait_for(lambda: self._queue or self._closed)
            if not self._queue:
                return None
            self._writing += 1
            return self._queue.popleft()
