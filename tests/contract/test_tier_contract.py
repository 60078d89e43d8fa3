"""What every tier promises, over each of them; Redis is a real server."""

import os
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.local_dram import LocalDram
from connector.stores import Clock, amid, chain, payload, view
from e2e.servers import redis_server
from extending.sqlite_tier import SqliteTier
from tiertune_connector.chunk import HEADER_BYTES, Origin, checksum
from tiertune_connector.tiers.base import Outcome, Tier
from tiertune_connector.tiers.directory import DirectoryTier
from tiertune_connector.tiers.disk import DiskTier
from tiertune_connector.tiers.memory import MemoryTier
from tiertune_connector.tiers.redis import RedisTier
from tiertune_connector.tiers.spread import SpreadTier

NBYTES = 5000
ROOM = 64
"""Chunks of NBYTES that fit into the bounded tiers here."""
ONE, TWO = "1" * 32, "2" * 32
ALICE, BOB = b"a" * 16, b"b" * 16
MINE = Origin("host-a")
KEYS = chain("contract", 8)


@dataclass
class Medium:
    """A tier, and what a test may do behind its back."""

    tier: Tier
    reopen: Callable[[], Tier]
    damage: Callable[[str, bytes, int], None]
    """Flip a bit of a payload, that many bytes from its start."""
    truncate: Callable[[str, bytes], None] = lambda *_: None
    """Cut a chunk short."""


def read(tier: Tier, namespace: str, key: bytes, nbytes: int = NBYTES) -> tuple[Outcome, Origin, np.ndarray]:
    out = np.zeros(nbytes, np.uint8)
    outcome, origin = tier.read(namespace, key, view(out))
    return outcome, origin, out


def write(tier: Tier, namespace: str, key: bytes, origin: Origin = MINE, nbytes: int = NBYTES) -> Outcome:
    return tier.write(namespace, key, view(payload(key, nbytes)), origin)


