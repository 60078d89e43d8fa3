"""The store of one host: every tier behind lookup, load, reserve, commit, retune, flush and bypass.

Index operations are short and run under one lock; bytes move outside it. A method that may wait for a slower tier says
so, and is for a thread of its own.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Literal

from tiertune_connector.accounts import Accounts, Gauge, pool_gauges, tier_gauges
from tiertune_connector.chunk import NOBODY, Origin, checksum
from tiertune_connector.cost import FetchCost, FetchEstimate, GateSettings
from tiertune_connector.counters import Counters
from tiertune_connector.lane import Lane, Write
from tiertune_connector.serve.protocol import LoadReply, LookupReply, Report, ReserveReply, SlotRef
from tiertune_connector.session import Session
from tiertune_connector.tiers.base import Outcome
from tiertune_connector.tiers.disk import DiskTier
from tiertune_connector.tiers.dram import DramTier, Evicted, Slot
from tiertune_connector.tuning import Tuning, TuningError

log = logging.getLogger(__name__)
SlowTier = Literal["disk", "remote"]
_CLEAN_AHEAD = 16
_QUEUED_SHARE = 4
"""At most one in so many chunks of a pool waits to be written behind."""
_WHY = {Outcome.OK: "miss", Outcome.MISS: "miss", Outcome.CORRUPT: "corrupt"}  # OK: it came, and was evicted at once


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
    ) -> None:
        """``lanes`` are the ways to ``disk`` and ``remote``, where there are such; ``disk`` is that lane's medium."""
        self.name = name
        self.tuning = tuning
        self.dram = dram
        self.lanes = lanes
        self.accounts = Accounts(counters, name, dram)
        self._epochs: dict[str, int] = {}
        self._counters = counters
        self._disk = disk
        self._clock = clock
        self._lease_s = lease_s
        self._lock = dram.lock
        self._dram_cost = FetchCost(now=clock(), t0_s=1e-4, bytes_per_s=5e9)
        self._fetching: dict[tuple[str, bytes], Future[Outcome]] = {}
        self._flushes = 0
        self._tenant_bytes: dict[bytes, int] = {}
        dram.on_evicted = partial(self._evicted, "dram")
        if disk is not None:
            disk.on_evicted = partial(self._evicted, "disk")
        counters.gauges_from(self._gauges)

    # -- clients

    def attach(self, session: Session) -> str:
        """Make room for a client's namespace; returns why it is refused, or nothing."""
        digest = session.digest
        with self._lock:
            if self.dram.attach(digest, session.chunk_bytes, self.tuning.algorithm(digest, "dram")) is None:
                return "the namespace is served with another chunk size"
            self.accounts.models[digest] = session.namespace.model
            self._epochs[digest] = session.namespace.epoch
            if self._disk is not None:
                self._disk.attach(digest, session.chunk_bytes, self.tuning.algorithm(digest, "disk"))
            self._apply_pools()
        self.dram.settle()  # the first segment, so that the first chunks find room
        return ""

    def detach(self, session: Session) -> None:
        """End a client: its pins go; what it had reserved goes to quarantine, for it may still be copying."""
        with self._lock:
            session.ended = True
            for number in list(session.leases):
                self.release(session, number)
            for key, (slot, _) in session.reservations.items():
                session.quarantined[key] = slot
                self._tenant(slot.origin.tenant, -session.chunk_bytes)
                self.dram.abort(session.digest, key, slot, quarantine=True)
            session.reservations.clear()

    # -- lookup

    def lookup(self, session: Session, request: str, keys: list[bytes], prompt_tokens: int) -> LookupReply:
        """Where a prompt's leading chunks are, and what they cost. Waits for the remote if local tiers end early."""
        self.accounts.prompt(session, prompt_tokens)
        if self.tuning.bypass:
            return LookupReply(0, [], {}, {}, "bypassed")
        with self._lock:
            session.remember(request, keys)
            local = [self._local_tier(session.digest, key) for key in keys]
            self._use(session.digest, keys)
        tiers = self._with_remote(session, keys, local)
        with self._lock:
            asked = [tier for tier in ("dram", *self.lanes) if tier != "remote" or self._remote_readable()]
            self.accounts.lookup(session, keys, tiers, asked)
        return LookupReply(0, tiers, self.costs(), self.gate_settings())

    def needs_remote(self, session: Session, keys: Sequence[bytes]) -> bool:
        """Whether a lookup of these keys would wait for the remote."""
        if self.tuning.bypass or not self._remote_readable():
            return False
        with self._lock:
            return not all(self._local_tier(session.digest, key) for key in keys)

    def costs(self) -> dict[str, FetchEstimate]:
        """Current fetch cost of each tier that has one."""
        estimates = {name: lane.estimate() for name, lane in self.lanes.items()}
        with self._lock:
            estimates["dram"] = self._dram_cost.estimate(self._clock())
        return {name: estimate for name, estimate in estimates.items() if estimate is not None}

    def gate_settings(self) -> dict[str, GateSettings]:
        remote = self.tuning.tiers.remote
        return {
            "remote": GateSettings(remote.fetch == "on", remote.margin, remote.min_fetch_tokens, remote.deadline_factor)
        }

    def touch(self, session: Session, keys: Sequence[bytes]) -> None:
        """An engine used these chunks from its own memory."""
        with self._lock:
            self._use(session.digest, keys)

    # -- load

    def load(self, session: Session, keys: list[bytes], deadline_s: float) -> LoadReply:
        """Bring chunks into DRAM and pin them, as many as the deadline allows. Waits for slower tiers."""
        started = self._clock()
        if self.tuning.bypass:
            return LoadReply(0, 0, [], ["miss"] * len(keys), {})
        with self._lock:
            # Pinned before anything is fetched, so that making room for the rest cannot evict it.
            pins = {key: slot for key in keys if (slot := self.dram.pin(session.digest, key)) is not None}
            arriving = {key: self._fetch(session, key) for key in keys if key not in pins}
        wait([future for _, future in arriving.values() if future is not None], timeout=max(0.0, deadline_s))
        with self._lock:
            for key in arriving:
                if (slot := self.dram.pin(session.digest, key)) is not None:
                    pins[key] = slot
            lease, leading = self._lease(session, keys, pins, started + deadline_s + self._lease_s)
        outcomes = ["hit" if key in pins else self._why_not(arriving[key][1]) for key in keys]
        seconds = self._observe_load(arriving, session.chunk_bytes, started)
        return LoadReply(0, lease, [_ref(slot) for slot in leading], outcomes, seconds)

    def loads_at_once(self, session: Session, keys: Sequence[bytes]) -> bool:
        """Whether a load of these keys would not wait."""
        with self._lock:
            return all(self._in_dram(session.digest, key) for key in keys)

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
                slot = self.dram.reserve(session.digest, key, Origin(self.name, tenant), session.engine)
                if slot is None:
                    reasons[key] = "full"
                    continue
                slots[key] = slot
                session.reservations[key] = (slot, self._clock() + self._lease_s)
                self._tenant(tenant, session.chunk_bytes)
            self.dram.pools[session.digest].pool.touch(session.chains.get(request, []))
        refs = [_ref(slots[key]) if key in slots else None for key in keys]
        return ReserveReply(0, refs, [reasons.get(key, "") for key in keys])

    def commit(self, session: Session, keys: Sequence[bytes], refs: Sequence[SlotRef]) -> list[bool]:
        """Make written chunks visible; False for those whose reservation is gone."""
        committed = []
        for key, ref in zip(keys, refs, strict=True):
            with self._lock:
                self.leave_quarantine(session, [key])
                slot, _ = session.reservations.get(key, (None, 0.0))
                good = slot is not None and slot.generation == ref.generation
                committed.append(good)
                if slot is not None and good:
                    del session.reservations[key]
                    self.dram.commit(session.digest, key, slot, ref.checksum)
                    self._write_behind(session.digest, key, slot, self._tiers_written("commit"))
        return committed

    def abort(self, session: Session, keys: Sequence[bytes]) -> None:
        """A client gives reserved slots back unwritten."""
        with self._lock:
            self.leave_quarantine(session, keys)
            for key in keys:
                slot, _ = session.reservations.pop(key, (None, 0.0))
                if slot is not None:
                    self._tenant(slot.origin.tenant, -session.chunk_bytes)
                    self.dram.abort(session.digest, key, slot)

    def expire(self, sessions: Sequence[Session]) -> None:
        """Take back what clients held for too long; slots that they may still be writing go to quarantine."""
        now = self._clock()
        for session in sessions:
            with self._lock:
                for number in [n for n, lease in session.leases.items() if lease.expires_at < now]:
                    self.release(session, number)
                late = [(key, slot) for key, (slot, until) in session.reservations.items() if until < now]
                for key, slot in late:
                    del session.reservations[key]
                    session.quarantined[key] = slot
                    self._tenant(slot.origin.tenant, -session.chunk_bytes)
                    self.dram.abort(session.digest, key, slot, quarantine=True)

    def leave_quarantine(self, session: Session, keys: Sequence[bytes]) -> None:
        """The client, or its end, says that it writes these slots no more."""
        with self._lock:
            for key in keys:
                slot = session.quarantined.pop(key, None)
                if slot is not None:
                    self.dram.release_quarantine(session.digest, slot)

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
    ) -> dict[str, int]:
        """Drop chunks everywhere; returns how many per tier. Waits for slower tiers."""
        with self._lock:
            self._flushes += 1
            digests = [namespace] if epoch is None else [
                digest for digest, own in self._epochs.items() if own == epoch and namespace in (None, digest)
            ]  # fmt: skip
        dropped = {"dram": 0} | dict.fromkeys(self.lanes, 0)
        for lane in self.lanes.values():
            lane.drop_queued(lambda write: _matches(write, digests, tenant), timeout_s=2.0)
        for digest in digests:
            dropped["dram"] += self.dram.flush(digest, tenant)
            for name, lane in self.lanes.items():
                dropped[name] += lane.tier.flush(digest, tenant)
        return dropped

    def clean_ahead(self) -> None:
        """Write the next victims behind to tiers that take what is evicted, so that evicting never waits."""
        for tier in self._tiers_written("evict"):
            for digest, pool in list(self.dram.pools.items()):
                with self._lock:
                    if len(pool.pool) * 10 < pool.pool.capacity * 9:
                        continue
                    ahead = [key for key, _ in zip(pool.pool, range(_CLEAN_AHEAD), strict=False)]
                    for key in ahead:
                        slot = pool.pool.get(key)
                        if slot is not None and self._admits(tier, slot):
                            self._queue(tier, digest, key, slot)

    def probe(self) -> None:
        """Measure the remote off the way of requests. Waits for it."""
        lane = self.lanes.get("remote")
        if lane is not None:
            chunk_bytes = max((pool.chunk_bytes for pool in self.dram.pools.values()), default=1 << 18)
            lane.probe(chunk_bytes)

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

    # -- within

    def _in_dram(self, digest: str, key: bytes) -> bool:
        pool = self.dram.pools.get(digest)
        return pool is not None and key in pool.pool

    def _local_tier(self, digest: str, key: bytes) -> str:
        if self._in_dram(digest, key):
            return "dram"
        slab = self._disk.slabs.get(digest) if self._disk else None
        return "disk" if slab is not None and key in slab.pool else ""

    def _remote_readable(self) -> bool:
        lane = self.lanes.get("remote")
        return lane is not None and self.tuning.tiers.remote.fetch == "on" and not lane.breaker.open

    def _with_remote(self, session: Session, keys: list[bytes], local: list[str]) -> list[str]:
        absent = [key for key, tier in zip(keys, local, strict=True) if not tier]
        there = self.lanes["remote"].present(session.digest, absent) if absent and self._remote_readable() else 0
        tiers: list[str] = []
        for tier in local:
            if not tier:
                if not there:
                    break
                there -= 1
            tiers.append(tier or "remote")
        return tiers

    def _use(self, digest: str, keys: Sequence[bytes]) -> None:
        """Touch a chain, and write behind what was not wanted at its first use."""
        pool = self.dram.pools[digest].pool
        pool.touch(keys)
        now, tiers = self._clock(), self._tiers_written("commit")
        for key in keys:
            slot = pool.get(key)
            if slot is not None:
                slot.used_at, slot.uses = now, slot.uses + 1
                self._write_behind(digest, key, slot, tiers)

    def _fetch(self, session: Session, key: bytes) -> tuple[str, "Future[Outcome] | None"]:
        """The tier that a chunk comes from, and its arrival; none where it is in DRAM already or nowhere."""
        place = (session.digest, key)
        with self._lock:
            tier = self._local_tier(*place) or ("remote" if self._remote_readable() else "")
            if tier in ("", "dram"):
                return tier, None
            arrival = self._fetching.get(place)
            if arrival is None:
                slot = self.dram.reserve(*place, Origin(self.name))
                if slot is None:
                    return tier, None
                arrival = self.lanes[tier].readers.submit(self._bring, tier, place, slot, self._flushes)
                self._fetching[place] = arrival
            return tier, arrival

    def _bring(self, tier: str, place: tuple[str, bytes], slot: Slot, flushes: int) -> Outcome:
        """Read a chunk from a slower tier into its reserved slot."""
        payload = slot.view()
        try:
            outcome, origin = self.lanes[tier].read(*place, payload)
        except Exception:
            log.exception("a read from %s failed", tier)
            self._counters.add("internal_errors_total", ("read",))
            outcome, origin = Outcome.ERROR, NOBODY
        digest = checksum(payload) if outcome is Outcome.OK else 0
        with self._lock:
            del self._fetching[place]
            if outcome is Outcome.OK and flushes == self._flushes:
                slot.behind, slot.origin = {tier}, origin
                self._tenant(origin.tenant, len(payload))
                self.dram.commit(*place, slot, digest)
                return outcome
            self.dram.abort(*place, slot)
        return Outcome.MISS if outcome is Outcome.OK else outcome

    @staticmethod
    def _why_not(future: "Future[Outcome] | None") -> str:
        if future is None:
            return "miss"
        if not future.done():
            return "late"
        return _WHY.get(future.result(), "error")

    def _lease(
        self, session: Session, keys: Sequence[bytes], pins: Mapping[bytes, Slot], expires_at: float
    ) -> tuple[int, list[Slot]]:
        """Hold the leading chunks that are pinned, let go of those after a gap, and of all if the client has gone."""
        count = 0 if session.ended else next((i for i, key in enumerate(keys) if key not in pins), len(keys))
        for key in pins.keys() - set(keys[:count]):
            self.dram.unpin(session.digest, key)
        return session.lease(tuple(keys[:count]), expires_at), [pins[key] for key in keys[:count]]

    def _observe_load(
        self, arriving: Mapping[bytes, tuple[str, "Future[Outcome] | None"]], chunk_bytes: int, started: float
    ) -> dict[str, float]:
        seconds: dict[str, float] = {}
        elapsed = self._clock() - started
        for name in self.lanes:
            futures = [future for tier, future in arriving.values() if tier == name and future is not None]
            if futures:
                seconds[name] = elapsed
                came = sum(future.done() and future.result() is Outcome.OK for future in futures)
                if came or not all(future.done() for future in futures):  # what failed at once says nothing of speed
                    self.lanes[name].observe(max(came, 1), max(came, 1) * chunk_bytes, elapsed)
        return seconds

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
            else:
                wanted.append(key)
        return wanted

    def _over_quota(self, tenant: bytes, more: int) -> bool:
        quota = self.tuning.tenants.get(tenant.hex()) if tenant else None
        return quota is not None and self._tenant_bytes.get(tenant, 0) + more > quota.quota_bytes

    def _tenant(self, tenant: bytes, change: int) -> None:
        if tenant:
            self._tenant_bytes[tenant] = self._tenant_bytes.get(tenant, 0) + change

    def _tiers_written(self, when: str) -> list[SlowTier]:
        tiers, tuning = list[SlowTier](), self.tuning.tiers
        if "disk" in self.lanes and tuning.disk.write == when and tuning.disk.capacity_bytes:
            tiers.append("disk")
        if "remote" in self.lanes and tuning.remote.write == when:
            tiers.append("remote")
        return tiers

    def _admits(self, tier: SlowTier, slot: Slot) -> bool:
        return getattr(self.tuning.admission, tier) == "always" or slot.uses > 0

    def _write_behind(self, digest: str, key: bytes, slot: Slot, tiers: Sequence[SlowTier]) -> None:
        for tier in tiers:
            if tier not in slot.behind and self._admits(tier, slot):
                self._queue(tier, digest, key, slot)

    def _queue(self, tier: SlowTier, digest: str, key: bytes, slot: Slot) -> None:
        if tier in slot.behind or self.lanes[tier].breaker.open or self.dram.pin(digest, key) is None:
            return
        slot.behind.add(tier)

        def done(outcome: Outcome | None) -> None:
            with self._lock:
                if outcome is not Outcome.OK:
                    slot.behind.discard(tier)
                self.dram.unpin(digest, key)

        # A slow tier must not pin the pool: what does not find room is tried again when it is used again.
        at_most = self.dram.pools[digest].pool.capacity // _QUEUED_SHARE
        self.lanes[tier].write_behind(Write(digest, key, slot.view(), slot.origin, done), at_most=max(1, at_most))

    def _apply_pools(self) -> None:
        tuning = self.tuning
        asked = {
            digest: (tuning.pool(digest, "dram").capacity_bytes, tuning.algorithm(digest, "dram"))
            for digest in self.dram.pools
        }
        self.dram.retune(tuning.tiers.dram.capacity_bytes, asked)
        if self._disk is not None:
            asked = {
                digest: (tuning.pool(digest, "disk").capacity_bytes, tuning.algorithm(digest, "disk"))
                for digest in self._disk.slabs
            }
            self._disk.retune(tuning.tiers.disk.capacity_bytes, asked)

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
        with self._lock:
            gauges.extend(pool_gauges(self.accounts, self.dram, self._disk))
            gauges.append(("tuning_version", ("applied",), self.tuning.version))
        return gauges


def _ref(slot: Slot) -> SlotRef:
    return SlotRef(slot.segment.number, slot.index, slot.generation, slot.checksum)


def _matches(write: Write, digests: Sequence[str | None], tenant: bytes | None) -> bool:
    return (None in digests or write.namespace in digests) and tenant in (None, write.origin.tenant)
