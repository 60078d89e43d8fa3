"""Which stores there are: listed in the settings or a file; and the agent that follows them."""

import gc
import socket
import weakref

import httpx
import pytest

from agent.agents import pass_windows
from agent.fakes import START, FakeStore, propose, urls, wrong
from tiertune_agent.changes.actuator import Actuator
from tiertune_agent.changes.operators import Caller
from tiertune_agent.collector.roster import FILE_PROBLEM, Roster
from tiertune_agent.collector.stores import Collector
from tiertune_agent.collector.targets import StoreAddress
from tiertune_agent.credentials import Access
from tiertune_agent.records import Target
from tiertune_agent.settings import AgentSettings
from tiertune_agent.tuners.base import Proposal
from tiertune_connector.documents import DocumentError

OPS = Caller("ops", "test")


def listing(*hosts):
    return "stores:\n" + "".join(f'  - {{url: "http://{host}:7410"}}\n' for host in hosts) if hosts else "stores: []\n"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "stores.yaml"
    path.write_text(listing("host-a"))
    return path


class TestFile:
    @pytest.fixture
    def roster(self, clock, file):
        return Roster([StoreAddress(url="http://host-z:7410", name="z")], file, now=clock.now, settle=lambda _: None)

    def test_what_it_lists_comes_and_goes_at_once(self, roster, file):
        """A host that is listed is there from the next look on, one that is not is none any more."""
        assert set(roster.stores) == set(urls("host-a", "host-z"))
        assert not roster.look()
        file.write_text(listing("host-b"))
        assert roster.look()
        assert set(roster.stores) == set(urls("host-b", "host-z"))
        file.write_text(listing())
        assert roster.look()
        assert list(roster.stores) == urls("host-z")

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("", "stores.yaml:1:1: the file is empty"),
            ("stores: {url: 3}", "stores.yaml:1:9: stores: "),
            ('stores: [{url: "host-a:7410"}]', "write a store's address as http://host:port"),
            (listing("host-a", "host-a"), "http://host-a:7410 is named twice"),
            ('stores: [{url: "http://a:1", name: c}, {url: "http://b:1", name: c}]', "c is named twice"),
            (None, "stores.yaml: cannot be read: No such file"),
        ],
    )
    def test_a_bad_edit_keeps_the_last_good_list(self, roster, file, text, problem):
        """It is told with its place until it is mended."""
        file.unlink() if text is None else file.write_text(text)
        assert not roster.look()
        assert set(roster.stores) == set(urls("host-a", "host-z"))
        assert problem in roster.problems()[FILE_PROBLEM]
        file.write_text(listing("host-a"))
        assert not roster.look()
        assert set(roster.problems().values()) == {""}

    def test_a_bad_file_is_refused_at_first(self, clock, file):
        """An agent does not start on it."""
        file.write_text("stores: 3")
        with pytest.raises(DocumentError, match=r"stores.yaml:1:9: stores: "):
            Roster(file=file, now=clock.now)

    def test_one_that_both_list_is_one_store(self, clock, file):
        """Called as the file does, which is the newer word."""
        file.write_text('stores: [{url: "http://host-a:7410", name: b}]')
        roster = Roster([StoreAddress(url="http://host-a:7410", name="a")], file, now=clock.now)
        assert [store.name for store in roster.stores.values()] == ["b"]


class TestSettings:
    @pytest.mark.parametrize(
        ("name", "problem"),
        [
            ("stores:7410", "write a name that has the stores' addresses as http://name:port"),
            ("http://stores", "write a name that has the stores' addresses as http://name:port"),
            ("http://stores:0", "a port is a number from 1 to 65535"),
            ("https://stores:7410", "a certificate is for a name, not for its addresses: list them in a stores_file"),
            ("http://me@stores:7410", "a token stands in stores_token_file"),
        ],
    )
    def test_a_name_that_cannot_be_one_is_refused(self, name, problem):
        """With what to write."""
        with pytest.raises(ValueError, match=problem):
            AgentSettings(stores_dns=(name,))

    def test_a_file_or_a_name_is_enough(self, file):
        """No store need be among the settings themselves."""
        assert AgentSettings(stores_file=file).roster(lambda: START).stores.keys() == set(urls("host-a"))
        assert AgentSettings(stores_dns=("http://stores:7410",)).stores == ()


