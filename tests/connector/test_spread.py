"""Several servers as one remote: whose a chunk is, what one of them costs that does not answer, probes of each."""

import math
import threading
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.memory_tier import MemoryTier
from connector.stores import PATIENCE_S, at_best, chain, counted, eventually, payload, view
from tiertune_connector.chunk import NOBODY
from tiertune_connector.counters import Counters
from tiertune_connector.slower.lane import Lane
from tiertune_connector.slower.writers import Write
from tiertune_connector.tiers.base import PROBE_NAMESPACE, Outcome, Usage
from tiertune_connector.tiers.breaker import Breaker, Breakers
from tiertune_connector.tiers.spread import SpreadTier, ranked

A = "a" * 32
NAMES = ("a:6379/0", "b:6379/0", "c:6379/0")
KEYS = chain("k", 60)
NAMED = st.lists(
    st.sampled_from([f"cache-{number}:6379/0" for number in range(40)]), min_size=1, max_size=8, unique=True
)


@pytest.fixture
def servers():
    return {name: MemoryTier() for name in NAMES}


@pytest.fixture
def tier(servers):
    made = SpreadTier(servers, Counters(), patience_s=PATIENCE_S)
    yield made
    made.close()


@pytest.fixture
def lane(tier):
    made = Lane(tier, Counters(), time.monotonic, patience_s=PATIENCE_S, spread=tier)
    yield made
    made.close()


def fill(tier, keys=KEYS):
    for key in keys:
        assert tier.write(A, key, view(payload(key, 50)), NOBODY) is Outcome.OK


def read(tier, key):
    return tier.read(A, key, memoryview(bytearray(50)))[0]


def share(tier, name, keys=KEYS):
    return [key for key in keys if tier.owner(key) == name]


@given(NAMED, st.text("abc", min_size=1, max_size=5), st.binary(min_size=1, max_size=64))
def test_a_server_more_takes_its_share_and_moves_nothing_else(names, extra, seed):
    """A key stays where it was, or goes to the new server; and back when that one leaves."""
    keys = [seed, *chain(repr(seed), 20)]
    before, after = ranked(names), ranked([*names, extra])
    for key in keys:
        assert after(key) in (before(key), extra)


@given(NAMED, st.integers(0, 7), st.binary(min_size=1, max_size=64))
def test_the_order_of_the_list_does_not_matter(names, start, key):
    """Two hosts that list the same servers find each other's chunks."""
    turned = [*names[start:], *names[:start]]
    assert ranked(names)(key) == ranked(turned)(key) == ranked(names[::-1])(key)


def test_shares_are_even():
    """Of 6000 keys each of three servers has a third, within what chance does."""
    owned = Counter(ranked(NAMES)(key) for key in chain("even", 6000))
    assert set(owned) == set(NAMES)
    assert all(abs(count - 2000) < 6 * (6000 * 2 / 9) ** 0.5 for count in owned.values())


def test_a_chunk_is_on_its_own_server_alone(tier, servers):
    """Nothing is written twice, and each server holds what it owns."""
    fill(tier)
    for name, server in servers.items():
        held = [key for key in KEYS if server.present(A, [key])[1]]
        assert held == share(tier, name)


def test_a_dead_server_costs_its_share_and_only_that(tier, servers):
    """Its chunks are misses; all others are read and written, and the question what is there ends at its first one."""
    fill(tier)
    dead = NAMES[1]
    servers[dead].fault, servers[dead].why = lambda _: Outcome.ERROR, "Connection refused"
    for key in KEYS:
        assert (read(tier, key) is Outcome.OK) is (tier.owner(key) != dead)
    first = KEYS.index(share(tier, dead)[0])
    assert tier.present(A, KEYS)[1] == first
    others = [key for key in KEYS if tier.owner(key) != dead]
    assert tier.present(A, others) == (Outcome.OK, len(others))
    assert not tier.breaker.open
    assert tier.breaker.state == "slow"
    assert tier.breaker.reason.startswith(f"1 of 3 servers: {dead} is dead: ")
    assert tier.breaker.reason.endswith(": Connection refused")


