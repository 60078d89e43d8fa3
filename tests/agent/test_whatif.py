"""Samples of several stores become what the fleet's requests would have cost under other sizes of its tiers."""

from datetime import timedelta
from functools import partial
from threading import Barrier

import pytest

from agent.fakes import START
from agent.whatif_fleet import CHUNK_BYTES, CHUNK_TOKENS, DIGEST, Fleet, Host, chain, conversations, exact_cost, many
from tiertune_agent.collector.samples import Answer, Header, SampleReader
from tiertune_agent.collector.sampling import GHOST_KEYS, Handout, hot_set
from tiertune_agent.records import Target, ended
from tiertune_agent.tuners.base import Current
from tiertune_agent.tuners.tier_size import TierSize, TierSizeSettings
from tiertune_agent.whatif.fleet import FleetWhatif, Pace
from tiertune_connector.keys import Namespace
from tiertune_connector.sessions.session import Session
from tiertune_connector.whatif.chain import Shape


def test_prospects_are_those_of_an_exact_simulation():
    """Two hosts, every chunk sampled: each size's cost per request is what following all chunks gives."""
    fleet, requests = Fleet(), list(conversations(600))
    fleet.round()
    fleet.play(requests)
    (prospect,) = fleet.round()
    assert (prospect.namespace, prospect.requests) == (DIGEST, 600)
    shapes = [Shape.parse(name) for name in prospect.costs if "@" not in name]
    assert len(shapes) >= 8
    for shape in shapes:
        assert prospect.costs[str(shape)] == pytest.approx(exact_cost(requests, shape, 2)), shape
    assert len({round(cost, 9) for cost in prospect.costs.values()}) > 5, "sizes differ in what they cost"


def test_rounds_add_up_to_the_same():
    """Prospects of several rounds, weighted by their requests, are the one of all: the ghosts stay warm."""
    fleet, requests = Fleet(), list(conversations(600))
    fleet.round()
    told = []
    for start in range(0, 600, 100):
        fleet.play(requests[start : start + 100])
        told += fleet.round()
    assert [prospect.requests for prospect in told] == [100] * 6
    now = Shape(40 * CHUNK_BYTES, 0, 80 * CHUNK_BYTES)
    mean = sum(prospect.costs[str(now)] for prospect in told) / 6
    assert mean == pytest.approx(exact_cost(requests, now, 2))


def test_a_prospect_is_of_a_whole_period():
    """None before, then one of all the requests."""
    fleet = Fleet()
    fleet.round(every_s=45)
    told = []
    for requests in (list(conversations(50, seed=seed)) for seed in range(3)):
        fleet.play(requests)
        told.append(fleet.round(every_s=45))
    assert [len(prospects) for prospects in told] == [0, 0, 1]
    assert told[2][0].requests == 150
    assert told[2][0].seconds == pytest.approx(46.5)


def test_another_agents_time_has_no_prospect_of_this_one():
    """After it led again, what came meanwhile is played and not told: the next prospect is of what comes then."""
    fleet, requests = Fleet(), list(conversations(600))
    fleet.round()
    fleet.play(requests[:300])
    fleet.service.resume()
    assert fleet.round() == []
    fleet.play(requests[300:])
    (prospect,) = fleet.round()
    assert prospect.requests == 300
    now = Shape(40 * CHUNK_BYTES, 0, 80 * CHUNK_BYTES)
    whole = exact_cost(requests, now, 2) * 600
    first = exact_cost(requests[:300], now, 2) * 300
    assert prospect.costs[str(now)] == pytest.approx((whole - first) / 300)


def tells_the_rest(fleet, requests):
    """The next prospect is that of the requests from the 300th on, in ghosts that saw those before."""
    fleet.play(requests[300:])
    (prospect,) = fleet.round()
    now = Shape(40 * CHUNK_BYTES, 0, 80 * CHUNK_BYTES)
    whole, first = (exact_cost(some, now, 2) * len(some) for some in (requests, requests[:300]))
    assert prospect.costs[str(now)] == pytest.approx((whole - first) / 300)


def test_what_an_agent_finds_when_it_starts_has_no_prospect():
    """The one before may have told of it: it warms the ghosts, and is not the newest traffic."""
    fleet, requests = Fleet(), list(conversations(600))
    fleet.round()
    fleet.play(requests[:300])
    by_url = {host.url: host for host in fleet.hosts}
    fleet.service = FleetWhatif(SampleReader(by_url.get), Handout(by_url.get))
    assert fleet.round() == []
    tells_the_rest(fleet, requests)


