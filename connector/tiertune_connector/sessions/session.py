"""What the store knows of one client: its namespace, and the slots that it holds."""

from collections import OrderedDict
from dataclasses import dataclass, field

from tiertune_connector.keys import Namespace
from tiertune_connector.tiers.slots import Slot

_REMEMBERED_KEYS = 1 << 19
"""Keys of the latest prompts, some 50 MiB; even in chunks of 16 tokens, minutes of an engine's prefills."""
_PROMPT_KEYS = 8
"""A prompt's memory besides its keys, in keys."""


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
    """The store's era of flushes when it was given: what was computed before a flush must not come after."""


@dataclass(frozen=True)
class Prompt:
    """A prompt's keys, and what its lookup found."""

    keys: list[bytes]
    tiers: list[str]
    """Tiers of the leading keys."""
    asked: list[str]
    """Tiers that were asked, fastest first."""
    found: int = 0
    """How many of the first keys were in some tier, or the engine's own memory."""
    deferred: bool = False
    """Nothing is counted yet: the engine has not said what it had itself."""

    @property
    def taken(self) -> int:
        """Its memory, in keys."""
        return _PROMPT_KEYS + len(self.keys)


class Latest:
    """What is known of the latest prompts, by request: few long ones, or many short ones."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Prompt] = OrderedDict()
        self._taken = 0

    def get(self, request: str) -> Prompt | None:
        return self._kept.get(request)

    def put(self, request: str, value: Prompt) -> None:
        """Keep a prompt as the latest."""
        former = self._kept.pop(request, None)
        self._kept[request] = value
        self._taken += value.taken - (former.taken if former else 0)
        while self._taken > _REMEMBERED_KEYS and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._taken -= oldest.taken


@dataclass
class Session:
    """One connected client. Guarded by the store's lock."""

    client: str
    engine: str
    stage: str
    namespace: Namespace | None
    chunk_bytes: int
    chunk_tokens: int
    pid: int = 0
    leases: dict[int, Lease] = field(default_factory=dict)
    reservations: dict[bytes, Reservation] = field(default_factory=dict)
    quarantined: list[tuple[bytes, Slot]] = field(default_factory=list)
    """Slots that the client lost but may still be writing."""
    chains: Latest = field(default_factory=Latest)
    """Of the latest requests: what they found is to be counted, and a chain's head kept younger than its tail."""
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs that the engine computes on."""
    looks: bool = False
    """Whether it looks for chunks in the store's memory itself."""
    chunks_each: float = 1.0
    """Chunks for each of a prompt's chain, with those of other groups of layers that keep whole prompts too."""
    next_lease: int = 1
    ended: bool = False
    """The client has gone: nothing may be pinned for it any more."""

    @property
    def digest(self) -> str:
        return self.namespace.digest if self.namespace else ""
