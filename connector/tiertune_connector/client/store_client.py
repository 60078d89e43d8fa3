"""The client of a store, for an engine's adapter or a player.

Every call returns at once; answers are futures that resolve with what was found, or with nothing found if the store is
away.
"""

import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tiertune_connector import __version__
from tiertune_connector.chunk import Bytes
from tiertune_connector.client.link import StoreLink, resolved
from tiertune_connector.copying.copier import Copier, PartialCopy
from tiertune_connector.eviction import Keys
from tiertune_connector.keys import Namespace
from tiertune_connector.protocol.messages import (
    PROTOCOL,
    Abort,
    Commit,
    CommitReply,
    Hello,
    Load,
    LoadPart,
    LoadReply,
    Lookup,
    LookupReply,
    Message,
    PrefillLine,
    Release,
    Reserve,
    ReserveReply,
    Side,
    SlotRef,
    StepReport,
    Steps,
    brief,
)
from tiertune_connector.protocol.reporting import DRAM

if TYPE_CHECKING:
    from concurrent.futures import Future


@dataclass(eq=False)
class ClientSlot:
    """A chunk's place in shared memory, as one connection knows it."""

    key: bytes
    ref: SlotRef
    connection: int
    checksum: int = 0
    """xxh3_64 of the payload, once written."""
    damaged: bool = False
    """Whether its bytes were read and were not what was committed."""
    begun: PartialCopy | None = None
    """The copy of a chunk read in part while it came."""


@dataclass(frozen=True)
class ArrivedPart:
    """What has come of a chunk, not verified yet."""

    position: int
    """Index among the load's keys."""
    slot: ClientSlot
    nbytes: int
    """Leading bytes in the slot."""


Arriving = Callable[[Sequence[ArrivedPart]], None]
"""Called on the asking or receiving thread, one call at a time; must not wait for long."""


@dataclass(frozen=True)
class Loaded:
    """Chunks in DRAM slots, pinned until ``StoreClient.release``."""

    slots: list[ClientSlot]
    outcomes: list[str]
    seconds: dict[str, float]
    lease: int
    connection: int


@dataclass(frozen=True)
class Reserved:
    """Slots to write, aligned with the keys asked; None for an unwanted chunk, with the reason."""

    slots: list[ClientSlot | None]
    reasons: list[str]


