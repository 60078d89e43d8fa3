"""Weekly reviews in the loop: whether a decision that stands still pays; and verdicts that were held up."""

from unittest.mock import Mock

import pytest
from sqlalchemy import Engine, event

from agent.agents import EVICTION, answer, made, pass_windows
from agent.fakes import DIGEST, fetch
from tiertune_agent.records import State

pytestmark = pytest.mark.slow


def reviews(agent, decision):
    """Verdicts that are no states."""
    told = agent.history.verdicts.of(decision.id)
    return [one for one in told if one["verdict"] not in tuple(State)]


def test_once_a_week_a_decision_says_whether_it_still_pays(agent, store, clock, arc, soak):
    """Kept, then a week in which its ghost is worse: one row that says so, and no change."""
    soak(4, 500, 600)
    for _ in range(6):
        clock.advance(86400)
        soak(1, 700, 500)
    assert reviews(agent, arc) == []
    clock.advance(86400)
    soak(3, 700, 500)
    (review,) = reviews(agent, arc)
    assert review["verdict"] == "no longer pays"
    assert "more (standard error" in review["reason"]
    assert store.tuning["version"] == 2
    clock.advance(7 * 86400)
    soak(4, 500, 600)
    assert len(reviews(agent, arc)) == 2


def test_a_round_reviews_one_decision(agent, store, clock, arc, soak):
    """However many are due: a round must not take longer once a week."""
    soak(4, 500, 600)
    due = [arc, made(agent, store, fetch_field := "tiers.remote.fetch", "off", "on", tier="remote")]
    assert (fetch(store), fetch_field) == ("on", due[1].field)
    agent.history.decisions.judge(due[1], State.KEPT, "good", {}, clock.now())
    clock.advance(7 * 86400)
    counts = []
    for _ in range(3):
        soak(1, 500, 600)
        counts.append([len(reviews(agent, each)) for each in due])
    assert [sum(count) for count in counts] == [1, 2, 2]
    assert counts[-1] == [1, 1]


def test_what_is_due_is_searched_once_for_all(agent, store, clock, arc, soak):
    """The search goes through all that was ever decided; what was undone since then is left out."""
    soak(4, 500, 600)
    due = [arc, made(agent, store, "tiers.remote.fetch", "off", "on", tier="remote")]
    agent.history.decisions.judge(due[1], State.KEPT, "good", {}, clock.now())
    clock.advance(7 * 86400)
    asked = Mock(side_effect=agent.history.changed.standing)
    agent.history.changed.standing = asked
    soak(1, 500, 600)
    (left,) = (each for each in due if not reviews(agent, each))
    agent.changes.rollback(left.id, "ops")
    soak(10, 500, 600)
    assert asked.call_count == 1
    assert reviews(agent, left) == []


def test_a_store_that_missed_the_search_is_reviewed_when_it_is_back(agent, store, clock, arc, soak):
    """In the round in which it answers again, and not an hour later."""
    soak(4, 500, 600)
    clock.advance(7 * 86400)
    store.up = False
    soak(2, 500, 600)
    assert reviews(agent, arc) == []
    store.up = True
    soak(1, 500, 600)
    assert len(reviews(agent, arc)) == 1


def test_what_was_followed_by_another_does_not_stand(agent, store, clock, auto, rounds):
    """However many changes a field has seen, one question finds the last of them."""
    rounds(1)
    for before, after in (("lru", "arc"), ("arc", "s3fifo"), ("s3fifo", "arc")):
        last = made(agent, store, EVICTION, before, after, namespace=DIGEST)
        agent.history.decisions.judge(last, State.KEPT, "good", {}, clock.now())
    asked = []
    event.listen(Engine, "before_cursor_execute", heard := lambda *call: asked.append(call[2]))
    try:
        (found,) = agent.history.changed.standing(clock.now(), ["host-a"], [DIGEST])
    finally:
        event.remove(Engine, "before_cursor_execute", heard)
    assert found.id == last.id
    assert len(asked) == 1


def test_what_stands_again_is_reviewed(agent, store, clock, arc, soak):
    """What followed it was rolled back: a week later its week has nothing of the other's."""
    soak(4, 500, 600)
    later = made(agent, store, EVICTION, "arc", "s3fifo", namespace=DIGEST)
    clock.advance(8 * 86400)
    soak(2, 500, 600)
    agent.changes.rollback(later.id, "ops")
    soak(6, 500, 600)
    assert reviews(agent, arc) == []
    clock.advance(7 * 86400)
    soak(2, 500, 600)
    assert len(reviews(agent, arc)) == 1


