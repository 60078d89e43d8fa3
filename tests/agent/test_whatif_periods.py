"""Of which time a prospect tells: whole periods of one agent, and what came, left or started anew meanwhile."""

from datetime import timedelta

import pytest

from agent.fakes import START
from agent.whatif_fleet import CHUNK_BYTES, CHUNK_TOKENS, DIGEST, NOW, Fleet, begun, chain, conversations, exact_rest
from tiertune_agent.records import Target, ended
from tiertune_agent.tuners.base import Current
from tiertune_agent.tuners.tier_size import TierSize, TierSizeSettings
from tiertune_connector.keys import Namespace
from tiertune_connector.sessions.session import Session

pytestmark = pytest.mark.slow


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
    fleet, requests = begun(600)
    fleet.play(requests[:300])
    fleet.service.resume()
    assert fleet.round() == []
    tells_the_rest(fleet, requests)


def tells_the_rest(fleet, requests):
    """The next prospect is that of the requests from the 300th on, in ghosts that saw those before."""
    (prospect,) = fleet.told(requests[300:])
    assert prospect.requests == 300
    assert prospect.costs[str(NOW)] == pytest.approx(exact_rest(requests[:300], requests[300:], NOW))


def test_what_an_agent_finds_when_it_starts_has_no_prospect():
    """The one before may have told of it: it warms the ghosts, and is not the newest traffic."""
    fleet, requests = begun(600)
    fleet.play(requests[:300])
    fleet.restart()
    assert fleet.round() == []
    tells_the_rest(fleet, requests)


def test_a_store_that_an_agents_first_round_misses_has_no_prospect_of_before_either():
    """It is read a round late: what it tells then warms the ghosts, as in the first round."""
    fleet, requests = Fleet(), [(1, keys) for _, keys in conversations(600)]
    fleet.round()
    fleet.play(requests[:300])
    fleet.restart()
    sound, fleet.hosts[1].samples = fleet.hosts[1].samples, lambda _since: "no json"
    assert fleet.round() == []
    fleet.hosts[1].samples = sound
    assert fleet.round() == []
    tells_the_rest(fleet, requests)


def test_a_namespace_that_nobody_asks_for_is_forgotten_after_a_day():
    """Its ghosts and requests, though its stores still name it; when it comes again it begins anew."""
    fleet = Fleet(1)
    fleet.round()
    fleet.told(conversations(200, hosts=1))
    (known,) = fleet.service._namespaces.values()
    assert known.logged
    fleet.round(seconds=86000)
    assert fleet.service._namespaces[DIGEST] is known
    fleet.round(seconds=500)
    fleet.round()
    assert not fleet.service._namespaces[DIGEST].logged
    assert fleet.told(conversations(200, hosts=1, seed=1))


def test_a_host_that_left_is_forgotten_after_a_day():
    """What it held in the miniature fleets goes, too: hosts that come and go all day would add up."""
    fleet = Fleet(2)
    fleet.round()
    fleet.told(conversations(200))
    (known,) = fleet.service._namespaces.values()
    simulated = known.ghosts._fleets.values()
    assert set.union(*(set(each._hosts) for each in simulated)) == {"host-0", "host-1"}
    fleet.hosts.pop()
    for _ in range(3):
        fleet.play(conversations(20, hosts=1))
        fleet.round(seconds=40000)
    assert set.union(*(set(each._hosts) for each in simulated)) == {"host-0"}
    assert {host for each in simulated for host in (each._owners or {}).values()} == {"host-0"}


@pytest.mark.parametrize("leap_s", [3600.0, -3600.0])
def test_a_prospect_is_as_long_as_it_was_though_the_clock_was_set(leap_s):
    """An hour in which nothing was asked would make every tier look idle."""
    fleet = Fleet()
    told = []
    for index, leaps_s in enumerate((0.0, 0.0, 0.0, leap_s, leap_s)):
        fleet.play(conversations(50, seed=index))
        fleet.now_s += 60.0
        at = START + timedelta(seconds=fleet.now_s - START.timestamp() + leaps_s)
        told += [(at, one) for one in fleet.service.round([host.snapshot(at) for host in fleet.hosts], at, every_s=0.0)]
    assert len(told) >= 3
    assert all(abs(one.seconds - 60.5) < 0.1 and abs(ended(one) - at) < timedelta(seconds=0.1) for at, one in told)


@pytest.mark.parametrize(
    ("gone", "boot", "seconds"), [((0, 1), True, 75.5), ((0, 1), False, 3675.5), ((1,), True, 3675.5)]
)
def test_no_prospect_is_of_a_time_before_the_first_of_the_stores_began(gone, boot, seconds):
    """For an hour in which all were away a size would be charged its rent, and no request could use it."""
    fleet, requests = begun(100)
    assert fleet.told(requests[:50])
    away = [fleet.hosts[place] for place in gone]
    for host in away:
        host.up = False
    for _ in range(60):
        assert fleet.round(60.0, every_s=7200.0) == []
    for host in away:
        host.boot() if boot else None
        host.up = True
    fleet.round(60.0, every_s=7200.0)
    (told,) = fleet.told(requests[50:])
    assert (told.requests, told.seconds) == (50, pytest.approx(seconds))


def test_what_came_since_the_stores_began_is_counted_whole():
    """Between a status and the end of a round passes now more time, now less: no store begins anew by that."""
    fleet, requests = begun(150, hosts=1)
    assert fleet.told(requests[:50])
    fleet.hosts[0].boot()
    fleet.round(every_s=7200.0)
    for some in (requests[50:100], requests[100:]):
        fleet.play(some)
        fleet.hosts[0].began_s += 0.01
        assert fleet.round(every_s=7200.0) == []
    (told,) = fleet.round()
    assert (told.requests, told.seconds) == (100, pytest.approx(61))


def test_an_agent_that_restarts_weighs_sizes_after_half_a_period():
    """DRAM has grown since its grid was made, so that the next agent's is another: what was told before is no use."""
    fleet, told = Fleet(), []
    tuner = TierSize(TierSizeSettings(period=60.0))

    def look(times, seed):
        for index in range(times):
            told.extend(fleet.told(conversations(20, seed=100 * seed + index)))

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
    fleet.restart()
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
    fleet.told(conversations(50, hosts=1))
    other = Session("d", "e", "all", Namespace(model="new", chunk_tokens=CHUNK_TOKENS), CHUNK_BYTES, CHUNK_TOKENS)
    host.observer.attach(other)
    host.observer.seen(other, chain(("new", 1)), CHUNK_TOKENS)
    fleet.play(conversations(50, hosts=1, seed=1))
    assert [prospect.namespace for prospect in fleet.round()] == [DIGEST]