def test_a_store_that_an_agents_first_round_misses_has_no_prospect_of_before_either():
    """It is read a round late: what it tells then warms the ghosts, as in the first round."""
    fleet, requests = Fleet(), [(1, keys) for _, keys in conversations(600)]
    fleet.round()
    fleet.play(requests[:300])
    by_url = {host.url: host for host in fleet.hosts}
    fleet.service = FleetWhatif(SampleReader(by_url.get), Handout(by_url.get))
    sound, fleet.hosts[1].samples = fleet.hosts[1].samples, lambda _since: "no json"
    assert fleet.round() == []
    fleet.hosts[1].samples = sound
    assert fleet.round() == []
    tells_the_rest(fleet, requests)


def test_a_namespace_that_nobody_asks_for_is_forgotten_after_a_day():
    """Its ghosts and requests, though its stores still name it; when it comes again it begins anew."""
    fleet = Fleet(1)
    fleet.round()
    fleet.play(conversations(200, hosts=1))
    fleet.round()
    (known,) = fleet.service._namespaces.values()
    assert known.logged
    fleet.round(seconds=86000)
    assert fleet.service._namespaces[DIGEST] is known
    fleet.round(seconds=500)
    fleet.round()
    assert not fleet.service._namespaces[DIGEST].logged
    fleet.play(conversations(200, hosts=1, seed=1))
    assert fleet.round()


def test_a_host_that_left_is_forgotten_after_a_day():
    """What it held in the miniature fleets goes, too: hosts that come and go all day would add up."""
    fleet = Fleet(2)
    fleet.round()
    fleet.play(conversations(200))
    fleet.round()
    (known,) = fleet.service._namespaces.values()
    simulated = known.ghosts._fleets.values()
    assert set.union(*(set(each._hosts) for each in simulated)) == {"host-0", "host-1"}
    fleet.hosts.pop()
    for _ in range(3):
        fleet.play(conversations(20, hosts=1))
        fleet.round(seconds=40000)
    assert set.union(*(set(each._hosts) for each in simulated)) == {"host-0"}
    assert {host for each in simulated for host in getattr(each, "_owners", {}).values()} == {"host-0"}


def test_stores_clocks_need_not_agree():
    """An hour apart, the requests of two hosts are still played as they came."""
    requests = list(conversations(300))
    costs = []
    for skew_s in (0.0, 3600.0):
        fleet = Fleet()
        fleet.hosts[1].skew_s = skew_s
        fleet.round()
        fleet.play(requests)
        costs.append(fleet.round()[0].costs)
    assert costs[0] == pytest.approx(costs[1])


@pytest.mark.slow
def test_a_large_fleet_is_sampled_and_its_prospects_are_near():
    """At an eighth, with the heads of prompts hot: every size with DRAM within 5 % of its exact cost."""
    fleet = Fleet(dram=16_000, remote=32_000)
    warm, requests = list(many(3000, people=300, seed=1)), list(many(5000, people=3000, seed=2))
    fleet.round()
    fleet.play(warm)
    fleet.round()
    assert fleet.handout.current.rate == 0.125
    assert set(chain("s0", "s1", "s2")) <= set(fleet.handout.current.hot)
    fleet.play(requests)
    (prospect,) = fleet.round()
    shapes = sorted(Shape.parse(name) for name in prospect.costs if "@" not in name)
    every = warm + requests
    for shape in (shape for shape in shapes if shape.dram):
        whole = exact_cost(every, shape, 2) * len(every) - exact_cost(warm, shape, 2) * len(warm)
        assert prospect.costs[str(shape)] == pytest.approx(whole / len(requests), rel=0.05), shape


def test_a_busy_fleet_is_sampled_less():
    """About a thousand samples a second, by powers of two, and not for a burst; what is nearly right stays."""
    handout, pace = Handout(lambda _: None), Pace()
    answer = Answer("a", "http://a", Header("b", 0, 1.0, 0, 0, 0, 0, 0.0, {}, {}), [], {}, 0)
    rates = []
    for index, chunks in enumerate((0, 135_000, 135_000, 0, 270_000, 360_000, 0, 0, 0, 0, 0, 0, 0)):
        at = START + timedelta(seconds=15 * index)
        pace.add(chunks, at)
        handout.round([answer], at, chunks=100.0, chunks_per_s=pace.per_s)
        rates.append(handout.current.rate)
    assert rates == [1.0] * 4 + [0.0625] * 8 + [1.0]


