"""Which sizes are simulated, and what requests pay in them."""

from dataclasses import replace
from datetime import timedelta

import pytest
from msgspec.structs import asdict

from agent.fakes import START, gib, window
from tiertune_agent.records import Snapshot
from tiertune_agent.whatif.shapes import Grid, Split, median_shape, remote_bytes
from tiertune_agent.whatif.terms import KnownCosts, mean_prompt
from tiertune_connector.cost import ModelShape, PrefillCost
from tiertune_connector.protocol.reporting import prefill_line
from tiertune_connector.whatif.chain import Shape

GIB = 1 << 30
POOL = {"chunk_tokens": 16, "chunk_bytes": 1000, "prefill": None}


def snapshot(store="a", *, dram=GIB, disk=0, remote=None, windows=(), pool=None, margin=1.1):
    tuning = {
        "tiers": {"dram": {"capacity_bytes": dram}, "disk": {"capacity_bytes": disk}, "remote": {"margin": margin}}
    }
    status = {"tiers": {"remote": remote or {"health": "absent"}}, "pools": {"n": pool or POOL}}
    return Snapshot(store, f"http://{store}", "b", "1", START, status, tuning, tuple(windows))


# -- shapes


def test_the_present_shape_is_that_of_the_median_host():
    """One host that is larger does not stand for all; the remote is one."""
    redis = {"health": "ok", "capacity_bytes": 5 * GIB, "resident_bytes": 1}
    fleet = [snapshot(dram=size * GIB, disk=GIB, remote=redis) for size in (1, 1, 9)]
    assert median_shape(fleet, remote_bytes(fleet)) == gib(1, 5, 1)


def test_a_remote_without_a_bound_has_a_size_that_stands_still():
    """At least what it holds and four times the local tiers, as a power of two; none where there is no remote."""
    assert remote_bytes([snapshot()]) == 0
    told = [remote_bytes([snapshot(remote={"health": "ok", "resident_bytes": held})]) for held in (0, 100, 2 * GIB)]
    assert told == [8 * GIB] * 3
    assert remote_bytes([snapshot(remote={"health": "dead"})]) == 8 * GIB


def test_what_a_redis_holds_counts_once_however_many_stores_tell_it():
    """Each store reports all of it; of a directory each reports its own part."""
    redis = {"health": "ok", "resident_bytes": 30 * GIB}
    assert remote_bytes([snapshot(name, remote=redis) for name in "abc"]) == 32 * GIB
    assert remote_bytes([snapshot(name, remote=redis | {"chunks": 1000}) for name in "abc"]) == 128 * GIB


def test_parts_of_a_directory_add_up():
    """Each store bounds what it wrote; the part of one that does not answer for a while is there all the same."""
    part = {"health": "ok", "capacity_bytes": 5 * GIB, "resident_bytes": GIB, "chunks": 1000}
    fleet = [snapshot(name, remote=part) for name in "abc"]
    assert remote_bytes(fleet) == 15 * GIB
    assert remote_bytes(fleet[:2], 15 * GIB) == 15 * GIB
    assert remote_bytes(fleet[:1], 15 * GIB) == 5 * GIB
    assert remote_bytes([*fleet, snapshot("d", remote=part)], 15 * GIB) == 20 * GIB


def test_a_grid_varies_one_tier_at_a_time():
    """Present, none, and from an eighth to four times, of each local tier that there is; and no remote."""
    now = gib(8, 32, 16)
    shapes = Grid().around(now, ("dram", "disk"))
    assert len(shapes) == len(set(shapes)) == 7 + 6 + 1
    assert {shape.dram // GIB for shape in shapes if (shape.disk, shape.remote) == (now.disk, now.remote)} == {
        0, 1, 2, 4, 8, 16, 32,
    }  # fmt: skip
    assert gib(8, disk=16) in shapes
    assert all(shape.disk == 0 for shape in Grid().around(gib(1, 1), ("dram",)))


def test_a_tier_that_was_sized_away_can_come_back():
    """At zero the larger sizes are parts and multiples of a gibibyte."""
    assert GIB in {shape.dram for shape in Grid().around(gib(0, 1), ("dram",))}


def test_the_grid_stands_still_while_sizes_stay_within_it():
    """Prospects before and after a change name the same shapes; beyond its ends there is a new one."""
    kept = Grid()
    first = kept.around(gib(8, 1), ("dram",))
    assert kept.around(gib(4, 1), ("dram",)) is first
    assert kept.around(gib(0, 1), ("dram",)) is first
    wider = kept.around(gib(64, 1), ("dram",))
    assert wider != first
    assert gib(256, 1) in wider


