"""The page: what it tells, and how often it looks."""

import re

import pytest

from agent.agents import POLICY, client_of, pass_windows
from agent.fakes import DIGEST, SLOW, START, propose
from agent.html import Page
from tiertune_agent.records import State, Target
from tiertune_agent.tuners.base import Proposal
from tiertune_agent.web.overview import overview

pytestmark = pytest.mark.slow

STAGED = """
version: 1
mode: %s
guard: {changes_per_hour: 100, min_requests: 1, soak: 1m%s}
tuners: {remote_fetch: {period: 15s, disable_after: 2, enable_after: 2}}
overrides: [{match: {store: "host-*"}, %s}]
"""
FROZEN = '[{from: "00:00", to: "00:00"}]'


def test_many_incidents_of_one_kind_do_not_hide_what_else_is_open(agent, http):
    """Three of a kind stand there; how many more there are is told, and they can be opened."""
    agent.history.journal.tell_incidents({("tier_dead", "host-a"): "its disk is gone"}, START)
    away = {("store_unreachable", f"host-{number:03}"): "refused" for number in range(200)}
    agent.history.journal.tell_incidents(away, START)
    shown, folded = http.get("/").text.split("<summary>197 more of store unreachable</summary>")
    assert shown.count("</b> <span>refused</span>") == 3
    assert folded.count("</b> <span>refused</span>") == 197
    assert "its disk is gone" in folded.split("</details>")[1]


