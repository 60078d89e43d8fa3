"""Waiting in a replay: one prefill queue per engine, one link for the fleet. Discrete events, no clock."""

from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush


class PrefillQueue:
    """Prefills of one engine, one at a time, in the order in which they are ready: a fetch holds up no other request.

    Put requests in the order of arrival, each after a call of ``until`` with its arrival time; it may be ready later.
    A prefill that starts by that time was ready by then, so no later arrival could have gone first.
    """

    def __init__(self) -> None:
        self._free_s = 0.0
        self._waiting: list[tuple[float, int, float]] = []  # ready, request, seconds; a heap
        self._waiting_s = 0.0

    def put(self, request: int, ready_s: float, seconds: float) -> None:
        """Add a request that can be prefilled from ``ready_s`` on; later requests have larger numbers."""
        heappush(self._waiting, (ready_s, request, seconds))
        self._waiting_s += seconds

    def until(self, at_s: float) -> Iterator[tuple[int, float]]:
        """Start all prefills whose turn comes by ``at_s``; yields each and when it will end, which may lie ahead."""
        while self._waiting and max(self._free_s, self._waiting[0][0]) <= at_s:
            ready_s, request, seconds = heappop(self._waiting)
            self._free_s = max(self._free_s, ready_s) + seconds
            self._waiting_s = self._waiting_s - seconds if self._waiting else 0.0
            yield request, self._free_s

    def requests(self, at_s: float) -> int:
        """How many requests are not done at ``at_s``."""
        return len(self._waiting) + (self._free_s > at_s)

    def backlog_s(self, at_s: float) -> float:
        """Seconds of prefill that are not done at ``at_s``, including those of requests that still fetch."""
        return max(0.0, self._free_s - at_s) + self._waiting_s


class LinkQueue:
    """One transfer after another, in the order in which they are asked for."""

    def __init__(self) -> None:
        self._free_s = 0.0
        self._ends: deque[float] = deque()

    def transfers(self, at_s: float) -> int:
        """How many transfers are not done at ``at_s``; times must not decrease from call to call."""
        while self._ends and self._ends[0] <= at_s:
            self._ends.popleft()
        return len(self._ends)

    def start_s(self, at_s: float) -> float:
        """When a transfer asked for at ``at_s`` begins."""
        return max(at_s, self._free_s)

    def add(self, end_s: float) -> None:
        """Add a transfer that began at ``start_s`` of when it was asked for, and ends at ``end_s``."""
        self._free_s = end_s
        self._ends.append(end_s)
