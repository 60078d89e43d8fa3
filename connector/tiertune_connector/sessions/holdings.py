"""What clients hold in DRAM, chunks pinned for them and slots to write, how they lose both; and quotas of tenants."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from tiertune_connector.chunk import checksum
from tiertune_connector.counters import Counters
from tiertune_connector.protocol.messages import Release, SlotRef
from tiertune_connector.sessions.session import Latest, Lease, Reservation, Session
from tiertune_connector.tiers.base import Outcome
from tiertune_connector.tiers.dram import DramTier
from tiertune_connector.tiers.slots import Slot
from tiertune_connector.tuning import InForce
from tiertune_connector.units import Clock


@dataclass(eq=False)
class Quotas:
    """Bytes by tenant; chunks without one are not counted. Guarded by the store's lock."""

    tuning: InForce
    """What is in force."""

    def __post_init__(self) -> None:
        self._held: dict[bytes, int] = {}

    def change(self, tenant: bytes, nbytes: int) -> None:
        """A tenant holds ``nbytes`` more, or less."""
        if tenant:
            held = self._held.pop(tenant, 0) + nbytes
            if held:
                self._held[tenant] = held

    def left(self, tenant: bytes) -> int | None:
        """Bytes that a tenant may still add; None: it has no quota."""
        quota = self.tuning().tenants.get(tenant.hex()) if tenant else None
        return None if quota is None else max(0, quota.quota_bytes - self._held.get(tenant, 0))

    def refuse(self, tenant: bytes, more: int) -> bool:
        """Whether ``more`` bytes would exceed the tenant's quota, if it has one."""
        left = self.left(tenant)
        return left is not None and more > left

    def document(self) -> dict[str, dict[str, int]]:
        """Quota and DRAM bytes held of each tenant that has a quota, by its digest."""
        held = {tenant.hex(): nbytes for tenant, nbytes in self._held.items()}
        return {
            digest: {"quota_bytes": tenant.quota_bytes, "resident_bytes": held.get(digest, 0)}
            for digest, tenant in self.tuning().tenants.items()
        }


@dataclass(eq=False)
class Holdings:
    """Thread-safe by the store's lock, which is DRAM's. ``clock`` gives monotonic seconds."""

    dram: DramTier
    quotas: Quotas
    counters: Counters
    clock: Clock
    lease_s: float
    """A client that holds something so much longer than it announced loses it."""

    def pinned(self, session: Session, keys: Sequence[bytes], until: float) -> int:
        """Note chunks pinned for a load that may take until ``until``; returns the number to release them by."""
        number, session.next_lease = session.next_lease, session.next_lease + 1
        session.leases[number] = Lease(tuple(keys), until + self.lease_s)
        return number

    def release(self, session: Session, told: Release) -> None:
        """A client no longer reads what a lease pinned. Drop what it found ``damaged``, if it is."""
        lease = session.leases.get(told.lease) if told.damaged else None
        for key in {*told.damaged}.intersection(lease.keys if lease else ()):
            if self._dropped(session.digest, key):
                self.counters.add("tier_errors_total", ("dram", "read", Outcome.CORRUPT.value))
        with self.dram.lock:
            lease = session.leases.pop(told.lease, None)
            for key in lease.keys if lease else ():
                self.dram.unpin(session.digest, key)

    def reserved(self, session: Session, key: bytes, slot: Slot, era: int) -> None:
        """Note that a client is to write this slot."""
        session.reservations[key] = Reservation(slot, self.clock() + self.lease_s, era)
        self.quotas.change(slot.origin.tenant, session.chunk_bytes)

    def give_up(self, session: Session, key: bytes, *, quarantine: bool = False) -> None:
        """End a reservation unwritten; with ``quarantine`` the client may still be writing."""
        held = session.reservations.pop(key)
        if quarantine:
            session.quarantined.append((key, held.slot))
        self.quotas.change(held.slot.origin.tenant, -session.chunk_bytes)
        self.dram.abort(session.digest, key, held.slot, quarantine=quarantine)

    def expire(self, sessions: Sequence[Session]) -> None:
        """Take back what clients held for too long; slots that they may still be writing go to quarantine."""
        for session in sessions:
            self._take_back(session, self.clock())

    def end(self, session: Session) -> None:
        """A client has gone: its pins end, its reserved slots go to quarantine, as it may still be copying."""
        with self.dram.lock:
            session.ended = True
            session.chains = Latest()  # the session may stay for its slots
            self._take_back(session, inf)

    def written(self, session: Session, key: bytes, ref: SlotRef | None) -> Reservation | None:
        """A client no longer writes a key's slots, or the one meant; returns its reservation, if it still has that."""
        self.leave_quarantine(session, key, ref)
        held = session.reservations.get(key)
        return held if held is not None and (ref is None or ref.tells(held.slot)) else None

    def leave_quarantine(self, session: Session, key: bytes | None = None, ref: SlotRef | None = None) -> None:
        """Free a key's quarantined slots, or the one meant, as the client no longer writes them; without a key, all."""
        with self.dram.lock:
            for held in session.quarantined.copy():
                of_key, slot = held
                if key in (None, of_key) and (ref is None or ref.tells(slot)):
                    session.quarantined.remove(held)
                    self.dram.release_quarantine(session.digest, slot)

    def _dropped(self, namespace: str, key: bytes) -> bool:
        """Check a chunk's checksum in place; drop it if it is not what was committed, and return whether it is so."""
        slot = self.dram.pin(namespace, key, use=False)
        if slot is None:
            return False
        try:
            damaged = checksum(slot.view()) != slot.checksum
            if damaged:
                with self.dram.lock:
                    self.dram.pools[namespace].drop(key)
            return damaged
        finally:
            self.dram.unpin(namespace, key)

    def _take_back(self, session: Session, until: float) -> None:
        """Take what a client may hold until then at most: pins, and slots that it may still be writing."""
        with self.dram.lock:
            for number in [n for n, lease in session.leases.items() if lease.expires_at <= until]:
                self.release(session, Release(number))
            for key in [key for key, held in session.reservations.items() if held.expires_at <= until]:
                self.give_up(session, key, quarantine=True)
