"""Threads that do many like things together with their caller, such as the copies of a prompt's chunks."""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

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
        row = _Row(work, items, goes_on)
        try:
            with suppress(RuntimeError):  # closed
                for _ in range(min(self._helpers, len(items) - 1)):
                    if self._pool is not None:
                        self._pool.submit(row.run)  # who comes too late finds nothing to do
            row.run()
        finally:
            row.end()
        return row.results()


@dataclass(eq=False)
class _Row(Generic[Item, Result]):
    """Items, taken in order by whichever thread is free."""

    work: Callable[[Item], Result]
    items: Sequence[Item]
    goes_on: Callable[[], bool]

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        """Threads in ``run``."""
        self._begun = 0
        self._stopped = False
        self._done: dict[int, Result] = {}
        self._error: BaseException | None = None

    def run(self) -> None:
        """Take items until none is left, or none is to be begun. ``results`` raises what failed."""
        with self._changed:
            self._running += 1
        try:
            while (at := self._take()) is not None:
                self._done[at] = self.work(self.items[at])
        except BaseException as error:  # noqa: BLE001 (raised where the work was asked for)
            self._error = self._error or error
            self._stopped = True
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def end(self) -> None:
        """Begin nothing more, and wait for what was begun."""
        with self._changed:
            self._stopped = True
            self._changed.wait_for(lambda: not self._running)

    def results(self) -> list[Result]:
        """Results of the items begun; raises what failed."""
        if self._error is not None:
            raise self._error
        return [self._done[at] for at in range(self._begun)]

    def _take(self) -> int | None:
        with self._changed:
            if self._stopped or self._begun == len(self.items) or not self.goes_on():
                self._stopped = True
                return None
            self._begun += 1
            return self._begun - 1
