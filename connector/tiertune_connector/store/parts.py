"""What looking up, loading and storing have in common."""

from dataclasses import dataclass

from tiertune_connector.sessions.holdings import Holdings, Quotas
from tiertune_connector.slower.behind import WriteBehind
from tiertune_connector.slower.reach import Reach
from tiertune_connector.store.accounts import Accounts
from tiertune_connector.store.flushes import Flushes
from tiertune_connector.store.health import Health
from tiertune_connector.store.residency import Residency


@dataclass(eq=False)
class Parts(Reach):
    """The parts of a store that its operations work with."""

    residency: Residency
    health: Health
    accounts: Accounts
    holdings: Holdings
    quotas: Quotas
    flushes: Flushes
    behind: WriteBehind
