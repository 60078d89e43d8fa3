"""Which sizes are simulated, and what requests pay in them."""

from datetime import timedelta

import pytest

from agent.fakes import START
from tiertune_agent.records import Snapshot, Window
from tiertune_agent.shapes import Grid, grid, present, remote_bytes
from tiertune_agent.terms import Known
from tiertune_connector.whatif.chain import Shape

GIB = 1 << 30
POOL = {"chunk_tokens": 16, "chunk_bytes": 1000, "prefill": None}


def snapshot(store="a", *, dram=GIB, disk=0, remote=None, windows=(), pool=None, margin=1.1):
    tuning = {
        "tiers": {"dram": {"capacity_bytes": dram}, "disk": {"capacity_bytes": disk}, "remote": {"margin": margin}}
    }
    status = {"tiers": {"remote": remote or {"health": "absent"}}, "pools": {"n": pool or POOL}}
    return Snapshot(store, f"http://{store}", "b", "1", START, status, tuning, {}, tuple(windows))


def window(tier, **values):
    return Window("a", "", "", tier, START, 15.0, values)


# -- shapes


def test_the_present_shape_is_that_of_the_median_host():
    """One host that is larger does not stand for all; the remote is one."""
    redis = {"health": "ok", "capacity_bytes": 5 * GIB, "resident_bytes": 1}
    fleet = [snapshot(dram=size * GIB, disk=GIB, remote=redis) for size in (1, 1, 9)]
    assert present(fleet) == Shape(GIB, GIB, 5 * GIB)


def test_a_remote_without_a_bound_has_a_size_that_stands_still():
    """At least what it holds and four times the local tiers, as a power of two; none where there is no remote."""
    assert remote_bytes([snapshot()]) == 0
    told = [remote_bytes([snapshot(remote={"health": "ok", "resident_bytes": held})]) for held in (0, 100, 2 * GIB)]
    assert told == [8 * GIB] * 3
    assert remote_bytes([snapshot(remote={"health": "dead"})]) == 8 * GIB


def test_a_grid_varies_one_tier_at_a_time():
    """Present, none, and from an eighth to four times, of each local tier that there is; and no remote."""
    now = Shape(8 * GIB, 16 * GIB, 32 * GIB)
    shapes = grid(now, ("dram", "disk"))
    assert len(shapes) == len(set(shapes)) == 7 + 6 + 1
    assert {shape.dram // GIB for shape in shapes if (shape.disk, shape.remote) == (now.disk, now.remote)} == {
        0, 1, 2, 4, 8, 16, 32,
    }  # fmt: skip
    assert Shape(8 * GIB, 16 * GIB, 0) in shapes
    assert all(shape.disk == 0 for shape in grid(Shape(GIB, 0, GIB), ("dram",)))


def test_a_tier_that_was_sized_away_can_come_back():
    """At zero the larger sizes are parts and multiples of a gibibyte."""
    assert GIB in {shape.dram for shape in grid(Shape(0, 0, GIB), ("dram",))}


def test_the_grid_stands_still_while_sizes_stay_within_it():
    """Prospects before and after a change name the same shapes; beyond its ends there is a new one."""
    kept = Grid()
    first = kept.around(Shape(8 * GIB, 0, GIB), ("dram",))
    assert kept.around(Shape(5 * GIB, 0, GIB), ("dram",)) == first
    assert kept.around(Shape(0, 0, GIB), ("dram",)) == first
    wider = kept.around(Shape(64 * GIB, 0, GIB), ("dram",))
    assert wider != first
    assert Shape(256 * GIB, 0, GIB) in wider


# -- terms


LINE = {"overhead_s": 0.5, "seconds_per_flop": 1e-3, "params": 0.5, "layers": 1, "width": 1, "step_tokens": 100}


def test_a_prefill_is_priced_by_the_engines_own_line():
    """FLOPs grow with the square of the prompt; a prompt of several steps pays the overhead of each but the first."""
    known = Known()
    told = snapshot(pool=POOL | {"prefill": LINE})
    known.hear(told)
    terms = known.terms(told, "n")
    assert terms.prefill_s(0) == 0
    assert terms.prefill_s(1) == pytest.approx(1e-3 * (16 + 2 * 16**2))
    assert terms.prefill_s(20) == pytest.approx(1e-3 * (320 + 2 * 320**2) + 0.5 * (3.2 - 1))


def test_engines_without_a_line_are_priced_by_their_gates():
    """Seconds per token, from the predictions in the reports; before any there are no terms."""
    known = Known()
    assert known.terms(snapshot(), "n") is None
    gates = {"gate_candidate_seconds_total{kind=recompute}": 3.0, "gate_candidate_tokens_total": 1500.0}
    told = snapshot(windows=[window("remote", **gates)])
    known.hear(told)
    assert known.terms(told, "n").prefill_s(10) == pytest.approx(160 * 0.002)


def test_fetches_are_priced_by_the_last_estimates():
    """They stay known through rounds that tell nothing; a remote never measured is never worth a fetch."""
    known = Known()
    gauges = {"fetch_estimate_t0_seconds": 0.01, "fetch_estimate_bytes_per_second": 1e6}
    told = snapshot(pool=POOL | {"prefill": LINE}, windows=[window("disk", **gauges)], margin=1.5)
    known.hear(told)
    later = snapshot(pool=POOL | {"prefill": LINE}, margin=1.5)
    known.hear(later)
    terms = known.terms(later, "n")
    assert terms.fetch_s("disk") == pytest.approx((0.01, 0.001))
    assert terms.fetch_s("remote")[0] > timedelta(days=365).total_seconds()
    assert terms.margin == 1.5
