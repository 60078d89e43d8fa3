"""History on both real databases: decisions and verdicts."""

from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import pytest
from sqlalchemy import event

from agent.conftest import BACKENDS
from agent.conftest import both_backends as backend  # noqa: F401
from agent.fakes import DIGEST, START, after, pruned, remember
from agent.fakes import propose as proposed
from tiertune_agent.history.changed import place
from tiertune_agent.history.database import DatabaseError, connect
from tiertune_agent.history.retention import FORTNIGHT
from tiertune_agent.history.store import History
from tiertune_agent.records import FLEET, Made, Prospect, State, Target
from tiertune_agent.tuners.base import NoChange, Proposal

TARGET = Target("host-a", "remote", models=("llama",))

LATER = after(days=1)
WISH = Proposal("tiers.remote.fetch", "on", "off", "it costs", {"windows": [1, 2]}, requests=9)


def propose(history, wish=WISH, at=START):
    return proposed(history, "remote_fetch", TARGET, wish, at=at)


def expected(history):
    """Whether the host should fetch, and since when."""
    (one,) = history.expectations(["host-a"]).values()
    return one.tuning["tiers"]["remote"]["fetch"], one.since


@pytest.fixture
def decisions(history):
    return history.decisions


@pytest.fixture
def heard(decisions):
    """What an observer of decisions is told from now on."""
    told = []
    decisions.observer = lambda one: told.append((one.tuner, one.state))
    return told


@contextmanager
def meanwhile(history, table, act):
    """Once, just after a row of the table was read."""
    reads = []

    def read(_connection, _cursor, statement, *_rest):
        if statement.startswith(f"SELECT {table}"):
            reads.append(statement)
            if len(reads) == 1:
                act()

    event.listen(history._engine, "after_cursor_execute", read)
    yield
    event.remove(history._engine, "after_cursor_execute", read)
    assert reads


