"""Ends a process, as SIGTERM, Ctrl-C and a terminal that closes ask for it.

No ``threading.Event`` is used: a signal's handler runs in the main thread, which may hold the event's lock just then,
in the midst of a wait, and would wait for itself for ever.
"""

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue

log = logging.getLogger(__name__)
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Ending:
    """The request to end: made once or more, also by a handler; read by one thread: wait takes it and puts it back."""

    def __init__(self) -> None:
        self._told: SimpleQueue[None] = SimpleQueue()
        """Its ``put`` may interrupt its own ``get``; Python promises that for no other queue and no lock."""

    def set(self) -> None:
        """Ask for the end."""
        self._told.put(None)

    def is_set(self) -> bool:
        return not self._told.empty()

    def wait(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s``; returns whether the end was asked for."""
        try:
            self._told.get(timeout=max(0.0, timeout_s))
        except Empty:
            return False
        self.set()
        return True


def heed_sigterm() -> None:
    """Have SIGTERM end this process, undoing what is under way, until ``until_told`` takes over. Call it first.

    Else the first process of a container does not get it: to that one the kernel sends no signal without a handler.
    """
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, _leave)


def _leave(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


@contextmanager
def until_told() -> Iterator[Ending]:
    """Have SIGTERM, SIGINT and SIGHUP only set the ``Ending`` meanwhile. For a process's main thread.

    A SIGHUP that is ignored, as under nohup, stays ignored.
    """
    ending = Ending()
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    if before[signal.SIGHUP] is signal.SIG_IGN:
        del before[signal.SIGHUP]
    for number in before:
        signal.signal(number, lambda *_: ending.set())
    try:
        yield ending
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def unheard() -> Iterator[None]:
    """Let SIGINT wait meanwhile. Who is started within never hears one: a terminal sends it to all, who would complain.

    They have to end with this process. The resource tracker must run, as it does once there is a pool to ``spawn``: its
    start lets SIGINT through.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave(patience_s: float) -> None:
    """Call it last, when the process's work is done: Python would wait for ever for threads that hang in a disk.

    If the process has not ended ``patience_s`` later, it ends all the same, with exit status 0.
    """
    last = threading.Timer(patience_s, _end)
    last.daemon = True
    last.start()


def _end() -> None:
    others = threading.enumerate()
    hung = sorted(each.name for each in others if each not in (threading.main_thread(), threading.current_thread()))
    log.warning("ends though these hang: %s", ", ".join(hung))
    logging.shutdown()
    os._exit(0)
