"""The report: figures of the runs, whichever were played, on one page that calls nothing and runs nothing."""

import re
from dataclasses import replace

import pytest

from agent.hostile import HOSTILE
from agent.html import Page
from replay.files import SCENARIO
from tiertune_agent.replay.report import Played, report
from tiertune_agent.replay.scenario import Event, Scenario
from tiertune_agent.web.over_time import step_chart
from tiertune_connector.documents import load_yaml


def run(mean_s, *, remote=200, **more):
    return {
        "ttft_mean_s": mean_s, "ttft_p50_s": mean_s / 2, "ttft_p99_s": mean_s * 10,
        "ttft_mean_after_3_periods_s": None, "prefill_gpu_s": 9.0, "prompt_tokens": 1000,
        "hit_tokens": {"gpu": 0, "dram": 300, "disk": 0, "remote": remote}, "recomputed_tokens": 700 - remote,
        "fetched_bytes": 10**9, "decisions": 0, "rollbacks": 0, "split": [[0.0, 0.5]], **more,
    }  # fmt: skip


def played(**runs):
    document = {"trace": "t", "scenario": "s", "requests": 12345, "wall_s": 1.0, "runs": runs}
    return Played(document, load_yaml(SCENARIO, Scenario), 3600.0)


CHANGES = [
    {
        "at_s": 300.0, "tuner": "tier_size", "field": "tiers.dram.capacity_bytes", "before": 2**30, "after": 2**31,
        "state": "kept", "reason": "it pays",
    },
    {
        "at_s": 900.0, "tuner": "eviction", "field": "pools.replay.dram.eviction", "before": "lru", "after": "arc",
        "state": "rolled_back", "reason": HOSTILE,
    },
]  # fmt: skip
ANSWER = {"at_s": 1200.0, "tuner": "tier_size", "reason": "stays, it fits"}
TUNED = run(0.5, decisions=2, rollbacks=1, split=[[0.0, 0.5], [300.0, 0.25]], changes=CHANGES, answers=[ANSWER])


