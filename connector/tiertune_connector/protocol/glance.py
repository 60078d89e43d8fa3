"""Looking for input for a moment before sleeping until it comes."""

import ctypes
import select
import time

from tiertune_connector.units import Clock

_GLANCE_S = 1.2e-4
"""Twice what most answers of an otherwise idle store take, and a wake-up on a quiet machine: with less, one would
sometimes miss an answer and then, with all asleep, all that follow."""
_MOST_PASSED = 31


class _PollFd(ctypes.Structure):
    """As poll(2) has it."""

    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


_poll = ctypes.PyDLL(None).poll  # it keeps the interpreter, which another thread would keep much longer
_poll.argtypes = (ctypes.POINTER(_PollFd), ctypes.c_ulong, ctypes.c_int)


class Chances:
    """After a chance taken in vain the next ones are passed by, 1, 3, 7 and at most 31 in a row, until one succeeds.

    So hardly any time is lost if answers take longer, or if whoever answers needs the processor.
    """

    def __init__(self) -> None:
        self._vain = self._passed = 0

    def take(self) -> bool:
        """Whether to take this one; if so, ``taken`` must follow."""
        if self._passed < self._vain:
            self._passed += 1
            return False
        return True

    def taken(self, *, success: bool) -> None:
        self._vain, self._passed = 0 if success else min(2 * self._vain + 1, _MOST_PASSED), 0


class Glance:
    """A look for input; after one in vain the next chances are passed by."""

    def __init__(self, descriptor: int, clock: Clock = time.monotonic) -> None:
        self._polled = _PollFd(descriptor, select.POLLIN)
        self._clock = clock
        self._chances = Chances()

    def comes(self) -> bool:
        """Whether there is something to read, or the connection has ended; looks for at most 120 microseconds."""
        if not self._chances.take():
            return False
        until = self._clock() + _GLANCE_S
        while _poll(self._polled, 1, 0) <= 0:  # less than 0: a signal came
            if self._clock() > until:
                self._chances.taken(success=False)
                return False
        self._chances.taken(success=True)
        return True
