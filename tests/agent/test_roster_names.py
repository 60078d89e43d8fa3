"""Which stores there are: found at the addresses of a name."""

import socket
from threading import Barrier, Event

import pytest

from agent.fakes import urls
from tiertune_agent.collector import roster as roster_module
from tiertune_agent.collector.roster import GONE_AFTER, NAME_PROBLEM, Roster, resolved
from tiertune_agent.collector.targets import StoreAddress

HOUR_S = GONE_AFTER.total_seconds()


class Names:
    """A resolver whose answers a test sets; an exception is raised."""

    def __init__(self, *addresses):
        self.answer = addresses

    def __call__(self, host, port):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def names():
    return Names("10.0.0.1", "10.0.0.2")


@pytest.fixture
def find(clock):
    """Makes a list of those that a name has, as one resolves it."""
    return lambda resolve, *listed: Roster(listed, names=["http://stores:7410"], now=clock.now, resolve=resolve)


@pytest.fixture
def found(find, names):
    """By a name alone."""
    return find(names)


class TestName:
    def test_every_address_is_a_store(self, found, names):
        """New ones from the next look on."""
        assert list(found.stores) == urls("10.0.0.1", "10.0.0.2")
        names.answer = ("10.0.0.1", "10.0.0.2", "fd00::7")
        assert found.look()
        assert list(found.stores) == urls("10.0.0.1", "10.0.0.2", "[fd00::7]")

    def test_one_that_is_gone_stays_for_an_hour(self, found, names, clock):
        """A host that died is missed for so long, after the others, and forgotten then; back in time, it never was."""
        names.answer = ("10.0.0.2",)
        clock.advance(HOUR_S - 1)
        assert found.look()
        assert not found.look()
        assert list(found.stores) == urls("10.0.0.2", "10.0.0.1")
        assert list(found.former) == urls("10.0.0.1")
        names.answer = ("10.0.0.1", "10.0.0.2")
        clock.advance(2)
        found.look()
        assert list(found.stores) == urls("10.0.0.1", "10.0.0.2")
        assert not found.former
        names.answer = ("10.0.0.2",)
        clock.advance(HOUR_S)
        assert found.look()
        assert list(found.stores) == urls("10.0.0.2")

    def test_nor_for_longer_where_the_clock_was_set_back(self, found, names, clock):
        """An hour from then on, not until the hour has come again."""
        names.answer = ("10.0.0.2",)
        clock.advance(-86400)
        found.look()
        assert list(found.former) == urls("10.0.0.1")
        clock.advance(HOUR_S)
        found.look()
        assert not found.former

    def test_nobody_is_gone_while_the_name_is_not_resolved(self, found, names, clock):
        """A resolver that is away is told, and takes no store with it, however long."""
        names.answer = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        for _ in range(3):
            clock.advance(HOUR_S)
            assert not found.look()
        assert list(found.stores) == urls("10.0.0.1", "10.0.0.2")
        assert found.problems()[NAME_PROBLEM] == "stores: Name or service not known"
        names.answer = ("10.0.0.2",)
        found.look()
        assert found.problems()[NAME_PROBLEM] == ""

    def test_a_resolver_that_hangs_holds_up_no_round_and_is_asked_once(self, find, monkeypatch):
        """What it answers late is taken at the look after."""
        monkeypatch.setattr(roster_module, "LATE_S", 0.01)
        answered, asked = Event(), []

        def slow(host, port):
            asked.append(host)
            assert answered.wait(30)
            return ["10.0.0.1"]

        roster = find(slow)
        roster.look()
        assert roster.problems()[NAME_PROBLEM].startswith("stores: no resolver answered within")
        answered.set()
        monkeypatch.setattr(roster_module, "LATE_S", 30.0)
        assert roster.look()
        assert (list(roster.stores), asked) == (urls("10.0.0.1"), ["stores"])

    def test_all_names_are_asked_before_any_is_waited_for(self, clock):
        """Eight that nobody answers hold up a round for no longer than one."""
        asked = Barrier(8)

        def slow(host, port):
            asked.wait(30)
            return [host.replace("stores", "10.0.0.")]

        roster = Roster(names=[f"http://stores{each}:7410" for each in range(8)], now=clock.now, resolve=slow)
        assert list(roster.stores) == urls(*(f"10.0.0.{each}" for each in range(8)))

    def test_a_resolver_that_timed_out_is_asked_again(self, found, names):
        """Its own timeout is an answer, and not one that is still to come."""
        names.answer = TimeoutError(110, "Connection timed out")
        found.look()
        assert found.problems()[NAME_PROBLEM] == "stores: Connection timed out"
        names.answer = ("10.0.0.3",)
        assert found.look()

    def test_a_name_is_unknown_until_it_is_resolved(self, find, names):
        """An agent starts all the same, with no stores at first. Later it may fail: then it is known whom it had."""
        addresses, names.answer = names.answer, socket.gaierror(socket.EAI_AGAIN, "Temporary failure")
        roster = find(names)
        assert (roster.unknown, roster.stores) == (["stores"], {})
        for names.answer in (addresses, socket.gaierror(socket.EAI_AGAIN, "Temporary failure")):
            roster.look()
            assert (roster.unknown, list(roster.stores)) == ([], urls(*addresses))

    def test_a_listed_address_is_no_found_one(self, find, clock, names):
        """It stays when the name has it no more."""
        roster = find(names, StoreAddress(url="http://10.0.0.1:7410", name="a"))
        names.answer = ()
        clock.advance(HOUR_S)
        assert roster.look()
        assert list(roster.stores) == urls("10.0.0.1")

    def test_a_real_name_is_resolved(self):
        """This host's own; one that cannot be is an OSError or ValueError, which are told."""
        assert resolved("127.0.0.1", 7410) == ["127.0.0.1"]
        assert set(resolved("localhost", 7410)) <= {"127.0.0.1", "::1"}
        with pytest.raises((OSError, ValueError)):
            resolved("a" * 64 + ".invalid", 7410)

    def test_hosts_are_counted_once_where_they_have_two_families(self, monkeypatch):
        """Of IPv4 and IPv6 addresses those of the family that comes first."""
        tcp, both = socket.SOCK_STREAM, [("10.0.0.2", 7410), ("fd00::2", 7410, 0, 0), ("10.0.0.1", 7410)]
        rows = [(socket.AF_INET if len(one) == 2 else socket.AF_INET6, tcp, 6, "", one) for one in both]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: rows)
        assert resolved("stores", 7410) == ["10.0.0.1", "10.0.0.2"]
