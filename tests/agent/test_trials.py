"""What changes are judged by: fetches, ghosts, prospects, what passed; and how long they are watched."""

from dataclasses import replace
from datetime import timedelta
from random import Random
from unittest.mock import Mock

import pytest

from agent.answers import trial_of
from agent.fakes import DIGEST, START, after, by_length, gib, remote_window, window
from agent.test_actuator import DECISION
from tiertune_agent.records import Histogram, Prospect, Rates, Target
from tiertune_agent.tuners.base import TypicalCandidate
from tiertune_agent.verdicts import trials
from tiertune_agent.verdicts.soak import LONGEST_S, fill_seconds, soak_seconds
from tiertune_agent.verdicts.trials import (
    admission_trial,
    coarse,
    cost_of,
    eviction_trial,
    fetch_trial,
    floor_trial,
    measure,
    shapes,
    size_trial,
    unweighed,
)
from tiertune_agent.verdicts.verdict import weigh
from tiertune_connector.whatif.chain import Shape

TYPICAL = TypicalCandidate(requests=10, nbytes=100e6, recompute_s=0.5)
ON = replace(DECISION, before="off", after="on")
GIB = 2**30


def probes(*bandwidths):
    return [remote_window(i, bandwidth=bandwidth, age=1.0) for i, bandwidth in enumerate(bandwidths)]


def outcomes(*saved):
    return [
        remote_window(i, requests=5, fetch=1, recompute=4, saved=max(s, 0), lost=max(-s, 0))
        for i, s in enumerate(saved)
    ]


def pool(index, values, tier="", seconds=15.0):
    return window(tier, values, index, seconds, namespace=DIGEST)


@pytest.mark.parametrize(
    ("decision", "soak", "state"),
    [
        (DECISION, probes(1e8, 1.1e8, 0.9e8, 1e8), "kept"),
        (DECISION, probes(1e9, 1e9, 1e9), "rolled_back"),
        (DECISION, probes(1e8, 1e9, 1e8, 1e9), "inconclusive"),
        (DECISION, probes(1e8, 1e8), "inconclusive"),
        (ON, outcomes(3, 2.8, 3.1), "kept"),
        (ON, outcomes(-3, -2.8, -3.1), "rolled_back"),
        (ON, outcomes(3, -3, 2), "inconclusive"),
        (ON, [], "inconclusive"),
    ],
)
def test_fetching_is_tried_against_recomputing(decision, soak, state):
    """On is judged by outcomes, off by what probes say a fetch would have cost."""
    assert weigh(fetch_trial(decision.after, soak, TYPICAL), worse_by=0.02).state == state


def test_what_the_gate_refuses_is_no_fault_of_fetching():
    """Switched on, and the gate lets nobody fetch at the predicted cost: not worse, so it is not switched off again."""
    refused = [remote_window(i, requests=5, fetch=9 + i / 10, recompute=4) for i in range(5)]
    verdict = weigh(fetch_trial("on", refused, TYPICAL), worse_by=0.02)
    assert (verdict.state, verdict.evidence["after"]) == ("inconclusive", 1.0)


def test_a_loss_is_told_as_costing_more():
    """Fetching that costs four times as much is never called a saving."""
    verdict = weigh(fetch_trial("on", outcomes(-12, -12.4, -11.9), TYPICAL), worse_by=0.02)
    assert "recomputing being 1: 4.025 against 1 with the old setting, 302.5% more" in verdict.reason
    assert "sav" not in verdict.reason


def test_a_holdout_is_believed_before_predictions():
    """Where both groups of a holdout are counted, they decide, whatever the predictions say."""
    sums = {
        "holdout_sums_total{group=fetched,sum=seconds}": 8.0,
        "holdout_sums_total{group=fetched,sum=tokens}": 1000.0,
        "holdout_sums_total{group=held,sum=seconds}": 1.0,
        "holdout_sums_total{group=held,sum=tokens}": 1000.0,
    }
    windows = [replace(one, values={**one.values, **sums}) for one in outcomes(3, 3, 3)]
    trial = fetch_trial("on", windows, TYPICAL)
    assert trial.pairs == [(0.001, 0.008, 500.0)] * 3
    assert weigh(trial, worse_by=0.02).state == "rolled_back"


def lengths(index, **gained):
    """A window in which ten fetches of each class gained so many seconds, of 100 s to recompute all candidates."""
    return by_length(remote_window(index, requests=99, fetch=1, recompute=100), 10.0, **gained)


