"""What a request's choice costs the others: whoever takes an engine or a link makes those behind it wait. Pure.

A gate that looks at its own request alone takes what is free now, and with many requests all are worse off. So every
second of an engine or of a link costs as many seconds more as there will be requests behind. They are not here yet, but
as many come while a request is there as it found before it, on average (Little's law, for whoever comes and goes in
turn). It is also what keeps all queues finite that can be (max-weight: serve by the length of the queues; Tassiulas and
Ephremides 1992).
"""

from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from tiertune_connector.cost.fetch import FetchEstimate

HELD_UP = 0.5
"""Of the transfers that wait, how many make their request wait: the others have prefills before them anyway."""


@dataclass(frozen=True)
class Others:
    """Requests that are before one; without any, costs are its own."""

    prefills: int = 0
    """Not finished on its engine."""
    transfers: int = 0
    """Not finished on the link."""

    def prefill(self, seconds: Callable[[int, int], float | None]) -> Callable[[int, int], float | None]:
        """Seconds of prefilling tokens h to n, of everybody: of the request and of those behind it."""
        price = 1.0 + self.prefills

        def priced(h: int, n: int) -> float | None:
            own_s = seconds(h, n)
            return None if own_s is None else price * own_s

        return priced

    def fetch(self, estimate: FetchEstimate) -> FetchEstimate:
        """The same for a transfer; what it waits itself costs only the request."""
        price = 1.0 + HELD_UP * self.transfers
        return replace(
            estimate,
            t0_s=price * estimate.t0_s,
            per_chunk_s=price * estimate.per_chunk_s,
            bytes_per_s=estimate.bytes_per_s / price,
        )
