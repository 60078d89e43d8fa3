"""The benchmark of a fleet's hit ratios agrees with what must be."""

import numpy as np
import pytest

from benchmarks.fleet_hit_rate import expected, hit_ratio, rows
from replay.files import columns, write_trace
from tiertune_agent.replay.contents import stick
from tiertune_agent.replay.traces import builtin_trace, load_trace


@pytest.fixture(scope="module")
def trace():
    return builtin_trace("lmcache_agents")


@pytest.mark.parametrize("engines", [1, 4, 32])
def test_caches_that_keep_everything_hit_what_is_expected(trace, engines):
    """Random routing, memory for all: within a point of the closed form by how often each block is asked."""
    spread = [np.random.default_rng(seed).integers(0, engines, len(trace)).tolist() for seed in range(5)]
    hits = np.mean([hit_ratio(trace, placed, engines, trace.unique) for placed in spread])
    assert hits == pytest.approx(expected(trace, engines), abs=0.01)


def test_what_is_asked_twice_is_hit_by_one_nth(tmp_path):
    """A thousand prompts that come twice: half of all, divided by the number of caches."""
    trace = load_trace(write_trace(tmp_path / "twice.parquet", columns([[block] for block in [*range(1000)] * 2])))
    assert expected(trace, 1) == pytest.approx(0.5)
    assert expected(trace, 8) == pytest.approx(0.5 / 8)
    placed = np.random.default_rng(1).integers(0, 8, len(trace)).tolist()
    assert hit_ratio(trace, placed, 8, 1000) == pytest.approx(0.5 / 8, abs=0.02)


def test_sessions_stay(trace):
    """Sticky routing sends every request of a session to one engine, and uses them all."""
    placed = stick(trace, 4)
    assert len(set(zip(trace.session.tolist(), placed, strict=True))) == len(set(trace.session.tolist()))
    assert set(placed) == {0, 1, 2, 3}


def test_sharing_never_hits_less_than_it_would_alone(tmp_path):
    """One row for each memory and size of the fleet; the shared cache grows with the fleet."""
    trace = load_trace(write_trace(tmp_path / "t.parquet", columns()))
    told = list(rows(trace, [0]))
    assert len(told) == 18
    assert all(row["shared"] >= row["one_nth"] for row in told)
