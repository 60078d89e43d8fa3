"""Two real vLLM engines share through one real store."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from e2e.servers import wait_until
from e2e.vllm_engines import CHUNK_TOKENS, engine, needs_engine, store, through_store
from e2e.vllm_model import KV_BYTES_PER_TOKEN, VOCABULARY, write_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600), needs_engine]

PREFIX_TOKENS = 1024
CHUNK_BYTES = CHUNK_TOKENS * KV_BYTES_PER_TOKEN
PREFIX_HITS = "vllm:external_prefix_cache_hits"
REGIONS = Path("/dev/shm")


def prompts(count: int, *, seed: int) -> list[list[int]]:
    """A common prefix of whole chunks, then 100 tokens each."""
    random = np.random.default_rng(seed)
    prefix, *tails = (random.integers(10, VOCABULARY, n).tolist() for n in [PREFIX_TOKENS, *[100] * count])
    return [prefix + tail for tail in tails]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short enough for a unix socket."""
    with tempfile.TemporaryDirectory(prefix="tiertune-") as path:
        yield Path(path)


def test_the_second_engine_gets_the_first_ones_prefix_through_the_store(folder):
    """Same tokens as without any cache, external hits by the engine's and the store's count; and none once it has died.

    The first engine's core is a process of its own, the second's is not. No process and no region of staging is left.
    """
    model = write_model(folder / "model")
    shared, later = prompts(3, seed=1), prompts(2, seed=2)
    ids = [f"{folder.name}-{number}" for number in (1, 2)]
    with ExitStack() as stack:
        home = stack.enter_context(store(folder))
        reference = stack.enter_context(engine(model, folder / "reference.log", caching=False))
        transfers = [through_store(home.socket, name) for name in ids]
        first = stack.enter_context(engine(model, folder / "first.log", transfer=transfers[0], processes=True))
        second = stack.enter_context(engine(model, folder / "second.log", transfer=transfers[1]))
        for each in (reference, first, second):
            each.wait_ready()
        assert regions(ids) == [], "a crash could leave the region of staging"
        expected = reference.generate([*shared, *later]).tokens

        alone = first.generate(shared)
        assert alone.tokens == expected[:3]
        assert alone.counters[PREFIX_HITS] == 0
        chunks = PREFIX_TOKENS // CHUNK_TOKENS + len(shared)
        wait_until(lambda: resident(home) >= chunks * CHUNK_BYTES, "the store holds the first engine's chunks")

        helped = second.generate(shared)
        assert helped.tokens == expected[:3]
        assert helped.counters[PREFIX_HITS] >= chunks * CHUNK_TOKENS
        assert hits(home, "dram", "same_host") >= chunks * CHUNK_TOKENS
        assert hits(home, "dram", "self") == 0

        home.process.kill()
        home.process.wait()
        orphaned = second.generate([*shared, *later], reset=True)
        assert orphaned.tokens == expected
        assert orphaned.counters[PREFIX_HITS] == helped.counters[PREFIX_HITS]

        engines = (reference, first, second)
        assert [each.end() for each in engines] == [0, 0, 0]
        wait_until(lambda: not any(each.processes_left() for each in engines), "no process of an engine is left")
    assert regions(ids) == []


def hits(home, tier: str, origin: str) -> float:
    rows = home.counters("tier_lookup_tokens_total")
    return sum(value for labels, value in rows.items() if labels[:3] == (tier, "hit", origin))


def resident(home) -> float:
    return sum(value for labels, value in home.counters("tier_resident_bytes").items() if labels[0] == "dram")


def regions(engines: list[str]) -> list[Path]:
    return [path for name in engines for path in REGIONS.glob(f"vllm_offload_*{name}*")]
