"""Threads that do a row of like things together with whoever asks, such as the copies of a prompt's chunks."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
MOST_HELPERS = 7
"""More bring little: memory, and the sums, set the pace."""


def usual_helpers() -> int:
    """With who asks half of the processors that this process may use, up to eight; none where there are two."""
    return max(0, min(MOST_HELPERS, len(os.sched_getaffinity(0)) // 2 - 1))


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
        helping = self._helping(row, len(items) - 1)
        try:
            row.run()
        finally:
            row.stop()
            for helper in helping:
                if not helper.cancel():
                    helper.result()
        return row.results()

    def _helping(self, row: "_Row[Item, Result]", most: int) -> "list[Future[None]]":
        helping: list[Future[None]] = []
        with suppress(RuntimeError):  # no thread can be had
            while self._pool is not None and len(helping) < min(self._helpers, most):
                helping.append(self._pool.submit(row.run))
        return helping


class _Row(Generic[Item, Result]):
    """Items that are taken in their order by whoever is free."""

    def __init__(self, work: Callable[[Item], Result], items: Sequence[Item], goes_on: Callable[[], bool]) -> None:
        self._work, self._items, self._goes_on = work, items, goes_on
        self._lock = threading.Lock()
        self._begun = 0
        self._stopped = False
        self._done: dict[int, Result] = {}
        self._error: BaseException | None = None

    def run(self) -> None:
        """Take items until there are none, or no more are to be begun. What fails is told by ``results``."""
        try:
            while (at := self._take()) is not None:
                self._done[at] = self._work(self._items[at])
        except BaseException as error:  # noqa: BLE001 (raised where the work was asked for)
            self._error = self._error or error
            self.stop()

    def stop(self) -> None:
        """Nothing more is begun."""
        with self._lock:
            self._stopped = True

    def results(self) -> list[Result]:
        """Of those that were begun."""
        if self._error is not None:
            raise self._error
        return [self._done[at] for at in range(self._begun)]

    def _take(self) -> int | None:
        with self._lock:
            if self._stopped or self._begun == len(self._items) or not self._goes_on():
                self._stopped = True
                return None
            self._begun += 1
            return self._begun - 1
