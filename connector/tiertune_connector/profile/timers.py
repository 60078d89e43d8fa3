"""Seconds that a device takes for work launched between two points of a program, measured without waiting for it.

A ``Timer`` marks a start and a stop, and returns the seconds between them once the device has passed both. On a CUDA
device the marks are events on the current stream: recording and querying cost about a microsecond each, nothing
synchronises. torch is imported only where a CUDA device is timed.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from tiertune_connector.units import Clock

Key = TypeVar("Key")
PENDING = 256
"""Measurements that the device has not passed yet, at most; beyond that, new ones are left out."""


Event = Any
"""A ``torch.cuda.Event``, or what has as much of it as `_Reading`: this module imports no torch at its start."""


class Mark(NamedTuple, Generic[Key]):
    """A measurement that was started."""

    key: Key
    began: Event
    ended: Event


@dataclass(eq=False)
class Timer(Generic[Key]):
    """Pairs of events, reused once they are over. Thread-safe; ``start`` and ``stop`` never wait for the device.

    The seconds are the stream's, those it waited for launches included. Nothing is measured while a CUDA graph is
    captured: the events would become part of the graph.

    ``stream`` returns where events are recorded now; ``capturing``, whether it is being captured.
    """

    event: Callable[[], Event]
    capturing: Callable[[], bool] = lambda: False
    stream: Callable[[], Any] = lambda: None

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[tuple[Event, Event]] = []
        self._pending: deque[Mark[Key]] = deque()

    def start(self, key: Key) -> Mark[Key] | None:
        """Mark the start; None: this one cannot be measured."""
        if self.capturing():
            return None
        with self._lock:
            if len(self._pending) >= PENDING:
                return None
            began, ended = self._free.pop() if self._free else (self.event(), self.event())
        began.record(self.stream())
        return Mark(key, began, ended)

    def stop(self, mark: Mark[Key] | None) -> None:
        """Mark the stop; of None nothing happens."""
        if mark is None or self.capturing():
            return
        mark.ended.record(self.stream())
        with self._lock:
            self._pending.append(mark)

    def poll(self) -> list[tuple[Key, float]]:
        """Key and seconds of the measurements that are over, in the order of their stops, each once."""
        over = []
        with self._lock:
            while self._pending and self._pending[0].ended.query() and self._pending[0].began.query():
                mark = self._pending.popleft()
                over.append((mark.key, mark.began.elapsed_time(mark.ended) / 1e3))
                self._free.append((mark.began, mark.ended))
        return over


class _Reading:
    """An event of the CPU: what is launched is done when the call returns."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.at = 0.0

    def record(self, stream: None = None) -> None:  # noqa: ARG002 (there is none)
        self.at = self._clock()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "_Reading") -> float:
        return 1e3 * max(0.0, end.at - self.at)


def wall_timer(clock: Clock) -> Timer[Any]:
    """For the CPU; ``clock`` gives seconds."""
    return Timer(lambda: _Reading(clock))


def cuda_timer(device: object = None) -> Timer[Any]:
    """For a CUDA device (``torch.device``, number or name); None: the current one. ImportError without torch."""
    import torch  # noqa: PLC0415 (seconds to import; only where there is a device to time)

    return Timer(
        partial(torch.cuda.Event, enable_timing=True),
        capturing=torch.cuda.is_current_stream_capturing,
        stream=partial(torch.cuda.current_stream, device),
    )


def gpu_uuid(device: object = None) -> str:
    """A CUDA device's UUID, as NVML has it; None: the current one's. It must be in use already: this would start it."""
    import torch  # noqa: PLC0415 (as above)

    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
