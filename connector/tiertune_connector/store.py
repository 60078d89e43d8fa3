"""The store of one host: every tier behind lookup, load, reserve, commit, retune, flush and bypass.

Index operations are short and run under one lock; bytes move outside it. A method that may wait for a slower tier says
so, and is for a thread of its own.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from functools import partial
from itertools import chain

import numpy as np

from tiertune_connector.accounts import Accounts, Gauge, pool_gauges, tier_gauges
from tiertune_connector.arrivals import Arrival, Arrivals
from tiertune_connector.behind import WriteBehind
from tiertune_connector.chunk import Origin, writer_id
from tiertune_connector.cost import FetchCost, FetchEstimate, GateSettings
from tiertune_connector.counters import Counters
from tiertune_connector.ghosts import Room
from tiertune_connector.holdout import HELD, group_of
from tiertune_connector.lane import Lane, Write
from tiertune_connector.observer import Observer
from tiertune_connector.residency import Residency
from tiertune_connector.serve.protocol import FirstToken, LoadReply, LookupReply, Report, ReserveReply, Side, SlotRef
from tiertune_connector.session import Found, Reservation, Session
from tiertune_connector.tiers.base import Outcome
from tiertune_connector.tiers.disk import DiskTier
from tiertune_connector.tiers.dram import DramTier, Evicted, Slot
from tiertune_connector.tuning import Tuning, TuningError

_FLUSH_PATIENCE_S = 2.0
_DRAM_SILENT_S = 1.0


class TieredStore:
    """Thread-safe. ``clock`` gives monotonic seconds."""

    def __init__(
        self,
        name: str,
        tuning: Tuning,
        *,
        dram: DramTier,
        disk: DiskTier | None = None,
        lanes: Mapping[str, Lane],
        counters: Counters,
        clock: Callable[[], float],
        lease_s: float = 30.0,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """``lanes`` are the ways to ``disk`` and ``remote``, where there are such; ``disk`` is that lane's medium."""
        self.name = name
        self.tuning = tuning
        self.dram = dram
        self.lanes = lanes
        self.accounts = Accounts(counters, name, dram)
        self.observer = Observer(self._dram_room, wall)
        self._epochs: dict[str, int] = {}
        self._counters = counters
        self.disk = disk
        self._clock = clock
        self._lease_s = lease_s
        self._lock = dram.lock
        self._dram_cost = FetchCost(now=clock(), t0_s=1e-4, bytes_per_s=5e9)
        self._residency = Residency(dram, disk, lanes)
        self._writer = writer_id(name)
        self._behind = WriteBehind(dram, lanes)
        self._arrivals = Arrivals(dram, lanes, counters, clock, self._accept)
        self._era = 0  # flushes begun and ended
        self._flushing = 0
        self._tenant_bytes: dict[bytes, int] = {}
        dram.on_evicted = partial(self._evicted, "dram")
        if disk is not None:
            disk.on_evicted = partial(self._evicted, "disk")
        counters.gauges_from(self._gauges)
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
            self._epochs[digest] = session.namespace.epoch
            if self.disk is not None:
                outcome = self.disk.attach(digest, session.chunk_bytes, self.tuning.algorithm(digest, "disk"))
                if outcome is not Outcome.OK:  # the client is served all the same, without this tier
                    self._counters.add("tier_errors_total", ("disk", "attach", outcome.value))
            self._apply_pools()
        self.dram.settle()  # the first segment, so that the first chunks find room
        return ""

    def detach(self, session: Session) -> None:
        """End a client: its pins go; what it had reserved goes to quarantine, for it may still be copying."""
        with self._lock:
            session.ended = True
            for number in list(session.leases):
                self.release(session, number)
            for key in list(session.reservations):
                self._give_up(session, key, quarantine=True)

    # -- lookup

    def lookup(
        self,
        session: Session,
        request: str,
        keys: list[bytes],
        prompt_tokens: int,
        *,
        tenant: bytes = b"",
        sides: Sequence[Side] = (),
        defer: bool = False,
    ) -> LookupReply:
        """Where a prompt's leading chunks are, and what they cost. Waits for the remote if local tiers end early.

        With ``defer`` the hits are counted in ``own``.
        """
        self.accounts.prompt(session, prompt_tokens, salted=bool(tenant))
        if self.tuning.bypass:
            return LookupReply(0, [], {}, {}, "bypassed")
        self.observer.seen(session, keys, prompt_tokens, tenant)
        with self._lock:
            session.remember(request, keys)
            local = [self._residency.local(session.digest, key) for key in keys]
            for side in sides:
                self._use(session.digest, side.keys)
            self._use(session.digest, keys)
        tiers = self._residency.leading(session.digest, keys, local, readable=self._remote_readable())
        if sides:
            allowed = self._residency.allowed(
                session.digest, len(tiers), session.chunk_tokens, sides, readable=self._remote_readable()
            )
            tiers = tiers[:allowed]
        with self._lock:
            asked = [tier for tier in ("dram", *self.lanes) if tier != "remote" or self._remote_readable()]
            found = Found(keys, tiers, asked)
            if defer:
                session.defer(request, found)
            else:
                self.accounts.lookup(session, found)
        group = group_of(request, self.tuning.tiers.remote.holdout)
        told = group if "remote" in tiers else ""
        return LookupReply(0, tiers, self.costs(), self.gate_settings(group), group=told)

    def own(self, session: Session, request: str, gpu_chunks: int, staging_chunks: int) -> None:
        """Count a deferred lookup: the engine had its first chunks itself, and needed only the rest."""
        with self._lock:
            found = session.uncounted.pop(request, None)
            if found is not None:
                self.accounts.lookup(session, found, gpu_chunks=gpu_chunks, staging_chunks=staging_chunks)

    def needs_remote(self, session: Session, keys: Sequence[bytes], sides: Sequence[Side] = ()) -> bool:
        """Whether a lookup of these keys would wait for the remote."""
        if self.tuning.bypass or not self._remote_readable():
            return False
        with self._lock:
            every = chain(keys, *(side.keys for side in sides))
            return not all(self._residency.local(session.digest, key) for key in every)

    def costs(self) -> dict[str, FetchEstimate]:
        """Current fetch cost of each tier that has one."""
        estimates = {name: lane.estimate() for name, lane in self.lanes.items()}
        with self._lock:
            estimates["dram"] = self._dram_cost.estimate(self._clock())
        return {name: estimate for name, estimate in estimates.items() if estimate is not None}

    def gate_settings(self, group: str = "") -> dict[str, GateSettings]:
        """The bounds of one request's gate: one of the group that is held out does not fetch from the remote."""
        remote = self.tuning.tiers.remote
        on = remote.fetch == "on" and group != HELD
        return {"remote": GateSettings(on, remote.margin, remote.min_fetch_tokens, remote.deadline_factor)}

    def touch(self, session: Session, keys: Sequence[bytes]) -> None:
        """An engine used these chunks from its own memory."""
        with self._lock:
            self._use(session.digest, keys)

    # -- load

    def load(self, session: Session, keys: list[bytes], deadline_s: float, waited_s: float = 0.0) -> LoadReply:
        """Bring chunks into DRAM and pin them, as many as the deadline allows. Waits for slower tiers.

        ``waited_s`` of the deadline have passed before the call.
        """
        if self.tuning.bypass:
            return LoadReply(0, 0, [], ["miss"] * len(keys), {})
        started = self._clock()
        with self._lock:
            coming = self._expect(session.digest, keys)
        arrivals = [found for found in coming.values() if isinstance(found, Arrival)]
        with self._arrivals.awaited(arrivals):
            wait([arrival.done for arrival in arrivals], timeout=max(0.0, deadline_s - waited_s))
        with self._lock:
            outcomes = [found.take() if isinstance(found, Arrival) else "hit" for found in coming.values()]
            hits = [key for key, outcome in zip(coming, outcomes, strict=True) if outcome == "hit"]
            leading = 0 if session.ended else next((i for i, o in enumerate(outcomes) if o != "hit"), len(outcomes))
            for key in hits[leading:]:
                self.dram.unpin(session.digest, key)
            lease = session.lease(tuple(hits[:leading]), started + deadline_s + self._lease_s)
            slots = [found.slot if isinstance(found, Arrival) else found for found in list(coming.values())[:leading]]
            seconds = self._arrivals.waited(arrivals, started, session.chunk_bytes)
        outcomes += ["miss"] * (len(keys) - len(outcomes))
        return LoadReply(0, lease, [_ref(slot) for slot in slots], outcomes, seconds)

    def loads_at_once(self, session: Session, keys: Sequence[bytes]) -> bool:
        """Whether a load of these keys would not wait."""
        with self._lock:
            return all(self._residency.in_dram(session.digest, key) for key in keys)

    def release(self, session: Session, number: int) -> None:
        """A client no longer reads what a lease pinned."""
        with self._lock:
            lease = session.leases.pop(number, None)
            for key in lease.keys if lease else ():
                self.dram.unpin(session.digest, key)

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
                session.reservations[key] = Reservation(slot, self._clock() + self._lease_s, self._era)
                self._tenant(tenant, session.chunk_bytes)
            # The lookup has used the chain; this piece of it must not be younger than its head.
            self.dram.pools[session.digest].pool.renew(session.chains.get(request, []))
        refs = [_ref(slots[key]) if key in slots else None for key in keys]
        return ReserveReply(0, refs, [reasons.get(key, "") for key in keys])

    def commit(self, session: Session, keys: Sequence[bytes], refs: Sequence[SlotRef]) -> list[bool]:
        """Make written chunks visible; False for those whose reservation is gone."""
        committed = []
        for key, ref in zip(keys, refs, strict=True):
            with self._lock:
                self.leave_quarantine(session, [key])
                held = session.reservations.get(key)
                good = held is not None and held.slot.generation == ref.generation
                if held is not None and good and not self._current(held.era):
                    self._give_up(session, key)
                    good = False
                if held is not None and good:
                    del session.reservations[key]
                    self.dram.commit(session.digest, key, held.slot, ref.checksum)
                    self._behind.used(self.tuning, session.digest, [(key, held.slot)])
                committed.append(good)
        return committed

    def abort(self, session: Session, keys: Sequence[bytes]) -> None:
        """A client gives reserved slots back unwritten."""
        with self._lock:
            self.leave_quarantine(session, keys)
            for key in keys:
                self._give_up(session, key)

    def expire(self, sessions: Sequence[Session]) -> None:
        """Take back what clients held for too long; slots that they may still be writing go to quarantine."""
        now = self._clock()
        for session in sessions:
            with self._lock:
                for number in [n for n, lease in session.leases.items() if lease.expires_at < now]:
                    self.release(session, number)
                for key in [key for key, held in session.reservations.items() if held.expires_at < now]:
                    self._give_up(session, key, quarantine=True)

    def leave_quarantine(self, session: Session, keys: Sequence[bytes] | None = None) -> None:
        """The client says that it writes these slots no more; or, without keys, its end says so of all."""
        with self._lock:
            leaving = [held for held in session.quarantined if keys is None or held[0] in keys]
            for held in leaving:
                session.quarantined.remove(held)
                self.dram.release_quarantine(session.digest, held[1])

    # -- control

    def check(self, tuning: Tuning) -> None:
        """TuningError if this store cannot do what the tuning says: a knob must never be accepted without effect."""
        remote, disk = tuning.tiers.remote, tuning.tiers.disk
        if "remote" not in self.lanes:
            for field in ("fetch", "write"):
                if getattr(remote, field) != "off":
                    raise TuningError(f"tiers.remote.{field}", "this store has no remote tier: it can only be off")
        if "disk" not in self.lanes and disk.capacity_bytes:
            raise TuningError("tiers.disk.capacity_bytes", "this store has no disk tier: it can only be 0")
        if "disk" not in self.lanes and disk.write != "off":
            raise TuningError("tiers.disk.write", "this store has no disk tier: it can only be off")

    def retune(self, tuning: Tuning) -> None:
        """Apply a tuning that was checked. Capacity follows in ``settle``."""
        with self._lock:
            self.tuning = tuning
            self._apply_pools()

    def flush(
        self, namespace: str | None = None, tenant: bytes | None = None, epoch: int | None = None
    ) -> dict[str, tuple[Outcome, int]]:
        """Drop chunks everywhere: how many per tier; where it is not OK, some may be left. Waits for slower tiers.

        What was on its way between tiers, or reserved, before the flush ended does not come after it.
        """
        with self._lock:
            digests = [namespace] if epoch is None else [
                digest for digest, own in self._epochs.items() if own == epoch and namespace in (None, digest)
            ]  # fmt: skip
        with self._flush():
            dropped = sum(self.dram.flush(digest, tenant)[1] for digest in digests)  # first: it feeds the others
            told = {"dram": (Outcome.OK, dropped)}
            for name, lane in self.lanes.items():
                told[name] = _flush_lane(lane, digests, tenant)
        return told

    def clean_ahead(self) -> None:
        """Write the next victims behind to tiers that take what is evicted, so that evicting never waits."""
        self._behind.clean_ahead(self.tuning)

    def probe(self) -> bool:
        """Measure remote and DRAM off the way of requests, and let a dead disk be tried. Waits for the remote.

        True if the remote's health is not settled: probe again soon.
        """
        with self._lock:
            chunk_bytes = max((pool.chunk_bytes for pool in self.dram.pools.values()), default=1 << 18)
        self._probe_dram()
        for name, lane in self.lanes.items():
            if name == "remote":
                lane.probe(chunk_bytes)
            else:
                lane.try_again()
        return "remote" in self.lanes and self.lanes["remote"].breaker.unsettled

    def health(self, tier: str) -> tuple[str, str]:
        """State and reason of a tier."""
        if self.tuning.bypass:
            return "bypassed", "the store is bypassed"
        if tier == "dram":
            return "ok", ""
        lane = self.lanes.get(tier)
        if lane is None:
            return "absent", "not configured"
        if lane.breaker.state == "ok" and tier == "remote" and self.tuning.tiers.remote.fetch == "off":
            return "bypassed", "remote fetch is off by tuning"
        return lane.breaker.state, lane.breaker.reason

    def tenants(self) -> dict[str, dict[str, int]]:
        """Of each tenant that has a quota, by its digest: the quota, and the DRAM bytes that it holds."""
        with self._lock:
            held = {tenant.hex(): nbytes for tenant, nbytes in self._tenant_bytes.items()}
        return {
            digest: {"quota_bytes": tuned.quota_bytes, "resident_bytes": held.get(digest, 0)}
            for digest, tuned in self.tuning.tenants.items()
        }

    def close(self) -> None:
        for lane in self.lanes.values():
            lane.close()
        self.dram.close()

    # -- reports

    def report(self, session: Session, report: Report) -> None:
        """Count what a gate decided and what became of it."""
        for tier in report.tiers:
            self.accounts.gate(tier, session.chunk_bytes)
            if tier.tier == "dram" and tier.actual_s and tier.outcome in ("won", "lost"):
                with self._lock:
                    chunks = max(1, tier.fetched_tokens // max(1, session.chunk_tokens))
                    self._dram_cost.observe(chunks, chunks * session.chunk_bytes, tier.actual_s, self._clock())

    def first_token(self, told: FirstToken) -> None:
        """Count how long a request took, with those held out or with the others, as it was looked up."""
        if told.group:
            self.accounts.first_token("remote", told.group, told.seconds, told.tokens)

    # -- within

    def _remote_readable(self) -> bool:
        lane = self.lanes.get("remote")
        return lane is not None and self.tuning.tiers.remote.fetch == "on" and not lane.breaker.open

    def _use(self, digest: str, keys: Sequence[bytes]) -> None:
        """Touch a chain, and write behind what was not wanted at its first use."""
        pool = self.dram.pools[digest].pool
        pool.touch(keys)
        now = self._clock()
        used = [(key, slot) for key in keys if (slot := pool.get(key)) is not None]
        for _, slot in used:
            slot.used_at, slot.uses = now, slot.uses + 1
        self._behind.used(self.tuning, digest, used)

    def _dram_room(self, digest: str) -> Room | None:
        pool = self.dram.pools.get(digest)
        return Room(pool.allowed, pool.stride) if pool else None

    def _probe_dram(self) -> None:
        """Copy a chunk if no load has told for a while: else engines that found DRAM slow would never try it again."""
        with self._lock:
            if self._dram_cost.age_s(self._clock()) < _DRAM_SILENT_S:
                return
            found = ((digest, key) for digest, pool in self.dram.pools.items() for key in pool.pool)
            digest, key = next(found, ("", b""))
            slot = self.dram.pools[digest].pool.pin(key) if digest else None
        if slot is None:
            return
        started = self._clock()
        size = len(np.array(slot.view(), np.uint8))
        seconds = self._clock() - started
        with self._lock:
            self.dram.unpin(digest, key)
            self._dram_cost.observe(1, size, seconds, self._clock())

    def _expect(self, digest: str, keys: Sequence[bytes]) -> dict[bytes, Slot | Arrival]:
        """Pin, or have brought, the leading chunks as far as they can come.

        What is in DRAM is pinned before anything is fetched, so that making room for the rest cannot evict it.
        """
        pins = {key: slot for key in keys if (slot := self.dram.pin(digest, key)) is not None}
        coming: dict[bytes, Slot | Arrival] = {}
        for key in keys:
            found = pins.get(key) or self._fetch(digest, key)
            if found is None:
                break
            coming[key] = found
        for key in pins.keys() - coming.keys():
            self.dram.unpin(digest, key)
        return coming

    def _fetch(self, digest: str, key: bytes) -> Arrival | None:
        tier = self._residency.local(digest, key) or ("remote" if self._remote_readable() else "")
        return self._arrivals.fetch((digest, key), tier, self._era) if tier else None

    def _accept(self, namespace: str, arrival: Arrival, origin: Origin) -> Outcome:
        """Whether a chunk that came from another tier may stay."""
        if not self._current(arrival.era):
            return Outcome.MISS
        nbytes = arrival.slot.segment.geometry.chunk_bytes
        if self._over_quota(origin.tenant, nbytes):
            self.accounts.over_quota(namespace)
            return Outcome.FULL
        self._tenant(origin.tenant, nbytes)
        return Outcome.OK

    def _current(self, era: int) -> bool:
        """Whether nothing was flushed since, nor is being flushed."""
        return era == self._era and not self._flushing

    @contextmanager
    def _flush(self) -> Iterator[None]:
        with self._lock:
            self._era += 1
            self._flushing += 1
        try:
            yield
        finally:
            with self._lock:
                self._era += 1
                self._flushing -= 1

    def _give_up(self, session: Session, key: bytes, *, quarantine: bool = False) -> None:
        """A reservation ends unwritten; with ``quarantine`` the client may still be writing."""
        held = session.reservations.pop(key, None)
        if held is None:
            return
        if quarantine:
            session.quarantined.append((key, held.slot))
        self._tenant(held.slot.origin.tenant, -session.chunk_bytes)
        self.dram.abort(session.digest, key, held.slot, quarantine=quarantine)

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
            elif self._over_quota(tenant, (len(wanted) + 1) * session.chunk_bytes):
                reasons[key] = "over_quota"
                self.accounts.over_quota(session.digest)
            else:
                wanted.append(key)
        return wanted

    def _over_quota(self, tenant: bytes, more: int) -> bool:
        quota = self.tuning.tenants.get(tenant.hex()) if tenant else None
        return quota is not None and self._tenant_bytes.get(tenant, 0) + more > quota.quota_bytes

    def _tenant(self, tenant: bytes, change: int) -> None:
        if tenant:
            held = self._tenant_bytes.pop(tenant, 0) + change
            if held:
                self._tenant_bytes[tenant] = held

    def _apply_pools(self) -> None:
        tuning = self.tuning
        asked = {
            digest: (tuning.pool(digest, "dram").capacity_bytes, tuning.algorithm(digest, "dram"))
            for digest in self.dram.pools
        }
        self.dram.retune(tuning.tiers.dram.capacity_bytes, asked)
        if self.disk is not None:
            asked = {
                digest: (tuning.pool(digest, "disk").capacity_bytes, tuning.algorithm(digest, "disk"))
                for digest in self.disk.slabs
            }
            self.disk.retune(tuning.tiers.disk.capacity_bytes, asked)

    def _evicted(self, tier: str, chunks: Sequence[Evicted]) -> None:
        self.accounts.evicted(tier, chunks, self._clock())
        if tier == "dram":
            for chunk in chunks:
                self._tenant(chunk.origin.tenant, -self.dram.pools[chunk.namespace].chunk_bytes)

    def _gauges(self) -> list[Gauge]:
        gauges = list(tier_gauges(self.lanes, self.health))
        for name, estimate in self.costs().items():
            gauges.append(("fetch_estimate_t0_seconds", (name,), estimate.t0_s))
            gauges.append(("fetch_estimate_bytes_per_second", (name,), estimate.bytes_per_s))
            gauges.append(("fetch_estimate_age_seconds", (name,), estimate.age_s))
            gauges.append(("fetch_estimate_queue_seconds", (name,), estimate.queue_s))
            gauges.append(("fetch_estimate_doubt", (name,), estimate.doubt))
        with self._lock:
            gauges.extend(pool_gauges(self.accounts, self.dram, self.disk))
            gauges.append(("tuning_version", ("applied",), self.tuning.version))
        return gauges


def _ref(slot: Slot) -> SlotRef:
    return SlotRef(slot.segment.number, slot.index, slot.generation, slot.checksum)


def _matches(write: Write, digests: Sequence[str | None], tenant: bytes | None) -> bool:
    return (None in digests or write.namespace in digests) and tenant in (None, write.origin.tenant)


def _flush_lane(lane: Lane, digests: Sequence[str | None], tenant: bytes | None) -> tuple[Outcome, int]:
    ended = lane.drop_queued(lambda write: _matches(write, digests, tenant), _FLUSH_PATIENCE_S)
    outcome, count = Outcome.OK if ended else Outcome.TIMEOUT, 0
    for digest in digests:
        told, dropped = lane.tier.flush(digest, tenant)
        outcome, count = outcome if told is Outcome.OK else told, count + dropped
    return outcome, count
