"""Every field of the tuning document has its effect, in ``/v1/status`` and in what a real store does."""

from collections import Counter
from collections.abc import Iterator
from functools import reduce
from operator import getitem
from typing import Any, Union, get_args, get_origin

import pytest
from pydantic import BaseModel

from connector.memory_tier import MemoryTier
from connector.store.serving import put_remote, written
from connector.stores import CHUNK_BYTES, NAMESPACE, STRIDE, Engine, Http, chain, eventually, pool, running
from tiertune_connector.chunk import Header, Origin, checksum
from tiertune_connector.tuning import Tuning

pytestmark = pytest.mark.slow

DIGEST = NAMESPACE.digest
ALICE, BOB = b"alice".ljust(16), b"bob".ljust(16)
DISK_SLOT = 4096 + STRIDE
DRAM = 32


class Knob:
    """A store with a disk and a remote in this process, one engine, and its HTTP."""

    def __init__(self, process, remote):
        self.store, self.remote, self.server = process.store, remote, process.server
        self.http, self.engine = Http(process.address), Engine(process)

    def tune(self, **fields: Any) -> None:
        answer = self.http.retune(**fields)
        assert answer.status_code == 200, answer.text

    def status(self, *path: str) -> Any:
        return reduce(getitem, path, self.http.get("/v1/status"))

    def told(self, path: str) -> Any:
        """What the store says that it was asked."""
        return reduce(getitem, path.split("__"), self.http.get("/v1/tuning"))

    def on_disk(self, keys) -> int:
        return self.store.disk.present(DIGEST, keys)[1]

    def in_remote(self, keys) -> int:
        return self.remote.present(DIGEST, keys)[1]

    def gate(self):
        return self.engine.client.lookup("r", chain("k", 1), prompt_tokens=16).result(5).gate["remote"]


@pytest.fixture
def knob(home) -> Iterator[Knob]:
    remote = MemoryTier()
    more = {
        "dram": DRAM * STRIDE,
        "disk": 64 * DISK_SLOT,
        "remote": {"url": "redis://127.0.0.1:1", "probe_every": 3600},
    }
    with running(home, wrap_remote=lambda _: remote, **more) as process:
        held = Knob(process, remote)
        held.tune(tiers__disk__write="off", tiers__remote__write="off")
        eventually(lambda: pool(process).provisioned == DRAM)
        yield held
        held.engine.client.close()
        held.http.close()


def version(knob):
    """Counted by the store; a change made for another one is refused."""
    before = knob.status("tuning_version")
    document = knob.http.get("/v1/tuning")
    assert knob.http.put(document, before - 1, "stale").status_code == 412
    knob.tune(defaults__eviction="arc")
    assert knob.status("tuning_version") == knob.told("version") == before + 1


def bypass(knob):
    """Nothing is found and nothing stored; afterwards what was held is there."""
    keys = chain("k", 3)
    knob.engine.put(keys)
    knob.tune(bypass=True)
    assert knob.status("bypass") is True
    assert {told["health"] for told in knob.status("tiers").values()} == {"bypassed"}
    assert knob.engine.find(keys) == []
    assert knob.engine.load(keys).outcomes == ["miss"] * 3
    assert knob.engine.put(chain("l", 1)) == ["bypassed"]
    knob.tune(bypass=False)
    assert knob.engine.find(keys) == ["dram"] * 3


def dram_capacity(knob):
    """Less evicts and gives memory back, more takes it."""
    knob.engine.put(chain("k", DRAM))
    for chunks in (8, 0, 2 * DRAM):
        knob.tune(tiers__dram__capacity_bytes=chunks * STRIDE)
        eventually(lambda chunks=chunks: pool(knob).provisioned == chunks)
        assert knob.status("tiers", "dram", "capacity_bytes") == chunks * STRIDE
        assert knob.engine.put(chain(f"l{chunks}", 3 * DRAM)).count("") == chunks


def disk_capacity(knob):
    """Less removes chunks at once, and gives their room back soon; 0 holds none."""
    knob.tune(tiers__disk__write="commit")
    keys = chain("k", 24)
    for start in (0, 8, 16):
        knob.engine.put(keys[start : start + 8])
        written(knob)
    slab = knob.store.disk.pools[DIGEST].slab.path
    for chunks in (24, 8, 0):
        knob.tune(tiers__disk__capacity_bytes=chunks * DISK_SLOT)
        assert knob.status("tiers", "disk", "chunks") == chunks
        eventually(lambda chunks=chunks: slab.stat().st_blocks * 512 <= (chunks + 1) * DISK_SLOT)
    assert knob.status("pools", DIGEST, "disk", "applied", "capacity_bytes") == 0


