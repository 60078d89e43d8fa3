"""The remote under change control, in the whole agent: sized alone, within its budget, managed or not, away."""

import re

import pytest

from agent.fakes import DIGEST
from agent.managed import GIB, MORE_DRAM, POLICY
from e2e.servers import redis_server
from tiertune_agent.backtest.run import Rehearsal, record
from tiertune_agent.demo.ports import free_port
from tiertune_agent.fields import capacity_of
from tiertune_agent.history.database import open_current
from tiertune_agent.history.store import History
from tiertune_agent.policy.document import load
from tiertune_agent.records import FLEET, Target
from tiertune_agent.tuners.base import Proposal
from tiertune_connector.documents import DocumentError, place_of

pytestmark = pytest.mark.slow

ALONE = POLICY.replace("total: 4GiB", "remote: 16GiB")


def test_maxmemory_changed_by_hand_is_told(world):
    """Expected and found; the split that follows from it is another matter."""
    world.edit(("mode: auto", "mode: observe"))
    world.raw.config_set("maxmemory", GIB)
    world.rounds()
    told = world.incidents()["tuning_drift", FLEET]
    assert told == "remote.capacity_bytes: expected 2.0 GiB, found 1.0 GiB"
    world.raw.config_set("maxmemory", 2 * GIB)
    world.rounds()
    assert world.incidents() == {}


def test_what_is_above_the_budget_is_given_back_in_steps(world):
    """The operator wrote a smaller total: the remote shrinks, by half of itself at most."""
    world.edit(("4GiB", "2560MiB"))
    world.rounds()
    assert world.split() == ([1, 1], 1)
    world.rounds()
    assert world.remote() == 0.5


@pytest.mark.parametrize(
    ("alone", "moved", "total", "wished"),
    [
        ({(1, 2): 10.0, (1.5, 2): 1.0}, ([1.5, 1.5], 2), "5GiB", {(1.5, 2): 1.0, (1.75, 1.5): 0.5}),
        ({(1, 2): 10.0, (1, 1): 1.0}, ([1, 1], 1), "3GiB", {(1, 1): 1.0, (1.25, 0.5): 0.5}),
    ],
    ids=["hosts", "remote"],
)
def test_what_was_moved_by_itself_holds_up_a_split_of_it(world, alone, moved, total, wished):
    """Before the policy had one budget of all: a split of that is a further change of the same tiers."""
    world.policy.write_text(ALONE.replace("hold_off: 1m", "hold_off: 5m"))
    world.sampled(alone)
    assert world.split() == moved
    world.rounds(14)
    world.edit(("4GiB", total), ("hold_off: 1m", "hold_off: 5m"))
    world.sampled(wished)
    assert world.split() == moved
    assert "held off for another " in world.answer("dram")
    world.rounds(5)
    world.sampled(wished)
    assert world.split() != moved


def test_without_one_budget_the_remote_is_sized_alone(world):
    """Under prices, within budgets.remote: the larger remote saves more than it costs."""
    world.policy.write_text(ALONE)
    world.sampled({(1, 2): 10.0, (1, 4): 1.0, (1, 0): 20.0})
    assert world.split() == ([1, 1], 4)
    (made,) = world.decisions()
    assert (str(made.target), made.field) == ("fleet remote", "remote.capacity_bytes")


def test_a_host_that_is_away_holds_up_no_verdict_on_the_remote_alone(world):
    """Of many hosts one is always away; what the others tell is enough to set back what was wrong."""
    world.policy.write_text(ALONE)
    world.sampled({(1, 2): 10.0, (1, 4): 1.0, (1, 0): 20.0})
    assert world.remote() == 4
    world.stores[1].up = False
    for cost in (20.0, 20.1, 20.2, 20.3, 20.2, 20.1):
        world.sampled({(1, 2): 10.0, (1, 4): cost, (1, 0): 20.0})
    assert (world.decisions()[0].state, world.remote()) == ("rolled_back", 2)