def test_a_dead_server_is_not_asked_by_requests(tier, servers):
    """After three failures no read, write or question reaches it; a flush does, and says that it is not done."""
    fill(tier)
    dead, asked = NAMES[0], []

    def fault(operation):
        asked.append(operation)
        return Outcome.ERROR

    servers[dead].fault = fault
    for key in share(tier, dead)[:3]:
        read(tier, key)
    assert asked == ["read"] * 3
    for key in share(tier, dead):
        assert read(tier, key) is Outcome.ERROR
        assert tier.write(A, key, view(payload(key, 50)), NOBODY) is Outcome.ERROR
    assert tier.present(A, KEYS)[0] is Outcome.OK
    assert asked == ["read"] * 3
    outcome, count = tier.flush()
    assert (outcome, count) == (Outcome.ERROR, len(KEYS) - len(share(tier, dead)))
    assert asked[3:] == ["flush"]


def test_a_server_that_raises_is_soon_asked_no_more(lane, tier, servers):
    """It is blamed, and not the others: their shares are found again."""
    fill(tier)

    def raises(_: str) -> None:
        raise ValueError("a tier must not do this")

    servers[NAMES[0]].fault = raises
    bad, good = share(tier, NAMES[0]), share(tier, NAMES[1]) + share(tier, NAMES[2])
    assert lane.present(A, [*good, *bad]) == len(good)
    assert lane.read(A, bad[0], memoryview(bytearray(50)))[0] is Outcome.ERROR
    lane.writers.queue(Write(A, bad[1], view(payload(bad[1], 50)), NOBODY, lambda _: None))
    eventually(lambda: tier.breaker.servers[NAMES[0]].open)
    assert lane.present(A, [*good, *bad]) == len(good)
    assert [tier.breaker.servers[name].state for name in NAMES[1:]] == ["ok", "ok"]
    assert tier.flush(A) == (Outcome.ERROR, len(good))
    assert counted(tier._counters, "internal_errors_total") == {("remote",): 4.0}


def test_a_server_that_hangs_does_not_keep_the_others_from_answering(servers):
    """The question ends in time with what the others have; the hung one's share is missing."""
    patience_s = 1.0
    tier = SpreadTier(servers, Counters(), patience_s=patience_s)
    fill(tier)
    hung, go_on = NAMES[2], threading.Event()
    first = KEYS.index(share(tier, hung)[0])

    def fault(_):
        go_on.wait(60)
        return Outcome.TIMEOUT

    servers[hung].fault = fault

    def asked():
        started = time.monotonic()
        outcome, count = tier.present(A, KEYS)
        assert outcome is Outcome.TIMEOUT
        return time.monotonic() - started if count == first else math.inf

    assert at_best(asked, patience_s, attempts=2)  # after three it is dead
    go_on.set()
    eventually(lambda: tier.breaker.servers[hung].state == "slow")
    assert {tier.breaker.servers[name].state for name in NAMES[:2]} == {"ok"}
    tier.close()


def test_all_servers_dead_is_a_dead_tier(lane, servers):
    """Then the lane asks nobody, and drops what waits."""
    for server in servers.values():
        server.fault = lambda _: Outcome.ERROR
    for _ in range(3):
        lane.probe(100)
    assert (lane.breaker.open, lane.breaker.state) == (True, "dead")
    assert lane.present(A, KEYS) == 0


def test_the_log_tells_which_server_died_and_why_and_when_it_answers_again(lane, servers, caplog):
    """Once each, as of a tier of one server."""
    dead = NAMES[0]
    servers[dead].fault, servers[dead].why = lambda _: Outcome.ERROR, "Connection refused"
    for _ in range(5):
        lane.probe(100)
    servers[dead].fault = lambda _: None
    for _ in range(3):
        lane.probe(100)
    assert [record.getMessage() for record in caplog.records] == [
        f"remote: {dead} is dead: 3 operations in a row ended in error: Connection refused",
        f"remote: {dead} is recovering: a probe succeeded",
    ]


def test_every_server_is_probed_and_comes_back_by_itself(lane, tier, servers):
    """A probe reaches each, also the dead one: when it answers again, it is asked again."""
    fill(tier)
    servers[NAMES[0]].fault = lambda _: Outcome.ERROR
    for _ in range(3):
        lane.probe(100)
    assert [breaker.state for breaker in tier.breaker.servers.values()] == ["dead", "ok", "ok"]
    assert lane.present(A, KEYS) < len(KEYS)
    servers[NAMES[0]].fault = lambda _: None
    lane.probe(100)
    assert (lane.breaker.state, lane.breaker.reason) == ("ok", "")
    assert lane.present(A, KEYS) == len(KEYS)
    assert all(server.present(PROBE_NAMESPACE, [key])[1] for server, key in owned_probes(tier, servers))


