"""Advice without a knob: routing, sharing as such, prefill against decode."""

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.answers import no_change, proposal
from agent.fakes import DIGEST, after, window
from tiertune_agent.records import OBSERVED, Prospect, StageWindow, Target
from tiertune_agent.tuners.advice import (
    COMPUTED,
    FLEET,
    LOADED,
    PREFILL_S,
    WAIT_S,
    AdviceSettings,
    Balance,
    Demand,
    Loading,
    Routing,
    Sharing,
    demand,
)
from tiertune_agent.tuners.base import Current, Proposal

GIB = 1 << 30
NOW, UNSHARED = f"{GIB}/0/{4 * GIB}", f"{GIB}/0/0"
SETTINGS = AdviceSettings()
STATUS = {"pools": {DIGEST: {"model": "llama"}}}


def prospects(count=12, *, namespace=DIGEST, requests=100, **costs):
    """Every five minutes; ``costs`` in seconds: now, prefix (routed) and unshared, a little up and down together."""
    names = {"now": NOW, "prefix": f"{NOW}@prefix", "unshared": UNSHARED}
    return [
        Prospect(
            namespace,
            after(seconds=300 * index),
            300.0,
            requests,
            {names[name]: cost * (1 + 0.1 * (index % 3)) for name, cost in costs.items()},
        )
        for index in range(count)
    ]


def current(told=(), *, hosts=4, remote=4 * GIB, stages=()):
    tuning = {"tiers": {"dram": {"capacity_bytes": GIB}}}
    target = Target(FLEET, "dram", DIGEST)
    return Current(target, tuning, STATUS, prospects=told, hosts=hosts, remote_bytes=remote, stages=stages)


@pytest.mark.parametrize(
    ("tuner", "costs", "field", "said"),
    [
        (Routing, {"now": 0.8, "prefix": 0.6}, "advice.routing", "would cut the mean time to the first token by 25.0%"),
        (Sharing, {"now": 0.8, "unshared": 0.6}, "advice.sharing", "not sharing would cut the mean time"),
    ],
)
def test_what_would_save_time_is_advised(tuner, costs, field, said):
    """With the share of the time to the first token that it saves, both means and the requests."""
    told = proposal(tuner(SETTINGS).evaluate([], current(prospects(**costs))))
    assert (told.field, told.requests) == (field, 1200)
    assert said in told.reason
    assert "from 880.5 to 660.4 ms, 1200 requests" in told.reason


@pytest.mark.parametrize(
    ("tuner", "told", "settings", "said"),
    [
        (Routing, (), {}, "not enough data"),
        (Routing, prospects(2, now=0.8, prefix=0.1), {}, "not enough data"),
        (Routing, prospects(now=0.8), {}, "not enough data"),
        (Routing, prospects(now=0.8, prefix=0.1), {"hosts": 1}, "there is one host"),
        (Routing, prospects(now=0.8, prefix=0.79), {}, "advice takes 3.0%"),
        (Routing, prospects(now=0.8, prefix=1.0), {}, "would raise the mean time to the first token by 25.0%"),
        (Routing, prospects(namespace="cd" * 16, now=0.8, prefix=0.1), {}, "not enough data"),
        (Routing, prospects(requests=0, now=0.8, prefix=0.1), {}, "not enough data"),
        (Sharing, prospects(now=0.8, unshared=1.6), {}, "sharing stays: not sharing would raise"),
        (Sharing, prospects(now=0.8, unshared=0.1), {"remote": 0}, "nothing is shared"),
        (Sharing, prospects(now=0.8), {}, "not enough data"),
    ],
)
def test_what_would_not_save_enough_is_told(tuner, told, settings, said):
    """No change, or not enough data, with the figure where there is one."""
    no_change(tuner(SETTINGS).evaluate([], current(told, **settings)), said)


