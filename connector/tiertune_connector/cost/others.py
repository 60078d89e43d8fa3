"""What a request's choice costs the others: whoever takes an engine or a link makes those behind it wait. Pure.

A gate that looks only at its own request takes what is free now, and with many requests all are worse off. So every
second of an engine or a link costs one second more for each request that will be behind. They are not here yet, but on
average as many come during a request as it found ahead of it (Little's law, if they come and go in turn). This also
keeps finite all queues that can be (max-weight: serve by the length of the queues; Tassiulas and Ephremides 1992).
"""

from typing import NamedTuple

HELD_UP = 0.5
"""Share of waiting transfers that make their request wait: the others have prefills ahead of them anyway."""


class Others(NamedTuple):
    """Requests beside one's own; without any, costs are its own."""

    prefills: int = 0
    """Those whose prefill on its engine is not finished."""
    transfers: int = 0
    """Those whose transfer on the link to the remote is not finished."""

    @property
    def prefill_price(self) -> float:
        """Seconds that all together, the request and those behind it, pay for one of prefill."""
        return 1.0 + self.prefills

    @property
    def transfer_price(self) -> float:
        """The same for a second of a transfer; its own wait costs only the request."""
        return 1.0 + HELD_UP * self.transfers


ALONE = Others()
