"""Coded chunks in a real Redis: exact, never foreign, smaller on the way, and priced as such."""

import random
import time

import numpy as np
import pytest

from connector.stores import Engine, Http, chain, eventually, redis_tier, running, view
from e2e.relay import relay
from tiertune_connector import codec as codecs
from tiertune_connector.chunk import HEADER_BYTES, Origin
from tiertune_connector.codec import Codec
from tiertune_connector.counters import Counters
from tiertune_connector.slower.lane import Lane
from tiertune_connector.tiers import redis as module
from tiertune_connector.tiers.base import Outcome
from tiertune_connector.tiers.redis import RedisTier

pytestmark = pytest.mark.real
A = "a" * 32
NBYTES = 1 << 20
KEYS = chain("coded", 4)
NAMES = [b"tiertune:" + A.encode() + b":" + key for key in KEYS]
MINE = Origin("host-a")


@pytest.fixture
def opened(server, raw):
    """Makes tiers, by what they write."""
    tiers = []

    def make(writes: str, url: str = server.url) -> RedisTier:
        codec = Codec(time.monotonic, Counters())
        codec.writes = writes
        tiers.append(redis_tier(url, timeout_s=10.0, codec=codec))
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.close()


def without_the_codec(patch: pytest.MonkeyPatch) -> None:
    """As where its package is not installed."""
    patch.setattr(codecs, "_blosc", lambda: None)