def write_mode(tier, count):
    """At commit, when it is about to leave, or never."""

    def case(knob):
        for mode, young, old in (("off", 0, 0), ("commit", 6, 6), ("evict", 0, 4)):
            knob.tune(**{f"tiers__{tier}__write": mode})
            assert knob.told(f"tiers__{tier}__write") == mode
            knob.http.post("/v1/flush", {})
            first = chain(f"{mode}-first", 6)
            knob.engine.put(first)
            written(knob)
            assert sum(count(knob, [key]) for key in first) == young
            for part in range(4):
                knob.engine.put(chain(f"{mode}-{part}", 7))
            knob.store.behind.clean_ahead()
            written(knob)
            assert sum(count(knob, [key]) for key in first) >= old
            assert bool(sum(count(knob, [key]) for key in first)) is bool(old)

    return case


def remote_fetch(knob):
    """Off hides what is there, and says so."""
    keys = chain("k", 3)
    put_remote(knob.remote, keys)
    assert knob.engine.find(keys) == ["remote"] * 3
    knob.tune(tiers__remote__fetch="off")
    told = knob.status("tiers", "remote")
    assert (told["health"], told["reason"]) == ("bypassed", "remote fetch is off by tuning")
    assert knob.engine.find(keys) == []
    assert knob.engine.load(keys).outcomes == ["miss"] * 3
    assert knob.gate().fetch_on is False
    knob.tune(tiers__remote__fetch="on")
    assert knob.engine.find(keys) == ["remote"] * 3


def gate_bound(field, value):
    """The engine's gate has it with the next lookup."""

    def case(knob):
        assert getattr(knob.gate(), field) != value
        knob.tune(**{f"tiers__remote__{field}": value})
        assert knob.told(f"tiers__remote__{field}") == value
        assert getattr(knob.gate(), field) == value

    return case


def remote_holdout(knob):
    """That share of requests is told not to fetch; `test_holdout` has what becomes of their times."""
    keys = chain("k", 1)
    put_remote(knob.remote, keys)
    knob.tune(tiers__remote__holdout=0.5)
    told = [knob.engine.client.lookup(f"r{n}", keys, prompt_tokens=16).result(5) for n in range(200)]
    groups = Counter(reply.group for reply in told)
    assert set(groups) == {"held", "fetched"}
    assert 60 < groups["held"] < 140
    assert all(reply.gate["remote"].fetch_on is (reply.group == "fetched") for reply in told)
    knob.tune(tiers__remote__holdout=0.0)
    assert all(knob.engine.client.lookup(f"r{n}", keys, prompt_tokens=16).result(5).group == "" for n in range(20))


def remote_codec(knob):
    """What is written there is smaller from now on, or as it was."""
    pytest.importorskip("numcodecs")
    data = bytes(CHUNK_BYTES)
    header = Header(DIGEST, b"k" * 32, Origin("host-a"), len(data), checksum(memoryview(data)))
    for name, smaller in (("lz4", True), ("raw", False)):
        knob.tune(tiers__remote__codec=name)
        assert knob.status("tiers", "remote", "codec") == name
        _, stored = knob.store.lanes["remote"].codec.encode(header, memoryview(data))
        assert (len(stored) < len(data)) is smaller


def pool_capacity(tier):
    """One namespace's part, whatever the tier has."""

    def case(knob):
        if tier == "disk":
            knob.tune(tiers__disk__write="commit")
        slot = STRIDE if tier == "dram" else DISK_SLOT
        knob.tune(pools={DIGEST: {tier: {"capacity_bytes": 10 * slot}}})
        told = knob.status("pools", DIGEST, tier)
        assert told["desired"]["capacity_bytes"] == told["applied"]["capacity_bytes"] == 10 * slot
        eventually(lambda: knob.status("pools", DIGEST, tier, "effective", "capacity_bytes") == 10 * slot)
        for part in range(4):
            knob.engine.put(chain(f"k{part}", 5))
            written(knob)
        assert knob.status("pools", DIGEST, tier, "chunks") == 10

    return case


def victims(knob, tier):
    """Fill the pool, use its oldest chunk, and tell which of the first two leaves for the next."""
    size = 16
    oldest = chain("k", size)
    for key in oldest:
        knob.engine.put([key])
        written(knob)
    if tier == "dram":
        knob.engine.find(oldest[:1])
        knob.engine.put(chain("new", 1))
        return [key in knob.store.dram.pools[DIGEST].pool for key in oldest[:2]]
    pool = knob.store.disk.pools[DIGEST].pool
    pool.touch(oldest[:1])
    knob.engine.put(chain("new", 1))
    written(knob)
    return [key in pool for key in oldest[:2]]


