"""Damage at random places of what lies on a disk and in Redis: never read as a chunk, but counted, and gone."""

import os
import random
import time

import pytest
import redis

from connector.stores import counted, payload, read_chunk, redis_tier, view
from e2e.servers import redis_server
from tiertune_connector.chunk import _LAYOUT, HEADER_BYTES, Origin
from tiertune_connector.counters import Counters
from tiertune_connector.slower.lane import Lane
from tiertune_connector.tiers.base import Outcome
from tiertune_connector.tiers.disk import DiskTier
from tiertune_connector.tiers.segment import PAGE

CASES, BATCH = 5000, 250
"""Of each medium; so many chunks are damaged at a time, then read."""
NAMESPACE = "a" * 32
NBYTES = 700
USED = _LAYOUT.size + 8
"""Bytes of a header and its checksum; the rest is padding: a bit that flips there does no harm."""
OWNER = Origin("host-a", b"t" * 16)


def damaged(rng: random.Random, whole: bytes) -> bytes:
    """A bit flipped, a run of bytes changed, cut short, or its end lost to zeros, as a page that was never written."""
    kind, at = rng.randrange(4), rng.randrange(len(whole))
    if kind == 0:
        return whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :]
    if kind == 1:
        run = bytes(byte ^ rng.randrange(1, 256) for byte in whole[at : at + 64])
        return whole[:at] + run + whole[at + len(run) :]
    return whole[:at] if kind == 2 else whole[:at].ljust(len(whole), b"\0")


def harmless(before: bytes, after: bytes) -> bool:
    return len(after) == len(before) and (before[:USED], before[HEADER_BYTES:]) == (after[:USED], after[HEADER_BYTES:])


def judge(tier, harm) -> None:
    """Write chunks, damage each, read each twice; ``harm(key)`` is False where it did none."""
    counters = Counters()
    lane = Lane(tier, counters, time.monotonic)
    corrupt = 0
    for start in range(0, CASES, BATCH):
        keys = [b"key-%d" % number for number in range(start, start + BATCH)]
        for key in keys:
            assert tier.write(NAMESPACE, key, view(payload(key, NBYTES)), OWNER) is Outcome.OK
        harmed = {key for key in keys if harm(key)}
        assert len(harmed) > BATCH / 2
        for key in keys:
            outcome, origin = read_chunk(lane, NAMESPACE, key, NBYTES)
            if key not in harmed:
                assert (outcome, origin) == (Outcome.OK, OWNER)
                continue
            assert outcome in (Outcome.CORRUPT, Outcome.MISS)  # nothing at all is left of some
            corrupt += outcome is Outcome.CORRUPT
            assert read_chunk(lane, NAMESPACE, key, NBYTES)[0] is Outcome.MISS, "it is dropped"
            assert tier.present(NAMESPACE, [key]) == (Outcome.OK, 0)
    assert {labels[1:]: count for labels, count in counted(counters, "tier_errors_total").items()} == {
        ("read", "corrupt"): corrupt
    }
    assert corrupt > CASES / 2
    lane.close()


def test_nothing_damaged_is_read_from_a_disk(tmp_path):
    """5,000 times: flipped, changed, cut short, lost to zeros; and the file cut off in the middle of its last chunk."""
    rng = random.Random(1)
    tier = DiskTier(tmp_path)
    tier.retune(2 * BATCH * 2 * PAGE, {})

    def harm(key: bytes) -> bool:
        pool, slab = tier.pools[NAMESPACE].pool, tier.pools[NAMESPACE].slab
        start, size = pool.get(key) * slab.stride, slab.path.stat().st_size
        with slab.path.open("r+b", buffering=0) as file:
            header, body = os.pread(file.fileno(), HEADER_BYTES, start), start + PAGE
            whole = header + os.pread(file.fileno(), NBYTES, body)
            after = damaged(rng, whole)
            if start + slab.stride >= size and len(after) < len(whole):
                file.truncate(start + len(after) if len(after) < HEADER_BYTES else body + len(after) - HEADER_BYTES)
            after = after.ljust(len(whole), b"\0")
            os.pwrite(file.fileno(), after[:HEADER_BYTES], start)
            if start + PAGE < slab.path.stat().st_size:
                os.pwrite(file.fileno(), after[HEADER_BYTES:], body)
        return not harmless(whole, after)

    judge(tier, harm)


@pytest.mark.slow
@pytest.mark.real
def test_nothing_damaged_is_read_from_redis():
    """The same 5,000 times of a real server's values."""
    rng = random.Random(2)
    with redis_server() as server, redis.Redis.from_url(server.url) as raw:
        tier = redis_tier(server.url)

        def harm(key: bytes) -> bool:
            name = b"tiertune:" + NAMESPACE.encode() + b":" + key
            whole = raw.get(name)
            after = damaged(rng, whole)
            raw.set(name, after)
            return not harmless(whole, after)

        judge(tier, harm)
        assert [name for name in raw.keys() if b"writing" in name] == []  # noqa: SIM118 (a command)
