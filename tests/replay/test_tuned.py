"""The agent in a replay: it keeps the total, explains itself, beats what it started from, and obeys its policy."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from replay import files
from replay.files import first
from tiertune_agent.policy.budgets import Budgets
from tiertune_agent.policy.document import Guard, Match, Override, Policy
from tiertune_agent.records import State
from tiertune_agent.replay.simulate import Replay
from tiertune_agent.replay.stores import Stores
from tiertune_agent.replay.traces import builtin_trace
from tiertune_agent.replay.tuned import (
    DEFAULT_POLICY,
    DRAM_FIELD,
    EVICTION_FIELD,
    ReplayAgent,
    conduct,
    tuned,
)
from tiertune_agent.tuners.base import Proposal
from tiertune_agent.tuners.eviction import EvictionSettings, EvictionTuner
from tiertune_agent.tuners.registry import Tuners
from tiertune_agent.tuners.remote_fetch import RemoteFetchSettings
from tiertune_agent.tuners.tier_size import TierSize, TierSizeSettings
from tiertune_agent.verdicts.verdict import Verdict
from tiertune_connector.cost import GateSettings
from tiertune_connector.whatif.chain import Shape

pytestmark = pytest.mark.slow


def scenario(*, routing="sticky", share=0.05, seed=1, period=20.0, **more):
    """Under a link that fluctuates, unless another one is given."""
    tiers = {"dram": {"share": share}, "remote": {"share": share}}
    return files.scenario(moving=True, routing=routing, tiers=tiers, seed=seed, period_s=period, **more)


@pytest.fixture(scope="module")
def trace():
    """The first 700 requests: about two minutes, in which something is to be gained."""
    return first(builtin_trace("shift_mix_slice"), 700)


@pytest.fixture(scope="module")
def sticky(trace):
    replay = Replay(trace, scenario())
    return replay, tuned(replay)


def test_the_total_of_bytes_stays(trace):
    """After every move DRAM of all nodes and the remote are the budget, but for less than a chunk each."""
    replay = Replay(trace, scenario())
    agent, _ = conduct(replay)
    total = replay.split(0.5)
    budget = 4 * total.dram + total.remote
    for _, share in agent.split:
        assert 0 <= share <= 1
    held = agent.shape.dram // replay.chunk_bytes * 4 + agent.shape.remote // replay.chunk_bytes
    assert budget - 5 <= held <= budget


def paused(trace):
    """With more than half an hour between its halves."""
    return replace(trace, t=trace.t + 2000.0 * (np.arange(len(trace)) >= len(trace) // 2))


@pytest.fixture
def closed(monkeypatch):
    """Numbers of the windows that were played."""
    numbers, close = [], Stores.close_window
    monkeypatch.setattr(Stores, "close_window", lambda stores, number: (numbers.append(number), close(stores, number)))
    return numbers


def test_time_in_which_nothing_happens_is_not_played(trace, closed, monkeypatch):
    """However long it is, and with the same outcome as if each of its windows was."""
    replay = Replay(paused(trace), scenario())
    short, windows = tuned(replay), len(closed)
    assert short["decisions"] > 1
    assert windows < 1500 < closed[-1]
    monkeypatch.setattr(ReplayAgent, "_idle", lambda *_: 0)
    assert tuned(replay) == short
    assert len(closed) - windows == closed[-1]


def test_fetching_that_was_off_before_such_time_is_on_after_it(trace, closed, monkeypatch):
    """A link that was slow switched it off, and is well again within the pause: every request goes the same way."""
    begins_s = float(trace.t[len(trace) // 2] - trace.t[0])
    slow = [{"at_s": 0, "for_s": begins_s + 1500.0, "link_factor": 0.01}]
    calm = {"gbps": 100, "probe_s": 5}
    world = scenario(routing="random", share=0.1, period=10.0, events=slow, link=calm)
    quick = FEW.tuners.remote_fetch.model_copy(update={"disable_after": 4})
    policy = FEW.model_copy(update={"tuners": FEW.tuners.model_copy(update={"remote_fetch": quick})})
    replay = Replay(paused(trace), world)
    short, windows = tuned(replay, policy), len(closed)
    monkeypatch.setattr(ReplayAgent, "_idle", lambda *_: 0)
    whole = tuned(replay, policy)
    assert windows < 0.6 * closed[-1]
    for told in (short, whole):
        assert [one["after"] for one in told["changes"] if one["field"] == "tiers.remote.fetch"] == ["off", "on"]
    assert {name: one for name, one in short.items() if name.startswith("ttft")} == {
        name: one for name, one in whole.items() if name.startswith("ttft")
    }


@pytest.fixture(scope="module")
def few_chunks():
    agent, _ = conduct(Replay(builtin_trace("lmcache_agents"), scenario(share=0.005, period=300.0, gbps=10)))
    return agent


def test_a_change_soaks_for_a_period(few_chunks):
    """Without a policy: what holds a pool for longer holds it where it loses."""
    assert few_chunks.changes
    assert {change.until_s - change.at_s for change in few_chunks.changes} == {300.0}


def test_a_change_soaks_until_its_tier_could_have_filled(trace, monkeypatch):
    """At the rate of what came that the pools did not have: a little more came behind what they did not have."""
    stored, requested, took, exact = [], ReplayAgent.request, ReplayAgent._take, {}

    def request(agent, index, at_s, engine):
        chain, pool = trace.chains[index], agent._fleet.dram_pools[agent._fleet.node(engine)]
        stored.append((at_s, sum(key not in pool.visible for key in chain)))
        requested(agent, index, at_s, engine)

    def take(agent, *proposed):
        took(agent, *proposed)
        change = agent.changes[-1]
        at_s = change.at_s
        if change.target.tier == "dram":
            chunks = sum(count for asked_s, count in stored if asked_s > at_s - 2000) / 4
            exact[change.number] = agent.shape.dram / agent._chunk_bytes * min(at_s, 2000.0) / chunks

    monkeypatch.setattr(ReplayAgent, "request", request)
    monkeypatch.setattr(ReplayAgent, "_take", take)
    agent, _ = conduct(Replay(trace, scenario(share=0.3, time_factor=40, period=200.0)), FEW)
    soaks = {change.number: change.until_s - change.at_s for change in agent.changes}
    assert exact
    for number, fill_s in exact.items():
        assert 2 * FEW.guard.soak <= soaks[number] == pytest.approx(fill_s, rel=0.1)


def test_time_at_another_size_does_not_count_as_time_to_fill(trace):
    """A pool that is as large as before, after it was larger for a while, fills as fast as it did then."""
    replay = Replay(trace, scenario(share=0.3))
    start = replay.split(0.5)
    stores, ended = Stores(replay, (), start, 1.1), [0]

    def play(windows):
        for _ in range(windows):
            until_s = (ended[-1] + 1) * stores.window_s
            for index in np.flatnonzero((trace.t >= until_s - stores.window_s) & (trace.t < until_s)).tolist():
                stores.request(index, index % 4)
            ended.append(ended[-1] + 1)
            stores.close_window(ended[-1])
        return stores.fill_s(start.dram, "lru")

    fill_s = play(20)
    assert 0 < fill_s < 60
    stores.resize(start.dram * 3 // 2)
    play(40)
    stores.resize(start.dram)
    assert play(0) == fill_s
    assert play(20) == pytest.approx(fill_s, rel=0.2)


def test_what_a_fetch_would_take_is_told_with_the_handling_of_its_chunks(trace):
    """As stores tell it, whose bandwidth is that of chunks of a size: by what is told here fetching is on again."""
    replay = Replay(trace, scenario(link={"gbps": 25, "per_chunk_s": 0.03}))
    stores = Stores(replay, (), replay.split(0.5), 1.1)
    stores.close_window(1)
    told = stores.remote[-1].values
    first_s, bytes_per_s = (told[f"fetch_estimate_{name}"] for name in ("t0_seconds", "bytes_per_second"))
    nbytes = 10 * replay.chunk_bytes
    assert first_s + nbytes / bytes_per_s == pytest.approx(replay.link.truth(0.0).seconds(10, nbytes))


@pytest.mark.parametrize("gate", [GateSettings(fetch_on=False), GateSettings(min_fetch_tokens=1 << 30)])
def test_a_remote_that_the_gate_leaves_alone_saves_nothing_in_the_simulations(trace, gate):
    """As in an agent's: sizes are weighed by what requests may fetch, not by what probes find."""
    replay = Replay(trace, scenario(share=0.3, gbps=100))
    dram = replay.split(0.5).dram * replay.chunk_bytes
    with_remote, alone = Shape(dram, 0, 4 * dram), Shape(dram, 0, 0)
    stores = Stores(replay, [with_remote, alone], replay.split(0.5), 1.1)

    def costs(number):
        for index in range(300 * (number - 1), 300 * number):
            stores.request(index, index % 4)
        stores.close_window(number)
        told = stores.prospects[-1].costs
        return told[str(with_remote)], told[str(alone)]

    fetching, without = costs(1)
    assert fetching < 0.95 * without
    stores.heed(gate)
    assert len(set(costs(2))) == 1


