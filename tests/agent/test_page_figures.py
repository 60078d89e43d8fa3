"""What the page is made of: sums over windows, lines of charts, figures in words."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.fakes import START, after, remote_window
from tiertune_agent.web import figures, headline, text
from tiertune_agent.web.charts import draw
from tiertune_agent.web.evidence import SHOWN_ROWS, tables
from tiertune_agent.web.figures import Cost
from tiertune_agent.web.over_time import OFF, cost_chart

STORE = {"name": "a", "observed": None, "reachable": True, "bypass": False, "pending_bypass": None, "frozen": None}
FLEET = {
    "stores": [],
    "unheard": {"stores": [], "sources": []},
    "bypass_unheard": [],
    "frozen": None,
    "remote": None,
    "incidents": {},
    "leader": True,
}


class TestFigures:
    def test_costs_are_per_request(self):
        """A window's sums are divided by its requests; windows that tell nothing are left out."""
        costs = [figures.cost(remote_window(0, requests=4, fetch=2.0, recompute=1.0)), figures.cost(remote_window(1))]
        assert costs == [Cost(after(seconds=15), 0.5, 0.25), None]

    @pytest.mark.parametrize(
        ("changes", "now_is", "expected"),
        [
            ([], "on", []),
            ([], "off", [(-60, 0)]),
            ([(-40, "off")], "off", [(-40, 0)]),
            ([(-40, "on")], "on", [(-60, -40)]),
            ([(-90, "off"), (-20, "on")], "on", [(-60, -20)]),
            ([(-40, "off")], "on", []),
            ([(-40, "off"), (-20, "off")], "on", []),
            ([(-40, "off"), (-20, "off")], "off", [(-40, 0)]),
            ([(-50, "off"), (-40, "off"), (-20, "on")], "on", [(-50, -20)]),
            ([(-50, "off"), (-30, "on"), (-10, "off")], "off", [(-50, -30), (-10, 0)]),
        ],
    )
    def test_when_fetch_was_off(self, changes, now_is, expected):
        """The spans follow the switches, also those before the first moment shown."""
        switched = [(after(seconds=at), to) for at, to in changes]
        spans = figures.off_spans(switched, now_is, START - timedelta(seconds=60), START)
        assert spans == [tuple(after(seconds=at) for at in pair) for pair in expected]


SECONDS = st.floats(1e-7, 1e4)
FRESH = timedelta(seconds=45)


def paid(at, fetch_s=0.02, recompute_s=0.5):
    return Cost(after(seconds=at), fetch_s, recompute_s)


def charted(costs, off=(), now=0.0):
    spans = [tuple(after(seconds=at) for at in pair) for pair in off]
    return cost_chart("host-a", costs, spans, after(seconds=now), FRESH)


def told(chart):
    """Points of its series, by kind."""
    return {series.kind: series.points for series in chart.series}


