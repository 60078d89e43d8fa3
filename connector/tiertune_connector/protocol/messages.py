"""What clients and a store say to each other: msgspec messages, in `Frames` over a unix socket.

The first message of a connection is ``Hello``, its answer ``Welcome``. A request with an ``id`` gets one reply with the
same ``id``; replies come in any order. ``NewSegment`` carries one file descriptor and comes before the first reply, or
part of one, that names the segment. So does ``NewIndex``, once, for a client that said it looks there itself.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import msgspec

from tiertune_connector.cost import FetchEstimate, GateSettings
from tiertune_connector.keys import MAX_KEY_BYTES, Namespace

if TYPE_CHECKING:
    from tiertune_connector.tiers.slots import Slot

PROTOCOL = 1
SERVED = (1,)
"""Versions that a store understands: its own and the one before."""
TENANT_BYTES = 16


Key = Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_KEY_BYTES)]
Keys = list[Key]
Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
"""Finite, so that sums stay numbers."""
Prediction = Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]
LABEL_CHARS = 64
REQUEST_CHARS = 256
"""Of a request's name as it is: those of prefill and decode have the addresses of both, some 110 in all."""
Label = Annotated[str, msgspec.Meta(max_length=LABEL_CHARS)]
TierName = Annotated[str, msgspec.Meta(pattern="^(gpu|staging|dram|disk|remote)$")]
OutcomeName = Annotated[str, msgspec.Meta(pattern="^(won|lost|late|failed|skipped|unknown)$")]
GroupName = Annotated[str, msgspec.Meta(pattern="^(held|fetched|)$")]
"""Group of a holdout; empty: nothing is held out, or the request has nothing to fetch."""
PHASES = ("prefill", "decode", "mixed", "kv_wait")
Phase = Annotated[str, msgspec.Meta(pattern=f"^({'|'.join(PHASES)})$")]


class Message(msgspec.Struct, frozen=True, array_like=True, tag_field="t"):
    """Base of all messages."""


class Hello(Message, tag="hello", frozen=True):
    protocol: int
    version: str
    client: str
    """Unique to the client object; the same when it reconnects."""
    engine: Label
    stage: Label
    namespace: Namespace | None
    """None: a process without chunks, which only reports steps."""
    chunk_bytes: int
    chunk_tokens: int
    gpus: list[Label] = []
    """UUIDs of the GPUs that the engine computes on."""
    looks: bool = False
    """The client can look for chunks in the store's memory itself."""


class Welcome(Message, tag="welcome", frozen=True):
    boot_id: str
    refusal: str = ""
    """Why the client is turned away; empty: it is welcome."""


class SlotRef(msgspec.Struct, frozen=True, array_like=True):
    """Where a chunk's payload lies or is to lie, valid while pinned or reserved and of this generation."""

    segment: int
    index: int
    generation: int
    checksum: Count
    """xxh3_64 of the payload; 0 for one that is to be written."""

    @classmethod
    def of(cls, slot: "Slot") -> "SlotRef":
        return cls(slot.segment.number, slot.index, slot.generation, slot.checksum)

    def tells(self, slot: "Slot") -> bool:
        """Whether it means what the slot is reserved for now."""
        return self.same_place(SlotRef.of(slot))

    def same_place(self, other: "SlotRef") -> bool:
        """Whether both mean one chunk's time in one slot."""
        return (self.segment, self.index, self.generation) == (other.segment, other.index, other.generation)


class NewSegment(Message, tag="segment", frozen=True):
    number: int
    slots: int
    chunk_bytes: int


class NewIndex(Message, tag="index", frozen=True):
    layout: int
    """`tiers.index.LAYOUT`: a client with another one does not look."""
    buckets: int


class DropSegments(Message, tag="drop", frozen=True):
    numbers: list[int]


