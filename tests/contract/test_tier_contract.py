"""The contract of tiers over each of them, and the bounds of those that have one; Redis is a real server."""

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.local_disk import taken
from connector.local_dram import LocalDram
from connector.memory_tier import MemoryTier
from connector.stores import Clock, damaged, redis_tier
from contract.tier_contract import KEYS, MINE, NBYTES, ONE, TWO, FileContract, Medium, TierContract, read, write
from e2e.servers import redis_server
from extending.sqlite_tier import SqliteTier
from tiertune_connector.chunk import HEADER_BYTES
from tiertune_connector.counters import Counters
from tiertune_connector.tiers.base import Outcome, Tier
from tiertune_connector.tiers.directory import DirectoryTier
from tiertune_connector.tiers.disk import DiskTier
from tiertune_connector.tiers.redis import RedisTier
from tiertune_connector.tiers.spread import SpreadTier

ROOM = 64
"""Chunks of NBYTES that fit into the bounded tiers here."""


class TestMemory(TierContract):
    lasting = False

    @pytest.fixture
    def medium(self):
        tier = MemoryTier()
        return Medium(tier, MemoryTier, lambda namespace, key, _: damaged(tier, namespace, key))


def dram(chunks: int = ROOM) -> LocalDram:
    """Memory for so many chunks of both namespaces."""
    tier = LocalDram(segment_bytes=1 << 18, clock=Clock())
    for namespace in (ONE, TWO):
        tier.attach(namespace, NBYTES, "lru")
    tier.retune(2 * chunks * 8192, {})
    while tier.settle():
        pass
    return tier


class TestDram(TierContract):
    """With a client in this process: what it copies by (pin, reserve, commit, verify) keeps the same promises."""

    lasting = False

    @pytest.fixture
    def medium(self):
        tier = dram()

        def damage(namespace: str, key: bytes, offset: int) -> None:
            tier.pools[namespace].pool.get(key).view()[offset] ^= 1

        yield Medium(tier, dram, damage)
        tier.close()


class TestDisk(FileContract):
    SLOT = 3 * 4096
    """Bytes of a slot: a page of header, and the payload's pages."""

    @pytest.fixture
    def medium(self, tmp_path):
        opened = []

        def reopen() -> DiskTier:
            tier = DiskTier(tmp_path)
            tier.recover(2 * ROOM * self.SLOT, "lru")
            tier.retune(2 * ROOM * self.SLOT, {})
            opened.append(tier)
            return tier

        def place(namespace: str, key: bytes) -> tuple[Path, int]:
            pool = tier.pools[namespace]
            return pool.slab.path, pool.pool.get(key) * pool.stride

        def damage(namespace: str, key: bytes, offset: int) -> None:
            path, start = place(namespace, key)
            flip(path, start + 4096 + offset)

        def truncate(namespace: str, key: bytes) -> None:
            path, start = place(namespace, key)
            os.truncate(path, start + 4096 + 100)

        tier = reopen()
        yield Medium(tier, reopen, damage, truncate)
        for tier in opened:
            tier.close()


class TestDirectory(FileContract):
    @pytest.fixture
    def medium(self, tmp_path):
        def reopen() -> DirectoryTier:
            return DirectoryTier(tmp_path, writer="host-a")

        def file(namespace: str, key: bytes) -> Path:
            return next(tmp_path.glob(f"{namespace}/*/{key.hex()}"))

        def damage(namespace: str, key: bytes, offset: int) -> None:
            flip(file(namespace, key), HEADER_BYTES + offset)

        return Medium(reopen(), reopen, damage, lambda *place: os.truncate(file(*place), HEADER_BYTES + 100))