class TestPage:
    def test_gains_are_told_against_baseline(self):
        """Mean and p99 of every run, in words how much sooner or later."""
        text = Page(report([played(baseline=run(1.0), rule=run(0.8), always=run(1.5))])).text
        assert "With rule the first token comes 20 % sooner than with baseline: 800 ms, not 1.00 s." in text
        assert "50 % later" in text
        assert "8.00 s" in text
        assert "12,345 requests in 60 min" in text

    def test_the_agent_has_the_headline_where_it_was_played(self):
        """tuned is what the page is about, though another run is faster."""
        page = Page(report([played(baseline=run(1.0), best_split=run(0.4), tuned=TUNED)]))
        assert "With tuned the first token comes 50 % sooner than with baseline" in page.text
        assert "2 changed something, 1 of them was rolled back" in page.text
        assert "5m 00s tier_size tiers.dram.capacity_bytes 1.0 GiB → 2.0 GiB kept it pays" in page.text
        assert "20m 00s tier_size stays, it fits" in page.text
        assert len(page.all("circle")) == 1, "only a change of size stands on the line of the split"

    @pytest.mark.parametrize("names", [["rule"], ["never", "always"], ["tuned"], ["baseline"], ["rule_blind", "rule"]])
    def test_any_subset_of_runs_makes_a_page(self, names):
        """Without baseline the first run is the reference; without tuned there is no split."""
        runs = {name: TUNED if name == "tuned" else run(1.0 + index) for index, name in enumerate(names)}
        page = Page(report([played(**runs)]))
        assert f"against {names[0] if 'baseline' not in names else 'baseline'}" in page.text
        assert ("What the agent did" in page.text) == ("tuned" in names)

    def test_a_faster_run_is_told_where_the_agents_is_the_reference(self):
        """tuned came first and baseline was not played: no page says that nothing is faster if something is."""
        text = Page(report([played(tuned=TUNED, best_split=run(0.4))])).text
        assert "With best_split the first token comes 20 % sooner than with tuned: 400 ms, not 500 ms." in text
        text = Page(report([played(tuned=TUNED, best_split=run(0.6))])).text
        assert "No run is faster than tuned: 500 ms to the first token on average." in text

    @pytest.mark.parametrize(
        ("event", "moves"), [({"link_factor": 0.5}, True), ({"link": "down"}, True), ({"by_hand": {}}, False)]
    )
    def test_a_link_is_called_moving_only_if_something_happens_to_it(self, event, moves):
        """What somebody changes in DRAM by hand is an event, too."""
        cell = played(rule=run(1.0))
        steady = cell.scenario.model_copy(
            update={
                "link": cell.scenario.link.model_copy(update={"fluctuation": None}),
                "events": [Event.model_validate({"at_s": 1, "for_s": 1, **event})],
            }
        )
        text = Page(report([replace(cell, scenario=steady)])).text
        assert ("gigabits, moving" in text) == moves

    def test_stacked_hits_fill_the_bar(self):
        """The tiers' shares follow each other without a gap and end, with what was recomputed, at 100 %."""
        cell = played(rule=run(1.0))
        (only,) = cell.runs.values()
        assert [(name, share) for name, (share, _) in only.parts.items()] == [
            ("dram", 30.0), ("remote", 20.0), ("recomputed", 50.0),
        ]  # fmt: skip
        assert [(piece.kind, piece.values) for piece in cell.hits.pieces] == [
            ("part dram", (30.0,)), ("part remote", (20.0,)), ("part recomputed", (50.0,)),
        ]  # fmt: skip
        assert (cell.hits.rows, cell.hits.top) == (("rule: 50.0 %",), 100.0)

    def test_hits_stand_before_what_was_recomputed(self):
        """Also those of a tier that the first run did not have."""
        other = run(1.0, hit_tokens={"gpu": 0, "dram": 300, "disk": 100, "remote": 100})
        assert played(baseline=run(1.0), rule=other).kinds == ["dram", "disk", "remote", "recomputed"]

    def test_several_replays_are_one_page_with_a_table(self):
        """Each cell has its sections, and a row that leads there; a run that it lacks is a dash."""
        page = Page(report([played(baseline=run(1.0), rule=run(0.9)), played(rule=run(0.5))]))
        assert "2 replays" in page.text
        links = [attrs["href"] for attrs in page.all("a")]
        assert links == ["#cell-1", "#cell-2"]
        assert set(links) <= {f"#{attrs['id']}" for attrs in page.all("section") if "id" in attrs}
        ids = [attrs["id"] for _, attrs, _ in page.elements if "id" in attrs]
        assert len(ids) == len(set(ids))

    def test_it_needs_nothing_but_itself_and_runs_nothing(self):
        """No script, no address, and text from a decision stays text."""
        html = report([played(baseline=run(1.0), tuned=TUNED)], command=HOSTILE)
        page = Page(html)
        assert page.all("script", "iframe", "object", "form") == []
        assert len(page.all("style")) == 1
        assert all(attrs["src"].startswith("data:") for attrs in page.all("img"))
        assert all(attrs["href"].startswith("data:") for attrs in page.all("link"))
        assert re.findall(r"url\(|@import|https?://(?!www\.w3\.org)", html) == []
        assert HOSTILE in page.text

    def test_it_fits_phones_and_the_dark(self):
        """A viewport, a narrow layout, and colours for both themes."""
        html = report([played(rule=run(1.0))])
        assert 'name="viewport" content="width=device-width' in html
        assert "@media (max-width: 46rem)" in html
        assert "@media screen and (prefers-color-scheme: dark)" in html


class TestSteps:
    def test_a_share_holds_until_its_next_value(self):
        """Half until half time, then nothing: two corners, from edge to edge."""
        drawn = step_chart([(0.0, 0.5), (50.0, 0.0)], 100.0, [(50.0, "why")])
        area, line, marks = drawn.series
        assert line.points == ((0.0, 0.5), (50.0, 0.5), (50.0, 0.0), (100.0, 0.0))
        assert area.points == ((0.0, 0.0), *line.points, (100.0, 0.0))
        assert (marks.points, marks.tips) == (((50.0, 0.0),), ("why",))

    def test_nothing_lies_outside_the_chart(self):
        """Also what happened after the last request."""
        drawn = step_chart([(0.0, 1.0), (150.0, 0.25)], 100.0, [(200.0, "late")])
        assert drawn.x == (0.0, 200.0)
        assert max(x for series in drawn.series for x, _ in series.points) == 200.0
