"""Runs under queueing, events and slow local tiers: what they cost, and that they cost no less than they must."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.files import run, runs, scenario
from tiertune_agent.replay.contents import ReplayedRequest, contents
from tiertune_agent.replay.play import CHOOSERS, Play
from tiertune_agent.replay.scenario import Scenario
from tiertune_agent.replay.simulate import Replay, replay_document
from tiertune_connector.documents import parse_yaml
from tiertune_connector.protocol.reporting import gained_s

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shifting_found(shifting):
    """What the requests find; it depends on neither model nor link nor load."""
    replay = Replay(shifting, scenario())
    return list(contents(shifting, scenario(), replay._engines, replay.fleet(replay.own)))


def mean_ttft(trace, found, chooser, **fields):
    replay = Replay(trace, scenario(**fields))
    timed = [each._replace(at_s=at_s) for each, at_s in zip(found, replay.times, strict=True)]
    return float(np.mean(Play(replay, chooser).all(timed).ttft_s))


REQUESTS = st.lists(
    st.tuples(
        st.floats(0, 2),
        st.lists(st.sampled_from(["dram", "remote"]), max_size=12),
        st.integers(1, 20),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=25,
)
TIERS = {"dram": {"share": 0.02, "gbps": 100, "latency_s": 0.0001}, "remote": {"share": 0.3}}


def stream(requests, spread_s=0.0):
    at_s, found = 0.0, []
    for gap_s, tiers, more, engine in requests:
        at_s += gap_s + spread_s
        found.append(ReplayedRequest(at_s, 512 * (len(tiers) + more), list(tiers), engine))
    return found


@settings(max_examples=60, deadline=None)
@given(REQUESTS, st.sampled_from(["always", "never"]))
def test_queues_only_ever_add_time(small, requests, chooser):
    """The same choices with queueing: every request takes at least as long, the engines work as much."""
    found = stream(requests)
    free, queued = (
        Play(Replay(small, scenario(queueing=queueing, tiers=TIERS)), chooser).all(found) for queueing in (False, True)
    )
    assert all(with_q >= without - 1e-6 for with_q, without in zip(queued.ttft_s, free.ttft_s, strict=True))
    assert queued.prefill_s == pytest.approx(free.prefill_s)
    assert queued.hit_tokens == free.hit_tokens


@settings(max_examples=60, deadline=None)
@given(REQUESTS, st.sampled_from(CHOOSERS))
def test_one_request_at_a_time_waits_for_nobody(small, requests, chooser):
    """Then all is as without queues, whoever chooses."""
    found = stream(requests, spread_s=1000.0)
    free, queued = (
        Play(Replay(small, scenario(queueing=queueing, tiers=TIERS)), chooser).all(found).ttft_s
        for queueing in (False, True)
    )
    assert queued == pytest.approx(free, abs=1e-9)


@pytest.mark.parametrize("gbps", [10, pytest.param(25, marks=pytest.mark.slow), 100])
@pytest.mark.parametrize("time_factor", [2.0, 4.0, 12.0])
@pytest.mark.parametrize("moving", [False, True])
def test_a_gate_that_sees_the_queues_beats_one_that_does_not(shifting, shifting_found, gbps, time_factor, moving):
    """From loaded to overloaded, for slow and fast links: mean time to the first token. (8B, four engines.)"""
    options = {"queueing": True, "time_factor": time_factor, "gbps": gbps, "moving": moving}
    aware, blind = (mean_ttft(shifting, shifting_found, name, **options) for name in ("rule", "rule_blind"))
    assert aware <= blind * 1.02  # at twice the capacity all choices queue alike, and chance decides
    if gbps < 100 and time_factor > 2:
        assert aware < blind


def test_load_is_what_makes_requests_wait(shifting, shifting_found):
    """Twice the time between arrivals and the mean falls towards that without queues."""
    times = [
        mean_ttft(shifting, shifting_found, "never", queueing=True, time_factor=factor) for factor in (1, 4, 16, 4096)
    ]
    assert times == sorted(times, reverse=True)
    assert times[-1] == pytest.approx(mean_ttft(shifting, shifting_found, "never"), rel=0.01)


def test_the_least_loaded_engine_waits_least(small):
    """Routing by load has shorter waits than routing by chance; nothing else differs."""
    common = {"queueing": True, "time_factor": 0.02, "nodes": 1}
    random, loaded = (run(small, "never", routing=routing, **common) for routing in ("random", "least_loaded"))
    assert loaded["ttft_mean_s"] < 0.9 * random["ttft_mean_s"]


def test_load_is_spread_where_nobody_waits_for_it(small):
    """Without queueing the least loaded engine is the same one, and a request pays its own prefill alone."""
    common = {"routing": "least_loaded", "nodes": 1, "tiers": {"dram": {"share": 0.5}}}
    crowd = [ReplayedRequest(0.0, 8192, []) for _ in range(4)]
    play = Play(Replay(small, scenario(**common)), "never")
    taken = []
    for at_s, found in enumerate(crowd):
        taken += play.idlest([at_s * 1e-3])
        play.request(found._replace(at_s=at_s * 1e-3, engine=taken[-1]))
    assert taken == [0, 1, 2, 3]
    assert len(set(play.tally.ttft_s)) == 1
    free, queued = (run(small, "rule", queueing=queueing, **common) for queueing in (False, True))
    assert free["ttft_mean_s"] <= queued["ttft_mean_s"]
    assert runs(small, "best_split", "tuned", **common)


def test_equally_loaded_engines_are_taken_from_the_lowest_on(small):
    """Idle ones are equal: a request at a time goes to engine 0 always."""
    play = Play(Replay(small, scenario(queueing=True, routing="least_loaded")), "never")
    assert list(play.idlest([0.0, 1.0])) == [0, 0]
    play.request(ReplayedRequest(2.0, 8192, [], 0))
    assert list(play.idlest([2.0])) == [1]


DOWN = [{"at_s": 0, "for_s": 1e9, "link": "down"}]


@pytest.mark.parametrize("queueing", [False, True])
@pytest.mark.parametrize("chooser", CHOOSERS)
def test_nothing_comes_over_a_link_that_is_down(shifting, shifting_found, chooser, queueing):
    """Remote chunks count as not there, for always as well: all runs equal never, and nothing hangs."""
    fields = {"events": DOWN, "queueing": queueing, "time_factor": 4.0}
    assert mean_ttft(shifting, shifting_found, chooser, **fields) == pytest.approx(
        mean_ttft(shifting, shifting_found, "never", queueing=queueing, time_factor=4.0)
    )


def test_a_transfer_whose_turn_comes_while_the_link_is_down_fails_at_once(small):
    """What it was to bring is recomputed, what lies in front of it in DRAM is kept; the one under way gets through."""
    world = Replay(small, scenario(queueing=True, events=[{"at_s": 0.01, "for_s": 9, "link": "down"}]))
    play = Play(world, "always")
    first, second = (ReplayedRequest(0.0, 16_384, [*["dram"] * 2, *["remote"] * 6], engine) for engine in (0, 1))
    tally = play.all([first, second])
    assert tally.remote_chunks == 6
    tokens = world.chunk_tokens
    assert tally.hit_tokens == {"dram": 4 * tokens, "remote": 6 * tokens}
    transfer_s = world.link.truth(0.0).seconds(6, 6 * world.chunk_bytes)
    assert tally.ttft_s[0] == pytest.approx(transfer_s + world.prefill.seconds(8 * tokens, 16_384))
    assert tally.ttft_s[1] == pytest.approx(transfer_s + world.prefill.seconds(2 * tokens, 16_384))


def test_an_outage_costs_always_what_it_fetched_and_ends(shifting, shifting_found):
    """With a fast link it is dearer to be without it; after the event all is as before."""
    outage = [{"at_s": 100, "for_s": 200, "link": "down"}]
    calm, cut = (mean_ttft(shifting, shifting_found, "always", gbps=400, events=e) for e in ([], outage))
    never = mean_ttft(shifting, shifting_found, "never")
    assert calm < cut < never


def test_a_slow_disk_takes_its_time(shifting):
    """Its latency and bandwidth count in always, and the gate leaves a disk alone that is slower than recomputing."""
    disks = [{"share": 0.2}, {"share": 0.2, "gbps": 24, "latency_s": 0.0005}, {"share": 0.2, "gbps": 0.5}]
    tiers = [{"dram": {"share": 0.02}, "disk": disk} for disk in disks]
    free, fast, slow = (run(shifting, "always", tiers=each) for each in tiers)
    assert free["ttft_mean_s"] < fast["ttft_mean_s"] < slow["ttft_mean_s"]
    assert free["hit_tokens"] == slow["hit_tokens"]
    gated = run(shifting, "rule", tiers=tiers[2])
    assert gated["hit_tokens"]["disk"] < 0.2 * slow["hit_tokens"]["disk"]
    assert gated["ttft_mean_s"] < slow["ttft_mean_s"]


def test_the_contracts_sample_is_accepted_as_printed(small):
    """Word for word, and with its switch to queueing turned as well; it runs."""
    text = """\
