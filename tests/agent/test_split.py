"""One budget between the hosts' DRAM and the remote: pure."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agent.fakes import START, gib
from agent.test_actuator import DECISION
from tiertune_agent.changes.round import Round
from tiertune_agent.fields import REMOTE_CAPACITY, capacity_field
from tiertune_agent.policy.budgets import budgeted
from tiertune_agent.policy.document import Policy
from tiertune_agent.records import FLEET, REMOTE, Prospect, Snapshot, Target
from tiertune_agent.remote.split import SPLIT, Managed
from tiertune_agent.tuners.base import Current, NoChange, Proposal
from tiertune_agent.tuners.eviction import RemotePolicy
from tiertune_agent.tuners.tier_size import candidates
from tiertune_agent.verdicts.soak import slowest
from tiertune_agent.whatif.shapes import Grid, Split, median_shape, remote_bytes

GIB = 2**30
DRAM = capacity_field("dram")
STEP, FLEETS = ("store", "tier", "field", "from", "to"), (FLEET, "remote")


def snapshot(name, tuning):
    return Snapshot(name, "", "", "", START, {}, {"version": 1, **tuning})


def host(name, dram, disk=0, **more):
    return snapshot(name, {"tiers": {"dram": {"capacity_bytes": dram}, "disk": {"capacity_bytes": disk}}, **more})


def remote(capacity, policy="allkeys-lru"):
    return snapshot(FLEET, {"remote": {"capacity_bytes": capacity, "policy": policy}})


def managed(capacity, *drams, missing=(), disk=0, **rules):
    rules = {"budgets": {"total": 400 * GIB}, **rules}
    fleet = [host(f"host-{index}", dram, disk) for index, dram in enumerate(drams)]
    policy = Policy.model_validate({"version": 1, "remote": {"manage": True}, **rules})
    return Managed(policy, remote(capacity), fleet, missing)


def even(**rules):
    """Half of the budget is the remote's, a quarter each of two hosts'."""
    return managed(200 * GIB, 100 * GIB, 100 * GIB, **rules)


def dram_to(after, before=100 * GIB):
    return Proposal(capacity_field("dram"), before, after, "better", {"goal": after})


def moves(answer):
    return [(step["store"], step["from"] // GIB, step["to"] // GIB) for step in answer.evidence["split"]]


@pytest.mark.parametrize(
    ("each", "expected"),
    [
        (50, [("host-0", 100, 50), ("host-1", 100, 50), (FLEET, 200, 300)]),
        (150, [(FLEET, 200, 100), ("host-0", 100, 150), ("host-1", 100, 150)]),
    ],
)
def test_who_gives_shrinks_before_who_gets_grows(each, expected):
    """What DRAM gives up the remote has, and only afterwards; the other way round the remote is first."""
    made = even().split(dram_to(each * GIB))
    assert moves(made) == expected
    assert (made.field, made.after) == (capacity_field("dram"), each * GIB)


def test_hosts_keep_their_proportions_within_their_own_bounds():
    """A larger host stays larger; one whose override says less than its part takes less, and the mean tells it."""
    other = {"match": {"store": "host-1"}, "tuners": {"tier_size": {"max": {"dram": 160 * GIB}}}}
    made = managed(200 * GIB, 50 * GIB, 150 * GIB, overrides=[other]).split(dram_to(140 * GIB))
    assert moves(made) == [(FLEET, 200, 170), ("host-0", 50, 70), ("host-1", 150, 160)]
    assert made.after == 115 * GIB


@pytest.mark.parametrize(("served", "grown"), [(["llama"], 120), (["llama", "qwen"], 150)])
def test_a_bound_for_a_model_holds_for_hosts_that_serve_it_alone(served, grown):
    """As where a host is sized by itself."""
    llama = {"match": {"model": "lla*"}, "tuners": {"tier_size": {"max": {"dram": 120 * GIB}}}}
    fleet = even(overrides=[llama])
    hosts = [fleet.fleet[0], replace(fleet.fleet[1], status={"models": served})]
    made = replace(fleet, fleet=hosts).split(dram_to(150 * GIB))
    assert moves(made) == [(FLEET, 200, 250 - grown), ("host-0", 100, 150), ("host-1", 100, grown)]


@given(
    st.lists(st.integers(0, 60 * GIB), min_size=1, max_size=4),
    st.integers(0, 400 * GIB),
    st.integers(0, 100 * GIB),
    st.sampled_from([None, 10 * GIB]),
)
@example([0, 0, 5], 0, 100 * GIB, None)
def test_a_split_never_spends_more_than_the_budget_or_than_is_spent_already(drams, capacity, wanted, least):
    """Whatever is wished, between any two steps, DRAM and remote have no more than they had, or than they may."""
    fleet = managed(capacity, *drams, tuners={"tier_size": {"min": {"remote": least}}})
    mean = sum(drams) // len(drams)
    wanted = min(wanted, fleet.rules(SPLIT).most)
    made = fleet.split(dram_to(wanted, before=mean))
    if isinstance(made, NoChange):
        return
    spent = sum(drams) + capacity
    allowed = max(spent, 400 * GIB)
    for step in made.evidence["split"]:
        spent += step["to"] - step["from"]
        assert step["to"] >= 0
        assert spent <= allowed + len(drams)  # rounded to bytes


def test_disks_have_their_part_of_the_budget():
    """A total is for all tiers: what disks hold is not split."""
    assert managed(200 * GIB, 50 * GIB, 50 * GIB, disk=40 * GIB).budget == Split(320 * GIB, 2)


def test_bounds_of_the_remote_bound_the_hosts():
    """DRAM grows no further than the least of the remote allows, and shrinks no further than its most."""
    bounds = {"tier_size": {"min": {"remote": 100 * GIB}, "max": {"remote": 300 * GIB}}}
    rules = even(tuners=bounds).rules(SPLIT)
    assert (rules.least, rules.most) == (50 * GIB, 150 * GIB)
    bounds["tier_size"]["max"]["dram"] = 120 * GIB
    assert even(tuners=bounds).rules(SPLIT).most == 120 * GIB


def test_what_is_above_the_budget_the_remote_gives_back():
    """DRAM and remote above the total: the remote's new size is the rest, and the sentence has the figures."""
    wish = managed(300 * GIB, 100 * GIB, 100 * GIB).overspent()
    assert (wish.field, wish.before, wish.after) == (REMOTE_CAPACITY, 300 * GIB, 200 * GIB)
    assert "the budget leaves them 400.0 GiB" in wish.reason
    assert even().overspent() is None


