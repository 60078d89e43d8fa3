"""What the page works out of simulations: curves of pools, decisions' counterfactuals, what auto would have done."""

import re
from dataclasses import replace

import pytest

from agent.agents import POLICY
from agent.answers import trial_of
from agent.fakes import DIGEST, SLOW, START, after, gib, propose, window
from agent.html import Page
from agent.test_holdout_verdict import drawn
from tiertune_agent.records import Prospect, Rates, State, Target, series
from tiertune_agent.tuners.admission import AdmissionSettings
from tiertune_agent.tuners.base import Proposal
from tiertune_agent.tuners.evidence import Ratio, Summand
from tiertune_agent.verdicts.trials import fetch_trial, size_trial
from tiertune_agent.verdicts.verdict import Spells, weigh
from tiertune_agent.web.curves import Ghost, by_gain, counted, curve_chart, curves
from tiertune_agent.web.evidence import OF, Compared, compared
from tiertune_agent.web.page import environment
from tiertune_agent.web.unmade import sentence, unmade, values
from tiertune_connector.whatif.chain import Shape

GIB = 1 << 30
STORE = {"name": "host-a", "tuning": {}, "pools": {DIGEST: {"dram": {"effective": {"capacity_bytes": GIB}}}}}
SMALL, LARGE = Shape(GIB, 0, 4 * GIB), Shape(2 * GIB, 0, 4 * GIB)


def told(shares, at=0, asked=1000.0):
    """A window in which each ghost, by algorithm and bytes, hit such a share of the tokens."""
    values = {}
    for (algorithm, size), share in shares.items():
        for result, part in (("hit", share), ("miss", 1 - share)):
            labels = {"algorithm": algorithm, "capacity_bytes": str(size), "result": result}
            values[series("whatif_tokens_total", labels.items())] = part * asked
    return window("", values, at, namespace=DIGEST, model="llama")


def curve(*windows, store=STORE):
    (found,) = curves(store, [one for window in windows if (one := counted(window))])
    return found


def line(*points):
    """Ghosts of some bytes, each with its share and what that may be off by."""
    return [Ghost("lru", size, 1.0, Ratio(share, doubt / 2, 4)) for size, share, doubt in points]


