"""What a round reads once for all its tuners, what it keeps of windows, and when it stops asking."""

from dataclasses import replace
from datetime import timedelta
from unittest.mock import Mock

import pytest

from agent.agents import POLICY, pass_windows
from agent.fakes import DIGEST, START, FakeStore, after, propose, remember, remote_window, snapshot, window
from tiertune_agent.changes.round import Round
from tiertune_agent.changes.survey import Survey, TierWindows
from tiertune_agent.history.database import DatabaseError
from tiertune_agent.incidents.seen import READ_AT_ONCE, SeenWindows
from tiertune_agent.policy.document import Policy
from tiertune_agent.records import Histogram, Prospect, Rates, Target
from tiertune_agent.tuners.base import Proposal
from tiertune_agent.verdicts.soak import fill_seconds

HIT = "tier_lookup_tokens_total{result=hit}"


def dram(index):
    return window("dram", {HIT: 1.0, "tier_resident_bytes": 5.0}, index, namespace=DIGEST)


def test_windows_that_are_kept_are_those_of_history(history):
    """Read once, then kept up by what stores answer: the same as read again, but for histograms and pools."""
    kept = TierWindows(history)
    first, pool, second = remote_window(0, requests=1, fetch=0.1), dram(0), remote_window(1, requests=2, fetch=0.2)
    remember(history, first, pool)
    assert list(kept.of("host-a", "remote")) == [first]
    remember(history, second, replace(second, namespace=DIGEST))
    kept.heard([snapshot(second, replace(second, namespace=DIGEST))])
    read = history.measured.windows("host-a", tier="remote")
    assert list(kept.of("host-a", "remote")) == read
    assert not any(isinstance(value, Histogram) for one in read for value in one.values.values())
    remember(history, remote_window(2))
    assert len(kept.of("host-a", "remote")) == 2
    kept.forget()
    assert len(kept.of("host-a", "remote")) == 3


def test_nothing_is_kept_of_a_store_that_left(history):
    """An hour after its last window; of one that comes back all is read again."""
    kept, now = TierWindows(history), [START]
    seen = SeenWindows(history, lambda: now[0])
    left = [snapshot(remote_window(0, requests=1))]
    history.remember([(left[0], Rates())])
    seen.heard(left)
    kept.of("host-a", "remote")
    for minutes in range(75):
        now[0] = after(minutes=minutes)
        told = [snapshot(replace(remote_window(4 * minutes), store="host-b"), store="host-b")]
        kept.heard(told)
        seen.heard(told)
        assert ("host-a" in seen._stores) is (minutes < 65)
        assert bool(kept._kept) is (minutes < 60)
    assert len(kept.of("host-a", "remote")) == 1
    assert set(seen.heard([*left, *told])) == {"host-a", "host-b"}


def test_each_namespace_and_horizon_has_prospects_of_its_own(history):
    """What one tuner was told in a round is no answer to another that looks further back, or at another pool."""
    old, new = (Prospect(DIGEST, after(minutes=minutes), 60.0, 1, {"0/0/0": 1.0}) for minutes in (0, 50))
    other = replace(new, namespace="cd" * 16)
    history.measured.remember_prospects([old, new, other])
    survey = Survey(history, after(minutes=55), TierWindows(history), ())
    assert survey.prospects(DIGEST, timedelta(minutes=10)) == [new]
    assert survey.prospects(DIGEST, timedelta(hours=2)) == [old, new]
    assert survey.prospects(other.namespace, timedelta(minutes=10)) == [other]


def test_what_was_proposed_for_a_pool_that_is_gone_is_wished_no_more(agents, policy_file, store, clock):
    """Not for more than an hour; what was proposed for one that is there stays, though it is asked about once a day."""
    policy_file.write_text(POLICY.replace("tuners: {", "tuners: {eviction: {period: 4d}, "))
    agent = agents()
    agent.loop.run_once()
    targets = [Target("host-a", "dram", namespace) for namespace in ("cd" * 16, DIGEST)]
    ids = [propose(agent.history, "eviction", target, Proposal("x", 1, 2, "it pays")).id for target in targets]
    for state in ("proposed", "proposed", "expired"):
        pass_windows(agent, store, clock, seconds=1500)
        gone, there = map(agent.history.decisions.get, ids)
        assert (gone.state, there.state) == (state, "proposed")
    assert "it has not been looked at for an hour" in gone.reason


@pytest.mark.parametrize("led", [False, True])
def test_who_takes_over_has_an_hour_to_look(agents, store, other, clock, led):
    """Nothing expires in its first round that it had no answer for, however long it stood by, or led without rounds."""
    first, standby = agents(store, other), agents(store, other)
    if led:
        standby = first
        first.loop.run_once()
    clock.advance(7200)
    agents.end()
    assert standby.leader.leads()
    wish = propose(standby.history, "eviction", Target("host-b", "dram", DIGEST), Proposal("x", 1, 2, "it pays"))
    other.up = False
    for state in ("proposed", "proposed", "proposed", "expired"):
        pass_windows(standby, store, clock, seconds=1500)
        assert standby.history.decisions.get(wish.id).state == state


