"""The agent observes a real vLLM with its own tiers: tokens by tier are vLLM's, and a dead disk is told."""

import shutil

import numpy as np
import pytest

from e2e.observed import observed
from e2e.servers import wait_until
from e2e.vllm_engines import of_engines
from e2e.vllm_model import VOCABULARY, write_model
from e2e.vllm_own import CHUNK_BYTES, CHUNK_TOKENS, own_server

pytestmark = of_engines(420)

TOKENS, PROMPTS = 1024, 8
"""Twice what the host's memory holds, and more than the engine's own cache."""
HITS, MOVED = "tier_lookup_tokens_total", "tier_transfer_bytes_total"
WRITTEN, FAILED = "vllm:kv_offload_tiering_write_bytes_total", "vllm:kv_offload_tiering_cascade_job_failures_total"


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    with own_server(write_model(folder / "model"), folder) as made:
        yield made


def prompts(seed, count, tokens):
    """Different ones, of token ids."""
    drawn = np.random.default_rng(seed).integers(10, VOCABULARY, (count, tokens))
    return [[int(token) for token in prompt] for prompt in drawn]


def test_tokens_and_bytes_by_tier_are_those_of_the_engine(own, tmp_path):
    """Prompts that come again are found on the disk, for the host's memory is too small for all of them."""
    with observed(tmp_path, "engine-a", own.metrics, "vllm") as one:
        asked = prompts(1, PROMPTS, TOKENS)
        own.generate(asked)
        chunks = PROMPTS * TOKENS // CHUNK_TOKENS
        wait_until(lambda: own.metric(WRITTEN) == chunks * CHUNK_BYTES, "all chunks are on the disk", 60)
        one.window()
        own.generate([[*prompt, 11, 12, 13] for prompt in asked])
        one.window()
        own.generate([[*asked[-1], 14]])
        one.window()
        found = {tier: one.counted(HITS, tier, result="hit") for tier in ("gpu", "staging", "disk")}
        every = one.counted("prompt_tokens_total")
        assert every == sum(len(prompt) for prompt in asked) * 2 + PROMPTS * 3 + TOKENS + 1
        assert found["disk"] == own.metric("vllm:prompt_tokens_cached_by_source_total", 'source="disk"')
        assert found["disk"] >= (PROMPTS - 1) * TOKENS
        assert found["gpu"] >= TOKENS - CHUNK_TOKENS
        assert one.counted(HITS, "disk", result="miss") == every - sum(found.values())
        assert one.counted(MOVED, "disk", operation="write") == chunks * CHUNK_BYTES
        assert one.counted(MOVED, "disk", operation="read") == found["disk"] * CHUNK_BYTES / CHUNK_TOKENS
        assert one.counted(MOVED, "staging", operation="read") > 0
        assert one.counted("tier_resident_bytes", "disk") is None
        assert one.counted("saved_seconds_total", "disk") is None
        assert one.incidents() == {}
        assert "observed: vllm" in one.get("/").text


def test_a_disk_that_takes_nothing_is_told(own, tmp_path):
    """A file where its folder was: every store fails, and the agent says so by name."""
    with observed(tmp_path, "engine-a", own.metrics, "vllm") as one:
        own.generate(prompts(2, 1, CHUNK_TOKENS + 1))
        one.window()
        shutil.rmtree(own.folder)
        own.folder.write_text("")
        for seed in (3, 4):
            before = own.metric(FAILED)
            own.generate(prompts(seed, 12, CHUNK_TOKENS + 1))
            wait_until(lambda before=before: own.metric(FAILED) >= before + 11, "stores have failed", 60)
            one.window()
        assert one.incidents()["tier_dead"].startswith("disk (1:fs) is dead")