SHORT = {"requests": 1, "fetch": 0.02, "recompute": 0.03}
GAIN, LOSS, NOISE = (9.0, 11.0, 10.0, 12.0), (-9.0, -11.0, -10.0, -12.0), (9.0, -11.0, 10.0, -9.0)


@pytest.mark.parametrize(
    ("gained", "state"),
    [
        (GAIN, "kept"),
        (LOSS, "rolled_back"),
        (NOISE, "inconclusive"),
        (GAIN[:2], "inconclusive"),
    ],
)
def test_a_lowered_floor_is_tried_by_the_fetches_between_the_two(gained, state):
    """Lowered to fetches that gain it is right; what longer ones do is not counted."""
    windows = [lengths(i, t1024=each, t4096=-5 * each) for i, each in enumerate(gained)]
    assert weigh(floor_trial(4096, 0, windows), worse_by=0.02).state == state


def test_a_floor_is_weighed_against_all_that_could_be_fetched():
    """A hundredth of the cost is less than what the guard allows, and windows without such fetches tell nothing."""
    windows = [lengths(i, t0=-each / 10) for i, each in enumerate(GAIN)]
    verdict = weigh(floor_trial(1024, 0, [*windows, lengths(9, t1024=5.0)]), worse_by=0.02)
    assert (verdict.state, verdict.evidence["windows"]) == ("inconclusive", 4)
    late = lengths(10, t0=-5.0)  # its candidates were of the window before
    late.values["gate_candidate_seconds_total{kind=recompute}"] = 0.0
    assert floor_trial(1024, 0, [*windows, late]) == floor_trial(1024, 0, windows)
    assert "recomputing from 0 to 1024 tokens being 1: 1.01 against 1 with the old setting, 1.0% more" in verdict.reason


def test_a_quiet_window_of_fetches_counts_as_little_as_it_asks():
    """Thirty busy windows gain 60 of 100 s each; in ten quiet ones a short prompt was loaded too late."""
    windows = []
    for index in range(40):
        busy, gain = index % 4 < 3, 60.0 + index % 3
        seen = {"requests": 100, "fetch": 35, "recompute": 100, "saved": gain} if busy else {**SHORT, "lost": 0.25}
        windows.append(by_length(remote_window(index, **seen), 1.0, t1024=gain if busy else -0.25))
    for trial in (fetch_trial("on", windows, TYPICAL), floor_trial(4096, 0, windows)):
        verdict = weigh(trial, worse_by=0.02)
        assert (verdict.state, verdict.evidence["after"]) == ("kept", pytest.approx(0.39, abs=0.01))


CHANGED, FILLED = after(seconds=300), after(seconds=600)


FOUND = (
    *("gate_candidate_tokens_total", "gate_candidate_bytes_total", "saved_seconds_total"),
    "gate_candidate_seconds_total{kind=recompute}",
)


def traffic(before, after, *, spread=0.1, seed=1, tier="remote"):
    """Twenty windows before a change, twenty until the tier is filled, twenty after; of what passes by (GiB).

    ``before`` and ``after``: found and written per million prompt tokens. A GiB found saves 2 s; a token takes 1 ms.
    """
    rng, windows = Random(seed), []
    for index in range(60):
        (found, written), much = before if index < 40 else after, rng.uniform(0.5, 1.5)
        found *= much * rng.uniform(1 - spread, 1 + spread)
        values = {
            "gate_candidate_tokens_total": 1e4 * found,
            "gate_candidate_bytes_total": GIB * found,
            "gate_candidate_seconds_total{kind=recompute}": 10.0 * found,
            "saved_seconds_total": 2.0 * found,
            "tier_transfer_bytes_total{operation=write}": GIB * written * much,
            "tier_operation_seconds{operation=write,outcome=ok}": Histogram(written * much, 0.1, {}),
        }
        windows += [
            window(tier, values, index),
            pool(index, {"prompt_tokens_total{stage=all}": 1e6 * much}),
        ]
    return windows


def admitted(windows, *, tier="remote", rates=None):
    return admission_trial(windows, tier, rates or Rates(gpu_hour=3.6), changed_at=CHANGED, filled_at=FILLED)


