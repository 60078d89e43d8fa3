"""eviction: another algorithm only where its ghost, at the pool's own capacity, hits clearly more."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.answers import no_change, proposal
from agent.fakes import DIGEST, START, window
from tiertune_agent.policy.guard import Recent, Rules, guard
from tiertune_agent.records import Target, ended
from tiertune_agent.tuners.base import Current, Proposal
from tiertune_agent.tuners.eviction import EvictionSettings, EvictionTuner

GIB = 1 << 30
MODE = {"period": 300.0}


def ghosts(index, hits, *, asked=10_000.0, size=GIB, seconds=15.0):
    """A window of ghosts of one size; ``hits``: share by algorithm."""
    values = {}
    for algorithm, share in hits.items():
        for result, tokens in (("hit", asked * share), ("miss", asked * (1 - share))):
            if tokens:
                values[f"whatif_tokens_total{{algorithm={algorithm},capacity_bytes={size},result={result}}}"] = tokens
    return window("", values, index, seconds, namespace=DIGEST)


def alike(count, seconds=15.0, **hits):
    """So many windows that tell the same shares."""
    return [ghosts(index, hits, seconds=seconds) for index in range(count)]


def steady(count=20, *, spread=0.01, seed=1, **hits):
    """Windows about these shares: what is common to all algorithms varies, and a little each by itself."""
    rng, windows = Random(seed), []
    for index in range(count):
        common = rng.gauss(0, 0.05)
        shares = {name: min(1, max(0, share + common + rng.gauss(0, spread))) for name, share in hits.items()}
        windows.append(ghosts(index, shares, asked=rng.uniform(5e3, 2e4)))
    return windows


def answer(windows, algorithm="lru", capacity=GIB, **settings):
    pool = {"model": "llama", "chunk_bytes": 1 << 20, "dram": {"effective": {"capacity_bytes": capacity}}}
    tuning = {"pools": {DIGEST: {"dram": {"eviction": algorithm}}}, "defaults": {"eviction": "lru"}}
    status = {"pools": {DIGEST: pool}} if capacity else {}
    current = Current(Target("host-a", "dram", DIGEST, ("llama",)), tuning, status)
    return EvictionTuner(EvictionSettings(**{**MODE, **settings})).evaluate(windows, current)


def rival(told):
    return next(row for row in told.evidence["rivals"] if row["algorithm"] == "arc")


def dram(evictions):
    values = {"tier_resident_bytes": 1e9} | ({"tier_evictions_total{algorithm=lru}": evictions} if evictions else {})
    return window("dram", values, namespace=DIGEST)


def test_a_window_in_which_the_ghosts_saw_nothing_says_nothing():
    """Of a few requests the miniatures sample none, while the curve counts for all its sizes: the others decide."""
    windows = steady(lru=0.05, arc=0.095, s3fifo=0.06)
    assert answer([*windows, ghosts(20, {"lru": 0.1}, asked=50.0, size=GIB * 3 // 4)]) == answer(windows)


def test_a_window_without_a_ghost_of_the_present_one_says_nothing():
    """Ghosts of other algorithms alone compare nothing with what is in force: the windows that have both decide."""
    windows = steady(lru=0.05, arc=0.095, s3fifo=0.06)
    told = proposal(answer([ghosts(-1, {"arc": 0.5, "s3fifo": 0.1}), *windows]))
    assert (told.after, rival(told)["windows"]) == ("arc", len(windows))


def test_the_ghost_that_hits_clearly_more_is_proposed():
    """After one period of strong evidence, with both hit ratios, the gain, its error and the size in the sentence."""
    told = proposal(answer(steady(lru=0.05, arc=0.095, s3fifo=0.06)))
    assert (told.field, told.before, told.after) == (f"pools.{DIGEST}.dram.eviction", "lru", "arc")
    for part in ("at 1.0 GiB, arc would hit", "of lru", "points (standard error", "20 windows; +", "last period)"):
        assert part in told.reason
    assert rival(told)["gain"] == pytest.approx(0.045, abs=0.01)


def test_once_it_is_in_force_it_stays():
    """The same windows ask for no second change, nor back."""
    windows = steady(lru=0.05, arc=0.095, s3fifo=0.06)
    told = no_change(answer(windows, "arc"), "arc stays: at 1.0 GiB, s3fifo would hit")
    assert "no candidate would hit more" in told.reason


@pytest.mark.parametrize(
    ("windows", "settings", "said"),
    [
        ([], {}, "not enough data: ghosts of the pool's size told something in 0 windows, 3 are needed"),
        ([dram(4), dram(5)], {}, "not enough data: 9 chunks left, but ghosts"),
        (steady(2, lru=0.1, arc=0.5), {}, "told something in 2 windows"),
        ([*steady(lru=0.1, arc=0.5), dram(0)], {}, "nothing was evicted in 1 window, so any algorithm is right"),
        (steady(lru=0.4, arc=0.4, spread=0), {}, "no candidate would hit more"),
        (steady(lru=0.01, arc=0.012, spread=1e-6), {}, "a switch takes 0.25 points"),
        (steady(lru=0.4, arc=0.41, spread=1e-6), {}, "of the hits, a switch takes 3.0%"),
        (steady(lru=0.4, arc=0.45, spread=1e-6), {}, "in all 10.3% of a period's hits, a switch takes 20% of either"),
        ([ghosts(i, {"lru": 0.05, "arc": 0.03 + (i == 5)}) for i in range(20)], {}, "not more than 1 standard error"),
        (steady(lru=0.1, arc=0.5), {"candidates": ["lru"]}, "no ghost of another candidate"),
    ],
    ids=["none", "no ghosts", "too few", "no victims", "equal", "absolute", "relative", "lately", "chance", "nobody"],
)
def test_it_stays_and_says_why(windows, settings, said):
    """Each thing that must hold and does not is told with its figure."""
    no_change(answer(windows, **settings), said)


def test_a_gain_counts_by_the_misses_where_these_are_fewer():
    """From 92 to 94 % is little of the hits, but every fourth prompt token that had to be computed."""
    proposal(answer(alike(20, lru=0.92, arc=0.94)))
    no_change(answer(alike(20, lru=0.90, arc=0.91)), "of the misses")


@pytest.mark.parametrize("seconds", [15.0, 30.0])
def test_what_gains_by_and_by_is_taken_too(seconds):
    """An eighth of each period's hits is a fifth of one's in all within three periods, however long windows are."""
    windows = alike(60, seconds=seconds, lru=0.4, arc=0.45)
    enough = int(900 / seconds)
    no_change(answer(windows[: enough * 2 // 3]), "in the last period that is 12.5% of the hits, in all 18.")
    assert proposal(answer(windows[:enough])).after == "arc"


def test_what_gains_little_is_never_enough():
    """What is remembered is three periods or so, by its weights."""
    no_change(answer(alike(400, lru=0.4, arc=0.42)), "in all 13.8% of a period's hits")


def test_a_window_longer_than_a_period_counts_as_one():
    """After an agent was away one window tells of its absence: of as much as lasts, it says no more than a period's."""
    known = alike(400, lru=0.4, arc=0.42)
    away = replace(ghosts(0, {"lru": 0.4, "arc": 0.42}, asked=1e6, seconds=1500.0), start=ended(known[-1]))
    no_change(answer([*known, away]), "of a period's hits, a switch takes 20% of either")
    long = alike(40, seconds=300.0, lru=0.4, arc=0.42)
    no_change(answer(long), "in all 16.3% of a period's hits")
    no_change(answer(long, period=60.0), "of a period's hits, a switch takes 20% of either")


