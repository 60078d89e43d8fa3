"""A tier's way in time that a test tells."""

from tiertune_connector.cost import FetchCost
from tiertune_connector.slower.transit import Transit


class Way:
    """What is on its way, and what a fetch is believed to cost: ``cost`` are fields of `FetchCost`."""

    def __init__(self, **cost):
        self._now = cost.get("now", 0.0)
        self.transit = Transit(lambda: self._now)
        self.transit._cost = FetchCost(**cost)

    def at(self, now):
        """The transit, whose clock tells ``now`` from here on."""
        self._now = now
        return self.transit