def test_a_change_moves_a_chunk_at_least(few_chunks):
    """Of caches of a few chunks a step may be less than one: it then is one, or there is no change."""
    agent = few_chunks
    shares = [share for _, share in agent.split]
    assert len(shares) > 1
    assert all(share != after for share, after in pairwise(shares))


def test_with_sticky_routing_it_takes_memory_from_the_remote(sticky):
    """Sharing helps little then, so DRAM grows, and requests are faster than under 50/50."""
    replay, report = sticky
    assert report["split"][-1][1] < 0.3
    assert report["ttft_mean_s"] < replay.run("rule")["ttft_mean_s"]


def test_every_change_has_a_sentence_with_figures(sticky):
    """What was done and what was left are both told."""
    _, report = sticky
    assert report["decisions"] == len(report["changes"]) > 0
    for change in report["changes"]:
        assert any(character.isdigit() for character in change["reason"])
        assert change["state"] in {"soaking", "kept", "inconclusive", "rolled_back"}
    asked = {"tier_size", "eviction", "remote_fetch", "gate_settings"}
    assert {answer["tuner"] for answer in report["answers"]} <= asked


def test_at_most_one_change_of_a_tier_in_a_period(sticky):
    """The pool is the same for sizes and algorithms, the remote for its gates' switch and bounds."""
    replay, report = sticky
    changes = [
        (change["at_s"] // replay.scenario.period_s, "remote" if "remote" in change["field"] else "dram")
        for change in report["changes"]
    ]
    assert len(changes) == len(set(changes))


@pytest.mark.parametrize("overrides", [(), (Override(match=Match(store="fleet"), mode="auto"),)], ids=["", "remote"])
@pytest.mark.parametrize("mode", ["observe", "recommend"])
def test_without_auto_nothing_changes(trace, mode, overrides):
    """Nor if the remote alone is on auto. The run is then the gate at 50/50; the answers say what would be done."""
    replay = Replay(trace, scenario())
    report = tuned(replay, DEFAULT_POLICY.model_copy(update={"mode": mode, "overrides": overrides}))
    assert report["decisions"] == 0
    assert report["ttft_mean_s"] == replay.run("rule")["ttft_mean_s"]
    assert any(f"mode {mode}" in answer["reason"] for answer in report["answers"])


def test_a_trace_has_no_dates_for_a_calendar(trace):
    """What the policy freezes by the day of the week changes nothing: else the made-up date of a trace decided."""
    always = {"from": "00:00", "to": "00:00"}
    free, frozen = (
        Policy(version=1, mode="auto", guard=Guard.model_validate({"freeze": freeze, "min_requests": 1}))
        for freeze in ([], [always])
    )
    told = tuned(Replay(trace, scenario()), frozen)
    assert told["decisions"] > 0
    assert told == tuned(Replay(trace, scenario()), free)


@pytest.mark.parametrize("bound", ["max.dram", "budgets.dram", "min.remote", "max.remote", "budgets.remote"])
def test_bounds_of_the_fleet_hold(trace, bound):
    """A bound of DRAM is each node's, a budget all nodes' together; DRAM has what the remote's bounds leave it."""
    most_remote = bound in {"max.remote", "budgets.remote"}
    wishes = {"routing": "random", "gbps": 100, "gpu": "a10"} if most_remote else {}
    replay, (kind, tier) = Replay(trace, scenario(**wishes)), bound.split(".")
    start = replay.split(0.5)
    chunks = {"max.dram": start.dram, "budgets.dram": 4 * start.dram}.get(bound, start.remote)
    given = {tier: chunks * replay.chunk_bytes}
    budgets = Budgets.model_validate(given if kind == "budgets" else {})
    sizes = TierSizeSettings.model_validate({"hold_off": 0, **({kind: given} if kind != "budgets" else {})})
    rules = {"version": 1, "mode": "auto", "guard": Guard(min_requests=1)}
    free = tuned(replay, Policy(**rules, tuners=Tuners(tier_size=TierSizeSettings(hold_off=0))))["split"]
    bound_by = tuned(replay, Policy(**rules, budgets=budgets, tuners=Tuners(tier_size=sizes)))["split"]
    if most_remote:
        assert max(share for _, share in free) > 0.7
        assert max(share for _, share in bound_by) <= free[0][1]
    else:
        assert min(share for _, share in free) < 0.3
        assert min(share for _, share in bound_by) >= 0.49


@pytest.mark.parametrize(
    ("by_hand", "field"),
    [
        ({"eviction": "fifo"}, "eviction"),
        ({"dram_factor": 0.1}, "capacity_bytes"),
        ({"dram_factor": 1e-6}, "capacity_bytes"),  # one chunk
    ],
)
def test_harm_by_hand_is_reported_as_drift(trace, by_hand, field):
    """Somebody changes the nodes past the agent: the next window says so."""
    events = [{"at_s": 50, "for_s": 1, "by_hand": by_hand}]
    agent, _ = conduct(Replay(trace, scenario(share=0.1, events=events)))
    drift = [incident for incident in agent.incidents if incident["kind"] == "drift"]
    assert len(drift) == 1
    assert field in drift[0]["message"]
    assert drift[0]["at_s"] - 50 <= 2


def test_harm_by_hand_is_no_older_than_it_is(trace):
    """Where all requests come at once every ten seconds, windows that ended before the change do not tell of it.

    A tenth of the DRAM is left: the tuner gives it back at once.
    """
    bursts = replace(trace, t=trace.t // 10 * 10)
    events = [{"at_s": 50, "for_s": 1, "by_hand": {"dram_factor": 0.1}}]
    agent, _ = conduct(Replay(bursts, scenario(share=0.1, events=events)))
    assert [incident["at_s"] for incident in agent.incidents] == [51]
    change = agent.changes[-1]
    assert (change.at_s, change.target.tier) == (52, "dram")
    assert change.after > 2 * change.before


@pytest.mark.parametrize("field", [DRAM_FIELD, EVICTION_FIELD])
def test_a_verdict_sets_nothing_back_that_was_changed_by_hand_since(trace, monkeypatch, field):
    """As an agent's: the change was not what soaked, so it is inconclusive, though what it was weighs better."""
    monkeypatch.setattr("tiertune_agent.replay.tuned.weigh", lambda *_, **__: Verdict(State.ROLLED_BACK, "worse", {}))
    replay = Replay(trace, scenario())
    start = replay.split(0.5)
    fleet = replay.fleet(start)
    agent = ReplayAgent(replay, DEFAULT_POLICY, start, fleet)
    own = start.dram * replay.chunk_bytes
    tuner, before, after = {
        DRAM_FIELD: (TierSize(TierSizeSettings()), own, own // 2),
        EVICTION_FIELD: (EvictionTuner(EvictionSettings()), "lru", "arc"),
    }[field]
    agent._take(tuner, Proposal(field, before, after, "because", {"shape": ""}))
    fleet.resize(dram=7)
    fleet.switch("fifo")
    agent.until(400.0)
    (change,) = agent.changes
    assert (change.state, change.reason) == ("inconclusive", "because; somebody changed it within the soak")
    assert [(pool.capacity, pool.algorithm) for pool in fleet.dram_pools] == [(7, "fifo")] * 4


FEW = DEFAULT_POLICY.model_copy(update={"guard": Guard(changes_per_hour=1000, min_requests=10)})


def without_fetch(policy=DEFAULT_POLICY):
    """The policy whose gates are left alone."""
    observed = policy.tuners.remote_fetch.model_copy(update={"mode": "observe"})
    return policy.model_copy(update={"tuners": policy.tuners.model_copy(update={"remote_fetch": observed})})


def of_pool(report):
    """What was decided of sizes and algorithms."""
    tuners = ("tier_size", "eviction")
    return [(one["at_s"], one["before"], one["after"]) for one in report["changes"] if one["tuner"] in tuners]


def test_a_slow_link_is_not_fetched_from_and_then_again():
    """A link at a fiftieth: its fetches are switched off, and on again once it is back, both with figures."""
    events = [{"at_s": 10, "for_s": 200, "link_factor": 0.02}]
    calm = {"gbps": 100, "fluctuation": {"kind": "ar1", "sigma": 0, "phi": 0}, "probe_s": 5}
    world = scenario(routing="random", share=0.1, period=10.0, events=events, link=calm)
    replay = Replay(builtin_trace("shift_mix_slice"), world)
    report = tuned(replay, FEW)
    switched = [one for one in report["changes"] if one["field"] == "tiers.remote.fetch"]
    assert [one["after"] for one in switched] == ["off", "on"]
    assert 10 < switched[0]["at_s"] < 210 < switched[1]["at_s"] <= 220
    assert "fetching cost more than recomputing" in switched[0]["reason"]
    alone = tuned(replay, without_fetch(FEW))
    assert of_pool(report) == of_pool(alone)
    assert report["ttft_mean_s"] <= 1.01 * alone["ttft_mean_s"]


@pytest.mark.parametrize(
    ("name", "gbps", "period"),
    [("shift_mix_slice", 10, 60.0), ("shift_mix_slice", 100, 60.0), ("lmcache_agents", 100, 300.0)],
)
def test_switching_fetches_costs_next_to_nothing(name, gbps, period):
    """On traces whose links only fluctuate the gate alone is hardly better, and the pool's decisions are the same."""
    replay = Replay(builtin_trace(name), scenario(routing="random", share=0.1, gbps=gbps, period=period))
    report, alone = tuned(replay), tuned(replay, without_fetch())
    assert of_pool(report) == of_pool(alone)
    assert report["ttft_mean_s"] <= 1.01 * alone["ttft_mean_s"]


def test_the_policy_s_margin_reaches_the_gates(trace):
    """Production's margin is set by the first period's end, once, and told as a decision."""
    tuners = DEFAULT_POLICY.tuners.model_copy(update={"remote_fetch": RemoteFetchSettings(min_fetch_tokens=2048)})
    replay = Replay(trace, scenario())
    agent, _ = conduct(replay, DEFAULT_POLICY.model_copy(update={"tuners": tuners}))
    assert (agent.gate["remote"].margin, agent.gate["remote"].min_fetch_tokens) == (1.1, 2048)
    bounds = [change for change in agent.changes if change.tuner == "gate_settings"]
    assert [(change.field, change.at_s) for change in bounds] == [
        ("tiers.remote.margin", 20.0),
        ("tiers.remote.min_fetch_tokens", 40.0),
    ]