class TestCharts:
    @given(st.lists(st.tuples(SECONDS, SECONDS), min_size=2, max_size=70))
    def test_lines_stay_within_the_frame(self, pairs):
        """Whatever the costs, every point lies between the axes, from the left edge to the right."""
        drawn = charted([paid(index - len(pairs), *pair) for index, pair in enumerate(pairs)], [(-1e6, -0.5)])
        for series in drawn.series:
            for x, y in series.points:
                assert drawn.x[0] <= x <= drawn.x[1]
                assert drawn.y[0] <= y <= drawn.y[1]
        assert len(drawn.ys) >= 2
        assert (drawn.ys[0][0], drawn.ys[-1][0]) == drawn.y
        assert all(label in draw(drawn) for _, label in (*drawn.xs, *drawn.ys))

    @pytest.mark.parametrize("costs", [[], [paid(-5)], [paid(-5, 0.0, 1.0), paid(-4, 1.0, 0.0)]])
    def test_too_little_is_no_chart(self, costs):
        """A line needs two points with both costs known."""
        assert charted(costs) is None

    def test_a_cheaper_way_is_drawn_lower(self):
        """More seconds are higher up, and decades are named."""
        drawn = charted([paid(-10), paid(0)])
        lines = told(drawn)
        assert [x for x, _ in lines["fetch"]] == [-10.0, 0.0]
        assert [10**y for _, y in lines["fetch"]] == pytest.approx([0.02, 0.02])
        assert [10**y for _, y in lines["recompute"]] == pytest.approx([0.5, 0.5])
        assert [label for _, label in drawn.ys] == ["10 ms", "100 ms", "1 s"]

    def test_times_while_fetch_was_off_are_told(self):
        """Each from edge to edge, cut to what is drawn; what lies before that is not there."""
        drawn = charted([paid(-100), paid(0)], [(-300, -200), (-150, -60), (-20, 5)])
        low, high = drawn.y
        assert told(drawn)[OFF] == (
            *((-100.0, low), (-100.0, high), (-60.0, high), (-60.0, low), None),
            *((-20.0, low), (-20.0, high), (0.0, high), (0.0, low)),
        )
        assert OFF not in told(charted([paid(-100), paid(0)]))

    def test_nothing_new_changes_no_chart(self):
        """Between two windows the chart is the same, so it is not drawn again; a silent store's is not called now."""
        costs = [paid(-100), paid(0)]
        first, later, late = (charted(costs, [(-50, now)], now) for now in (1.0, 40.0, 200.0))
        assert first == later
        assert [label for _, label in first.xs] == ["100 s ago", "now"]
        assert [label for _, label in late.xs] == ["5 min ago", "3 min ago"]


SHARED, AWAY = "Engines share KV chunks; there is no remote tier.", "4 of 5 stores do not answer."


def headed(fleet, modes=None, *, traffic=True):
    at = {what: {"a": mode} if isinstance(mode, str) else mode for what, mode in (modes or {}).items()}
    return headline.headline(FLEET | fleet, at, traffic=traffic, waiting=0)


