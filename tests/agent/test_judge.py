"""Verdicts in the loop: soaks, rollbacks by themselves and by command, what is remembered of them."""

import itertools
from datetime import timedelta

import pytest

from agent.agents import EVICTION, POLICY, answer, made, survey_of
from agent.fakes import DIGEST, FAST, SLOW, START, fetch, propose
from tiertune_agent.changes.control import Refused, Unknown
from tiertune_agent.records import FLEET, Prospect, State, Target
from tiertune_agent.tuners.base import Proposal
from tiertune_connector.whatif.chain import Shape

pytestmark = pytest.mark.slow

GIB = 1 << 30
FLOOR = "tiers.remote.min_fetch_tokens"
POOL = {"namespace": DIGEST, "model": "llama"}


def now_of(agent, decision):
    return agent.history.decisions.get(decision.id)


def state(agent, decision):
    return now_of(agent, decision).state


def stands(agent, store, decision):
    """Its state, and the version of the store's tuning."""
    return state(agent, decision), store.tuning["version"]


def eviction(store):
    return store.tuning["pools"][DIGEST]["dram"]["eviction"]


@pytest.fixture
def worse(arc, soak, store):
    """The change, which its ghosts call worse; but its store did not hear that it is to be set back."""
    soak(3, 600, 500)
    with store.deaf():
        soak(1, 600, 500)
    return arc


def verdict(agent, decision):
    (row,) = agent.history.verdicts.of(decision.id)
    return row


@pytest.fixture
def no_auto(policy_file):
    """An operator takes the mode back to recommend."""
    return lambda: policy_file.write_text(policy_file.read_text().replace("mode: auto", "mode: recommend"))