def test_what_does_not_stand_is_not_reviewed(agent, store, clock, arc, soak):
    """A decision that was rolled back, or whose value is gone, is no standing decision."""
    soak(4, 500, 600)
    agent.changes.rollback(arc.id, "ops")
    clock.advance(8 * 86400)
    soak(1, 500, 600)
    assert reviews(agent, arc) == []


def test_what_was_decided_of_a_pool_that_is_gone_is_not_reviewed(agent, store, clock, arc, soak):
    """Each revision of the weights has pools of its own, and its store's tuning goes on naming the former ones."""
    soak(4, 500, 600)
    store.tells("get_status", lambda told: {**told, "pools": {"cd" * 16: told["pools"][DIGEST]}})
    clock.advance(8 * 86400)
    soak(2, 500, 600)
    assert reviews(agent, arc) == []


def test_a_store_that_is_missed_once_while_a_verdict_waits_is_not_away(
    agent, store, clock, auto, rounds, *, policy_file
):
    """A long soak without figures goes on for its length: the day of patience begins when the store was last heard."""
    policy_file.write_text(policy_file.read_text().replace("soak: 1m", "soak: 2d"))
    rounds(1)
    arc = made(agent, store, EVICTION, "lru", "arc", namespace=DIGEST)
    rounds(1)
    clock.advance(3.5 * 86400)
    agent.tick()
    store.up = False
    for away_s, ends in ((15, "soaking"), (86400 - 16, "soaking"), (1, "inconclusive")):
        clock.advance(away_s)
        agent.tick()
        assert agent.history.decisions.get(arc.id).state == ends
    (verdict,) = agent.history.verdicts.of(arc.id)
    assert verdict["reason"] == "the store has been away for a day"


def test_a_verdict_that_a_freeze_held_outlasts_a_store_that_was_away(agent, store, clock, arc, soak):
    """Both for days: what its soak showed is carried out once something may change and the store is back."""
    agent.history.journal.freeze("release", "ops", clock.now(), None)
    soak(6, 600, 500)
    store.up = False
    clock.advance(3 * 86400)
    agent.tick()
    agent.history.journal.unfreeze(clock.now())
    agent.tick()
    store.up = True
    soak(1, 500, 600)
    assert agent.history.decisions.get(arc.id).state == "rolled_back"


def test_what_waits_to_be_rolled_back_keeps_nothing(agent, store, clock, arc, soak):
    """Through days of a freeze nothing is weighed again, windows go as ever, and the store is asked about."""
    agent.history.journal.freeze("release", "ops", clock.now(), None)
    soak(6, 600, 500)
    clock.advance(2 * 86400)
    soak(2, 500, 600)
    agent.sum_up()
    agent.prune()
    windows = agent.history.measured.windows("host-a", tier="remote")
    assert len(windows) == 1
    assert answer(agent)["at"] == clock.now().isoformat()
    assert agent.history.decisions.get(arc.id).state == "soaking"


@pytest.mark.parametrize("restarts", [True, False])
def test_what_nobody_watched_is_watched_then(agent, agents, store, clock, arc, *, restarts):
    """The agent, or its database, was away for hours in the soak: it is not judged by nothing as it is back."""
    if restarts:
        agents.end()
    clock.advance(3 * 3600)
    back = agents() if restarts else agent
    back.leader.leads()
    for index in range(6):
        store.simulate("lru", 600 + index)
        store.simulate("arc", 500 + 2 * index)
        pass_windows(back, store, clock, tick=True)
    assert back.history.decisions.get(arc.id).state == "rolled_back"


def test_an_agent_that_starts_again_and_again_judges_within_a_week(
    agent, agents, store, clock, auto, *, rounds, policy_file
):
    """Each time nobody knows what was seen before; no soak holds up its pool, and all windows, for ever."""
    policy_file.write_text(policy_file.read_text().replace("soak: 1m", "soak: 1d"))
    rounds(1)
    change = made(agent, store, EVICTION, "lru", "arc", namespace=DIGEST)
    rounds(1)
    found = []
    for _ in range(18):
        agents.end()
        clock.advance(12 * 3600)
        again = agents()
        again.leader.leads()
        rounds(2, by=again)
        found.append(again.history.decisions.get(change.id).state)
    assert found[-2:] == ["soaking", "inconclusive"]