@pytest.mark.parametrize(
    ("before", "after", "spread", "rates", "state"),
    [
        ((100, 200), (60, 50), 0.1, Rates(3.6), "rolled_back"),
        ((100, 200), (140, 50), 0.1, Rates(3.6), "kept"),
        ((100, 200), (101, 50), 0.9, Rates(3.6), "inconclusive"),
        ((100, 200), (99.5, 50), 0.01, Rates(3.6), "inconclusive"),
        ((100, 200), (60, 50), 0.1, Rates(3.6, network_gib=0.001), "kept"),
        ((100, 200), (60, 50), 0.1, Rates(36.0, network_gib=0.001), "rolled_back"),
    ],
    ids=["fewer found", "more found", "noise", "under what the guard allows", "the network costs more", "GPUs do"],
)
def test_an_admission_is_tried_by_what_is_found_and_what_is_written(before, after, spread, rates, state):
    """Windows before against windows after, per prompt token; a verdict says that they are not the same requests."""
    verdict = weigh(admitted(traffic(before, after, spread=spread), rates=rates), worse_by=0.02)
    assert verdict.state == state
    assert "20 windows against 20, not of the same requests" in verdict.reason


def test_an_admission_pays_the_network_for_what_went_over_it():
    """Where a codec makes chunks a tenth, the network no longer costs more than what is found is worth."""
    moved, rates = "tier_transfer_bytes_total{operation=write}", Rates(3.6, network_gib=0.001)
    windows = traffic((100, 200), (60, 50))
    small = [
        replace(one, values={**one.values, "tier_spared_bytes_total{operation=write}": 0.9 * one.values[moved]})
        if moved in one.values
        else one
        for one in windows
    ]
    states = [weigh(admitted(each, rates=rates), worse_by=0.02).state for each in (windows, small)]
    assert states == ["kept", "rolled_back"]


def test_a_network_is_paid_for_by_the_remote_alone():
    """The same traffic on disk: fewer bytes found are fewer bytes found, whatever the network costs."""
    trial = admitted(traffic((100, 200), (60, 50), tier="disk"), tier="disk", rates=Rates(3.6, network_gib=0.001))
    assert weigh(trial, worse_by=0.02).state == "rolled_back"


@pytest.mark.parametrize("state", ["bypassed", "dead"])
def test_an_admission_is_not_blamed_for_a_fetch_that_was_off(state):
    """Nor for an outage: in half of the windows after it nothing could be found; in the others as much as before."""
    fair = traffic((100, 200), (100, 50))
    off = [
        replace(one, values={**dict(counted(one)), **dict.fromkeys(FOUND, 0.0), f"tier_health{{state={state}}}": 1.0})
        if one.tier == "remote"
        else one
        for one in fair[-20:]
    ]
    told = [weigh(admitted([*fair[:-20], *rest]), worse_by=0.02) for rest in (fair[-20:], off)]
    assert [one.state for one in told] == ["inconclusive"] * 2
    assert told[1].evidence["windows"] == 10


def counted(one):
    """Its values but for histograms."""
    return [(name, value) for name, value in one.values.items() if not isinstance(value, Histogram)]


def test_more_traffic_and_a_faster_link_are_no_better_admission():
    """Twice the requests, each byte found saving twice as much: nothing that the admission did."""
    windows = traffic((100, 200), (100, 200))
    faster = [
        replace(one, values={name: value * (4 if name.startswith("saved") else 2) for name, value in counted(one)})
        for one in windows[80:]
    ]
    assert weigh(admitted([*windows[:80], *faster]), worse_by=0.0).state == "inconclusive"


def test_an_admission_of_a_tier_where_nothing_was_found_stays_open():
    """Without a fetch nobody knows what a token costs: too few windows, no error."""
    verdict = weigh(admitted(traffic((0, 200), (0, 50))), worse_by=0.02)
    assert verdict.state == "inconclusive"
    assert verdict.reason.startswith("0 windows of the shorter spell, before or after the change, told anything, 3 are")


def test_a_holdout_is_an_experiment():
    """It is kept with the reason; what else the policy sets stays without a verdict."""
    held = unweighed(replace(DECISION, field="tiers.remote.holdout", before=0.0, after=0.05))
    assert held.state == "kept"
    assert held.reason.startswith("an experiment, and no setting with a better value: 5.0% of the requests")
    margin = unweighed(replace(DECISION, field="tiers.remote.margin"))
    assert (margin.state, margin.reason) == ("inconclusive", "there is nothing to weigh tiers.remote.margin by")