@pytest.mark.parametrize(("size", "sizes"), [(32, (4, 8, 16, 32, 64, 128)), (1, (0.125, 0.25, 0.5, 1, 2, 4))])
def test_the_end_of_a_grid_is_not_the_end_of_growing_and_shrinking(size, sizes):
    """At the largest and the smallest size simulated there is a new grid, which is then left as it is."""
    kept = Grid()
    first = kept.around(gib(8, 1), ("dram",))
    assert size * GIB in (first[-1].dram, min(shape.dram for shape in first if shape.dram))
    now = gib(size, 1)
    beyond = kept.around(now, ("dram",))
    assert {shape.dram / GIB for shape in beyond} == {0, *sizes}
    assert kept.around(now, ("dram",)) is beyond


MOVED = gib(16, 32, 64)


@pytest.mark.parametrize(
    ("tiers", "split"),
    [(("dram", "disk"), None), (("dram", "disk", "remote"), None), (("dram", "disk", "remote"), Split(64 * GIB, 2))],
    ids=["local", "managed", "split"],
)
@pytest.mark.parametrize("now", [MOVED._replace(dram=8 * GIB), MOVED._replace(remote=16 * GIB)])
def test_another_size_of_one_tier_leaves_the_others_theirs(tiers, split, now):
    """A grid varies one tier at a time: around a new size of one there is a new grid, or none of the others had any."""
    kept = Grid()
    kept.around(now, tiers, split)
    shapes = kept.around(MOVED, tiers, split)
    for tier in tiers if split is None else ("disk",):
        beside = [shape for shape in shapes if shape._replace(**{tier: getattr(MOVED, tier)}) == MOVED]
        assert len(beside) == 7, tier
    assert kept.around(MOVED, tiers, split) is shapes


def test_a_size_between_those_simulated_is_simulated_itself():
    """A step of the way, or a bound of the policy: what stands is weighed by what it costs, not by its neighbour."""
    kept = Grid()
    kept.around(gib(8), ("dram",))
    assert gib(12) in kept.around(gib(12), ("dram",))


def test_a_remote_of_another_size_leaves_dram_its_sizes():
    """Somebody else's Redis was made smaller: no size of it is varied, and DRAM is weighed beside the new one."""
    kept = Grid()
    kept.around(gib(8, 64), ("dram",))
    shapes = kept.around(gib(8, 24), ("dram",))
    assert len({shape.dram for shape in shapes if shape.remote == 24 * GIB}) == 7


def test_a_tier_of_a_few_bytes_makes_no_new_grid_with_each_look():
    """Less than it is nothing: the grid around it is as good as there is."""
    kept, now = Grid(), Shape(1, 0, 0)
    assert kept.around(now, ("dram",)) == kept.around(now, ("dram",)) == sorted({*kept.shapes})


# -- terms


LINE = {"overhead_s": 0.5, "seconds_per_flop": 1e-3, "params": 0.5, "layers": 1, "width": 1, "step_tokens": 100}


def test_a_prefill_is_priced_by_the_engines_own_line():
    """FLOPs grow with the square of the prompt; a prompt of several steps pays the overhead of each but the first."""
    known = KnownCosts()
    told = snapshot(pool=POOL | {"prefill": LINE})
    known.hear(told)
    costs = known.costs(told, "n")
    assert costs.prefill_s(0) == 0
    assert costs.prefill_s(1) == pytest.approx(1e-3 * (16 + 2 * 16**2))
    assert costs.prefill_s(20) == pytest.approx(1e-3 * (320 + 2 * 320**2) + 0.5 * (3.2 - 1))


def test_an_overhead_that_flops_hide_is_not_paid_again():
    """A prompt of several steps on a GPU saves what they take; a prefix of it its FLOPs."""
    shape = ModelShape(params=8.03e9, layers=32, width=4096)
    cost = PrefillCost(shape, step_tokens=8192)
    for n in (16, 64, 256, 512, 2048, 4096, 8192):
        cost.observe_step([(0, n)], max(0.02, shape.flops(0, n) / 730e12))
    known = KnownCosts()
    told = snapshot(pool=POOL | {"prefill": asdict(prefill_line(cost))})
    known.hear(told)
    costs = known.costs(told, "n")
    assert costs.prefill_s(1024) == pytest.approx(cost.seconds(0, 16_384), rel=1e-6)
    assert costs.prefill_s(16) == pytest.approx(shape.flops(0, 256) / 730e12, rel=1e-6)


def test_without_an_engines_line_there_are_no_costs():
    """Nobody can tell what computing takes."""
    known = KnownCosts()
    known.hear(snapshot())
    assert known.costs(snapshot(), "n") is None


def test_a_line_of_another_version_may_have_more_but_not_less():
    """What is new in it is left out; without one of its figures there are no costs."""
    known = KnownCosts()
    short = snapshot(pool=POOL | {"prefill": {name: LINE[name] for name in LINE if name != "step_tokens"}})
    known.hear(short)
    assert known.costs(short, "n") is None
    long = snapshot(pool=POOL | {"prefill": LINE | {"new": 1.0}})
    known.hear(long)
    assert known.costs(long, "n").prefill_s(1) == pytest.approx(1e-3 * (16 + 2 * 16**2))


