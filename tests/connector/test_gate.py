"""Fetch or recompute: what the gate chooses, and what it may never choose."""

from collections import Counter
from functools import partial
from math import exp

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tiertune_connector.cost import (
    ALONE,
    FetchEstimate,
    GateSettings,
    ModelShape,
    Others,
    Reason,
    deadline_s,
    decide,
    gain_s,
)
from tiertune_connector.cost.gate import MANY

LLAMA_8B = ModelShape(params=8.03e9, layers=32, width=4096)
TOKENS = 512
CHUNK = TOKENS * 131_072
FREE = FetchEstimate(0.0, 0.0, float("inf"))


def prefill(h, n):
    return 0.015 + LLAMA_8B.flops(h, n) / (989e12 * 0.5)


def link(gbps, doubt=0.0, queue_s=0.0):
    return FetchEstimate(0.001, 0.0002, gbps * 1e9 / 8, queue_s, doubt=doubt)


def choose(
    tiers,
    *,
    prompt=None,
    computed=0,
    fetch=None,
    cost=prefill,
    backlog_s=0.0,
    others=ALONE,
    copy_s=0.0,
    put_off_s=0.0,
    most=MANY,
    **remote,
):
    return decide(
        tiers,
        computed_tokens=computed,
        prompt_tokens=prompt or len(tiers) * TOKENS + 100,
        chunk_tokens=TOKENS,
        chunk_bytes=CHUNK,
        fetch={"dram": FREE, "remote": link(25)} if fetch is None else fetch,
        prefill=cost,
        settings={"remote": GateSettings(**remote)},
        backlog_s=backlog_s,
        others=others,
        copy_s=copy_s,
        put_off_s=put_off_s,
        most=most,
    )


def hiding(h, n, floor_s=0.05):
    """As a GPU: its launches hide a short prefill, and are hidden by a long one."""
    return np.maximum(floor_s, prefill(h, n))


def total(
    tiers,
    cut,
    *,
    prompt,
    computed,
    fetch,
    cost=prefill,
    backlog_s=0.0,
    others=ALONE,
    copy_s=0.0,
    put_off_s=0.0,
    doubted=True,
):
    """Predicted seconds of one cut at the price that they have for all, told without the gate's code."""
    first = computed // TOKENS
    apart_s = copy_s * (cut - first) + put_off_s if cut > first else 0.0
    loads = {tier: tiers[first:cut].count(tier) for tier in set(tiers)}
    waits = []
    for sign in (1, -1):
        factors = {tier: exp(sign * fetch[tier].doubt) if tier == "remote" and doubted else 1.0 for tier in loads}
        fetching = sum(factors[tier] * priced(tier, fetch[tier], count, others) for tier, count in loads.items())
        waits.append(max(fetching + apart_s, backlog_s))
    return sum(waits) / 2 + (1 + others.prefills) * cost(min(max(computed, cut * TOKENS), prompt - 1), prompt)


def priced(tier, estimate, chunks, others):
    """Of a fetch from the remote all but its wait makes half of those under way wait."""
    seconds = estimate.seconds(chunks, chunks * CHUNK)
    return seconds + (others.transfers / 2 * (seconds - estimate.queue_s) if chunks and tier == "remote" else 0.0)


tier_lists = st.lists(st.sampled_from(["dram", "disk", "remote"]), max_size=40)
apart = st.fixed_dictionaries(
    {"copy_s": st.sampled_from([0.0, 0.001, 0.01]), "put_off_s": st.sampled_from([0.0, 0.02, 0.2])}
)
"""Seconds that a fetch takes beside the tiers'."""
speeds = st.builds(link, st.floats(0.1, 1000), st.sampled_from([0.0, 0.1, 0.5, 2.0]), st.sampled_from([0.0, 0.05]))


def in_tokens(drawn):
    """What ``choose`` and ``total`` take: a prompt has one token at least, and no more is computed than is found."""
    found, more = len(drawn["tiers"]) * TOKENS, dict(drawn)
    prompt, computed = max(1, found + more.pop("tail")), min(more.pop("computed") * TOKENS, found)
    return {**more, "prompt": prompt, "computed": computed}


requests = st.fixed_dictionaries(
    {
        "tiers": st.lists(st.tuples(st.sampled_from(["dram", "disk", "remote"]), st.integers(1, 60)), max_size=5).map(
            lambda runs: [tier for tier, length in runs for _ in range(length)]
        ),
        "tail": st.integers(0, 20_000),
        "computed": st.integers(0, 20),
        "fetch": st.fixed_dictionaries({"dram": speeds, "disk": speeds, "remote": speeds}),
        "backlog_s": st.sampled_from([0.0, 0.01, 0.05, 0.3, 1.0]),
        "others": st.sampled_from([ALONE, Others(transfers=3), Others(prefills=1), Others(5, 2)]),
    }
).map(in_tokens)