def ghosts(index, asked=100.0, **hits):
    """By algorithm: hit tokens of those asked for, at 1 and at 2 GiB."""
    values = {}
    for algorithm, at_sizes in hits.items():
        for size, hit in zip((GIB, 2 * GIB), at_sizes, strict=True):
            name = f"whatif_tokens_total{{algorithm={algorithm},capacity_bytes={size},result="
            values[f"{name}hit}}"], values[f"{name}miss}}"] = hit, asked - hit
    return pool(index, values)


def test_algorithms_are_tried_by_their_ghosts_at_the_pools_size():
    """The missed share of both, at the simulated size nearest to the pool's; windows without both do not count."""
    windows = [ghosts(0, lru=(50, 60), arc=(55, 50)), ghosts(1, lru=(50, 60)), pool(2, {})]
    assert eviction_trial(windows, "lru", "arc", 0.9 * GIB) == trial_of(
        [(0.5, 0.45)], "missed share of the prompts", [100]
    )
    assert eviction_trial(windows, "lru", "arc", 3.0 * GIB).pairs == [(0.4, 0.5, 100)]
    assert eviction_trial(windows, "lru", "arc", 4.1 * GIB).pairs == [], "no ghost of about its size"
    assert eviction_trial(windows, "lru", "arc", None).pairs == [], "nor of one that nobody knows"
    strange = {"whatif_tokens_total{algorithm=arc,capacity_bytes=<b>,result=hit}": 5.0}
    told = [replace(one, values={**one.values, **strange}) for one in windows]
    assert eviction_trial(told, "lru", "arc", GIB) == eviction_trial(windows, "lru", "arc", GIB)


def test_a_quiet_window_of_a_pool_counts_as_little_as_it_asks():
    """ARC hits two points more of millions of tokens, and a fifth less of the few in between."""
    busy = [ghosts(index, 5e6, lru=(2.5e6, 0), arc=(2.6e6 + 1e4 * (index % 3), 0)) for index in range(20)]
    idle = [ghosts(index, 5e4, lru=(2.5e4, 0), arc=(1.5e4, 0)) for index in range(20)]
    trial = eviction_trial([each for both in zip(busy, idle, strict=True) for each in both], "lru", "arc", GIB)
    assert weigh(trial, worse_by=0.02).state == "kept"


HALF, MORE, FULL = Shape(100, 0, 100), Shape(150, 0, 50), Shape(200, 0, 0)


def prospect(index, requests, half, full, namespace=DIGEST):
    start = after(minutes=5 * index)
    return Prospect(namespace, start, 300.0, requests, {str(HALF): half, str(FULL): full})


def test_sizes_are_tried_on_the_same_requests():
    """Of several namespaces in one period, the mean over their requests; periods without any are left out."""
    seen = [prospect(0, 30, 1.0, 0.8), prospect(0, 10, 2.0, 2.0, "cd" * 16), prospect(1, 0, 9.0, 9.0)]
    assert size_trial(seen, HALF, FULL) == trial_of([(1.25, 1.1)], "seconds to the first token per request", [40.0])


def test_sizes_with_a_price_are_tried_by_seconds_and_rent():
    """As they were chosen: what a larger tier saves is worth less than its rent, which is the same for each request."""
    rates = Rates(gpu_hour=3600.0, gib_hour={"dram": GIB / 10})
    busy = replace(prospect(0, 30, 1.0, 0.8), seconds=1800.0)
    idle = replace(prospect(0, 10, 2.0, 2.0, "cd" * 16), start=after(minutes=20), seconds=2400.0)
    alone = size_trial([busy, idle], HALF, FULL)
    assert size_trial([busy, idle], HALF, FULL, rates=Rates(gib_hour=rates.gib_hour), hosts=2) == alone
    trial = size_trial([busy, idle], HALF, FULL, rates=rates, hosts=2)
    assert trial.of == f"{alone.of}, with the difference in rent"
    assert trial.pairs == [(old, pytest.approx(new + 2 * 100 / 10 / 40), asked) for old, new, asked in alone.pairs]
    smaller = size_trial([busy, idle], FULL, HALF, rates=rates, hosts=2)
    assert weigh(smaller, worse_by=0.02).state != "rolled_back"
    later = replace(idle, start=after(hours=9))  # no agent led meanwhile, and nobody knows what was asked
    apart = size_trial([busy, later], HALF, FULL, rates=rates, hosts=2)
    rent_s = 2 * 100 / 10 * 70 / 60 / 40
    assert apart.pairs == [(old, pytest.approx(new + rent_s), asked) for old, new, asked in alone.pairs]


