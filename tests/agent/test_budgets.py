"""The fleet's budgets: what one round spends, what stores that are away may hold, what is given back."""

from dataclasses import replace

import pytest

from agent.managed import GIB, World
from agent.test_actuator import DECISION
from agent.test_split import host
from tiertune_agent.changes.round import Round
from tiertune_agent.policy.budgets import Budgeted, Capacities
from tiertune_agent.policy.document import Policy
from tiertune_agent.records import State, Target
from tiertune_agent.tuners.base import NoChange, Proposal

pytestmark = pytest.mark.slow

FIELD = "tiers.dram.capacity_bytes"
POLICY = """
version: 1
mode: {mode}
budgets: {{{budgets}}}
guard: {{min_requests: 1, soak: 1m}}
tuners: {{tier_size: {{period: 1m}}, remote_fetch: {{mode: observe}}}}
"""


class Local(World):
    """Four hosts, and no remote."""

    def __init__(self, *given):
        super().__init__(*given, hosts="0123")
        for store in self.stores:
            store.health = {"dram": "ok", "disk": "absent", "remote": "absent"}
        self.start()

    def allow(self, budgets, mode="auto", more=""):
        self.policy.write_text(POLICY.format(mode=mode, budgets=budgets) + more)

    def rounds(self, count):
        """While more DRAM is worth more, up to 4 GiB."""
        for _ in range(count):
            self.prospects({(1, 0): 2.0, (2, 0): 1.5, (4, 0): 0.5})
            super().rounds()

    def wishes(self):
        return {each.target.store: each for each in self.agent.history.decisions.find()}


@pytest.fixture
def world(agents, clock, policy_file):
    return Local(agents, clock, policy_file)


@pytest.fixture
def seldom():
    """One host is asked about its sizes every other round only."""
    return "overrides: [{match: {store: host-0}, tuners: {tier_size: {period: 5m}}}]\n"


@pytest.mark.parametrize("budgets", ["dram: 6GiB", "total: 6GiB"])
def test_one_round_spends_a_budget_once(world, budgets):
    """All hosts wish to grow at once: together they get what is left, in whatever round."""
    world.allow(budgets)
    world.rounds(12)
    assert sum(world.drams()) == 6
    assert max(world.drams()) > 1
    assert "stays at 1.0 GiB" in world.answer("dram", "host-3")


def test_verdicts_of_one_round_set_back_no_more_than_a_budget_pays_for(world):
    """Two hosts shrank, and another took half of the room since: one of the two has its own again."""
    for store, held in zip(world.stores, (2, 2, 1, 1), strict=True):
        store.by_hand(FIELD, held * GIB)
    still = "".join(f"{{match: {{store: host-{number}}}, mode: observe}}, " for number in (2, 3))
    world.policy.write_text(POLICY.format(mode="auto", budgets="dram: 6GiB") + f"overrides: [{still}]\n")
    world.agent.loop.run_once()
    shapes = {"shape": f"{2 * GIB}/0/0", "best": f"{GIB}/0/0"}
    for name in ("host-0", "host-1"):
        smaller = Proposal(FIELD, 2 * GIB, GIB, "because", shapes)
        world.agent.changes.take("tier_size", Target(name, "dram"), smaller, mode="auto", version=2, policy=1)
    world.stores[2].by_hand(FIELD, 2 * GIB)
    for _ in range(8):
        world.prospects({(1, 0): 2.0, (2, 0): 1.0})
        World.rounds(world)
    assert sorted(world.drams()) == [1, 1, 2, 2]
    assert [each.state for each in world.wishes().values()].count("rolled_back") == 1


def test_recommendations_of_one_round_hold_a_budget_together(world):
    """Whoever approves all of them does not overspend."""
    world.allow("dram: 6GiB", mode="recommend")
    world.rounds(6)
    for wish in world.wishes().values():
        world.agent.changes.approve(wish.id, "ops")
    assert sum(world.drams()) == 6


@pytest.mark.parametrize("rounds", [12, 13])
def test_recommendations_of_different_rounds_hold_a_budget_together(world, seldom, rounds):
    """Of a store that is asked less often, the open wish counts in the rounds between."""
    world.allow("dram: 6GiB", mode="recommend", more=seldom)
    world.rounds(rounds)
    for wish in world.agent.history.decisions.find(states=[State.PROPOSED]):
        world.agent.changes.approve(wish.id, "ops")
    assert sum(world.drams()) == 6


