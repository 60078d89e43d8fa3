"""Seconds and tokens by stage and phase: added up here, and sent to a store every second by a thread of its own."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from tiertune_connector.client.store_client import StoreClient
from tiertune_connector.protocol.messages import StepReport

log = logging.getLogger(f"vllm.{__name__}")
REPORT_EVERY_S = 1.0


class Totals:
    """Sums that lose nothing: what was not sent is part of the next report. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[tuple[str, str], tuple[float, int]] = {}

    def add(self, stage: str, phase: str, seconds: float, tokens: int) -> None:
        """Negative amounts count as nothing: the store's counters never fall.

        ``tokens`` may be any number, such as NumPy's: it becomes an int, as the store takes only those.
        """
        counted = max(0, int(tokens))
        with self._lock:
            known_s, known_tokens = self._sums.get((stage, phase), (0.0, 0))
            self._sums[stage, phase] = known_s + max(0.0, seconds), known_tokens + counted

    def take(self) -> list[StepReport]:
        """What was added since the last call."""
        with self._lock:
            sums, self._sums = self._sums, {}
        return [StepReport(stage, phase, seconds, tokens) for (stage, phase), (seconds, tokens) in sums.items()]

    def report(self, client: StoreClient) -> None:
        """Send all sums; they stay here if they were not sent, whatever the reason."""
        reports, sent = self.take(), False
        try:
            sent = not reports or client.report_steps(reports)
        finally:
            for report in () if sent else reports:
                self.add(report.stage, report.phase, report.gpu_seconds, report.tokens)


@dataclass(eq=False)
class Reporter:
    """Reports totals to a store until it is closed, also while nothing else runs in the process.

    ``before`` is called before every report: a chance to add what is known by now.
    """

    totals: Totals
    client: StoreClient
    every_s: float = REPORT_EVERY_S
    before: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.errors = 0
        """Reports that failed unexpectedly; the thread goes on."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tiertune-profile", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Report once more, and end."""
        self._closed.set()
        self._thread.join(5)

    def _run(self) -> None:
        closing = False
        while not closing:
            closing = self._closed.wait(self.every_s)
            try:
                self.before()
                self.totals.report(self.client)
            except Exception:
                if not self.errors:
                    log.exception("profiles could not be reported")
                self.errors += 1
