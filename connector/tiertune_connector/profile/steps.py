"""How long an engine's steps take, by phase. Imports no vLLM; runs on the scheduler thread.

A step is *given* to the engine, and later its *output* comes. With asynchronous scheduling a step is given before the
previous one has ended, so its own time starts only at that one's output; but a step without tokens takes no time, and
its output may come late, when the next step has long begun. Requests wait for this wall time, which includes launches.
The worker measures device seconds where it can: they come under the step's number, a few steps late, and are counted
for the stage instead.

Any output may come late: a process that both launches and schedules (vLLM on one GPU) reads it after launching the next
step, which the device has gone on to. So requests waited at least as long as the device took.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tiertune_connector.profile.reports import Totals
from tiertune_connector.units import Clock

Span = tuple[int, int]
"""The tokens that one request computes in a step: first, end."""
IN_FLIGHT = 64
"""Steps behind which an output or a measurement that has not come is taken as lost. A worker with nothing more to do
ships its last measurement only with the next step."""

SMOOTHED = 0.2
"""Weight of the newest step among those that decode."""


@dataclass(slots=True, eq=False)
class _Step:
    started: float
    spans: Sequence[Span]
    then: Callable[[], None]
    """Called once its output has come."""
    told: list[float] = field(default_factory=list)
    """Device seconds that ranks have reported."""
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
        self._steps: dict[int, _Step] = {}
        """Those that are not counted yet, by number."""
        self._last_output = 0.0
        """When the last output of a step with tokens came."""
        self._measures = False
        self._decode_s = 0.0
        """Of late, as others wait for it; 0 after a step without tokens: nobody decodes."""

    @property
    def decode_s(self) -> float:
        """Wall seconds of a step that only decodes, if such steps go on now; else 0."""
        since_s = self.clock() - self._last_output
        return self._decode_s if since_s <= 2 * self._decode_s else 0.0

    def given(self, spans: Iterable[Span], then: Callable[[], None] = lambda: None) -> int:
        """The engine has a step to do; returns its number, under which it may be ``measured``.

        ``then`` is called once its output has come.
        """
        self.last += 1
        self._steps[self.last] = _Step(self.clock(), list(spans), then)
        late = self.last - IN_FLIGHT
        if late <= self.ended:
            self._count(late)
        else:
            del self._steps[late]
        return self.last

    def output(self) -> None:
        """The oldest step given has ended."""
        number = max(self.ended, self.last - IN_FLIGHT) + 1
        if number > self.last:
            return
        step, now, self.ended = self._steps[number], self.clock(), number
        if step.spans:
            step.seconds = max(0.0, now - max(step.started, self._last_output))
            self._last_output = now
            if all(end - first <= self.decode_tokens for first, end in step.spans):
                self._decode_s += (SMOOTHED if self._decode_s else 1.0) * (step.seconds - self._decode_s)
        else:
            self._decode_s = 0.0
        if not (step.spans and self._measures) or len(step.told) >= self.ranks:
            self._count(number)
        step.then()

    def lost(self) -> None:
        """No output comes of the steps that were given and have not ended."""
        for number in range(self.ended + 1, self.last + 1):
            self._steps.pop(number, None)
        self.ended = self.last

    def measured(self, seconds: Mapping[int, Sequence[float]]) -> None:
        """Take device seconds of ranks, by step number; ranks may report one by one. A counted step stays as it is.

        The first report shows that a worker measures: from then on steps wait for it.
        """
        for number, ranks in seconds.items():
            self._measures = True
            if step := self._steps.get(number):
                step.told += ranks
                if number <= self.ended and len(step.told) >= self.ranks:
                    self._count(number)

    def kv_wait(self, seconds: float, tokens: int) -> None:
        """A request waited for lookup, fetch and copy of ``tokens``: seconds of a request, not of a device."""
        self.totals.add(self.stage, "kv_wait", seconds, tokens)

    def _count(self, number: int) -> None:
        """Count a step with its ranks' seconds, a silent rank taken as their mean; or with its wall time."""
        step = self._steps.pop(number, None)
        if step is None or not step.spans:
            return
        told = step.told or [step.seconds]
        tokens = [end - first for first, end in step.spans]
        prefills = sum(each > self.decode_tokens for each in tokens)
        phase = "decode" if not prefills else "prefill" if prefills == len(tokens) else "mixed"
        self.totals.add(self.stage, phase, sum(told) / len(told) * self.ranks, sum(tokens))
        self.observe(step.spans, max(step.seconds, *told))