def test_a_remote_that_earns_nothing_shrinks(world):
    """Rent without seconds saved: down by a step."""
    world.policy.write_text(ALONE)
    world.sampled({(1, 2): 0.001, (1, 0): 0.001})
    assert world.remote() == 1


def test_without_a_bound_it_stays_and_says_what_is_missing(world):
    """The agent does not guess how much memory the Redis may have."""
    world.policy.write_text(POLICY.replace("budgets: {total: 4GiB}", ""))
    world.sampled({(1, 2): 10.0, (1, 4): 1.0})
    assert world.remote() == 2
    assert "budgets.remote" in world.answer("remote")


def test_a_policy_that_evicts_no_chunk_is_mended(world):
    """noeviction refuses every new chunk of a full remote: allkeys-lru, as a decision."""
    world.raw.config_set("maxmemory-policy", "noeviction")
    world.rounds()
    assert world.raw.config_get("maxmemory-policy")["maxmemory-policy"] == "allkeys-lru"
    (made,) = world.decisions("remote_policy")
    assert (made.field, made.before, made.after) == ("remote.policy", "noeviction", "allkeys-lru")


def test_what_is_not_managed_is_not_touched(world):
    """manage off: no maxmemory changes, hosts are sized by themselves, wishes for the remote are withdrawn."""
    world.edit(("manage: true", "manage: false"))
    world.prospects(MORE_DRAM)
    world.raw.config_set("maxmemory", 2 * GIB + 1)
    world.rounds(2)
    assert world.raw.config_get("maxmemory")["maxmemory"] == str(2 * GIB + 1)
    assert world.incidents() == {}
    assert world.answer("dram") == "remote.manage is off"


def test_what_is_under_way_stops_at_a_remote_that_is_managed_no_more(world):
    """A host is away when a verdict sets a split back; when it returns manage is off: nothing is touched, and told."""
    world.sampled(MORE_DRAM)
    with world.stores[1].deaf():
        world.becomes_worse()
    (made,) = world.decisions()
    assert made.undo["by"] == "verdict"
    world.edit(("manage: true", "manage: false"))
    world.rounds()
    (made,) = world.decisions()
    assert (made.state, made.undo) == ("inconclusive", None)
    (verdict,) = world.agent.history.verdicts.of(made.id)
    assert "the policy's remote.manage is off by now" in verdict["reason"]
    assert world.remote() == 1


def test_what_soaks_at_a_remote_that_is_managed_no_more_holds_up_no_host(world):
    """manage is off before a split is judged: when its soak is over it has its verdict, and hosts are sized."""
    world.sampled(MORE_DRAM)
    world.edit(("manage: true", "manage: false"), ("total: 4GiB", "dram: 4GiB"))
    for _ in range(6):
        world.sampled({(1.5, 1): 10.0, (2, 1): 0.1})
    split, *sized = world.decisions()
    (verdict,) = world.agent.history.verdicts.of(split.id)
    assert (split.state, verdict["reason"]) == ("inconclusive", "the remote is not managed any more")
    assert world.drams() == [2, 2]
    assert {each.target.store for each in sized} == {"host-a", "host-b"}


def test_what_soaks_at_a_host_that_left_holds_up_no_split(world):
    """Taken out of the settings before its change is judged: when the soak is over it has its verdict."""
    proposal = Proposal(f"pools.{DIGEST}.dram.eviction", "lru", "arc", "because")
    told = {"mode": "auto", "version": world.stores[1].tuning["version"], "policy": 1}
    made = world.agent.changes.take("eviction", Target("host-b", "dram", DIGEST), proposal, **told)
    world.rounds()
    world.stores.pop()
    world.start()
    for _ in range(6):
        world.sampled(MORE_DRAM)
    (verdict,) = world.agent.history.verdicts.of(made.id)
    assert (verdict["verdict"], verdict["reason"]) == ("inconclusive", "the store is none of the fleet's any more")
    assert world.drams() == [1.5]


