"""Threads that do a row of like things together with whoever asks, such as the copies of a prompt's chunks."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Generic, TypeVar

from tiertune_connector.copying.processors import usable_processors

Item = TypeVar("Item")
Result = TypeVar("Result")
MOST_HELPERS = 7
"""More bring little: memory, and the sums, set the pace."""


def usual_helpers() -> int:
    """With who asks half of the processors that this process may use, up to eight; none where there are two."""
    return max(0, min(MOST_HELPERS, usable_processors() // 2 - 1))


class Crew:
    """Some helpers, shared by all who ask; without any the work is done by who asks. Thread-safe."""

    def __init__(self, helpers: int) -> None:
        self._helpers = helpers
        self._pool = ThreadPoolExecutor(helpers, thread_name_prefix="tiertune-crew") if helpers else None

    def close(self) -> None:
        """No work may be under way."""
        if self._pool is not None:
            self._pool.shutdown()

    def each(
        self, work: Callable[[Item], Result], items: Sequence[Item], *, goes_on: Callable[[], bool] = lambda: True
    ) -> list[Result]:
        """``work`` of the items in their order, several at a time; of the leading ones if ``goes_on`` says no.

        Nothing is under way any more when it returns, or raises what one of them raised; then no more were begun.
        """
        row = _Row(work, items, goes_on)
        try:
            self._call(row, len(items) - 1)
            row.run()
        finally:
            row.end()
        return row.results()

    def _call(self, row: "_Row[Item, Result]", most: int) -> None:
        """Have helpers come; whoever comes too late finds nothing to do."""
        with suppress(RuntimeError):  # no thread can be had; one that is there may come all the same
            for _ in range(min(self._helpers, most)):
                if self._pool is not None:
                    self._pool.submit(row.run)


class _Row(Generic[Item, Result]):
    """Items that are taken in their order by whoever is free."""

    def __init__(self, work: Callable[[Item], Result], items: Sequence[Item], goes_on: Callable[[], bool]) -> None:
        self._work, self._items, self._goes_on = work, items, goes_on
        self._changed = threading.Condition()
        self._running = 0
        """Threads that are here."""
        self._begun = 0
        self._stopped = False
        self._done: dict[int, Result] = {}
        self._error: BaseException | None = None

    def run(self) -> None:
        """Take items until there are none, or no more are to be begun. What fails is told by ``results``."""
        with self._changed:
            self._running += 1
        try:
            while (at := self._take()) is not None:
                self._done[at] = self._work(self._items[at])
        except BaseException as error:  # noqa: BLE001 (raised where the work was asked for)
            self._error = self._error or error
            self._stopped = True
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def end(self) -> None:
        """Nothing more is begun, and what was has ended."""
        with self._changed:
            self._stopped = True
            self._changed.wait_for(lambda: not self._running)

    def results(self) -> list[Result]:
        """Of those that were begun."""
        if self._error is not None:
            raise self._error
        return [self._done[at] for at in range(self._begun)]

    def _take(self) -> int | None:
        with self._changed:
            if self._stopped or self._begun == len(self._items) or not self._goes_on():
                self._stopped = True
                return None
            self._begun += 1
            return self._begun - 1
