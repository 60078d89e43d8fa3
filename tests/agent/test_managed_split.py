"""One budget split between hosts and the remote, in the whole agent: one decision, made, set back or held up whole."""

from datetime import timedelta

import pytest

from agent.fakes import SLOW, FakeStore, fetch
from agent.managed import AFTER, BEFORE, GIB, MORE_DRAM, POLICY
from tiertune_agent.changes.control import Refused
from tiertune_agent.changes.operators import Caller
from tiertune_agent.fields import replaced
from tiertune_agent.records import FLEET, State

pytestmark = pytest.mark.slow

CALLER = Caller("anna", "test")

LESS_DRAM = {(1, 2): 1.0, (0.5, 3): 0.5}
WEDNESDAY = 'guard: {freeze: [{days: [wed], from: "00:00", to: "00:00"}]}'
"""Freezes the day of these tests."""
BOUNDED = "- match: {store: host-b, model: llama}\n  tuners: {tier_size: {max: {dram: 768MiB}}}\n"


@pytest.mark.parametrize(("costs", "dram", "remote"), [(MORE_DRAM, 1.5, 1), (LESS_DRAM, 0.5, 3)])
def test_a_split_sets_all_hosts_and_the_remote_as_one_decision(world, costs, dram, remote):
    """DRAM of both hosts and maxmemory change together, once, and the budget stays spent."""
    world.sampled(costs)
    assert world.split() == ([dram, dram], remote)
    (made,) = world.decisions()
    assert (str(made.target), made.before, made.after) == ("fleet dram", GIB, dram * GIB)
    assert [store.tuning["version"] for store in world.stores] == [2, 2]
    world.rounds(2)
    assert len(world.decisions()) == 1
    assert world.incidents() == {}
    told = world.agent.history.store(FLEET)
    assert told.tuning["remote"] == {"capacity_bytes": remote * GIB, "policy": "allkeys-lru"}
    assert [store.name for store in world.agent.history.stores()] == ["host-a", "host-b"]


def test_a_host_takes_no_share_by_itself(world):
    """Where one budget is split, no host's DRAM is sized alone; and it says why."""
    world.sampled(MORE_DRAM)
    world.rounds()
    assert "split of budgets.total" in world.answer("dram", store="host-a")
    assert {str(made.target) for made in world.decisions()} == {"fleet dram"}


def test_it_moves_a_step_at_a_time(world):
    """The remote loses at most max_step of itself in a period."""
    world.sampled({(1, 2): 1.0, (1.98, 0.04): 0.1})
    assert world.split() == ([1.5, 1.5], 1.0)


def test_a_rollback_restores_both(world):
    """What the decision changed is set back: the hosts first, which had grown."""
    world.sampled(MORE_DRAM)
    (made,) = world.decisions()
    world.agent.changes.rollback(made.id, "anna")
    assert world.split() == BEFORE
    assert world.decisions()[0].state == "rolled_back"
    world.rounds(2)
    assert world.incidents() == {}


def test_a_rollback_leaves_what_was_changed_by_hand_since(world):
    """One host was set to something else: that stays and is told, the rest is set back."""
    world.sampled(MORE_DRAM)
    (made,) = world.decisions()
    world.stores[1].tuning["tiers"]["dram"]["capacity_bytes"] = 3 * GIB
    rolled = world.agent.changes.rollback(made.id, "anna")
    assert world.split() == ([1, 3], 2)
    assert rolled.state == "rolled_back"
    (verdict,) = world.agent.history.verdicts.of(made.id)
    assert "but not host-b dram" in verdict["reason"]


def test_a_worse_split_is_rolled_back_by_the_verdict(world):
    """After the soak the same samples say it was wrong: both are set back."""
    world.sampled(MORE_DRAM)
    world.becomes_worse()
    made = world.decisions()[0]
    assert made.state == "rolled_back"
    assert world.split() == BEFORE


