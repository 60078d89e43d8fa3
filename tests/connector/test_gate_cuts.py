"""Where the gate cuts, on requests so plain that the best cut can be told by hand."""

from math import exp, inf, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiertune_connector.cost import FetchEstimate, GateDecision, GateSettings, Others, Reason, decide

TOKENS = 100
FREE = FetchEstimate(0.0, 0.0, inf)


def by_chunk(seconds, latency_s=0.0, doubt=0.0):
    """A tier from which a chunk takes so long."""
    return FetchEstimate(latency_s, 0.0, 1 / seconds, doubt=doubt)


def choose(tiers, fetch, *, saves_s=1.0, computed=0, floor=0, behind=TOKENS // 2, **more):
    """Chunks of one byte; computing one takes ``saves_s``, and there are half a chunk's tokens ``behind`` them."""
    return decide(
        tiers,
        computed_tokens=computed * TOKENS,
        prompt_tokens=len(tiers) * TOKENS + behind,
        chunk_tokens=TOKENS,
        chunk_bytes=1,
        fetch=fetch,
        prefill=lambda h, n: saves_s * (n - h) / TOKENS,
        settings={"remote": GateSettings(min_fetch_tokens=floor * TOKENS)},
        **more,
    )


def test_nothing_found_costs_nothing():
    """Neither way takes any time, and no tier is named."""
    assert choose([], {}) == GateDecision(0, "", Reason.NO_HIT, 0.0, 0.0)
    assert choose(["dram"] * 2, {}, computed=2) == GateDecision(2, "", Reason.NO_HIT, 0.0, 0.0)


@pytest.mark.parametrize(("seconds", "cut"), [(0.99, 4), (1.0, 0), (1.01, 0)])
def test_what_gains_nothing_is_not_fetched(seconds, cut):
    """A fetch that takes as long as recomputing is left alone; nobody waits for others where none are told of."""
    assert choose(["remote"] * 4, {"remote": by_chunk(seconds)}).cut == cut


@pytest.mark.parametrize(("seconds", "cut"), [(1.25, 3), (1.75, 2)])
def test_the_third_tier_is_weighed_behind_both_before_it(seconds, cut):
    """Each chunk saves 1.5 s: two that take 1 s pay, and the third by its own seconds."""
    fetch = {"dram": by_chunk(1.0), "disk": by_chunk(1.0), "remote": by_chunk(seconds)}
    assert choose(["dram", "disk", "remote"], fetch, saves_s=1.5).cut == cut


@pytest.mark.parametrize(("per_chunk_s", "cut"), [(0.75, 8), (1.25, 0)])
def test_handling_costs_by_the_chunk(per_chunk_s, cut):
    """Where the bytes cost nothing, each chunk is still worth its handling or not."""
    assert choose(["remote"] * 8, {"remote": FetchEstimate(0.0, per_chunk_s, inf)}).cut == cut


def test_a_tier_that_is_met_again_pays_its_latency_once():
    """Two runs of the remote are one fetch: 2 s for what saves 3, where two fetches would take those 3."""
    fetch = {"dram": FREE, "remote": by_chunk(0.5, latency_s=1.0)}
    decision = choose(["remote", "dram", "remote"], fetch)
    assert (decision.cut, decision.candidates[0].fetch_s) == (3, 2.0)


@pytest.mark.parametrize(
    ("tiers", "cut"),
    [
        (["remote", "dram"], 0),
        (["remote", "dram", "remote"], 3),
        (["remote", "remote", "dram"], 3),
        (["dram", "remote", "dram"], 1),
    ],
)
def test_a_floor_counts_all_that_is_fetched_from_its_tier(tiers, cut):
    """Of both runs together; what lies behind too few chunks is out of reach with them."""
    assert choose(tiers, {"dram": FREE, "remote": FREE}, floor=2).cut == cut


def test_enough_chunks_that_do_not_pay_are_not_too_few():
    """At the floor it is the cost that speaks against them."""
    assert choose(["remote"] * 2, {"remote": by_chunk(2.0)}, floor=2).reason == Reason.SLOWER


@pytest.mark.parametrize(("backlog_s", "floor", "cut"), [(7.5, 0, 4), (7.5, 4, 4), (1.5, 0, 1), (6.5, 0, 3)])
def test_a_chunk_may_outlast_the_backlog_by_less_than_it_saves(backlog_s, floor, cut):
    """Chunks of 2 s that save 1: those within the backlog, and one that ends less than 1 s after it."""
    assert choose(["remote"] * 8, {"remote": by_chunk(2.0)}, backlog_s=backlog_s, floor=floor).cut == cut


@pytest.mark.parametrize(("floor", "cut"), [(5, 5), (6, 6), (7, 7), (8, 0), (9, 0)])
def test_a_floor_beyond_what_is_hidden_is_weighed(floor, cut):
    """Of 2 s chunks 7.5 s hide 3; the first cut that is long enough still pays while it outlasts them by less."""
    assert choose(["remote"] * 12, {"remote": by_chunk(2.0)}, backlog_s=7.5, floor=floor).cut == cut


@given(
    st.integers(1, 9),
    st.integers(0, 10),
    st.floats(0, 20),
    st.floats(0.1, 3),
    st.tuples(st.floats(0.1, 3), st.floats(0, 1)),
)
def test_no_cut_of_a_run_that_is_long_enough_is_better(chunks, floor, backlog_s, saves_s, link):
    """Against all of them, one by one."""
    seconds, doubt = link

    def late_s(cut):
        both = [factor * cut * seconds for factor in (exp(doubt), exp(-doubt))] if doubt else [cut * seconds] * 2
        return sum(max(0.0, each - backlog_s) for each in both) / 2

    fetch = {"remote": by_chunk(seconds, doubt=doubt)}
    decision = choose(["remote"] * chunks, fetch, saves_s=saves_s, backlog_s=backlog_s, floor=floor)
    gains = {cut: cut * saves_s - late_s(cut) for cut in range(max(1, floor), chunks + 1)} | {0: 0.0}
    assert gains[decision.cut] == pytest.approx(max(gains.values()), abs=1e-6)


@pytest.mark.parametrize(("tokens", "cut"), [(30, 3), (70, 4)])
def test_a_last_chunk_that_is_not_full_is_weighed_for_itself(tokens, cut):
    """Fetched at half of what a whole one saves: it pays only where more than half of its tokens are the prompt's."""
    fetch = {"remote": by_chunk(0.5)}
    assert choose(["remote"] * 4, fetch, behind=tokens - TOKENS).cut == cut
    assert choose(["dram", *["remote"] * 3], {"dram": FREE, **fetch}, behind=tokens - TOKENS).cut == cut
    assert choose(["remote"] * 4, fetch, behind=tokens - TOKENS, floor=4).cut == 4


@given(st.lists(st.sampled_from(["dram", "remote"]), min_size=1, max_size=9), st.integers(1, TOKENS), st.floats(0.1, 2))
def test_no_cut_of_a_prompt_that_ends_within_a_chunk_is_better(tiers, tokens, seconds):
    """Against all of them, one by one; the last token is computed whatever is fetched."""
    last = (len(tiers) - 1) * TOKENS + tokens - 1
    fetch = {"dram": FREE, "remote": by_chunk(seconds)}
    decision = choose(tiers, fetch, behind=tokens - TOKENS)
    gains = [min(cut * TOKENS, last) / TOKENS - seconds * tiers[:cut].count("remote") for cut in range(len(tiers) + 1)]
    assert gains[decision.cut] == pytest.approx(max(gains), abs=1e-6)


def test_what_comes_before_uses_up_the_backlog():
    """A chunk from disk takes 2 s of the 9.5, and runs of one tier share what is left."""
    fetch = {"dram": FREE, "disk": by_chunk(2.0), "remote": by_chunk(2.0)}
    assert choose(["disk", *["remote"] * 8], fetch, backlog_s=9.5).cut == 5
    assert choose(["remote", "remote", "dram", *["remote"] * 8], fetch, backlog_s=11.5).cut == 7


@pytest.mark.parametrize(("saves_s", "backlog_s"), [(0.8, 9.5), (1.1, 4.2)])
def test_a_doubtful_fetch_ends_where_the_slow_or_the_quick_one_outlasts_the_backlog(saves_s, backlog_s):
    """A chunk takes 2 s or half of one: with little to save the slow case decides, with more the quick one.

    Behind 2 s of disk 7.5 s hide 3 slow chunks, and 2.2 s hide 4 quick ones; the fourth pays in both.
    """
    fetch = {"disk": by_chunk(2.0), "remote": by_chunk(1.0, doubt=log(2.0))}
    assert choose(["disk", *["remote"] * 8], fetch, saves_s=saves_s, backlog_s=backlog_s).cut == 5


def test_behind_a_doubtful_fetch_a_sure_one_has_two_ends():
    """After a chunk that took 2 s or half of one, 2.7 s or 4.2 are left: the fourth second of disk pays, no fifth."""
    fetch = {"remote": by_chunk(1.0, doubt=log(2.0)), "disk": by_chunk(1.0)}
    assert choose(["remote", *["disk"] * 8], fetch, saves_s=0.8, backlog_s=4.7).cut == 5


@pytest.mark.parametrize(
    ("copy_s", "saves_s", "backlog_s", "cut"), [(0.45, 1.0, 0.0, 8), (0.55, 1.0, 0.0, 0), (0.45, 0.3, 5.2, 4)]
)
def test_what_the_copy_to_the_device_takes_is_not_in_doubt(copy_s, saves_s, backlog_s, cut):
    """A chunk takes 0.8 s or 0.2, and 0.45 or 0.55 more in both: under 1 s in the mean, or over; 5.2 s hide 4 slow."""
    fetch = {"remote": by_chunk(0.4, doubt=log(2.0))}
    assert choose(["remote"] * 8, fetch, saves_s=saves_s, backlog_s=backlog_s, copy_s=copy_s).cut == cut


@pytest.mark.parametrize(("put_off_s", "backlog_s", "cut"), [(3.9, 0.0, 8), (4.1, 0.0, 0), (4.1, 4.2, 8)])
def test_a_request_is_put_off_once_however_many_chunks_and_tiers_it_fetches(put_off_s, backlog_s, cut):
    """Eight chunks save half a second each, less what being put off takes beyond the wait for others."""
    fetch = {"dram": by_chunk(0.5), "disk": by_chunk(0.5)}
    decision = choose(["dram"] * 4 + ["disk"] * 4, fetch, backlog_s=backlog_s, put_off_s=put_off_s)
    assert decision.cut == cut
    gains_s = decision.recompute_s - decision.fetch_s
    assert gains_s == pytest.approx(8.0 - (4.0 + put_off_s - backlog_s)) or not cut


def test_a_latency_alone_is_hidden_whole_or_not_at_all():
    """Where chunks take no time of their own, all or none are fetched, whatever the backlog hides."""
    fetch = {"remote": FetchEstimate(3.0, 0.0, inf)}
    assert [choose(["remote"] * count, fetch, backlog_s=1.5).cut for count in (1, 4)] == [0, 4]


def test_everybody_behind_pays_for_a_prefill_and_half_of_them_for_a_transfer():
    """The other half wait for their engines anyway."""
    assert Others(prefills=3).prefill_price == 4.0
    assert Others(transfers=3).transfer_price == 2.5


def test_what_a_transfer_waits_itself_has_no_price():
    """Behind a queue that the backlog hides, a fetch is as dear over a crowded link as without the queue."""
    for queue_s in (0.0, 3.0):
        fetch = {"remote": FetchEstimate(0.01, 0.001, 100.0, queue_s)}
        decision = choose(["remote"] * 10, fetch, saves_s=0.015, backlog_s=queue_s, others=Others(3, 6))
        assert decision.cut == 10


def test_the_last_tier_that_is_fetched_from_is_named():
    """Where none is, the last one that offers what is not computed yet."""
    fetch = {"dram": FREE, "disk": FREE, "remote": by_chunk(2.0)}
    assert choose(["dram", "disk"], fetch).tier == "disk"
    declined = choose(["dram", "remote"], fetch, computed=1)
    assert (declined.cut, declined.tier, declined.reason) == (1, "remote", Reason.SLOWER)


def test_a_fetch_at_unknown_cost_says_so():
    """A local tier that nobody measured, or any while the prefill is unknown, is not called cheaper."""
    assert choose(["disk"], {}).reason == Reason.UNKNOWN_COST
    assert choose(["disk"], {"disk": FREE}).reason == Reason.CHEAPER


def test_each_tier_is_told_the_backlog_that_is_left_for_it():
    """What those before it take is gone; a fetch that takes no time, or nobody knows how much, leaves all."""
    fetch = {"dram": FREE, "disk": by_chunk(1.0), "remote": by_chunk(1.0)}
    for unknown in ("dram", "none"):
        known = {tier: estimate for tier, estimate in fetch.items() if tier != unknown}
        decision = choose(["dram", "disk", "remote"], known, backlog_s=2.5)
        assert [candidate.backlog_s for candidate in decision.candidates] == [2.5, 2.5, 1.5]


def test_a_decision_that_cannot_be_carried_out_whole_is_told_as_far_as_it_was():
    """Of its own chunks those that were fetched; predictions in proportion, or of all where nothing is left."""
    fetch = {tier: by_chunk(0.1) for tier in ("dram", "disk", "remote")}
    tiers = ["dram", "dram", "disk", "disk", "remote"]
    decision = choose(tiers, fetch, computed=1)
    dram, disk, remote = decision.cut_to(3, range(5), tiers).candidates
    assert [each.fetched for each in decision.candidates] == [1, 2, 1]
    assert [each.fetched for each in (dram, disk, remote)] == [1, 1, 0]
    assert (dram, remote.fetch_s) == (decision.candidates[0], decision.candidates[2].fetch_s)
    assert (disk.fetch_s, disk.recompute_s) == pytest.approx((0.1, 1.0))


def test_what_somebody_else_brought_meanwhile_is_offered_by_no_tier():
    """It is neither fetched nor computed again; what the engine does not have in the end is."""
    fetch = {tier: by_chunk(0.1) for tier in ("dram", "disk", "remote")}
    tiers = ["dram", "dram", "disk", "disk", "remote"]
    decision = choose(tiers, fetch, computed=1)
    whole = decision.cut_to(5, {0, 3, 4}, tiers).candidates
    assert [(each.chunks, each.fetched) for each in whole] == [(0, 0), (1, 1), (1, 1)]
    part = decision.cut_to(4, {3, 4}, tiers).candidates
    assert [(each.chunks, each.fetched) for each in part] == [(0, 0), (1, 1), (1, 0)]