def test_a_gain_that_may_be_chance_is_no_advice():
    """Now here, now there: the mean alone does not convince."""
    up_and_down = [
        Prospect(DIGEST, after(seconds=300 * i), 300.0, 100, {NOW: 1.0, f"{NOW}@prefix": 0.2 + 1.4 * (i % 2)})
        for i in range(9)
    ]
    no_change(Routing(SETTINGS).evaluate([], current(up_and_down)))


@given(costs=st.lists(st.tuples(st.floats(0.01, 10), st.floats(0.01, 10), st.integers(0, 1000)), max_size=10))
def test_routing_is_never_advised_where_it_costs_more(costs):
    """Advice has less predicted time in sum over the requests, the newer counting more."""
    told = [
        Prospect(DIGEST, after(seconds=3600 * i), 300.0, n, {NOW: now, f"{NOW}@prefix": other})
        for i, (now, other, n) in enumerate(costs)
    ]
    answer = Routing(SETTINGS).evaluate([], current(told))
    if isinstance(answer, Proposal):
        seen = [(0.9**-i * n, now, other) for i, (now, other, n) in enumerate(costs)]
        assert sum(w * other for w, _, other in seen) < sum(w * now for w, now, _ in seen)


def test_the_fleet_is_asked_once_and_not_each_store():
    """Targets do not name the store: two stores of one fleet give the same ones."""
    for tuner in (Routing(SETTINGS), Sharing(SETTINGS), Balance(SETTINGS)):
        assert tuner.settings.advisory
        assert tuner.targets("host-a", STATUS) == tuner.targets("host-b", STATUS)


PARTS = {"decode": 2 / 3, "mixed": 1 / 3}
"""Of a decode stage's seconds, by phase."""


def stages(prefill, decode, *, count=40, gpus=(4, 4), utilization=False):
    """Windows of two stores, one for each stage, in which its GPUs are busy for this share of the time."""
    told = []
    for index in range(count):
        for number, (stage, busy, many) in enumerate((("prefill", prefill, gpus[0]), ("decode", decode, gpus[1]))):
            at = after(seconds=15 * index + number)
            noisy = busy * (1 + 0.02 * (index % 2 - 0.5))
            told += [
                StageWindow(f"host-{stage}", stage, "", f"gpu-{gpu}", at, 15.0, 0.0, 0.0, noisy) for gpu in range(many)
            ]
            if not utilization:
                told += [
                    StageWindow(f"host-{stage}", stage, stage, "", at, 15.0, noisy * many * 15.0, 1e4),
                    StageWindow(f"host-{stage}", stage, "kv_wait", "", at, 15.0, 99.0, 0.0),
                ]
    return told


@pytest.mark.parametrize("utilization", [False, True])
def test_a_gpu_is_moved_to_the_busier_stage(utilization):
    """By the steps' GPU seconds, or where none are told by what the GPUs say of themselves."""
    answer = proposal(Balance(SETTINGS).evaluate([], current(stages=stages(0.92, 0.31, utilization=utilization))))
    assert (answer.field, answer.before, answer.after) == (
        "advice.balance",
        {"prefill": 4, "decode": 4},
        {"prefill": 5, "decode": 3},
    )
    assert "prefill GPUs are busy 92% (4), decode 31% (4): move one, and the busier are at 74%" in answer.reason
    mirrored = Balance(SETTINGS).evaluate([], current(stages=stages(0.31, 0.92, utilization=utilization)))
    assert mirrored.after == {"prefill": 3, "decode": 5}


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ([], "no GPU has told"),
        (stages(0.92, 0.31, count=39), "no GPU has told"),
        (stages(0.6, 0.2), "prefill GPUs are busy 60% (4), decode 20% (4)"),
        (stages(0.92, 0.85), "prefill GPUs are busy 92%"),
        (stages(0.92, 0.31, gpus=(4, 1)), "decode 31% (1)"),
        (
            [w for w in stages(0.92, 0.31) if w.stage == "prefill"],
            "have no GPUs of their own; busy are prefill 92% (4)",
        ),
    ],
    ids=["none", "few", "idle enough", "even", "the last one", "one stage"],
)
def test_gpus_stay_where_moving_helps_nobody(told, said):
    """Busy shares of both stages are told all the same."""
    no_change(Balance(SETTINGS).evaluate([], current(stages=told)), said)


