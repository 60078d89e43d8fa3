"""Device seconds of any PyTorch module, or piece of code, as a stage of its own.

If an engine has no connector of ours, or drops what connectors report, its process reports to the store itself::

    from tiertune_connector import profile

    profile.connect("/run/tiertune/store.sock")
    talker = profile.stage("talker")
    talker.attach(model.talker, tokens=lambda args, kwargs, output: kwargs["input_ids"].shape[-1])

    with profile.stage("code2wav").span():
        audio = vocoder(codes)

    @profile.stage("thinker", phase="prefill").span()
    def think(prompt): ...

Seconds are exclusive: while a stage runs inside another one, only the inner one is charged, so that stages add up.
Attach to the outermost module, also if it is compiled: nothing is measured while torch compiles or captures a graph.
torch itself is imported only where a module, or code on a CUDA device, is measured.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tiertune_connector.client.store_client import StoreClient
from tiertune_connector.profile.reports import REPORT_EVERY_S, Reporter, Totals
from tiertune_connector.profile.timers import Mark, Timer, cuda_timer, wall_timer
from tiertune_connector.protocol.messages import LABEL_CHARS, PHASES
from tiertune_connector.units import Clock

CountTokens = Callable[[tuple[Any, ...], Mapping[str, Any], Any], int]
"""Counts tokens, given a call's positional and keyword arguments and its output."""
Module = Any
"""A ``torch.nn.Module``: this part imports no torch."""
CPU = "cpu"


@dataclass(slots=True, eq=False)
class _Visit:
    """One passage through a stage."""

    stage: "Stage"
    owner: object
    outer: "_Visit | None"
    """The visit around this one, of the same thread and timer."""
    timer: "Timer[_Visit]"
    inner_s: float = 0.0
    """Seconds of visits inside this one."""
    mark: "Mark[_Visit] | None" = None


class _Open(threading.local):
    """A thread's open visits."""

    def __init__(self) -> None:
        self.visits: list[_Visit] = []
        """Outermost first."""


class Profiler:
    """The stages of one process: their timers, one per device, and their totals."""

    def __init__(
        self,
        *,
        wall: Clock = time.perf_counter,
        device_timer: Callable[[str], Timer[_Visit]] = cuda_timer,
    ) -> None:
        self.totals = Totals()
        self._device_timer = device_timer
        self._timers: dict[str, Timer[_Visit]] = {CPU: wall_timer(wall)}
        self._lock = threading.Lock()
        self._open = _Open()
        self._visited = False
        self._reporter: Reporter | None = None

    def stage(self, name: str, *, phase: str = "mixed") -> "Stage":
        """A stage by its label; ValueError for a label or phase that no store takes."""
        if not 0 < len(name) <= LABEL_CHARS:
            raise ValueError(f"the name of a stage has 1 to {LABEL_CHARS} characters: {name!r}")
        if phase not in PHASES:
            raise ValueError(f"a phase is one of {', '.join(PHASES)}: {phase!r}")
        return Stage(self, name, phase)

    def report_to(self, client: StoreClient, *, every_s: float = REPORT_EVERY_S) -> None:
        """Report to this client's store, no longer to the one before: also what is not sent yet."""
        self.close()
        self._reporter = Reporter(self.totals, client, every_s=every_s, before=self._harvest_if_idle)

    def close(self) -> None:
        """Report once more, and end reporting; measuring goes on."""
        if self._reporter is not None:
            self._reporter.close()
            self._reporter = None

    def harvest(self) -> None:
        """Add visits that devices have finished since the last call."""
        for timer in list(self._timers.values()):
            self._harvest(timer)

    def _harvest_if_idle(self) -> None:
        # Threads that run stages harvest too. This thread does it only if no stage began since it last looked: querying
        # an event breaks the capture of a graph that another thread has under way.
        visited, self._visited = self._visited, False
        if not visited:
            self.harvest()

    def _harvest(self, timer: "Timer[_Visit]") -> None:
        """Add finished visits: inner ones stop first, and so are polled before those around them."""
        with self._lock:
            for visit, seconds in timer.poll():
                if visit.outer is not None:
                    visit.outer.inner_s += seconds
                self.totals.add(visit.stage.name, visit.stage.phase, seconds - visit.inner_s, 0)

    def _timer(self, device: str) -> "Timer[_Visit]":
        timer = self._timers.get(device)
        if timer is None:
            with self._lock:
                timer = self._timers.setdefault(device, self._device_timer(device))
        return timer

    def _enter(self, stage: "Stage", owner: object, device: str) -> None:
        self._visited = True
        visits, timer = self._open.visits, self._timer(device)
        outer = next((visit for visit in reversed(visits) if visit.timer is timer), None)
        visit = _Visit(stage, owner, outer, timer)
        visit.mark = timer.start(visit)
        visits.append(visit)

    def _leave(self, owner: object, count: Callable[[], int]) -> None:
        """End the innermost visit of ``owner``; visits inside it that never ended are forgotten.

        Tokens are counted at once, seconds once the device has finished.
        """
        visits = self._open.visits
        depth = next((index for index in reversed(range(len(visits))) if visits[index].owner is owner), None)
        if depth is None:  # the hook before the forward did not run
            return
        visit = visits[depth]
        del visits[depth:]
        visit.timer.stop(visit.mark)
        self._harvest(visit.timer)
        tokens = count()
        if tokens:
            self.totals.add(visit.stage.name, visit.stage.phase, 0.0, tokens)