def test_a_proposal_tells_what_it_rests_on():
    """In its sentence and its evidence, when the newest period alone would not do."""
    told = proposal(answer(alike(60, lru=0.4, arc=0.45)))
    assert "; in all 23% of a period's hits" in told.reason
    assert rival(told)["summed"] == pytest.approx(0.2323, abs=1e-4)


@pytest.mark.parametrize("algorithm", ["lru", "fifo"])
def test_it_tells_how_many_requests_it_rests_on(algorithm):
    """Three windows with a prompt each are too few for a guard; of a source that counts none it is not known."""
    windows = steady(3, lru=0.1, arc=0.3)
    assert proposal(answer(windows, algorithm)).requests is None
    counted = {"requests_total{salted=no}": 1.0, "requests_total{salted=yes}": 2.0}
    told = proposal(answer([replace(one, values={**one.values, **counted}) for one in windows], algorithm))
    assert told.requests == 9
    no_change(guard(told, Rules("auto", 500, changes_per_hour=9), Recent(START)), "too little evidence: 9 requests")


def test_what_was_better_long_ago_but_is_worse_lately_is_not_taken():
    """A mean over many periods does not switch against what the last period says."""
    past, now = steady(80, lru=0.1, arc=0.3), steady(20, lru=0.3, arc=0.27)
    later = [ghosts(80 + i, {"lru": 0.3, "arc": 0.27}) for i, _ in enumerate(now)]
    no_change(answer([*past, *later]), "it does not lead in the last period")
    proposal(answer(past))


