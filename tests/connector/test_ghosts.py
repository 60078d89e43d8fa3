"""Ghosts of a real store's pools: what they say of the pool's own algorithm is what the pool does."""

from unittest.mock import Mock

import numpy as np
import pytest

from connector.stores import CHUNK_BYTES, CHUNK_TOKENS, NAMESPACE, STRIDE, Engine, chain, eventually, pool, running
from tiertune_connector.protocol.messages import Report, Side, TierReport
from tiertune_connector.sampling.observer import Ghosts, Room
from tiertune_connector.whatif.sampler import hashes

pytestmark = pytest.mark.slow

DIGEST = NAMESPACE.digest
CHUNKS = 64


def prompts(count, seed=0):
    """Prompts of up to ten chunks that share their heads, some far more often than others."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        who = min(int(rng.zipf(1.3)), 60)
        yield chain(f"conversation {who}", 2 + int(rng.integers(0, 8)))


def serve(engine, keys, request):
    """As an engine does: look up, recompute what is missing, offer it."""
    found = len(engine.find(keys, request))
    engine.put(keys[found:], request)


def whatif(http, algorithm, chunks=CHUNKS):
    """Tokens that the ghost hit, and missed."""
    labels = {"algorithm": algorithm, "capacity_bytes": str(chunks * STRIDE), "namespace": DIGEST, "model": "llama"}
    return [http.total("whatif_tokens_total", result=result, **labels) for result in ("hit", "miss")]


@pytest.fixture(params=["lru", "arc", "s3fifo"])
def algorithm(request):
    return request.param


@pytest.fixture
def store(home, algorithm):
    with running(home, eviction=algorithm) as process:
        yield process


def test_the_ghost_of_the_pools_own_algorithm_hits_what_the_pool_hits(store, http, algorithm):
    """Over a trace of lookups, to within 2 % of the tokens; all that was looked up is hit or missed."""
    with Engine(store) as engine:
        eventually(lambda: pool(store).provisioned == CHUNKS)
        for index, keys in enumerate(prompts(1200)):
            serve(engine, keys, f"r{index}")
    hit, missed = whatif(http, algorithm)
    asked = http.total("prompt_tokens_total")
    assert hit + missed == asked
    really = http.total("tier_lookup_tokens_total", tier="dram", result="hit")
    assert 0.3 * asked < really < 0.9 * asked
    assert hit == pytest.approx(really, abs=0.02 * asked)


def test_the_ghost_of_a_model_with_two_groups_of_layers_hits_what_the_pool_hits(store, http, algorithm):
    """The other group's chunks of the same prompts take half of the pool."""
    with Engine(store) as engine:
        eventually(lambda: pool(store).provisioned == CHUNKS)
        for index, keys in enumerate(prompts(1200)):
            request, others = f"r{index}", [key[::-1] for key in keys]
            asked = {"prompt_tokens": len(keys) * CHUNK_TOKENS, "sides": [Side(others, CHUNK_TOKENS, 0)]}
            found = len(engine.client.lookup(request, keys, **asked).result(10).tiers)
            engine.put(keys[found:], request)
            engine.put(others[found:], request)
    hit, missed = whatif(http, algorithm)
    really = http.total("tier_lookup_tokens_total", tier="dram", result="hit")
    assert hit == pytest.approx(really, abs=0.05 * (hit + missed))


@pytest.mark.parametrize("algorithm", ["lru"])
def test_a_prompt_of_a_model_with_two_groups_of_layers_finds_the_bytes_of_both(store, http):
    """What a fetch of its chunks moves; a group with a window adds hardly any."""
    found = TierReport("remote", 6, 6 * CHUNK_TOKENS, 0, "off", None, None, None, "skipped")
    whole, windowed = Side([b"o" * 32] * 6, CHUNK_TOKENS, 0), Side([b"w" * 32], CHUNK_TOKENS, 1)
    with Engine(store) as engine:
        for sides in ([], [whole, windowed]):
            engine.client.lookup("r", chain("k", 6), prompt_tokens=6 * CHUNK_TOKENS, sides=sides).result(10)
            engine.client.tell(Report([found]))
        eventually(lambda: http.total("gate_candidate_requests_total") == 2)
    assert http.total("gate_candidate_bytes_total") == (6 + 2 * 6) * CHUNK_BYTES