def numbers(key: bytes) -> memoryview:
    """Normal numbers in bfloat16, other ones for every key."""
    made = np.random.default_rng(list(key)).standard_normal(NBYTES // 2, np.float32)
    return memoryview((made.view(np.uint32) >> 16).astype(np.uint16).tobytes())


def read(tier: RedisTier, key: bytes) -> Outcome:
    out = np.zeros(NBYTES, np.uint8)
    outcome, origin = tier.read(A, key, view(out))
    assert outcome is not Outcome.OK or (out.data == numbers(key) and origin == MINE)
    return outcome


def test_a_coded_chunk_is_smaller_and_everybody_with_the_codec_reads_it(opened, raw, monkeypatch):
    """Whatever they write themselves. Who cannot read it leaves it to the others."""
    coding, plain = opened("lz4"), opened("raw")
    assert coding.write(A, KEYS[0], numbers(KEYS[0]), MINE) is Outcome.OK
    assert plain.write(A, KEYS[1], numbers(KEYS[1]), MINE) is Outcome.OK
    small, large = map(raw.strlen, NAMES[:2])
    assert large == HEADER_BYTES + NBYTES
    assert small < 0.9 * large
    for tier in (coding, plain):
        assert [read(tier, key) for key in KEYS[:3]] == [Outcome.OK, Outcome.OK, Outcome.MISS]
    with monkeypatch.context() as patch:
        without_the_codec(patch)
        assert [read(plain, key) for key in KEYS[:2]] == [Outcome.MISS, Outcome.OK]
    assert read(coding, KEYS[0]) is Outcome.OK


def test_no_memory_of_a_chunk_is_filled_before_it_is_read(opened, monkeypatch):
    """A bytearray would be, with the GIL held: 10 ms for 32 MiB, in which the store answers nobody."""
    filled = []
    monkeypatch.setattr(module, "bytearray", lambda nbytes: filled.append(nbytes) or bytearray(nbytes), raising=False)
    tier = opened("lz4")
    assert tier.write(A, KEYS[0], numbers(KEYS[0]), MINE) is Outcome.OK
    assert read(tier, KEYS[0]) is Outcome.OK
    assert filled == [HEADER_BYTES]


def test_what_was_asked_for_beyond_a_coded_chunk_costs_no_connection(opened, raw, monkeypatch):
    """Windows are asked for before it is known that it is shorter, or cannot be read here, or is not there."""
    nbytes, data = 3 * NBYTES, bytes(3 * NBYTES)
    coding, without, out = opened("lz4"), opened("raw"), memoryview(bytearray(nbytes))
    assert coding.write(A, KEYS[0], memoryview(data), MINE) is Outcome.OK
    for tier, outcome in ((coding, Outcome.OK), (without, Outcome.MISS)):
        if tier is without:
            without_the_codec(monkeypatch)
        before = raw.info("stats")["total_connections_received"]
        for _ in range(3):
            assert [tier.read(A, key, out)[0] for key in KEYS[:2]] == [outcome, Outcome.MISS]
        assert raw.info("stats")["total_connections_received"] - before == (tier is without)


def test_a_coded_chunk_that_a_longer_one_replaced_during_a_read_is_a_miss(opened, raw):
    """Its header was read, and then windows of the other one."""
    coding, plain = opened("lz4"), opened("raw")
    name = NAMES[0]
    assert plain.write(A, KEYS[0], numbers(KEYS[0]), MINE) is Outcome.OK
    longer = raw.getdel(name)
    assert coding.write(A, KEYS[0], numbers(KEYS[0]), MINE) is Outcome.OK
    raw.config_resetstat()
    check, steps = coding._check, iter(range(2))

    def replaced(until):
        if next(steps, None) == 1:
            eventually(lambda: "cmdstat_getrange" in raw.info("commandstats"))
            raw.set(name, longer)
        check(until)

    coding._check = replaced
    assert read(coding, KEYS[0]) is Outcome.MISS
    assert raw.get(name) == longer
    coding._check = check
    assert read(coding, KEYS[0]) is Outcome.OK


def test_what_the_network_was_spared_is_counted(opened, raw):
    """Of each chunk that went or came; of one that is stored as it is, was there, or is not to be had, nothing."""
    coding, plain = opened("lz4"), opened("raw")
    for tier in (coding, coding, plain):
        tier.write(A, KEYS[0], numbers(KEYS[0]), MINE)
    plain.write(A, KEYS[1], numbers(KEYS[1]), MINE)
    outcomes = [read(tier, key) for tier in (coding, plain) for key in KEYS[:3]]
    assert outcomes == 2 * [Outcome.OK, Outcome.OK, Outcome.MISS]
    spared = HEADER_BYTES + NBYTES - raw.strlen(NAMES[0])
    told = [dict(tier._codec.counters.tables()["tier_spared_bytes_total"]) for tier in (coding, plain)]
    both = [{("remote", "read"): (spared,), ("remote", "write"): (spared,)}, {("remote", "read"): (spared,)}]
    assert told == both


def test_nothing_damaged_is_decoded_into_a_chunk(opened, raw):
    """Flipped or cut anywhere, 300 times: dropped, or the chunk that it was."""
    tier, rng = opened("lz4"), random.Random(1)
    name = NAMES[0]
    tier.write(A, KEYS[0], numbers(KEYS[0]), MINE)
    whole = raw.get(name)
    for case in range(300):
        harmed = bytearray(whole)
        if case % 3:
            harmed[rng.randrange(len(whole) if case % 2 else HEADER_BYTES)] ^= 1 << rng.randrange(8)
        else:
            del harmed[rng.randrange(1, len(whole)) :]
        raw.set(name, bytes(harmed))
        outcome = read(tier, KEYS[0])
        assert outcome in (Outcome.OK, Outcome.CORRUPT)
        assert raw.exists(name) == (outcome is Outcome.OK)
        assert outcome is Outcome.CORRUPT or harmed[162:HEADER_BYTES] != whole[162:HEADER_BYTES], "but for the padding"


def test_a_store_is_told_to_code_and_not_to(server, raw, home):
    """Live; what was written before is read all the same, and ``/v1/status`` tells what is in force."""
    with (
        running(home, remote={"url": server.url}) as process,
        Engine(home / "s.sock") as engine,
        Http(process.address) as http,
    ):

        def written(name: str) -> None:
            keys = chain(name, 3)
            assert set(engine.put(keys)) == {""}
            eventually(lambda: process.store.lanes["remote"].writers.queued() == 0)

        assert http.get("/v1/status")["tiers"]["remote"]["codec"] == "raw"
        assert http.retune(tiers__remote__codec="lz4").status_code == 200
        assert http.get("/v1/status")["tiers"]["remote"]["codec"] == "lz4"
        written("noise")
        assert http.total("codec_bytes_total", operation="encode", form="payload") > 0
        assert http.retune(tiers__remote__codec="raw").status_code == 200
        before = http.total("codec_bytes_total", operation="encode")
        written("more")
        assert http.total("codec_bytes_total", operation="encode") == before


def test_a_store_restarted_without_its_redis_starts_and_codes_no_more(server, home):
    """Nobody has to mend a file because a remote was taken away, or changed for a folder."""
    with running(home, remote={"url": server.url}) as process, Http(process.address) as http:
        assert http.retune(tiers__remote__codec="lz4").status_code == 200
    for remote in ({"remote": {"capacity": "1MiB"}}, {}):
        with running(home, **remote) as process:
            assert process.control.tuning.tiers.remote.codec == "raw"


def test_a_folder_is_not_told_to_code(home):
    """A knob that would do nothing is refused."""
    with running(home, remote={"capacity": "1MiB"}) as process, Http(process.address) as http:
        answer = http.retune(tiers__remote__codec="lz4")
        assert answer.status_code == 422
        assert "tiers.remote.codec" in answer.text


def test_the_gate_is_told_what_a_coded_fetch_costs(opened, server):
    """Behind a slow link chunks come so much sooner as they are smaller, and a probe alone tells as much.

    The clock is the link's: nothing takes time but the bytes that come over it.
    """
    speeds = {}
    with relay(server.port) as link:
        for writes in ("raw", "lz4"):
            tier = opened(writes, f"redis://127.0.0.1:{link.port}/0")
            lane = Lane(tier, Counters(), lambda: link.answered / 5e6, codec=tier._codec)
            keys = chain(f"priced {writes}", 4)
            for key in keys:
                assert lane.tier.write(A, key, numbers(key), MINE) is Outcome.OK
            assert [lane.probe(NBYTES) for _ in range(5)] == 5 * [Outcome.OK]
            probed = lane.transit.estimate().bytes_per_s
            for key in keys:
                lane.transit.asked(NBYTES)
                lane.transit.ended(NBYTES, lane.read(A, key, memoryview(bytearray(NBYTES)))[0])
            speeds[writes] = probed, lane.transit.estimate().bytes_per_s
            lane.close()
    (probed, fetched), (probed_coded, fetched_coded) = speeds["raw"], speeds["lz4"]
    assert probed_coded > 1.05 * probed
    assert fetched_coded > 1.05 * fetched, speeds