class TestSqlite(FileContract):
    """The example of docs/extending/tier.md."""

    @pytest.fixture
    def medium(self, tmp_path):
        path, opened = tmp_path / "chunks.sqlite", []

        def reopen() -> SqliteTier:
            opened.append(SqliteTier(path, writer="host-a"))
            return opened[-1]

        def change(namespace: str, key: bytes, what: Callable[[bytes], bytes]) -> None:
            with closing(sqlite3.connect(path)) as db, db:
                place = (namespace, key)
                (found,) = db.execute("select payload from chunks where namespace = ? and key = ?", place).fetchone()
                db.execute("update chunks set payload = ? where namespace = ? and key = ?", (what(found), *place))

        def damage(namespace: str, key: bytes, offset: int) -> None:
            change(namespace, key, lambda old: old[:offset] + bytes([old[offset] ^ 1]) + old[offset + 1 :])

        yield Medium(reopen(), reopen, damage, lambda *place: change(*place, lambda old: old[:100]))
        for tier in opened:
            tier.close()

    def test_a_missing_folder_is_an_error_and_no_exception(self, tmp_path):
        """What is away may come back: the same tier then works."""
        tier = SqliteTier(tmp_path / "away" / "chunks.sqlite", writer="host-a")
        assert write(tier) is Outcome.ERROR
        assert tier.why == "unable to open database file"
        assert tier.usage().resident_bytes == 0
        (tmp_path / "away").mkdir()
        assert write(tier) is Outcome.OK
        tier.close()

    def test_another_stores_long_transaction_is_a_time_out(self, medium, tmp_path, monkeypatch):
        """A write that waits too long answers, and leaves nothing behind."""
        monkeypatch.setattr("extending.sqlite_tier.WAIT_S", 0.01)
        tier = medium.reopen()
        write(tier)
        with closing(sqlite3.connect(tmp_path / "chunks.sqlite")) as other:
            other.execute("begin immediate")
            assert write(tier, ONE, KEYS[1]) is Outcome.TIMEOUT
        assert read(tier, ONE, KEYS[1])[0] is Outcome.MISS

    @settings(max_examples=20, deadline=None)
    @given(st.lists(st.tuples(st.booleans(), st.integers(0, 11)), max_size=40))
    def test_it_never_holds_more_of_a_store_than_its_bound(self, steps):
        """However it is written and flushed; what was written last is there, and another store's chunks stay."""
        with TemporaryDirectory() as folder:
            path = Path(folder) / "chunks.sqlite"
            tier, other = (
                SqliteTier(path, writer=name, capacity_bytes=3 * NBYTES + 1) for name in ("host-a", "host-b")
            )
            write(other, ONE, b"of another")
            for writes, number in steps:
                if writes:
                    assert write(tier, TWO, b"%d" % number).kept
                    assert tier.present(TWO, [b"%d" % number]) == (Outcome.OK, 1)
                else:
                    tier.flush(TWO)
                assert tier.usage().resident_bytes <= 3 * NBYTES + 1
            assert other.present(ONE, [b"of another"]) == (Outcome.OK, 1)
            assert tier.write(TWO, b"large", memoryview(bytes(4 * NBYTES)), MINE) is Outcome.FULL
            tier.close()
            other.close()


@pytest.fixture(scope="module")
def server():
    with redis_server() as started:
        yield started


@pytest.mark.real
class TestRedis(FileContract):
    @pytest.fixture
    def medium(self, server):
        opened: list[RedisTier] = []

        def reopen() -> RedisTier:
            opened.append(redis_tier(server.url))
            return opened[-1]

        def damage(namespace: str, key: bytes, offset: int) -> None:
            place, at = name(namespace, key), HEADER_BYTES + offset
            raw.setrange(place, at, bytes([raw.getrange(place, at, at)[0] ^ 1]))

        def truncate(namespace: str, key: bytes) -> None:
            raw.set(name(namespace, key), raw.getrange(name(namespace, key), 0, HEADER_BYTES + 99))

        with redis.Redis.from_url(server.url) as raw:
            raw.flushall()
            yield Medium(reopen(), reopen, damage, truncate)
        for tier in opened:
            tier.close()


