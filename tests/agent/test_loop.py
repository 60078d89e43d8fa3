"""The whole loop over a fake store: off when slow, on when fast, stopped by a freeze, whole after a crash."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest.mock import Mock

import pytest

from agent.agents import POLICY, answer, pass_windows, told
from agent.fakes import FAST, SLOW, FakeStore, fetch, open_incidents, propose, transport, wrong
from tiertune_agent.changes.survey import HOUR
from tiertune_agent.records import State, Target
from tiertune_agent.tuners.base import Proposal

pytestmark = pytest.mark.slow


def test_slow_goes_off_fast_goes_on(agent, store, rounds):
    """Two slow windows switch fetch off, two fast ones by the probes switch it on again; both are judged."""
    rounds(3)
    assert told(agent) == []
    assert "fetching pays" in answer(agent)["reason"]
    store.bandwidth = SLOW
    rounds(1)
    assert fetch(store) == "on"
    rounds(1)
    assert fetch(store) == "off"
    rounds(5)
    store.bandwidth = FAST
    rounds(1)
    assert fetch(store) == "off"
    rounds(1)
    assert fetch(store) == "on"
    rounds(6)
    assert told(agent) == [("remote_fetch", "on", "off", "kept"), ("remote_fetch", "off", "on", "kept")]
    assert store.tuning["version"] == 3


def test_a_decision_carries_its_evidence(agent, store, rounds):
    """The row holds the windows' figures, the versions, the policy and who approved it."""
    rounds(2)
    store.bandwidth = SLOW
    rounds(2)
    (decision,) = agent.history.decisions.find()
    first, second = decision.evidence["windows"]
    assert (first["requests"], first["fetch_s"], first["recompute_s"]) == (10, pytest.approx(10.0), pytest.approx(5.0))
    assert second["saved_s"] == 0.0
    assert (decision.expected_version, decision.applied_version) == (1, 2)
    assert decision.approved_by == "policy"
    assert agent.history.journal.policy_revisions()[0]["id"] == decision.policy_revision
    assert "20 requests, none was fetched; predicted 20 s to fetch against 10 s to recompute" in decision.reason


def test_a_freeze_stops_it_and_is_told(agent, store, rounds):
    """Frozen, nothing changes, and the answer says what would have; lifted, it does."""
    store.bandwidth = SLOW
    agent.history.journal.freeze("release", "ops", agent.loop.now(), None)
    rounds(4)
    assert fetch(store) == "on"
    assert told(agent) == []
    assert answer(agent)["reason"].startswith("frozen: by ops: release; wished on to off")
    agent.history.journal.unfreeze(agent.loop.now())
    rounds(1)
    assert fetch(store) == "off"


def test_the_policys_calendar_freezes_too(agent, store, rounds, policy_file):
    """The hours of the policy file hold like a command."""
    policy_file.write_text(POLICY.replace("soak: 1m", 'soak: 1m, freeze: [{from: "11:00", to: "13:00"}]'))
    store.bandwidth = SLOW
    rounds(4)
    assert fetch(store) == "on"
    assert "by the policy's calendar until Wed 13:00 UTC" in answer(agent)["reason"]


def test_the_hourly_budget_holds(agent, store, rounds, policy_file):
    """After so many changes in an hour, the next one waits."""
    policy_file.write_text(POLICY.replace("changes_per_hour: 100", "changes_per_hour: 1"))
    store.bandwidth = SLOW
    rounds(7)
    store.bandwidth = FAST
    rounds(6)
    assert fetch(store) == "off"
    assert "the budget of 1 change per hour is spent" in answer(agent)["reason"]


def test_a_bad_edit_of_the_policy_keeps_the_good_one(agent, store, rounds, policy_file):
    """A broken file is an incident with its place; the last good policy goes on working."""
    policy_file.write_text("version: 1\nmode: aotu\n")
    store.bandwidth = SLOW
    rounds(3)
    assert fetch(store) == "off"
    (incident,) = agent.history.journal.incidents()
    assert incident["kind"] == "policy_invalid"
    assert "policy.yaml:2:7: mode" in incident["message"]
    policy_file.write_text(POLICY)
    rounds(1)
    assert wrong(agent) == []


