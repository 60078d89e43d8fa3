"""When a store that nobody uses may end. Pure."""


class IdleWatch:
    """Asked from time to time, with the number of clients."""

    def __init__(self, after_s: float, now: float) -> None:
        self._after_s = after_s
        self._busy_at = now
        self._asked: int | None = None

    def over(self, now: float, *, clients: int, asked: int) -> bool:
        """Whether nobody was there for ``after_s``; a changed ``asked`` means that somebody is about to come."""
        if clients or asked != self._asked:
            self._busy_at, self._asked = now, asked
        return now - self._busy_at >= self._after_s