@pytest.mark.parametrize("cost", [prefill, hiding])
@given(request=requests, beside=apart, room=st.sampled_from([MANY, 300, 50, 7, 0]))
def test_the_choice_is_the_best_of_all_cuts(cost, request, beside, room):
    """With margin 1 no cut at all, not only no end of a run, is predicted faster than the chosen one.

    What a fetch takes may be in doubt, what its copy to the device takes is not, nor what it puts off. No cut is tried
    that has no room.
    """
    request = request | {"cost": cost} | beside
    first = request["computed"] // TOKENS
    last = min(len(request["tiers"]), first + room)
    decision = choose(**request, most=first + room)
    assert first <= decision.cut <= last
    best = min(total(cut=cut, **request) for cut in range(first, last + 1))
    assert total(cut=decision.cut, **request) <= best + 1e-9


@pytest.mark.parametrize(("floor_s", "cut"), [(0.0, 10), (0.05, 9), (0.051, 8), (0.08, 7), (0.3, 0)])
def test_what_a_step_takes_anyway_is_not_fetched(floor_s, cut):
    """A chunk takes 17 ms to compute: of ten in DRAM the last are left to a step that has as many for nothing."""
    tiers, fetch = ["dram"] * 10, {"dram": link(200)}
    assert choose(tiers, prompt=10 * TOKENS + 1, fetch=fetch, cost=partial(hiding, floor_s=floor_s)).cut == cut


@given(request=requests, copy_s=st.floats(0, 0.1))
def test_the_copy_to_the_device_is_a_part_of_every_fetch(request, copy_s):
    """As if each tier took so much longer for a chunk; what a fetch is told to take is the tier's part alone."""
    sure = {tier: replace(cost, doubt=0.0) for tier, cost in request["fetch"].items()}
    asked = request | {"others": ALONE}
    slower = {tier: replace(cost, per_chunk_s=cost.per_chunk_s + copy_s) for tier, cost in sure.items()}
    copied, longer = choose(**asked | {"fetch": sure}, copy_s=copy_s), choose(**asked | {"fetch": slower})
    alike = [total(cut=decision.cut, **asked | {"fetch": slower}) for decision in (copied, longer)]
    assert alike[0] == pytest.approx(alike[1], abs=1e-9)
    for candidate in copied.candidates:
        count = candidate.fetched or candidate.chunks
        assert candidate.fetch_s == pytest.approx(sure[candidate.tier].seconds(count, count * CHUNK))


@given(request=requests, beside=apart)
def test_the_seconds_are_those_of_what_is_fetched(request, beside):
    """Recompute less fetch, of the decision, is the time that it takes off the whole of this request, and no other.

    The backlog hides the copy to the device, too, and being put off. No tier is told to save less than nothing.
    """
    request = request | beside
    first, decision = request["computed"] // TOKENS, choose(**request)
    if decision.fetches and all(candidate.recompute_s for candidate in decision.candidates):
        nothing, chosen = (
            total(cut=cut, doubted=False, **request | {"others": ALONE}) for cut in (first, decision.cut)
        )
        assert decision.recompute_s - decision.fetch_s == pytest.approx(nothing - chosen, abs=1e-9)
        fetched = {candidate.tier: candidate.fetched for candidate in decision.candidates if candidate.fetched}
        assert fetched == dict(Counter(request["tiers"][first : decision.cut]))


@given(request=requests, margin=st.floats(1, 10), floor=st.integers(0, 30_000))
def test_it_never_predicts_worse_than_recomputing(request, margin, floor):
    """Whatever the settings, a fetch is predicted to pay for all; the request itself waits longer only for others."""
    first, decision = request["computed"] // TOKENS, choose(margin=margin, min_fetch_tokens=floor, **request)
    assert total(cut=decision.cut, **request) <= total(cut=first, **request) + 1e-9
    if decision.fetches:
        assert decision.fetch_s <= decision.recompute_s + 1e-9 or request["others"].prefills
        remote = request["tiers"][first : decision.cut].count("remote")
        assert remote == 0 or remote * TOKENS >= floor