def test_an_idle_namespace_weighs_what_it_asks():
    """It is told of at times of its own, where the new size is worse: three requests do not outvote five thousand."""
    chance, seen = Random(1), []
    for index in range(8):
        start = after(seconds=75 * index)
        busy = {str(HALF): 1.0, str(FULL): 0.95 + chance.gauss(0, 0.002)}
        idle = {str(HALF): 5.0, str(FULL): 5.5 + chance.gauss(0, 0.002)}
        seen.append(Prospect(DIGEST, start, 75.0, 5000, busy))
        seen.append(Prospect("cd" * 16, start + timedelta(seconds=15), 75.0, 3, idle))
    trial = size_trial(seen, HALF, FULL)
    assert [pair.weight for pair in trial.pairs] == [5003.0] * 8
    verdict = weigh(trial, worse_by=0.02)
    assert verdict.state == "kept"
    assert verdict.evidence["after"] == pytest.approx(0.953, abs=0.002)


@pytest.mark.parametrize("offset_s", [0, 15, 37.5, 60])
def test_namespaces_that_are_told_of_one_after_another_are_one_window(offset_s):
    """Two namespaces are not twice the windows; those of one stay apart, also where a round came late."""
    late = [0, 75, 165, 240, 315]
    seen = [Prospect(DIGEST, after(seconds=at), 75.0, 10, {str(HALF): 1.0, str(FULL): 0.9}) for at in late]
    others = [replace(one, namespace="cd" * 16, start=one.start + timedelta(seconds=offset_s)) for one in seen]
    assert size_trial(seen, HALF, FULL).windows == 5
    assert 5 <= size_trial([*seen, *others], HALF, FULL).windows <= 6


def test_a_shape_between_those_simulated_costs_in_between():
    """What was not simulated is interpolated between the two nearest; one alone tells nothing of others."""
    assert cost_of(prospect(0, 1, 1.0, 0.8), HALF) == 1.0
    assert 0.8 < cost_of(prospect(0, 1, 1.0, 0.8), MORE) < 1.0
    assert cost_of(Prospect(DIGEST, START, 300.0, 1, {str(HALF): 1.0}), MORE) is None


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_a_remote_that_changed_meanwhile_moves_no_verdict_on_dram(size):
    """Neither size is simulated then, and others are equally far from each: both are told by the cheaper of these."""
    costs = {f"{each * GIB}/0/{300 * GIB}": each**-0.3 for each in (1, 2, 4, 8, 16, 32, 64)}
    told = Prospect(DIGEST, START, 300.0, 1, costs)
    less, more = (cost_of(told, gib(each, 200)) for each in (size, 2 * size))
    assert more / less == pytest.approx(2**-0.3)


def test_a_week_of_prospects_looks_for_the_nearest_shapes_once(monkeypatch):
    """Twenty thousand tell of the same shapes, and a round waits for a review."""
    asked = Mock(side_effect=trials._distance)
    monkeypatch.setattr(trials, "_distance", asked)
    trials._nearest.cache_clear()
    seen = [prospect(index, 1, 1.0, 0.8) for index in range(100)]
    assert size_trial(seen, HALF, MORE).windows == 100
    assert asked.call_count == 2


def test_the_nearest_shapes_are_those_that_differ_least_by_their_own_size():
    """Four times the DRAM is another tier; a remote half as large again, or two fifths smaller, is about the same."""
    costs = {gib(1, 60): 1.0, gib(4, 100): 9.0, gib(1, 150): 2.0}
    told = Prospect(DIGEST, START, 60.0, 10, {str(shape): cost for shape, cost in costs.items()})
    assert cost_of(told, gib(1, 100)) == pytest.approx((1.0 / 3 + 2.0 * 2 / 5) / (1 / 3 + 2 / 5))


