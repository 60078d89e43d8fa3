"""Threads that do many like things together with their caller, such as the copies of a prompt's chunks."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import TypeVar

from tiertune_connector.cgroups import usable_processors
from tiertune_connector.threads import Threads

Item = TypeVar("Item")
Result = TypeVar("Result")
MOST_HELPERS = 7
"""More bring little: memory, and the sums, set the pace."""


def usual_helpers() -> int:
    """With the caller, half of the processors that this process may use, up to eight; none if there are two."""
    return max(0, min(MOST_HELPERS, usable_processors() // 2 - 1))


class Crew:
    """Some helpers, shared by all callers; without any, the caller does the work. Thread-safe."""

    def __init__(self, helpers: int) -> None:
        """There are no helpers if not all of them can be had."""
        self._helpers = helpers
        self._pool: Threads | None = None
        with suppress(OSError):
            self._pool = Threads(helpers, "tiertune-crew", ready=helpers) if helpers else None

    def close(self) -> None:
        """End the helpers; no work may be under way."""
        if self._pool is not None:
            self._pool.shutdown()

    def each(
        self, work: Callable[[Item], Result], items: Sequence[Item], *, goes_on: Callable[[], bool] = lambda: True
    ) -> list[Result]:
        """``work`` on the items in order, several at a time; returns results, of leading ones if ``goes_on`` says no.

        Nothing is under way any more when it returns, or raises what one of them raised; once one fails, none is begun.
        """
        left, done = deque(enumerate(items)), dict[int, Result]()

        def take() -> None:
            try:
                while left and goes_on():
                    try:
                        at, item = left.popleft()
                    except IndexError:  # another thread has taken the last one meanwhile
                        return
                    done[at] = work(item)
            finally:
                left.clear()

        helping: list[Future[None]] = []
        try:
            if self._pool is not None:
                with suppress(RuntimeError):  # closed
                    helping.extend(self._pool.submit(take) for _ in range(min(self._helpers, len(items) - 1)))
            take()
        finally:
            helped = [helper for helper in helping if not helper.cancel()]
            wait(helped)
        for helper in helped:
            helper.result()
        return [done[at] for at in range(len(done))]