class TierContract:
    lasting = True
    """Chunks outlive the process."""

    @pytest.fixture
    def tier(self, medium):
        return medium.tier

    def test_a_chunk_is_read_bit_for_bit_with_its_origin(self, tier):
        """What was written comes back unchanged, with who wrote it and for whom."""
        origin = Origin("host-a", ALICE)
        for key in KEYS:
            assert write(tier, ONE, key, origin) is Outcome.OK
        for key in KEYS:
            outcome, told, out = read(tier, ONE, key)
            assert (outcome, told) == (Outcome.OK, origin)
            assert np.array_equal(out, payload(key, NBYTES))

    def test_a_sum_that_is_told_is_that_of_the_bytes(self, tier):
        """Whether the writer told it or not: who reads need not sum again."""
        told = Origin("host-a", checksum=checksum(view(payload(KEYS[1], NBYTES))))
        assert write(tier, ONE, KEYS[0]) is Outcome.OK
        assert write(tier, ONE, KEYS[1], told) is Outcome.OK
        for key in KEYS[:2]:
            outcome, origin, out = read(tier, ONE, key)
            assert outcome is Outcome.OK
            assert origin.checksum in (None, checksum(view(out)))

    def test_what_has_come_is_told(self, tier):
        """In order, and what was told is in its place; the last piece is the end of the payload."""
        out, heard = np.zeros(NBYTES, np.uint8), []

        def came(told: int) -> None:
            heard.append(told)
            assert np.array_equal(out[:told], payload(KEYS[0], NBYTES)[:told])

        assert write(tier, ONE, KEYS[0]) is Outcome.OK
        assert tier.read(ONE, KEYS[0], view(out), came)[0] is Outcome.OK
        assert heard == sorted(set(heard))
        assert heard[-1] == NBYTES

    def test_what_was_never_written_is_a_miss(self, tier):
        """A missing key, or namespace, is a miss and no error."""
        write(tier, ONE, KEYS[0])
        assert read(tier, ONE, KEYS[1])[0] is Outcome.MISS
        assert read(tier, "f" * 32, KEYS[0])[0] is Outcome.MISS
        assert tier.present("f" * 32, KEYS) == (Outcome.OK, 0)

    @pytest.mark.parametrize("here", [0, 1, 2, 3, 5, 7, 8])
    def test_present_is_the_longest_leading_run(self, tier, here):
        """A gap ends the run, whatever follows it."""
        for key in [*KEYS[:here], *KEYS[here + 1 :]]:
            write(tier, ONE, key)
        assert tier.present(ONE, KEYS) == (Outcome.OK, here)

    def test_nothing_asked_is_nothing_present(self, tier):
        """An empty chain has an empty run."""
        assert tier.present(ONE, []) == (Outcome.OK, 0)

    def test_a_second_write_changes_nothing(self, tier):
        """A key that is here stays as it was first written."""
        write(tier, ONE, KEYS[0])
        other = view(payload(b"other bytes", NBYTES))
        assert tier.write(ONE, KEYS[0], other, Origin("host-a", BOB)) is Outcome.OK
        outcome, origin, out = read(tier, ONE, KEYS[0])
        assert (outcome, origin.tenant) == (Outcome.OK, b"")
        assert np.array_equal(out, payload(KEYS[0], NBYTES))

    def test_namespaces_do_not_meet(self, tier):
        """The same key in two namespaces is two chunks."""
        write(tier, ONE, KEYS[0])
        assert read(tier, TWO, KEYS[0])[0] is Outcome.MISS
        tier.write(TWO, KEYS[0], view(payload(b"two", NBYTES)), MINE)
        assert np.array_equal(read(tier, ONE, KEYS[0])[2], payload(KEYS[0], NBYTES))
        assert np.array_equal(read(tier, TWO, KEYS[0])[2], payload(b"two", NBYTES))

    @pytest.mark.parametrize(
        "key", [b"\0", b"*", b"?[a-z]*\\", bytes(range(64)), b"\xff" * 64, b"a/../b", b"tiertune:"]
    )
    def test_keys_are_opaque(self, tier, key):
        """Any 1 to 64 bytes are a key, also those that mean something to a medium; a flush finds them."""
        assert write(tier, ONE, key) is Outcome.OK
        assert tier.present(ONE, [key]) == (Outcome.OK, 1)
        assert np.array_equal(read(tier, ONE, key)[2], payload(key, NBYTES))
        assert tier.flush(ONE) == (Outcome.OK, 1)
        assert tier.present(ONE, [key]) == (Outcome.OK, 0)

    @pytest.mark.parametrize(
        ("what", "left"),
        [
            ({}, []),
            ({"namespace": ONE}, [(TWO, 0), (TWO, 1), (TWO, 2)]),
            ({"tenant": ALICE}, [(ONE, 0), (ONE, 2), (TWO, 0), (TWO, 2)]),
            ({"namespace": TWO, "tenant": BOB}, [(ONE, 0), (ONE, 1), (ONE, 2), (TWO, 0), (TWO, 1)]),
            ({"tenant": b"c" * 16}, [(ONE, 0), (ONE, 1), (ONE, 2), (TWO, 0), (TWO, 1), (TWO, 2)]),
        ],
    )
    def test_flush_drops_what_is_named_and_counts_it(self, tier, what, left):
        """By namespace, by tenant, by both, or all; nothing else goes."""
        tenants = (b"", ALICE, BOB)
        for namespace in (ONE, TWO):
            for key, tenant in zip(KEYS, tenants, strict=False):
                write(tier, namespace, key, Origin("host-a", tenant))
        assert tier.flush(**what) == (Outcome.OK, 6 - len(left))
        here = [
            (namespace, index)
            for namespace in (ONE, TWO)
            for index in range(3)
            if read(tier, namespace, KEYS[index])[0] is Outcome.OK
        ]
        assert here == left

    @pytest.mark.parametrize("offset", [0, NBYTES // 2, NBYTES - 1])
    def test_damaged_bytes_are_corrupt_and_then_gone(self, medium, offset):
        """One flipped bit is found, the chunk leaves, and may be written anew."""
        tier = medium.tier
        write(tier, ONE, KEYS[0])
        medium.damage(ONE, KEYS[0], offset)
        assert read(tier, ONE, KEYS[0])[0] is Outcome.CORRUPT
        assert read(tier, ONE, KEYS[0])[0] is Outcome.MISS
        assert tier.present(ONE, KEYS[:1]) == (Outcome.OK, 0)
        assert write(tier, ONE, KEYS[0]) is Outcome.OK
        assert np.array_equal(read(tier, ONE, KEYS[0])[2], payload(KEYS[0], NBYTES))

    def test_readers_never_see_half_a_chunk(self, tier):
        """While threads write, read and flush the same keys, a read is a miss or the whole chunk."""
        wrong = []

        def reading(_: int, stop: threading.Event) -> None:
            while not stop.is_set():
                for key in KEYS[:4]:
                    outcome, _, out = read(tier, ONE, key)
                    whole = np.array_equal(out, payload(key, NBYTES))
                    if outcome not in (Outcome.OK, Outcome.MISS) or (outcome is Outcome.OK and not whole):
                        wrong.append(outcome)

        with amid(reading, 2):
            for _ in range(30):
                for key in KEYS[:4]:
                    assert write(tier, ONE, key) is Outcome.OK
                tier.flush(ONE)
        assert wrong == []

    def test_usage_follows_writes_and_flushes(self, tier):
        """Resident bytes cover the payloads held, and fall with a flush."""
        empty = tier.usage().resident_bytes
        for key in KEYS:
            write(tier, ONE, key)
        full = tier.usage()
        assert full.resident_bytes - empty >= len(KEYS) * NBYTES
        assert full.chunks in (len(KEYS), None)
        tier.flush()
        assert tier.usage().resident_bytes < full.resident_bytes

    def test_close_leaves_a_lasting_medium_as_it_was(self, medium):
        """Another process finds the chunks where the medium lasts, and nothing where it does not."""
        origin = Origin("host-a", ALICE)
        for key in KEYS:
            write(medium.tier, ONE, key, origin)
        medium.tier.close()
        again = medium.reopen()
        if not self.lasting:
            assert again.present(ONE, KEYS) == (Outcome.OK, 0)
            return
        assert again.present(ONE, KEYS) == (Outcome.OK, len(KEYS))
        for key in KEYS:
            outcome, told, out = read(again, ONE, key)
            assert (outcome, told) == (Outcome.OK, origin)
            assert np.array_equal(out, payload(key, NBYTES))
        assert again.flush(tenant=ALICE) == (Outcome.OK, len(KEYS))


class FileContract(TierContract):
    def test_a_chunk_cut_short_is_corrupt_and_then_gone(self, medium):
        """Bytes that are missing at the end are found, too."""
        write(medium.tier, ONE, KEYS[0])
        medium.truncate(ONE, KEYS[0])
        assert read(medium.tier, ONE, KEYS[0])[0] is Outcome.CORRUPT
        assert medium.tier.present(ONE, KEYS[:1]) == (Outcome.OK, 0)


class TestMemory(TierContract):
    lasting = False

    @pytest.fixture
    def medium(self):
        tier = MemoryTier()
        return Medium(tier, MemoryTier, lambda namespace, key, _: tier.damage(namespace, key))


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
        assert write(tier, ONE, KEYS[0]) is Outcome.ERROR
        assert tier.usage().resident_bytes == 0
        (tmp_path / "away").mkdir()
        assert write(tier, ONE, KEYS[0]) is Outcome.OK
        tier.close()

    def test_another_stores_long_transaction_is_a_time_out(self, medium, tmp_path, monkeypatch):
        """A write that waits too long answers, and leaves nothing behind."""
        monkeypatch.setattr("extending.sqlite_tier.WAIT_S", 0.01)
        tier = medium.reopen()
        write(tier, ONE, KEYS[0])
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
                    assert write(tier, TWO, b"%d" % number) is Outcome.OK
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
            opened.append(RedisTier(server.url, writer="host-a", timeout_s=5.0))
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
            opened.append(SpreadTier(servers, patience_s=5.0))
            return opened[-1]

        def damage(namespace: str, key: bytes, offset: int) -> None:
            servers[opened[0].owner(key)].damage(namespace, key)

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
            assert write(tier, namespace, key) in (Outcome.OK, Outcome.FULL)
        elif step == "read":
            outcome, _, out = read(tier, namespace, key)
            assert outcome in (Outcome.OK, Outcome.MISS)
            assert outcome is Outcome.MISS or np.array_equal(out, payload(key, NBYTES))
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
            os.fstat(segment.fd).st_blocks * 512 - segment.geometry.table_bytes
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
            taken = sum(path.stat().st_blocks * 512 for path in Path(folder).glob("*.slab"))
            assert taken <= usage.resident_bytes

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