@given(
    local=st.integers(0, 50), remote=st.integers(1, 200), tail=st.integers(1, 5000), gbps=st.lists(st.floats(1, 400))
)
def test_a_faster_link_never_fetches_less(local, remote, tail, gbps):
    """The cut grows with the bandwidth."""
    tiers = ["dram"] * local + ["remote"] * remote
    cuts = [
        choose(tiers, prompt=len(tiers) * TOKENS + tail, fetch={"dram": FREE, "remote": link(speed)}).cut
        for speed in sorted(gbps)
    ]
    assert cuts == sorted(cuts)
    assert set(cuts) <= {local, len(tiers)}


@given(tiers=tier_lists, margins=st.lists(st.floats(1, 10), min_size=2, max_size=2))
def test_a_larger_margin_never_fetches_more_from_the_remote(tiers, margins):
    """Margins only take fetches away."""
    fetch = {"dram": FREE, "disk": FREE, "remote": link(40)}
    less, more = (choose(tiers, fetch=fetch, margin=margin).cut for margin in sorted(margins, reverse=True))
    assert less <= more


def test_break_even_is_where_the_reference_says():
    """8B on one H100 behind 25 GbE: a whole prefix of 24 k tokens is recomputed, one of 30 k tokens is fetched."""
    fetch = {"remote": FetchEstimate(0.001, 0.0, 2.8125e9)}
    short, long = ["remote"] * (24_000 // TOKENS), ["remote"] * (30_000 // TOKENS)
    assert choose(short, fetch=fetch).reason == Reason.SLOWER
    assert choose(long, fetch=fetch).cut == len(long)


def test_a_declined_fetch_still_tells_both_predictions():
    """The tuner learns what was at stake: bytes that were offered, seconds of both ways."""
    decision = choose(["remote"] * 4)
    (candidate,) = decision.candidates
    assert (decision.cut, decision.tier, decision.reason) == (0, "remote", Reason.SLOWER)
    assert (candidate.chunks, candidate.fetched) == (4, 0)
    assert candidate.fetch_s == decision.fetch_s == link(25).seconds(4, 4 * CHUNK)
    assert candidate.recompute_s == decision.recompute_s == pytest.approx(prefill(0, 2148) - prefill(2048, 2148))


def test_each_tier_is_accounted_apart():
    """A local head is fetched and a dear remote tail is not; both tell why."""
    decision = choose(["dram"] * 3 + ["remote"] * 2)
    assert [(entry.tier, entry.fetched, entry.reason) for entry in decision.candidates] == [
        ("dram", 3, Reason.CHEAPER),
        ("remote", 0, Reason.SLOWER),
    ]
    assert (decision.cut, decision.tier, decision.fetches) == (3, "dram", True)


def test_off_ends_at_the_first_remote_chunk():
    """Local chunks behind a remote one are out of reach when the remote is off."""
    decision = choose(["dram", "remote", "dram"], fetch={"dram": FREE, "remote": FREE}, fetch_on=False)
    assert decision.cut == 1
    assert [entry.reason for entry in decision.candidates] == [Reason.CHEAPER, Reason.OFF]


def test_what_finds_no_room_is_not_fetched():
    """The prediction is that of the chunks which can come; of a tier from which none can, the reason is told."""
    fast = {"fetch": {"disk": FREE, "remote": link(400)}}
    whole, part = (choose(["remote"] * 12 + ["disk"] * 4, most=most, **fast) for most in (MANY, 9))
    assert (whole.cut, part.cut) == (16, 9)
    remote, disk = part.candidates
    assert (remote.chunks, remote.fetched, remote.fetch_s) == (12, 9, choose(["remote"] * 9, **fast).fetch_s)
    assert (disk.chunks, disk.fetched, disk.reason) == (4, 0, Reason.NO_ROOM)
    assert choose(["remote"] * 12, most=0).reason == Reason.NO_ROOM
    assert choose(["remote"] * 12, most=0, fetch_on=False).reason == Reason.OFF


def test_a_short_run_is_not_worth_a_fetch():
    """Below the floor the remote is left alone, also by who is held out; at the floor it is asked."""
    fetch = {"remote": FREE}
    for on in (True, False):
        told = choose(["remote"] * 3, fetch=fetch, min_fetch_tokens=4 * TOKENS, fetch_on=on)
        assert told.reason == Reason.TOO_SHORT
    assert choose(["remote"] * 4, fetch=fetch, min_fetch_tokens=4 * TOKENS).cut == 4


@pytest.mark.parametrize(("fetch", "cost"), [({"dram": FREE}, prefill), ({}, prefill), (None, lambda _h, _n: None)])
def test_in_doubt_local_chunks_are_fetched_and_remote_ones_are_not(fetch, cost):
    """An unknown fetch cost, or an unknown prefill, stops the gate before the remote."""
    decision = choose(["dram", "dram", "remote", "dram"], fetch=fetch, cost=cost)
    assert decision.cut == 2
    assert decision.candidates[1].reason == Reason.UNKNOWN_COST


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_costs_that_no_fetch_has_gain_nothing(number):
    """A store that is out of its mind makes nobody fetch from its remote, and nobody fail; local chunks still come."""
    fetch = {"dram": FREE, "remote": FetchEstimate(number, 0.0, 1e9)}
    assert choose(["dram", "dram", "remote", "dram"], fetch=fetch).cut == 2


def test_what_is_computed_is_not_fetched():
    """Chunks on the GPU already cost nothing and are no candidates."""
    decision = choose(["remote"] * 8, computed=6 * TOKENS, fetch={"remote": FREE})
    assert (decision.cut, decision.candidates[0].chunks) == (8, 2)
    assert choose(["remote"] * 8, computed=8 * TOKENS).reason == Reason.NO_HIT


def test_the_last_token_is_always_computed():
    """A prompt that lies in a tier whole still pays for that one."""
    decision = choose(["dram"] * 4, prompt=4 * TOKENS)
    assert decision.recompute_s == pytest.approx(prefill(0, 2048) - prefill(2047, 2048), rel=1e-9)


def test_a_backlog_makes_fetching_cheaper():
    """While a request waits for others anyway, a fetch costs nothing."""
    assert choose(["remote"] * 4).cut == 0
    decision = choose(["remote"] * 4, backlog_s=1.0)
    assert decision.cut == 4
    assert decision.recompute_s == pytest.approx(prefill(0, 2148) - prefill(2048, 2148) + decision.fetch_s)


def test_a_backlog_hides_the_head_of_a_slow_fetch():
    """What comes while the request waits is fetched, the rest of the run is not; both are told."""
    slow = {"remote": FetchEstimate(0.0, 0.0, CHUNK)}
    assert choose(["remote"] * 8, fetch=slow).cut == 0
    decision = choose(["remote"] * 8, fetch=slow, backlog_s=3.5)
    (candidate,) = decision.candidates
    assert (decision.cut, candidate.chunks, candidate.fetched) == (3, 8, 3)
    assert candidate.fetch_s == 3.0
    assert choose(["remote"] * 8, fetch=slow, backlog_s=3.5, min_fetch_tokens=4 * TOKENS).cut == 0


def test_a_doubtful_fetch_is_dearer():
    """With a standard error of 1 in the logarithm the remote must be half as dear again; local tiers need not."""
    sure, doubtful = link(25), link(25, doubt=1.0)
    tiers = ["remote"] * 60
    assert choose(tiers, fetch={"remote": sure}).cut == 60
    assert choose(tiers, fetch={"remote": doubtful}).cut == 0
    assert choose(["disk"] * 60, fetch={"disk": doubtful}).cut == 60


@given(doubts=st.lists(st.floats(0, 2), min_size=2, max_size=2), backlog_s=st.floats(0, 5), gbps=st.floats(1, 100))
def test_what_is_not_fetched_is_not_fetched_in_doubt(doubts, backlog_s, gbps):
    """Doubt makes no cut cheaper; which of several is best may change."""
    sure, doubtful = (
        choose(["remote"] * 40, fetch={"remote": link(gbps, doubt)}, backlog_s=backlog_s) for doubt in sorted(doubts)
    )
    assert sure.fetches or not doubtful.fetches


@given(doubt=st.floats(0.05, 1), backlog_s=st.floats(0.1, 10), chunks=st.integers(1, 40))
def test_a_backlog_hides_only_what_is_surely_hidden(doubt, backlog_s, chunks):
    """From a link on which nothing pays, a fetch that might last longer than the backlog gains more than that costs."""
    estimate = link(1, doubt)
    decision = choose(["remote"] * chunks, fetch={"remote": estimate}, backlog_s=backlog_s)
    if decision.fetches:
        prompt = chunks * TOKENS + 100
        saved_s = prefill(0, prompt) - prefill(decision.cut * TOKENS, prompt)
        assert exp(doubt) * decision.fetch_s <= backlog_s + 2 * saved_s


def test_a_load_may_take_as_long_as_the_request_waits_anyway():
    """To give up before gains nothing; without a backlog the deadline is the prediction times the factor."""
    settings = {"remote": GateSettings(deadline_factor=2.5)}
    hidden = choose(["remote"] * 4, backlog_s=1.0)
    assert deadline_s(hidden, settings, unknown_s=9.0, floor_s=0.1) == 1.0
    alone = choose(["remote"] * 60)
    assert deadline_s(alone, settings, unknown_s=9.0, floor_s=0.1) == pytest.approx(2.5 * alone.fetch_s)
    assert deadline_s(replace(hidden, fetch_s=None), settings, unknown_s=0.5, floor_s=0.1) == 1.0


def test_a_doubtful_load_has_as_long_as_a_slow_one_takes():
    """Counting on slow ones it was chosen: to give them up would lose what is gained. Local tiers' are not in doubt."""
    for tier, slow in (("remote", exp(0.4)), ("disk", 1.0)):
        doubtful = choose([tier] * 60, fetch={tier: link(100, doubt=0.4)})
        told_s = deadline_s(doubtful, {}, unknown_s=9.0, floor_s=0.0)
        assert told_s == pytest.approx(GateSettings().deadline_factor * slow * doubtful.fetch_s)


def test_a_deadline_is_never_too_short_to_try():
    """A floor; the usual factor for a tier that settings do not name, none for who fetches nothing; or what is said."""
    alone = choose(["remote"] * 60)
    assert deadline_s(alone, {}, unknown_s=9.0, floor_s=0.0) == GateSettings().deadline_factor * alone.fetch_s
    assert deadline_s(alone, {}, unknown_s=9.0, floor_s=8.0) == 8.0
    assert deadline_s(replace(alone, fetch_s=None), {}, unknown_s=9.0, floor_s=0.1) == 9.0
    assert deadline_s(replace(alone, fetch_s=None), {}, unknown_s=9.0, floor_s=10.0) == 10.0
    nothing = choose([])
    assert deadline_s(replace(nothing, fetch_s=2.0), {}, unknown_s=9.0, floor_s=0.0) == 2.0


def test_who_is_before_a_request_changes_its_choice():
    """Alone it fetches; over a crowded link it does not; for a crowded engine it does, though it waits longer."""
    tiers, fetch = ["remote"] * 30, {"remote": link(50)}
    assert choose(tiers, fetch=fetch).cut == 30
    assert choose(tiers, fetch=fetch, others=Others(transfers=4)).cut == 0
    assert choose(tiers, fetch=fetch, others=Others(4, 4)).cut == 30
    relief = choose(tiers, fetch={"remote": link(15)}, others=Others(prefills=4))
    assert relief.cut == 30
    assert relief.fetch_s > relief.recompute_s


def test_local_tiers_have_no_price():
    """A crowded link makes no disk dear."""
    tiers, disk = ["disk"] * 30, {"disk": link(50)}
    assert choose(tiers, fetch=disk, others=Others(transfers=20)) == choose(tiers, fetch=disk)


def test_a_fetch_for_others_is_judged_by_what_it_spares_them():
    """It waited 0.4 s longer than a prefill of 1 s; with one request behind that is a gain, for itself alone a loss."""
    relief = choose(["remote"] * 60, fetch={"remote": link(15)}, others=Others(prefills=4))
    (candidate,) = relief.candidates
    saved_s, late_s = candidate.recompute_s, candidate.recompute_s + 0.4
    assert candidate.prefills == 4
    assert gain_s(candidate.fetch_s, saved_s, late_s, 0.0, prefills=4) == pytest.approx(saved_s - late_s / 5)
    assert gain_s(candidate.fetch_s, saved_s, late_s, 0.0) == pytest.approx(-0.4)


def test_a_fetch_that_takes_no_time_gains_all_that_it_saves():
    """A backlog that it does not use adds nothing; of what was not predicted only the wait counts."""
    assert gain_s(0.0, 3.0, 0.0, 2.0) == 3.0
    assert gain_s(None, None, 1.0, 0.5) == -0.5


@given(fetch_s=st.floats(0, 10), saved_s=st.floats(0, 10), actual_s=st.floats(0, 10), backlog_s=st.floats(0, 10))
def test_what_a_fetch_gained_leaves_out_what_was_waited_anyway(fetch_s, saved_s, actual_s, backlog_s):
    """It is what it took off the prefill, less what it took beyond the backlog."""
    gained = gain_s(fetch_s, saved_s + min(backlog_s, fetch_s), actual_s, backlog_s)
    assert gained == pytest.approx(saved_s - max(0.0, actual_s - backlog_s), abs=1e-9)
