"""The way to a tier slower than memory: a breaker guards it, its cost is measured, its writes are queued."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from functools import partial
from math import inf
from typing import TypeVar

from tiertune_connector.chunk import NOBODY, Origin
from tiertune_connector.codec import Codec
from tiertune_connector.counters import Counters
from tiertune_connector.slower.transit import FETCHED_AT_ONCE, Transit
from tiertune_connector.slower.writers import Write, Writers
from tiertune_connector.threads import Threads
from tiertune_connector.tiers.base import PROBE_NAMESPACE, UNKNOWN, Came, Counted, Outcome, Read, Tier, Usage, unheard
from tiertune_connector.tiers.breaker import Breaker
from tiertune_connector.tiers.linux import resident
from tiertune_connector.tiers.spread import SpreadTier
from tiertune_connector.units import Clock

log = logging.getLogger(__name__)
Told = TypeVar("Told")
MAX_PROBE_BYTES = 256 << 10
HUNG_S = 10.0
"""For a file system: long enough for the largest chunks on the slowest one."""
TELLS_S = 1.0
"""Patience for what a tier holds: an agent that asks a store for its state gives up after three seconds."""
_NOT_READ: Read = (Outcome.ERROR, NOBODY)
_FAILED = frozenset({Outcome.CORRUPT, Outcome.TIMEOUT, Outcome.ERROR})
_UNANSWERED = (TimeoutError, CancelledError)
"""Of a question that takes too long, or was still waiting when the lane ended."""


class Lane:
    """One slower tier as the store uses it, and the one place that counts what a tier does.

    Thread-safe. A tier should not raise; if it does, that is an ERROR.

    Once it has ended it answers nothing any more, as a tier that is late: who asks may not have ended yet.
    """

    def __init__(
        self,
        tier: Tier,
        counters: Counters,
        clock: Clock,
        *,
        patience_s: float = 1.0,
        hung_s: float | None = None,
        spread: SpreadTier | None = None,
        codec: Codec | None = None,
    ) -> None:
        """``clock`` gives monotonic seconds; ``patience_s`` bounds `present` and `prepare`.

        A tier without time-outs of its own hangs if nothing under way ends for ``hung_s``; `watch` finds that out. Any
        other is a server: what it has no room for has come to it all the same.
        ``spread`` is the tier, or what it wraps, if it has several servers: each has a breaker, and is probed.
        One that codes payloads brings its ``codec``, so that a probe costs as much as what requests fetch.
        """
        self.name = tier.name
        self.tier = tier
        self.breaker = spread.breaker if spread else Breaker()
        self._spread = spread
        self.codec = codec
        self.readers = Threads(FETCHED_AT_ONCE, f"{tier.name}-read")
        self._askers = Threads(32, f"{tier.name}-ask")
        self._prober = Threads(1, f"{tier.name}-probe")
        self._patience_s = patience_s
        self._hung_s = hung_s
        self._under_way = 0
        self._moved_at = 0.0
        """When an operation ended, or the first of those under way began."""
        self._probing: Future[Outcome] | None = None
        self._left: dict[Future[Counted], float] = {}
        """Questions whose askers no longer wait, and until when an answer is in time."""
        self._telling: Future[Usage] | None = None
        self._counters = counters
        self._clock = clock
        self._lock = threading.RLock()
        self._closed = False
        self.transit = Transit(clock)
        self.writers = Writers(tier.name, counters, self._put, self._refusal)

    def present(self, namespace: str, keys: Sequence[bytes], within_s: float = inf) -> int:
        """Length of the longest leading run that is there; 0 if the tier is not asked, or does not answer.

        An answer after ``within_s`` comes too late for the caller, but still counts for the tier's health.
        """
        if self.breaker.open:
            return 0
        asking = partial(self._counted, "present", partial(self.tier.present, namespace, keys))
        return self._ask("present", asking, within_s)[1]

    def prepare(self, preparing: Callable[[], Outcome]) -> Outcome:
        """Prepare the tier for what comes; TIMEOUT if that takes longer than the patience, but it goes on."""
        return Outcome.ERROR if self.breaker.open else self._ask("prepare", lambda: (preparing(), 0))[0]

    def _ask(self, place: str, question: Callable[[], Counted], within_s: float = inf) -> Counted:
        asked = _submitted(self._askers, self._guarded, place, question, (Outcome.ERROR, 0))
        try:
            outcome, count = asked.result(min(self._patience_s, within_s))
        except _UNANSWERED:  # the tier has no time-out of its own, or the asker less patience
            outcome, count = Outcome.TIMEOUT, 0
            if asked.cancel():
                return outcome, count  # it was never asked: too many questions, or the end, say nothing of its health
            if within_s < self._patience_s:
                self._counters.add("tier_errors_total", (self.name, place, "late"))
                self._left[asked] = self._clock() + self._patience_s - within_s
                asked.add_done_callback(self._told_late)
                return outcome, count
        self.record(outcome)
        return outcome, count

    def _told_late(self, asked: "Future[Counted]") -> None:
        """Record a question that nobody waits for any more, once: when it ends, or as overdue."""
        until = self._left.pop(asked, None)
        if until is not None:
            self.record(asked.result()[0] if self._clock() <= until else Outcome.TIMEOUT)

    def usage(self) -> Usage:
        """The tier's usage; unknown until it answers, and it is not asked again meanwhile.

        A directory has to be looked through once, a server may hang.
        """
        telling = self._telling or _submitted(self._askers, self._guarded, "usage", self.tier.usage, UNKNOWN)
        try:
            return telling.result(TELLS_S)
        except _UNANSWERED:
            return UNKNOWN
        finally:
            self._telling = None if telling.done() else telling

    def read(self, namespace: str, key: bytes, out: memoryview, came: Came = unheard) -> Read:
        """The tier's `read`; an error at once while the breaker is open."""
        if self.breaker.open:
            return _NOT_READ
        with self._moving():
            outcome, origin = self._read("read", namespace, key, out, came)
        self.record(outcome)
        return outcome, origin

    @property
    def hangs(self) -> bool:
        """Whether nothing under way has ended for longer than the tier may hang."""
        with self._lock:
            waited_s = self._clock() - self._moved_at if self._under_way else 0.0
            return self._hung_s is not None and waited_s > self._hung_s

    def watch(self) -> None:
        """Record a time-out while the tier hangs, and for each overdue answer. Call it every second or so."""
        for asked, until in list(self._left.items()):
            if self._clock() > until:
                self._told_late(asked)
        if self.hangs:
            self.transit.stalled()
            if not self.breaker.open:
                self.record(Outcome.TIMEOUT)

    def record(self, outcome: Outcome, *, wrote: bool = False) -> None:
        """Record how one operation, or with ``wrote`` a write behind, ended.

        What waits to be written is dropped if the tier died, or has no room.
        """
        with self._lock:
            told = self.breaker.record(outcome, wrote=wrote, why=self.tier.why)
        if told:
            log.warning("%s %s", self.name, told)
        self.writers.refused()

    def flush(self, namespace: str | None, tenant: bytes | None) -> Counted:
        """The tier's `flush`, probes not counted; TIMEOUT after ``hung_s``, but it goes on."""

        def dropping() -> Counted:
            if namespace is None and tenant is None:
                self.tier.flush(PROBE_NAMESPACE)  # first: probes go with all else, but are nobody's chunks
            return self._counted("flush", partial(self.tier.flush, namespace, tenant))

        flushing: Future[Counted] = _submitted(self._askers, self._guarded, "flush", dropping, (Outcome.ERROR, 0))
        try:
            return flushing.result(self._hung_s)
        except _UNANSWERED:
            return Outcome.TIMEOUT, 0

    def probe(self, nbytes: int) -> Outcome:
        """Read a small chunk of our own, writing it first if it is not there: keeps cost and health fresh.

        Each of several servers is probed; returns the first outcome that is not OK. TIMEOUT after ``hung_s``, but the
        probe goes on, and there is no second one meanwhile.
        """
        probing = self._probing or _submitted(self._prober, self._probe_all, nbytes)
        try:
            return probing.result(self._hung_s)
        except _UNANSWERED:
            return Outcome.TIMEOUT  # `watch` tells the breaker
        finally:
            self._probing = None if probing.done() else probing

    def measure(self, reading: Callable[[memoryview], Read], nbytes: int, silent_s: float) -> None:
        """Have a chunk of ``nbytes`` read, if none about as large was for ``silent_s``: it may cost less by now.

        Nobody waits for it; there is no second one meanwhile. A tier of unknown cost is left to requests.
        """
        known, silence_s = self.transit.estimate() is not None, self.transit.silent_s(nbytes)
        if not known or silence_s < silent_s or self.breaker.open or (self._probing and not self._probing.done()):
            return
        self._probing = _submitted(self._prober, self._measured, reading, nbytes)

    def _measured(self, reading: Callable[[memoryview], Read], nbytes: int) -> Outcome:
        buffer = resident(nbytes)  # as staging is: the kernel's time to give memory is no part of a read
        started = self._clock()
        with self._moving():
            outcome, _ = self._guarded("probe", lambda: reading(buffer), _NOT_READ)
        if outcome is Outcome.OK:
            self.transit.came_alone(nbytes, self._clock() - started)
        elif outcome is not Outcome.MISS:  # a chunk of requests': one that is damaged has left
            self._counters.add("tier_errors_total", (self.name, "probe", outcome.value))
        self.record(outcome)
        return outcome

    def _probe_all(self, nbytes: int) -> Outcome:
        size = min(nbytes, MAX_PROBE_BYTES)
        kind, payload = self.codec.sample(size) if self.codec else ("raw", bytes(size))
        stem = f"probe-{size}-{kind}".encode()
        keys = self._spread.probe_keys(stem) if self._spread else [stem]
        found = Outcome.OK
        with self._moving():
            for key in keys:
                outcome = self._guarded("probe", partial(self._probed, key, payload), Outcome.ERROR)
                self.record(outcome)
                self._counters.add("probes_total", (self.name, outcome.value))
                found = outcome if found is Outcome.OK else found  # the first that is not well
        return found

    def _probed(self, key: bytes, payload: bytes) -> Outcome:
        buffer = memoryview(bytearray(len(payload)))
        started = self._clock()
        outcome, _ = self.tier.present(PROBE_NAMESPACE, [key])  # not counted among what requests ask
        seconds = self._clock() - started
        if outcome is Outcome.OK:
            self.transit.answered(seconds)
            outcome = self._measured_read(key, buffer)
        elif outcome is Outcome.TIMEOUT and not self.breaker.open:  # else: how long it hangs is not what a fetch costs
            self.transit.took(len(payload), seconds, at_least=True)
        if outcome in (Outcome.MISS, Outcome.CORRUPT):
            outcome = self._write(PROBE_NAMESPACE, key, memoryview(payload), NOBODY)
            if outcome.kept:
                outcome = self._measured_read(key, buffer)
            elif outcome is Outcome.FULL and self._hung_s is None:
                outcome = self._measured_refusal(key, payload, seconds)
        return outcome

    def _measured_refusal(self, key: bytes, payload: bytes, asked_s: float) -> Outcome:
        """Offer it again, and measure its way there: the tier holds nothing that could be read.

        What was believed when it lost its room would be believed for ever. A write asks first whether its chunk is
        there, which takes about as long as it did just now, ``asked_s``; and the connection is up to speed.
        """
        started = self._clock()
        outcome = self._write(PROBE_NAMESPACE, key, memoryview(payload), NOBODY)
        took_s = self._clock() - started
        if outcome is Outcome.FULL:
            self.transit.took(len(payload), max(took_s - asked_s, took_s / 2))  # the way back is believed to be as fast
        return outcome

    def try_again(self, *, asking: bool = True) -> None:
        """The breaker's `try_again`; a tier that hangs is not asked: it shows by itself when that ends."""
        with self._lock:
            self.breaker.try_again(asking=asking and not self.hangs)

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what is queued as far as the time allows, then stop. Once is enough."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.writers.close(timeout_s)
        for executor in (self.readers, self._askers, self._prober):
            executor.shutdown(wait=False, cancel_futures=True)
        self.tier.close()

    def _measured_read(self, key: bytes, buffer: memoryview) -> Outcome:
        """Read twice, and measure the second: a connection that was idle takes some round trips to get up to speed.

        A fetch that pays is mostly much longer than that, and whoever believes it slower never learns better.
        """
        started = self._clock()
        outcome = self._read("probe", PROBE_NAMESPACE, key, buffer)[0]
        if outcome is Outcome.OK:
            self.transit.asked(len(buffer))
            outcome = self._read("probe", PROBE_NAMESPACE, key, buffer)[0]
            self.transit.ended(len(buffer), outcome)  # else every estimate would wait for it for ever
        elif outcome is Outcome.TIMEOUT and not self.breaker.open:
            self.transit.took(len(buffer), self._clock() - started, at_least=True)
        return outcome

    def _read(self, place: str, namespace: str, key: bytes, out: memoryview, came: Came = unheard) -> Read:
        reading = partial(self.tier.read, namespace, key, out, came)
        return self._guarded(place, partial(self._counted, "read", reading, len(out)), _NOT_READ)

    def _write(self, namespace: str, key: bytes, payload: memoryview, origin: Origin) -> Outcome:
        return self._counted("write", lambda: (self.tier.write(namespace, key, payload, origin), None), len(payload))[0]

    def _counted(self, operation: str, ask: Callable[[], tuple[Outcome, Told]], moved: int = 0) -> tuple[Outcome, Told]:
        """What the tier answers to an operation, counted: its seconds, its outcome and, if OK, the bytes ``moved``."""
        started = self._clock()
        outcome, told = ask()
        seconds = self._clock() - started
        self._counters.observe("tier_operation_seconds", (self.name, operation, outcome.value), seconds)
        if outcome is Outcome.OK and moved:
            self._counters.add("tier_transfer_bytes_total", (self.name, operation), moved)
        elif outcome in _FAILED:
            self._counters.add("tier_errors_total", (self.name, operation, outcome.value))
        return outcome, told

    def _guarded(self, place: str, operation: Callable[[], Told], failed: Told) -> Told:
        """An operation's result; ``failed`` if it raises, counted by ``place``."""
        with self._counters.surviving(place, f"{self.name} raised amid {place}"):
            return operation()
        return failed

    @contextmanager
    def _moving(self) -> Iterator[None]:
        """Note an operation under way."""
        with self._lock:
            if not self._under_way:
                self._moved_at = self._clock()
            self._under_way += 1
        try:
            yield
        finally:
            with self._lock:
                self._under_way -= 1
                self._moved_at = self._clock()

    def _refusal(self) -> str:
        """Why nothing is written now, or empty."""
        with self._lock:
            return "dead" if self.breaker.open else "full" if self.breaker.paused else ""

    def _put(self, write: Write) -> Outcome:
        with self._moving():
            writing = partial(self._write, write.namespace, write.key, write.payload, write.origin)
            outcome = self._guarded("write", writing, Outcome.ERROR)
        self.record(outcome, wrote=True)
        return outcome


def _submitted(threads: Threads, work: Callable[..., Told], *given: object) -> Future[Told]:
    """Have it done; once the threads have ended it is cancelled, as is what waited for them then."""
    try:
        return threads.submit(work, *given)
    except RuntimeError:
        never: Future[Told] = Future()
        never.cancel()
        return never


Lanes = Mapping[str, Lane]
"""The ways to those of the slower tiers that there are, by name."""
