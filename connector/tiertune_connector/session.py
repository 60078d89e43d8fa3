"""What the store knows of one client: its namespace, and the slots that it holds."""

from collections import OrderedDict
from dataclasses import dataclass, field

from tiertune_connector.keys import Namespace
from tiertune_connector.tiers.dram import Slot

_REMEMBERED_CHAINS = 1024


@dataclass(frozen=True)
class Lease:
    """Chunks pinned for a client."""

    keys: tuple[bytes, ...]
    expires_at: float


@dataclass(frozen=True)
class Reservation:
    """A slot that a client is to write."""

    slot: Slot
    expires_at: float
    era: int
    """Of the store's flushes when it was given: what was computed before a flush must not come after it."""


@dataclass
class Session:
    """One connected client. Guarded by the store's lock."""

    client: str
    engine: str
    stage: str
    namespace: Namespace
    chunk_bytes: int
    chunk_tokens: int
    pid: int = 0
    leases: dict[int, Lease] = field(default_factory=dict)
    reservations: dict[bytes, Reservation] = field(default_factory=dict)
    quarantined: list[tuple[bytes, Slot]] = field(default_factory=list)
    """Slots that the client lost but may still be writing."""
    chains: OrderedDict[str, list[bytes]] = field(default_factory=OrderedDict)
    """Keys of the latest requests, to keep a chain's head younger than the tail stored after it."""
    next_lease: int = 1
    ended: bool = False
    """The client has gone: nothing may be pinned for it any more."""

    @property
    def digest(self) -> str:
        return self.namespace.digest

    def remember(self, request: str, keys: list[bytes]) -> None:
        self.chains[request] = keys
        self.chains.move_to_end(request)
        while len(self.chains) > _REMEMBERED_CHAINS:
            self.chains.popitem(last=False)

    def lease(self, keys: tuple[bytes, ...], expires_at: float) -> int:
        """Note pinned keys; returns the number to release them by."""
        number, self.next_lease = self.next_lease, self.next_lease + 1
        self.leases[number] = Lease(keys, expires_at)
        return number