class Side(msgspec.Struct, frozen=True, array_like=True):
    """The same prompt's chunks for another group of layers, which a cut of the chain needs too."""

    keys: Keys
    """In the prompt's order, gapless."""
    chunk_tokens: Positive
    window_chunks: Count
    """Chunks before a cut that it needs; 0: all of them."""

    def needed(self, tokens: int) -> list[bytes]:
        """The keys that a cut after ``tokens`` of the prompt needs."""
        end = min(-(-tokens // self.chunk_tokens), len(self.keys))
        return self.keys[max(0, end - self.window_chunks) if self.window_chunks else 0 : end]


class PrefillLine(msgspec.Struct, frozen=True, array_like=True):
    """What prefilling costs an engine: ``overhead_s`` and seconds per FLOP; FLOPs as in `cost.ModelShape`."""

    overhead_s: Seconds
    """What a step takes beside its FLOPs; 0 if these hide it."""
    seconds_per_flop: Seconds
    params: Annotated[float, msgspec.Meta(ge=0, le=1e15)]
    layers: Count
    width: Count
    step_tokens: Count
    """The most that one step computes, each with its overhead; 0: a whole prompt."""


class Lookup(Message, tag="lookup", frozen=True):
    id: int
    """0: the client looked itself, and only reports it."""
    request: str
    keys: Keys
    prompt_tokens: Count
    tenant: bytes
    sides: list[Side] = []
    """Only cuts that every side allows are found."""
    defer: bool = False
    """The engine has not searched its own memory for the prompt yet: nothing is counted before ``Own``."""
    prefill: PrefillLine | None = None
    """What a prefill costs the engine now; None: as told before, or unknown."""
    deadline_s: Seconds = 0.0
    """Time for the answer, with what the remote has said by then; 0: until all is known."""

    @property
    def chains(self) -> list[Keys]:
        """The keys of every group of layers, those of the chain last."""
        return [*(side.keys for side in self.sides), self.keys]


class Own(Message, tag="own", frozen=True):
    """How much of a deferred lookup's prompt the engine had itself, from its head on."""

    request: str
    gpu_chunks: Count
    staging_chunks: Count


class LookupReply(Message, tag="looked", frozen=True):
    id: int
    tiers: list[str]
    """The tier of each chunk in the longest leading run that is held and that every side allows."""
    costs: dict[str, FetchEstimate]
    gate: dict[str, GateSettings]
    reason: str = ""
    """Why nothing is found, if not plain absence."""
    group: GroupName = ""
    """The request's holdout group until it ends: the store wants to know how long it took."""
    room: tuple[Count, Count] | None = None
    """The most chunks that a load can bring, and the most of these from one slower tier; None: as many as are found."""

    def reach(self, own: int, needs: Callable[[int], int] = int) -> int:
        """How many leading chunks an engine can have that has the first ``own`` itself.

        ``needs``: the store's chunks, of all groups, that a fetch of so many takes.
        """
        end = len(self.tiers)
        if self.room is None or needs(end - own) <= min(self.room):
            return end
        most, share = (bisect_right(range(end + 1), bound, key=needs) - 1 for bound in self.room)
        end = min(end, own + most)
        for tier in {*self.tiers} - {"dram"}:
            places = [place for place in range(own, end) if self.tiers[place] == tier]
            end = places[share] if len(places) > share else end
        return end


class Load(Message, tag="load", frozen=True):
    id: int
    keys: Keys
    deadline_s: Seconds
    parts: bool = False
    """Whether the client wants to hear what has come while the rest is on its way."""

    def __post_init__(self) -> None:
        _check_chain(self.keys)


class LoadPart(Message, tag="part", frozen=True):
    """Sent before a load's reply, for some of its chunks: how many leading bytes are in their slots.

    They are neither verified yet nor pinned for the client: a copy is good only if the reply names the same slot, and
    what was copied has the checksum in the reply.
    """

    id: int
    positions: list[Count]
    """Among the load's keys; the other two are aligned."""
    slots: list[SlotRef]
    nbytes: list[Count]


class LoadReply(Message, tag="loaded", frozen=True):
    id: int
    lease: int
    slots: list[SlotRef]
    """Slots of the leading keys, which are in DRAM now."""
    outcomes: list[str]
    """Per key: hit, miss, late, corrupt or error."""
    seconds: dict[str, float]
    """Seconds until the last chunk of each slower tier was in DRAM."""


class Release(Message, tag="release", frozen=True):
    lease: int
    damaged: Keys = []
    """Chunks of the lease whose bytes are not what was committed."""


class Reserve(Message, tag="reserve", frozen=True):
    id: int
    request: str
    keys: Keys
    tenant: bytes

    def __post_init__(self) -> None:
        _check_chain(self.keys)
        if len(self.tenant) not in (0, TENANT_BYTES):
            raise ValueError(f"a tenant is a digest of {TENANT_BYTES} bytes, or nothing")


class ReserveReply(Message, tag="reserved", frozen=True):
    id: int
    slots: list[SlotRef | None]
    reasons: list[str]
    """Per key, why there is no slot (present, busy, full, over_quota, bypassed, unreachable); else empty."""


class Commit(Message, tag="commit", frozen=True):
    id: int
    keys: Keys
    slots: list[SlotRef]

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.slots):
            raise ValueError("one slot for each key")


class CommitReply(Message, tag="committed", frozen=True):
    id: int
    committed: list[bool]


class Abort(Message, tag="abort", frozen=True):
    keys: Keys
    slots: list[SlotRef] = []
    """One for each key; none from an older client, which means all that it reserved for the keys."""

    def __post_init__(self) -> None:
        if len(self.slots) not in (0, len(self.keys)):
            raise ValueError("one slot for each key")


class TierReport(msgspec.Struct, frozen=True, array_like=True):
    """What the gate saw and did in one tier for one request."""

    tier: TierName
    chunks: Count
    tokens: Count
    fetched_tokens: Count
    reason: Label
    fetch_s: Prediction | None
    recompute_s: Prediction | None
    actual_s: Seconds | None
    """Seconds that the tier's chunks took; None if none was fetched."""
    outcome: OutcomeName
    backlog_s: Seconds = 0.0
    """Predicted seconds that the request waited for others meanwhile."""
    prefills: Count = 0
    """Other requests whose prefill was not finished on the engine when the gate decided."""
    vain_tokens: Count = 0
    """Those of ``fetched_tokens`` that did not come or were of no use, so the engine computed them anyway."""
    shared: bool = False
    """``actual_s`` does not tell the tier's cost: part of it is other loads', other groups' chunks', or that of a tier
    that was not offered."""


class Report(Message, tag="report", frozen=True):
    """What the gate decided for a request, and what became of it; one for each tier that offered chunks."""

    tiers: list[TierReport]


class FirstToken(Message, tag="first_token", frozen=True):
    """A holdout's request had its first token ``seconds`` after it came, or ended without one.

    ``tokens`` of its prompt were in the remote.
    """

    tokens: Count
    seconds: Seconds
    group: GroupName
    """As the lookup replied: the share held out may have changed since."""


class StepReport(msgspec.Struct, frozen=True, array_like=True):
    stage: Label
    phase: Phase
    gpu_seconds: Seconds
    tokens: Count


class Steps(Message, tag="steps", frozen=True):
    steps: list[StepReport]
    gpus: list[Label] = []
    """UUIDs of the GPUs that the seconds were spent on, if known only now; empty: as said before."""


def brief(request: str) -> str:
    """A request's name, as its messages have it; of a long one, which the engine's caller may choose, a digest.

    Megabytes would hold up all engines, and stay in the store's memory with each of its prompts.
    """
    if len(request) <= REQUEST_CHARS:
        return request
    return hashlib.blake2b(request.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def _check_chain(keys: list[bytes]) -> None:
    if len(set(keys)) != len(keys):
        raise ValueError("a key stands in the chain twice")


Request = Hello | Lookup | Own | Load | Release | Reserve | Commit | Abort | Report | FirstToken | Steps
Reply = Welcome | NewSegment | NewIndex | DropSegments | LookupReply | LoadPart | LoadReply | ReserveReply | CommitReply