class StoreClient(StoreLink):
    """One engine's connection to the store of its host. Thread-safe.

    What needs no answer is a message for ``tell``: ``Own``, ``Report``, ``FirstToken``.
    """

    def __init__(
        self,
        path: Path | str,
        namespace: Namespace | None,
        *,
        chunk_bytes: int = 0,
        chunk_tokens: int = 0,
        engine: str,
        stage: str = "all",
        gpus: Sequence[str] = (),
        owner: int | None = None,
    ) -> None:
        """``chunk_bytes`` is the payload of every chunk of the namespace; ``gpus`` are UUIDs.

        Without a namespace, a client can only report steps. With an ``owner``, a store run by neither that user nor
        root is told nothing; None: whoever listens at ``path`` is the store.
        """
        self.gpus = list(gpus)
        """Sent with every report of steps; may be replaced, if known only later."""
        self.prefill: Callable[[], PrefillLine | None] = lambda: None
        """What a prefill costs the engine now, sent with every lookup; may be replaced."""
        self.successor: Callable[[], object] | None = None
        """Called once, when a store that refused this client has gone; may be replaced, and may wait."""
        hello = Hello(
            PROTOCOL, __version__, uuid.uuid4().hex, engine, stage, namespace, chunk_bytes, chunk_tokens, list(gpus),
            looks=True,
        )  # fmt: skip
        super().__init__(str(path), hello, owner)
        self._chunk_bytes = chunk_bytes
        self._copier = Copier()

    def close(self) -> None:
        """End the connection; pending answers resolve with nothing found."""
        super().close()
        self._copier.close()

    def _converse(self) -> None:
        try:
            super()._converse()
        except (ConnectionRefusedError, FileNotFoundError):  # nobody listens
            if self.refusal and (successor := self.successor) is not None:
                self.successor = None
                successor()
            raise

    def lookup(
        self,
        request: str,
        keys: Keys,
        *,
        prompt_tokens: int,
        tenant: bytes = b"",
        sides: Sequence[Side] = (),
        defer: bool = False,
        deadline_s: float = 0.0,
    ) -> "Future[LookupReply]":
        """Where the leading chunks of a prompt are, and what fetching them costs; with ``defer``, an ``Own`` follows.

        What the remote has not said by the deadline, if there is one, is not waited for. If all are in host memory,
        mostly nobody is asked: the store hears of it later.
        """
        name, chain, others = brief(request), list(keys), list(sides)

        def asked(number: int) -> Lookup:
            return Lookup(number, name, chain, prompt_tokens, tenant, others, defer, self.prefill(), deadline_s)

        if not others and chain and (cost := self.look(chain)):
            self.tell(asked(0))
            return resolved(LookupReply(0, [DRAM] * len(chain), {DRAM: cost}, {}))
        return self.ask(
            asked,
            lambda reply, _: reply if isinstance(reply, LookupReply) else LookupReply(0, [], {}, {}, "unreachable"),
        )

    def load(self, keys: Keys, *, deadline_s: float, arriving: Arriving | None = None) -> "Future[Loaded]":
        """Bring chunks into DRAM slots and pin them; ``release`` the answer.

        ``arriving`` hears what ``read_part`` can copy before the reply: at once what seems to lie in host memory, later
        what comes from slower tiers.
        """
        chain, begun, turn = list(keys), dict[int, ClientSlot](), threading.Lock()

        def slot(position: int, ref: SlotRef, connection: int) -> ClientSlot:
            there = begun.get(position)
            if there is None or not there.ref.same_place(ref):
                there = begun[position] = ClientSlot(chain[position], ref, connection)
            there.ref = ref  # that of a reply has the checksum of what was committed
            return there

        def hear(part: LoadPart, connection: int) -> None:
            assert arriving is not None
            told = zip(part.positions, part.slots, part.nbytes, strict=True)
            with turn:
                arriving(
                    [ArrivedPart(position, slot(position, ref, connection), nbytes) for position, ref, nbytes in told]
                )

        def answer(reply: Message | None, connection: int) -> Loaded:
            if not isinstance(reply, LoadReply):
                return Loaded([], ["error"] * len(chain), {}, 0, connection)
            slots = [slot(position, ref, connection) for position, ref in enumerate(reply.slots[: len(chain)])]
            return Loaded(slots, reply.outcomes, reply.seconds, reply.lease, connection)

        if arriving is None:
            return self.ask(lambda number: Load(number, chain, deadline_s), answer)
        places, connection = self.find(chain)
        refs = [SlotRef(*place, checksum=0) for place in places]
        parts = [ArrivedPart(at, slot(at, ref, connection), self._chunk_bytes) for at, ref in enumerate(refs)]
        with turn:
            asked = self.ask(lambda number: Load(number, chain, deadline_s, parts=True), answer, hear=hear)
            if parts:
                arriving(parts)
        return asked

    def read_part(self, part: ArrivedPart, out: Bytes) -> None:
        """Copy what has newly come of a chunk into ``out``; in the end ``read`` its slot.

        One thread at a time for each slot; ``out`` is the same in all calls.
        """
        slot = part.slot
        with self.mapped(slot.ref, slot.connection) as segment:
            if segment is not None and segment.generations[slot.ref.index] == slot.ref.generation:
                segment.warm(slot.ref.index)
                slot.begun = slot.begun or PartialCopy()
                self._copier.read(slot.begun, out, segment.slot(slot.ref.index), part.nbytes)

    def read(self, slot: ClientSlot, out: Bytes) -> bool:
        """Copy a loaded chunk into ``out``, uint8 of shape (chunk_bytes,); False: what was copied must not be used.

        If it was read in part before, ``out`` has that part already, and only the rest is copied.
        """
        begun, slot.begun = slot.begun, None
        with self.mapped(slot.ref, slot.connection) as segment:
            if segment is None:
                return False
            segment.warm(slot.ref.index)
            data = segment.slot(slot.ref.index)
            copied = self._copier.read(begun or PartialCopy(), out, data, len(data))
            same = int(segment.generations[slot.ref.index]) == slot.ref.generation
        slot.damaged = same and copied != slot.ref.checksum
        return same and not slot.damaged

    def release(self, loaded: Loaded) -> None:
        """Give a load's slots back, read or no longer wanted."""
        damaged = [slot.key for slot in loaded.slots if slot.damaged]
        self.tell(Release(loaded.lease, damaged), loaded.connection)

    def reserve(self, keys: Keys, *, request: str = "", tenant: bytes = b"") -> "Future[Reserved]":
        """Slots for a chain's chunks that the store wants: ``write`` and ``commit``, or ``abort`` them."""
        name, chain = brief(request), list(keys)

        def answer(reply: Message | None, connection: int) -> Reserved:
            if not isinstance(reply, ReserveReply):
                return Reserved([None] * len(chain), ["unreachable"] * len(chain))
            slots = [
                ClientSlot(key, ref, connection) if ref is not None else None
                for key, ref in zip(chain, reply.slots, strict=True)
            ]
            return Reserved(slots, reply.reasons)

        return self.ask(lambda number: Reserve(number, name, chain, tenant), answer)

    def write(self, slot: ClientSlot, data: Bytes) -> bool:
        """Copy a chunk of shape (chunk_bytes,) into a reserved slot; False if the connection it came from is gone."""
        with self.mapped(slot.ref, slot.connection) as segment:
            if segment is None:
                return False
            segment.warm(slot.ref.index)
            slot.checksum = self._copier.write(segment.slot(slot.ref.index), data)
        return True

    def commit(self, slots: Sequence[ClientSlot]) -> "Future[list[bool]]":
        """Make written chunks visible to all; returns for each whether it is."""
        refs = [msgspec.structs.replace(slot.ref, checksum=slot.checksum) for slot in slots]
        keys = [slot.key for slot in slots]
        connections = {slot.connection for slot in slots}
        if len(connections) != 1:  # no slots, or the store was lost in between and knows only some
            return resolved([False] * len(keys))
        return self.ask(
            lambda number: Commit(number, keys, refs),
            lambda reply, _: reply.committed if isinstance(reply, CommitReply) else [False] * len(keys),
            connections.pop(),
        )

    def abort(self, slots: Sequence[ClientSlot]) -> None:
        """Give reserved slots back unwritten."""
        for connection in {slot.connection for slot in slots}:
            back = [slot for slot in slots if slot.connection == connection]
            self.tell(Abort([slot.key for slot in back], [slot.ref for slot in back]), connection)

    def report_steps(self, steps: Sequence[StepReport]) -> bool:
        """Tell the store what the engine's steps took; returns whether it was sent."""
        return self.send(Steps(list(steps), self.gpus))
