"""Tiers and stores on a Redis as operators run it, and their chunks."""

from contextlib import contextmanager

from connector.stores import (
    STRIDE,
    Engine,
    Http,
    eventually,
    payload,
    read_chunk,
    redis_tier,
    running,
    short_folder,
    view,
)
from tiertune_connector.access import Login
from tiertune_connector.chunk import Origin
from tiertune_connector.tiers.redis import WINDOW_BYTES

A = "a" * 32
NBYTES = 2 * WINDOW_BYTES + 100
TENANT = b"t" * 16
SECRET = "a-very-secret-word"


@contextmanager
def opened(url, login=None, timeout_s=2.0):
    tier = redis_tier(url, timeout_s=timeout_s, login=login or Login())
    yield tier
    tier.close()


def write(tier, key, nbytes=NBYTES):
    return tier.write(A, key, view(payload(key, nbytes)), Origin("host-a", TENANT))


def read(tier, key, nbytes=NBYTES):
    return read_chunk(tier, A, key, nbytes)[0]


@contextmanager
def serving(url, **more):
    """A store on a remote, an engine of it, and its HTTP."""
    with (
        short_folder() as home,
        running(home, remote={"url": url, "timeout": 2.0, "probe_every": 0.2, **more}) as process,
        Engine(process.server.path) as engine,
    ):
        http = Http(process.address)
        has_memory(http)
        eventually(lambda: health(http)["health"] == "ok")
        yield engine, http
        http.close()


def has_memory(http):
    eventually(lambda: http.total("tier_capacity_bytes", tier="dram", state="effective") == 64 * STRIDE)


def health(http):
    return http.get("/v1/status")["tiers"]["remote"]


def written(http):
    eventually(lambda: http.total("write_behind_queued", tier="remote") == 0)