def test_a_busy_fleet_is_sampled_no_more_after_the_agent_started_anew():
    """It goes on with what the stores have until it knows how busy they are: they keep what they sampled."""
    busy = Answer("a", "http://a", Header("b", 0, 0.0625, 0, 7, 0, 0, 0.0, {}, {}), [], {}, 0)
    handout, pace, rates = Handout(lambda _: None), Pace(), []
    for index in range(6):
        at = START + timedelta(seconds=15 * index)
        pace.add(135_000, at)
        handout.round([busy], at, chunks=100.0, chunks_per_s=pace.per_s)
        rates.append(handout.current.rate)
    assert rates == [0.0625] * 6
    for index in range(6, 14):
        at = START + timedelta(seconds=15 * index)
        pace.add(0, at)
        handout.round([busy], at, chunks=100.0, chunks_per_s=pace.per_s)
    assert handout.current.rate == 1.0


@pytest.mark.parametrize("told", [1 / 16, 1 / 8, 1 / 4])
def test_an_agent_that_starts_anew_leaves_a_rate_that_is_nearly_right(told):
    """A store that is given another one forgets what it sampled."""
    store = Answer("a", "http://a", Header("b", 0, told, 0, 7, 0, 0, 0.0, {}, {}), [], {}, 0)
    for pace in (None, 1.0):
        handout = Handout(lambda _: None)
        handout.round([store], START, chunks=8.0 * GHOST_KEYS, chunks_per_s=pace)
        assert handout.current.rate == told


def costs(fleet, requests):
    """Of each simulated shape what the requests would cost, which are played in one round."""
    fleet.round()
    fleet.play(requests)
    (prospect,) = fleet.round()
    told = [(Shape.parse(name), cost) for name, cost in prospect.costs.items() if "@" not in name]
    assert len(told) > 5
    return told