class TestByItself:
    def test_a_better_ghost_keeps(self, agent, arc, soak):
        """After the soak a change whose ghost missed less is kept, with the figures of both."""
        soak(3, 500, 600)
        assert state(agent, arc) == "soaking"
        soak(1, 500, 600)
        assert state(agent, arc) == "kept"
        assert verdict(agent, arc)["reason"].startswith("missed share of the prompts: 0.39")

    def test_a_worse_ghost_rolls_back(self, agent, store, arc, soak):
        """A change whose ghost missed more is undone, recorded with its evidence, and the store is as before."""
        soak(4, 600, 500)
        assert state(agent, arc) == "rolled_back"
        assert eviction(store) == "lru"
        assert store.tuning["version"] == 3
        row = verdict(agent, arc)
        assert (row["verdict"], row["evidence"]["windows"]) == ("rolled_back", 4)
        assert now_of(agent, arc).document()["rolled_back_by"] == "verdict"

    def test_no_difference_is_an_answer(self, agent, store, arc, soak):
        """Equal ghosts: inconclusive, and the change stays."""
        for _ in range(4):
            soak(1, 500, 500)
        assert state(agent, arc) == "inconclusive"
        assert store.tuning["version"] == 2

    def test_what_nothing_weighs_any_more_ends_as_such(self, agent, store, rounds):
        """A raised floor that soaked when the agent was upgraded is kept, as one that is made now."""
        raised = made(agent, store, FLOOR, 0, 512, tuner="remote_fetch", tier="remote")
        at = raised.applied_at
        raised = agent.history.decisions.move(raised, State.SOAKING, now=at, soak_until=at)
        rounds(1)
        assert state(agent, raised) == "kept"
        assert "cannot be seen to pay" in verdict(agent, raised)["reason"]

    def test_without_figures_it_soaks_twice_as_long(self, agent, arc, rounds):
        """Too few windows with ghosts: the soak goes on once for its length, and ends inconclusive."""
        rounds(7)
        assert state(agent, arc) == "soaking"
        rounds(1)
        assert verdict(agent, arc)["reason"] == "0 windows told anything, 3 are needed"

    @pytest.mark.parametrize(
        ("field", "before", "after", "minutes"),
        [
            (EVICTION, "lru", "arc", 10),
            ("tiers.dram.capacity_bytes", GIB, 2 * GIB, 20),
            ("admission.disk", "always", "second_access", 20),
            ("tiers.remote.fetch", "on", "off", 1),
        ],
    )
    def test_a_soak_lasts_until_the_tier_could_have_filled(
        self, agent, store, auto, rounds, *, field, before, after, minutes
    ):
        """Ten minutes for a pool, twice that for twice its size or an admission; the policy's one for a fetch."""
        tier = "dram" if field == EVICTION else field.split(".")[1]
        store.tuning = {**store.tuning, "admission": {"disk": "always", "remote": "always"}}
        store.held = {slower: {"capacity_bytes": GIB} for slower in ("disk", "remote")}
        for _ in range(2):
            store.count("tier_evictions_total", (GIB >> 20) / 40, tier="dram", **POOL)
            for slower in ("disk", "remote"):
                store.count("tier_transfer_bytes_total", GIB / 40, tier=slower, operation="write")
            rounds(1)
        namespace = DIGEST if field == EVICTION else ""
        decision = made(agent, store, field, before, after, {"shape": "1/0/0"}, namespace=namespace, tier=tier)
        rounds(1)
        found = now_of(agent, decision)
        assert found.soak_until - found.applied_at == timedelta(minutes=minutes)

    def test_without_a_soak_nobody_is_blamed(self, agent, store, rounds, policy_file):
        """What was read before the change says nothing about it."""
        policy_file.write_text(POLICY.replace("soak: 1m", "soak: 0s"))
        store.bandwidth = SLOW
        rounds(3)
        (decision,) = agent.history.decisions.find()
        assert verdict(agent, decision)["reason"].startswith("1 window told anything")

    def test_a_recommended_change_is_not_undone_by_itself(self, agent, store, auto, rounds, soak):
        """What an operator approved is judged worse, and left to the operator."""
        rounds(1)
        decision = made(agent, store, EVICTION, "lru", "arc", mode="recommend", namespace=DIGEST)
        agent.changes.approve(decision.id, "ops")
        soak(4, 600, 500)
        assert state(agent, decision) == "inconclusive"
        told = f"not rolled back by itself in mode recommend: roll back decision {decision.id}"
        assert told in verdict(agent, decision)["reason"]
        assert store.tuning["version"] == 2

    def test_what_somebody_changed_meanwhile_is_left_alone(self, agent, store, arc, soak):
        """A value that is no longer ours is not set back."""
        store.by_hand(EVICTION, "s3fifo")
        soak(4, 600, 500)
        assert "somebody changed it within the soak" in verdict(agent, arc)["reason"]
        assert eviction(store) == "s3fifo"

    def test_changed_in_the_very_moment_of_the_rollback(self, agent, store, arc, soak):
        """Seen only when the rollback reads the tuning: nothing is sent, and the verdict says why."""
        soak(3, 600, 500)
        handle = store.handle

        def meddling(request):
            answer = handle(request)
            if request.url.path == "/v1/status" and store.tuning["version"] == 2:
                store.by_hand(EVICTION, "s3fifo")
            return answer

        store.handle = meddling
        soak(1, 600, 500)
        assert state(agent, arc) == "inconclusive"
        assert "it is not rolled back" in verdict(agent, arc)["reason"]
        assert now_of(agent, arc).undo is None
        assert eviction(store) == "s3fifo"

    def test_frozen_its_rollback_waits(self, agent, store, clock, arc, soak):
        """A freeze holds rollbacks too; lifted, the verdict of its soak comes."""
        agent.history.journal.freeze("release", "ops", clock.now(), None)
        soak(6, 600, 500)
        assert stands(agent, store, arc) == ("soaking", 2)
        told = now_of(agent, arc).waits
        assert told == "its verdict is to roll it back; frozen: by ops: release"
        agent.history.journal.unfreeze(clock.now())
        soak(1, 600, 500)
        assert stands(agent, store, arc) == ("rolled_back", 3)
        assert verdict(agent, arc)["evidence"]["windows"] == 4

    def test_a_freeze_holds_a_rollback_that_is_under_way_but_not_a_person(self, agent, store, clock, worse, soak):
        """It says what it waits for; who rolls the decision back by hand is obeyed at once."""
        agent.history.journal.freeze("release", "ops", clock.now(), None)
        soak(2, 600, 500)
        held = now_of(agent, worse)
        assert (held.state, store.tuning["version"]) == ("soaking", 2)
        assert held.waits == "its verdict is to roll it back; frozen: by ops: release"
        assert agent.changes.rollback(worse.id, "anna").state == "rolled_back"
        assert (store.tuning["version"], verdict(agent, worse)["reason"]) == (3, "rolled back by anna")
        assert now_of(agent, worse).waits == ""

    def test_a_rollback_that_a_freeze_holds_can_be_rejected(self, agent, store, clock, arc, soak):
        """It stands then, as an operator said, also once the freeze is over; only once, and nothing else is."""
        agent.history.journal.freeze("release", "ops", clock.now(), None)
        with pytest.raises(Refused, match="is applied, not proposed"):
            agent.changes.reject(arc.id, "anna")
        soak(6, 600, 500)
        assert agent.changes.reject(arc.id, "anna").state == "inconclusive"
        with pytest.raises(Refused, match="is inconclusive, not proposed"):
            agent.changes.reject(arc.id, "anna")
        agent.history.journal.unfreeze(clock.now())
        soak(2, 600, 500)
        assert stands(agent, store, arc) == ("inconclusive", 2)
        assert verdict(agent, arc)["reason"].endswith("; it is not rolled back: rejected by anna")
        assert (now_of(agent, arc).undo, now_of(agent, arc).waits) == (None, "")

    def test_who_rejects_a_rollback_that_was_just_made_is_told(self, agent, clock, arc, soak, monkeypatch):
        agent.history.journal.freeze("release", "ops", clock.now(), None)
        soak(6, 600, 500)
        held = now_of(agent, arc)
        agent.changes.rollback(arc.id, "ben")
        monkeypatch.setattr(agent.history.decisions, "get", lambda _: held)
        with pytest.raises(Refused, match="has just changed"):
            agent.changes.reject(arc.id, "anna")

    def test_a_store_that_is_away_is_rolled_back_when_it_returns(self, agent, store, worse, rounds):
        """The wish to roll back outlives a store that does not answer."""
        assert state(agent, worse) == "soaking"
        rounds(1)
        assert stands(agent, store, worse) == ("rolled_back", 3)

    def test_a_store_that_stays_away_is_judged_no_more(self, agent, store, clock, arc):
        """A day after the soak, which begins though nobody knows what it holds; until then it may come back."""
        store.up = False
        agent.tick()
        until = now_of(agent, arc).soak_until + timedelta(days=1)
        for left, ends in ((timedelta(seconds=1), "soaking"), (timedelta(0), "inconclusive")):
            clock.advance((until - left - clock.now()).total_seconds())
            agent.tick()
            assert state(agent, arc) == ends
        assert verdict(agent, arc)["reason"] == "the store has been away since the soak"

    def test_it_is_not_rolled_back_where_the_policy_forbids_it_by_then(self, agent, store, worse, soak, no_auto):
        """The mode was left while the store was away: its value stays, the verdict says why, a person may do it."""
        no_auto()
        soak(1, 600, 500)
        assert stands(agent, store, worse) == ("inconclusive", 2)
        assert verdict(agent, worse)["reason"].endswith("not rolled back: the policy's mode is recommend by now")
        assert agent.changes.rollback(worse.id, "anna").state == "rolled_back"
        assert store.tuning["version"] == 3

    def test_a_rollback_that_was_made_is_told_whatever_the_policy_says_by_then(self, agent, store, arc, soak, no_auto):
        """Only its answer was lost."""
        soak(3, 600, 500)
        store.lose_answers = True
        soak(1, 600, 500)
        assert state(agent, arc) == "soaking"
        no_auto()
        soak(1, 600, 500)
        assert stands(agent, store, arc) == ("rolled_back", 3)