class TestWords:
    @pytest.mark.parametrize(
        ("write", "texts"),
        [
            (
                text.count,
                {
                    950: "950",
                    12_400: "12.4 k",
                    3_140_000: "3.1 M",
                    999_960: "1.0 M",
                    999.6: "1.0 k",
                    1e15: "1.0 P",
                    None: text.NOTHING,
                },
            ),
            (text.money, {0.0824: "0.082", -0.00012: "-0.0001", -1.1e-05: "0", 99.6: "100", -1234.6: "-1,235"}),
            (text.seconds, {0.0: "0", 0.0042: "4.2 ms", 0.0997: "0.10 s", -0.35: "−0.35 s", 125: "2m 05s"}),  # noqa: RUF001
            (text.signed, {12.0: "+12 s", -12.0: "−12 s"}),  # noqa: RUF001
            (text.span, {900: "15 min", 876: "15 min", 90: "90 s", 86400: "24 h"}),
        ],
    )
    def test_figures_are_short(self, write, texts):
        """Few digits, one unit."""
        assert {value: write(value) for value in texts} == texts

    def test_ages_are_coarse(self):
        """So that a page that refreshes itself does not flicker."""
        texts = {-3: "just now", 9: "just now", 47: "40 s ago", 100: "1 min ago", 7300: "2 h ago", 3e5: "3 days ago"}
        assert {seconds: text.ago(START, after(seconds=seconds)) for seconds in texts} == texts

    def test_a_share_of_nothing_is_a_dash(self):
        """No division by zero, no pretended 0 %."""
        assert (text.share(1, 4), text.share(0, 0)) == ("25.0%", text.NOTHING)

    @pytest.mark.parametrize(
        ("listed", "expected"),
        [(["a"], "a"), (["a", "b"], "a and b"), (["a", "b", "c"], "a, b and c"), (list("abcde"), "a, b and 3 more")],
    )
    def test_many_stores_are_cut(self, listed, expected):
        """A large fleet does not fill the sentence."""
        assert headline.few(listed) == expected

    @pytest.mark.parametrize(
        ("modes", "expected"),
        [
            ("auto auto auto", "TierTune changes by itself what is on auto, where the figures say so."),
            ("observe recommend auto", "TierTune changes by itself what is on auto, where the figures say so."),
            ("observe recommend observe", "TierTune recommends changes and waits for approval."),
            ("observe observe observe", "TierTune only watches and changes nothing."),
        ],
    )
    def test_what_tuners_may_do_is_told_whosever_they_are(self, modes, expected):
        """By the modes that it is given, an operator's own tuner among them, in the sentence and in the facts."""
        told = dict(zip(("fetch", "sizes", "what it likes"), modes.split(), strict=True))
        made = headed({"stores": [STORE]}, told)
        (mode,) = (fact.value for fact in made.facts if fact.name == "Mode")
        assert (made.more, mode) == (expected, ", ".join(f"{what} {mode}" for what, mode in told.items()))
        assert headed({"stores": [STORE], "leader": False}, told).more == "This agent stands by: another one leads."

    @pytest.mark.parametrize(
        ("modes", "frozen", "mode", "more", "changes"),
        [
            ("observe auto auto", "", "auto at b and c, else observe", "auto", "allowed"),
            ("observe recommend auto", "", "auto at c, recommend at b, else observe", "auto", "allowed"),
            ("recommend recommend recommend", "", "recommend", "recommend", "allowed"),
            ("observe auto auto", "b", "auto at b and c, else observe", "auto", "only commanded ones at b,"),
            ("observe auto observe", "b", "auto at b, else observe", "", "only commanded ones at b,"),
            ("observe auto observe", "ac", "auto at b, else observe", "auto", "only commanded ones at a and c,"),
        ],
    )
    def test_what_holds_only_at_some_stores_is_told_with_them(self, modes, frozen, mode, more, changes):
        """The strongest mode first; the calendar stops all only if it stops every store that has this mode."""
        stores = [{**STORE, "name": name, "frozen": "by the calendar" if name in frozen else None} for name in "abc"]
        made = headed({"stores": stores}, {"fetch": dict(zip("abc", modes.split(), strict=True))})
        facts = {fact.name: fact.value for fact in made.facts}
        assert facts["Mode"] == f"fetch {mode}"
        assert made.more == headline.DOES.get(more, headline.CALENDAR)
        assert facts["Changes"].startswith(changes)

    @pytest.mark.parametrize(
        ("stores", "sources", "level", "sentence", "told"),
        [
            ([], [], "ok", SHARED, {"Stores": "1 of 1 up"}),
            (["b"], [], "warn", "1 of 2 stores does not answer.", {"Stores": "1 of 2 up, no answer from b"}),
            (list("bcde"), [], "warn", AWAY, {"Stores": "1 of 5 up, no answer from b, c and 2 more"}),
            ([], ["e"], "warn", SHARED, {"Stores": "1 of 1 up", "Observed": "0 of 1 answer"}),
        ],
    )
    def test_a_store_that_was_never_heard_counts(self, stores, sources, level, sentence, told):
        """Also with one that was heard, the sentence and the facts are those of the settings."""
        made = headed({"stores": [STORE], "unheard": {"stores": stores, "sources": sources}})
        assert (made.level, made.sentence) == (level, sentence)
        facts = {fact.name: fact.value for fact in made.facts}
        assert {name: facts.get(name) for name in ("Stores", *told)} == told

    @pytest.mark.parametrize(
        ("stores", "sources", "sentence"),
        [
            (["a"], ["e"], "Waiting for the first store to answer."),
            ([], ["e"], "Waiting for the first source to answer."),
        ],
    )
    def test_who_is_waited_for_is_told(self, stores, sources, sentence):
        """Where none was heard yet: a store if the settings name one, else a source."""
        made = headed({"unheard": {"stores": stores, "sources": sources}})
        assert (made.level, made.sentence) == ("info", sentence)

    @pytest.mark.parametrize(
        ("states", "traffic", "sentence"),
        [
            ({"health": "dead"}, True, "The remote tier is dead at a and b, and what it holds is recomputed."),
            ({"health": "ok dead"}, True, "The remote tier is dead at b, and what it holds is recomputed."),
            ({"health": "ok slow"}, True, "Engines share KV chunks; fetching from the remote tier is on."),
            ({"fetch": "on off"}, True, "Engines share KV chunks; fetching from the remote tier is off at b."),
            ({"bypass": "on off"}, True, "Bypassed at a: engines there recompute everything."),
            ({"bypass": "on"}, True, "All stores are bypassed: they answer miss, and engines recompute everything."),
            ({"health": "dead", "fetch": "off"}, False, "The remote tier is dead at a and b, and what it holds is"),
            ({}, False, "Stores are up, without traffic yet."),
        ],
    )
    def test_the_worst_is_told_first(self, states, traffic, sentence):
        """That fetching is on says nothing while nothing can be fetched, or nobody is answered."""
        stores = []
        for place, name in enumerate("ab"):
            told = {what: state.split()[place % len(state.split())] for what, state in states.items()}
            tuning = {"tiers": {"remote": {"fetch": told.get("fetch", "on")}}}
            tiers = {"remote": {"health": told.get("health", "ok")}}
            bypass = told.get("bypass") == "on"
            stores.append({**STORE, "name": name, "bypass": bypass, "tuning": tuning, "tiers": tiers})
        assert headed({"stores": stores}, traffic=traffic).sentence.startswith(sentence)

    def test_of_stores_that_fell_silent_and_those_that_were_never_heard_both_are_told(self):
        """In one fact, with the sum of all."""
        silent = {**STORE, "name": "b", "reachable": False}
        made = headed({"stores": [STORE, silent], "unheard": {"stores": ["c"], "sources": []}})
        assert (made.facts[0].value, made.level) == ("1 of 3 up, no answer from b and c", "warn")
        assert made.sentence == "2 of 3 stores do not answer."
        alone = headed({"stores": [silent]})
        assert (alone.level, alone.sentence) == ("bad", "No store answers, so nothing is measured or changed.")

    @pytest.mark.parametrize(
        ("up", "sentence"), [(1, "9 of 10 stores do not answer."), (10, "All stores are bypassed: they answer miss, ")]
    )
    def test_silence_is_told_before_what_few_stores_do(self, up, sentence):
        """Of ten the one that answers is bypassed, or all ten are."""
        stores = [{**STORE, "name": f"host-{place}", "bypass": True, "reachable": place < up} for place in range(10)]
        assert headed({"stores": stores}).sentence.startswith(sentence)

    def test_evidence_of_any_shape_becomes_tables(self):
        """Plain values in one table, each list of objects in its own, with the newest rows; units by name."""
        windows = [{"start": (after(seconds=index)).isoformat(), "fetch_s": 0.5} for index in range(40)]
        evidence = {"resident_bytes": 2**30, "gains": [0.25, -1], "none": None, "deep": {"a": 1}, "windows": windows}
        plain, listed = tables(evidence)
        assert plain.rows == [("resident", "1.0 GiB"), ("gains", "0.25, -1"), ("none", "–"), ("deep", '{"a": 1}')]  # noqa: RUF001
        (sizes,) = tables({"shape": f"{2**20}/0/{2**30}", "best": "unknown", "goal": 2**21})
        shape = "1.0 MiB dram, 0 B disk, 1.0 GiB remote"
        assert sizes.rows == [("shape", shape), ("best", "unknown"), ("goal", "2.0 MiB")]
        assert (listed.title, listed.head) == ("windows", ["start", "fetch"])
        assert (len(listed.rows), listed.left_out) == (SHOWN_ROWS, 40 - SHOWN_ROWS)
        assert listed.rows[-1] == ["12:00:39", "0.50 s"]
