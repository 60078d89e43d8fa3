"""The doctor gathers its facts from an agent with its fake stores, and from servers that are away or no Redis."""

import json
from datetime import timedelta
from threading import Barrier
from time import monotonic
from unittest.mock import Mock

import httpx
import pytest
import redis

from agent.agents import client_of
from agent.fakes import START, Clock
from agent.sources import VLLM
from tiertune_agent.collector.stores import Trouble
from tiertune_agent.credentials import Access, access
from tiertune_agent.doctor.checks import findings
from tiertune_agent.doctor.command import Endpoints, examine
from tiertune_agent.doctor.facts import AgentFacts, ServerFacts, StoreFacts
from tiertune_agent.doctor.gathered import Reader, servers
from tiertune_agent.doctor.report import document, looked_at
from tiertune_agent.history.database import DatabaseError
from tiertune_agent.records import FLEET
from tiertune_agent.remote.managed import KIND, Remote
from tiertune_agent.settings import RemoteAccess
from tiertune_connector.access import Login

pytestmark = pytest.mark.slow

AGENT, STORE = "http://agent:7420", "http://host-a:7410"


def test_a_server_that_only_speaks_as_a_redis_is_told(monkeypatch):
    """Some name no bound in INFO: the doctor tells it by name, and so does the agent's incident."""
    monkeypatch.setattr(redis.Redis, "info", lambda *_: {"used_memory": 1})
    url, why = "redis://127.0.0.1:1/0", "answers what no Redis answers: KeyError('maxmemory')"
    assert servers(url, Login(), 1.0) == [ServerFacts(url, problem=why)]
    assert Remote(RemoteAccess(url=url), monotonic).read(START) == Trouble(FLEET, KIND, f"{url}: {why}")


def test_servers_that_are_away_take_no_longer_than_one(monkeypatch):
    """All of them are asked before any has answered."""
    met = Barrier(4)
    monkeypatch.setattr(redis.Redis, "info", lambda *_: {"met": met.wait(10)})
    told = servers([f"redis://127.0.0.1:{port}/0" for port in range(1, 5)], Login(), 1.0)
    assert [one.problem for one in told] == ["answers what no Redis answers: KeyError('maxmemory')"] * 4


@pytest.fixture
def network(agent, store):
    """Hosts ``agent``, ``host-a``, which is 127.0.0.1 too, and ``engine``; others are away."""
    api = client_of(agent)

    def handle(request):
        if request.url.host == "agent":
            answer = api.request(request.method, request.url.path)
            return httpx.Response(answer.status_code, content=answer.content)
        if request.url.host == "engine":
            return httpx.Response(200, text=f"# TYPE vllm:cache_config_info gauge\n{VLLM}")
        if request.url.host not in (store.name, "127.0.0.1"):
            raise httpx.ConnectError("nobody is there", request=request)
        return store.handle(request)

    return httpx.MockTransport(handle)


@pytest.fixture
def look(network, clock):
    """Examines what is named, on the clock of the test."""

    def run(**asked):
        reader = Reader(Access(transport=network), now=lambda: clock.now().timestamp())
        return examine(Endpoints(**asked), reader=reader)

    return run


def names(facts):
    return {finding.check for finding in findings(facts)}