def test_what_each_decision_is_measured_by():
    """Fetch, lowered floors, admission, eviction and sizes with a known shape have a measure; all else has none."""
    floor = replace(DECISION, field="tiers.remote.min_fetch_tokens", before=None, after=1024)
    admission = replace(DECISION, field="admission.disk", before="always", after="second_access")
    assert [measure(floor), measure(replace(floor, before=4096)), measure(admission)] == ["", "floor", "admission"]
    assert not measure(replace(DECISION, field="tiers.remote.holdout"))
    size = replace(DECISION, field="tiers.dram.capacity_bytes", after=150, target=Target("host-a", "dram"))
    assert measure(DECISION) == "fetch"
    assert measure(replace(DECISION, field=f"pools.{DIGEST}.dram.eviction")) == "eviction"
    assert measure(size) == measure(replace(DECISION, field="tiers.remote.margin")) == ""
    shaped = replace(size, evidence={"shape": str(HALF)})
    assert measure(shaped) == "size"
    assert shapes(shaped) == (HALF, Shape(150, 0, 100))
    assert shapes(replace(shaped, evidence={"shape": str(HALF), "best": str(FULL)})) == (HALF, MORE)


def test_neighbouring_windows_are_weighed_together():
    """A long trial is brought to few means, in order, with nothing lost."""
    trial = coarse(trial_of([(each, each + 10) for each in range(10)]), 4)
    assert trial == trial_of([(1.0, 11.0), (4.0, 14.0), (7.0, 17.0), (9.0, 19.0)], weights=(3.0, 3.0, 3.0, 1.0))
    assert coarse(trial_of([]), 4).pairs == []
    weighed = coarse(trial_of([(1.0, 2.0), (4.0, 5.0), (5.0, 6.0)], weights=(1.0, 2.0, 3.0)), 2)
    assert weighed.pairs == [(3.0, 4.0, 3.0), (5.0, 6.0, 3.0)]


def test_a_slower_tier_fills_by_what_is_written():
    """100 bytes in 30 s fill 1000 in 300 s."""
    written = {"tier_transfer_bytes_total{operation=write}": 50.0, "tier_transfer_bytes_total{operation=read}": 9e9}
    assert fill_seconds([window("remote", written, at) for at in (0, 1)], 1000.0, {}) == 300.0


def test_a_window_that_came_late_is_as_long_as_it_is():
    """A store that was away for a while tells of all of it in one window, of its tier and of each pool."""
    written = {"tier_transfer_bytes_total{operation=write}": 50.0}
    windows = [pool(0, written, "disk"), pool(1, written, "disk"), pool(1, {}, "disk", seconds=15.0)]
    windows += [pool(2, {}, "disk"), replace(pool(2, {}, "disk"), seconds=165.0)]
    assert fill_seconds(windows, 100.0, {}) == 195.0


def test_dram_fills_by_what_came_and_what_went():
    """Growth and evicted chunks together, of all pools in the tier."""
    held = [{"tier_resident_bytes": 100.0}, {"tier_resident_bytes": 160.0, "tier_evictions_total{reason=room}": 4.0}]
    windows = [pool(i, values, "dram") for i, values in enumerate(held)]
    assert fill_seconds(windows, 1000.0, {DIGEST: 10.0}) == 187.5
    assert fill_seconds(windows[:1], 1000.0, {DIGEST: 10.0}) is None
    assert fill_seconds([], 1000.0, {}) is None
    assert (
        fill_seconds([*windows, *(replace(each, namespace="x") for each in windows)], 1000.0, {DIGEST: 10.0})
        == 1000 * 30 / 280
    )


def test_a_soak_is_at_least_one_fill_time():
    """The longer of policy and fill time; a tier that hardly fills is not waited for longer than the bound."""
    assert soak_seconds(600.0, None) == soak_seconds(600.0, 60.0) == 600.0
    assert soak_seconds(600.0, 3600.0) == 3600.0
    assert soak_seconds(600.0, 1e9) == LONGEST_S
    assert soak_seconds(2 * LONGEST_S, 1e9) == 2 * LONGEST_S


def test_a_host_unlike_the_others_stays_between_the_two_shapes():
    """A host that ends beyond where the fleet was to go is compared with that: no tier is of a negative size."""
    before, best = gib(10, 5), gib(20)
    evidence = {"shape": str(before), "best": str(best)}
    field, target = "tiers.dram.capacity_bytes", Target("a", "dram")
    decision = replace(DECISION, field=field, target=target, before=10 * GIB, after=30 * GIB, evidence=evidence)
    assert shapes(decision) == (before, gib(30))
    assert shapes(replace(decision, after=GIB))[1] == gib(1, 5)