class TestWithoutGhosts:
    def test_a_floor_that_lets_losing_fetches_through_is_set_back(self, agent, store, auto, rounds):
        """Short fetches lost since it was lowered, so it is raised again; that has no trial of its own, and is kept."""
        raised = made(agent, store, FLOOR, 0, 1024, tuner="gate_settings", tier="remote")
        rounds(1)
        assert state(agent, raised) == "kept"
        decision = made(agent, store, FLOOR, 1024, 0, tuner="gate_settings", tier="remote")
        for index in range(5):
            store.count("gate_candidate_requests_total", 10, tier="remote")
            store.count("gate_candidate_seconds_total", 10.0, tier="remote", kind="recompute")
            store.count("gate_length_requests_total", 5, tier="remote", tokens="0")
            store.count("gate_length_seconds_total", 2.0 + index / 10, tier="remote", tokens="0", result="lost")
            rounds(1)
        assert state(agent, decision) == "rolled_back"
        assert store.tuning["tiers"]["remote"]["min_fetch_tokens"] == 1024

    def test_an_admission_that_finds_less_is_set_back(self, agent, store, auto, rounds):
        """Half as much is found per prompt token after it as before, once the tier is filled anew: not until then."""
        store.tuning = {**store.tuning, "admission": {"disk": "always", "remote": "always"}}

        def pass_by(windows, found):
            for index in range(windows):
                store.count("prompt_tokens_total", 1e9 + index, stage="all", **POOL)
                counts = {"gate_candidate_requests_total": 10, "gate_candidate_tokens_total": found * 1e6}
                counts |= {"gate_candidate_bytes_total": found * 1e9, "saved_seconds_total": found * 500}
                store.counts(counts, tier="remote")
                store.count("gate_candidate_seconds_total", found * 1e3, tier="remote", kind="recompute")
                rounds(1)

        pass_by(8, 600)
        decision = made(agent, store, "admission.remote", "always", "second_access", tuner="admission", tier="remote")
        pass_by(3, 1200)
        pass_by(5, 300)
        assert state(agent, decision) == "rolled_back"
        assert "not of the same requests" in verdict(agent, decision)["reason"]
        assert store.tuning["admission"]["remote"] == "always"

    def test_a_holdout_needs_no_soak(self, agent, store, auto, rounds):
        """An experiment is not better or worse: kept at once, and told so."""
        rounds(1)
        decision = made(agent, store, "tiers.remote.holdout", 0.0, 0.05, tuner="holdout", tier="remote")
        rounds(1)
        assert state(agent, decision) == "kept"
        assert verdict(agent, decision)["reason"].startswith("an experiment")


