"""What the engine's scheduler thread calls, and the thread that makes spans of it.

The scheduler thread only writes down what happened. Spans are made once the request has ended, with the times written
down, by a thread of its own, and sent by another one, OpenTelemetry's. Nothing waits for the collector: what it does
not take is dropped.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tiertune_connector.protocol.messages import brief
from tiertune_connector.tracing.spans import RequestTrace, describe

if TYPE_CHECKING:
    from tiertune_connector.tracing.otlp import OtlpSink

logger = logging.getLogger(f"vllm.{__name__}")
EVERY_S = 1.0
MOST = 2048
"""Requests that have ended, until spans are made of them."""
CLOSE_S = 2.0


@dataclass(eq=False)
class Tracing:
    """Hands on what happened to requests to ``sink``, which another thread calls.

    Without one nothing is kept, and no thread runs. No method blocks or raises.
    """

    sink: "OtlpSink | None" = None

    def __post_init__(self) -> None:
        self._ended: deque[RequestTrace] = deque(maxlen=MOST)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(self.sink,), name="tiertune-traces", daemon=True)
        if self.sink is not None:
            self._thread.start()

    def arrived(self, request: str, headers: object, prompt_tokens: int, chunks: int) -> RequestTrace:
        """A request has come, and its lookup of ``chunks`` goes out; ``headers`` is its trace context, if any."""
        return RequestTrace(brief(request), headers, prompt_tokens, chunks, time.monotonic(), time.time_ns())

    def ended(self, trace: RequestTrace | None) -> None:
        """Nothing more will come of the request; None: it had hardly come."""
        if self.sink is not None and trace is not None:
            self._ended.append(trace)

    def close(self) -> None:
        """Send what can be sent within two seconds, and drop the rest."""
        if self.sink is None:
            return
        self._closing.set()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self.sink.give_up()

    def _run(self, sink: "OtlpSink") -> None:
        closing = False
        while not closing:
            closing = self._closing.wait(EVERY_S)
            while self._ended:
                try:
                    sink.make(self._ended.popleft())
                except Exception:
                    logger.exception("TierTune: a request's spans could not be made")
                time.sleep(0)  # lets the scheduler thread have the interpreter's lock
        sink.close()


def open_tracing(endpoint: str, *, chunk_bytes: int, model: str, attributes: Mapping[str, str]) -> Tracing:
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
    described = partial(describe, chunk_bytes=chunk_bytes, model=model)
    return Tracing(OtlpSink(endpoint, described, {"service.name": "tiertune", **attributes}))