name: conv-70b-25g
engines: 4
nodes: 4                  # engines are spread evenly; the engines of a node share its store
routing: random           # random | round_robin | sticky | least_loaded
model: llama-3-70b        # or a mapping {params, layers, width, kv_heads, head_dim, kv_bytes}
gpu: h100x8               # or a mapping {flops, utilisation}
gpu_cache_tokens: 0       # per engine, vLLM's own prefix cache
tiers:                    # share of the trace's unique bytes, or gib; summed over the fleet; speeds left out = no time
  dram:   {share: 0.02, eviction: lru, gbps: null, latency_s: 0}
  disk:   {share: 0.0}
  remote: {share: 0.30, touch: all}      # touch: all (also on local hits) | misses
link: {gbps: 25, efficiency: 0.9, latency_s: 0.001, per_chunk_s: 0.0002, probe_s: 30,
       fluctuation: {kind: ar1, sigma: 0.9, phi: 0.9, step_s: 30}}   # fluctuation may be left out
queueing: false           # true: one prefill queue per engine, and the link is shared
period_s: 300             # of the tuners, in trace time
events: [{at_s: 1800, for_s: 600, link_factor: 0.1}, {at_s: 2400, for_s: 60, link: down}]   # may be left out
seed: 1
"""
    for queueing in ("queueing: false", "queueing: true "):
        loaded = parse_yaml(text.replace("queueing: false", queueing), Scenario, name="sample")
        told = replay_document(small, loaded, ["always", "rule"], lambda: 0.0)["runs"]
        assert told["rule"]["ttft_mean_s"] < told["always"]["ttft_mean_s"]


def test_an_unknown_way_to_choose_is_refused(small):
    """The message lists those there are."""
    with pytest.raises(ValueError, match=r"'best'.*always, never, rule"):
        Play(Replay(small, scenario()), "best")


def test_gates_are_told_of_as_an_engine_tells_its_store(shifting, shifting_found):
    """One report for each tier that offered chunks: what was fetched, its predicted cost, the seconds that it took."""
    replay, told = Replay(shifting, scenario()), []
    play = Play(replay, "rule", report=lambda at_s, reports: told.append((at_s, reports)))
    tally = play.all(shifting_found)
    remote = [report for _, reports in told for report in reports if report.tier == "remote"]
    assert len(told) == sum(not {"gpu"}.issuperset(found.tiers) for found in shifting_found)
    assert sum(report.fetched_tokens for report in remote) == tally.remote_chunks * 512
    assert all((report.actual_s is None) == (report.outcome == "skipped") for report in remote)
    assert {report.outcome for report in remote} >= {"won", "skipped"}
    assert tally.ttft_s == Play(replay, "rule").all(shifting_found).ttft_s


@pytest.mark.parametrize("before", [[], ["dram"]])
def test_each_tier_is_told_its_own_seconds(small, before):
    """A disk in front of the remote takes longer than it saves, and the remote, which is quick, won all the same."""
    tiers = {"dram": {"share": 0.02, "gbps": 200}, "disk": {"share": 0.2, "gbps": 24}, "remote": {"share": 0.5}}
    world, told = Replay(small, scenario(tiers=tiers, gbps=200)), []
    play = Play(world, "rule", report=lambda _, reports: told.extend(reports))
    found = ReplayedRequest(0.0, 30 * world.chunk_tokens, [*before, *["disk"] * 10, *["remote"] * 10])
    play.request(found)
    disk, remote = told[-2:]
    costs = world.local["disk"], world.link.truth(0.0)
    assert (disk.actual_s, remote.actual_s) == tuple(cost.seconds(10, 10 * world.chunk_bytes) for cost in costs)
    assert (disk.outcome, remote.outcome) == ("lost", "won")
    prefill_s = world.prefill.seconds(len(found.tiers) * world.chunk_tokens, found.prompt_tokens)
    assert play.tally.ttft_s == pytest.approx([sum(one.actual_s for one in told) + prefill_s])


def test_a_transfer_that_fails_is_told_as_failed(shifting):
    """Behind another on the link, a transfer whose turn comes when the link is down has failed, and gained nothing.

    The chunks of DRAM before the remote's are not computed again: a store counts them as saved.
    """
    events, told = [{"at_s": 100.0, "for_s": 100.0, "link": "down"}], []
    replay = Replay(shifting, scenario(queueing=True, gbps=100, events=events))
    play = Play(replay, "rule_blind", report=lambda at_s, reports: told.append((at_s, *reports)))
    tiers = [*["dram"] * 10, *["remote"] * 90]
    play.all([ReplayedRequest(99.9, 512 * 101, tiers, engine) for engine in (0, 1)])
    (ended_s, _, came), (failed_s, dram, remote) = told
    assert [report.outcome for report in (came, dram, remote)] == ["won", "failed", "failed"]
    assert failed_s == ended_s  # it is known when the first has ended
    assert (dram.vain_tokens, remote.vain_tokens) == (0, remote.fetched_tokens)
    assert gained_s(remote) <= 0 < min(gained_s(came), gained_s(dram))