class TestDecisions:
    def test_a_decision_comes_back_as_it_was(self, history, decisions):
        """Target, values, evidence, versions and times survive the database."""
        decision = propose(history)
        assert decisions.get(decision.id) == decision
        assert decision.target == TARGET
        assert (decision.before, decision.after, decision.state) == ("on", "off", "proposed")
        assert decision.evidence == {"windows": [1, 2]}
        assert decision.document()["from"] == "on"

    def test_the_same_wish_again_renews_its_row(self, history, decisions):
        """A repeated wish is one decision with newer evidence; another wish supersedes it."""
        first = propose(history)
        again = propose(history, Proposal("tiers.remote.fetch", "on", "off", "it still costs"))
        assert (again.id, again.reason) == (first.id, "it still costs")
        other = propose(history, Proposal("tiers.remote.fetch", "on", "maybe", "other"))
        assert other.id != first.id
        assert decisions.get(first.id).state == "expired"

    def test_a_wish_that_is_gone_expires(self, history, decisions):
        """A proposal that its tuner no longer makes cannot be approved any more."""
        decision = propose(history)
        decisions.expire(decision, "it pays again", now=START)
        gone = decisions.get(decision.id)
        assert gone.state == "expired"
        assert gone.reason.endswith("no longer wished: it pays again")

    def test_a_decision_moves_once(self, history, decisions, heard):
        """Of two who move the same decision, one succeeds; the other changes nothing."""
        decision = propose(history)
        heard.clear()
        assert decisions.move(decision, State.APPROVED, now=START).state == State.APPROVED
        assert decisions.move(decision, State.REJECTED, now=START) is None
        assert decisions.get(decision.id).state == "approved"
        assert heard == [("remote_fetch", "approved")]

    @pytest.mark.parametrize("wish", [WISH, Proposal("tiers.remote.fetch", "on", "maybe", "other")])
    def test_what_somebody_moves_in_the_moment_of_a_new_look_stays_moved(self, history, decisions, heard, wish):
        """Approved between reading and renewing, or superseding: the row is as the approval left it."""
        decision = propose(history)
        heard.clear()
        with meanwhile(history, "decisions", lambda: decisions.move(decision, State.APPROVED, now=START)):
            assert propose(history, wish, at=after(minutes=1)) is None
        moved = decisions.get(decision.id)
        assert (moved.state, moved.reason, moved.updated_at) == ("approved", "it costs", START)
        assert heard == [("remote_fetch", "approved")]
        assert len(decisions.find()) == 1

    def test_why_something_is_under_way_is_told_until_it_ends(self, history, decisions):
        """The last reason; none is told of what has ended, nor of what somebody else has ended meanwhile."""
        decision = decisions.move(propose(history), State.APPROVED, now=START)
        for why in ("no answer", "no route", "no route"):
            waiting = decisions.wait(decision, why)
        assert (waiting.waits, waiting.document()["waits"]) == ("no route", "no route")
        assert decisions.get(decision.id) == waiting
        ended = decisions.move(waiting, State.APPLIED, now=START)
        assert (ended.waits, ended.document()["waits"]) == ("", None)
        wished = decisions.undo(ended, {"by": "ops"})
        assert decisions.wait(wished, "no answer").waits == "no answer"
        decisions.judge(wished, State.APPLIED, "it cannot be", {}, START, undo=None)
        decisions.wait(wished, "no route")
        assert decisions.get(decision.id).waits == ""

    def test_changes_are_counted_by_when_they_were_applied(self, history, decisions):
        """The last change of a target, and how many a store saw, come from decisions that did change it."""
        for hours in (0, 1, 2):
            decision = propose(history, Proposal("tiers.remote.fetch", "on", f"off{hours}", ""))
            if hours < 2:
                at = after(hours=hours)
                decisions.move(decision, State.APPLIED, now=at, applied_at=at)
        last = Made("tiers.remote.fetch", "on", "off1", after(hours=1))
        assert history.changed.last(["host-a"]) == {place("remote_fetch", TARGET): last}
        assert history.changed.last(["host-b"]) == history.changed.undone(START, LATER, ["host-b"]) == {}
        assert history.changed.count(after(minutes=30), last.at) == {"host-a": 1}

    def test_what_rests_on_requests_is_told_from_what_the_policy_says(self, history, decisions):
        """By its evidence; what was undone had a reason, too."""
        for evidence, state, learned in (
            ({}, State.KEPT, False),
            ({"requests": 1200}, State.KEPT, True),
            ({}, State.ROLLED_BACK, True),
        ):
            one = propose(history, Proposal("tiers.remote.min_fetch_tokens", 0, 512, "", evidence))
            decisions.move(one, state, now=START, applied_at=START)
            (last,) = history.changed.last(["host-a"]).values()
            assert last.learned == learned

    def test_a_split_is_the_last_change_of_all_that_it_moves(self, history, decisions):
        """Of a host that was changed by itself since, that is the last one."""
        size = Proposal("tiers.dram.capacity_bytes", 1, 2, "", {"goal": 3})
        steps = [
            {"store": store, "tier": "dram", "field": size.field, "from": 1, "to": 2} for store in ("host-a", "host-b")
        ]

        def change(target, at, **evidence):
            wish = replace(size, evidence={"goal": 3, **evidence})
            one = proposed(history, "tier_size", target, wish, mode="auto", at=at)
            decisions.move(one, State.APPLIED, now=at, applied_at=at)

        host, fleet, later = Target("host-a", "dram"), Target("fleet", "dram"), after(hours=1)
        change(host, START)
        change(fleet, later, split=steps)
        whole, part = Made(size.field, 1, 2, later, 3), Made(size.field, 1, 2, later)
        others = {place("tier_size", fleet): whole, place("tier_size", Target("host-b", "dram")): part}
        assert history.changed.last(["host-a"]) == {place("tier_size", host): part, **others}
        change(host, later + timedelta(hours=1))
        own = Made(size.field, 1, 2, later + timedelta(hours=1), 3)
        assert history.changed.last(["host-a"]) == {place("tier_size", host): own, **others}

    def test_a_store_should_have_what_was_decided_and_back_what_was_undone(self, history, decisions):
        """What is proposed, under way, refused or kept changes nothing; what another decision changed since, stays."""
        remember(history, tuning={"tiers": {"remote": {"fetch": "on"}}})

        def made(at, before="on", to="off"):
            wish = decisions.move(propose(history, replace(WISH, before=before, after=to)), State.APPROVED, now=at)
            assert expected(history)[0] == before
            decisions.move(decisions.move(wish, State.APPLIED, now=at, applied_at=at), State.SOAKING, now=after(days=1))
            return decisions.get(wish.id)

        def undo(decision, at):
            decisions.judge(decision, State.ROLLED_BACK, "worse", {}, at)
            return expected(history)

        refused = decisions.move(propose(history), State.APPROVED, now=START)
        decisions.move(refused, State.FAILED, now=START)
        first, at = made(after(hours=1)), [after(hours=hours) for hours in range(8)]
        assert expected(history) == ("off", at[1])
        second = made(at[2], "off", "on")
        assert undo(first, at[3]) == ("on", at[2])
        third = made(at[4])
        assert undo(second, at[5]) == ("off", at[4])
        decisions.judge(third, State.KEPT, "good", {}, at[6])
        assert expected(history) == ("off", at[4])
        assert undo(decisions.get(third.id), at[7]) == ("on", at[7])

    def test_a_model_whose_name_holds_a_zero_byte_hides_no_change(self, history, decisions):
        """Evidence names models as stores do: what was changed is read past it, round after round."""
        step = {"store": "host-a", "tier": "dram", "field": "tiers.dram.capacity_bytes", "from": 1, "to": 2}
        wish = replace(WISH, evidence={"split": [{**step, "models": ["a\0b"]}]})
        made = proposed(history, "tier_size", Target(FLEET, "dram"), wish)
        decisions.move(decisions.move(made, State.APPROVED, now=START), State.APPLIED, now=START, applied_at=START)
        assert history.changed.count(START, LATER) == {FLEET: 1, "host-a": 1}
        assert place("tier_size", Target("host-a", "dram")) in history.changed.last(["host-a"])

    def test_every_part_of_a_split_is_expected(self, history, decisions):
        """Of a host that left the fleet, nothing is."""
        size = Proposal("tiers.dram.capacity_bytes", 1, 2, "")
        for store in ("host-a", "host-b"):
            remember(history, store=store, tuning={"tiers": {"dram": {"capacity_bytes": 1}}})
        steps = [
            {"store": f"host-{name}", "tier": "dram", "field": size.field, "from": 1, "to": 2}
            for name in ("a", "b", "c")
        ]
        wish = proposed(history, "tier_size", Target(FLEET, "dram"), replace(size, evidence={"split": steps}))

        def sizes():
            told = history.expectations(["host-a", "host-b", "host-c"])
            return {store: one.tuning["tiers"]["dram"]["capacity_bytes"] for store, one in told.items()}

        applied = decisions.move(wish, State.APPLIED, now=START, applied_at=START)
        assert sizes() == {"host-a": 2, "host-b": 2}
        decisions.judge(applied, State.ROLLED_BACK, "worse", {}, START)
        assert sizes() == {"host-a": 1, "host-b": 1}

    def test_what_is_decided_between_a_look_and_its_end_stays_expected(self, history, decisions):
        """The look saw the tuning before it."""
        remember(history, tuning={"tiers": {"remote": {"fetch": "on"}}})
        (seen,) = history.expectations(["host-a"]).values()
        decisions.move(propose(history), State.APPLIED, now=after(hours=1), applied_at=after(hours=1))
        history.expect({"host-a": (seen.since, replace(seen, since=after(hours=2)))})
        assert expected(history) == ("off", after(hours=1))

    @pytest.mark.parametrize("backend", BACKENDS[1:])
    def test_of_two_changes_of_a_store_in_one_moment_both_are_expected(self, history, decisions, database):
        """The second waits for the first (here it soon gives up, and is made again): neither takes the other back."""
        remember(history, tuning={"tiers": {"remote": {"fetch": "on", "margin": 1.1}}})
        margin = Proposal("tiers.remote.margin", 1.1, 2.0, "")
        second = proposed(history, "gate_settings", TARGET, margin)
        other = History(connect(f"{database}?options=-c%20lock_timeout%3D50"))

        def move():
            other.decisions.move(second, State.APPLIED, now=START, applied_at=START)

        def refused():
            with pytest.raises(DatabaseError, match="lock timeout"):
                move()

        with meanwhile(history, "stores", refused):
            decisions.move(propose(history), State.APPLIED, now=START, applied_at=START)
        move()
        other.close()
        (one,) = history.expectations(["host-a"]).values()
        assert one.tuning == {"tiers": {"remote": {"fetch": "off", "margin": 2.0}}}

    def test_switches_of_fetch_that_were_made_come_oldest_first(self, history, decisions):
        """And undone; none that was only proposed, none of another field, none that did not move lately."""
        sized = Proposal("tiers.remote.capacity_bytes", 1, 2, "room")
        for minutes, wish in enumerate((WISH, sized, replace(WISH, before="off", after="on"), WISH)):
            decision = propose(history, wish, at=after(minutes=minutes))
            if minutes < 3:
                decisions.move(decision, State.KEPT, now=after(hours=1), applied_at=after(minutes=minutes))
        decisions.move(decisions.get(1), State.ROLLED_BACK, now=after(hours=2))
        undone, redone = [(START, "off"), (after(hours=2), "on")], (after(minutes=2), "on")
        assert decisions.switched(START) == {"host-a": sorted((*undone, redone))}
        assert decisions.switched(after(hours=2)) == {"host-a": [(START, "off"), (after(hours=2), "on")]}
        assert decisions.switched(after(hours=3)) == {}

    def test_what_is_switched_off_within_its_soak_was_wrong_to_go_on(self, history, decisions):
        """It is remembered as undone when it was; neither the switch-off itself, nor what had its verdict first."""
        at = [START + timedelta(minutes=minute) for minute in range(6)]

        def switch(before, after, when):
            wish = Proposal(WISH.field, before, after, "")
            return decisions.move(propose(history, wish), State.APPLIED, now=when, applied_at=when)

        off, on = switch("on", "off", at[0]), switch("off", "on", at[1])
        decisions.judge(off, State.INCONCLUSIVE, "superseded", {}, at[1])
        assert history.changed.undone(START, LATER, ["host-a"]) == {}
        switch("on", "off", at[2])
        decisions.judge(on, State.INCONCLUSIVE, "superseded", {}, at[2])
        undone = {("host-a", "remote", ""): [Made(WISH.field, "off", "on", at[2])]}
        assert history.changed.undone(START, LATER, ["host-a"]) == undone
        judged = switch("off", "on", at[3])
        decisions.judge(judged, State.INCONCLUSIVE, "not clear", {}, at[4])
        switch("on", "off", at[5])
        assert history.changed.undone(START, LATER, ["host-a"]) == undone
        assert history.changed.undone(at[3], LATER, ["host-a"]) == {}
        assert history.changed.undone(START, at[1], ["host-a"]) == {}, "that hour lies ahead"

    def test_of_refused_switch_offs_the_newest_is_remembered(self, history, decisions):
        """An expired token must not hold off what protects requests for ever longer; of other refusals all count."""
        at = [START + timedelta(minutes=minute) for minute in range(3)]
        for before, to in (("on", "off"), ("off", "on")):
            for moment in at:
                made = propose(history, Proposal(WISH.field, before, to, ""))
                decisions.move(made, State.FAILED, now=moment)
        (undone,) = history.changed.undone(START, LATER, ["host-a"]).values()
        assert sorted((made.before, made.at) for made in undone) == [("off", when) for when in at] + [("on", at[2])]

    def test_a_verdict_is_a_row_and_a_state(self, history, decisions, heard):
        """Judged once, a decision carries its verdict and is not judged again."""
        decision = decisions.move(propose(history), State.APPLIED, now=START, applied_at=START)
        heard.clear()
        decisions.judge(decision, State.KEPT, "good", {"gains": [1.0]}, START)
        decisions.judge(decision, State.INCONCLUSIVE, "late", {}, START)
        assert heard == [("remote_fetch", "kept")]
        assert [verdict["verdict"] for verdict in history.verdicts.of(decision.id)] == ["kept"]
        assert decisions.get(decision.id).state == "kept"

    def test_the_newest_answer_is_kept_also_when_it_is_no_change(self, history):
        """One row per tuner and target, holding the last sentence; a fortnight later its target is gone."""
        for reason in ("first", "second"):
            history.answers.remember([("remote_fetch", TARGET, NoChange(reason))], START)
        history.answers.remember([("tier_size", Target("host-a", "dram"), WISH)], START)
        assert [(a["tuner"], a["change"], a["reason"]) for a in history.answers.newest()] == [
            ("remote_fetch", False, "second"),
            ("tier_size", True, "it costs"),
        ]
        history.answers.remember([("tier_size", Target("host-a", "dram"), WISH)], START + FORTNIGHT)
        assert pruned(history, START + FORTNIGHT + timedelta(seconds=1), timedelta(days=1)) == 1
        assert [a["tuner"] for a in history.answers.newest()] == ["tier_size"]

    def test_prospects_come_back_by_namespace_and_time(self, history):
        """Those of one namespace, or of all, from a time on, oldest first; old ones are pruned."""
        seen = [
            Prospect(namespace, after(minutes=5 * index), 300.0, index, {"1/0/0": 0.5, "2/0/0": 0.25})
            for index in range(3)
            for namespace in (DIGEST, "cd" * 16)
        ]
        history.measured.remember_prospects(reversed(seen))
        assert history.measured.prospects(DIGEST, START) == seen[::2]
        assert len(history.measured.prospects("", after(minutes=5))) == 4
        assert pruned(history, START + FORTNIGHT + timedelta(minutes=5), timedelta(days=1)) == 2
        assert history.measured.prospects(DIGEST, START) == seen[2::2]
