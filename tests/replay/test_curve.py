"""Hit ratios of one cache: exact, and the reference's."""

import time
from itertools import count, islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.tuning.curves import accuracy, exact_curve
from benchmarks.tuning.eviction import candidate_regret, exact_candidates
from connector.stores import at_best
from replay.files import columns, external, write_trace
from tiertune_agent.replay.curve import curve_document, opt_hits, pool_hits, sampled
from tiertune_agent.replay.traces import Trace, builtin_trace, load_trace

pytestmark = pytest.mark.slow

SIZES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
SHIPPED_ROWS = {
    "lru": (5.52, 11.78, 36.55, 62.75, 89.84, 89.94),
    "arc": (2.24, 6.62, 36.15, 60.83, 89.35, 89.79),
    "s3fifo": (1.61, 3.64, 28.16, 52.94, 87.87, 89.91),
    "opt": (9.00, 18.69, 45.73, 70.97, 89.94, 89.94),
}
ROWS = {
    ("mooncake_conv", "lru"): (4.19, 4.22, 5.25, 12.57, 27.89, 35.77),
    ("mooncake_conv", "arc"): (4.19, 4.56, 6.49, 13.30, 28.43, 34.93),
    ("mooncake_conv", "s3fifo"): (4.49, 4.79, 7.50, 14.51, 24.48, 35.32),
    ("mooncake_conv", "fifo"): (4.19, 4.22, 5.13, 11.93, 24.85, 33.74),
    ("shift_mix_dev", "s3fifo"): (11.98, 26.91, 51.43, 65.92, 70.36, 74.98),
    ("shift_mix_dev", "fifo"): (5.58, 16.44, 49.08, 65.47, 72.82, 73.94),
    ("weka_cc_a", "s3fifo"): (None, 24.25, 59.09, 89.08, None, None),
    ("weka_cc_a", "fifo"): (None, 18.21, 57.47, 87.04, None, None),
    ("shift_mix_dev", "lru"): (6.02, 17.74, 54.52, 68.14, 73.67, 73.94),
    ("shift_mix_dev", "arc"): (13.37, 26.12, 55.20, 67.69, 72.61, 74.91),
    ("weka_cc_a", "lru"): (None, 18.75, 62.31, 92.52, None, None),
    ("weka_cc_a", "arc"): (None, 27.53, 63.62, 91.45, None, None),
}


def trace_of(chains):
    """A trace in memory, without the checks of a file."""
    lengths = [len(chain) for chain in chains]
    zeros = np.zeros(len(chains), dtype=np.int64)
    return Trace(
        name="made",
        block_tokens=16,
        t=zeros.astype(float),
        input_len=zeros + 1,
        session=zeros,
        type=["made"] * len(chains),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        ids=np.array([block for chain in chains for block in chain], dtype=np.int64),
    )


def percent(trace, algorithm, sizes=SIZES):
    return [100 * point["hit_ratio"] for point in curve_document(trace, algorithm, sizes, time.perf_counter)["points"]]


@pytest.mark.parametrize("algorithm", SHIPPED_ROWS)
def test_the_shipped_trace_has_the_references_rates(algorithm):
    """Within 0.1 percentage points at all six sizes."""
    assert percent(builtin_trace("lmcache_agents"), algorithm) == pytest.approx(SHIPPED_ROWS[algorithm], abs=0.1)


@pytest.fixture(scope="module")
def known():
    return {}


@pytest.fixture
def hits_once(monkeypatch, known):
    """Exact hits of a trace are counted once for each algorithm and size, whoever asks: of large ones it takes long."""

    def once(trace, algorithm, chunks):
        if (trace.name, algorithm, chunks) not in known:
            known[trace.name, algorithm, chunks] = pool_hits(trace, algorithm, chunks)
        return known[trace.name, algorithm, chunks]

    for module in ("tiertune_agent.replay.curve", "benchmarks.tuning.eviction"):
        monkeypatch.setattr(f"{module}.pool_hits", once)


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("hits_once")
@pytest.mark.parametrize(("name", "algorithm"), ROWS)
def test_the_large_traces_have_the_references_rates(name, algorithm):
    """Within 0.1 percentage points at the sizes of the table."""
    rates = {size: rate for size, rate in zip(SIZES, ROWS[name, algorithm], strict=True) if rate is not None}
    measured = percent(load_trace(external(name)), algorithm, list(rates))
    assert measured == pytest.approx(list(rates.values()), abs=0.1)