class TestMemory:
    def test_during_a_soak_the_pool_is_left_alone(self, agent, arc):
        """Another change of the same pool, or of its tier, waits; one of another tier does not."""
        watched = survey_of(agent, START).watched
        for target in (Target("host-a", "dram", DIGEST), Target("host-a", "dram"), Target(FLEET, "dram")):
            assert watched(target).id == arc.id
        for target in (("host-a", "dram", "cd" * 16), ("host-b", "dram", DIGEST), ("host-a", "disk")):
            assert watched(Target(*target)) is None

    @pytest.mark.parametrize(("stores", "waits"), [(1, True), (2, True), (3, False), (500, False)])
    def test_of_many_stores_one_always_soaks(self, agent, arc, stores, waits):
        """A change in few of the stores holds up nothing of the fleet; one of the fleet's own does."""
        fleet, split = [f"host-{number}" for number in range(stores)], Target(FLEET, "dram")
        watched = survey_of(agent, START, fleet).watched(split)
        assert (watched and watched.id) == (arc.id if waits else None)
        wish = Proposal("tiers.dram.capacity_bytes", GIB, 2 * GIB, "because", {"split": []})
        own = propose(agent.history, "tier_size", split, wish)
        agent.history.decisions.move(own, State.APPLIED, now=START)
        assert survey_of(agent, START, fleet).watched(split).id == own.id

    def test_what_was_rolled_back_is_not_tried_again_soon(self, agent, store, rounds, policy_file):
        """A wrong switch is rolled back; the same evidence again is refused for twice the soak, and says so."""
        policy_file.write_text(POLICY.replace("enable_after: 2", "enable_after: 99"))
        rounds(1)
        store.bandwidth = SLOW
        rounds(2)
        store.bandwidth = FAST
        rounds(4)
        assert fetch(store) == "on"
        store.bandwidth = SLOW
        rounds(3)
        assert fetch(store) == "on"
        told = answer(agent)["reason"]
        assert told.startswith("the same change was undone or refused once: not tried again for another")
        rounds(6)
        assert fetch(store) == "off"

    def test_fetching_that_pays_only_while_it_is_off_is_tried_ever_less_often(self, agent, store, rounds):
        """Its own load fills the link: each try ends in its soak and counts as undone; the next waits twice as long."""
        tries = []
        for _ in range(120):
            before = fetch(store)
            store.bandwidth = SLOW if before == "on" else FAST
            rounds(1)
            if (before, fetch(store)) == ("off", "on"):
                tries.append(store.clock.now())
        waits = [(later - earlier).total_seconds() for earlier, later in itertools.pairwise(tries)]
        assert waits == [150.0, 270.0, 510.0]
        told = answer(agent)["reason"]
        assert told.startswith("the same change was undone or refused 4 times: not tried again for another")
        switched = agent.history.decisions.find()[::-1]
        verdicts = {d.id: verdict(agent, d)["reason"] for d in switched}
        assert {d.after for d in switched if "it counts as undone" in verdicts[d.id]} == {"on"}
        assert all("not rolled back: a switch-on was undone before" in verdicts[d.id] for d in switched[2::2])
        assert all(
            later.applied_at - earlier.applied_at == timedelta(seconds=30)
            for earlier, later in itertools.pairwise(switched)
            if later.after == "off"
        ), "no switch-off waited"

    def test_the_soak_that_counts_is_the_one_that_was_cut_short(self, agent, store, rounds):
        """Fetching that was kept, and is switched off when times change, was no error."""
        store.bandwidth = SLOW
        rounds(3)
        store.bandwidth = FAST
        rounds(9)
        store.bandwidth = SLOW
        rounds(2)
        assert [d.after for d in agent.history.decisions.find()] == ["off", "on", "off"]
        survey = survey_of(agent, store.clock.now())
        assert survey.undone(Target("host-a", "remote")) == ()

    @pytest.mark.parametrize(
        ("prices", "ends", "gib"),
        [("", "rolled_back", 1.0), ("prices: {gpu_hour: 1, dram_gib_month: 100000}", "kept", 0.1)],
    )
    def test_sizes_are_judged_by_prospects(self, agent, store, clock, auto, rounds, *, policy_file, prices, ends, gib):
        """A size that the fleet's simulations call worse is set back, unless its rent is worth the seconds."""
        policy_file.write_text(f"{policy_file.read_text()}{prices}\n")
        rounds(1)
        before, after = Shape(GIB, 0, GIB), Shape(GIB // 10, 0, GIB)
        decision = made(
            agent, store, "tiers.dram.capacity_bytes", GIB, GIB // 10, {"shape": str(before), "best": str(after)}
        )
        for index in range(4):
            costs = {str(before): 1.0 + index / 10, str(after): 1.3 + index / 9}
            agent.history.measured.remember_prospects([Prospect(DIGEST, clock.now(), 15.0, 50, costs)])
            rounds(1)
        assert state(agent, decision) == ends
        assert store.tuning["tiers"]["dram"]["capacity_bytes"] == int(gib * GIB)


class TestByCommand:
    def test_a_kept_change_can_be_rolled_back(self, agent, store, arc, soak):
        """By number, once; it is recorded who did."""
        soak(4, 500, 600)
        rolled = agent.changes.rollback(arc.id, "ops")
        assert (rolled.state, rolled.undo["by"]) == ("rolled_back", "ops")
        assert eviction(store) == "lru"
        assert [v["verdict"] for v in agent.history.verdicts.of(arc.id)] == ["kept", "rolled_back"]
        with pytest.raises(Refused, match="is rolled_back: there is nothing to roll back"):
            agent.changes.rollback(arc.id, "ops")

    def test_what_was_never_made_cannot_be_undone(self, agent, store, auto, rounds):
        """Unknown numbers and open proposals are refused."""
        rounds(1)
        decision = made(agent, store, EVICTION, "lru", "arc", mode="recommend", namespace=DIGEST)
        with pytest.raises(Refused, match="is proposed"):
            agent.changes.rollback(decision.id, "ops")
        with pytest.raises(Unknown):
            agent.changes.rollback(99, "ops")

    def test_a_later_value_is_not_overwritten(self, agent, store, arc, soak):
        """The field has another value by now: refused, and the decision stays what it was."""
        soak(4, 500, 600)
        store.by_hand(EVICTION, "s3fifo")
        with pytest.raises(Refused, match="has changed since: it is s3fifo"):
            agent.changes.rollback(arc.id, "ops")
        assert state(agent, arc) == "kept"