def test_back_to_lru_a_lead_is_enough():
    """What is too little to leave LRU for is enough to return: of many periods and of the last one."""
    no_change(answer(alike(40, lru=0.2, arc=0.205)), "a switch takes 3.0%")
    assert proposal(answer(alike(40, lru=0.205, arc=0.2), "arc")).after == "lru"
    no_change(answer(alike(40, s3fifo=0.205, arc=0.2), "arc"), "a switch takes 3.0%")
    turned = [ghosts(i, {"lru": 0.3, "arc": 0.2} if i < 60 else {"lru": 0.19, "arc": 0.2}) for i in range(80)]
    no_change(answer(turned, "arc"), "it does not lead in the last period")


def test_of_two_that_gain_the_same_the_first_candidate_is_taken():
    """Less than half a point between them is nothing; more is not."""
    near = alike(20, lru=0.1, arc=0.196, s3fifo=0.2)
    assert proposal(answer(near)).after == "arc"
    assert proposal(answer(near, candidates=["s3fifo", "arc", "lru"])).after == "s3fifo"
    assert proposal(answer(alike(20, lru=0.1, arc=0.19, s3fifo=0.2))).after == "s3fifo"


def test_a_leader_of_long_ago_is_soon_forgotten():
    """After an hour in which ARC hit half as much again, LRU has led as clearly for two periods, and comes back."""
    windows = [ghosts(i, {"lru": 0.2, "arc": 0.3} if i < 240 else {"lru": 0.3, "arc": 0.2}) for i in range(320)]
    assert answer(windows[:260], "arc").reason.startswith("arc stays")
    assert proposal(answer(windows[:285], "arc")).after == "lru"


def test_only_ghosts_of_the_pools_size_count():
    """The size nearest to the pool's capacity is read; windows of another capacity are of another pool."""
    both = alike(10, lru=0.1, arc=0.3)
    larger = ghosts(0, {"lru": 0.3, "arc": 0.1}, size=8 * GIB).values
    mixed = [replace(one, values={**one.values, **larger}) for one in both]
    proposal(answer(mixed))
    no_change(answer(mixed, capacity=8 * GIB))
    proposal(answer(mixed, capacity=int(1.2 * GIB)))
    assert "in 0 windows" in answer(mixed, capacity=100 * GIB).reason
    assert "in 0 windows" in answer(mixed, capacity=None).reason
    proposal(answer(both, capacity=None))


def test_series_that_name_no_size_are_left_out():
    """What no store tells stops no tuner: the others are read as if it were not there."""
    windows = steady(lru=0.2, arc=0.4)
    strange = {
        "whatif_tokens_total{algorithm=arc,result=hit}": 9e9,
        "whatif_tokens_total{algorithm=arc,capacity_bytes=<b>,result=hit}": 9e9,
        f"whatif_tokens_total{{algorithm=arc,capacity_bytes={GIB}}}": 9e9,
    }
    assert answer([replace(one, values={**one.values, **strange}) for one in windows]) == answer(windows)


def test_after_a_change_of_capacity_only_windows_since_count():
    """What ghosts of the old capacity said is no evidence for the new one."""
    old = alike(20, lru=0.1, arc=0.3)
    new = [ghosts(20 + i, {"lru": 0.3, "arc": 0.3}, size=int(1.5 * GIB)) for i in range(4)]
    told = no_change(answer([*old, *new], capacity=int(1.5 * GIB)))
    assert rival(told)["windows"] == 4