@pytest.mark.parametrize(
    ("capacity", "disk", "least", "share"),
    [(0, 0, None, 200), (50, 0, 50, 175), (0, 300, None, 100)],
    ids=["nothing", "the least", "beside disks"],
)
def test_what_the_remote_cannot_give_back_the_hosts_do(capacity, disk, least, share):
    """It has nothing more, or no more than its least size: DRAM gives its share of what is above, as disks do."""
    tuners = {"tier_size": {"min": {"remote": least and least * GIB}}}
    fleet = managed(capacity * GIB, 400 * GIB, 200 * GIB, disk=disk * GIB, tuners=tuners)
    wish = fleet.overspent()
    assert (fleet.target, wish.field, wish.before, wish.after) == (SPLIT, DRAM, 300 * GIB, share * GIB)
    hosts = [("host-0", 400, 400 * share // 300), ("host-1", 200, 200 * share // 300)]
    assert moves(fleet.split(wish))[:2] == hosts


@pytest.mark.parametrize(("total", "leaves"), [(400, ""), (380, "leave 380.0 GiB"), (300, "leave 320.0 GiB")])
def test_a_split_that_a_smaller_budget_does_not_pay_for_is_not_set_back(total, leaves):
    """It gave 80 GiB back; what stands now may stand, however small the budget is by now."""
    shared = managed(220 * GIB, 50 * GIB, 50 * GIB, budgets={"total": total * GIB})
    moved = [("host-0", "dram", DRAM, 70, 50), ("host-1", "dram", DRAM, 70, 50), (*FLEETS, REMOTE_CAPACITY, 260, 220)]
    steps = [dict(zip(STEP, (*where, was * GIB, now * GIB), strict=True)) for *where, was, now in moved]
    made = replace(DECISION, tuner="tier_size", target=SPLIT, evidence={"split": steps})
    this = Round(shared.policy, 1, shared.fleet, managed=True, shared=shared)
    assert this.unpaid(made, back=False) == ""
    told = this.unpaid(made, back=True)
    assert leaves in told if leaves else not told


@pytest.mark.parametrize("capacity", [0, 100])
def test_disks_above_a_budget_that_is_split_give_back_when_the_remote_has_nothing_more(capacity):
    """As of any other total each tier gives its share."""
    shared = managed(capacity * GIB, 100 * GIB, 100 * GIB, disk=300 * GIB)
    this = Round(shared.policy, 1, shared.fleet, managed=True, shared=shared)
    elsewhere = this.elsewhere(Target("host-0", "disk"))
    paid = budgeted(shared.rule.budgets, "disk", elsewhere, this.own(Target("host-0", "disk")))
    given = this.allowed(NoChange("as it is"), paid)
    assert isinstance(given, NoChange) if capacity else given.after == 150 * GIB


@pytest.mark.parametrize(
    ("fleet", "told"),
    [
        (managed(None, GIB), "maxmemory 0"),
        (managed(GIB, GIB, missing=["host-b"]), "host-b did not answer"),
        (Managed(Policy(version=1), remote(GIB), [host("host-a", GIB, bypass=True)]), "host-a is bypassed"),
    ],
    ids=["without a bound", "a host is away", "bypassed"],
)
def test_what_is_not_known_is_not_reasoned_about(fleet, told):
    """No bound, a host that is away, a host in bypass: nothing is changed, and why."""
    assert told in fleet.silence.reason


def test_without_a_budget_the_remote_is_sized_alone():
    """Target and bounds are those of the remote."""
    fleet = managed(GIB, GIB, budgets={"remote": 64 * GIB})
    assert fleet.target == REMOTE
    assert fleet.rules(REMOTE).most == 64 * GIB


def test_a_managed_remote_is_simulated_at_other_sizes():
    """The grid varies the remote alone; so there is something to choose from."""
    now = gib(8, 32)
    shapes = Grid().around(now, ("dram", "remote"))
    alone = [shape.remote // GIB for shape in shapes if (shape.dram, shape.disk) == (now.dram, now.disk)]
    assert alone == [0, 4, 8, 16, 32, 64, 128]
    prospects = {str(shape): 1.0 for shape in shapes}
    tuning = {"tiers": {"dram": {"capacity_bytes": now.dram}, "disk": {"capacity_bytes": 0}}}
    told = [Prospect("", START, 15.0, 1, prospects)]
    current = Current(REMOTE, tuning, {}, prospects=told, remote_bytes=now.remote)
    assert [shape.remote // GIB for shape in candidates(current)] == alone


def test_a_remote_that_was_emptied_can_come_back():
    """Its maxmemory of one byte is a size of none, and larger ones are simulated."""
    told = {"tiers": {"remote": {"health": "ok", "capacity_bytes": 1}}}
    fleet = [replace(host("host-a", 8 * GIB), status=told)]
    assert median_shape(fleet, remote_bytes(fleet)) == gib(8)
    assert any(
        shape.remote >= GIB for shape in Grid().around(median_shape(fleet, remote_bytes(fleet)), ("dram", "remote"))
    )


def test_a_split_budget_is_simulated_by_its_splits():
    """Every other size of DRAM has the rest of the budget as its remote; a new budget is a new grid."""
    now, split, kept = gib(8, 16), Split(32 * GIB, 2), Grid()
    shapes = kept.around(now, ("dram", "remote"), split)
    assert all(2 * shape.dram + shape.remote == split.budget for shape in shapes if shape.remote)
    assert {shape.remote / split.budget for shape in shapes} >= {0.0, 0.5}
    assert kept.around(gib(10, 12), ("dram", "remote"), split) is shapes
    assert kept.around(now, ("dram", "remote"), Split(64 * GIB, 2)) is not shapes


@pytest.mark.parametrize(("policy", "wished"), [("noeviction", True), ("volatile-lru", True), ("allkeys-lfu", False)])
def test_a_remote_that_evicts_no_chunk_is_told_to(policy, wished):
    """Chunks do not expire: a policy for keys that do never evicts them; one for all keys is left alone."""
    settings = Policy(version=1).tuners.eviction
    answer = RemotePolicy(settings).evaluate([], Current(REMOTE, remote(GIB, policy).tuning, {}))
    assert isinstance(answer, Proposal) is wished
    assert policy in answer.reason


class Asked:
    """Stands for the what-if: remembers what it was asked to simulate."""

    def round(self, _fleet, _at, *, every_s, managed, split):
        self.asked, self.every_s = (managed, split), every_s
        return []


def test_what_is_simulated_follows_the_policy_and_no_missed_answer(agent):
    """Splits of the budget, also in a round that a store misses; nothing of the remote where it is not managed."""
    agent.loop.whatif = whatif = Asked()
    whole = even()
    partly = managed(200 * GIB, 100 * GIB, missing=["host-1"])
    for shared, wanted in ((whole, Split(400 * GIB, 2)), (partly, Split(400 * GIB, 2)), (None, Split(400 * GIB, 2))):
        agent.loop._simulate(Round(whole.policy, 1, whole.fleet, True, shared))
        assert whatif.asked == (True, wanted)
    agent.loop._simulate(Round(whole.policy, 1, whole.fleet))
    assert whatif.asked == (False, None)


def test_prospects_are_due_for_a_look_though_rounds_are_not_punctual(agent):
    """A round that comes a moment early does not wait for the next one, a window later."""
    agent.loop.whatif = whatif = Asked()
    whole = even()
    agent.loop._simulate(Round(whole.policy, 1, whole.fleet, True, whole))
    assert whatif.every_s == whole.policy.tuners.tier_size.look_s - 7.5


def test_the_budget_of_disks_counts_the_remote():
    """One total is for all tiers: what the remote has is not left for a disk."""
    whole = even()
    paid = Round(whole.policy, 1, whole.fleet, True, whole).elsewhere(Target("host-0", "disk"))
    assert sum(paid.values()) == 400 * GIB


def test_the_one_remote_is_filled_by_all_hosts_together():
    """Hosts that alone would fill it in 100 s fill it in 50; each fills a DRAM of its own."""
    assert slowest([100.0, 100.0, None], "remote") == 50.0
    assert slowest([100.0, 80.0], "dram") == 100.0
    assert slowest([None], "remote") is None
