"""What a request's choice costs the others: whoever takes an engine or a link makes those behind it wait. Pure.

A gate that looks at its own request alone takes what is free now, and with many requests all are worse off. So every
second of an engine or of a link costs as many seconds more as there will be requests behind. They are not here yet, but
as many come while a request is there as it found before it, on average (Little's law, for whoever comes and goes in
turn). It is also what keeps all queues finite that can be (max-weight: serve by the length of the queues; Tassiulas and
Ephremides 1992).
"""

from typing import NamedTuple

HELD_UP = 0.5
"""Of the transfers that wait, how many make their request wait: the others have prefills before them anyway."""


class Others(NamedTuple):
    """Requests beside one; without any, costs are its own."""

    prefills: int = 0
    """Whose prefill is not finished on its engine."""
    transfers: int = 0
    """Whose transfer is not finished on the link to the remote."""

    @property
    def prefill_price(self) -> float:
        """Seconds that everybody pays for one of prefill: the request, and those behind it."""
        return 1.0 + self.prefills

    @property
    def transfer_price(self) -> float:
        """The same for a second of a transfer; what it waits itself costs only the request."""
        return 1.0 + HELD_UP * self.transfers


ALONE = Others()
