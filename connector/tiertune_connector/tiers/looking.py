"""Which of a prompt's chunks a file system has, where every answer may take a network's round trip."""

import time
from collections.abc import Callable, Sequence

from tiertune_connector.threads import Threads

_PIECE, _SLOW_S = 8, 0.0001
"""The rest is asked for at once if so many answers took longer each: a local disk's take some microseconds."""
_AT_ONCE = 16
"""Questions on their way, those of all callers together."""
There = Callable[[bytes], object]
"""Whether a key's chunk is there; may raise OSError."""


class Lookers(Threads):
    """Asks in turn while that is quick, else at once: an engine does not wait for hundreds of round trips."""

    def __init__(self) -> None:
        """OSError if there is no thread."""
        super().__init__(_AT_ONCE, "remote-look")

    def leading(self, there: There, keys: Sequence[bytes]) -> int:
        """How many keys come before the first that is not there; an OSError if that comes before it."""
        found = 0
        while found < len(keys):
            piece, started = keys[found : found + _PIECE], time.perf_counter()
            here = _leading(there, piece)
            found += here
            if here < len(piece):
                break
            if time.perf_counter() - started > _SLOW_S * len(piece):
                return found + self._leading_at_once(there, keys[found:])
        return found

    def _leading_at_once(self, there: There, keys: Sequence[bytes]) -> int:
        """By a share for each thread: one behind a missing key ends at its own first, mostly."""
        found, size = 0, max(1, -(-len(keys) // _AT_ONCE))
        shares = [keys[start : start + size] for start in range(0, len(keys), size)]
        for share, here in zip(shares, self.map(lambda share: _leading(there, share), shares), strict=True):
            found += here
            if here < len(share):
                break
        return found


def _leading(there: There, keys: Sequence[bytes]) -> int:
    return next((position for position, key in enumerate(keys) if not there(key)), len(keys))
