"""Device seconds of any PyTorch module, as a stage of its own.

If an engine has no connector of ours, or drops what connectors report, its process reports to the store itself::

    from tiertune_connector import profile

    profile.connect("/run/tiertune/store.sock")
    talker = profile.stage("talker")
    talker.attach(model.talker, tokens=lambda args, kwargs, output: kwargs["input_ids"].shape[-1])

Attach to modules that do not contain each other: the seconds of one inside another count for both. Attach to the
outermost module, also if it is compiled: nothing is measured while torch compiles or captures a graph. torch itself is
imported only where a module on a CUDA device is measured.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiertune_connector.client.store_client import StoreClient
from tiertune_connector.profile.reports import Reporter, Totals
from tiertune_connector.profile.timers import Mark, Timer, cuda_timer, wall_timer
from tiertune_connector.protocol.messages import LABEL_CHARS
from tiertune_connector.units import Clock

CountTokens = Callable[[tuple[Any, ...], Mapping[str, Any], Any], int]
"""Counts tokens, given a call's positional and keyword arguments and its output."""
Module = Any
"""A ``torch.nn.Module``: this part imports no torch."""
CPU = "cpu"
PHASE = "mixed"


class Profiler:
    """The stages of one process: their timers, one per device, and their totals."""

    def __init__(
        self, *, wall: Clock = time.perf_counter, device_timer: Callable[[str], Timer[str]] = cuda_timer
    ) -> None:
        self.totals = Totals()
        self._device_timer = device_timer
        self._timers: dict[str, Timer[str]] = {CPU: wall_timer(wall)}
        self.began = False
        """Whether a stage began since this was last reset."""
        self._reporter: Reporter | None = None

    def stage(self, name: str) -> "Stage":
        """A stage by its label; ValueError for a label that no store takes."""
        if not 0 < len(name) <= LABEL_CHARS:
            raise ValueError(f"the name of a stage has 1 to {LABEL_CHARS} characters: {name!r}")
        return Stage(self, name)

    def report_to(self, client: StoreClient) -> None:
        """Report to this client's store, no longer to the one before: also what is not sent yet."""
        self.close()
        self._reporter = Reporter(self.totals, client, before=self._harvest_if_idle)

    def close(self) -> None:
        """Report once more, and end reporting; measuring goes on."""
        if self._reporter is not None:
            self._reporter.close()
            self._reporter = None

    def timer(self, device: str) -> Timer[str]:
        """The device's; another one than a CUDA device is measured as the CPU."""
        device = device if device.startswith("cuda") else CPU
        if device not in self._timers:
            self._timers.setdefault(device, self._device_timer(device))
        return self._timers[device]

    def harvest(self, *timers: Timer[str]) -> None:
        """Add what devices have finished since the last call."""
        for timer in timers or tuple(self._timers.values()):
            for name, seconds in timer.poll():
                self.totals.add(name, PHASE, seconds, 0)

    def _harvest_if_idle(self) -> None:
        # Threads that run stages harvest too. This thread does it only if no stage began since it last looked: querying
        # an event breaks the capture of a graph that another thread has under way.
        began, self.began = self.began, False
        if not began:
            self.harvest()


@dataclass(frozen=True, eq=False)
class Stage:
    """A label that modules are measured under."""

    profiler: Profiler
    name: str

    def attach(self, module: Module, *, tokens: CountTokens | None = None) -> "Attached":
        """Measure every forward of a module, on the device of its parameters, until ``Attached.remove``.

        A forward that raises counts with its seconds, and no tokens.
        """
        return Attached(self, module, tokens)


class _Begun(threading.local):
    """A thread's forwards that have begun, and not ended."""

    def __init__(self) -> None:
        self.marks: list[Mark[str] | None] = []


class Attached:
    """Hooks of a stage on a module."""

    def __init__(self, stage: Stage, module: Module, tokens: CountTokens | None) -> None:
        self._stage = stage
        self._tokens = tokens
        self._timer: Timer[str] | None = None
        self._begun = _Begun()
        self._handles = (
            module.register_forward_pre_hook(self._before),
            module.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        )

    def remove(self) -> None:
        """Leave the module as it was; once is enough."""
        for handle in self._handles:
            handle.remove()

    def _before(self, module: Module, _args: object) -> None:
        if _compiling():
            return
        profiler = self._stage.profiler
        if self._timer is None:  # by now its parameters are where they will be
            parameter = next(iter(module.parameters()), None)
            self._timer = profiler.timer(CPU if parameter is None else str(parameter.device))
        profiler.began = True
        self._begun.marks.append(self._timer.start(self._stage.name))

    def _after(self, _module: Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: object) -> None:
        """Tokens are counted at once, seconds once the device has finished."""
        if _compiling() or self._timer is None or not self._begun.marks:  # without marks the first hook did not run
            return
        profiler = self._stage.profiler
        self._timer.stop(self._begun.marks.pop())
        profiler.harvest(self._timer)
        tokens = self._tokens(args, kwargs, output) if self._tokens is not None and output is not None else 0
        if tokens:
            profiler.totals.add(self._stage.name, PHASE, 0.0, tokens)


def _compiling() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.compiler.is_compiling())


_profiler = Profiler()  # this process's only one
stage = _profiler.stage


def connect(path: Path | str, *, label: str = "all", gpus: Sequence[str] = ()) -> StoreClient:
    """From now on report this process's stages to the store that listens at ``path``, whenever it is there.

    ``gpus``: UUIDs of the GPUs that the process computes on (``timers.gpu_uuid``); NVML's figures of them then carry
    ``label``. What is measured while there is no store is reported once there is. Close the returned client to end.
    ValueError for a label that no store takes, as in ``stage``.
    """
    stage(label)
    client = StoreClient(path, None, engine=f"{socket.gethostname()}:{os.getpid()}"[:64], stage=label, gpus=gpus)
    client.connect(timeout_s=0)
    _profiler.report_to(client)
    return client