def test_fifo_without_a_ghost_gives_way_to_the_best_candidate():
    """Of FIFO alone is it known that it is not above LRU; of anything else without a ghost nothing is known."""
    windows = steady(lru=0.3, arc=0.5)
    assert proposal(answer(windows, "fifo")).after == "arc"
    assert "it has no ghost" in answer(steady(lru=0.3, arc=0.5), "s3fifo").reason
    with_ghost = answer(steady(lru=0.3, arc=0.5, fifo=0.2), "fifo")
    assert (with_ghost.after, "against" in with_ghost.reason) == ("arc", True)
    no_change(answer(steady(lru=0.3, arc=0.5, fifo=0.6), "fifo"))


def test_a_burst_that_one_session_makes_is_not_many_witnesses():
    """Neighbouring windows that say the same count for less than independent ones of the same spread."""
    gains = [0.02, 0.02, 0.02, 0.02, 0.02, -0.015, -0.015, -0.015, -0.015, -0.015]
    in_a_row = [ghosts(i, {"lru": 0.2, "arc": 0.2 + gain}) for i, gain in enumerate(gains)]
    shuffled = [ghosts(i, {"lru": 0.2, "arc": 0.2 + gains[i * 3 % 10]}) for i in range(10)]
    errors = [rival(answer(windows))["standard_error"] for windows in (in_a_row, shuffled)]
    assert errors[0] > 1.2 * errors[1]


SHARES = st.lists(
    st.tuples(*(st.floats(0, 1) for _ in range(3)), st.floats(1, 1e6)).map(
        lambda row: ({"lru": row[0], "arc": row[1], "s3fifo": row[2]}, row[3])
    ),
    min_size=0,
    max_size=12,
)


@given(rows=SHARES, present=st.sampled_from(["lru", "arc", "s3fifo"]), min_gain=st.floats(0, 0.2))
def test_never_to_one_that_the_ghosts_call_worse(rows, present, min_gain):
    """Whatever the ghosts say, the one proposed has hit more of the same tokens, by all that a switch takes."""
    windows = [ghosts(i, hits, asked=asked) for i, (hits, asked) in enumerate(rows)]
    told = answer(windows, present, min_gain=min_gain)
    if isinstance(told, Proposal):
        weights = [0.7 ** ((len(rows) - 1 - i) / 20) * asked for i, (_, asked) in enumerate(rows)]
        mean = {
            name: sum(w * hits[name] for w, (hits, _) in zip(weights, rows, strict=True)) / sum(weights)
            for name in ("lru", "arc", "s3fifo")
        }
        assert told.after != present
        assert mean[told.after] - mean[present] >= 0.0025 - 1e-9
        if told.after != "lru":
            assert mean[told.after] - mean[present] >= min_gain * min(mean[present], 1 - mean[present]) - 1e-9


@given(rows=SHARES, factor=st.sampled_from([2.0**-10, 0.5, 4.0, 2.0**20]))
def test_only_shares_matter(rows, factor):
    """The same shares of more traffic change no choice: what counts is how alike the windows are."""
    answers = [
        answer([ghosts(i, hits, asked=asked * scale) for i, (hits, asked) in enumerate(rows)]) for scale in (1, factor)
    ]
    assert getattr(answers[0], "after", None) == getattr(answers[1], "after", None)


@given(rows=SHARES, silent=st.lists(st.integers(0, 200), max_size=20))
def test_silence_changes_nothing(rows, silent):
    """Windows in which nobody asked for anything are neither for nor against."""
    windows = [ghosts(10 * i, hits, asked=asked) for i, (hits, asked) in enumerate(rows)]
    quiet = [ghosts(index, {}) for index in silent]
    together = sorted([*windows, *quiet], key=lambda one: one.start)
    assert answer(together) == answer(windows)


def test_it_is_looked_at_four_times_in_a_period():
    """A leader is found, and a loser left, before the period ends."""
    assert EvictionSettings(period=300.0).look_s == 75.0
