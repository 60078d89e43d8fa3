"""Approvals and refusals of what was proposed, in the loop over a fake store."""

import httpx
import pytest

from agent.agents import POLICY, answer, pass_windows, told
from agent.fakes import FAST, SLOW, fetch, propose
from tiertune_agent.changes.control import Refused
from tiertune_agent.changes.operators import Caller
from tiertune_agent.records import Target
from tiertune_agent.tuners.base import Proposal

pytestmark = pytest.mark.slow


def test_a_no_is_remembered(agent, proposed, store, rounds):
    """What a person rejected is proposed again after twice the soak, then after four times it; and that is told."""
    for number, windows in ((1, 8), (2, 16)):
        agent.changes.reject(number, "anna")
        rounds(windows - 1)
        assert proposed.find()[0].id == number
        assert f"undone or refused {('once', '2 times')[number - 1]}: not tried again for" in answer(agent)["reason"]
        rounds(1)
        assert (proposed.find()[0].id, proposed.find()[0].state) == (number + 1, "proposed")
    assert fetch(store) == "on"


def test_two_approvals_within_a_window_are_both_made(agent, proposed, store, clock):
    """And so is one after a command to the store: what counts is the field, not the document's version."""
    wish = Proposal("tiers.dram.capacity_bytes", 1 << 30, 2 << 30, "it is worth it")
    propose(agent.history, "tier_size", Target("host-a", "dram"), wish, at=clock.now())
    agent.operators.bypass(Caller("ops", "here"), on=True, store=None)
    assert [agent.changes.approve(number, "anna").state for number in (1, 2)] == ["applied"] * 2
    assert (fetch(store), store.tuning["tiers"]["dram"]["capacity_bytes"], store.bypass) == ("off", 2 << 30, True)


def test_a_wish_from_another_value_is_another_wish(agent, store, clock):
    """The same size is wished after somebody changed it by hand: it can be approved, and goes back to that one."""
    field, target = "tiers.dram.capacity_bytes", Target("host-a", "dram")
    agent.loop.run_once()
    for before in (1 << 30, 3 << 29):
        store.by_hand(field, before)
        clock.advance(15)
        agent.loop.run_once()
        propose(agent.history, "own_tuner", target, Proposal(field, before, 2 << 30, "it pays"), at=clock.now())
    newest = agent.history.decisions.find()[0]
    assert agent.changes.approve(newest.id, "anna").state == "applied"
    agent.changes.rollback(newest.id, "anna")
    assert store.tuning["tiers"]["dram"]["capacity_bytes"] == 3 << 29


def test_an_approval_that_does_not_reach_its_store_says_why(agent, proposed, store, rounds):
    """From the first attempt on, the last reason; made after all, nothing is left of it."""
    store.up = False
    assert agent.changes.approve(1, "anna").waits == "the store did not answer: connection refused"
    store.up = True
    store.answers("put_tuning", 503, json={"message": "it restarts"})
    rounds(1)
    assert proposed.get(1).waits == "the store answers 503: it restarts"
    del store.put_tuning
    rounds(1)
    (made,) = proposed.find()
    assert (made.state, made.waits, fetch(store)) == ("soaking", "", "off")
    assert "503" not in made.reason


def test_a_person_is_obeyed_whatever_the_token_is_called(agent, proposed, store, rounds):
    """These are the agent's own names: what it does by itself obeys the mode and a freeze, what people command not."""
    agent.history.journal.freeze("release", "ops", agent.now(), None)
    with store.deaf():
        assert agent.changes.approve(1, "policy").state == "approved"
    rounds(1)
    assert (proposed.get(1).approved_by, fetch(store)) == ("policy (a person)", "off")
    with store.deaf():
        agent.changes.rollback(1, "verdict")
    rounds(1)
    assert (proposed.get(1).state, fetch(store)) == ("rolled_back", "on")


def test_a_store_that_is_away_is_asked_once_in_a_round(agent, proposed, store, clock, monkeypatch):
    """Its counters are; what is under way there waits: else the changes of a lost rack would hold up all others."""
    agent.changes.approve(1, "anna")
    store.up = False
    with pytest.raises(Refused, match="is applied"):
        agent.changes.approve(1, "anna")
    assert agent.changes.rollback(1, "anna").waits == "the store did not answer: connection refused"
    asked, handle = [], store.handle
    monkeypatch.setattr(store, "handle", lambda request: (asked.append(request.url.path), handle(request))[1])
    for _ in range(2):
        clock.advance(15)
        agent.loop.run_once()
    assert asked == ["/v1/counters"] * 2
    assert proposed.get(1).waits == "the store did not answer"
    store.up = True
    agent.loop.run_once()
    assert (proposed.get(1).state, fetch(store)) == ("rolled_back", "on")


def test_an_approval_that_comes_too_late_says_why(agent, proposed, store, clock, rounds):
    """Beside that it is late: what held it up the last time."""
    store.up = False
    agent.changes.approve(1, "anna")
    rounds(1)
    clock.advance(301)
    store.up = True
    rounds(1)
    told = proposed.get(1)
    assert (told.state, told.waits, fetch(store)) == ("expired", "", "on")
    late = "it did not reach the store in time; the last time the store did not answer: connection refused"
    assert told.reason.endswith(late)


def test_a_role_that_is_too_low_is_told_and_ends_it(agent, proposed, store, rounds):
    """An approval fails, a rollback is refused; each names the store's own words, and is sent once."""
    put, puts = store.put_tuning, []

    def refuse(request):
        puts.append(request)
        return httpx.Response(403, json={"message": "agent has the role approve; this asks for tune"})

    assert agent.changes.approve(1, "anna").state == "applied"
    store.put_tuning = refuse
    with pytest.raises(Refused, match="cannot be rolled back: the store refused: 403: agent has the role approve"):
        agent.changes.rollback(1, "anna")
    rounds(4)
    assert (len(puts), fetch(store)) == (1, "off")
    store.put_tuning = put
    assert agent.changes.rollback(1, "anna").state == "rolled_back"


def test_a_proposal_expires_when_times_change(agent, proposed, store, rounds):
    """What its tuner no longer wishes cannot be approved."""
    store.bandwidth = FAST
    rounds(1)
    assert told(agent) == [("remote_fetch", "on", "off", "expired")]


def test_a_lead_that_was_lost_for_a_moment_ends_no_proposal(agent, agents, store, clock, policy_file):
    """What a person may approve still can be: its tuner is asked when it is due, not right after the gap."""
    policy_file.write_text(POLICY.replace("mode: auto, period: 15s", "mode: recommend, period: 2m"))
    agent.tick()
    store.bandwidth = SLOW
    pass_windows(agent, store, clock, 9, tick=True)
    proposed = [("remote_fetch", "on", "off", "proposed")]
    assert told(agent) == proposed
    agents.end()
    second = agents()
    pass_windows(agent, store, clock, tick=True)
    second.leader.resign()
    pass_windows(agent, store, clock, 9, tick=True)
    assert told(agent) == proposed
    assert agent.leader.leading


def test_a_verdict_that_an_operator_overtook_sends_nothing(agent, proposed, store):
    """It was reached by what the decision was before: it is refused, so that the field is set back once."""
    agent.changes.approve(1, "ops")
    soaking = proposed.get(1)
    agent.changes.rollback(1, "ops")
    sent = len(store.puts)
    with pytest.raises(Refused, match="decision 1 has just changed"):
        agent.changes.roll_back(soaking, "verdict", "it is worse", {})
    assert (len(store.puts), proposed.get(1).state) == (sent, "rolled_back")
