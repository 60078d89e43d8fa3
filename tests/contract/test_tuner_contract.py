"""What every tuner promises, over each of them: it answers whatever it is told, and answers the same again."""

import json
from copy import deepcopy
from datetime import timedelta
from random import Random
from typing import get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.fakes import DIGEST, START
from extending.write_off import WriteOff, WriteOffSettings
from tiertune_agent.fields import read, replaced
from tiertune_agent.policy.document import Rule, made, settings_of
from tiertune_agent.records import FLEET, OBSERVED, Histogram, Prospect, StageWindow, Window, series
from tiertune_agent.tuners.advice import ADVICE
from tiertune_agent.tuners.base import Current, NoChange, Proposal
from tiertune_agent.tuners.registry import OF_SOURCES, OF_STORES, TUNERS, Tuners
from tiertune_agent.tuners.tier_size import TierSizeSettings
from tiertune_connector.catalogue import METRICS
from tiertune_connector.tuning import DiskTuning, DramTuning, PoolTunings, TierTunings, Tuning, parse_tuning

GIB = 2**30
WINDOW_S = 600.0
EXAMPLES = (WriteOff(WriteOffSettings()),)
"""Of docs/extending/tuner.md."""
ASKED = (*(made(kind, Rule()) for kind in (*OF_STORES, *OF_SOURCES)), *EXAMPLES)
"""Of stores and sources; of the remote's own document see tests/agent/test_managed_remote.py."""
TUNING = Tuning(
    tiers=TierTunings(dram=DramTuning(capacity_bytes=GIB), disk=DiskTuning(capacity_bytes=4 * GIB)),
    pools={DIGEST: PoolTunings()},
).document()
POOL = {"model": "llama", "chunk_bytes": 1 << 20, "dram": {"effective": {"capacity_bytes": GIB}}}
TIERS = {
    tier: {"health": "ok", "resident_bytes": GIB, "capacity_bytes": GIB, "reason": ""}
    for tier in ("dram", "disk", "remote")
}
STATUS = {"store": "host-a", "tiers": TIERS, "pools": {DIGEST: POOL}}
SOURCE = {**STATUS, OBSERVED: "vllm", "models": ["llama"]}
VALUES = {
    "result": ("hit", "miss", "saved", "lost"),
    "kind": ("fetch", "recompute"),
    "operation": ("read", "write", "try"),
    "outcome": ("ok", "miss", "won", "lost", "late"),
    "algorithm": ("lru", "arc", "s3fifo"),
    "capacity_bytes": (str(GIB), str(2 * GIB)),
    "tokens": ("0", "1024", "4096"),
    "reason": ("room", "queue_full"),
    "phase": ("prefill", "decode", "kv_wait"),
    "group": ("held", "fetched"),
    "sum": ("requests", "seconds", "tokens"),
}
of_every_tuner = pytest.mark.parametrize("tuner", ASKED, ids=lambda tuner: tuner.name)


def windows(chance, count):
    """So many times four windows, of each tier and of none: what is counted goes on at about the same rate."""
    rates = {tier: counted(chance) for tier in ("", "dram", "disk", "remote")}
    return [
        Window("host-a", "", "", tier, START + index * timedelta(seconds=WINDOW_S), WINDOW_S, some(chance, rate))
        for index in range(count)
        for tier, rate in rates.items()
    ]


def counted(chance):
    """Of each metric some series, or none."""
    values = {OBSERVED: 1.0} if chance.random() < 0.5 else {}
    for metric in METRICS:
        for _ in range(chance.randrange(5)):
            labels = [(label, chance.choice(VALUES.get(label, ("x",)))) for label in metric.labels if label != "tier"]
            amount = chance.choice((0.0, 1.0, chance.random(), 1e12 * chance.random()))
            values[series(metric.name, labels)] = Histogram(amount, amount / 3, {}) if metric.buckets else amount
    return values


def some(chance, values):
    """A tenth more or less."""
    factors = {name: 1.0 if name == OBSERVED else 0.9 + 0.2 * chance.random() for name in values}
    return {
        name: Histogram(factor * value.count, factor * value.sum, {1: factor * value.count})
        if isinstance(value, Histogram)
        else factor * value
        for name, factor in factors.items()
        for value in (values[name],)
    }


def tuned(chance):
    """A tuning document that a store takes."""
    document = deepcopy(TUNING)
    document["tiers"]["remote"] |= {
        "fetch": chance.choice(("on", "off")),
        "margin": chance.choice((1.1, 2.0)),
        "holdout": chance.choice((0.0, 0.1)),
    }
    for tier in ("disk", "remote"):
        document["tiers"][tier]["write"] = chance.choice(("commit", "evict", "off"))
        document["admission"][tier] = chance.choice(("always", "second_access"))
    return document


