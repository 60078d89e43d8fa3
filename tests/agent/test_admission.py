"""admission: everything is written behind, unless even the worst that writing less can lose is cheaper."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.answers import no_change, proposal
from agent.fakes import after
from agent.fakes import window as told_of
from tiertune_agent.records import Histogram, Made, Rates, Target
from tiertune_agent.tuners.admission import AdmissionSettings, AdmissionTuner, passed
from tiertune_agent.tuners.base import Current, Proposal

MIB = 1 << 20
TUNER = AdmissionTuner(AdmissionSettings())
FIGURES = {
    "writes": 100,
    "dropped": 0,
    "once": 60,
    "evicted": 100,
    "hits": 50,
    "saved": 5.0,
    "room": 0,
    "write_s": 0.01,
}


def window(index, tier="remote", *, noise=1.0, **figures):
    """Both tiers in one window; chunks of 1 MiB. ``evicted`` of DRAM, ``room`` by the tier."""
    f = {name: value * noise for name, value in (FIGURES | figures).items()}
    values = {
        "tier_operation_seconds{operation=write,outcome=ok}": Histogram(f["writes"], f["write_s"] * f["writes"], {}),
        "tier_transfer_bytes_total{operation=write}": f["writes"] * MIB,
        "write_behind_dropped_total{reason=queue_full}": f["dropped"],
        "write_behind_dropped_total{reason=dead}": 1e6,
        "gate_candidate_bytes_total": f["hits"] * MIB,
        "saved_seconds_total": f["saved"],
        "tier_evictions_total{algorithm=lru,reason=room}": f["room"],
    }
    dram = {"tier_evictions_total{algorithm=lru,reason=room}": f["evicted"], "tier_evicted_unused_total": f["once"]}
    return [
        told_of(tier, {name: value for name, value in values.items() if value}, index),
        told_of("dram", {name: value for name, value in dram.items() if value}, index, namespace="ab"),
    ]


def windows(count=10, tier="remote", **figures):
    rng = Random(1)
    return [each for index in range(count) for each in window(index, tier, noise=rng.uniform(0.9, 1.1), **figures)]


def answer(history, now="always", *, tier="remote", rates=None, full=False, write="commit"):
    tuning = {"tiers": {tier: {"write": write}}, "admission": {tier: now}}
    status = {"tiers": {tier: {"health": "ok", "resident_bytes": 99 if full else 9, "capacity_bytes": 100}}}
    return TUNER.evaluate(history, Current(Target("host-a", tier), tuning, status, rates=rates or Rates(gpu_hour=2.5)))


@pytest.mark.parametrize(
    ("history", "settings", "said"),
    [
        ([], {}, "chunks were written to remote in 0 windows, 3 are needed"),
        (windows(2), {}, "in 2 windows"),
        (windows(), {"write": "off"}, "nothing is written to remote"),
        (windows(evicted=0, once=0), {}, "DRAM evicted nothing, so any admission is right"),
        (windows(), {}, "costs less than what it may save"),
        # dropped, but most of what is written now could not be replaced by chunks used twice
        (windows(dropped=100, once=90), {}, "always stays"),
        # dropped, but hardly
        (windows(dropped=2, once=0, evicted=1000), {}, "always stays"),
        # full and read seldom, but most chunks are used twice: writing less would change little
        (windows(hits=1, room=100, once=40), {}, "always stays"),
        (windows(hits=1, once=90), {}, "always stays"),
    ],
    ids=["none", "few", "off", "no victims", "fine", "few used twice", "few dropped", "all used twice", "not full"],
)
def test_everything_is_written_and_why(history, settings, said):
    """Without a cost that outweighs all that the tier gives, nothing changes, and the sentence has the figures."""
    no_change(answer(history, **settings), said)


def test_drops_are_no_choice():
    """A full queue drops by chance; where chunks used twice alone would fill it, only those are written."""
    told = proposal(answer(windows(dropped=100, once=60, evicted=400)))
    assert (told.field, told.before, told.after) == ("admission.remote", "always", "second_access")
    assert "the full queue drops 50% by chance" in told.reason
    assert "15% of what left DRAM was not used again" in told.reason


@pytest.mark.parametrize("how", ["status", "evictions"])
def test_a_full_tier_that_is_hardly_read_keeps_what_was_used_twice(how):
    """Thrash: almost none of what is written is read before it leaves, and most of it was used once."""
    told = proposal(answer(windows(hits=1, saved=0.1, room=100 if how == "evictions" else 0), full=how == "status"))
    assert "the tier is full, and 1.0% of what is written is read before it leaves" in told.reason


def test_what_nobody_may_read_is_not_read_for_no_fault_of_what_is_written():
    """Fetch is off: nothing is found, which says nothing of the chunks."""
    history, dear = windows(hits=0, saved=0), Rates(gpu_hour=2.5, network_gib=0.1)
    proposal(answer(history, full=True))
    proposal(answer(history, rates=dear))
    off = [
        replace(one, values={**one.values, "tier_health{state=bypassed}": 1.0}) if one.tier == "remote" else one
        for one in history
    ]
    for told in (answer(off, full=True), answer(off, rates=dear)):
        no_change(told, "costs less than what it may save")


def test_what_the_tier_had_is_passed_and_not_moved():
    """Other hosts wrote it: the queue had room for it, and nobody pays for its bytes."""
    key = "tier_operation_seconds{operation=write,outcome=there}"
    told = window(0, writes=10)[0]
    (seen,) = passed([told_of("remote", {**told.values, key: Histogram(30, 0.3, {})}, 0)], "remote")
    assert (seen.writes, seen.written_bytes, seen.write_s) == (40, 10 * MIB, pytest.approx(0.4))


def test_a_network_that_costs_more_than_all_fetches_save():
    """Money: what is paid for chunks used once, against everything that fetches saved."""
    dear, cheap = Rates(gpu_hour=2.5, network_gib=0.1), Rates(gpu_hour=2.5, network_gib=0.01)
    assert "is paid for chunks used once" in answer(windows(), rates=dear).reason
    proposal(answer(windows(), rates=dear))
    no_change(answer(windows(), rates=cheap))
    no_change(answer(windows(saved=500.0), rates=dear))
    no_change(answer(windows(tier="disk"), tier="disk", rates=dear))


@pytest.mark.parametrize("saved", [0.0, 5.0, 5e6])
def test_without_a_price_of_gpus_no_money_is_weighed(saved):
    """What fetches save is worth nothing then, whatever it is: the network's price alone gives up no remote."""
    unpriced = Rates(gpu_hour=0.0, network_gib=0.1)
    no_change(answer(windows(saved=saved), rates=unpriced), "always stays: prices.gpu_hour is 0")
    no_change(answer(windows(saved=saved), "second_access", rates=unpriced), "the network costs 0.1 per GiB")
    assert "drops 50% by chance" in proposal(answer(windows(dropped=100, evicted=400), rates=unpriced)).reason


