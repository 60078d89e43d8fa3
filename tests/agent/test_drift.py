"""What differs from the tuning that is expected: told by its fields, unless a decision made it, and one day adopted."""

from dataclasses import replace

import pytest

from agent.agents import made
from agent.fakes import SLOW, START, FakeStore, after, drifted, fetch, snapshot, wrong
from tiertune_agent.changes.control import VERDICT
from tiertune_agent.fields import replaced
from tiertune_agent.incidents.drift import ADOPTED_AFTER, compared, drift
from tiertune_agent.records import Expectation

pytestmark = pytest.mark.slow

TUNING = FakeStore(None).tuning
NOW = after(hours=1)


class TestDrift:
    def test_every_field_is_told_with_both_values(self):
        """What differs, what was expected, what was found; version and bypass are no drift."""
        found = replaced(replaced(TUNING, "defaults.eviction", "fifo"), "tiers.dram.capacity_bytes", 1 << 27)
        assert list(drift(TUNING, {**found, "version": 9, "bypass": True})) == [
            "defaults.eviction: expected lru, found fifo",
            "tiers.dram.capacity_bytes: expected 1.0 GiB, found 128.0 MiB",
        ]
        assert list(drift({"pools": {"b": 1}}, {"pools": {}})) == ["pools.b: expected 1, found none"]

    def test_null_is_as_good_as_absent(self):
        """A pool that is named without values is no difference; a value for what was null is one."""
        named = {"pools": {"x": {"capacity_bytes": None}}, "a": 1, "b": None}
        assert list(drift(named, {"a": 1})) == list(drift({"a": 1}, named)) == []
        assert list(drift(named, {"a": 1, "b": 2, "c": 3})) == ["b: expected none, found 2"]

    def test_fields_in_motion_are_overlooked(self):
        """A change whose end is not known may be found either way; what else differs is told, and nothing adopted."""
        found = replaced(replaced(TUNING, "tiers.remote.fetch", "off"), "defaults.eviction", "fifo")
        known, moving = Expectation(TUNING, START, START), {"tiers.remote.fetch"}
        told, then = compared(known, snapshot(at=NOW, tuning=found), moving, after(days=2))
        assert (told, then) == ("defaults.eviction: expected lru, found fifo", known)
        assert compared(known, snapshot(at=NOW, tuning=found), (), after(days=2)) == ("", Expectation(found, NOW))

    def test_what_was_found_without_drift_is_expected(self):
        """A new field of another version, and the end of what differed."""
        found = replaced(TUNING, "tiers.remote.codec", "raw")
        known = Expectation(TUNING, START)
        assert compared(known, snapshot(at=NOW, tuning=found), (), NOW) == ("", Expectation(found, NOW))
        assert compared(replace(known, differs=START), snapshot(at=NOW, tuning=TUNING), (), NOW) == ("", known)

    def test_what_differs_since_an_hour_that_lies_ahead_differs_since_now(self):
        """A clock that was ahead is not waited for: after a day what was found is expected."""
        found = snapshot(at=NOW, tuning=replaced(TUNING, "defaults.eviction", "fifo"))
        told, then = compared(Expectation(TUNING, START, after(days=30)), found, (), NOW)
        assert (told, then) == ("defaults.eviction: expected lru, found fifo", Expectation(TUNING, START, NOW))
        assert compared(then, found, (), NOW + ADOPTED_AFTER) == ("", Expectation(found.tuning, NOW))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("defaults.eviction", "fifo", "defaults.eviction: expected lru, found fifo"),
        ("tiers.dram.capacity_bytes", (1 << 30) // 10, "expected 1.0 GiB, found 102.4 MiB"),
        ("tiers.remote.fetch", "off", "tiers.remote.fetch: expected on, found off"),
    ],
)
def test_a_change_by_hand_is_reported_within_one_window(agent, store, rounds, field, value, message):  # noqa: PLR0917
    """Somebody changes the tuning behind the agent's back: the next round tells; set back, it is over."""
    rounds(2)
    before = store.tuning
    store.by_hand(field, value)
    rounds(1)
    (incident,) = agent.history.journal.incidents()
    assert (incident["kind"], incident["store"]) == ("tuning_drift", "host-a")
    assert message in incident["message"]
    store.tuning = {**before, "version": 3}
    rounds(1)
    assert wrong(agent) == []