def eviction(tier, where):
    """FIFO lets go what entered first though it was just used; LRU, asked next, what was not used."""

    def case(knob):
        if tier == "disk":
            knob.tune(tiers__disk__write="commit")
        slot = STRIDE if tier == "dram" else DISK_SLOT
        for name, left in (("fifo", [False, True]), ("lru", [True, False])):
            own = {"capacity_bytes": 16 * slot, "eviction": name if where == "pool" else None}
            knob.tune(pools={DIGEST: {tier: own}}, **({} if where == "pool" else {"defaults__eviction": name}))
            knob.http.post("/v1/flush", {})
            eventually(lambda: knob.status("pools", DIGEST, tier, "effective", "capacity_bytes") == 16 * slot)
            assert knob.status("pools", DIGEST, tier, "applied", "eviction") == name
            assert victims(knob, tier) == left

    return case


def default_eviction(knob):
    """Of pools that name none, in both tiers."""
    eviction("dram", "default")(knob)
    assert knob.status("pools", DIGEST, "disk", "applied", "eviction") == "lru"


def admission(tier, count):
    """Only what is used a second time is written."""

    def case(knob):
        knob.tune(**{f"tiers__{tier}__write": "commit", f"admission__{tier}": "second_access"})
        assert knob.told(f"admission__{tier}") == "second_access"
        once, again = chain("once", 3), chain("again", 3)
        knob.engine.put(once)
        knob.engine.put(again)
        knob.engine.find(again)
        eventually(lambda: count(knob, again) == 3)
        assert count(knob, once) == 0
        knob.tune(**{f"admission__{tier}": "always"})
        more = chain("more", 3)
        knob.engine.put(more)
        eventually(lambda: count(knob, more) == 3)

    return case


def tenant_quota(knob):
    """Beyond it a tenant's chunks are refused, and none is evicted; others' are not counted to it."""
    knob.tune(tenants={ALICE.hex(): {"quota_bytes": 4 * CHUNK_BYTES}})
    assert knob.engine.put(chain("a", 6), tenant=ALICE) == [""] * 4 + ["over_quota"] * 2
    held = {"quota_bytes": 4 * CHUNK_BYTES, "resident_bytes": 4 * CHUNK_BYTES}
    for tenant in (BOB, b""):
        knob.engine.put_all(chain(f"of {tenant!r}", 6), tenant=tenant)
    assert knob.status("tenants") == {ALICE.hex(): held}
    assert knob.http.total("quota_refused_chunks_total", namespace=DIGEST) == 2
    knob.tune(tenants={ALICE.hex(): {"quota_bytes": 6 * CHUNK_BYTES}})
    assert knob.engine.put(chain("a", 6), tenant=ALICE) == ["present"] * 4 + [""] * 2


CASES = {
    "version": version,
    "bypass": bypass,
    "tiers.dram.capacity_bytes": dram_capacity,
    "tiers.disk.capacity_bytes": disk_capacity,
    "tiers.disk.write": write_mode("disk", Knob.on_disk),
    "tiers.remote.fetch": remote_fetch,
    "tiers.remote.write": write_mode("remote", Knob.in_remote),
    "tiers.remote.min_fetch_tokens": gate_bound("min_fetch_tokens", 64),
    "tiers.remote.margin": gate_bound("margin", 2.5),
    "tiers.remote.deadline_factor": gate_bound("deadline_factor", 3.0),
    "tiers.remote.codec": remote_codec,
    "tiers.remote.holdout": remote_holdout,
    "pools.*.dram.capacity_bytes": pool_capacity("dram"),
    "pools.*.dram.eviction": eviction("dram", "pool"),
    "pools.*.disk.capacity_bytes": pool_capacity("disk"),
    "pools.*.disk.eviction": eviction("disk", "pool"),
    "defaults.eviction": default_eviction,
    "admission.disk": admission("disk", Knob.on_disk),
    "admission.remote": admission("remote", Knob.in_remote),
    "tenants.*.quota_bytes": tenant_quota,
}


def fields(model: type[BaseModel], path: str = "") -> Iterator[str]:
    """Dotted paths of all that can be set, ``*`` for a name that is the user's."""
    for name, field in model.model_fields.items():
        kind, step = field.annotation, f"{path}{name}"
        if get_origin(kind) is dict:
            kind, step = get_args(kind)[1], step + ".*"
        elif get_origin(kind) is Union:
            kind = next((one for one in get_args(kind) if isinstance(one, type) and issubclass(one, BaseModel)), kind)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from fields(kind, step + ".")
        else:
            yield step


def test_every_field_has_a_case():
    """One that is added to the document without a proof of its effect fails here."""
    assert set(fields(Tuning)) == set(CASES)


@pytest.mark.parametrize("field", CASES)
def test_it_has_its_effect(knob, field):
    """In what is told, and in what happens."""
    CASES[field](knob)
