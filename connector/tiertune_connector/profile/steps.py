"""How long an engine's steps take, by phase. Imports no vLLM; runs on the scheduler thread.

A step is *given* to the engine, and later its *output* comes. With asynchronous scheduling a step is given before the
previous one has ended, so its own time starts only at that one's output; but a step without tokens takes no time, and
its output may come late, when the next step has long begun. Requests wait for this wall time, which includes launches.
The worker measures device seconds where it can: they come under the step's number, a few steps late, and are counted
for the stage instead.

Any output may come late: a process that both launches and schedules (vLLM on one GPU) reads it after launching the next
step, which the device has gone on to. So requests waited at least as long as the device took.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tiertune_connector.profile.reports import Totals
from tiertune_connector.units import Clock

Span = tuple[int, int]
"""The tokens that one request computes in a step: first, end."""
IN_FLIGHT = 64
"""Steps that can be given without an output; more would mean that outputs got lost."""
PATIENCE_S = 5.0
"""How long after its output a step waits for its measurement, before its wall time counts: a worker with nothing more
to do ships its last measurement only with the next step."""


@dataclass(slots=True, eq=False)
class _Step:
    number: int
    started: float
    spans: Sequence[Span]
    then: Callable[[], None]
    """Called once its output has come."""
    told: list[float] = field(default_factory=list)
    """Device seconds that ranks have reported."""
    ended: float = 0.0
    """When its output came."""
    seconds: float = 0.0


@dataclass(eq=False)
class Steps:
    """Pairs the steps given to the engine with their outputs, in order, and adds up their seconds and tokens.

    ``observe`` gets the spans of every step and the wall seconds that it took, or the slowest device's if more.

    A request that computes at most ``decode_tokens`` in a step, 1 and the speculated tokens, decodes. ``ranks``
    devices work on every step: their seconds are added up, as all are paid for.
    """

    stage: str
    clock: Clock
    observe: Callable[[Sequence[Span], float], None] = lambda _spans, _seconds: None
    decode_tokens: int = 1
    ranks: int = 1

    def __post_init__(self) -> None:
        self.totals = Totals()
        """The sums, for a ``Reporter``, so that nothing is sent on the scheduler thread."""
        self.last = 0
        """The number of the last step given."""
        self.ended = 0
        """The number of the last step whose output has come."""
        self._given: deque[_Step] = deque(maxlen=IN_FLIGHT)
        """Steps without an output."""
        self._last_output = 0.0
        """When the last output of a step with tokens came."""
        self._open: dict[int, _Step] = {}
        """Those whose output has come, and whose measurement has not."""
        self._measures = False

    def given(self, spans: Iterable[Span], then: Callable[[], None] = lambda: None) -> int:
        """The engine has a step to do; returns its number, under which it may be ``measured``.

        ``then`` is called once its output has come.
        """
        self.last += 1
        self._given.append(_Step(self.last, self.clock(), list(spans), then))
        return self.last

    def output(self) -> None:
        """The oldest step given has ended."""
        if not self._given:
            return
        step, now = self._given.popleft(), self.clock()
        self.ended = step.number
        if step.spans:
            seconds = max(0.0, now - max(step.started, self._last_output))
            self._last_output = now
            step.ended, step.seconds = now, seconds
            if self._measures:
                self._open[step.number] = step
                if len(step.told) >= self.ranks:
                    self._close(step.number)
            else:
                self._settle(step.spans, seconds, seconds * self.ranks)
        self._expire(now)
        step.then()

    def measured(self, seconds: Mapping[int, Sequence[float]]) -> None:
        """Take device seconds of ranks, by step number; ranks may report one by one. A counted step stays as it is.

        The first report shows that a worker measures: from then on steps wait for it.
        """
        for number, ranks in seconds.items():
            self._measures = True
            given = (step for step in self._given if step.number == number)
            step = self._open.get(number) or next(given, None)
            if step is not None:
                step.told += ranks
                if number in self._open and len(step.told) >= self.ranks:
                    self._close(number)

    def kv_wait(self, seconds: float, tokens: int) -> None:
        """A request waited for lookup, fetch and copy of ``tokens``: seconds of a request, not of a device."""
        self.totals.add(self.stage, "kv_wait", seconds, tokens)

    def _expire(self, now: float) -> None:
        """Close steps that waited too long. They are opened in the order of their outputs, so the oldest is first."""
        while self._open:
            number, opened = next(iter(self._open.items()))
            if now - opened.ended < PATIENCE_S:
                return
            self._close(number)

    def _close(self, number: int) -> None:
        """Count a step with its ranks' seconds, a silent rank taken as their mean; or with its wall time."""
        step = self._open.pop(number)
        told = step.told or [step.seconds]
        self._settle(step.spans, max(step.seconds, *told), sum(told) / len(told) * self.ranks)

    def _settle(self, spans: Sequence[Span], seconds: float, gpu_seconds: float) -> None:
        tokens = prefills = 0
        for first, end in spans:
            tokens += end - first
            if end - first > self.decode_tokens:
                prefills += 1
        phase = "decode" if not prefills else "prefill" if prefills == len(spans) else "mixed"
        self.totals.add(self.stage, phase, gpu_seconds, tokens)
        self.observe(spans, seconds)