prefix_trees = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=60)


def chains_of(paths):
    names: dict[tuple[int, ...], int] = {}
    return [[names.setdefault(tuple(path[: end + 1]), len(names)) for end in range(len(path))] for path in paths]


@given(paths=prefix_trees, chunks=st.integers(1, 30))
def test_lru_equals_stack_distances(paths, chunks):
    """A block hits exactly if fewer than ``chunks`` others were used since, counted from the tails."""
    chains = chains_of(paths)
    stack: list[int] = []
    hits = 0
    for chain in chains:
        recent = set(stack[:chunks])
        for block in chain:
            if block not in recent:
                break
            hits += 1
        for block in reversed(chain):
            if block in stack:
                stack.remove(block)
            stack.insert(0, block)
    assert pool_hits(trace_of(chains), "lru", chunks) == hits


@given(paths=prefix_trees, chunks=st.integers(6, 30), algorithm=st.sampled_from(["lru", "arc", "s3fifo"]))
def test_opt_is_not_beaten(paths, chunks, algorithm):
    """No algorithm that must keep what it reads has more hits than the optimum."""
    trace = trace_of(chains_of(paths))
    assert opt_hits(trace, chunks) >= pool_hits(trace, algorithm, chunks)


def test_a_hit_behind_a_gap_does_not_count(tmp_path):
    """Only the contiguous prefix counts, as an engine can use nothing else."""
    chains = [[0, 1, 2], [3, 4, 5, 6, 7, 8, 9], [0, 1, 2]]
    trace = load_trace(write_trace(tmp_path / "x.parquet", columns(chains)))
    assert pool_hits(trace, "lru", 9) == 2, "of the first prompt its tail left first"
    assert pool_hits(trace, "lru", 10) == 3


def test_the_document_is_as_promised():
    """Shape and figures of --json; no cache is smaller than 8 chunks."""
    ticks = iter([10.0, 12.0])
    document = curve_document(builtin_trace("lmcache_agents"), "lru", [0.0001, 0.01], lambda: next(ticks))
    assert {key: document[key] for key in ("trace", "algorithm", "sampled", "accesses", "unique", "seconds")} == {
        "trace": "lmcache_agents",
        "algorithm": "lru",
        "sampled": None,
        "accesses": 61278,
        "unique": 6162,
        "seconds": 2.0,
    }
    assert [(point["size"], point["chunks"]) for point in document["points"]] == [(0.0001, 8), (0.01, 61)]
    assert document["us_per_access"] == pytest.approx(1e6 * 2.0 / 61278 / 2)


@pytest.mark.parametrize("algorithm", ["lru", "arc", "s3fifo", "fifo"])
def test_a_small_trace_is_not_sampled(algorithm):
    """Fewer than 100,000 blocks are simulated whole, and the document tells so."""
    trace, sizes = builtin_trace("lmcache_agents"), [0.003, 0.03, 1.0]
    clock = iter([0.0, 1.0]).__next__
    document = curve_document(trace, algorithm, sizes, clock, rate=0.01, seed=4)
    assert [100 * point["hit_ratio"] for point in document["points"]] == percent(trace, algorithm, sizes)
    assert (document["sampled"], document["rates"], document["seed"]) == (0.01, [1.0] * 3, 4)
    passes = 1 if algorithm == "lru" else 3
    assert document["us_per_access"] == pytest.approx(1e6 / 61278 / passes)


def test_a_cache_too_small_for_the_rate_is_sampled_at_a_higher_one(monkeypatch):
    """No size is answered from less than one sampled block, nor by a miniature of a few, however large it is."""
    monkeypatch.setattr("tiertune_agent.replay.curve.EXACT_BELOW", 0)
    trace = builtin_trace("shift_mix_slice")
    chunks = [8, 40, 400, 4000]
    assert sampled(trace, "lru", chunks, 0.01, 1).rates == [1.0, 1.0, 0.01, 0.01]
    assert sampled(trace, "arc", chunks, 0.01, 1).rates == [1.0, 0.4, 0.04, 0.01]
    assert sampled(trace, "arc", chunks[:1], 0.01, 1).hit_ratios == [pool_hits(trace, "arc", 8) / trace.accesses]
    everything = sampled(trace, "arc", [20 * trace.unique], 1e-9, 1)
    assert everything.rates == [pytest.approx(16 / trace.unique)]
    assert 0 < everything.hit_ratios[0] < 1


