"""Taking chunks from clients: slots for those that are wanted, which are visible once they are written."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tiertune_connector.chunk import Origin, writer_id
from tiertune_connector.protocol.messages import ReserveReply, SlotRef
from tiertune_connector.sessions.holdings import Holdings
from tiertune_connector.sessions.quotas import Quotas
from tiertune_connector.sessions.session import Session
from tiertune_connector.slower.behind import WriteBehind
from tiertune_connector.store.accounts import Accounts
from tiertune_connector.store.flushes import Flushes
from tiertune_connector.tiers.dram import DramTier
from tiertune_connector.tuning import Tuning

if TYPE_CHECKING:
    from tiertune_connector.tiers.slots import Slot


class Storing:
    """Thread-safe."""

    def __init__(
        self,
        store: str,
        dram: DramTier,
        accounts: Accounts,
        holdings: Holdings,
        quotas: Quotas,
        *,
        flushes: Flushes,
        behind: WriteBehind,
        tuning: Callable[[], Tuning],
    ) -> None:
        """``store`` is its name; ``tuning`` is what is in force."""
        self._writer = writer_id(store)
        self._dram = dram
        self._accounts = accounts
        self._holdings = holdings
        self._quotas = quotas
        self._flushes = flushes
        self._behind = behind
        self._tuning = tuning
        self._lock = dram.lock

    def reserve(self, session: Session, request: str, keys: list[bytes], tenant: bytes) -> ReserveReply:
        """Slots for the chunks of a chain that are wanted, to be written by the client and committed."""
        slots: dict[bytes, Slot] = {}
        reasons: dict[bytes, str] = {}
        with self._lock:
            wanted = self._wanted(session, keys, tenant, reasons)
            for key in reversed(wanted):  # tail first, as every touch of a chain
                slot = self._dram.reserve(session.digest, key, Origin(self._writer, tenant), session.engine)
                if slot is None:
                    reasons[key] = "full"
                    continue
                slots[key] = slot
                self._holdings.reserved(session, key, slot, self._flushes.era)
            chain = session.chains.get(request)
            if chain is not None:
                # The lookup has used the chain; this piece of it must not be younger than its head.
                self._dram.pools[session.digest].pool.renew(chain.keys)
                self._accounts.offered(session, chain, reasons)
        refs = [SlotRef.of(slots[key]) if key in slots else None for key in keys]
        return ReserveReply(0, refs, [reasons.get(key, "") for key in keys])

    def commit(self, session: Session, keys: Sequence[bytes], refs: Sequence[SlotRef]) -> list[bool]:
        """Make written chunks visible; False for those whose reservation is gone."""
        committed = []
        for key, ref in zip(keys, refs, strict=True):
            with self._lock:
                self._holdings.leave_quarantine(session, [key])
                held = session.reservations.get(key)
                good = held is not None and held.slot.generation == ref.generation
                if held is not None and good and not self._flushes.current(held.era):
                    self._holdings.give_up(session, key)
                    good = False
                if held is not None and good:
                    del session.reservations[key]
                    self._dram.commit(session.digest, key, held.slot, ref.checksum)
                    self._behind.used(session.digest, [(key, held.slot)])
                committed.append(good)
        return committed

    def abort(self, session: Session, keys: Sequence[bytes]) -> None:
        """A client gives reserved slots back unwritten."""
        with self._lock:
            self._holdings.leave_quarantine(session, keys)
            for key in keys:
                self._holdings.give_up(session, key)

    def _wanted(self, session: Session, keys: Sequence[bytes], tenant: bytes, reasons: dict[bytes, str]) -> list[bytes]:
        pool = self._dram.pools[session.digest].pool
        wanted: list[bytes] = []
        for key in keys:
            if self._tuning().bypass:
                reasons[key] = "bypassed"
            elif key in pool:
                reasons[key] = "present"
            elif pool.busy(key):
                reasons[key] = "busy"
            elif len(wanted) >= pool.room:
                reasons[key] = "full"
            elif self._quotas.refuse(tenant, (len(wanted) + 1) * session.chunk_bytes, self._tuning().tenants):
                reasons[key] = "over_quota"
                self._accounts.over_quota(session.digest)
            else:
                wanted.append(key)
        return wanted