def known(chance, target, count):
    """All that a tuner is told beside its windows."""
    starts = [START + index * timedelta(seconds=WINDOW_S) for index in range(count)]
    shapes = (f"{GIB}/{4 * GIB}/0", f"{2 * GIB}/{4 * GIB}/0", f"{GIB}/{4 * GIB}/0@prefix", f"{GIB}/0/0")
    return Current(
        target,
        tuned(chance),
        deepcopy(SOURCE),
        hosts=chance.choice((1, 2)),
        prospects=tuple(
            Prospect(DIGEST, start, WINDOW_S, chance.randrange(500), {shape: chance.random() for shape in shapes})
            for start in starts
        ),
        stages=tuple(
            StageWindow("host-a", stage, stage, gpu, start, WINDOW_S, WINDOW_S * chance.random(), 1e3, chance.random())
            for start in starts
            for stage in ("prefill", "decode")
            for gpu in ("", f"{stage}-0", f"{stage}-1")
        ),
    )


def check(answer, current):
    """What an answer must be, whatever it says."""
    json.dumps(dict(answer.evidence), allow_nan=False)
    assert len(answer.reason) > 10
    if isinstance(answer, NoChange):
        return
    assert isinstance(answer, Proposal)
    assert answer.after != answer.before
    assert answer.requests is None or answer.requests >= 0
    if not answer.field.startswith(ADVICE):
        assert read(current.tuning, answer.field) in (answer.before, None)
        parse_tuning(replaced(current.tuning, answer.field, answer.after))


@of_every_tuner
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(0, 9))
def test_whatever_it_is_told_it_answers_with_what_can_be_done(tuner, seed, count):
    """A reason, evidence that is JSON, and a value that a store takes; twice the same, and nothing told is touched."""
    chance = Random(seed)
    for target in tuner.targets("host-a", SOURCE):
        history, current = windows(chance, count), known(chance, target, count)
        before = deepcopy((history, current))
        answer = tuner.evaluate(history, current)
        check(answer, current)
        assert tuner.evaluate(history, current) == answer
        assert (history, current) == before


@of_every_tuner
def test_nothing_known_changes_nothing(tuner):
    """Without windows, prospects and stages there is a reason and no proposal: the default policy is followed."""
    targets = tuner.targets("host-a", SOURCE)
    assert targets
    for target in targets:
        assert isinstance(tuner.evaluate([], Current(target, TUNING, STATUS)), NoChange)


@of_every_tuner
def test_a_tier_that_is_not_there_is_no_target(tuner):
    """A store that tells of no tier has nothing to tune; what concerns the fleet may be asked all the same."""
    assert all(target.store == FLEET for target in tuner.targets("host-a", {}))


@pytest.mark.parametrize("kind", TUNERS, ids=lambda kind: kind.name)
def test_the_policy_says_what_it_is_set_to(kind):
    """By its name the policy finds settings of the sort that it takes; with bounds for what sizes a tier."""
    found = settings_of(Rule(), kind.name)
    assert isinstance(found, get_type_hints(kind.__init__)["settings"])
    assert isinstance(found, TierSizeSettings) == (kind.scope == "size")


def test_no_two_tuners_have_one_name():
    """Decisions, periods and answers are kept by it; nor has one that of another's settings."""
    kinds = set(TUNERS)
    assert len({kind.name for kind in kinds}) == len(kinds)
    assert all(kind.name == kind.key for kind in kinds if kind.name in Tuners.model_fields)


# -- the example


def passing(found, *, evicted=100.0, count=8):
    """Windows in which 1 GiB was written to the disk each, and this share of it found there."""
    written = {
        "tier_transfer_bytes_total{operation=write}": float(GIB),
        "tier_operation_seconds{operation=write,outcome=ok}": Histogram(128.0, 1.0, {0: 128.0}),
        "tier_evictions_total{algorithm=lru,reason=room}": evicted,
    }
    return [
        window
        for index in range(count)
        for start in [START + index * timedelta(seconds=WINDOW_S)]
        for window in (
            Window("host-a", "", "", "", start, WINDOW_S, {"requests_total{salted=no}": 50.0}),
            Window(
                "host-a",
                "",
                "",
                "disk",
                start,
                WINDOW_S,
                {**written, "gate_candidate_bytes_total": found[index % 2] * GIB},
            ),
        )
    ]


@pytest.mark.parametrize(
    ("history", "status", "told"),
    [
        (passing((0.0, 0.01)), {}, None),
        (passing((0.0, 0.06)), {}, "2.0% is enough"),
        (passing((0.0, 0.01), evicted=0.0), {}, "there is room"),
        (passing((0.0, 0.01), evicted=0.0), STATUS, None),
        (passing((0.0, 0.01), count=5), {}, "50m 00s that are known, 1h 00m are needed"),
    ],
    ids=["hardly read", "read enough", "not full", "full by its size", "too short"],
)
def test_the_example_stops_writing_what_is_hardly_read(history, status, told):
    """Only what is full, long enough known, and clearly below the share; with figures in the reason."""
    tuner = WriteOff(WriteOffSettings())
    (target, _) = tuner.targets("host-a", STATUS)
    answer = tuner.evaluate(history, Current(target, TUNING, status))
    if told is None:
        assert isinstance(answer, Proposal)
        assert (answer.field, answer.before, answer.after) == ("tiers.disk.write", "evict", "off")
        assert "8.0 GiB were written to disk in 1h 20m, and requests found 0.5% of that" in answer.reason
        assert answer.requests == 400
    else:
        assert isinstance(answer, NoChange)
        assert told in answer.reason