@dataclass(frozen=True, eq=False)
class Stage:
    """A label that modules and pieces of code are measured under."""

    profiler: Profiler
    name: str
    phase: str

    def attach(self, module: Module, *, tokens: CountTokens | None = None) -> "Attached":
        """Measure every forward of a module, on the device of its parameters, until ``Attached.remove``.

        A forward that raises counts with its seconds, and no tokens.
        """
        return Attached(self, module, tokens)

    @contextmanager
    def span(self, tokens: int = 0, *, device: object = None) -> Iterator[None]:
        """Measure a ``with`` block, or every call of a function that it decorates.

        ``device`` as torch names it; None: the current CUDA device if this process uses one, else the CPU.
        """
        owner = object()
        self.profiler._enter(self, owner, _device(device))  # noqa: SLF001 (one module, one mechanism)
        try:
            yield
        finally:
            self.profiler._leave(owner, lambda: tokens)  # noqa: SLF001


class Attached:
    """Hooks of a stage on a module."""

    def __init__(self, stage: Stage, module: Module, tokens: CountTokens | None) -> None:
        self._stage = stage
        self._tokens = tokens
        self._device = _device_of(module)
        self._handles = (
            module.register_forward_pre_hook(self._before),
            module.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        )

    def remove(self) -> None:
        """Leave the module as it was; once is enough."""
        for handle in self._handles:
            handle.remove()

    def _before(self, module: Module, _args: object) -> None:
        if not _compiling():
            self._device = self._device or _device_of(module)
            self._stage.profiler._enter(self._stage, self, self._device or CPU)  # noqa: SLF001

    def _after(self, _module: Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: object) -> None:
        if not _compiling():
            count = self._tokens
            self._stage.profiler._leave(  # noqa: SLF001
                self, lambda: count(args, kwargs, output) if count is not None and output is not None else 0
            )


def _device(named: object) -> str:
    if named is not None:
        return str(named)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return f"cuda:{torch.cuda.current_device()}"
    return CPU


def _device_of(module: Module) -> str:
    """The device of its first parameter; empty if it has none, or none yet."""
    parameter = next(iter(module.parameters()), None)
    device = "" if parameter is None else str(parameter.device)
    return "" if device == "meta" else device


def _compiling() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.compiler.is_compiling())