@pytest.mark.parametrize("comes", [True, False])
def test_a_host_that_comes_or_leaves_while_it_soaks_is_no_change_of_it(world, clock, comes):
    """The mean of the hosts moves, what was split does not: a worse split is set back all the same."""
    other = FakeStore(clock, "host-c")
    other.tuning = replaced(other.tuning, "tiers.dram.capacity_bytes", 0)
    if not comes:
        world.stores.append(other)
        world.start()
    world.sampled(MORE_DRAM if comes else {(2 / 3, 2): 1.0, (1, 1): 0.5})
    assert world.split()[1] == 1
    world.stores = [*world.stores, other] if comes else world.stores[:2]
    world.start()
    world.becomes_worse()
    assert world.decisions()[0].state == "rolled_back"
    assert world.split() == ([1, 1, 0] if comes else [1, 1], 2)


def test_a_host_that_is_set_by_hand_while_it_soaks_is_named(world):
    world.sampled(MORE_DRAM)
    world.stores[1].by_hand("tiers.dram.capacity_bytes", GIB)
    world.becomes_worse()
    made = world.decisions()[0]
    (verdict,) = world.agent.history.verdicts.of(made.id)
    assert made.state == "inconclusive"
    told = f"host-b dram: tiers.dram.capacity_bytes is {GIB}, not {GIB * 3 // 2}"
    assert verdict["reason"] == f"somebody changed it within the soak: {told}"


def test_a_freeze_holds_what_is_under_way(world):
    """A host went away halfway: while frozen nothing goes on; after it the decision does, to its end."""
    world.prospects(MORE_DRAM)
    with world.stores[1].deaf():
        world.rounds()
    assert world.split() == ([1.5, 1], 1)
    world.agent.operators.freeze(CALLER, "launch", None)
    world.rounds(2)
    assert world.drams() == [1.5, 1]
    assert world.decisions()[0].waits.startswith("frozen: ")
    world.agent.operators.unfreeze(CALLER)
    world.rounds()
    assert world.split() == AFTER
    assert len(world.decisions()) == 1


def test_what_is_given_up_while_frozen_waits_for_no_verdict(world):
    """A split that was not made as a whole is set back once something may change; nobody judged it."""
    world.prospects(MORE_DRAM)
    with world.stores[1].deaf():
        world.rounds()
    world.policy.write_text(f"{POLICY}overrides:\n- match: {{store: host-b}}\n  mode: observe\n")
    with world.stores[0].deaf():
        world.rounds()
    world.agent.operators.freeze(CALLER, "launch", None)
    world.rounds()
    (made,) = world.decisions()
    assert made.undo["by"] == "policy"
    assert made.waits.startswith("frozen: ")


def test_nothing_is_split_while_frozen(world):
    """A freeze is a freeze of the remote, too."""
    world.agent.operators.freeze(CALLER, "launch", None)
    world.sampled(MORE_DRAM)
    assert world.split() == BEFORE
    assert "frozen" in world.answer("dram")


def test_in_bypass_nothing_is_split(world):
    """Stores that answer miss tell nothing of what tiers are worth."""
    world.prospects(MORE_DRAM)
    world.agent.operators.bypass(CALLER, True, "host-b")
    world.rounds()
    assert world.split() == BEFORE
    assert "host-b is bypassed" in world.answer("dram")


def test_a_host_that_is_away_stops_it(world):
    """Nobody knows what it spends."""
    world.stores[1].up = False
    world.sampled(MORE_DRAM)
    assert world.split() == BEFORE
    assert "host-b did not answer" in world.answer("dram")