class TestWhatItTells:
    def test_an_empty_history_says_what_is_awaited(self, look):
        """Without a store the page names what is missing, and what a first decision takes."""
        told = look().text
        assert "Waiting for the first store to answer." in told
        assert "tiertune store serve" in told
        assert "Switching remote fetch off takes 2 windows in a row" in told
        assert "No tuner has been asked yet" in told

    def test_a_store_without_traffic(self, look, agent):
        """A store that answered once, unasked by engines, is up, with no traffic yet."""
        agent.loop.run_once()
        told = look().text
        assert "Stores are up, without traffic yet." in told
        assert "no traffic in the last 15 min" in told
        assert "No curve yet" in told

    def test_decode_engines_alone_are_traffic(self, look, agent, store, clock):
        """Their prompts were looked up before, elsewhere: of what is found first none counts, and why is told."""
        pool = {"stage": "decode", "namespace": DIGEST, "model": "llama"}
        agent.loop.run_once()
        clock.advance(15)
        store.count("prompt_tokens_total", 1000.0, **pool)
        store.count("tier_lookup_tokens_total", 1000.0, tier="dram", result="miss", origin="", **pool)
        agent.loop.run_once()
        told = look().text
        assert "no traffic" not in told
        assert "no prompt was looked up first in the last 15 min" in told

    def test_no_prompt_is_found_more_than_whole(self, look, agent, store, clock):
        """One that was looked up before the first window may be found in it."""
        pool = {"stage": "all", "namespace": DIGEST, "model": "llama"}
        store.count("prompt_tokens_total", 1000.0, **pool)
        agent.loop.run_once()
        clock.advance(15)
        store.count("prompt_tokens_total", 400.0, **pool)
        store.count("tier_lookup_tokens_total", 900.0, tier="dram", result="hit", origin="self", **pool)
        agent.loop.run_once()
        assert "Prompt tokens found in tiers 100.0% 400 of 400 in the last 15 min" in look().text

    def test_money_is_told_in_figures_however_much_it_is(self, look, agent, store, clock):
        """Two hundred hours of a GPU at 2.5 each."""
        agent.loop.run_once()
        clock.advance(15)
        store.count("saved_seconds_total", 200 * 3600.0, tier="dram")
        agent.loop.run_once()
        assert "worth 500 at the policy's prices" in look().text

    def test_what_waits_is_what_somebody_can_approve_however_much_it_is(self, look, agent):
        """All that is only recommended, with its buttons; nothing of what is only observed, or is advice."""
        agent.loop.run_once()

        def wish(number, mode, field="pools.{}.dram.eviction"):
            proposal = Proposal(field.format(f"{number:032x}"), "lru", "arc", "better")
            propose(agent.history, "eviction", Target("host-a", "dram", f"{number:032x}"), proposal, mode=mode)

        for number in range(30):
            wish(number, "recommend")
        wish(30, "observe")
        wish(31, "recommend", "advice.routing")
        page = look()
        assert "30 changes to approve." in page.text
        asked = [attrs["data-post"] for attrs in page.all("button") if "/approve" in attrs.get("data-post", "")]
        assert len(asked) == 30

    def test_a_switch_that_was_rolled_back_is_a_switch(self, look, agent, clock, store, seen):
        """Fetching is shown as off for as long as it was, and as on since."""
        agent.loop.run_once()
        wish = Proposal("tiers.remote.fetch", "on", "off", "it loses")
        propose(agent.history, "remote_fetch", Target("host-a", "remote"), wish, at=clock.now())
        agent.changes.approve(1, "me")
        pass_windows(agent, store, clock, 4)
        assert agent.changes.rollback(1, "me").state == "rolled_back"
        pass_windows(agent, store, clock, 8)
        page = look()
        assert "fetching from the remote tier is on" in page.text
        assert "fetch off" in page.text
        (card,) = overview(seen()).stores
        (off,) = (series for series in card.chart.series if series.kind == "off")
        begin, end = off.points[0][0], off.points[-1][0]
        assert card.chart.x[0] <= begin < end < -60

    def test_traffic_shows_in_every_part(self, look, rounds):
        """Hits, their share of the prompt, seconds saved and the tuners' answers come from the windows."""
        rounds(2)
        page = look()
        assert "Engines share KV chunks; fetching from the remote tier is on." in page.text
        assert "5.0% 1.0 k of 20.0 k in the last 15 min" in page.text
        assert "Saved 8.0 s" in page.text
        assert "remote_fetch: stays on, fetching pays" in page.text
        assert "TierTune changes by itself what is on auto, where the figures say so." in page.text
        assert "Mode remote fetch auto, tier size recommend" in page.text
        assert {"fetch", "recompute"} <= {attrs.get("class") for attrs in page.all("g")}
        assert "100 ms 1 s" in page.text
        assert "ago now" in page.text

    def test_a_decision_with_its_evidence_and_verdict(self, shown):
        """From and to, state, reason, each window's figures, versions and the verdict."""
        told = Page(shown["busy"][0]).text
        assert "fetching from the remote tier is off at host-a." in told
        assert "remote_fetch host-a remote: on → off kept" in told
        assert "in 2 windows in a row fetching cost more than recomputing" in told
        assert "start requests fetch recompute saved lost 12:00:30 10 10 s 5.0 s 0 0" in told
        assert "Tuning version 1 → 2" in told
        assert re.search(r"Verdict, kept: cost of what could be fetched, recomputing being 1: 1 against 2\b", told)
        assert "saves -" not in told
        assert "fetch off" in told

    def test_another_size_and_the_counterfactual_are_told(self, shown):
        """A curve's sentence and its chart's mark; a judged decision's bars, what is unknown said so."""
        page = Page(shown["busy"][0])
        told = page.text
        assert "lru hits 30% at 1 GiB; the best simulated, lru at 4 GiB, 40%." in told
        assert "now 1 GiB" in told
        rows = "Before the change: 2", "Promised: 1", "With the change: 1", "Without the change: 2"
        assert all(row in told for row in rows)
        assert f"cost of what could be fetched, recomputing being 1: {', '.join(rows)}" in {
            attrs["aria-label"] for attrs in page.all("svg")
        }
        assert "50.0% less" in told

    def test_what_auto_would_have_done_is_told(self, look, rounds, store, policy_file):
        """How many, each with what it promised, and nothing where there is none."""
        rounds(1)
        assert "Nothing: no tuner that waits for approval" in look().text
        policy_file.write_text(POLICY.replace("mode: auto", "mode: recommend"))
        store.bandwidth = SLOW
        rounds(3)
        told = look().text
        assert "On auto, TierTune would have made 1 change" in told
        assert "ago): in 3 windows in a row fetching cost more than recomputing" in told
        assert "It waits for approval. Decision #1, mode recommend" in told

    def test_what_is_under_way_says_why_it_is_not_done(self, look, agent, proposed, store, rounds):
        """Approved, and not made: what the store answered the last time; made, no more. It rests on no version."""
        store.up = False
        agent.changes.approve(1, "anna")
        assert "Not done yet: the store did not answer: connection refused" in look().text
        store.up = True
        rounds(1)
        told = look().text
        assert "Not done yet" not in told
        assert "Tuning version 2" in told

    def test_a_proposal_says_how_to_approve_it(self, look, agent, history):
        """What waits for approval names the command; the sentence at the top counts it."""
        wish = Proposal("tiers.dram.capacity_bytes", 8 << 30, 6 << 30, "it held at most 4.8 GiB")
        agent.loop.run_once()
        propose(history, "tier_size", Target("host-a", "dram"), wish)
        told = look().text
        assert "8.0 GiB → 6.0 GiB proposed" in told
        assert "tiertune decisions approve 1" in told
        assert "1 change to approve." in told

    def test_a_silent_store_is_named(self, look, agents, agent, *, store, other, clock):
        """A store that no longer answers is told at the top, and its tiers count as unknown."""
        agents.end()
        agent.history.named = None  # its page tells of all that another one leads
        agent = agents(store, other)
        agent.loop.run_once()
        other.up = False
        pass_windows(agent, (), clock, 4)
        told = look().text
        assert "Stores 1 of 2 up, no answer from host-b" in told
        assert "unknown the store does not answer (host-b)" in told
        assert "store unreachable host-b" in told

    @pytest.fixture
    def away(self, other):
        other.up = False
        return other

    @pytest.fixture
    def without(self, agents, agent, store, away):
        """An agent of two stores, of which one has never answered."""
        agents.end()
        agent = agents(store, away)
        agent.loop.run_once()
        return agent

    def test_a_store_of_the_settings_that_never_answered_is_counted(self, without):
        """It is told at the top, and the API tells of it; of two addresses in the settings one being up is not all."""
        with client_of(without) as http:
            told = Page(http.get("/").text).text
            unheard = http.get("/api/v1/fleet").json()["unheard"]
        assert "Stores 1 of 2 up, no answer from host-b:7410" in told
        assert unheard == {"stores": ["host-b:7410"], "sources": []}

    def test_a_bypass_of_a_store_that_never_answered_is_told(self, without, away, clock):
        """At the top of the page and by the API, until the store hears it."""
        with client_of(without) as http:

            def told():
                fleet = http.get("/api/v1/fleet").json()
                return fleet["bypass_unheard"], "not yet acknowledged by host-b:7410" in Page(http.get("/").text).text

            http.post("/api/v1/bypass", json={"on": True, "store": "host-b:7410"})
            wish = {"name": "host-b:7410", "url": "http://host-b:7410", "on": True}
            assert told() == ([wish], True)
            away.up = True
            pass_windows(without, (), clock)
            assert told() == ([], False)
        assert away.bypass

    def test_a_bypass_can_be_ended_where_it_is_on_and_begun_where_it_is_off(self, agents, agent, store, other, clock):
        """Of two stores none, one or both are bypassed."""
        agents.end()
        agent = agents(store, other)
        agent.loop.run_once()
        offered = []
        with client_of(agent) as http:
            for which in ({}, {"store": "host-b"}, {"store": "host-a"}):
                if which:
                    http.post("/api/v1/bypass", json={"on": True, **which})
                    pass_windows(agent, (), clock)
                told = Page(http.get("/").text).text
                offered.append(("Bypass all stores …" in told, "End bypass …" in told))
        assert offered == [(True, False), (True, True), (False, True)]

    def test_freeze_and_bypass_are_told_at_the_top(self, look, http, agent, clock):
        """Both stand in the headline and its facts, with who and why."""
        agent.leader.leads()
        agent.loop.run_once()
        http.post("/api/v1/freeze", json={"reason": "launch day", "for": "2h"})
        http.post("/api/v1/bypass", json={"on": True})
        pass_windows(agent, (), clock)
        told = look().text
        assert "All stores are bypassed: they answer miss, and engines recompute everything." in told
        assert "Frozen: nothing changes." in told
        assert "Changes frozen until 2025-03-05 14:00 UTC, by" in told
        assert "launch day" in told

    def test_the_policys_calendar_is_no_freeze_by_command(self, look, agent, policy_file):
        """It binds TierTune alone: nobody is told that nothing changes."""
        policy_file.write_text('version: 1\nguard: {freeze: [{from: "00:00", to: "00:00"}]}\n')
        agent.loop.run_once()
        told = look().text
        assert "changes nothing by itself now; who approves or rolls back may." in told
        assert "Changes only commanded ones, by the policy's calendar until Thu 00:00 UTC" in told
        assert "Frozen" not in told

    def test_modes_are_those_of_the_stores(self, look, rounds, policy_file, store):
        """A staged roll-out by an override: what happens at its store is not told as if nothing did."""
        policy_file.write_text(STAGED % ("observe", "", "mode: auto"))
        rounds(2)
        store.bandwidth = SLOW
        rounds(4)
        told = look().text
        assert "fetching from the remote tier is off at host-a." in told
        assert "TierTune changes by itself what is on auto" in told
        assert "Mode remote fetch auto, tier size auto" in told

    @pytest.mark.parametrize(
        ("base", "laid", "changes"),
        [(FROZEN, "[]", "Changes allowed"), ("[]", FROZEN, "Changes only commanded ones, by the policy's calendar")],
    )
    def test_calendars_are_those_of_the_stores(self, look, rounds, policy_file, *, base, laid, changes):
        """An override thaws its store, or freezes it alone."""
        policy_file.write_text(STAGED % ("auto", f", freeze: {base}", f"guard: {{freeze: {laid}}}"))
        rounds(1)
        told = look().text
        assert changes in told
        assert ("changes nothing by itself now" in told) == (laid == FROZEN)

    def test_a_policy_that_cannot_be_read_is_an_open_incident(self, look, agent, policy_file):
        """A bad edit shows with its place, and with what stays in force."""
        policy_file.write_text("version: 1\nmode: sometimes\n")
        agent.loop.run_once()
        told = look().text
        assert "policy invalid" in told
        assert "lint: wrong The file as it is now is not in force." in told
        assert re.search(r"error \S+policy.yaml:2:7 mode: ", told)


def test_a_switch_is_told_however_many_changes_came_after_it(agent, store, clock, seen):
    """A fleet's other settings change by hundreds at once: since when fetching is off is drawn all the same."""
    store.bandwidth = SLOW
    pass_windows(agent, store, clock, 6)
    for number in range(201):
        wish = Proposal("tiers.remote.margin", 1.1, 1.2, "the policy says so")
        other = propose(agent.history, "gate_settings", Target(f"host-{number}", "remote"), wish)
        agent.history.decisions.move(other, State.APPLIED, now=clock.now(), applied_at=clock.now())
    (card,) = overview(seen()).stores
    (off,) = (series for series in card.chart.series if series.kind == "off")
    assert card.chart.x[0] < off.points[0][0]
