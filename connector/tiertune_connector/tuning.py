"""The live, versioned document of a store: applied whole or not at all."""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from pydantic import AfterValidator, Field

from tiertune_connector.documents import Document, Extra, Json, parse_json
from tiertune_connector.eviction import ALGORITHMS, CANDIDATES

_DIGEST = "[0-9a-f]{32}"


def _whole(digest: str) -> str:
    if not re.fullmatch(_DIGEST, digest):
        raise ValueError("write the whole digest, 32 characters of 0-9 and a-f")
    return digest


Digest = Annotated[str, AfterValidator(_whole), Field(json_schema_extra={"pattern": f"^{_DIGEST}$"})]
"""Of a namespace or a tenant."""
if TYPE_CHECKING:
    Algorithm = str
    CandidateAlgorithm = str
else:  # the registry is the only list of them
    Algorithm = Literal[tuple(ALGORITHMS)]
    """What a store can run; fifo is a baseline known to be bad, which no tuner chooses."""
    CandidateAlgorithm = Literal[CANDIDATES]
    """What a tuner may choose."""
Admission = Literal["always", "second_access"]
Write = Literal["commit", "evict", "off"]
CodecName = Literal["raw", "lz4"]
LocalTier = Literal["dram", "disk"]
"""A tier with pools of its own; the remote is one for all stores of a fleet."""
SlowerTier = Literal["disk", "remote"]
"""A tier that a store may lack."""
MOST_FETCH_TOKENS = 2**31
"""What a floor says to a gate must fit into a message, whose whole numbers have 64 bits."""


MOST_BYTES = 2**60
Bytes = Annotated[int, Field(ge=0, le=MOST_BYTES)]


class DramTuning(Document):
    capacity_bytes: Bytes
    """Of all pools together. Less evicts and gives the memory back, step by step; more grows segment by segment."""


class DiskTuning(Document):
    capacity_bytes: Bytes = 0
    """Of all slab files together. Less removes chunks, step by step; 0 neither writes nor holds any."""
    write: Write = "evict"
    """Which chunks are written behind from now on: at commit, before they leave DRAM, or none; all stay readable."""


class RemoteTuning(Document):
    fetch: Literal["on", "off"] = "on"
    """Off: from the next lookup on nothing is fetched; probes and writes go on."""
    write: Write = "commit"
    """As ``tiers.disk.write``."""
    min_fetch_tokens: int = Field(default=0, ge=0, le=MOST_FETCH_TOKENS)
    """Shorter runs of remote chunks are recomputed."""
    margin: float = Field(default=1.1, ge=1.0, le=10.0)
    """A fetch must be predicted this many times cheaper than recomputing."""
    deadline_factor: float = Field(default=1.5, ge=1.0, le=10.0)
    """A load may take this many times what a slow one is predicted to take before the engine recomputes."""
    codec: CodecName = "raw"
    """Codec that shrinks chunks before they are written there, from now on; existing ones stay readable."""
    holdout: float = Field(default=0.0, ge=0.0, le=0.5)
    """Share of requests that do not fetch, to measure what fetching saves; all that find chunks there are timed."""


class TierTunings(Document):
    dram: DramTuning
    disk: DiskTuning = DiskTuning()
    remote: RemoteTuning = RemoteTuning()


TIERS = tuple(TierTunings.model_fields)
"""Names of all tiers of a store, the fastest first."""
LOCAL: tuple[LocalTier, ...] = get_args(LocalTier)
SLOWER: tuple[SlowerTier, ...] = get_args(SlowerTier)
LEFT_SHARE = 4
"""One in so many chunks of a pool in DRAM is kept from what a slower tier brings: one that hangs must not take it all.
"""


class PoolTuning(Document):
    capacity_bytes: Bytes | None = None
    """None: a share of what the tier has left."""
    eviction: Algorithm | None = None
    """None: the document's default. A switch hands the chunks over in the old order; none is lost."""


class PoolTunings(Document):
    dram: PoolTuning = PoolTuning()
    disk: PoolTuning = PoolTuning()


_NO_POOLS = PoolTunings()


class Defaults(Document):
    eviction: Algorithm = "lru"
    """For pools that set none. ``fifo`` is a baseline known to be worse."""


class AdmissionTuning(Document):
    """Which committed chunks are written behind: all, or those used a second time while in DRAM."""

    disk: Admission = "always"
    """``second_access``: only chunks used again while in DRAM are written from now on."""
    remote: Admission = "always"
    """The same."""


class TenantTuning(Document):
    quota_bytes: Bytes
    """DRAM bytes that a tenant's chunks may hold on this store; beyond it new ones are refused, none is evicted."""


class Tuning(Document):
    """What a running store can be told; shape as in the contracts."""

    version: int = Field(default=1, ge=1, le=2**53)
    """Counted by the store: each change makes it one more."""
    bypass: bool = False
    """True: every lookup answers miss and nothing is stored; what is held stays."""
    tiers: TierTunings
    pools: dict[Digest, PoolTunings] = Field(default_factory=dict)
    defaults: Defaults = Defaults()
    admission: AdmissionTuning = AdmissionTuning()
    tenants: dict[Digest, TenantTuning] = Field(default_factory=dict)
    """By tenant digest."""

    def pool(self, digest: str, tier: LocalTier) -> PoolTuning:
        """The tuning of one pool; the defaults where the document does not name it."""
        own: PoolTuning = getattr(self.pools.get(digest, _NO_POOLS), tier)
        return own

    def algorithm(self, digest: str, tier: LocalTier) -> Algorithm:
        return self.pool(digest, tier).eviction or self.defaults.eviction

    def capacity_bytes(self, tier: LocalTier) -> int:
        """Capacity of all of the tier's pools together."""
        held: DramTuning | DiskTuning = getattr(self.tiers, tier)
        return held.capacity_bytes

    def without(self, tier: SlowerTier) -> "Tuning":
        """The same for a store that lacks the tier: it is off, and nothing else is said of it."""
        off = DiskTuning(write="off") if tier == "disk" else RemoteTuning(fetch="off", write="off")
        pools = {digest: pools.model_copy(update={"disk": PoolTuning()}) for digest, pools in self.pools.items()}
        return self.model_copy(
            update={
                "tiers": self.tiers.model_copy(update={tier: off}),
                "pools": pools if tier == "disk" else self.pools,
                "admission": self.admission.model_copy(update={tier: "always"}),
            }
        )

    def document(self) -> Json:
        return self.model_dump(mode="json")


InForce = Callable[[], Tuning]
"""Returns the tuning that is in force now."""


def parse_tuning(document: object, *, extra: Extra = "forbid") -> Tuning:
    """The tuning in a JSON document, or FieldError naming the first field that is wrong."""
    return parse_json(Tuning, document, extra=extra)
