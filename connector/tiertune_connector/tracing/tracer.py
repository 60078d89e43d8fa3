"""What the engine's scheduler thread calls, and the thread that sends.

The scheduler thread only writes down what happened. Spans are made afterwards, with the times written down, by a
thread of its own. Nothing waits for the collector: what it does not take is dropped and counted.
"""

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tiertune_connector.cost import GateDecision
from tiertune_connector.protocol.messages import TierReport
from tiertune_connector.tracing.spans import Counts, RequestTrace, describe

if TYPE_CHECKING:
    from tiertune_connector.tracing.otlp import OtlpSink

logger = logging.getLogger(f"vllm.{__name__}")
BATCH = 8
"""Requests sent at once: encoding more of them would hold the interpreter's lock for milliseconds."""
RETRY_AT_MOST_EVERY_S = 30.0
CLOSE_S = 2.0


@dataclass(eq=False)
class Tracing:
    """Writes down what happens to requests, and sends it to ``sink``. All is called on the scheduler thread.

    Another thread calls ``sink``; without one nothing is kept, and no thread runs.

    No method blocks or raises. Memory is bounded, also if requests never finish or are never sent: ``max_open`` of them
    are remembered until they finish, ``max_queued`` finished ones until they are sent.
    """

    sink: "OtlpSink | None" = None
    clock: Callable[[], int] = time.time_ns
    every_s: float = 1.0
    max_open: int = 8192
    max_queued: int = 2048

    def __post_init__(self) -> None:
        self._no_room = 0  # counted on the scheduler thread
        self._taken = self._lost = 0  # counted on the other one
        self._open: OrderedDict[str, RequestTrace] = OrderedDict()
        self._queue: deque[RequestTrace] = deque()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(self.sink,), name="tiertune-traces", daemon=True)
        if self.sink is not None:
            self._thread.start()

    def counts(self) -> Counts:
        """Counts of requests since the start."""
        return Counts(self._taken, self._no_room + self._lost)

    def arrived(self, request: str, headers: object, prompt_tokens: int, chunks: int) -> None:
        """A request has come, and its lookup of ``chunks`` goes out; ``headers`` is its trace context, if any."""
        if self.sink is None:
            return
        self._open[request] = RequestTrace(request, headers, prompt_tokens, chunks, self.clock())
        if len(self._open) > self.max_open:
            self._open.popitem(last=False)
            self._no_room += 1

    def looked_up(
        self, request: str, tiers: Sequence[str], *, late: bool = False, nothing: str = "", ago_s: float = 0.0
    ) -> None:
        """The store answered, ``ago_s`` before now, with the tier of each chunk found, or cannot be waited for longer.

        What it answers after that changes nothing.
        """
        trace = self._open.get(request)
        if trace is not None and not trace.late:
            trace.tiers, trace.late, trace.nothing = tiers, late, nothing
            trace.looked_up_ns = self.clock() - int(ago_s * 1e9)

    def decided(self, request: str, decision: GateDecision) -> None:
        """The gate has decided."""
        trace = self._open.get(request)
        if trace is not None:
            trace.decision, trace.decided_ns = decision, self.clock()

    def loaded(self, request: str, reports: Sequence[TierReport], *, ago_s: float = 0.0) -> None:
        """A load ended ``ago_s`` before now."""
        trace = self._open.get(request)
        if trace is not None:
            trace.loads.append((self.clock() - int(ago_s * 1e9), reports))

    def finished(self, request: str) -> None:
        """Nothing more will come of the request."""
        trace = self._open.pop(request, None)
        if trace is None:
            return
        if len(self._queue) < self.max_queued:
            self._queue.append(trace)
        else:
            self._no_room += 1

    def close(self) -> None:
        """Send what can be sent within two seconds."""
        if self.sink is None:
            return
        for request in list(self._open):
            self.finished(request)
        self._closing.set()
        self._thread.join(CLOSE_S)
        self.sink.close()

    def _run(self, sink: "OtlpSink") -> None:
        wait_s = self.every_s
        while not self._closing.wait(wait_s):
            wait_s = self.every_s if self._drain(sink) else min(2 * wait_s, RETRY_AT_MOST_EVERY_S)
        self._drain(sink)
        self._lost += len(self._queue)

    def _drain(self, sink: "OtlpSink") -> bool:
        """Send all that is queued, until the collector refuses; whether it took all."""
        while self._queue:
            batch = [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]
            try:
                sent = sink.send(batch)
            except Exception:
                logger.exception("TierTune: %d requests' spans could not be made", len(batch))
                sent = Counts(0, len(batch))
            self._taken += sent.exported
            self._lost += sent.dropped
            if sent.dropped:
                return False
        return True


def open_tracing(
    endpoint: str,
    *,
    chunk_tokens: int,
    chunk_bytes: int,
    model: str,
    attributes: Mapping[str, str],
) -> Tracing:
    """Tracing that sends to ``endpoint`` by OTLP over HTTP; it is off without one, or without OpenTelemetry.

    ``attributes`` of the resource tell the engine apart; its service is `tiertune` unless OTEL_SERVICE_NAME is set.
    """
    if not endpoint:
        return Tracing()
    try:
        from tiertune_connector.tracing.otlp import OtlpSink  # noqa: PLC0415 (optional, and slow to import)
    except ImportError as error:
        logger.warning("TierTune: no traces: %s. Install tiertune[otel], or leave out the traces endpoint", error)
        return Tracing()
    described = partial(describe, chunk_tokens=chunk_tokens, chunk_bytes=chunk_bytes, model=model)
    return Tracing(OtlpSink(endpoint, described, {"service.name": "tiertune", **attributes}))