def test_each_host_computes_at_its_own_engines_line():
    """Half of a fleet has another GPU: neither is priced as the other. A store without a line has another's."""
    known, speeds = KnownCosts(), {"slow": 1e-3, "quick": 1e-4, "new": None}
    pools = {
        name: POOL | {"prefill": LINE | {"overhead_s": 0.0, "seconds_per_flop": each}} for name, each in speeds.items()
    }
    told = {name: snapshot(name, pool=pool) for name, pool in pools.items()}

    def seconds():
        return [known.costs(told[name], "n").prefill_s(4) for name in speeds]

    for each in told.values():
        known.hear(each)
    slow, quick, new = seconds()
    assert (slow, new) == (pytest.approx(10 * quick), slow)
    known.hear(replace(told["quick"], at=START + timedelta(days=2)))
    known.forget(START + timedelta(days=1))
    assert seconds() == [quick] * 3


@pytest.mark.parametrize("name", LINE)
def test_a_figure_that_is_null_is_missing(name):
    """It stops neither who weighs sizes nor who asks for a prompt of mean length."""
    known, told = KnownCosts(), snapshot(pool=POOL | {"prefill": LINE | {name: None}})
    known.hear(told)
    assert known.costs(told, "n") is None
    assert mean_prompt(told, [prompts("n", 10.0, 3250.0)]) is None


def test_fetches_are_priced_by_the_last_estimates():
    """They stay known through rounds that tell nothing; a remote never measured is never worth a fetch."""
    known = KnownCosts()
    gauges = {"fetch_estimate_t0_seconds": 0.01, "fetch_estimate_bytes_per_second": 1e6}
    told = snapshot(pool=POOL | {"prefill": LINE}, windows=[window("disk", gauges)], margin=1.5)
    known.hear(told)
    later = snapshot(pool=POOL | {"prefill": LINE}, margin=1.5)
    known.hear(later)
    costs = known.costs(later, "n")
    assert costs.fetch_s["disk"] == pytest.approx((0.01, 0.001))
    assert costs.fetch_s["remote"][0] > timedelta(days=365).total_seconds()
    assert costs.margin == 1.5


def prompts(namespace, requests, tokens):
    values = {"requests_total{salted=no}": requests, "prompt_tokens_total{stage=all}": tokens}
    return window("", values, namespace=namespace)


def test_a_prompt_of_mean_length_stands_for_candidates_that_nobody_saw():
    """Whole chunks of each pool's mean prompt, weighed by its requests, computed at its engines' own line."""
    told = snapshot(pool=POOL | {"prefill": LINE})
    both = replace(told, status={"pools": {"n": POOL | {"prefill": LINE}, "m": POOL | {"prefill": LINE}, "o": POOL}})
    known = KnownCosts()
    known.hear(told)
    costs = known.costs(told, "n")
    seen = [prompts("n", 10.0, 3250.0), prompts("m", 30.0, 30 * 160.0), prompts("o", 900.0, 9e6)]
    found = mean_prompt(both, seen)
    assert (found.requests, found.nbytes) == (0, pytest.approx((10 * 20 + 30 * 10) / 40 * 1000))
    assert found.recompute_s == pytest.approx((10 * costs.prefill_s(20) + 30 * costs.prefill_s(10)) / 40)
    alone = mean_prompt(told, seen[:1])
    assert (alone.nbytes, alone.recompute_s) == (20_000.0, pytest.approx(costs.prefill_s(20)))


def test_the_chunks_of_other_groups_of_layers_are_fetched_too():
    """Twice the bytes for a model with two groups; a store that does not tell has one."""
    gauges = {"fetch_estimate_t0_seconds": 0.01, "fetch_estimate_bytes_per_second": 1e6}
    for each, nbytes in (({}, 1000), ({"chunks_each": 2.0}, 2000)):
        told = snapshot(pool=POOL | {"prefill": LINE} | each, windows=[window("disk", gauges)])
        known = KnownCosts()
        known.hear(told)
        assert known.costs(told, "n").fetch_s["disk"] == pytest.approx((0.01, nbytes / 1e6))
        assert mean_prompt(told, [prompts("n", 10.0, 3250.0)]).nbytes == 20 * nbytes


@pytest.mark.parametrize("windows", [[], [prompts("n", 10.0, 150.0)], [prompts("n", 0.0, 0.0)]])
def test_without_prompts_of_a_chunk_nothing_stands_for_candidates(windows):
    """None came, or none as long as a chunk; nor where nobody told what computing one takes."""
    assert mean_prompt(snapshot(pool=POOL | {"prefill": LINE}), windows) is None
    assert mean_prompt(snapshot(), [prompts("n", 10.0, 3250.0)]) is None