def test_namespaces_share_the_tiers():
    """One that has a quarter of the DRAM is simulated with a quarter of every size."""
    fleet, requests = Fleet(), list(conversations(400))
    other = "cd" * 16

    def shared(host):
        def snapshot(at):
            told = type(host).snapshot(host, at)
            pool = told.status["pools"][DIGEST]
            three = {**pool, "dram": {"effective": {"capacity_bytes": 3 * host.dram, "eviction": "lru"}}}
            told.status["pools"][other] = three
            return told

        return snapshot

    for host in fleet.hosts:
        host.snapshot = shared(host)
    for sizes, cost in costs(fleet, requests):
        quarter = Shape(sizes.dram // 4, sizes.disk // 4, sizes.remote // 4)
        assert cost == pytest.approx(exact_cost(requests, quarter, 2)), sizes


def test_models_on_hosts_of_their_own_share_only_the_remote():
    """Each has all of its host's DRAM, and half of the remote."""
    fleet, requests = Fleet(), [(0, keys) for _, keys in conversations(400)]
    fleet.hosts[1].namespace = Namespace(model="qwen", chunk_tokens=CHUNK_TOKENS)
    fleet.hosts[1].boot()
    for sizes, cost in costs(fleet, requests):
        half = Shape(sizes.dram, sizes.disk, sizes.remote // 2)
        assert cost == pytest.approx(exact_cost(requests, half, 1)), sizes


def test_what_only_a_disk_remembers_sets_no_ghosts_up_anew():
    """A store was started anew and no engine has come yet: the namespace's share is still that of the others."""

    def costs(*without_dram):
        fleet, requests, restarted = Fleet(), list(conversations(400)), set()

        def told(host, at):
            snapshot = Host.snapshot(host, at)
            pool = snapshot.status["pools"][DIGEST]
            if host.name in restarted:
                pool["disk"] = pool.pop("dram")
            return snapshot

        for host in fleet.hosts:
            host.snapshot = partial(told, host)
        fleet.round()
        fleet.play(requests[:200])
        fleet.round()
        restarted.update(without_dram)
        fleet.play(requests[200:])
        (prospect,) = fleet.round()
        return prospect.costs

    assert costs("host-0") == costs()


@pytest.mark.slow
def test_a_lower_rate_keeps_the_ghosts_warm():
    """What was sampled is thinned as the lower rate would have: its first prospect is near, not that of empty tiers."""
    fleet = Fleet(dram=2_000, remote=6_000)
    first, then = list(many(3000, people=200, seed=3)), list(many(3000, people=200, seed=3))
    fleet.round()
    fleet.play(first)
    fleet.round()
    assert fleet.handout.current.rate == 0.5
    for host in fleet.hosts:
        host.remote = 60_000 * CHUNK_BYTES
    fleet.round()
    assert fleet.handout.current.rate == 0.125
    fleet.play(then)
    (prospect,) = fleet.round()
    now = Shape(2_000 * CHUNK_BYTES, 0, 60_000 * CHUNK_BYTES)
    whole = exact_cost(first + then, now, 2) * 6000 - exact_cost(first, now, 2) * 3000
    assert prospect.costs[str(now)] == pytest.approx(whole / 3000, rel=0.35)
    assert exact_cost(then, now, 2) > 2 * whole / 3000, "empty tiers would cost far more"


def test_a_hot_set_reaches_every_store_once():
    """One version for the fleet; a store that agrees is not told again, one that started anew is."""
    fleet = Fleet(dram=16_000, remote=32_000)
    fleet.round()
    fleet.play(list(many(2000, people=300)))
    fleet.round()
    versions = {host.observer.sampling for host in fleet.hosts}
    assert len(versions) == 1
    assert versions.pop().hot
    puts = [len(host.puts) for host in fleet.hosts]
    fleet.round()
    assert [len(host.puts) for host in fleet.hosts] == puts
    fleet.hosts[0].boot()
    fleet.round()
    fleet.round()
    assert len({host.observer.sampling for host in fleet.hosts}) == 1
    assert len(fleet.hosts[1].puts) == puts[1]


@pytest.mark.parametrize("leap_s", [3600.0, -3600.0])
def test_a_prospect_is_as_long_as_it_was_though_the_clock_was_set(leap_s):
    """An hour in which nothing was asked would make every tier look idle."""
    fleet = Fleet()
    fleet.service = FleetWhatif(fleet.reader, fleet.handout, fleet.clock)
    told = []
    for index, leaps_s in enumerate((0.0, 0.0, 0.0, leap_s, leap_s)):
        fleet.play(conversations(50, seed=index))
        fleet.now_s += 60.0
        at = START + timedelta(seconds=fleet.now_s - START.timestamp() + leaps_s)
        told += [(at, one) for one in fleet.service.round([host.snapshot(at) for host in fleet.hosts], at, every_s=0.0)]
    assert len(told) >= 3
    assert all(abs(one.seconds - 60.5) < 0.1 and abs(ended(one) - at) < timedelta(seconds=0.1) for at, one in told)


def test_a_clock_that_was_set_back_holds_up_no_sampling():
    """The fleet's pace is known after a minute, and its hot keys are looked through, as ever."""
    pace = Pace()
    for at, chunks in ((START, 0), (START - timedelta(days=1), 1000), (START - timedelta(days=1, seconds=-60), 6000)):
        pace.add(chunks, at)
    assert pace.per_s == 100.0
    handout = Handout(lambda _: None)
    for at, key in ((START, b"a"), (START - timedelta(days=1), b"b")):
        header = Header("b", 0, 1.0, 0, 0, 0, 0, 0.0, {}, {"n": {key: 1}})
        handout.round([Answer("a", "http://a", header, [], {}, 0)], at, chunks=1e9, chunks_per_s=0.0)
    assert handout.current.hot == (b"b",)


def test_all_stores_are_told_before_any_has_answered():
    """One that is slow to take how it is to sample holds up no other: many of them would hold up the round."""
    fleet, met = Fleet(8), Barrier(8)
    for host in fleet.hosts:
        host.put_sampling = lambda document, take=host.put_sampling: (met.wait(10), take(document))[1]
    fleet.round()
    assert len({host.observer.sampling for host in fleet.hosts}) == 1
    assert fleet.handout.current.version == fleet.hosts[0].observer.sampling.version


def test_sizes_are_priced_with_lru_whatever_the_pools_have():
    """So a change of algorithm sets no ghosts up anew, and one of a newer store is no stranger."""
    fleet, usual = Fleet(), Fleet()
    requests, running, told = list(conversations(400)), iter(("lru", "arc", "of-tomorrow")), fleet.hosts[0].snapshot

    def snapshot(at):
        made = told(at)
        made.status["pools"][DIGEST]["dram"]["effective"]["eviction"] = next(running)
        return made

    fleet.hosts[0].snapshot = snapshot
    for each in (fleet, usual):
        each.round()
        each.play(requests[:200])
        each.round()
        each.play(requests[200:])
    assert [one.costs for one in fleet.round()] == [one.costs for one in usual.round()] != []


def test_another_agent_goes_on_from_the_stores_version():
    """A restarted agent hands out a newer version than the stores have, all take it, and keep a rate that will do."""
    fleet = Fleet()
    for host in fleet.hosts:
        host.put_sampling({"seed": 0, "rate": 0.5, "hot": [], "version": 41})
    fleet.round()
    assert {host.observer.sampling.version for host in fleet.hosts} == {42}
    assert {host.observer.sampling.rate for host in fleet.hosts} == {0.5}


def test_hot_keys_stay_while_they_are_nearly_hot():
    """Chance in counting does not change the set with every refresh."""
    counts = {f"k{index}".encode(): 100 - index for index in range(12)}
    told = [{"n": counts}, {"n": {b"k11": 20}}]
    assert hot_set(told, (), 4) == (b"k11", b"k0", b"k1", b"k2")
    assert hot_set(told, (b"k5", b"k10"), 4) == (b"k5", b"k11", b"k0", b"k1")


def test_a_new_size_outside_of_the_grid_makes_a_new_one_that_is_warm():
    """The requests of late are played again: the first prospect of the new sizes is not that of empty tiers."""
    fleet, requests = Fleet(), list(conversations(600))
    fleet.round()
    fleet.play(requests[:400])
    fleet.round()
    for host in fleet.hosts:
        host.dram = 9 * 40 * CHUNK_BYTES
    fleet.round()
    fleet.play(requests[400:])
    (prospect,) = fleet.round()
    new = Shape(9 * 40 * CHUNK_BYTES, 0, 80 * CHUNK_BYTES)
    whole = exact_cost(requests, new, 2) * 600 - exact_cost(requests[:400], new, 2) * 400
    assert prospect.costs[str(new)] == pytest.approx(whole / 200)


@pytest.mark.parametrize("told", [{"health": "dead"}, {"health": "ok", "capacity_bytes": None, "resident_bytes": None}])
def test_a_remote_that_does_not_answer_keeps_its_size(told):
    """Its stores tell no bound meanwhile: the sizes that are simulated stay those of the remote that comes back."""
    fleet, prospects = Fleet(), []
    fleet.round()
    for seed in range(3):
        fleet.play(conversations(100, seed=seed))
        prospects += fleet.round()
        for host in fleet.hosts:
            host.remote_told = told if seed == 0 else None
    assert [set(each.costs) for each in prospects] == [set(prospects[0].costs)] * 3


def test_an_agent_that_restarts_weighs_sizes_after_half_a_period():
    """DRAM has grown since its grid was made, so that the next agent's is another: what was told before is no use."""
    fleet, told = Fleet(), []
    tuner = TierSize(TierSizeSettings(period=60.0))

    def look(times, seed):
        for index in range(times):
            fleet.play(list(conversations(20, seed=100 * seed + index)))
            told.extend(fleet.round())

    def asked():
        tuning = {"tiers": {"dram": {"capacity_bytes": fleet.hosts[0].dram}}}
        target, remote = Target("host-0", "dram"), fleet.hosts[0].remote
        return tuner.evaluate([], Current(target, tuning, {}, prospects=told, hosts=2, remote_bytes=remote)).reason

    fleet.round()
    look(12, seed=1)
    for host in fleet.hosts:
        host.dram *= 2
    look(4, seed=2)
    before, grid = asked(), set(told[-1].costs)
    assert grid == set(told[0].costs), "a size that is simulated needs no other grid"
    by_url = {host.url: host for host in fleet.hosts}
    fleet.service = FleetWhatif(SampleReader(by_url.get), Handout(by_url.get))
    fleet.service.resume()
    fleet.round()
    look(1, seed=3)
    assert set(told[-1].costs) != grid
    assert "no samples of half a period" in asked()
    look(1, seed=4)
    assert "engine seconds per hour" in before
    assert "engine seconds per hour" in asked()


def test_a_namespace_that_comes_between_two_questions_waits_a_round():
    """Its samples are there, but the store's state was told before: the others' prospects come all the same."""
    fleet = Fleet(1)
    (host,) = fleet.hosts
    fleet.play(conversations(50, hosts=1))
    fleet.round()
    other = Session("d", "e", "all", Namespace(model="new", chunk_tokens=CHUNK_TOKENS), CHUNK_BYTES, CHUNK_TOKENS)
    host.observer.attach(other)
    host.observer.seen(other, chain(("new", 1)), CHUNK_TOKENS)
    fleet.play(conversations(50, hosts=1, seed=1))
    assert [prospect.namespace for prospect in fleet.round()] == [DIGEST]