def test_a_codec_makes_the_network_cheaper():
    """Chunks are paid for as they go over it: at a tenth of their size what dear chunks cost is a tenth."""
    spared, dear = "tier_spared_bytes_total{operation=write}", Rates(gpu_hour=2.5, network_gib=0.1)
    moved = "tier_transfer_bytes_total{operation=write}"
    history = windows()
    small = [
        replace(one, values={**one.values, spared: 0.9 * one.values[moved]}) if one.tier == "remote" else one
        for one in history
    ]
    proposal(answer(history, rates=dear))
    no_change(answer(small, rates=dear))
    assert [seen.sent_bytes for seen in passed(small, "remote")] == pytest.approx(
        [0.1 * seen.written_bytes for seen in passed(history, "remote")]
    )


@pytest.mark.parametrize(
    ("history", "settings", "said"),
    [
        (windows(dropped=1), {}, "the queue is full at times"),
        (windows(), {"full": True}, "the tier is full"),
        (windows(), {"rates": Rates(network_gib=0.1)}, "the network costs 0.1 per GiB"),
        (windows(once=1), {}, "nearly all that leaves DRAM was written"),
        (windows(write_s=0.1), {}, "of the writers' time"),
        (windows(evicted=0, once=0), {}, "any admission is right"),
    ],
)
def test_second_access_stays_while_writing_costs(history, settings, said):
    """Each cost of writing everything keeps it from being written."""
    no_change(answer(history, "second_access", **settings), said)


def test_everything_is_written_again_where_that_costs_nothing():
    """No price, no drops, room in the tier and idle writers: what is written more can only hit more."""
    told = proposal(answer(windows(), "second_access"))
    assert (told.before, told.after) == ("second_access", "always")
    assert "displaces nothing" in told.reason


def test_only_windows_since_the_last_change_count():
    """What was written under the other setting tells nothing of this one."""
    history = windows(dropped=100, evicted=400)
    status = {"tiers": {"remote": {"health": "ok"}}}
    current = Current(
        Target("host-a", "remote"),
        {},
        status,
        last=Made("admission.remote", "second_access", "always", after(seconds=15 * 8)),
    )
    assert "in 2 windows" in TUNER.evaluate(history, current).reason


@pytest.mark.parametrize("now", ["always", "second_access"])
def test_it_tells_how_many_requests_it_rests_on(now):
    """Those of all namespaces, in windows in which something was written; a guard has a least number of them."""
    history, price = windows(), Rates(gpu_hour=2.5, network_gib=0.1 if now == "always" else 0.0)
    assert proposal(answer(history, now, rates=price)).requests is None
    counts = [
        told_of("", {f"requests_total{{salted={salted}}}": 2.0}, index, namespace=namespace)
        for index in range(11)
        for salted, namespace in (("no", "ab"), ("yes", "cd"))
    ]
    told = proposal(answer([*history, *counts], now, rates=price))
    assert told.requests == told.evidence["requests"] == 40


def test_targets_are_the_slower_tiers_that_are_there():
    """A store without a disk has nothing to admit there."""
    status = {"tiers": {"dram": {"health": "ok"}, "disk": {"health": "absent"}, "remote": {"health": "slow"}}}
    assert TUNER.targets("host-a", status) == [Target("host-a", "remote")]


@given(
    figures=st.fixed_dictionaries({name: st.floats(0, 1000) for name in FIGURES}),
    price=st.sampled_from([0.0, 0.01, 1.0]),
    full=st.booleans(),
)
def test_the_two_settings_never_ask_for_each_other(figures, price, full):
    """On the same windows at most one of both wishes a change, whatever they show."""
    figures["once"] = min(figures["once"], figures["evicted"])
    history, rates = windows(5, **figures), Rates(gpu_hour=2.5, network_gib=price)
    answers = [answer(history, now, rates=rates, full=full) for now in ("always", "second_access")]
    assert sum(isinstance(each, Proposal) for each in answers) <= 1


@given(factor=st.sampled_from([0.25, 4.0, 1024.0]), dropped=st.floats(0, 500), hits=st.floats(0, 500))
def test_more_of_the_same_traffic_changes_nothing(factor, dropped, hits):
    """All counts times a number, seconds of a write aside: the same answer."""
    figures = {**FIGURES, "dropped": dropped, "hits": hits, "evicted": 300}
    scaled = {name: value if name == "write_s" else value * factor for name, value in figures.items()}
    one, other = answer(windows(5, **figures), full=True), answer(windows(5, **scaled), full=True)
    assert getattr(one, "after", None) == getattr(other, "after", None)
