"""A small store in this process without its server, and namespaces that come to it and go."""

import pytest

from connector.local_dram import LocalDram
from connector.stores import (
    CHUNK_TOKENS,
    PATIENCE_S,
    chain,
    payload,
    view,
)
from tiertune_connector.chunk import NOBODY
from tiertune_connector.counters import Counters
from tiertune_connector.keys import Namespace
from tiertune_connector.sessions.namespaces import LENT_AFTER_S
from tiertune_connector.sessions.session import Session
from tiertune_connector.slower.lane import Lane
from tiertune_connector.store.tiered import TieredStore
from tiertune_connector.tiers.disk import DiskTier
from tiertune_connector.tiers.segment import PAGE
from tiertune_connector.tuning import parse_tuning

OLD, NEW, OTHER = (Namespace(model="llama", chunk_tokens=CHUNK_TOKENS, epoch=epoch) for epoch in (1, 2, 3))

CHUNKS = 160

SLOT = 2 * PAGE
"""Bytes that a page takes on disk, with its header."""


def session_of(namespace):
    return Session("client", "engine", "mixed", namespace, PAGE, CHUNK_TOKENS)


class Served:
    """A store of 160 chunks of a page in DRAM, and as many on disk, and sessions with it."""

    def __init__(self, clock, root, own=None):
        pools = {OLD.digest: {tier: {"capacity_bytes": own} for tier in ("dram", "disk")}} if own is not None else {}
        tiers = {"dram": {"capacity_bytes": CHUNKS * PAGE}, "disk": {"capacity_bytes": CHUNKS * SLOT}}
        tuning = parse_tuning({"tiers": {**tiers, "remote": {"fetch": "off", "write": "off"}}, "pools": pools})
        self.dram, self.disk = LocalDram(segment_bytes=64 * PAGE, clock=clock), DiskTier(root)
        self.disk.recover(CHUNKS * SLOT, "lru")
        self.counters = Counters()
        lanes = {"disk": Lane(self.disk, self.counters, clock, patience_s=PATIENCE_S)}
        self.store = TieredStore(
            "host-a", tuning, dram=self.dram, disk=self.disk, lanes=lanes, counters=self.counters, clock=clock
        )
        self.store.retune(tuning)
        self.clock = clock

    def join(self, namespace):
        session = session_of(namespace)
        assert self.store.attach(session) == ""
        assert namespace.digest in self.disk.pools, "nobody is still opening it"
        self.settle()
        return session

    def leave(self, session, after_s=0.0):
        self.store.holdings.end(session)
        self.settle()
        self.clock.now += after_s
        self.settle()

    def settle(self):
        for _ in range(1000):
            more = self.store.pools.settle(), self.disk.settle()
            assert sum(pool.provisioned for pool in self.dram.pools.values()) <= CHUNKS
            assert sum(pool.taken_bytes for pool in self.disk.pools.values()) <= CHUNKS * SLOT
            if not any(more):
                return
        pytest.fail("it never settles")

    def fill(self, namespace, count, name=""):
        for key in chain(name or namespace.digest, count):
            for tier in (self.dram, self.disk):
                assert tier.write(namespace.digest, key, view(payload(key, PAGE)), NOBODY).kept
            self.settle()

    def held(self, namespace):
        """Chunks in DRAM and on disk, each with those that are allowed; None where it has no pool."""
        pools = [tier.pools.get(namespace.digest) for tier in (self.dram, self.disk)]
        return [pool and (len(pool.pool), pool.allowed) for pool in pools]

    def close(self):
        self.store.close()


def replaced(served, after_s=LENT_AFTER_S, chunks=CHUNKS):
    """Engines filled the store, others of another namespace came, and the first went."""
    first = served.join(OLD)
    served.fill(OLD, chunks)
    second = served.join(NEW)
    served.leave(first, after_s)
    return second


def slab_files(root):
    """Namespaces that have one."""
    return [path.name[:32] for path in root.glob("*.slab")]