def test_decisions_are_no_drift(agent, store, rounds):
    """What the agent itself changes and rolls back is expected, also right after a restart of the agent."""
    store.bandwidth = 1e8
    rounds(5)
    store.bandwidth = 1e9
    rounds(5)
    assert store.tuning["version"] >= 3
    assert wrong(agent) == []


def test_a_change_between_an_answer_and_the_look_at_it_is_no_drift(agent, store, rounds, clock):
    """Operators wait for no round: the answer is older than what is expected, and proves nothing."""
    rounds(2)
    look = agent.loop.watch.look

    def later(*heard):
        if fetch(store) == "on":
            clock.advance(1)
            made(agent, store, "tiers.remote.fetch", "on", "off", tier="remote", tuner="remote_fetch")
        look(*heard)

    agent.loop.watch.look = later
    rounds(3)
    assert (fetch(store), drifted(agent)) == ("off", False)


def test_what_a_freeze_keeps_waiting_is_found_either_way_and_no_other(agent, store, clock, arc, soak):
    """A rollback waits for days of it: what somebody sets meanwhile is neither what was before nor what was decided."""
    agent.history.journal.freeze("release", "ops", clock.now(), None)
    soak(5, 600, 500)
    assert not drifted(agent)
    store.by_hand(arc.field, "s3fifo")
    soak(1, 600, 500)
    (incident,) = agent.history.journal.incidents()
    assert incident["message"] == f"{arc.field}: expected arc, found s3fifo"


def test_what_is_under_way_for_long_is_no_drift(agent, store, clock, rounds):
    """A change and its undoing reach the store, their answers do not; a freeze holds up finding out about either."""
    rounds(2)
    for state, undo in (("soaking", False), ("rolled_back", True)):
        store.lose_answers = True
        if undo:
            (decision,) = agent.history.decisions.find()
            agent.changes.roll_back(decision, VERDICT, "worse", {})
        else:
            made(agent, store, "tiers.remote.fetch", "on", "off", tier="remote", tuner="remote_fetch")
        store.lose_answers = False
        agent.history.journal.freeze("release", "anna", clock.now(), None)
        rounds(3)
        agent.history.journal.unfreeze(clock.now())
        rounds(2)
        (decision,) = agent.history.decisions.find()
        assert (decision.state, fetch(store), drifted(agent)) == (state, "on" if undo else "off", False)


def test_what_is_decided_after_a_clock_was_set_back_is_no_drift(agent, store, clock, rounds):
    """Though the hour is earlier than the one from which on the tuning is known."""
    rounds(2)
    clock.advance(-1800)
    store.bandwidth = SLOW
    rounds(4)
    assert (fetch(store), drifted(agent)) == ("off", False)


def test_a_change_by_hand_is_told_after_a_clock_was_set_back(agent, store, clock, rounds):
    """What is expected has been so since an hour that lies ahead."""
    rounds(2)
    clock.advance(-1800)
    rounds(2)
    assert wrong(agent) == []
    store.by_hand("defaults.eviction", "fifo")
    rounds(1)
    assert wrong(agent) == ["tuning_drift"]


def test_a_setting_of_another_version_is_no_drift(agent, store, rounds):
    """An upgrade adds one, and nobody set it; when it is known, a change by hand is one. Undone, it takes it away."""
    rounds(2)
    before = store.tuning
    store.restart()
    store.by_hand("tiers.remote.codec", "raw")
    rounds(1)
    assert wrong(agent) == []
    store.by_hand("tiers.remote.codec", "lz4")
    rounds(1)
    assert wrong(agent) == ["tuning_drift"]
    store.restart()
    store.tuning = {**before, "version": store.tuning["version"]}
    rounds(1)
    assert wrong(agent) == []


def test_a_change_by_hand_that_stood_for_a_day_is_taken_for_meant(agent, store, clock, rounds):
    """After a day the incident closes, and what was found is expected from then on."""
    rounds(1)
    store.by_hand("defaults.eviction", "arc")
    rounds(1)
    assert wrong(agent) == ["tuning_drift"]
    clock.advance(86400)
    rounds(2)
    assert wrong(agent) == []


def test_the_tuner_undoes_a_harmful_change_by_hand(agent, store, rounds, policy_file):
    """A margin set by hand is drift in one window, and the next answer sets it back: the drift is over."""
    rounds(2)
    store.by_hand("tiers.remote.margin", 9.0)
    rounds(1)
    assert wrong(agent) == ["tuning_drift"]
    rounds(2)
    assert store.tuning["tiers"]["remote"]["margin"] == 1.1
    assert wrong(agent) == []
