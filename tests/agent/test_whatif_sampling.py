"""How much of a fleet is sampled: rates after its pace, hot sets, what stores are told of both."""

from datetime import timedelta
from threading import Barrier

import pytest

from agent.fakes import START, after
from agent.whatif_fleet import Fleet, chain, exact_rest, many
from tiertune_agent.collector.samples import Answer, Header
from tiertune_agent.collector.sampling import Handout, hot_set
from tiertune_agent.collector.schema import MOST
from tiertune_agent.whatif.fleet import Pace
from tiertune_connector.whatif.chain import Shape


@pytest.mark.slow
def test_a_large_fleet_is_sampled_and_its_prospects_are_near():
    """At an eighth, with the heads of prompts hot: every size with DRAM within 5 % of its exact cost."""
    fleet = Fleet(dram=16_000, remote=32_000)
    warm, requests = list(many(3000, people=300, seed=1)), list(many(5000, people=3000, seed=2))
    fleet.round()
    fleet.told(warm)
    assert fleet.handout.current.rate == 0.125
    assert set(chain("s0", "s1", "s2")) <= set(fleet.handout.current.hot)
    (prospect,) = fleet.told(requests)
    shapes = sorted(Shape.parse(name) for name in prospect.costs if "@" not in name)
    for shape in (shape for shape in shapes if shape.dram):
        assert prospect.costs[str(shape)] == pytest.approx(exact_rest(warm, requests, shape), rel=0.05), shape


def answer(rate=1.0, version=7):
    """Of a store that samples at this rate."""
    zeros = dict.fromkeys(("next", "hash_seed", "dropped", "behind"), 0)
    header = Header(boot_id="b", rate=rate, hot_version=version, time_s=0.0, namespaces={}, **zeros)
    return Answer("a", "http://a", header, [], {}, 0)


def paced(told, chunks):
    """Rates that are handed out, after so many chunks in each round."""
    handout, pace, rates = Handout(lambda _: None), Pace(), []
    for index, each in enumerate(chunks):
        at = after(seconds=15 * index)
        pace.add(each, at)
        handout.round([told], at, wanted=1.0, chunks_per_s=pace.per_s)
        rates.append(handout.current.rate)
    return rates


def test_a_busy_fleet_is_sampled_less():
    """About a thousand samples a second, by powers of two, and not for a burst; what is nearly right stays."""
    assert paced(answer(), [0, 135_000, 135_000, 0, 270_000, 360_000, *[0] * 7]) == [1.0] * 4 + [0.0625] * 8 + [1.0]


def test_a_busy_fleet_is_sampled_no_more_after_the_agent_started_anew():
    """It goes on with what the stores have until it knows how busy they are: they keep what they sampled."""
    rates = paced(answer(0.0625), [135_000] * 6 + [0] * 8)
    assert (rates[:6], rates[-1]) == ([0.0625] * 6, 1.0)


@pytest.mark.parametrize("told", [1 / 16, 1 / 8, 1 / 4])
def test_an_agent_that_starts_anew_leaves_a_rate_that_is_nearly_right(told):
    """A store that is given another one forgets what it sampled."""
    for pace in (None, 1.0):
        handout = Handout(lambda _: None)
        handout.round([answer(told)], START, wanted=1 / 8, chunks_per_s=pace)
        assert handout.current.rate == told


def test_a_hot_set_reaches_every_store_once():
    """One version for the fleet; a store that agrees is not told again, one that started anew is."""
    fleet = Fleet(dram=16_000, remote=32_000)
    fleet.round()
    fleet.told(many(2000, people=300))
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


def test_the_fleets_pace_is_known_after_a_minute():
    """Not before: a burst of a few seconds says nothing."""
    pace = Pace()
    for seconds, chunks, known in ((0, 9000, None), (59, 3000, None), (60, 3000, 100.0), (90, 6000, 100.0)):
        pace.add(chunks, START + timedelta(seconds=seconds))
        assert pace.per_s == known


def test_all_stores_are_told_before_any_has_answered():
    """One that is slow to take how it is to sample holds up no other: many of them would hold up the round."""
    fleet, met = Fleet(8), Barrier(8)
    for host in fleet.hosts:
        host.put_sampling = lambda document, take=host.put_sampling: (met.wait(10), take(document))[1]
    fleet.round()
    assert len({host.observer.sampling for host in fleet.hosts}) == 1
    assert fleet.handout.current.version == fleet.hosts[0].observer.sampling.version


def test_another_agent_goes_on_from_the_stores_version():
    """A restarted agent hands out a newer version than the stores have, all take it, and keep a rate that will do."""
    fleet = Fleet()
    for host in fleet.hosts:
        host.put_sampling({"seed": 0, "rate": 0.5, "hot": [], "version": 41})
    fleet.round()
    assert {host.observer.sampling.version for host in fleet.hosts} == {42}
    assert {host.observer.sampling.rate for host in fleet.hosts} == {0.5}


@pytest.mark.parametrize(("versions", "next_one"), [((int(MOST) - 1, 7), 8), ((int(MOST) - 1,), 1), ((0,), 1)])
def test_a_version_that_no_fleet_reaches_is_not_followed(versions, next_one):
    """One more, handed out to all, would be nonsense from every store: no size could be weighed any more."""
    handout = Handout(lambda _: None)
    handout.round([answer(version=one) for one in versions], START, wanted=1.0, chunks_per_s=None)
    assert handout.current.version == next_one


def test_hot_keys_stay_while_they_are_nearly_hot():
    """Chance in counting does not change the set with every refresh."""
    counts = {f"k{index}".encode(): 100 - index for index in range(12)}
    told = [counts, {b"k11": 20}]
    assert hot_set(told, (), 4) == (b"k11", b"k0", b"k1", b"k2")
    assert hot_set(told, (b"k5", b"k10"), 4) == (b"k5", b"k11", b"k0", b"k1")