@pytest.mark.parametrize("utilization", [False, True])
def test_the_stages_are_the_fleets(utilization):
    """Stores need not answer together, nor all the time: each of their GPUs counts for as long as it was observed."""
    told = [one for one in stages(0.9, 0.3, count=80, utilization=utilization) if one.stage == "prefill"]
    idle = [replace(one, store="host-z", gpu_seconds=0.0, utilization=0.0) for one in told if one.gpu]
    late = [replace(one, start=one.start + timedelta(minutes=7)) for one in idle]
    assert demand([*told, *late])["prefill"] == Demand(8, pytest.approx(0.45))
    assert demand([*told, *late[: len(late) // 2]])["prefill"] == Demand(8, pytest.approx(0.6))


def test_steps_that_compute_prompts_beside_decodes_are_work():
    """Each prompt that comes to a decode stage has a tail left to compute: a third of its steps are mixed ones."""
    told = stages(0.84, 0.84)
    for one in [one for one in told if one.phase == "decode"]:
        told.remove(one)
        told += [replace(one, phase=phase, gpu_seconds=one.gpu_seconds * part) for phase, part in PARTS.items()]
    assert demand(told)["decode"] == Demand(4, pytest.approx(0.84))
    no_change(Balance(SETTINGS).evaluate([], current(stages=told)), "busy 84% (4), decode 84% (4)")


def test_a_profiled_module_may_be_a_part_of_its_stage():
    """Its seconds have no other phase than the mixed one: what the GPUs say of themselves decides."""
    told = [
        replace(one, phase="mixed", gpu_seconds=one.gpu_seconds / 2) if one.phase == "decode" else one
        for one in stages(0.92, 0.31)
    ]
    assert demand(told)["decode"] == Demand(4, pytest.approx(0.31))


@given(busy=st.tuples(st.floats(0, 1), st.floats(0, 1)), gpus=st.tuples(st.integers(1, 8), st.integers(1, 8)))
def test_advice_to_move_is_never_followed_by_advice_to_move_back(busy, gpus):
    """With the same work, the fleet that followed the advice is not told to undo it."""
    answer = Balance(SETTINGS).evaluate([], current(stages=stages(*busy, gpus=gpus)))
    if isinstance(answer, Proposal):
        after = (answer.after["prefill"], answer.after["decode"])
        work = [share * many for share, many in zip(busy, gpus, strict=True)]
        shares = [each / many for each, many in zip(work, after, strict=True)]
        again = Balance(SETTINGS).evaluate([], current(stages=stages(*shares, gpus=after)))
        assert not isinstance(again, Proposal) or again.after != answer.before


def loads(*waits_ms):
    """Windows of a source in which requests waited so long for 1000 loaded tokens; 1000 computed ones take 100 ms."""
    told = {OBSERVED: 1.0, LOADED: 1000.0, COMPUTED: 1000.0, PREFILL_S: 0.1}
    return [window("", {**told, WAIT_S: wait_ms / 1000}, i, store="engine-a") for i, wait_ms in enumerate(waits_ms)]


@pytest.mark.parametrize(
    ("waits_ms", "said"),
    [
        ([50, 51, 49, 50], "loading pays: requests waited 50 ms"),
        ([102, 102, 102, 102], "loading stays: requests waited 102 ms"),
        ([10, 500, 20, 400], "loading stays: requests waited 232 ms"),
        ([10, 20, 200, 120], "loading stays: requests waited 88 ms"),
        ([500, 500], "not enough data"),
    ],
    ids=["pays", "loses little", "may lose by chance", "may pay by chance", "few"],
)
def test_loading_is_advised_against_only_where_it_clearly_loses(waits_ms, said):
    """By two standard errors, and by 3 % at least."""
    no_change(Loading(SETTINGS).evaluate(loads(*waits_ms), current()), said)