@pytest.mark.parametrize("match", ["store: host-b", "model: llama, store: host-b"])
@pytest.mark.parametrize(
    ("own", "why"),
    [
        ("mode: observe", "nothing is split: host-b is in mode observe; wished "),
        ("tuners: {tier_size: {mode: recommend}}", "host-b is in mode recommend"),
        ("guard: {changes_per_hour: 0}", "host-b: the budget of 0 changes per hour is spent"),
        (WEDNESDAY, "host-b: frozen: by the policy's calendar"),
    ],
)
def test_what_the_policy_says_of_one_host_holds_for_a_split(world, own, why, match):
    """Whom the agent may not change by itself is not changed in company either."""
    world.policy.write_text(f"{POLICY}overrides:\n- match: {{{match}}}\n  {own}\n")
    world.sampled(MORE_DRAM)
    assert (world.split(), world.decisions()) == (([1, 1], 2), [])
    assert why in world.answer("dram")


@pytest.mark.parametrize("match", ["store: host-b", "model: llama, store: host-b"])
@pytest.mark.parametrize(
    ("own", "state", "why"),
    [
        ("mode: observe", "inconclusive", "not rolled back by itself in mode observe"),
        (WEDNESDAY, "soaking", "its verdict is to roll it back; frozen: by the policy's calendar"),
    ],
)
def test_no_verdict_sets_back_a_host_that_is_not_the_agents_to_change_by_then(world, own, state, why, match):
    """A worse split stands as a whole where one of its hosts is frozen, or not on auto any more."""
    world.sampled(MORE_DRAM)
    world.policy.write_text(f"{POLICY}overrides:\n- match: {{{match}}}\n  {own}\n")
    world.becomes_worse()
    (made,) = world.decisions()
    assert (world.split(), made.state) == (AFTER, state)
    (told,) = world.agent.history.verdicts.of(made.id) or [{"reason": made.waits}]
    assert why in told["reason"]


@pytest.mark.parametrize(
    ("own", "drams"),
    [("mode: observe", [1, 1]), ("tuners: {tier_size: {max: {dram: 1GiB}}}", [1, 1]), (WEDNESDAY, [1.5, 1])],
)
def test_a_split_under_way_stops_at_a_host_that_is_not_the_agents_to_change_by_then(world, own, drams):
    """Frozen, it waits; not on auto any more, or bounded, what was made of it is set back."""
    world.prospects(MORE_DRAM)
    with world.stores[1].deaf():
        world.rounds()
    world.policy.write_text(f"{POLICY}overrides:\n- match: {{store: host-b}}\n  {own}\n")
    world.rounds()
    assert world.drams() == drams


def test_a_host_that_answers_nonsense_stays_frozen(world):
    """It can be changed, and what models it serves is known from when the split was wished."""
    world.prospects(MORE_DRAM)
    with world.stores[1].deaf():
        world.rounds()
    world.policy.write_text(f"{POLICY}overrides:\n- match: {{model: llama, store: host-b}}\n  {WEDNESDAY}\n")
    world.stores[1].answers("get_counters", 200, json={})
    world.rounds()
    assert "frozen: by the policy's calendar" in world.decisions()[0].waits
    assert world.drams() == [1.5, 1]


@pytest.mark.parametrize("budgets", ["total: 4GiB", "dram: 4GiB, remote: 4GiB"])
def test_no_verdict_gives_a_host_more_than_it_may_have_by_then(world, budgets):
    """A worse split stands where one of its hosts would be larger than the policy lets it be."""
    world.sampled(LESS_DRAM)
    world.policy.write_text(f"{POLICY.replace('total: 4GiB', budgets)}overrides:\n{BOUNDED}")
    for cost in (2.0, 2.01, 2.02, 2.03, 2.02, 2.01):
        world.sampled({(1, 2): 1.0, (0.5, 3): cost})
        assert world.drams()[1] <= 0.75
    (told,) = world.agent.history.verdicts.of(world.decisions()[0].id)
    assert told["verdict"] == "inconclusive"
    assert "; not rolled back: bounds and budgets leave 768.0 MiB by now" in told["reason"]