def test_a_redis_that_is_away_is_an_incident_until_it_is_back(world):
    """It is told by its address, and hosts are not sized behind its back."""
    port = free_port()
    world.url = f"redis://127.0.0.1:{port}/0"
    world.start()
    world.rounds()
    assert f"127.0.0.1:{port}" in world.incidents()["remote_unmanaged", FLEET]
    assert "split of budgets.total" in world.answer("dram", store="host-a")
    with redis_server(port=port, maxmemory="2gb"):
        world.rounds()
        assert world.incidents() == {}


def test_managing_what_the_settings_do_not_name_is_refused(world):
    """At the start with a message; by an edit of the policy as an incident."""
    world.url = ""
    place = f"{world.policy}:{place_of(POLICY, 'remote.manage')}"
    with pytest.raises(DocumentError, match=f"^{re.escape(place)}: .* name no remote"):
        world.start()
    world.edit(("manage: true", "manage: false"))
    world.start()
    world.edit()
    world.rounds()
    assert "name no remote" in world.incidents()["remote_unmanaged", FLEET]


def test_managing_a_redis_that_refuses_is_an_incident_until_it_permits(world):
    """By an edit of the policy, while the agent runs; a restart would refuse to start with the same words."""
    world.raw.execute_command("ACL", "SETUSER", "default", "-config|set")
    world.edit(("manage: true", "manage: false"))
    world.start()
    world.rounds()
    assert world.incidents() == {}
    world.edit()
    world.sampled(MORE_DRAM)
    assert f"{world.url} refuses CONFIG: " in world.incidents()["remote_unmanaged", FLEET]
    assert world.decisions() == []
    world.raw.execute_command("ACL", "SETUSER", "default", "+config|set")
    world.rounds()
    assert world.incidents() == {}


def test_a_redis_that_permits_no_more_is_an_incident_after_the_change_that_it_refuses(world):
    """Rights are asked for once, not in each round: then no further change is tried until they are back."""
    world.rounds()
    world.raw.execute_command("ACL", "SETUSER", "default", "-config|set")
    for _ in range(12):
        world.sampled(MORE_DRAM)
    assert [made.state for made in world.decisions()] == ["failed"]
    assert f"{world.url} refuses CONFIG: " in world.incidents()["remote_unmanaged", FLEET]
    world.raw.execute_command("ACL", "SETUSER", "default", "+config|set")
    world.rounds()
    assert world.incidents() == {}


def test_a_backtest_splits_as_was_split(world, tmp_path):
    """Over the history of a split, its policy makes the same split once more, from the sizes before it."""
    world.prospects(MORE_DRAM)
    world.rounds(2)
    found = rehearsed(world, tmp_path)
    assert [(one.tuner, one.target.store, one.after / GIB) for one in found.would] == [("tier_size", FLEET, 1.5)]
    assert found.would[0].evidence["split"] == world.decisions()[0].evidence["split"]


def test_a_backtest_tells_of_a_remote_that_nobody_managed(world, tmp_path):
    """Without a remote in the history a policy that manages one is tested without its sizes, and says so."""
    world.edit(("manage: true", "manage: false"))
    world.rounds(2)
    world.edit()
    found = rehearsed(world, tmp_path)
    assert list(found.would) == []
    assert "The history tells nothing of the remote" in found.sentences()[1]


def test_a_backtest_knows_of_a_split_of_a_remote_that_is_managed_no_more(world):
    """What was done is told, and hosts begin with the sizes before it, whoever owns the remote by now."""
    world.prospects(MORE_DRAM)
    world.rounds(2)
    world.edit(("manage: true", "manage: false"))
    world.rounds()
    recording = record(world.agent.history, 3600, 300.0)
    assert recording.remote is None
    assert [one.id for one in recording.decisions] == [one.id for one in world.decisions()] != []
    assert {name: capacity_of(tuning, "dram") for name, tuning in recording.tuning.items()} == {
        "host-a": GIB,
        "host-b": GIB,
    }


def rehearsed(world, tmp_path):
    recording = record(world.agent.history, 3600, 300.0)
    scratch = History(open_current(f"sqlite:///{tmp_path}/b.sqlite"))
    return Rehearsal(recording, load(world.policy), scratch).run()
