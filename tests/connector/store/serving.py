"""Stores with a remote in memory, whose faults a test sets."""

import threading
from contextlib import contextmanager

from connector.stores import CHUNK_BYTES, NAMESPACE, Engine, Http, eventually, payload, running, view
from tiertune_connector.chunk import Origin

DIGEST = NAMESPACE.digest
ALICE = b"a" * 16


def serving(home, remote, **more):
    return running(home, wrap_remote=lambda _: remote, remote={"probe_every": 3600}, **more)


@contextmanager
def joined(store, **more):
    """An engine of a store that has all its memory, and has probed its remote."""
    eventually(lambda: store.store.lanes["remote"].transit.estimate() is not None)
    with Engine(store, **more) as engine:
        eventually(lambda: all(pool.provisioned == pool.allowed for pool in store.store.dram.pools.values()))
        yield engine


@contextmanager
def used(home, remote, **more):
    """A store of a test's own, an engine of it, and its HTTP."""
    with serving(home, remote, **more) as store, joined(store) as engine, Http(store.address) as http:
        yield store, engine, http


def put_remote(remote, keys, tenant=b"", nbytes=CHUNK_BYTES):
    for key in keys:
        assert remote.write(DIGEST, key, view(payload(key, nbytes)), Origin("host-b", tenant)).kept


def written(store):
    """Nothing waits to be written behind any more: until then it is pinned, and no room for others."""
    eventually(lambda: all(lane.writers.queued() == 0 for lane in store.store.lanes.values()))


def held(remote):
    """Chunks of ours in the remote; the probe's is not."""
    return sum(namespace == DIGEST for namespace, _ in remote._chunks)


def in_remote(remote, keys):
    return remote.present(DIGEST, keys)[1] == len(keys)


def evict_all(http):
    """Empty DRAM, and give it its size back."""
    size = http.get("/v1/tuning")["tiers"]["dram"]["capacity_bytes"]
    assert http.retune(tiers__dram__capacity_bytes=0).status_code == 200
    assert http.retune(tiers__dram__capacity_bytes=size).status_code == 200
    eventually(lambda: http.total("tier_capacity_bytes", tier="dram", state="effective") == size)


class Reads:
    """A fault that holds reads until it is let go, and counts them."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.count = 0
        self._lock = threading.Lock()

    def __call__(self, operation):
        if operation == "read":
            with self._lock:
                self.count += 1
            self.free.wait(30)