def test_the_rules_of_a_host_that_left_hold_up_no_rollback(world):
    """Nothing is set there any more, and nobody knows which models it served."""
    auto = "".join(f"- match: {{{one}}}\n  mode: auto\n" for one in ("store: fleet", "model: llama"))
    policy = f"{POLICY.replace('mode: auto', 'mode: recommend')}overrides:\n{auto}"
    world.policy.write_text(policy)
    world.sampled(MORE_DRAM)
    assert world.split() == AFTER
    world.policy.write_text(f"{policy}- match: {{store: host-b}}\n  {WEDNESDAY}\n")
    world.stores.pop()
    world.start()
    world.becomes_worse()
    assert world.split() == ([1], 2)
    (told,) = world.agent.history.verdicts.of(world.decisions()[0].id)
    assert "but not host-b dram: the store is not among those" in told["reason"]


def test_a_split_counts_among_the_changes_of_each_host(world):
    """The budget is per store."""
    world.sampled(MORE_DRAM)
    assert world.drams() == [1.5, 1.5]
    now = world.clock.now()
    counted = world.agent.history.changed.count(now - timedelta(hours=1), now)
    assert counted == {FLEET: 1, "host-a": 1, "host-b": 1}


def test_what_was_made_is_set_back_where_a_part_is_refused(world):
    """A host says no: the remote that shrank for it has its size again, and the decision has failed."""
    world.stores[1].answers("put_tuning", 422, json={"field": "tiers", "message": "no room"})
    world.sampled(MORE_DRAM)
    assert world.split() == BEFORE
    (made,) = world.decisions()
    assert made.state == "failed"
    assert "host-b dram: the store refused: tiers: no room; what was made of it was set back" in made.reason
    world.rounds()
    assert world.incidents() == {}


def test_what_is_too_late_is_set_back(world):
    """A host stays away in the middle for longer than the evidence is good for."""
    world.prospects(MORE_DRAM)
    with world.stores[1].deaf():
        world.rounds()
    world.clock.advance(600)
    world.rounds()
    assert world.split() == BEFORE


def test_a_host_that_dies_amid_a_split_holds_up_no_other_change(world):
    """Nobody can say when it is back: the others are protected from a slow link all the same, and split no further."""
    world.edit(("remote_fetch: {mode: observe}", "remote_fetch: {period: 15s, disable_after: 2}"))
    world.rounds()
    world.prospects(MORE_DRAM)
    with world.stores[1].deaf():
        world.rounds()
    world.stores[1].up, world.stores[0].bandwidth = False, SLOW
    for _ in range(40):
        world.sampled(MORE_DRAM)
    (split,) = world.decisions()
    assert split.state == "approved"
    assert fetch(world.stores[0]) == "off"


def test_a_remote_that_a_split_has_just_moved_is_not_moved_again(world):
    """The budget was lowered right after: what is overspent is given back when the split has soaked."""
    world.sampled(MORE_DRAM)
    assert world.split() == AFTER
    world.edit(("4GiB", "3584MiB"))
    world.rounds()
    assert world.remote() == 1
    assert "waits for the soak of decision 1 (tiers.dram.capacity_bytes)" in world.answer("remote")
    world.edit(("4GiB", "3584MiB"), ("hold_off: 1m", "hold_off: 5m"))
    world.rounds(8)
    assert (world.decisions()[0].state, world.remote()) == ("inconclusive", 1)
    assert "held off for another " in world.answer("remote")
    world.rounds(12)
    assert world.remote() == 0.5


def test_hosts_give_back_what_is_above_a_smaller_budget(world):
    """The remote has nothing any more: DRAM would stay above what the operator wrote, however its tuner likes that."""
    world.raw.config_set("maxmemory", 1)
    world.edit(("4GiB", "1GiB"))
    for _ in range(12):
        world.sampled({(0.5, 0): 1.0, (0.25, 0.5): 2.0})
    assert world.split() == ([0.5, 0.5], 1 / GIB)
    (made,) = world.decisions()
    assert "DRAM of all hosts has 2.0 GiB and the remote 0 B, the budget leaves them 1.0 GiB" in made.reason