class TestSpread(TierContract):
    """Several servers are a tier as one is."""

    @pytest.fixture
    def medium(self):
        servers = {f"server-{number}": MemoryTier() for number in range(3)}
        opened = []

        def reopen() -> SpreadTier:
            opened.append(SpreadTier(servers, Counters(), patience_s=5.0))
            return opened[-1]

        def damage(namespace: str, key: bytes, offset: int) -> None:
            damaged(servers[opened[0].owner(key)], namespace, key)

        yield Medium(reopen(), reopen, damage)
        for tier in opened:
            tier.close()


def name(namespace: str, key: bytes) -> bytes:
    return b"tiertune:" + namespace.encode() + b":" + key


def flip(path: Path, offset: int) -> None:
    """Flip a bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


# -- bounded tiers


STEPS = st.lists(
    st.tuples(st.sampled_from(["write", "read", "flush", "capacity", "settle"]), st.integers(0, 23)), max_size=60
)


def run(tier: Tier, steps: list[tuple[str, int]], retune: Callable[[int], Any], check: Callable[[], None]) -> None:
    """Writes and reads of two namespaces between changes of the capacity in chunks, checked after each."""
    for step, number in steps:
        namespace, key = (ONE, TWO)[number % 2], b"key-%d" % (number % 12)
        if step == "write":
            assert write(tier, namespace, key) in (Outcome.OK, Outcome.THERE, Outcome.FULL)
        elif step == "read":
            assert read(tier, namespace, key)[0] in (Outcome.OK, Outcome.MISS)
        elif step == "flush":
            tier.flush(namespace)
        elif step == "capacity":
            retune(number)
        elif isinstance(tier, LocalDram):
            tier.settle()
        check()


@settings(max_examples=60)
@given(STEPS)
def test_dram_never_holds_more_than_its_capacity(steps):
    """Neither in chunks nor in memory that is really taken, once a smaller capacity has settled."""
    tier = dram(4)

    def memory() -> int:
        return sum(
            os.fstat(segment.fd).st_blocks * 512 - segment.geometry.offset(0)
            for pool in tier.pools.values()
            for segment in pool.segments.values()
        )

    def check() -> None:
        usage = tier.usage()
        assert usage.resident_bytes <= usage.capacity_bytes

    def retune(chunks: int) -> None:
        before = tier.capacity_bytes
        tier.retune(chunks * 8192, {})
        assert memory() <= before
        for _ in range(4):
            tier.settle()
        assert memory() <= tier.capacity_bytes

    run(tier, steps, retune, check)
    tier.close()


@settings(max_examples=60)
@given(STEPS)
def test_disk_never_holds_more_than_its_capacity(steps):
    """Neither by its index nor, once a change settled, in blocks of the file system; a restart finds no more."""
    slot = TestDisk.SLOT
    with TemporaryDirectory() as folder:
        tier = DiskTier(Path(folder))
        tier.retune(8 * slot, {})

        def check() -> None:
            usage = tier.usage()
            assert usage.resident_bytes <= usage.capacity_bytes
            assert taken(Path(folder)) <= usage.resident_bytes

        def retune(chunks: int) -> None:
            tier.retune(chunks * slot, {})
            tier.settle()

        run(tier, steps, retune, check)
        held = {(ns, key) for ns, pool in tier.pools.items() for key in pool.pool}
        capacity = tier.usage().capacity_bytes
        tier.close()
        again = DiskTier(Path(folder))
        again.recover(capacity, "lru")
        again.retune(capacity, {})
        assert {(ns, key) for ns, pool in again.pools.items() for key in pool.pool} == held
        again.close()


@settings(max_examples=40)
@given(STEPS)
def test_a_directory_never_holds_more_of_a_store_than_its_bound(steps):
    """What a store wrote stays within its bound, in files as counted."""
    with TemporaryDirectory() as folder:
        bound = 6 * (NBYTES + HEADER_BYTES)
        tier = DirectoryTier(Path(folder), writer="host-a", capacity_bytes=bound)

        def check() -> None:
            files = [path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()]
            assert sum(files) == tier.usage().resident_bytes <= bound

        run(tier, steps, lambda _: None, check)
