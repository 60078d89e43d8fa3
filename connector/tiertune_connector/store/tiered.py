"""The store of one host: its tiers, and what is done with chunks in them: look up, load, store.

Index operations are short and run under one lock; bytes move outside it. A method that may wait for a slower tier says
so, and needs a thread of its own.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import msgspec

from tiertune_connector.counters import Counters
from tiertune_connector.sampling.observer import Observer, Room
from tiertune_connector.sessions.holdings import Holdings, Quotas
from tiertune_connector.sessions.namespaces import Namespaces
from tiertune_connector.sessions.session import Session
from tiertune_connector.slower.behind import WriteBehind
from tiertune_connector.slower.lane import Lanes
from tiertune_connector.state import StateDir
from tiertune_connector.store.accounts import Accounts
from tiertune_connector.store.flushes import Flushes
from tiertune_connector.store.health import Health
from tiertune_connector.store.loads import Loads
from tiertune_connector.store.lookups import Lookups
from tiertune_connector.store.pools import Pools
from tiertune_connector.store.residency import Residency
from tiertune_connector.store.status import gauges
from tiertune_connector.store.storing import Storing
from tiertune_connector.tiers.base import Evicted
from tiertune_connector.tiers.directory import DirectoryTier
from tiertune_connector.tiers.disk import DiskTier
from tiertune_connector.tiers.dram import DramTier
from tiertune_connector.tuning import Tuning
from tiertune_connector.units import Clock

COUNTED = 16
"""So many namespaces that are over are still told in the counters: an agent that was away finds what it missed."""


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
        lanes: Lanes,
        counters: Counters,
        clock: Clock,
        lease_s: float = 30.0,
        state: StateDir | None = None,
    ) -> None:
        """``lanes`` lead to ``disk`` and ``remote``, where there are such.

        ``disk`` is the disk lane's medium; ``directory`` is the remote's, if it is one: a Redis evicts by itself. With
        ``state``, namespaces from before a restart are known.
        """
        self.name = name
        self.tuning = tuning
        self.dram = dram
        self.disk = disk
        self.directory = directory
        self.lanes = lanes
        self._counters = counters
        self._over: dict[str, None] = {}  # namespaces whose counts are still told, the latest last
        self._clock = clock
        self._lock = dram.lock
        self._codec = lanes["remote"].codec if "remote" in lanes else None
        self.namespaces = Namespaces(dram.lock, clock, state)
        self.accounts = accounts = Accounts(counters, name, dram, self.namespaces.model)
        self.observer = Observer(self._dram_room, time.time)
        reach = dram, disk, lanes, clock, self._in_force
        self.health = health = Health(*reach)
        self.behind = behind = WriteBehind(*reach)
        self.flushes = flushes = Flushes(dram, lanes, self.namespaces)
        self.pools = Pools(*reach, self.namespaces, counters)
        self.quotas = quotas = Quotas(self._in_force)
        self.holdings = holdings = Holdings(dram, quotas, counters, clock, lease_s)
        parts = *reach, Residency(*reach), health, accounts, holdings, quotas, flushes, behind
        self.loads = Loads(*parts)
        self.lookups = Lookups(*parts, self.observer, self.loads.arrivals)
        self.storing = Storing(*parts)
        for tier in (dram, disk, directory):
            if tier is not None:
                tier.on_evicted = partial(self._evicted, tier.name)
        counters.gauges_from(partial(gauges, self))
        counters.gauges_from(self.observer.rows)

    def attach(self, session: Session) -> str:
        """Make room for a client's namespace; returns why it is refused, or nothing."""
        digest = session.digest
        assert session.namespace is not None
        with self._lock:
            if self.dram.attach(digest, session.chunk_bytes, self.tuning.algorithm(digest, "dram")) is None:
                return "the namespace is served with another chunk size"
            self.observer.attach(session)
            self.namespaces.join(session)
            self.pools.share()
        try:
            self.pools.open_on_disk(digest, session.chunk_bytes)  # if it fails, the client is served anyway
            self.dram.settle()  # the first segment, so that the first chunks find room
            self.namespaces.keep()  # before any of its chunks
        except Exception:
            session.ended = True  # else its namespace would be in use for ever
            raise
        return ""

    def retune(self, tuning: Tuning) -> None:
        """Apply a tuning that was checked; pools follow step by step."""
        with self._lock:
            self.tuning = tuning
            if self._codec is not None:
                self._codec.writes = tuning.tiers.remote.codec
            self.pools.retune()
        self.show()

    def show(self) -> None:
        """Let clients trust DRAM's indexes for a second, or not at all. Call it every 0.1 s or so."""
        with self._lock:  # so that it fits the tuning in force
            cost = None if self.tuning.bypass else self.health.dram_cost()
            told = (self._clock(), msgspec.structs.astuple(cost)) if cost else (0.0, ())
            for pool in self.dram.pools.values():
                if pool.index:
                    pool.index.tell(*told)

    def watch(self) -> None:
        """Find tiers that hang, and give up what waits its turn behind a dead one. Call it every second or so."""
        for lane in self.lanes.values():
            lane.watch()
            if lane.breaker.open:
                with self._lock:
                    self.loads.arrivals.give_up(lane)

    def forget(self) -> None:
        """Forget what was learned of namespaces that are over, and, but for the last ones, what was counted of them.

        Call it every second or so.
        """
        with self._lock:
            held = {**self.dram.pools, **(self.disk.pools if self.disk else {})}
            for namespace in self.namespaces.over(held):
                self.observer.forget(namespace)
                self._over[namespace] = self._over.pop(namespace, None)
            while len(self._over) > COUNTED:
                namespace = next(iter(self._over))
                del self._over[namespace]
                if not self.namespaces.known(namespace):
                    self._counters.forget(namespace)

    def close(self) -> None:
        for lane in self.lanes.values():
            lane.close()
        self.health.close()
        self.dram.close()

    def _in_force(self) -> Tuning:
        return self.tuning

    def _dram_room(self, digest: str) -> Room | None:
        pool = self.dram.pools.get(digest)
        return Room(pool.allowed, pool.stride) if pool else None

    def _evicted(self, tier: str, chunks: Sequence[Evicted]) -> None:
        if tier == "remote":  # where chunks may lie for long after their namespace is over
            chunks = [one if self.namespaces.known(one.namespace) else replace(one, namespace="") for one in chunks]
        self.accounts.evicted(tier, chunks, self._clock())
        if tier == "dram":
            self.behind.lost(chunks)
            for chunk in chunks:
                self.quotas.change(chunk.origin.tenant, -self.dram.pools[chunk.namespace].chunk_bytes)
