"""How long steps take, and what prefill costs. Imports no vLLM; runs on the scheduler thread."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tiertune_connector.cost import PrefillCost
from tiertune_connector.serve.protocol import StepReport

Span = tuple[int, int]
"""The tokens that one request computes in a step: first, end."""
IN_FLIGHT = 8
"""Steps that can be under way at once; more would mean that outputs got lost."""
LONE_PREFILL_SHARE = 0.9
"""A step tells the cost of one request's prefill if at least this share of its tokens is that prefill."""


class _Step(NamedTuple):
    started: float
    spans: Sequence[Span]


class Steps:
    """Pairs the steps given to the engine with their outputs, in order, and measures from output to output.

    With asynchronous scheduling a step is given before the one before has ended; its own time starts only then.
    """

    def __init__(self, prefill: PrefillCost, *, stage: str, clock: Callable[[], float]) -> None:
        self._prefill = prefill
        self._stage = stage
        self._clock = clock
        self._given: deque[_Step] = deque(maxlen=IN_FLIGHT)
        self._last_output = 0.0
        self._seconds: dict[str, float] = {}
        self._tokens: dict[str, int] = {}

    def given(self, spans: Sequence[Span]) -> None:
        self._given.append(_Step(self._clock(), spans))

    def output(self) -> None:
        if not self._given:
            return
        step, now = self._given.popleft(), self._clock()
        seconds = now - max(step.started, self._last_output)
        self._last_output = now
        if step.spans:
            self._count(step.spans, seconds)

    def take(self) -> list[StepReport]:
        """What was counted since the last call."""
        reports = [
            StepReport(self._stage, phase, seconds, self._tokens[phase]) for phase, seconds in self._seconds.items()
        ]
        self._seconds.clear()
        self._tokens.clear()
        return reports

    def _count(self, spans: Sequence[Span], seconds: float) -> None:
        prefills = [span for span in spans if span[1] - span[0] > 1]
        tokens = sum(end - first for first, end in spans)
        phase = "decode" if not prefills else "prefill" if len(prefills) == len(spans) else "mixed"
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds
        self._tokens[phase] = self._tokens.get(phase, 0) + tokens
        if len(prefills) == 1 and prefills[0][1] - prefills[0][0] >= LONE_PREFILL_SHARE * tokens:
            self._prefill.observe(*prefills[0], seconds)