def test_what_the_database_had_no_answer_for_is_asked_again(agent, store, clock, monkeypatch):
    """It does not expire meanwhile, though the store is silent when the database is back."""
    pass_windows(agent, store, clock, 3, seconds=1500)
    target = Target("host-a", "dram", DIGEST)
    wish = propose(agent.history, "eviction", target, Proposal("x", 1, 2, "it pays"), at=clock.now())
    with monkeypatch.context() as patch:
        patch.setattr(agent.history.measured, "pool_windows", Mock(side_effect=DatabaseError("away")))
        pass_windows(agent, store, clock, seconds=1500, tick=True)
    for up, state in ((False, "proposed"), (True, "expired")):
        store.up = up
        pass_windows(agent, store, clock, tick=True)
        assert agent.history.decisions.get(wish.id).state == state
    assert "not enough data" in agent.history.decisions.get(wish.id).reason


def test_an_hour_of_windows_is_kept_in_steps(history):
    """Steps add up to the windows of the last hour; older ones leave; a new agent reads the same from history."""
    now = [after(minutes=30)]
    remember(history, *(dram(index) for index in range(120)))
    seen = SeenWindows(history, lambda: now[0])
    assert sum(window.values[HIT] for window in seen.heard([snapshot()])["host-a"]) == 120
    later = [dram(index) for index in range(120, 240)]
    remember(history, *later)
    now[0] = after(minutes=60)
    kept = seen.heard([snapshot(*later)])["host-a"]
    assert [window.start.minute for window in kept] == list(range(0, 60, 5))
    assert {tuple(window.values.items()) for window in kept} == {((HIT, 20.0), ("tier_resident_bytes", 5.0))}
    assert {window.seconds for window in kept} == {300.0}
    assert SeenWindows(history, lambda: now[0]).heard([snapshot()])["host-a"] == kept
    now[0] += timedelta(minutes=20)
    assert [window.start.minute for window in seen.heard([snapshot()])["host-a"]] == list(range(20, 60, 5))


@pytest.mark.parametrize("minutes", [6, 12, 58])
def test_means_of_minutes_tell_how_soon_dram_fills(history, minutes):
    """100 bytes in 15 s fill 1500 in 225 s, by windows as by the steps of the last hour."""
    held = [window("dram", {"tier_resident_bytes": 100.0 * i}, i, namespace=DIGEST) for i in range(4 * minutes)]
    remember(history, *held)
    for windows in (held, SeenWindows(history, lambda: after(minutes=minutes)).of("host-a")):
        assert fill_seconds(windows, 1500.0, {}) == pytest.approx(225.0)


def test_a_large_fleets_hour_is_read_over_several_rounds(history):
    """After a restart no round reads the hour of more than some stores; the others come in the next."""
    fleet = [snapshot(store=f"host-{index}") for index in range(READ_AT_ONCE + 5)]
    seen = SeenWindows(history, lambda: START)
    assert [len(seen.heard(fleet)) for _ in range(2)] == [READ_AT_ONCE, READ_AT_ONCE + 5]


@pytest.mark.parametrize("spent", [0.0, 60.0])
def test_a_round_asks_for_half_a_window_at_most(agents, clock, spent):
    """Stores that it has no time for are asked first by the next one, so that each has its turn."""
    stores = [FakeStore(clock, f"host-{index}") for index in range(3)]
    agent, times = agents(*stores), iter(range(10**6))
    agent.loop.rounds._timer = lambda: spent * next(times)
    asked = []
    for _ in range(4):
        clock.advance(15)
        agent.tick()
        now = clock.now().isoformat()
        told = [one for one in agent.history.answers.newest() if one["at"] == now and one["tuner"] == "remote_fetch"]
        asked.append({one["store"] for one in told})
    everyone = {"host-0", "host-1", "host-2"}
    assert asked == [everyone] * 4 if not spent else [{"host-0"}, {"host-1"}, {"host-2"}, {"host-0"}]


def test_rules_of_targets_are_those_of_the_policy():
    """Laid over once for all targets that the same overrides fit."""
    prices = {"match": {"store": "host-b*"}, "prices": {"gpu_hour": 9.0}}
    modes = {"match": {"model": "llama"}, "mode": "observe"}
    rules = Policy.model_validate({"version": 1, "overrides": [prices, modes]})
    targets = [Target(store, "dram", "", (model,)) for store in ("host-a", "host-b1", "host-b2") for model in "xy"]
    targets.append(Target("host-b1", "dram", "", ("llama",)))
    told = [(rule.mode, rule.prices.gpu_hour) for rule in map(rules.for_target, targets)]
    assert told == [("recommend", 2.5)] * 2 + [("recommend", 9.0)] * 4 + [("observe", 9.0)]
    assert rules.for_target(targets[2]) is rules.for_target(targets[5])
    assert rules.for_target(targets[0]) is not rules.for_target(targets[2])


def test_a_store_shares_with_those_that_serve_a_namespace_of_its_own():
    """Itself among them, also where it serves none; what lies on disk alone, without engines, is not served."""
    served = {"a": "xy", "b": "x", "c": "y", "d": "z", "e": ""}
    fleet = [
        replace(snapshot(), store=store, status={"pools": {name: {"dram": {}} for name in names}})
        for store, names in served.items()
    ]
    fleet.append(replace(snapshot(), store="f", status={"pools": {"x": {"disk": {}}}}))
    this = Round(Policy(version=1), 1, fleet)
    assert [this.hosts(Target(one.store, "dram"), one) for one in fleet] == [3, 2, 2, 1, 1, 1]
