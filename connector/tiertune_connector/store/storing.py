"""Taking chunks from clients: wanted chunks get slots, and are visible once they are written."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, TypeVar

from tiertune_connector.chunk import Origin
from tiertune_connector.protocol.messages import Abort, Commit, CommitReply, Reserve, ReserveReply, SlotRef
from tiertune_connector.sessions.session import Session
from tiertune_connector.store.parts import Parts
from tiertune_connector.tiers.steps import in_steps

if TYPE_CHECKING:
    from tiertune_connector.tiers.slots import Slot

AT_ONCE = 64
"""Chunks reserved or committed in one step: a millisecond or two with the lock held."""
Item = TypeVar("Item")


class Storing(Parts):
    """Thread-safe; more than ``AT_ONCE`` chunks need a thread that may wait."""

    def reserve(self, session: Session, asked: Reserve) -> ReserveReply:
        """Slots for the wanted chunks of a chain, for the client to write and commit."""
        keys, tenant = asked.keys, asked.tenant
        slots: dict[bytes, Slot] = {}
        reasons: dict[bytes, str] = {}
        for some in self._locked(session, keys):  # head first: nobody finds a tail without it
            wanted: list[bytes] = []
            for key in some:
                reasons[key] = self._refusal(session, key, tenant, len(wanted))
                if not reasons[key]:
                    wanted.append(key)
            for key in reversed(wanted):  # tail first, like every touch of a chain
                slot = self.dram.reserve(session.digest, key, Origin(self.accounts.writer, tenant), session.engine)
                assert slot is not None  # `_refusal` has looked, under the same lock
                slots[key] = slot
                self.holdings.reserved(session, key, slot, self.flushes.era)
        with self.dram.lock:
            chain = session.chains.get(asked.request)
            if not session.ended:
                # The lookup has used the chain; this piece of it must not be younger than its head.
                self.dram.pools[session.digest].pool.renew(
                    chain.keys if chain else [key for key in keys if key in slots]
                )
                if chain is not None:
                    self.accounts.offered(session, chain, reasons)
        refs = [SlotRef.of(slots[key]) if key in slots else None for key in keys]
        return ReserveReply(asked.id, refs, [reasons.get(key, "unreachable") for key in keys])

    def commit(self, session: Session, asked: Commit) -> CommitReply:
        """Make written chunks visible; False for those whose reservation is gone."""
        written = list(zip(asked.keys, asked.slots, strict=True))
        done = [self._commit(session, key, ref) for some in self._locked(session, written) for key, ref in some]
        return CommitReply(asked.id, done + [False] * (len(written) - len(done)))

    def abort(self, session: Session, told: Abort) -> None:
        """Take reserved slots back unwritten; without ``slots``, all that the client has of the keys."""
        with self.dram.lock:
            for key, ref in zip_longest(told.keys, told.slots):
                if self.holdings.written(session, key, ref) is not None:
                    self.holdings.give_up(session, key)

    def _locked(self, session: Session, items: Sequence[Item]) -> Iterator[Sequence[Item]]:
        """The items in steps, each with the store's lock held; no more once the client has gone."""
        for some in in_steps(self.dram.lock, len(items), AT_ONCE):
            if session.ended:
                return
            yield items[some]

    def _refusal(self, session: Session, key: bytes, tenant: bytes, before: int) -> str:
        """Why a chunk is not wanted, if ``before`` others ahead of it are wanted; empty: it is."""
        pool = self.dram.pools[session.digest].pool
        if self.tuning().bypass:
            return "bypassed"
        if key in pool:
            return "present"
        if pool.busy(key):
            return "busy"
        if before >= pool.room:
            return "full"
        if self.quotas.refuse(tenant, (before + 1) * session.chunk_bytes):
            self.accounts.over_quota(session.digest)
            return "over_quota"
        return ""

    def _commit(self, session: Session, key: bytes, ref: SlotRef) -> bool:
        with self.dram.lock:
            held = self.holdings.written(session, key, ref)
            if held is None:
                return False
            if not self.flushes.current(held.era, session.digest, held.slot.origin.tenant):
                self.holdings.give_up(session, key)
                return False
            del session.reservations[key]
            self.dram.commit(session.digest, key, held.slot, ref.checksum)
            self.accounts.computed(session, key)
            self.behind.used(session.digest, [(key, held.slot)])
            return True
