"""Tuners within the agent's loop: what they read of history, and what becomes of their wishes."""

from datetime import timedelta

import pytest

from agent.conftest import POLICY
from agent.fakes import DIGEST, START, FakeStore
from tiertune_agent.change import Refused
from tiertune_agent.records import Prospect, State

NOW = f"{1 << 30}/0/0"
POOL = {"namespace": DIGEST, "model": "llama"}


def test_a_pool_changes_its_algorithm_when_the_ghosts_say_so(agent, store, rounds, policy_file):
    """Ghosts that the store counts without a tier are read with the pool's windows; on auto the store is changed."""
    policy_file.write_text(POLICY.replace("tuners: {", "tuners: {eviction: {mode: auto, period: 1m}, "))
    for index in range(9):
        asked = 1e4 + 10 * index
        store.count("tier_evictions_total", {"tier": "dram", "algorithm": "lru", "reason": "room", **POOL}, 5.0)
        for algorithm, share in (("lru", 0.2), ("arc", 0.4), ("s3fifo", 0.3)):
            labels = {"algorithm": algorithm, "capacity_bytes": str(1 << 30)}
            store.count("whatif_tokens_total", {**labels, "result": "hit", **POOL}, asked * share)
            store.count("whatif_tokens_total", {**labels, "result": "miss", **POOL}, asked * (1 - share))
        rounds(1)
    assert store.tuning["pools"][DIGEST]["dram"]["eviction"] == "arc"
    (decision,) = agent.history.decisions.find()
    assert "arc would hit 40.0% of the tokens against 20.0% of lru, +20.00 points" in decision.reason


@pytest.fixture
def advised(agents, clock, store):
    """An agent over two stores whose samples say that routing by prefix would halve the time to the first token."""
    agent = agents(store, FakeStore(clock, "host-b"))
    agent.history.remember_prospects(
        Prospect(DIGEST, START - timedelta(seconds=300 * index), 300.0, 200, {NOW: 1.0, f"{NOW}@prefix": 0.5})
        for index in range(5)
    )
    agent.leader.leads()
    agent.loop.run_once()
    return agent


def test_advice_is_one_proposal_of_the_fleet(advised):
    """Two stores, one row; it stays a proposal, and there is an answer for everything else that was asked."""
    (decision,) = [each for each in advised.history.decisions.find() if each.tuner == "routing"]
    assert (decision.state, decision.target.store) == (State.PROPOSED, "fleet")
    assert (decision.field, decision.before, decision.after) == ("advice.routing", "as it is", "by prefix")
    assert "would cut the mean time to the first token by 50.0%" in decision.reason
    answers = {answer["tuner"]: answer["reason"] for answer in advised.history.decisions.answers()}
    assert "no samples tell yet what no remote tier would cost" in answers["sharing"]
    assert "no GPU has told" in answers["balance"]


def test_advice_cannot_be_approved_but_rejected(advised):
    """There is no knob: an approval is refused and says what to do; a rejection closes it."""
    (decision,) = [each for each in advised.history.decisions.find() if each.tuner == "routing"]
    with pytest.raises(Refused, match="is advice: routing is not TierTune's to change; follow it by hand, or reject"):
        advised.changes.approve(decision.id, "local")
    assert advised.history.decisions.get(decision.id).state == State.PROPOSED
    assert advised.changes.reject(decision.id, "local").state == State.REJECTED