@pytest.mark.parametrize("max_step", [0.5, 1.0])
def test_hosts_and_their_disks_both_give_their_share(world, max_step):
    """Disks that fill the budget do not take all of the DRAM."""
    for store in world.stores:
        store.by_hand("tiers.disk.capacity_bytes", 4 * GIB)
        store.health["disk"] = "ok"
    world.raw.config_set("maxmemory", 1)
    world.edit(("4GiB", "8GiB"), ("tier_size: {period: 15s", f"tier_size: {{max_step: {max_step}, period: 15s"))
    for _ in range(24):
        world.rounds()
    disks = [store.tuning["tiers"]["disk"]["capacity_bytes"] / GIB for store in world.stores]
    assert world.drams() == pytest.approx([0.8, 0.8], abs=0.03)
    assert disks == pytest.approx([3.2, 3.2], abs=0.05)
    assert world.remote() == 1 / GIB


def test_a_wish_about_the_remote_stays_while_a_host_misses_a_round(world):
    """It is no new one, to be approved anew, each time: what is overspent is not known then."""
    world.edit(("mode: auto", "mode: recommend"), ("4GiB", "3GiB"))
    wished = []
    for number in range(5):
        world.stores[1].up = number != 3
        world.sampled({(1, 2): 1.0, (0.5, 2): 1.1})
        wished.append([(one.id, one.field) for one in world.agent.history.decisions.find(states=[State.PROPOSED])])
    assert wished[2:] == [[(1, "remote.capacity_bytes")]] * 3


def test_what_rounding_leaves_is_not_given_to_the_remote(world):
    """A budget that three hosts do not share to the byte: a Redis of one byte reads back as one that holds nothing."""
    world.raw.config_set("maxmemory", 13 * GIB)
    world.stores.append(FakeStore(world.clock, "host-c"))
    world.edit(("4GiB", "16GiB"))
    world.start()
    for _ in range(8):
        world.sampled({(1, 13): 2.0, (3, 7): 1.5, (5, 1): 1.0, (16 / 3, 0): 0.5})
    assert [round(each, 3) for each in world.drams()] == [5.333, 5.333, 5.333]
    assert world.remote() == 1 / GIB
    assert {each.state for each in world.decisions()} == {"soaking", "inconclusive"}


def test_a_recommended_split_is_made_when_it_is_approved(world):
    """In mode recommend nothing changes until somebody says so; then all of it does."""
    world.edit(("mode: auto", "mode: recommend"))
    world.sampled(MORE_DRAM)
    assert world.split() == BEFORE
    (open_,) = world.agent.history.decisions.find(states=[State.PROPOSED])
    world.agent.changes.approve(open_.id, "anna")
    assert world.split() == AFTER


def test_a_recommended_split_of_a_budget_that_is_no_more_expires(world):
    """The operator gives each tier its own budget instead: nobody can approve the split any more."""
    world.edit(("mode: auto", "mode: recommend"))
    world.sampled(MORE_DRAM)
    (open_,) = world.agent.history.decisions.find(states=[State.PROPOSED])
    world.edit(("mode: auto", "mode: recommend"), ("total: 4GiB", "dram: 2GiB, remote: 2GiB"))
    world.rounds()
    with pytest.raises(Refused, match="is expired"):
        world.agent.changes.approve(open_.id, "anna")
    assert "no longer wished: fleet remote is sized now" in world.agent.history.decisions.get(open_.id).reason


def test_an_approval_that_comes_too_late_changes_nothing(world):
    """One of the parts has another value by now."""
    world.edit(("mode: auto", "mode: recommend"))
    world.sampled(MORE_DRAM)
    (open_,) = world.agent.history.decisions.find(states=[State.PROPOSED])
    world.stores[1].by_hand("tiers.dram.capacity_bytes", 3 * GIB)
    world.clock.advance(15)
    loop = world.agent.loop
    loop._remember(world.agent.policy.content.policy, loop.collector.collect(), None)
    with pytest.raises(Refused, match="no longer"):
        world.agent.changes.approve(open_.id, "anna")
    assert world.split() == ([1, 3], 2)
