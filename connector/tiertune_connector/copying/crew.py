"""Threads that do many like things together with their caller, such as the copies of a prompt's chunks."""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from tiertune_connector.copying.processors import usable_processors

Item = TypeVar("Item")
Result = TypeVar("Result")
MOST_HELPERS = 7
"""More bring little: memory, and the sums, set the pace."""


def usual_helpers() -> int:
    """With the caller, half of the processors that this process may use, up to eight; none if there are two."""
    return max(0, min(MOST_HELPERS, usable_processors() // 2 - 1))


class Crew:
    """Some helpers, shared by all callers; without any, the caller does the work. Thread-safe."""

    def __init__(self, helpers: int, name: str = "tiertune-crew") -> None:
        """Threads called ``name`` are started as work needs them."""
        self._most = helpers
        self._name = name
        self._threads: list[threading.Thread] = []
        self._starting = threading.Lock()
        self._rows: SimpleQueue[_Row[Any, Any] | None] = SimpleQueue()
        """For whoever is free. An executor's queue has locks that a caller who is interrupted may leave taken."""

    def close(self) -> None:
        """End the helpers, after what they have begun; who asks goes on alone."""
        self._most = 0
        threads, self._threads = self._threads, []
        self._rows.put(None)
        for thread in threads:
            thread.join()

    def each(
        self,
        work: Callable[[Item], Result],
        items: Sequence[Item],
        *,
        then: Callable[[Item], object] = lambda _: None,
        goes_on: Callable[[], bool] = lambda: True,
    ) -> list[Result]:
        """``work`` on the items in order, several at a time; returns results, of leading ones if ``goes_on`` says no.

        ``then`` follows for each whose work is done, one at a time and in order. Nothing is under way any more when
        this returns, or raises what one of them raised; once one fails, none is begun.
        """
        row = _Row(work, items, then, goes_on)
        try:
            self._call(row, len(items) - 1)
            row.finish()
        finally:
            row.end()
        return row.results()

    def _call(self, row: "_Row[Item, Result]", most: int) -> None:
        """Call helpers; one that comes too late finds nothing to do."""
        while len(self._threads) < min(self._most, most) and self._start():
            pass
        for _ in range(min(most, len(self._threads))):
            self._rows.put(row)

    def _start(self) -> bool:
        """Start a helper, unless there are enough by now; False if no thread can be had."""
        with self._starting:
            if len(self._threads) < self._most:
                thread = threading.Thread(target=self._help, name=self._name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    return False
                self._threads.append(thread)
        return True

    def _help(self) -> None:
        while (row := self._rows.get()) is not None:
            row.help()
            del row  # what failed in it holds the frames that it failed in
        self._rows.put(None)  # for the next: a start that was interrupted left one that nobody knows


class _Row(Generic[Item, Result]):
    """Items, taken in order by whichever thread is free.

    Their owner may be interrupted anywhere (Ctrl-C), even as it takes or releases the lock; helpers are not.
    """

    def __init__(
        self,
        work: Callable[[Item], Result],
        items: Sequence[Item],
        then: Callable[[Item], object],
        goes_on: Callable[[], bool],
    ) -> None:
        self._work, self._items, self._then, self._goes_on = work, items, then, goes_on
        self._changed = threading.Condition(threading.RLock())  # an RLock knows who holds it
        self._begun, self._end = 0, len(items)
        self._done: dict[int, Result] = {}
        self._followed = 0
        self._following = False
        self._helping = 0
        """Helping threads, without the owner."""
        self._stopped = False
        self._error: BaseException | None = None

    def help(self) -> None:
        """Do what nobody else does, until there is nothing to do. ``results`` raises what failed."""
        with self._changed:
            self._helping += 1
            try:
                while self._step():
                    pass
            except BaseException as error:  # noqa: BLE001 (raised where the work was asked for)
                self._error, self._stopped = self._error or error, True
            finally:
                self._helping -= 1
                self._changed.notify_all()

    def finish(self) -> None:
        """Help until all is done, or nothing more is to be begun; raises what failed here. ``end`` follows."""
        self._changed.acquire()
        while (goes_on := self._step()) or self._helping:
            if not goes_on:
                self._changed.wait()

    def end(self) -> None:
        """Begin nothing more, and wait for what was begun: nobody touches the items afterwards."""
        with suppress(RuntimeError):  # if interrupted while not holding it
            self._changed.release()
        with self._changed:
            self._stopped = True
            self._changed.wait_for(lambda: not self._helping)
            del self._work, self._items, self._then, self._goes_on  # a helper may come late, and hold what they hold

    def results(self) -> list[Result]:
        """Results of the items begun; raises what failed."""
        if self._error is not None:
            raise self._error
        return [self._done[at] for at in range(self._begun)]

    def _step(self) -> bool:
        """Follow up what is done, else do an item; False if there is neither to do now. Call with the lock held."""
        if self._stopped:
            return False
        first = ready = self._followed
        while ready in self._done and not self._following:
            ready += 1
        if ready > first:
            self._following = True
            self._apart(self._then, first, ready)
            self._followed, self._following = ready, False
        elif self._begun < self._end and self._goes_on():
            at, self._begun = self._begun, self._begun + 1
            (self._done[at],) = self._apart(self._work, at, self._begun)
        else:
            self._end = self._begun
            return False
        return True

    def _apart(self, do: Callable[[Item], Any], start: int, stop: int) -> list[Any]:
        """Do it with some items, without the lock.

        No context manager: one that is left because of an interruption takes the lock when it is collected.
        """
        self._changed.release()
        try:
            return [do(self._items[at]) for at in range(start, stop)]
        finally:
            self._changed.acquire()
            self._changed.notify_all()
