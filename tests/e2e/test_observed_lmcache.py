"""The agent observes a real LMCache server: its tiers' hits are the client's, and a dead L2 is told."""

import shutil

import pytest

from e2e.lmcache_server import lmcache_server, needs_lmcache
from e2e.observed import observed
from e2e.servers import wait_until

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(300), needs_lmcache]

CHUNKS, TOKENS = 4, 1024
"""Of a prompt."""
TRIED, STORED = (
    "lmcache_mp_l2_store_submitted_objects_chunks_total",
    "lmcache_mp_l2_store_completed_objects_chunks_total",
)
FINISHED = "lmcache_mp_l2_store_completed_requests_total"
HITS = "tier_lookup_tokens_total"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with lmcache_server(tmp_path_factory.mktemp("lmcache")) as made:
        yield made


def test_hits_are_those_that_the_client_saw(server, tmp_path):
    """From L1, and from L2 after L1 was emptied; chunks that were stored; nothing that it does not measure.

    What was copied to L2 counts as read of L1, before anybody has asked for it.
    """
    prompts = range(6)
    with observed(tmp_path, "cache-a", server.metrics, "lmcache_mp") as one:
        assert all(server.store(prompts))
        wait_until(lambda: server.metric(STORED) == 6 * CHUNKS, "L2 has all chunks")
        wait_until(lambda: server.metric("lmcache_mp_l1_read_chunks_total") == 6 * CHUNKS, "all copies are counted")
        one.window()
        warm = server.load(prompts)
        one.window()
        server.server.clear()
        cold = server.load(prompts)
        one.window()
        assert warm == cold == [TOKENS] * 6
        wait_until(lambda: server.metric("lmcache_mp_lookups_requests_total") == 18, "all lookups are counted")
        one.window()
        assert one.counted(HITS, "dram", result="hit") == sum(warm)
        assert one.counted(HITS, "disk", result="hit") == sum(cold)
        assert one.counted(HITS, "disk", result="miss") == 6 * TOKENS
        assert one.counted("observed_chunks_total", "disk", operation="write") == 6 * CHUNKS
        assert one.counted("observed_chunks_total", "dram", operation="read") == 6 * CHUNKS
        assert one.counted("saved_seconds_total", "disk") is None
        assert one.counted("tier_transfer_bytes_total", "disk") is None
        assert one.incidents() == {}
        page = one.get("/").text
        assert "Engines are observed; there is no store of TierTune." in page
        assert "bytes moved: only chunks are counted" in page


def test_a_dead_l2_is_told(server, tmp_path):
    """Its folder is gone and a file is in its place: LMCache counts the stores as completed, the agent does not."""
    with observed(tmp_path, "cache-a", server.metrics, "lmcache_mp") as one:
        before = server.metric(STORED)
        assert all(server.store([100]))
        wait_until(lambda: server.metric(STORED) == before + CHUNKS, "L2 has all chunks")
        one.window()
        shutil.rmtree(server.l2)
        server.l2.write_text("")
        for first in (101, 104):
            done = server.metric(FINISHED)
            assert all(server.store(range(first, first + 3)))
            wait_until(lambda done=done: server.metric(FINISHED) == done + 3, "the stores have ended")
            one.window()
        told = one.incidents()["tier_dead"]
        assert told.startswith("disk (L2: fs) is dead: the last 24 chunks or jobs")
        assert "tier dead" in one.get("/").text
        server.l2.unlink()
        server.l2.mkdir()
        assert all(server.store(range(110, 112)))
        wait_until(lambda: server.metric(TRIED) - server.metric(STORED) == 24, "L2 takes chunks again")
        one.window()
        assert one.incidents() == {}


def test_a_server_that_ends_is_told(server, tmp_path):
    """Silent, not idle: no window is made up."""
    with observed(tmp_path, "cache-a", server.metrics, "lmcache_mp") as one:
        one.window()
        server.server.process.terminate()
        server.server.process.wait(30)
        one.window()
        assert set(one.incidents()) == {"store_unreachable"}
        assert len(one.agent.history.measured.windows("cache-a", tier="dram")) == 1