def test_what_only_wishes_overspend_is_not_given_back(world, seldom):
    """The operator lowered the budget below what was recommended, but not below what is held."""
    world.allow("dram: 12GiB", mode="recommend", more=seldom)
    world.rounds(13)
    world.allow("dram: 5GiB", mode="recommend", more=seldom)
    for _ in range(3):
        world.rounds(1)
        assert not [each for each in world.agent.history.decisions.find() if "overspent" in each.reason]


def test_a_wish_that_nobody_can_approve_any_more_spends_nothing(world, seldom):
    """Somebody set the size by hand, and its host is not asked about it yet: others have the room."""
    world.allow("dram: 6GiB", mode="recommend", more=seldom)
    world.rounds(13)
    assert world.wishes()["host-1"].state == "expired"
    world.stores[0].by_hand(FIELD, GIB // 2)
    world.rounds(1)
    open_ = world.agent.history.decisions.find(states=[State.PROPOSED])
    assert sum(each.after - each.before for each in open_ if each.target.store != "host-0") == 2.5 * GIB


def test_a_recommendation_takes_nothing_from_what_acts_by_itself(world):
    """Of stores in several modes those on auto do not wait for approvals."""
    world.allow("dram: 6GiB", mode="recommend")
    with world.policy.open("a") as file:
        file.write("overrides: [{match: {store: host-3}, mode: auto}]\n")
    world.rounds(4)
    assert world.drams() == [1, 1, 1, 2.5]


def test_what_is_only_looked_at_takes_nothing_from_what_may_be_approved(world):
    """A host in mode observe is asked first, and wishes for the most; nobody can approve that."""
    world.allow("dram: 6GiB", mode="recommend", more="overrides: [{match: {store: host-0}, mode: observe}]\n")
    world.rounds(6)
    wishes = world.wishes()
    assert [wishes[f"host-{number}"].after / GIB for number in (1, 2)] == [2.5, 1.5]
    assert (wishes["host-0"].state, wishes["host-0"].mode, "host-3" in wishes) == ("proposed", "observe", False)


def test_what_is_under_way_is_spent(world):
    """A change has not reached its host yet: nobody else gets these bytes, in its round or in those after."""
    world.allow("dram: 6GiB")
    with world.stores[0].deaf():
        world.rounds(10)
    assert world.wishes()["host-0"].state == "approved"
    assert world.drams() == [1, 1.5, 1, 1]
    world.rounds(1)
    assert world.drams() == [2.5, 1.5, 1, 1]


def test_what_is_under_way_is_not_made_once_the_budget_does_not_pay_for_it(world):
    """The operator lowered it before the change reached its host: it expires, and says why."""
    world.allow("dram: 6GiB")
    with world.stores[0].deaf():
        world.rounds(2)
    (under_way,) = world.agent.history.decisions.find(states=[State.APPROVED])
    world.allow("dram: 3GiB")
    world.rounds(1)
    ended = world.agent.history.decisions.get(under_way.id)
    assert (ended.target.store, ended.state) == ("host-0", "expired")
    assert "bounds and budgets leave " in ended.reason
    assert world.drams()[0] <= 1


def test_nothing_grows_while_a_store_is_away(world):
    """What it holds is not there to give; and the answer says who it is. Back again, the others grow."""
    world.allow("dram: 6GiB")
    world.stores[3].up = False
    world.rounds(8)
    assert world.drams() == [1, 1, 1, 1]
    assert "host-3:7410 did not answer: nobody knows what of budgets.dram is spent" in world.answer("dram", "host-0")
    world.stores[3].up = True
    world.rounds(8)
    assert sum(world.drams()) == 6


def test_without_a_budget_a_store_may_be_away(world):
    """There is nothing to spend."""
    world.allow("")
    world.stores[3].up = False
    world.rounds(8)
    assert world.drams() == [4, 4, 4, 1]


def test_what_is_overspent_is_given_back(world):
    """The operator wrote a smaller budget: every host gives back its share in steps, which nothing rolls back."""
    for store in world.stores:
        store.tuning["tiers"]["dram"]["capacity_bytes"] = 4 * GIB
    world.allow("dram: 6GiB")
    world.rounds(14)
    assert world.drams() == [1.5, 1.5, 1.5, 1.5]
    given = [one for one in world.agent.history.decisions.find() if "budgets.dram is overspent" in one.reason]
    assert len(given) == 8
    assert {one.state for one in given} == {"inconclusive"}
    assert "16.0 GiB of 6.0 GiB: every tier gives back its share" in given[-1].reason


def test_what_others_have_by_now_no_verdict_takes_back(world):
    """A host shrank, and others got what it gave: its verdict is against it, but the budget does not pay twice."""
    world.stores[0].tuning["tiers"]["dram"]["capacity_bytes"] = 3 * GIB
    world.allow("dram: 6GiB")
    world.agent.loop.run_once()
    shape = {"shape": f"{3 * GIB}/0/0", "best": f"{GIB}/0/0"}
    wish = Proposal(FIELD, 3 * GIB, GIB, "because", shape)
    smaller = world.agent.changes.take("tier_size", Target("host-0", "dram"), wish, mode="auto", version=1, policy=1)
    for _ in range(8):
        world.prospects({(1, 0): 2.0, (2, 0): 1.5, (3, 0): 1.0})
        World.rounds(world)
        assert sum(world.drams()) <= 6
    (verdict,) = world.agent.history.verdicts.of(smaller.id)
    assert verdict["verdict"] == "inconclusive"
    assert "; not rolled back: bounds and budgets leave " in verdict["reason"]


def test_more_than_its_share_may_be_given_back():
    """A wish to be smaller still stands; one for less of a cut does not."""
    paid = Budgeted("dram", "dram", 60, elsewhere=80, own=40)
    assert (paid.overspent, paid.left) == (True, 20)
    smaller, larger = (Proposal(FIELD, 40, after, "it says so") for after in (10, 30))
    assert paid.given_back(smaller) is smaller
    for wish in (larger, NoChange("all is well")):
        assert paid.given_back(wish).after == 20
    kept = NoChange("all is well")
    assert Budgeted("dram", "dram", 120, elsewhere=80, own=40).given_back(kept) is kept


def test_a_tier_may_shrink_while_a_store_is_away():
    """That spends nothing, whatever the others hold."""
    paid = Budgeted("dram", "dram", 100, elsewhere=20, own=40)
    wish = Proposal(FIELD, 40, 30, "it says so")
    assert paid.known(wish, "host-b") is wish
    grown = replace(wish, after=50, evidence={"gain": 1})
    assert paid.known(grown, "") is grown
    assert paid.known(grown, "host-b").evidence == {"gain": 1}


@pytest.mark.parametrize(("budget", "grows"), [("total", False), ("disk", True)])
def test_a_remote_that_does_not_answer_is_away_too(budget, grows):
    """What it has of a total nobody knows; a budget of disks alone does not pay for it."""
    this = Round(Policy(version=1, remote={"manage": True}), 1, [host("host-a", GIB)], managed=True)
    wish = Proposal("tiers.disk.capacity_bytes", 0, GIB, "it says so")
    answer = this.allowed(wish, Budgeted("disk", budget, 8 * GIB, elsewhere=GIB, own=0))
    assert (answer is wish) is grows
    assert grows or "the remote did not answer" in answer.reason


def test_what_shrinks_is_free_when_it_was_read_again():
    """Growth counts at once, also that of a rollback; other fields and unknown stores do not."""
    capacities, target = Capacities([host("host-a", 4), host("host-b", 4)]), Target("host-c", "dram")
    change = replace(DECISION, target=Target("host-a", "dram"), field=FIELD)
    for before, after, paid in ((4, 2, 8), (4, 6, 10), (8, 5, 12)):
        capacities.note(replace(change, before=before, after=after))
        assert capacities.elsewhere(target) == {"dram": paid, "disk": 0}
    capacities.note(DECISION)
    capacities.note(replace(change, target=target, before=1, after=2))
    assert capacities.elsewhere(Target("host-a", "dram")) == {"dram": 4, "disk": 0}
    assert capacities.own(Target("host-a", "dram")) == 8


def test_a_refused_change_leaves_its_bytes_to_others(world):
    """A host that lets nobody change it: what it was to have is another one's in the same round."""
    world.allow("dram: 6GiB")
    world.stores[0].answers("put_tuning", 403, json={"message": "this asks for tune"})
    world.rounds(5)
    assert world.drams() == [1, 2.5, 1.5, 1]
