"""The tuner of sizes: least cost over the prospects, beyond chance, in bounded steps, told in a sentence."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.answers import no_change, proposal
from agent.fakes import gib
from tiertune_agent.records import Prospect, Rates, Target
from tiertune_agent.tuners.base import Current, Proposal
from tiertune_agent.tuners.tier_size import TierSize, TierSizeSettings, choose, horizon, weight_at
from tiertune_connector.whatif.chain import Shape

START = datetime(2026, 1, 1, tzinfo=UTC)
GIB = 2**30
SMALL, MIDDLE, LARGE = (gib(size) for size in (0, 64, 128))


def prospects(*costs, requests=100, seconds=60.0):
    """One a minute; every one is seconds per request by shape."""
    return [
        Prospect(
            "", START + timedelta(seconds=seconds * minute), seconds, requests, {str(s): c for s, c in each.items()}
        )
        for minute, each in enumerate(costs)
    ]


def steady(small, middle, large, count=10, **options):
    return prospects(*[{SMALL: small, MIDDLE: middle, LARGE: large}] * count, **options)


def current(told, dram=64 * GIB, tier="dram", **more):
    tuning = {"tiers": {"dram": {"capacity_bytes": dram}, "disk": {"capacity_bytes": 0}}}
    return Current(Target("a", tier), tuning, {}, prospects=told, **more)


def answer(told, settings=None, **more):
    return TierSize(settings or TierSizeSettings()).evaluate([], current(told, **more))


def test_silence_changes_nothing():
    """Without samples the answer is no change, and says so."""
    no_change(answer([]), "64.0 GiB", "no sample")


@pytest.mark.parametrize(("minutes", "wished"), [(2, False), (3, True), (5, True)])
def test_less_than_half_a_period_tells_nothing(minutes, wished):
    """At the first looks of all, the samples of a part of a period are not weighed, however clear they are."""
    found = answer(steady(0.9, 0.5, 0.4, count=minutes), TierSizeSettings(period=300.0))
    assert isinstance(found, Proposal) == wished


HALF, EIGHT, TWICE, FOUR_TIMES = (gib(size) for size in (4, 8, 16, 32))
OLD_GRID, NEW_GRID = {HALF: 0.95, EIGHT: 0.9, TWICE: 0.5}, {EIGHT: 0.9, TWICE: 0.5, FOUR_TIMES: 0.4}


@pytest.mark.parametrize(("minutes", "wished"), [(2, False), (3, True), (5, True)])
def test_another_grid_is_believed_after_half_a_period(minutes, wished):
    """An agent that restarts simulates other sizes: hours of the old ones neither hinder it nor speak for it."""
    told = prospects(*[OLD_GRID] * 60, *[NEW_GRID] * minutes)
    found = answer(told, dram=16 * GIB)
    assert isinstance(found, Proposal) == wished
    if wished:
        assert (found.after, found.requests) == (32 * GIB, 100 * minutes)
    else:
        assert "no samples of half a period" in found.reason


@pytest.mark.parametrize("last", ["busy", "quiet"])
@pytest.mark.parametrize("told", [{MIDDLE: 0.1, LARGE: 0.1}, {}])
def test_a_namespace_that_tells_less_is_not_left_out(last, told):
    """One is simulated too coarsely to tell what none would cost, or anything; the other one alone would do without."""
    busy, quiet = (
        [replace(one, namespace=name) for one in prospects(*[costs] * 10)]
        for name, costs in (("busy", told), ("quiet", {SMALL: 0.1, MIDDLE: 0.1, LARGE: 0.1}))
    )
    both = [one for pair in zip(*((quiet, busy) if last == "busy" else (busy, quiet)), strict=True) for one in pair]
    rent = Rates(gpu_hour=1.0, gib_hour={"dram": 1.0})
    assert isinstance(answer(quiet, rates=rent), Proposal)
    assert "dram stays" in answer(both, rates=rent).reason
    gone = [replace(one, start=one.start - timedelta(hours=1)) for one in busy]
    assert isinstance(answer(gone + quiet, rates=rent), Proposal), "one that is gone holds nothing up"


def test_a_restart_that_took_long_tells_nothing_of_the_time():
    """Between the last sample of the old sizes and the first of the new ones nobody looked."""
    told = prospects(*[OLD_GRID] * 10, *[NEW_GRID] * 70)
    no_change(answer([*told[:10], *told[-2:]], dram=16 * GIB))
    proposal(answer([*told[:10], *told[-3:]], dram=16 * GIB))


def test_sizes_that_come_back_are_remembered():
    """Rounds without one store made another grid for a while: what was known counts, and that while for itself."""
    other = {gib(12): 0.6, TWICE: 0.5, gib(24): 0.3}
    told = prospects(*[NEW_GRID] * 30, other, *[NEW_GRID] * 30, other, NEW_GRID)
    assert proposal(answer(told, dram=16 * GIB)).requests == 6100
    assert "no samples of half a period" in answer(told[:31], dram=16 * GIB).reason, "one minute is"


def test_another_split_is_believed_after_half_a_period():
    """A host went, 3 to 2: the splits of three hosts say nothing of those of two."""
    of_three, of_two = (split_shapes(total=96, hosts=hosts) for hosts in (3, 2))
    told = prospects(*[dict.fromkeys(of_three, 0.5)] * 60, *[dict(zip(of_two, (0.2, 0.5, 0.6), strict=True))] * 3)
    found = proposal(answer(told, dram=16 * GIB, hosts=2, budget_bytes=96 * GIB, remote_bytes=64 * GIB))
    assert found.evidence["best"] == str(of_two[0])


def test_sizes_are_looked_at_ten_times_in_a_period():
    """A phase that begins in the middle of a period is seen before its end."""
    assert TierSizeSettings(period=300.0).look_s == 30.0


def test_the_cheapest_size_is_proposed_with_its_figures():
    """Seconds, gain and requests stand in one sentence; the evidence names what stood and what is best."""
    found = proposal(answer(steady(0.9, 0.5, 0.4)))
    assert (found.field, found.before, found.after) == ("tiers.dram.capacity_bytes", 64 * GIB, 128 * GIB)
    assert "400 ms" in found.reason
    assert "500" in found.reason
    assert "20.0% less, standard error 0.0%, 1000 requests" in found.reason
    assert found.requests == 1000
    assert found.evidence["shape"] == str(MIDDLE)
    assert found.evidence["best"] == str(LARGE)


def test_a_gain_below_the_policys_is_not_worth_a_change():
    """Less than half a per cent where one is asked for."""
    no_change(answer(steady(0.9, 0.5, 0.498)), "under 1.0%")


def test_one_spell_is_no_evidence():
    """A round that came late told of a whole period at once: nothing tells how much its parts differ."""
    costs = [{SMALL: 0.9, MIDDLE: 0.5, LARGE: 0.4}] * 2
    no_change(answer(prospects(*costs[:1], seconds=300.0)), "chance")
    proposal(answer(prospects(*costs, seconds=150.0)))


def test_chance_is_told_from_a_gain():
    """The larger size is better on the whole, but not by more than its differences scatter."""
    noise = [{SMALL: 1.0, MIDDLE: 0.5, LARGE: 0.5 + (0.2 if minute % 2 else -0.24)} for minute in range(10)]
    no_change(answer(prospects(*noise)), "chance")


def test_a_change_is_judged_by_sizes_that_were_simulated():
    """Of a remote that did not answer nobody knows the size: it is as large in the evidence as in the prospects."""
    far = [shape._replace(remote=256 * GIB) for shape in (SMALL, MIDDLE, LARGE)]
    told = prospects(*[dict(zip(far, (0.9, 0.5, 0.4), strict=True))] * 10)
    found = proposal(answer(told, dram=60 * GIB, remote_bytes=512 * GIB))
    assert found.evidence["shape"] == f"{60 * GIB}/0/{256 * GIB}"


def test_rent_weighs_against_seconds():
    """Where memory costs more than it saves the answer is a smaller tier, down to none."""
    rates = Rates(gpu_hour=2.0, gib_hour={"dram": 0.01})
    assert proposal(answer(steady(0.9, 0.5, 0.4, requests=600), rates=rates)).after == 128 * GIB
    idle = proposal(answer(steady(0.9, 0.5, 0.4, requests=1), rates=rates))
    assert idle.after == 0
    assert "money per hour" in idle.reason


def test_seconds_and_money_are_not_added_up():
    """Where GPU time has no price, nobody knows what a rent is in seconds; a tier without rent costs none."""
    told = steady(0.9, 0.5, 0.4)
    no_change(answer(told, rates=Rates(gib_hour={"dram": 0.004})), "64.0 GiB", "prices.gpu_hour is 0")
    free = proposal(answer(told, rates=Rates(gib_hour={"dram": 0.0, "disk": 1e6, "remote": 1e6}), remote_bytes=0))
    assert free.evidence["before"] == proposal(answer(told)).evidence["before"]


def split(told, dram, remote, **options):
    """What is answered for one of two hosts with so many GiB of DRAM, beside a remote, in a budget of 128 GiB."""
    return answer(told, dram=dram * GIB, hosts=2, budget_bytes=128 * GIB, remote_bytes=remote * GIB, **options)


def split_costs(isolated, even, shared):
    """What requests cost with all of the budget in DRAM, half of it, and none."""
    return prospects(*[dict(zip(split_shapes(), (isolated, even, shared), strict=True))] * 10)


def split_shapes(total=128, hosts=2, shares=(0.0, 0.5, 1.0)):
    return [Shape(int(total * (1 - share) / hosts) * GIB, 0, int(total * share) * GIB) for share in shares]


def test_a_budget_is_split_and_the_giver_shrinks_by_a_step():
    """DRAM takes from the remote at most half of it at a time; the goal is remembered."""
    told = split_costs(0.2, 0.5, 0.6)
    found = proposal(split(told, 32, 64))
    assert found.after == 48 * GIB
    assert found.evidence["goal"] == 64 * GIB


def test_a_further_step_must_pay_too():
    """On the way to a goal the last steps may gain next to nothing: each is a risk of its own."""
    isolated, rest, even = split_shapes(shares=(0.0, 12 / 128, 0.5))
    told = prospects(*[{isolated: 0.298, rest: 0.3, even: 0.5}] * 10)
    proposal(split(told, 32, 64))
    no_change(split(told, 58, 12))


def test_a_host_far_smaller_than_the_others_is_not_one_without_the_tier():
    """Sizes are simulated around those of most hosts: the smallest of them stands for it, not what none would cost."""
    no_change(answer(steady(2.0, 0.5, 0.5), dram=2 * GIB))
    assert proposal(answer(steady(2.0, 0.5, 0.5), dram=0)).after == 64 * GIB


def test_what_a_budget_leaves_unused_is_taken_for_any_gain():
    """It is paid for: DRAM that was cut by hand grows again. To shrink it, or to take it from the remote, must pay."""
    told = split_costs(0.499, 0.5, 0.6)
    found = proposal(split(told, 8, 48))
    assert (found.after, found.evidence["goal"]) == (40 * GIB, 64 * GIB)
    assert "64.0 GiB of the budget are unused" in found.reason
    worth = split_costs(0.4, 0.5, 0.6)
    more = proposal(split(worth, 8, 48))
    assert more.after == 52 * GIB
    no_change(split(told, 32, 64))
    less = split_costs(0.6, 0.5, 0.499)
    no_change(split(less, 34, 40))


@pytest.mark.parametrize(("rest", "dram", "remote"), [(12, 58, 12), (4, 62, 2)], ids=["a rest", "the last bytes"])
def test_what_is_left_is_given_whole(rest, dram, remote):
    """Half of a small remote tier is not worth keeping: steps of half would never end. Few bytes of a budget waive no
    gain, but they are there for one that pays.
    """
    isolated, small, even = split_shapes(shares=(0.0, rest / 128, 0.5))
    told = prospects(*[{isolated: 0.2, small: 0.3, even: 0.5}] * 10)
    assert proposal(split(told, dram, remote)).after == 64 * GIB


def test_within_a_budget_prices_do_not_count():
    """The bytes are paid for either way: only seconds decide where they are."""
    told = split_costs(0.6, 0.5, 0.3)
    rates = Rates(gpu_hour=0.01, gib_hour={"dram": 0.0, "remote": 5.0})
    found = proposal(split(told, 32, 64, rates=rates))
    assert found.after == 0


RENTED = Rates(gpu_hour=2.5, gib_hour={"dram": 3 / 730})


@pytest.mark.parametrize("dram", [128, 192])
def test_what_the_policy_forbids_is_no_reason_to_grow(dram):
    """A loop of 400 GiB that nothing below serves: up to 192 GiB not a request is faster, and less is cheaper."""
    sizes = [Shape(times * dram * GIB // 8, 0, 0) for times in (0, 1, 2, 4, 8, 16, 32)]
    told = prospects(*[{size: 0.2 if size.dram >= 400 * GIB else 1.0 for size in sizes}] * 10, requests=180)
    assert proposal(answer(told, dram=dram * GIB, rates=RENTED, most_bytes=192 * GIB)).after == 0
    assert proposal(answer(told, dram=dram * GIB, rates=RENTED)).after >= 400 * GIB


@pytest.mark.parametrize(("bound", "size", "cost"), [("most_bytes", 96, 0.45), ("least_bytes", 16, 0.8)])
def test_a_bound_is_a_size_to_go_to(bound, size, cost):
    """It costs what lies between those simulated below and above it."""
    told = steady(0.9, 0.5, 0.4) if bound == "most_bytes" else steady(0.9, 0.5, 1.0)
    rates = Rates() if bound == "most_bytes" else Rates(gpu_hour=0.1, gib_hour={"dram": 1.0})
    found = proposal(answer(told, rates=rates, **{bound: size * GIB}))
    assert (found.after, found.evidence["seconds_after"]) == (size * GIB, pytest.approx(cost))


def test_a_size_outside_of_its_bounds_may_stay():
    """The present one is weighed wherever it is; the reason says that bounds left out others."""
    found = no_change(answer(steady(0.9, 0.5, 0.4), most_bytes=32 * GIB))
    assert "no other size within its bounds costs less; 64.0 GiB of dram instead of 64.0 GiB" in found.reason


def test_a_bound_of_a_split_lies_between_two_splits():
    """The remote has the rest there too; sizes that do not spend the budget are no neighbours of it."""
    isolated, even, shared = split_shapes()
    told = prospects(*[{isolated: 0.2, even: 0.4, shared: 0.6, gib(40): 9.0}] * 10)
    found = proposal(split(told, 32, 64, most_bytes=48.0 * GIB))
    assert found.evidence["best"] == str(gib(48, 32))
    assert found.evidence["seconds_after"] == pytest.approx(0.3)


def test_the_disk_is_sized_by_shapes_that_differ_in_it_alone():
    """A proposal for the disk never rests on another DRAM."""
    told = prospects(*[{gib(64): 0.5, gib(64, disk=1): 0.3, gib(128): 0.1}] * 10)
    found = proposal(answer(told, tier="disk"))
    assert (found.field, found.after) == ("tiers.disk.capacity_bytes", GIB)


def test_a_split_leaves_the_disk_as_it_is():
    """Another disk would cost least of all, but the budget that is split between DRAM and the remote is not for it."""
    isolated, even, shared = split_shapes()
    told = prospects(*[{isolated: 0.2, even: 0.5, shared: 0.6, even._replace(disk=GIB): 0.1}] * 10)
    found = proposal(split(told, 32, 64))
    assert found.evidence["best"] == str(isolated)


@given(st.lists(st.tuples(*[st.floats(0.01, 10)] * 3), min_size=3, max_size=30), st.floats(0.01, 100))
def test_a_faster_gpu_changes_no_choice(costs, factor):
    """Without rent only ratios count: all seconds times a constant give the same answer."""
    one = prospects(*[dict(zip((SMALL, MIDDLE, LARGE), each, strict=True)) for each in costs])
    other = prospects(
        *[{shape: factor * cost for shape, cost in zip((SMALL, MIDDLE, LARGE), each, strict=True)} for each in costs]
    )
    found, scaled = answer(one), answer(other)
    assert type(found) is type(scaled)
    if isinstance(found, Proposal) and isinstance(scaled, Proposal):
        assert found.after == scaled.after


def test_prospects_are_weighed_as_long_as_they_count():
    """Older ones would count less than a fiftieth."""
    assert 1 / 60 < weight_at(horizon(300.0).total_seconds() / 300.0) < 1 / 50


@pytest.mark.parametrize(("periods", "wished"), [(8, False), (12, True)])
def test_a_lasting_change_is_followed_after_a_part_of_what_it_followed(periods, wished):
    """That a size cost 5 % more for the fifty periods that count is made up for in twelve of 5 % less, not in eight."""
    old, new = {SMALL: 1.05, MIDDLE: 1.0, LARGE: 1.0}, {SMALL: 0.95, MIDDLE: 1.0, LARGE: 1.0}
    found = answer(prospects(*[old] * 50, *[new] * periods, seconds=300.0))
    assert isinstance(found, Proposal) == wished


def test_traffic_that_has_become_another_is_followed_at_once():
    """After fifty periods of 5 % more one of a quarter of the cost is enough."""
    old, new = {SMALL: 1.05, MIDDLE: 1.0, LARGE: 1.0}, {SMALL: 1.0, MIDDLE: 4.0, LARGE: 4.0}
    assert proposal(answer(prospects(*[old] * 50, new, seconds=300.0))).after == 0


def test_a_burst_is_remembered_for_hours():
    """Five minutes cost the small tier 5,000 s more, each quiet one since saves 20: 40 do not make up for it."""
    burst = prospects(*[{SMALL: 20.0, MIDDLE: 10.0, LARGE: 10.0}] * 5)

    def later(minutes):
        quiet = prospects(*[{SMALL: 0.8, MIDDLE: 1.0, LARGE: 1.0}] * minutes)
        after = timedelta(seconds=60 * len(burst))
        return answer([*burst, *(replace(each, start=each.start + after) for each in quiet)])

    no_change(later(40), "no other size of it costs less")
    assert proposal(later(200)).after == 0


@pytest.mark.parametrize(("offset_s", "seconds"), [(150.0, 300.0), (100.0, 150.0)], ids=["overlapping", "within"])
def test_namespaces_that_are_told_of_at_other_times_pay_one_rent(offset_s, seconds):
    """An hour of rent is an hour, as if two namespaces were told of together."""

    def rented(offset_s, seconds):
        mine = steady(2.0, 1.0, 0.9, seconds=300.0)
        shift = timedelta(seconds=offset_s)
        others = [replace(each, namespace="b", start=each.start + shift, seconds=seconds) for each in mine]
        told = choose(
            sorted([*mine, *others], key=lambda each: each.start), MIDDLE, [SMALL, MIDDLE, LARGE],
            period_s=300.0, rates=Rates(gpu_hour=2.0, gib_hour={"dram": 0.001}), hosts=1,
        )  # fmt: skip
        return told.before

    assert rented(offset_s, seconds) == pytest.approx(rented(0.0, 300.0), rel=0.1)