def owned_probes(tier, servers):
    return [(servers[tier.owner(key)], key) for key in tier.probe_keys(b"probe-100-raw")]


def test_a_silent_server_s_probes_do_not_make_the_others_look_slow(lane, servers):
    """What it costs to fetch is told by the servers that are asked."""
    lane.probe(100)
    servers[NAMES[0]].fault = lambda _: Outcome.ERROR
    for _ in range(3):
        lane.probe(100)
    observed = []
    lane.transit._cost.observe = lambda *_, at_least=False: observed.append(at_least)
    for fault in (Outcome.TIMEOUT, Outcome.ERROR):
        servers[NAMES[0]].fault = lambda _, fault=fault: fault
        lane.probe(100)
    assert observed == [False] * 4
    servers[NAMES[1]].fault = lambda _: Outcome.TIMEOUT
    lane.probe(100)
    assert True in observed, "one that is asked does tell"


@pytest.mark.parametrize("operation", ["flush", "usage"])
def test_all_servers_are_flushed_and_tell_their_usage_at_once(operation):
    """Each takes until all are asked: a server that takes long, or hangs, adds nothing to another's time."""
    together = threading.Barrier(len(NAMES))

    class Met(MemoryTier):
        def usage(self):
            self.fault("usage")
            return super().usage()

    servers = {name: Met() for name in NAMES}
    tier = SpreadTier(servers, Counters(), patience_s=PATIENCE_S)
    fill(tier)
    for server in servers.values():
        server.fault = lambda _: together.wait(PATIENCE_S) and None
    told = {"flush": (Outcome.OK, len(KEYS)), "usage": Usage(50 * len(KEYS), None, None)}
    assert getattr(tier, operation)() == told[operation]
    tier.close()


def test_usage_is_the_sum_of_what_all_tell():
    """A server that does not tell what it holds, or its bound, leaves the whole without; a dead one is left out."""

    class Told(MemoryTier):
        def usage(self):
            return self.told

    def spread(*told, dead=()):
        servers = {name: Told() for name in NAMES[: len(told)]}
        for server, (resident, bound) in zip(servers.values(), told, strict=True):
            server.told = Usage(resident, bound, None)
        tier = SpreadTier(servers, Counters(), patience_s=1.0)
        for name in dead:
            tier.breaker.servers[name].open = True
        return tier.usage()

    assert spread((10, 5), (10, 7)) == Usage(20, 12, None)
    assert spread((10, 5), (10, None)) == Usage(20, None, None)
    assert spread((10, 5), (None, None)) == Usage(None, None, None)
    assert spread((10, 5), (None, None), dead=NAMES[1:2]) == Usage(10, None, None)


def test_a_tier_of_several_is_as_well_as_its_servers():
    """All well, some unwell, none asked, one coming back."""
    failed, coming = Breaker(), Breaker()
    for breaker in (failed, coming):
        for _ in range(3):
            breaker.record(Outcome.ERROR)
    coming.record(Outcome.OK)
    assert Breakers({"a": Breaker(), "b": Breaker()}, str).state == "ok"
    assert Breakers({"a": Breaker(), "b": failed}, str).state == "slow"
    assert Breakers({"a": failed}, str).state == "dead"
    both = Breakers({"a": failed, "b": coming}, str)
    assert (both.open, both.state, both.unsettled) == (True, "recovering", True)


def test_a_server_without_room_is_told_and_spared_and_the_others_are_written(tier, servers):
    """Its share is refused without asking it, until it is to be tried again."""
    full, asked = NAMES[0], []
    servers[full].fault = lambda operation: asked.append(operation) or Outcome.FULL
    keys = chain("many", 60)
    outcomes = {key: tier.write(A, key, view(payload(key, 100)), NOBODY) for key in keys}
    assert {key for key, outcome in outcomes.items() if outcome is Outcome.FULL} == set(share(tier, full, keys))
    assert asked == ["write"] * 8
    assert tier.breaker.reason.startswith(f"1 of 3 servers: {full} is slow: full: ")
    assert (tier.breaker.state, tier.breaker.paused) == ("slow", False)
    servers[full].fault = lambda _: None
    tier.breaker.try_again(asking=False)
    assert tier.write(A, share(tier, full, keys)[0], view(payload(b"", 100)), NOBODY) is Outcome.OK
    assert tier.breaker.state == "ok"