POOL, DISK = Target("host-a", "dram", DIGEST), Target("host-a", "disk")
ARC = (f"pools.{DIGEST}.dram.eviction", "lru", "arc")
ADMIT = ("admission.disk", "always", "second_access")
LRU = {("lru", GIB // 2): 0.2, ("lru", GIB): 0.33, ("lru", 2 * GIB): 0.4, ("lru", 8 * GIB): 0.41}


class TestCurves:
    def test_the_sentence_sets_the_pool_against_the_best_that_was_simulated(self):
        """The smallest size that hits as much as any; its gain sorts the curves."""
        seen = curve(*(told({**LRU, ("arc", 2 * GIB): 0.409}, at) for at in range(4)))
        assert seen.sentence == "lru hits 33% at 1 GiB; the best simulated, arc at 2 GiB, 41%."
        assert seen.gain == pytest.approx(0.079)

    def test_a_flat_curve_says_that_less_would_do(self):
        """Where no larger size hits more, and a smaller one as much."""
        flat = {("lru", GIB // 2): 0.33, ("lru", GIB): 0.33, ("lru", 4 * GIB): 0.331}
        seen = curve(*(told(flat, at) for at in range(4)))
        assert seen.sentence == "lru hits 33% at 1 GiB; the best simulated, lru at 512 MiB, 33%."

    def test_no_size_at_all_is_not_the_best(self):
        """Where nothing is hit, a pool of nothing does as well, but cannot be had."""
        seen = curve(*(told({("lru", 0): 0.0, ("lru", GIB): 0.0}, at) for at in range(4)))
        assert seen.sentence == "lru hits 0% at 1 GiB."

    def test_a_size_that_is_new_is_set_against_the_same_windows(self):
        """Requests that came easily while it was simulated are no gain of its."""
        hard, easy = {("lru", GIB): 0.1}, {("lru", GIB): 0.9, ("lru", 2 * GIB): 0.9}
        windows = [told(hard, at) for at in range(8)] + [told(easy, at) for at in range(8, 12)]
        seen = curve(*windows)
        assert (seen.sentence, seen.gain) == ("lru hits 37% at 1 GiB.", 0.0)

    @pytest.mark.parametrize("shares", [[0.9], [0.9, 0.9], [0.9, 0.1, 0.4, 0.2]])
    def test_what_is_not_sure_is_no_gain(self, shares):
        """Too few windows, or such as differ too much: nothing is said beyond its own size."""
        windows = (told({("lru", GIB): 0.3, ("lru", 2 * GIB): share}, at) for at, share in enumerate(shares))
        seen = curve(*windows)
        assert (seen.sentence, seen.gain) == ("lru hits 30% at 1 GiB.", 0.0)

    def test_the_surest_gain_comes_first(self):
        """Not the largest that a single window tells of."""
        lucky = curve(told({("lru", GIB): 0.1, ("lru", 2 * GIB): 1.0}), store={**STORE, "name": "a"})
        steady = curve(*(told(LRU, at) for at in range(4)), store={**STORE, "name": "b"})
        assert [one.store for one in by_gain([lucky, steady])] == ["b", "a"]

    def test_pools_of_one_model_keep_their_order(self):
        """Whichever told its window first: as windows pass that changes, and the page would swap them."""
        one, other = (counted(replace(told(LRU), namespace=each)) for each in "ab")
        for seen in ([one, other], [other, one]):
            assert [each.namespace for each in by_gain(curves(STORE, seen))] == ["a", "b"]

    @pytest.mark.parametrize(
        ("sizes", "said"), [((0, GIB), True), ((0,), False), ((GIB,), True), ((GIB, 2 * GIB), False)]
    )
    def test_an_algorithm_with_one_drawn_size_is_said_to_be_at_the_present_one(self, sizes, said):
        """No size at all is not drawn, and does not count."""
        seen = curve(told({**LRU, **{("arc", size): 0.3 for size in sizes}}))
        shown = environment().from_string('{% from "drawings.html" import curve %}{{ curve(chart, one) }}')
        assert ("arc (at the present size)" in shown.render(chart=seen.chart, one=seen)) == said

    def test_few_windows_have_no_error(self):
        """Two windows give none, and the API says null."""
        seen = curve(told(LRU), told(LRU, 1))
        assert seen.document()["points"][0]["hit_ratio_standard_error"] is None

    def test_sizes_of_an_earlier_capacity_are_left_out(self):
        """Only what the newest window simulates is drawn, over all windows that tell of it."""
        seen = curve(told({("lru", 3 * GIB): 0.5}), told(LRU, 1), told(LRU, 2)).lines["lru"]
        assert [ghost.size for ghost in seen] == [GIB // 2, GIB, 2 * GIB, 8 * GIB]
        assert seen[1].tokens == pytest.approx(2000)

    def test_a_pool_without_a_size_near_its_own_draws_no_conclusion(self):
        """Ghosts of quite another size say nothing of the pool as it is."""
        seen = curve(told({("lru", 64 * GIB): 0.5, ("lru", 128 * GIB): 0.6}))
        assert "no size near its own" in seen.sentence

    def test_what_is_no_number_is_no_size(self):
        """A store that tells nonsense for a size has no ghosts."""
        assert counted(told({("lru", "<b>"): 0.5})) is None

    @pytest.mark.parametrize("labels", [{"algorithm": "lru"}, {"capacity_bytes": "9" * 400, "result": "hit"}])
    def test_series_that_no_store_tells_are_left_out(self, labels):
        """Without a size, or with one that is no number of bytes, the others still make their curve."""
        usual = told(LRU)
        strange = {**usual.values, series("whatif_tokens_total", labels.items()): 5.0}
        assert counted(replace(usual, values=strange)) == counted(usual)

    def test_a_chart_rises_to_the_right_and_marks_the_present(self):
        """More is higher, larger is further right, and the mark is at the present size."""
        drawn = curve(*(told(LRU, at) for at in range(3))).chart
        (line,) = (series for series in drawn.series if "band" not in series.kind)
        assert line.points == tuple(sorted(line.points))
        assert [share for _, share in line.points] == pytest.approx([0.2, 0.33, 0.4, 0.41])
        assert [label for _, label in drawn.xs] == ["512 MiB", "now 1 GiB", "2 GiB", "8 GiB"]
        assert drawn.marked == "now 1 GiB"
        assert drawn.xs[1][0] == line.points[1][0]

    def test_what_values_may_be_off_by_is_an_area(self):
        """Two standard errors on both sides, not below nothing; a single point has none."""
        shares = ((1.0, 0.1, 0.15), (2.0, 0.2, 0.05))
        lines = {"lru": line(*shares), "arc": line((2.0, 0.3, 0.05))}
        series = {one.kind: one for one in curve_chart(lines, None, "").series}
        assert [share for _, share in series["band c0"].points] == pytest.approx([0.25, 0.25, 0.15, 0.0])
        assert (series["c1"].line, series["c1"].dots > series["c0"].dots) == (False, True)
        assert "band c1" not in series

    def test_a_size_near_the_present_one_has_no_label(self):
        """Labels would run together."""
        sizes = (1.0 * GIB, 1.1 * GIB, 4.0 * GIB)
        drawn = curve_chart({"lru": line(*((size, 0.5, 0.0) for size in sizes))}, 1.1 * GIB, "")
        assert [label for _, label in drawn.xs] == ["now 1.1 GiB", "4 GiB"]

    def test_one_size_alone_is_no_chart(self):
        """A point is no curve."""
        assert curve(told({("lru", GIB): 0.3})).chart is None


@pytest.mark.parametrize(("most", "tick"), [(0.33, "40%"), (0.05, "5%"), (1.0, "100%")])
def test_the_scale_ends_at_a_round_number(most, tick):
    """Above the highest value, and never above all of it."""
    drawn = curve_chart({"lru": line((1.0, most / 2, 0.0), (2.0, most, 0.0))}, None, "")
    assert drawn.ys[-1] == (drawn.y[1], tick)


def test_bars_are_drawn_to_one_scale():
    """The longest with its doubt fills the room; what is not known has no length."""
    drawn = Compared("of", "", before=2.0, after=3.0, doubt=1.0).chart
    assert drawn.rows == (
        "Before the change: 2",
        "Promised: unknown",
        "After, as it is: 3",
        "Without the change: unknown",
    )
    assert [(one.kind, one.values, one.doubts) for one in drawn.pieces] == [
        ("column", (2.0, None, None, None), ()),
        ("after", (None, None, 3.0, None), (None, None, 1.0, None)),
        ("without", (None, None, None, None), ()),
    ]
    assert (drawn.top, drawn.against) == (4.0, 2.0)
    assert drawn.label == f"of: {', '.join(drawn.rows)}"


def wish(history, tuner, target, change, *, evidence=None, at=START):
    return propose(history, tuner, target, Proposal(*change, "because", evidence or {}), at=at)


SIZES = {"shape": str(SMALL), "best": str(LARGE), "seconds_before": 0.45, "seconds_after": 0.4}


def resize(history, store="host-a", evidence=SIZES, **options):
    change = ("tiers.dram.capacity_bytes", GIB, 2 * GIB)
    return wish(history, "tier_size", Target(store, "dram"), change, evidence=evidence, **options)


class TestCompared:
    def test_a_verdict_on_the_same_requests_has_a_counterfactual(self, history):
        """Before and promised are the proposal's, after and without the verdict's; doubt is two standard errors."""
        made = replace(resize(history), state=State.KEPT)
        pairs = ((0.5, 0.4), (0.52, 0.41), (0.51, 0.42))
        verdict = weigh(trial_of(pairs, "seconds to the first token per request"), worse_by=0)
        told = compared(made, [{"evidence": verdict.evidence}])
        assert (told.before, told.promised, told.windows) == (0.45, 0.4, 3)
        assert (told.without, told.after) == (pytest.approx(0.51), pytest.approx(0.41))
        assert told.doubt == pytest.approx(2 * verdict.evidence["standard_error"])
        assert told.sentence.startswith("19.6% less (± ")

    def test_a_holdout_s_requests_are_others(self, history):
        """Drawn by lot, from the same windows; what only predictions tell is of the same requests."""
        switch = ("tiers.remote.fetch", "off", "on")
        made = replace(wish(history, "remote_fetch", Target("host-a", "remote"), switch), state=State.KEPT)
        held_out = fetch_trial("on", [drawn(index, 0.7) for index in range(9)], None)
        for trial, how in (
            (held_out, "measured on requests drawn by lot: others, but of the same windows."),
            (trial_of(((1.0, 0.5),) * 3, OF["fetch"]), "estimated on the same requests."),
        ):
            told = compared(made, [{"evidence": weigh(trial, worse_by=0).evidence}])
            assert told.sentence.endswith(f" than without the change, {how}")

    def test_seconds_with_rent_are_not_those_that_were_promised(self, history):
        """Half of the DRAM, as it was promised, at 85 instead of 80 ms: the verdict's 32 have its rent in them."""
        small, large, rates = gib(32), gib(64), Rates(gpu_hour=2.5, gib_hour={"dram": 3.0 / 730})
        costs = {str(large): 0.08, str(small): 0.085}
        seen = [Prospect("n", after(minutes=5 * index), 300.0, 1200, costs) for index in range(4)]
        evidence = {"shape": str(large), "best": str(small), "seconds_before": 0.08, "seconds_after": 0.085}
        change = ("tiers.dram.capacity_bytes", large.dram, small.dram)
        made = wish(history, "tier_size", Target("host-a", "dram"), change, evidence=evidence)
        verdict = weigh(size_trial(seen, large, small, rates=rates, hosts=4), worse_by=0)
        told = compared(replace(made, state=State.KEPT), [{"evidence": verdict.evidence}])
        assert (told.without, told.after) == (pytest.approx(0.08), pytest.approx(0.0324, abs=1e-4))
        assert (told.before, told.promised) == (None, None)
        assert told.of == "seconds to the first token per request, with the difference in rent"

    def test_what_soaks_is_not_known_yet(self, history):
        """Before and promised are there; after and without come with the verdict."""
        told = compared(replace(resize(history), state=State.SOAKING, soak_until=START), [])
        assert (told.before, told.promised, told.after, told.without) == (0.45, 0.4, None, None)
        assert [row.rpartition(": ")[2] for row in told.chart.rows] == ["0.45", "0.4", "unknown", "unknown"]
        assert "12:00:00 UTC" in told.sentence

    def test_what_a_bound_cut_short_promises_nothing(self, history):
        """The seconds of the proposal are those of the best size, which the policy's bound does not allow."""
        best = Shape(4 * GIB, 0, 4 * GIB)
        told = compared(resize(history, evidence={**SIZES, "best": str(best)}), [])
        assert told is None

    def test_two_spells_have_no_counterfactual(self, history):
        """Nobody simulates what a tier would have held: before is the earlier spell, without is unknown."""
        parts = tuple(Summand(0.8, 1.0) for _ in range(3))
        made = replace(wish(history, "admission", DISK, ADMIT), state=State.KEPT)
        verdict = weigh(Spells(parts, parts, "cost of the prompts, without disk being 1"), worse_by=0)
        told = compared(made, [{"evidence": verdict.evidence}])
        assert (told.before, told.after) == (pytest.approx(0.8), pytest.approx(0.8))
        assert told.without is None
        assert "the requests are others" in told.sentence

    @pytest.mark.parametrize("state", [State.REJECTED, State.EXPIRED, State.FAILED])
    def test_what_was_never_made_is_not_compared(self, history, state):
        """There is nothing after it."""
        assert compared(replace(resize(history), state=state), []) is None

    def test_an_eviction_promises_by_its_rival(self, history):
        """The missed share of the algorithm in force, and of the one that is chosen."""
        rivals = [{"algorithm": "arc", "hits": 0.4, "present": 0.3}]
        told = compared(wish(history, "eviction", POOL, ARC, evidence={"rivals": rivals}), [])
        assert (told.before, told.promised) == (pytest.approx(0.7), pytest.approx(0.6))

    def test_a_switch_promises_by_what_was_asked(self, history):
        """A window of one request counts as little as in the verdict: 101 s of recomputing, or 52 of fetching."""
        switch = ("tiers.remote.fetch", "on", "off")
        busy, quiet = {"recompute_s": 100.0, "fetch_s": 50.0}, {"recompute_s": 1.0, "fetch_s": 2.0}
        wished = wish(history, "remote_fetch", Target("host-a", "remote"), switch, evidence={"windows": [busy, quiet]})
        told = compared(wished, [])
        assert (told.before, told.promised) == (pytest.approx(52 / 101), 1.0)


@pytest.fixture(params=[False, True])
def advisory(request, policy_file, monkeypatch):
    """Whether admission, which is on auto, only advises."""
    monkeypatch.setattr(AdmissionSettings, "advisory", request.param)
    policy_file.write_text(POLICY.replace("tuners: {", "tuners: {admission: {mode: auto}, "))
    return request.param


class TestUnmade:
    def test_nothing_is_said_too(self, rounds, seen):
        """Without a wish the sentence says nothing."""
        rounds(2)
        assert sentence(unmade(seen())).startswith("Nothing:")

    def test_an_old_answer_says_how_old_it_is(self, rounds, http, clock):
        """A tuner of half an hour's period was asked long ago, when there was less to see."""
        rounds(2)
        clock.advance(1200)
        unchanged = Page(http.get("/").text).text.split("Why nothing else changes")[1]
        assert re.search(r"host-a\s+admission\s[^@]*?20 min ago", unchanged)

    def test_all_wishes_are_told_and_some_are_shown(self, history, clock, rounds, http):
        """The page shows twenty; the sentence and the API count all."""
        rounds(1)
        for number in range(25):
            resize(history, f"host-{number}", at=clock.now())
        clock.advance(30)
        told = http.get("/api/v1/auto").json()
        shown = http.get("/").text.partition('id="auto-h"')[2].partition("</section>")[0]
        assert (shown.count("<li>"), len(told["would"])) == (20, 25)
        assert "25 changes" in told["sentence"]
        assert f"<p>{told['sentence']}</p>" in shown
        assert "5 more" in shown

    def test_each_wish_tells_what_its_proposal_promised_and_what_became_of_it(self, history, clock, rounds, seen):
        """What is still wished comes first; of two wishes of one setting the newest counts."""
        rounds(1)
        resize(history, at=clock.now())
        given_up = wish(history, "admission", DISK, ADMIT, at=clock.now())
        history.decisions.expire(given_up, "no longer", now=clock.now())
        clock.advance(30)
        told = unmade(seen())
        assert sentence(told) == "On auto, TierTune would have made 2 changes in the last day."
        assert [(" → ".join(values(one.decision)), one.became) for one in told] == [
            ("1.0 GiB → 2.0 GiB", "It waits for approval."),
            ("always → second_access", "It was no longer wished at 12:00 UTC."),
        ]
        document = told[0].document()
        assert (document["tuner"], document["reason"], document["state"]) == ("tier_size", "because", "proposed")

    def test_what_only_advises_would_have_done_nothing(self, advisory, history, clock, rounds, seen):
        """On auto it is shown as recommend, whatever the key of its settings, and its wishes would wait on auto too."""
        rounds(1)
        wish(history, "admission", DISK, ADMIT, at=clock.now())
        clock.advance(30)
        look = seen()
        told = unmade(look)
        assert look.policy["modes"]["admission"] == ("recommend" if advisory else "auto")
        assert [wish.decision.tuner for wish in told] == ([] if advisory else ["admission"])

    def test_what_auto_did_is_not_what_it_would_have_done(self, store, rounds, seen):
        """Decisions in mode auto are not listed."""
        store.bandwidth = SLOW
        rounds(4)
        assert unmade(seen()) == []
