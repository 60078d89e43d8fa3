"""First in, first out: a baseline that is known to be bad, never a candidate.

Registered so that a harmful change can be forced, in tests and in replays, and seen to be rolled back.
"""

from tiertune_connector.eviction.base import InOrder, Key


class FIFO(InOrder):
    """The victim is the key that entered first; use does not matter."""

    name = "fifo"

    def touch(self, key: Key) -> None:
        """Only the order of entering counts."""

    def renew(self, key: Key) -> None:
        """Only the order of entering counts."""