def test_a_vanished_store_is_an_incident_until_it_returns(agents, clock, store, other):
    """One store's absence is an incident by its name, closed when it answers; the other one is tuned meanwhile."""
    other.bandwidth = SLOW
    agent = agents(store, other)
    agent.loop.run_once()
    store.up = False
    pass_windows(agent, other, clock, 3)
    assert open_incidents(agent).keys() == {("store_unreachable", "host-a")}
    assert fetch(other) == "off"
    store.up = True
    pass_windows(agent, (), clock)
    assert wrong(agent) == []


def test_a_store_that_is_away_when_another_agent_takes_over_is_one_incident(agents, clock, store, other):
    """The next agent never heard it, but knows by history what it is called: its incident goes on, under its name.

    If the settings name it, it is called so.
    """
    agent = agents(store, other)
    agent.loop.run_once()
    store.up = False
    for _ in range(2):
        pass_windows(agent, other, clock, 2)
        assert open_incidents(agent).keys() == {("store_unreachable", "host-a")}
        agents.end()
        agent = agents(store, other)
    agents.end()
    agent = agents(stores=[{"url": "http://host-a:7410", "name": "gpu-7"}], network=transport(store))
    pass_windows(agent, (), clock)
    assert ("store_unreachable", "gpu-7") in open_incidents(agent)
    agents.end()
    store.up, agent = True, agents(store, other)
    pass_windows(agent, other, clock)
    assert wrong(agent) == []


def test_a_store_that_was_never_there_is_an_incident_by_its_address(agent, clock, store):
    """Before its first answer a store is known by its address; its incident closes when it comes."""
    store.up = False
    agent.loop.run_once()
    assert agent.history.journal.incidents()[0]["store"] == "host-a:7410"
    store.up = True
    pass_windows(agent, (), clock)
    assert wrong(agent) == []


def test_a_dead_tier_is_an_incident_with_its_reason(agent, store, rounds):
    """What a store tells of its tiers' health is remembered."""
    store.health["remote"] = "dead"
    rounds(1)
    assert agent.history.journal.incidents()[0]["message"] == "remote: told so"
    store.health["remote"] = "ok"
    rounds(1)
    assert wrong(agent) == []


def test_a_restarted_store_goes_on_being_tuned(agent, store, rounds):
    """Counters from zero and a new boot do not confuse the loop."""
    rounds(2)
    store.restart()
    store.bandwidth = SLOW
    rounds(3)
    assert fetch(store) == "off"


def test_a_store_that_was_off_counts_from_its_boot(agent, store, clock, rounds):
    """No rent is booked for the night: the window begins when it was started."""
    rounds(1)
    store.restart()
    store.uptime_s = 10.0
    clock.advance(36000)
    rounds(1)
    (_, window) = agent.history.measured.windows("host-a", tier="remote")
    assert (window.seconds, window.start) == (10.0, clock.now() - timedelta(seconds=10))


@pytest.mark.parametrize(("seconds", "end"), [(15, ("soaking", "off")), (3600, ("expired", "on"))])
def test_killed_before_writing(agents, store, rounds, seconds, end):
    """Approved but never sent: a successor that comes soon makes the change; one that comes late lets it be.

    The late one does not decide anew on old windows either.
    """
    rounds(1)
    store.bandwidth = SLOW
    store.before_put = Mock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        rounds(2)
    store.before_put = lambda: None
    agents.end()
    successor = agents()
    store.clock.advance(seconds)
    successor.loop.run_once()
    assert told(successor) == [("remote_fetch", "on", "off", end[0])]
    assert fetch(store) == end[1]


def test_what_the_policy_no_longer_lets_it_do_is_not_made(agent, store, rounds, policy_file):
    """A change that is on its way to a store when the mode becomes another one ends where it was."""
    rounds(1)
    store.bandwidth = SLOW
    with store.deaf():
        rounds(2)
    assert told(agent) == [("remote_fetch", "on", "off", "approved")]
    policy_file.write_text(POLICY.replace("mode: auto", "mode: observe"))
    rounds(1)
    assert (agent.history.decisions.get(1).state, fetch(store)) == ("expired", "on")
    assert "the policy's mode is observe by now" in agent.history.decisions.get(1).reason