class TestAgent:
    @pytest.fixture
    def make(self, agents, store, other):
        """An agent that leads, over the two fake stores as far as it finds them."""
        return lambda network=None, **settings: agents(store, other, stores=(), network=network, **settings)

    @pytest.fixture
    def listed(self, make, file):
        return make(stores_file=file)

    def round(self, agent, clock, *stores):
        pass_windows(agent, stores, clock)

    def names(self, agent):
        return [store.name for store in agent.history.stores()]

    def test_a_host_that_is_listed_is_tuned_from_the_next_round_on(self, listed, clock, file, store, other):
        """And commanded; one that is listed no more is left alone, its incidents are over."""
        self.round(listed, clock, store)
        assert self.names(listed) == ["host-a"]
        file.write_text(listing("host-a", "host-b"))
        self.round(listed, clock, store, other)
        assert self.names(listed) == ["host-a", "host-b"]
        assert listed.operators.bypass(OPS, True, None)["stores"] == {"host-a": "ok", "host-b": "ok"}
        store.up = False
        self.round(listed, clock, other)
        assert wrong(listed) == ["store_unreachable"]
        file.write_text(listing("host-b"))
        self.round(listed, clock, other)
        assert self.names(listed) == ["host-b"]
        assert wrong(listed) == []
        assert listed.operators.bypass(OPS, False, None)["stores"] == {"host-b": "ok"}

    def test_a_bad_edit_is_an_incident(self, listed, clock, file, store):
        """The stores of the last good one go on being tuned."""
        file.write_text("stores: [host-a]\n")
        self.round(listed, clock, store)
        assert wrong(listed) == [FILE_PROBLEM]
        assert self.names(listed) == ["host-a"]
        file.write_text(listing("host-a"))
        self.round(listed, clock, store)
        assert wrong(listed) == []

    @pytest.fixture
    def found(self, monkeypatch):
        """The addresses that a name has, or the resolver's error: the last of the list."""
        answers = [["10.0.0.1"]]

        def getaddrinfo(*_, **__):
            if isinstance(answers[-1], Exception):
                raise answers[-1]
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, 7410)) for one in answers[-1]]

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
        return answers

    @pytest.mark.parametrize("overlap", [False, True])
    def test_a_store_that_moved_is_one_store(self, make, clock, store, found, overlap):
        """Restarted at another address it goes on under its name; the former address is missed no more.

        ``overlap``: for a while the name has both.
        """
        at = {"10.0.0.1": store}
        network = httpx.MockTransport(lambda request: at[request.url.host].handle(request))
        agent = make(network, stores_dns=("http://stores:7410",))
        self.round(agent, clock, store)
        gone = FakeStore(clock, "gone")
        gone.up = False
        at |= {"10.0.0.1": gone, "10.0.0.2": store}
        if overlap:
            found.append(["10.0.0.1", "10.0.0.2"])
            self.round(agent, clock, store)
        found.append(["10.0.0.2"])
        self.round(agent, clock, store)
        (record,) = agent.history.stores()
        assert (record.name, record.url) == ("host-a", "http://10.0.0.2:7410")
        self.round(agent, clock, store)
        assert dict(agent.collector.addresses) == {"http://10.0.0.2:7410": "10.0.0.2:7410"}
        assert wrong(agent) == []

    def test_one_that_stands_by_knows_the_stores_too(self, listed, make, clock, file, store):
        """Its page tells those that it would lead."""
        second = make(stores_file=file)
        assert not second.leader.leading
        file.write_text(listing("host-a", "host-b"))
        second.tick()
        assert set(second.collector.addresses) == set(urls("host-a", "host-b"))

    def test_clients_of_stores_that_left_live_as_long_as_somebody_commands_by_them(self, listed, file, store):
        """A command may be under way when its store leaves the list; nobody else keeps it."""
        client = listed.collector.client("http://host-a:7410")
        file.write_text(listing("host-b"))
        listed.collector.look()
        assert client.get("/v1/status")
        kept = weakref.ref(client)
        del client
        gc.collect()
        assert kept() is None

    def test_one_that_is_gone_is_missed_and_not_waited_for(self, make, clock, store, found):
        """For the hour its incident is open; what the others share is reasoned about meanwhile."""
        agent = make(httpx.MockTransport(store.handle), stores_dns=("http://stores:7410",))
        self.round(agent, clock, store)
        store.up = False
        agent.collector.look()
        assert [trouble.gone for trouble in agent.collector.collect()] == [False]
        found.append([])
        agent.collector.look()
        assert [trouble.gone for trouble in agent.collector.collect()] == [True]
        self.round(agent, clock)
        assert wrong(agent) == ["store_unreachable"]

    def test_who_starts_while_a_name_is_not_resolved_ends_nothing(self, make, clock, store, found):
        """Nobody knows yet who is none of the fleet's any more: wishes and proposals wait, and no flush is complete."""
        settings = {"stores_dns": ("http://stores:7410",)}
        network = httpx.MockTransport(store.handle)
        before = make(network, **settings)
        self.round(before, clock, store)
        wish = Proposal("tiers.remote.fetch", "on", "off", "because")
        made = propose(before.history, "remote_fetch", Target("host-a", "remote"), wish)
        before.history.wish_bypass({"new": "http://10.0.0.1:7410"}, on=True)
        before.leader.resign()
        found.append(socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"))
        agent = make(network, **settings)
        self.round(agent, clock)
        assert agent.history.decisions.get(made.id).state == "proposed"
        assert agent.history.wishes(["http://10.0.0.1:7410"]) == {"http://10.0.0.1:7410": True}
        assert not agent.operators.flush(OPS, {})["complete"]
        told = Actuator(lambda _: None, lambda: agent.collector.roster.unknown, agent.history.fence).undo(made)
        assert (told.state, "stores is not resolved" in told.reason) == ("approved", True)
        found.append(["10.0.0.2"])
        self.round(agent, clock, store)
        assert agent.history.wishes(["http://10.0.0.1:7410"]) == {}

    def test_where_another_store_answers_the_former_ones_incidents_are_over(self, listed, clock, store, other):
        """An address that is used again, or a store that was given another name."""
        self.round(listed, clock, store)
        store.up = False
        self.round(listed, clock)
        assert wrong(listed) == ["store_unreachable"]
        store.up, store.name = True, "host-z"
        self.round(listed, clock, store)
        self.round(listed, clock, store)
        assert self.names(listed) == ["host-z"]
        assert wrong(listed) == []


def test_a_round_over_stores_that_were_never_heard_takes_apart_no_address(monkeypatch):
    """Else a large fleet's first round would take apart all of them for each of them."""
    stores = [StoreAddress(url=f"http://10.0.0.{number}:7410") for number in range(1, 51)]
    network = httpx.MockTransport(lambda _request: httpx.Response(503))
    collector = Collector(Roster(stores, now=lambda: START), lambda: START, lambda: 0.0, Access(transport=network))
    monkeypatch.setattr("tiertune_agent.collector.stores.urlsplit", pytest.fail)
    assert [told.store for told in collector.collect()] == [store.url.removeprefix("http://") for store in stores]
    collector.close()