class TestMetrics:
    @pytest.fixture
    def algorithm(self):
        return "lru"

    def test_all_candidates_are_told_and_at_most_16_sizes(self, store, http):
        """The pool's own size for each algorithm, other sizes for a curve."""
        with Engine(store) as engine:
            for index, keys in enumerate(prompts(50)):
                serve(engine, keys, f"r{index}")
        rows = http.get("/v1/counters")["metrics"]["whatif_tokens_total"]["rows"]
        assert {row[0] for row in rows if row[1] == str(CHUNKS * STRIDE)} >= {"lru", "arc", "s3fifo"}
        assert 4 < len({row[1] for row in rows}) <= 16
        assert {tuple(row[2:5]) for row in rows} == {("hit", DIGEST, "llama"), ("miss", DIGEST, "llama")}
        assert "tiertune_whatif_tokens_total{" in http.text("/metrics")

    def test_a_pool_of_another_size_has_ghosts_of_that_size(self, store, http):
        """From the change on; what the old size counted does not count for the new one."""
        with Engine(store) as engine:
            for index, keys in enumerate(prompts(100)):
                serve(engine, keys, f"r{index}")
            http.get("/v1/counters")
            assert http.retune(tiers__dram__capacity_bytes=24 * STRIDE).status_code == 200
            before = sum(whatif(http, "arc", 24))
            more = list(prompts(100, seed=1))
            for index, keys in enumerate(more):
                serve(engine, keys, f"s{index}")
        assert before == 0
        assert sum(whatif(http, "arc", 24)) == sum(map(len, more)) * CHUNK_TOKENS

    def test_a_store_without_dram_has_ghosts_that_miss(self, store, http):
        """Capacity zero is legal: nothing fails, and its ghosts hit nothing."""
        assert http.retune(tiers__dram__capacity_bytes=0).status_code == 200
        with Engine(store) as engine:
            for index, keys in enumerate(prompts(20)):
                serve(engine, keys, f"r{index}")
        assert whatif(http, "lru", 0)[0] == 0
        assert http.total("internal_errors_total") == 0


def test_a_counter_never_falls():
    """Estimates may; what is told of them does not."""
    room = Room(2000, STRIDE)
    ghosts, before = Ghosts(room), {}
    for keys in prompts(400):
        ghosts.requests(room, [keys], hashes(keys, 0))
        now = {row[1]: row[2] for row in ghosts.rows(DIGEST, "llama", CHUNK_TOKENS)}
        assert all(now[labels] >= value for labels, value in before.items())
        before = now
    assert max(before.values()) > 0


def test_a_counter_does_not_fall_after_one_that_could_not_be_told(monkeypatch):
    """What failed is told at the next scrape, from where it was: estimates that fell meanwhile are not shown."""
    room = Room(2000, STRIDE)
    ghosts, counted = Ghosts(room), {("lru", 2000): (10.0, 20.0)}
    monkeypatch.setattr(ghosts._ghosts, "counts", lambda: counted)
    before = list(ghosts.rows(DIGEST, "llama", 1))
    with monkeypatch.context() as failing:
        failing.setattr(ghosts._ghosts, "counts", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            list(ghosts.rows(DIGEST, "llama", 1))
    counted["lru", 2000] = 9.0, 20.0
    after = list(ghosts.rows(DIGEST, "llama", 1))
    assert [value for *_, value in before] == [10.0, 10.0]
    assert [value for *_, value in after] == [10.0, 11.0]


def test_a_pool_that_comes_to_a_size_of_the_curve_counts_on():
    """All that is looked up from then on is hit or missed there by every algorithm, LRU as well."""
    room = Room(100, STRIDE)
    ghosts = Ghosts(room)

    def asked(algorithm):
        rows = ghosts.rows(DIGEST, "llama", 1)
        return sum(value for _, labels, value in rows if labels[:2] == (algorithm, str(128 * STRIDE)))

    def play(seed):
        for keys in prompts(200, seed):
            ghosts.requests(room, [keys], hashes(keys, 0))

    play(0)
    before = asked("lru")
    assert before > 0
    room = Room(128, STRIDE)
    play(1)
    chunks = sum(map(len, prompts(200, 1)))
    assert asked("arc") == pytest.approx(chunks)
    assert asked("lru") - before == pytest.approx(chunks)