def test_while_an_end_is_unknown_nothing_else_is_tried(agent, store, rounds):
    """A store that took the change but lost its answer is looked at again before anything new is decided."""
    store.bandwidth = SLOW
    store.lose_answers = True
    rounds(2)
    assert told(agent) == [("remote_fetch", "on", "off", "approved")]
    store.lose_answers = False
    rounds(1)
    assert told(agent) == [("remote_fetch", "on", "off", "soaking")]
    assert len(store.puts) == 1


def test_only_the_leader_acts(agents, agent, store, clock):
    """A second agent on the same database stands by, until the first one is gone."""
    agent.tick()
    second = agents()
    clock.advance(15)
    seen = agent.history.stores()[0].last_seen
    second.tick()
    assert agent.history.stores()[0].last_seen == seen
    agent.leader.resign()
    second.tick()
    assert agent.history.stores()[0].last_seen == clock.now()


def test_a_failing_round_is_counted_and_the_next_one_runs(agent):
    """An unexpected error ends its round, is counted, and does not end the agent."""
    agent.loop.run_once, real = lambda: 1 / 0, agent.loop.run_once
    agent.tick()
    agent.loop.run_once = real
    agent.tick()
    text = agent.metrics.render().decode()
    assert 'tiertune_agent_job_errors_total{job="loop"} 1.0' in text
    assert 'tiertune_agent_last_success_timestamp_seconds{job="loop"} 1.741176e+09' in text
    assert len(agent.history.stores()) == 1


def test_what_the_settings_name_no_more_is_over(agents, clock, store):
    """A store that had answered, and one that never did: no incident of theirs stays, nor do they on the page."""
    gone, never = FakeStore(clock, name="host-b"), FakeStore(clock, name="host-c")
    never.up = False
    agent = agents(store, gone, never)
    agent.loop.run_once()
    gone.up = False
    pass_windows(agent, (), clock)
    assert wrong(agent) == ["store_unreachable"] * 2
    agents.end()
    store.up = False
    agent = agents(store)
    pass_windows(agent, (), clock)
    assert wrong(agent) == ["store_unreachable"]
    assert [record.name for record in agent.history.stores()] == ["host-a"]


def test_windows_before_a_change_are_kept_until_it_is_judged(agents, clock, store):
    """However long it soaks: as long before it as it was made; then as long as any other."""
    agent = agents()
    agent.loop.run_once()
    pass_windows(agent, store, clock, 2)
    began = clock.now()
    wish = Proposal("admission.remote", "always", "second_access", "better")
    made = propose(agent.history, "admission", Target("host-a", "remote"), wish, mode="auto", at=began)
    soaking = agent.history.decisions.move(
        made, State.SOAKING, now=began, applied_at=began, soak_until=began + timedelta(hours=8)
    )
    clock.advance(8 * 3600)
    agent.sum_up()

    def left():  # the last ones in which requests found something in the remote stay for ever
        agent.prune()
        return [one for one in agent.history.measured.fleet_windows(["host-a"], began - HOUR) if one.tier != "remote"]

    assert left()
    agent.history.decisions.judge(soaking, State.KEPT, "better", {}, clock.now())
    assert not left()


def test_of_all_who_look_at_the_same_time_one_sees_the_lead_begin(agent, monkeypatch):
    """The round and the process look: two would tell it twice, and want a round while the first is under way."""
    agent.leader.resign()
    leads = agent.leader.leads

    def slowly():
        time.sleep(0.2)
        return leads()

    monkeypatch.setattr(agent.leader, "leads", slowly)
    with ThreadPoolExecutor(2) as threads:
        looks = [threads.submit(agent.stand) for _ in range(2)]
    assert sorted(look.result() for look in looks) == [False, True]


def test_an_agent_that_stands_by_shows_the_policy_as_it_is(agents, policy_file):
    """The file is followed, though no round is made."""
    agents()
    other = agents()
    policy_file.write_text("version: 1\nmode: observe\n")
    other.stand()
    assert not other.leader.leading
    assert other.policy.content.policy.mode == "observe"