class TestGathering:
    def test_an_agent_tells_of_its_stores_and_each_is_asked(self, look, rounds, store, clock):
        """By the addresses that the agent has; clocks agree, and only the fake's version is found."""
        rounds(2)
        facts = look(agent=AGENT)
        assert [one.name for one in facts.answering] == ["host-a"]
        assert facts.agent.clock.ahead_s == pytest.approx(0.0)
        assert facts.answering[0].clock.ahead_s == pytest.approx(0.0)
        assert facts.answering[0].counted.total("gate_candidate_requests_total", tier="remote") == 20
        assert names(facts) == {"version_mismatch"}

    def test_a_store_that_went_away_is_one_finding(self, look, rounds, store):
        """Though the agent has an incident of it, too."""
        rounds(2)
        store.up = False
        rounds(1)
        found = [one for one in findings(look(agent=AGENT)) if one.check == "store_unreachable"]
        assert [one.where for one in found] == ["host-a"]

    def test_a_store_of_two_addresses_is_one(self, look, rounds, store):
        """Though its figures went on between the two answers; what the agent knows of it stays known."""
        rounds(2)
        counters = store.get_counters

        def later(request):
            store.count("rejected_hellos_total", 1, reason="protocol")
            return counters(request)

        store.get_counters = later
        facts = look(agent=AGENT, stores={"http://127.0.0.1:7410": ""})
        assert [(one.known, one.heard) for one in facts.stores] == [("host-a", True)]
        assert looked_at(facts)["stores"] == 1
        assert len([one for one in findings(facts) if one.check == "engines_refused"]) == 1

    def test_a_store_that_tells_absurd_numbers_is_a_finding(self, look, rounds, store):
        """And no traceback."""
        rounds(2)
        for value in ("1e999", '"much"', "-1", 100_000 * "["):
            document = json.dumps({"store": "host-a", "pools": {"n": {"chunk_bytes": "@"}}}).replace('"@"', value)
            store.get_status = lambda _request, text=document: httpx.Response(200, text=text)
            assert "it answers" in look(stores={"http://host-a:7410": ""}).stores[0].problem or value.startswith("[")
            assert not look(stores={"http://host-a:7410": ""}).answering

    def test_a_store_that_only_the_agent_reaches_is_not_checked(self, look, rounds, store):
        """From elsewhere its address may lead nowhere: that is no fault, and is said."""
        rounds(2)
        store.up = False
        facts = look(agent=AGENT)
        assert names(facts) == set()
        assert any(why.startswith("host-a: what it tells by itself: connection refused") for why in facts.unknown)

    def test_a_store_that_wants_a_token_is_not_checked(self, look, rounds, store):
        """The store is well. A token helps where settings name the store: to the agent's list none is shown."""
        rounds(2)
        store.answers("get_status", 401, json={"message": "no"})
        for asked, mend in ((look(agent=AGENT), "--config"), (look(stores={STORE: ""}), "TIERTUNE_TOKEN_FILE")):
            assert names(asked) == set()
            assert any("it asks for a token" in why and mend in why for why in asked.unknown)

    def test_a_store_that_told_all_at_one_address_is_checked(self, look, rounds, store):
        """At that of the agent's list it wants a token, which is not shown there, or cannot be reached from here."""
        rounds(2)
        whole = store.get_status

        def from_outside(request):
            if request.url.host == "127.0.0.1":
                return whole(request)
            return httpx.Response(401, json={"message": "no"})

        store.get_status = from_outside
        facts = look(agent=AGENT, stores={"http://127.0.0.1:7410": ""})
        assert [one.name for one in facts.answering] == ["host-a"]
        assert not any(why.startswith("host-a") for why in facts.unknown)

    def test_who_signed_a_stores_certificate_is_no_secret(self, monkeypatch):
        """A store that only the agent names is believed by the authorities of the command line, without its token."""
        shown = []
        monkeypatch.setattr(
            Reader, "_store", lambda _self, url, called, access: shown.append(access) or StoreFacts(url)
        )
        fleet = {"stores": [{"name": "host-a", "url": STORE}]}
        monkeypatch.setattr(Reader, "agent", lambda _self, url: AgentFacts(url, fleet=fleet))
        examine(Endpoints(agent=AGENT), reader=Reader(Access(bearer="token", trust="authorities")))
        assert shown == [Access(trust="authorities")]

    def test_an_agent_whose_database_is_away_is_there(self, look, agent, monkeypatch):
        """It is told what the agent says, and not to start what runs."""
        fails = DatabaseError("database: postgresql://host/name: connection refused")
        monkeypatch.setattr(agent.history, "stores", Mock(side_effect=fails))
        (found,) = findings(look(agent=AGENT))
        assert (found.check, str(fails) in found.wrong) == ("agent_unreachable", True)
        assert "database" in found.mend

    @pytest.mark.parametrize("said", [{"text": "<html>"}, {"json": ["detail"]}, {"json": {"message": "busy"}}])
    def test_a_proxy_that_reaches_no_agent_is_no_agent(self, said):
        """What it answers is its own, not an agent's word about its database."""
        transport = httpx.MockTransport(lambda _request: httpx.Response(503, **said))
        told = Reader(Access(transport=transport)).agent(AGENT)
        assert not told.away
        assert "503" in told.problem

    def test_a_token_is_shown_to_stores_of_the_settings_alone(self, network, rounds, clock, tmp_path):
        """An address that only the agent names may be somebody else's by now."""
        rounds(2)
        shown = []

        def handle(request):
            shown.append((request.url.host, request.headers.get("authorization")))
            return network.handle_request(request)

        reader = Reader(Access(transport=httpx.MockTransport(handle)), now=lambda: clock.now().timestamp())
        (tmp_path / "token").write_text("fleet")
        own = access(tmp_path / "token", None)
        examine(Endpoints(agent=AGENT, stores={"http://mine:7410": "mine"}, access=own), reader=reader)
        assert {host for host, token in shown if token} == {"mine"}
        assert "host-a" in {host for host, _ in shown}

    def test_what_an_operator_left_behind_is_found(self, look, api, rounds, store, policy_file):
        """A freeze without an end, a bypass, an edit of the policy that is none, a dead remote."""
        rounds(2)
        assert api("freeze", {"reason": "release"})["frozen"]
        assert api("bypass", {"on": True})["stores"] == {"host-a": "ok"}
        policy_file.write_text("version: 1\nmode: aotu\n")
        store.health["remote"] = "dead"
        rounds(1)
        told = names(look(agent=AGENT))
        assert {"frozen", "bypassed", "policy_invalid", "tier_dead"} <= told

    def test_a_clock_that_went_off_is_found(self, look, rounds, store, clock):
        """An hour ahead of the agent's."""
        rounds(2)
        store.clock = Clock(clock.now() + timedelta(hours=1))
        found = {one.check: one.wrong for one in findings(look(agent=AGENT))}
        assert "1h 00m ahead of the agent's" in found["clock_skew"]

    def test_an_engine_is_read_by_its_own_metrics(self, look):
        """What it offloads; this one is not TierTune's, and nothing is said of a store."""
        facts = look(engines=["http://engine:8000"])
        assert facts.engines[0].answers
        assert not {"engine_unreachable", "engine_without_store"} & names(facts)
        assert names(look(engines=["http://gone:8000"])) == {"engine_unreachable"}

    def test_what_was_not_looked_at_is_said(self, look, rounds):
        """With the option that would tell."""
        rounds(3)
        told = document(look(agent=AGENT), [])
        assert any("--engine" in why for why in told["not_checked"])
        assert told["looked_at"]["stores"] == 1

    def test_another_program_is_no_agent(self, look):
        """What answers something else is told as such."""
        (found,) = findings(look(agent="http://engine:8000"))
        assert found.check == "agent_unreachable"
