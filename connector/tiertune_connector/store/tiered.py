"""The store of one host: every tier behind lookup, load, reserve and commit.

Index operations are short and run under one lock; bytes move outside it. A method that may wait for a slower tier says
so, and is for a thread of its own.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from functools import partial
from itertools import chain

import msgspec

from tiertune_connector.chunk import Origin, writer_id
from tiertune_connector.counters import Counters
from tiertune_connector.protocol.messages import (
    LoadPart,
    LoadReply,
    Lookup,
    LookupReply,
    Report,
    ReserveReply,
    Side,
    SlotRef,
)
from tiertune_connector.protocol.reporting import recomputed
from tiertune_connector.sampling.ghosts import Room
from tiertune_connector.sampling.observer import Observer
from tiertune_connector.sessions.holdings import Holdings
from tiertune_connector.sessions.namespaces import Namespaces
from tiertune_connector.sessions.quotas import Quotas
from tiertune_connector.sessions.session import Found, Session
from tiertune_connector.slower.arrivals import Arrival, Arrivals
from tiertune_connector.slower.behind import WriteBehind
from tiertune_connector.slower.lane import Lane
from tiertune_connector.state import State
from tiertune_connector.store.accounts import Accounts
from tiertune_connector.store.flushes import Flushes
from tiertune_connector.store.gauges import gauges
from tiertune_connector.store.health import Health
from tiertune_connector.store.holdout import bounds, group_of
from tiertune_connector.store.pools import Pools
from tiertune_connector.store.progress import told
from tiertune_connector.store.residency import Residency
from tiertune_connector.tiers.base import Evicted, Outcome
from tiertune_connector.tiers.directory import DirectoryTier
from tiertune_connector.tiers.disk import DiskTier
from tiertune_connector.tiers.dram import DramTier
from tiertune_connector.tiers.slots import Slot
from tiertune_connector.tuning import Tuning


class TieredStore:
    """Thread-safe. ``clock`` gives monotonic seconds."""

    def __init__(
        self,
        name: str,
        tuning: Tuning,
        *,
        dram: DramTier,
        disk: DiskTier | None = None,
        directory: DirectoryTier | None = None,
        lanes: Mapping[str, Lane],
        counters: Counters,
        clock: Callable[[], float],
        lease_s: float = 30.0,
        state: State | None = None,
    ) -> None:
        """``lanes`` are the ways to ``disk`` and ``remote``, where there are such.

        ``disk`` is that lane's medium, and ``directory`` the remote's, if it is one: a Redis evicts by itself. With a
        ``state`` namespaces of before a restart are known.
        """
        self.name = name
        self.tuning = tuning
        self.dram = dram
        self.disk = disk
        self.directory = directory
        self.lanes = lanes
        self.accounts = Accounts(counters, name, dram)
        self.observer = Observer(self._dram_room, time.time)
        self.namespaces = Namespaces(dram.lock, clock, state)
        self.accounts.models.update(self.namespaces.models())
        self._clock = clock
        self._lock = dram.lock
        self._codec = lanes["remote"].codec if "remote" in lanes else None
        self.health = Health(dram, lanes, clock)
        self._residency = Residency(dram, disk, lanes)
        self._writer = writer_id(name)
        self.behind = WriteBehind(dram, lanes, disk, clock=clock)
        self._arrivals = Arrivals(dram, lanes, counters, clock, self._accept)
        self.flushes = Flushes(dram, lanes, self.namespaces)
        self.pools = Pools(tuning, dram=dram, disk=disk, lanes=lanes, namespaces=self.namespaces, counters=counters)
        self.quotas = Quotas()
        self.holdings = Holdings(dram, self.quotas, counters, clock, lease_s)
        dram.on_evicted = partial(self._evicted, "dram")
        if disk is not None:
            disk.on_evicted = partial(self._evicted, "disk")
        if directory is not None:
            directory.on_evicted = partial(self._evicted, "remote")
        counters.gauges_from(partial(gauges, self))
        counters.gauges_from(self.observer.rows)

    # -- clients

    def attach(self, session: Session) -> str:
        """Make room for a client's namespace; returns why it is refused, or nothing."""
        digest = session.digest
        assert session.namespace is not None
        with self._lock:
            if self.dram.attach(digest, session.chunk_bytes, self.tuning.algorithm(digest, "dram")) is None:
                return "the namespace is served with another chunk size"
            self.accounts.models[digest] = session.namespace.model
            self.observer.attach(session)
            self.namespaces.join(session)
            self.pools.share()
        self.pools.open_on_disk(digest, session.chunk_bytes)  # the client is served though it is not
        self.dram.settle()  # the first segment, so that the first chunks find room
        self.namespaces.keep()  # before a chunk of it is
        return ""

    # -- lookup

    def lookup(self, session: Session, asked: Lookup, *, wait: bool) -> LookupReply:
        """Where a prompt's leading chunks are, and what they cost; ``looked_up`` follows the answer.

        The remote is asked only with ``wait``: for a thread that may.
        """
        if self.tuning.bypass:
            return LookupReply(asked.id, [], {}, {}, "bypassed")
        digest, keys = session.digest, asked.keys
        readable = wait and self._readable()
        with self._lock:
            local = self._residency.local(digest, keys)
        tiers = self._residency.leading(digest, keys, local, readable=readable)
        if asked.sides:
            allowed = self._residency.allowed(digest, len(tiers), session.chunk_tokens, asked.sides, readable=readable)
            tiers = tiers[:allowed]
        with self._lock:
            session.remember(asked.request, keys, len(tiers))
            if asked.defer:
                session.defer(asked.request, self._found(asked, tiers))
        remote = self.tuning.tiers.remote
        group = group_of(asked.request, remote.holdout)
        told = group if "remote" in tiers else ""
        return LookupReply(asked.id, tiers, self.health.costs(), {"remote": bounds(group, remote)}, group=told)

    def looked_up(self, session: Session, asked: Lookup, reply: LookupReply) -> None:
        """Note and count a lookup that was answered; where it is deferred, the hits are counted in ``own``."""
        self.accounts.prompt(session, asked.prompt_tokens, salted=bool(asked.tenant))
        self.observer.prefill(session, asked.prefill)
        if reply.reason:
            return
        self.observer.seen(session, asked.keys, asked.prompt_tokens, asked.tenant)
        with self._lock:
            for side in asked.sides:
                self._use(session.digest, side.keys)
            self._use(session.digest, asked.keys)
            if not asked.defer:
                self.accounts.lookup(session, self._found(asked, reply.tiers))

    def own(self, session: Session, request: str, gpu_chunks: int, staging_chunks: int) -> None:
        """Count a deferred lookup: the engine had its first chunks itself, and needed only the rest."""
        with self._lock:
            found = session.uncounted.pop(request, None)
            session.had(request, gpu_chunks + staging_chunks)
            if found is not None:
                self.accounts.lookup(session, found, gpu_chunks=gpu_chunks, staging_chunks=staging_chunks)

    def needs_remote(self, session: Session, keys: Sequence[bytes], sides: Sequence[Side] = ()) -> bool:
        """Whether a lookup of these keys would wait for the remote."""
        if self.tuning.bypass or not self._readable():
            return False
        with self._lock:
            needed = list(chain(keys, *(side.keys for side in sides)))
            return not all(self._residency.local(session.digest, needed))

    # -- load

    def load(
        self,
        session: Session,
        keys: list[bytes],
        deadline_s: float,
        waited_s: float = 0.0,
        *,
        wait: bool = True,
        tell: Callable[[LoadPart], None] | None = None,
    ) -> LoadReply:
        """Bring chunks into DRAM and pin them, as many as the deadline allows. Waits for slower tiers, if it may.

        ``waited_s`` of the deadline have passed before the call. What has come meanwhile is told in parts, if anybody
        wants to know: ``tell`` must not wait, and raises nothing.
        """
        if self.tuning.bypass:
            return LoadReply(0, 0, [], ["miss"] * len(keys), {})
        started = self._clock()
        with self._lock:
            coming = self._expect(session.digest, keys, fetch=wait)
        arrivals = [found for found in coming.values() if isinstance(found, Arrival)]
        if arrivals:
            with self._arrivals.awaited(arrivals), told(list(coming.values()), tell):
                futures.wait([arrival.done for arrival in arrivals], timeout=max(0.0, deadline_s - waited_s))
        with self._lock:
            outcomes = [found.take() if isinstance(found, Arrival) else "hit" for found in coming.values()]
            hits = [key for key, outcome in zip(coming, outcomes, strict=True) if outcome == "hit"]
            leading = 0 if session.ended else next((i for i, o in enumerate(outcomes) if o != "hit"), len(outcomes))
            for key in hits[leading:]:
                self.dram.unpin(session.digest, key)
            lease = self.holdings.pinned(session, hits[:leading], started + deadline_s)
            slots = [found.slot if isinstance(found, Arrival) else found for found in list(coming.values())[:leading]]
            seconds = self._arrivals.waited(arrivals, started, session.chunk_bytes)
        outcomes += ["miss"] * (len(keys) - len(outcomes))
        return LoadReply(0, lease, [SlotRef.of(slot) for slot in slots], outcomes, seconds)

    def load_waits_for(self, session: Session, keys: Sequence[bytes]) -> str:
        """The slowest tier that a load of these keys may wait for; empty: none."""
        with self._lock:
            if self._residency.in_dram(session.digest, keys):
                return ""
            local = all(self._residency.local(session.digest, keys))
        return "remote" if not local and self._readable() else "disk"

    # -- store

    def reserve(self, session: Session, request: str, keys: list[bytes], tenant: bytes) -> ReserveReply:
        """Slots for the chunks of a chain that are wanted, to be written by the client and committed."""
        slots: dict[bytes, Slot] = {}
        reasons: dict[bytes, str] = {}
        with self._lock:
            wanted = self._wanted(session, keys, tenant, reasons)
            for key in reversed(wanted):  # tail first, as every touch of a chain
                slot = self.dram.reserve(session.digest, key, Origin(self._writer, tenant), session.engine)
                if slot is None:
                    reasons[key] = "full"
                    continue
                slots[key] = slot
                self.holdings.reserved(session, key, slot, self.flushes.era)
            chain = session.chains.get(request)
            if chain is not None:
                # The lookup has used the chain; this piece of it must not be younger than its head.
                self.dram.pools[session.digest].pool.renew(chain.keys)
                self.accounts.offered(session, chain, reasons)
        refs = [SlotRef.of(slots[key]) if key in slots else None for key in keys]
        return ReserveReply(0, refs, [reasons.get(key, "") for key in keys])

    def commit(self, session: Session, keys: Sequence[bytes], refs: Sequence[SlotRef]) -> list[bool]:
        """Make written chunks visible; False for those whose reservation is gone."""
        committed = []
        for key, ref in zip(keys, refs, strict=True):
            with self._lock:
                self.holdings.leave_quarantine(session, [key])
                held = session.reservations.get(key)
                good = held is not None and held.slot.generation == ref.generation
                if held is not None and good and not self.flushes.current(held.era):
                    self.holdings.give_up(session, key)
                    good = False
                if held is not None and good:
                    del session.reservations[key]
                    self.dram.commit(session.digest, key, held.slot, ref.checksum)
                    self.behind.used(self.tuning, session.digest, [(key, held.slot)])
                committed.append(good)
        return committed

    def abort(self, session: Session, keys: Sequence[bytes]) -> None:
        """A client gives reserved slots back unwritten."""
        with self._lock:
            self.holdings.leave_quarantine(session, keys)
            for key in keys:
                self.holdings.give_up(session, key)

    # -- control

    def retune(self, tuning: Tuning) -> None:
        """Apply a tuning that was checked; pools follow step by step."""
        with self._lock:
            self.tuning = tuning
            if self._codec is not None:
                self._codec.writes = tuning.tiers.remote.codec
            self.pools.retune(tuning)
        self.show()

    def show(self) -> None:
        """Have clients believe for a second what they see in DRAM's indexes; or not. Call it every 0.1 s or so."""
        with self._lock:  # what is told is of the tuning that is in force
            cost = None if self.tuning.bypass else self.health.dram_cost()
            self.dram.tell(self._clock() if cost else 0.0, msgspec.structs.astuple(cost) if cost else ())

    def watch(self) -> None:
        """Find out which tiers hang, and give up what a dead one was not asked for yet. Call it every second or so."""
        for name, lane in self.lanes.items():
            lane.watch()
            if lane.breaker.open:
                with self._lock:
                    self._arrivals.give_up(name)

    def close(self) -> None:
        for lane in self.lanes.values():
            lane.close()
        self.dram.close()

    # -- reports

    def report(self, session: Session, report: Report) -> None:
        """Count what a gate decided and what became of it."""
        alone = sum(tier.fetched_tokens > 0 for tier in report.tiers) == 1  # else it was copied while others came
        for tier in report.tiers:
            self.accounts.gate(tier, session.chunk_bytes)
            self.accounts.computed_again(session, recomputed(tier))
            if alone and tier.tier == "dram" and tier.actual_s and tier.outcome in ("won", "lost"):
                chunks = max(1, tier.fetched_tokens // max(1, session.chunk_tokens))
                self.health.dram_took(chunks, chunks * session.chunk_bytes, tier.actual_s)

    # -- within

    def _readable(self) -> bool:
        """Whether requests may ask the remote."""
        return self.tuning.tiers.remote.fetch == "on" and self.health.remote_open

    def _use(self, digest: str, keys: Sequence[bytes]) -> None:
        """Touch a chain, and write behind what was not wanted at its first use."""
        held = self.dram.pools.get(digest)
        if held is None:  # the client has gone, and so has what it used
            return
        held.pool.touch(keys)
        now = self._clock()
        used = held.pool.places(keys)
        for _, slot in used:
            slot.used_at, slot.uses = now, slot.uses + 1
        self.behind.used(self.tuning, digest, used)

    def _dram_room(self, digest: str) -> Room | None:
        pool = self.dram.pools.get(digest)
        return Room(pool.allowed, pool.stride) if pool else None

    def _found(self, asked: Lookup, tiers: list[str]) -> Found:
        """What a client that only tells saw in DRAM, and has left it since, the remote was not asked for."""
        asks = {"remote": bool(asked.id) and self._readable(), "disk": self.health.disk_open}
        return Found(asked.keys, tiers, [tier for tier in ("dram", *self.lanes) if asks.get(tier, True)])

    def _expect(self, digest: str, keys: Sequence[bytes], *, fetch: bool) -> dict[bytes, Slot | Arrival]:
        """Pin, or have brought, the leading chunks as far as they can come.

        What is in DRAM is pinned before anything is fetched, so that making room for the rest cannot evict it.
        """
        pins = {key: slot for key in keys if (slot := self.dram.pin(digest, key)) is not None}
        coming: dict[bytes, Slot | Arrival] = {}
        for key in keys:
            found = pins.get(key) or (self._fetch(digest, key) if fetch else None)
            if found is None:
                break
            coming[key] = found
        for key in pins.keys() - coming.keys():
            self.dram.unpin(digest, key)
        return coming

    def _fetch(self, digest: str, key: bytes) -> Arrival | None:
        (local,) = self._residency.local(digest, [key])
        tier = local or ("remote" if self._readable() else "")
        return self._arrivals.fetch((digest, key), tier, self.flushes.era) if tier else None

    def _accept(self, namespace: str, arrival: Arrival, origin: Origin) -> Outcome:
        """Whether a chunk that came from another tier may stay."""
        if not self.flushes.current(arrival.era):
            return Outcome.MISS
        nbytes = arrival.slot.segment.geometry.chunk_bytes
        if self.quotas.refuse(origin.tenant, nbytes, self.tuning.tenants):
            self.accounts.over_quota(namespace)
            return Outcome.FULL
        self.quotas.change(origin.tenant, nbytes)
        return Outcome.OK

    def _wanted(self, session: Session, keys: Sequence[bytes], tenant: bytes, reasons: dict[bytes, str]) -> list[bytes]:
        pool = self.dram.pools[session.digest].pool
        wanted: list[bytes] = []
        for key in keys:
            if self.tuning.bypass:
                reasons[key] = "bypassed"
            elif key in pool:
                reasons[key] = "present"
            elif pool.busy(key):
                reasons[key] = "busy"
            elif len(wanted) >= pool.room:
                reasons[key] = "full"
            elif self.quotas.refuse(tenant, (len(wanted) + 1) * session.chunk_bytes, self.tuning.tenants):
                reasons[key] = "over_quota"
                self.accounts.over_quota(session.digest)
            else:
                wanted.append(key)
        return wanted

    def _evicted(self, tier: str, chunks: Sequence[Evicted]) -> None:
        self.accounts.evicted(tier, chunks, self._clock())
        if tier == "dram":
            self.behind.lost(self.tuning, chunks)
            for chunk in chunks:
                self.quotas.change(chunk.origin.tenant, -self.dram.pools[chunk.namespace].chunk_bytes)