def test_the_rate_asked_for_is_sampled_however_many_blocks_that_is(monkeypatch):
    """A rate is not lowered for what a store's curve may follow at once; the tail of a loop hits only beyond it."""
    monkeypatch.setattr("tiertune_agent.replay.curve.EXACT_BELOW", 0)
    prompts = [list(range(first, first + 100)) for first in range(0, 20_000, 100)]
    found = sampled(trace_of([*prompts, *prompts]), "lru", [19_000, 20_000], 0.9, 1)
    assert (found.rates, found.hit_ratios[0]) == ([0.9, 0.9], 0.0)
    assert found.hit_ratios[1] > 0


@pytest.mark.parametrize("algorithm", ["lru", "arc"])
def test_a_trace_of_which_nothing_that_came_again_was_sampled_has_a_curve(algorithm, monkeypatch):
    """Few blocks come twice, none of them sampled: nothing is seen to hit, and each size has its point."""
    monkeypatch.setattr("tiertune_agent.replay.curve.EXACT_BELOW", 0)
    trace = trace_of([*([block] for block in range(6_000)), [0], [1], [2]])
    assert sampled(trace, algorithm, [1_000, 2_000], 0.01, 1).hit_ratios == [0.0, 0.0]


def test_a_tenth_of_the_blocks_tells_the_curve(monkeypatch):
    """Within 1.5 points on a shipped trace, mean over seeds; the whole of it without error."""
    monkeypatch.setattr("tiertune_agent.replay.curve.EXACT_BELOW", 0)
    trace = builtin_trace("shift_mix_slice")
    exact = exact_curve(trace)
    assert np.mean([accuracy(trace, 0.1, seed, exact) for seed in range(2)]) < 1.5
    assert accuracy(trace, 1.0, 0, exact) == 0


def test_long_system_prompts_in_small_blocks_tell_the_curve(tmp_path):
    """They have more blocks than a store's hot set, and seeds may sample none of them: the curve knows them all."""
    rng, fresh = np.random.default_rng(3), count()
    prompts = [list(islice(fresh, 60)) for _ in range(6)]
    chains = [[*prompts[min(rng.geometric(0.4), 6) - 1], *islice(fresh, 8)] for _ in range(16_000)]
    trace = load_trace(write_trace(tmp_path / "t.parquet", columns(chains)))
    exact = exact_curve(trace)
    assert max(accuracy(trace, 0.01, seed, exact) for seed in (2, 4)) < 1.5


@pytest.mark.parametrize("size", [pytest.param(0.001, marks=pytest.mark.slow), 0.01, 0.1])
def test_ghosts_pick_a_good_algorithm(size):
    """What the pick loses against the best is under half a point on a shipped trace."""
    trace = builtin_trace("shift_mix_slice")
    exact = exact_candidates(trace, size)
    assert np.mean([candidate_regret(trace, size, seed, exact) for seed in range(2)]) < 0.5


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["mooncake_conv", "weka_cc_a", "shift_mix_dev"])
def test_one_block_in_a_hundred_tells_the_large_curves(name):
    """Mean absolute error of at most 1.5 points over 64 sizes, mean over five seeds."""
    trace = load_trace(external(name))
    exact = exact_curve(trace)
    assert np.mean([accuracy(trace, 0.01, seed, exact) for seed in range(5)]) < 1.5


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("hits_once")
@pytest.mark.parametrize(
    ("name", "sizes"), [("mooncake_conv", SIZES), ("weka_cc_a", (0.003, 0.03)), ("shift_mix_dev", (0.001, 0.03, 0.3))]
)
def test_ghosts_pick_the_best_algorithm_of_the_large_traces(name, sizes):
    """Mean regret of at most 0.1 points over sizes from 0.1 to 30 %, on the longer traces some of them."""
    trace = load_trace(external(name))
    assert np.mean([candidate_regret(trace, size, 1, exact_candidates(trace, size)) for size in sizes]) < 0.1


def test_a_million_accesses_take_less_than_five_seconds():
    """At most 5 µs of processor time per access, LRU, exact, one size."""
    trace = builtin_trace("shift_mix_slice")
    assert at_best(lambda: curve_document(trace, "lru", [0.03], time.process_time)["us_per_access"], 5.0, attempts=3)
