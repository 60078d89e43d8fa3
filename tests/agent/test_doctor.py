"""The doctor gathers its facts: of an agent with its fake stores, of settings files, of real processes."""

import itertools
import json
import signal
from threading import Barrier

import httpx
import pytest
import redis
from starlette.testclient import TestClient

from agent.fakes import SLOW, START
from agent.sources import VLLM
from connector.stores import eventually, short_folder
from e2e.servers import redis_server
from tiertune_agent.collector.stores import Trouble
from tiertune_agent.doctor.checks import findings
from tiertune_agent.doctor.command import Endpoints, examine, is_store, weighed
from tiertune_agent.doctor.facts import ServerFacts
from tiertune_agent.doctor.gathered import Reader, database, servers
from tiertune_agent.doctor.report import document
from tiertune_agent.history.database import open_current
from tiertune_agent.records import FLEET
from tiertune_agent.remote.managed import KIND, Remote
from tiertune_agent.settings import RemoteAccess
from tiertune_connector.access import Login
from tiertune_connector.client.store_client import StoreClient
from tiertune_connector.documents import parse_yaml
from tiertune_connector.keys import Namespace
from tiertune_connector.serve.main import StoreProcess
from tiertune_connector.serve.measure import StorageTimes
from tiertune_connector.settings import StoreSettings

AGENT = "http://agent:7420"
STORE = """
name: host-a
socket: {folder}/s.sock
state_dir: {folder}/state
http: {{port: 0}}
dram: {{capacity: 8MiB, segment: 1MiB}}
"""


def test_a_server_that_only_speaks_as_a_redis_is_told(monkeypatch):
    """Some name no bound in INFO: the doctor tells it by name, and so does the agent's incident."""
    monkeypatch.setattr(redis.Redis, "info", lambda *_: {"used_memory": 1})
    url, why = "redis://127.0.0.1:1/0", "answers what no Redis answers: KeyError('maxmemory')"
    assert servers(url, Login(), 1.0) == [ServerFacts(url, problem=why)]
    assert Remote(RemoteAccess(url=url)).read(START) == Trouble(FLEET, KIND, f"{url}: {why}")


def test_servers_that_are_away_take_no_longer_than_one(monkeypatch):
    """All of them are asked before any has answered."""
    met = Barrier(4)
    monkeypatch.setattr(redis.Redis, "info", lambda *_: {"met": met.wait(10)})
    told = servers([f"redis://127.0.0.1:{port}/0" for port in range(1, 5)], Login(), 1.0)
    assert [one.problem for one in told] == ["answers what no Redis answers: KeyError('maxmemory')"] * 4


@pytest.fixture
def network(agent, store):
    """Hosts ``agent``, ``host-a`` and ``engine``; others are away."""
    api = TestClient(agent.app, base_url="http://127.0.0.1")

    def engine(request):
        if request.url.path == "/version":
            return httpx.Response(200, json={"version": "0.32.0"})
        return httpx.Response(200, text=VLLM)

    def handle(request):
        if request.url.host == "agent":
            answer = api.request(request.method, request.url.path)
            return httpx.Response(answer.status_code, content=answer.content)
        if request.url.host == "engine":
            return engine(request)
        if request.url.host != store.name:
            raise httpx.ConnectError("nobody is there", request=request)
        return store.handle(request)

    return httpx.MockTransport(handle)


@pytest.fixture
def look(network, clock):
    """Examines what is named, on the clock of the test."""

    def run(**asked):
        reader = Reader({}, network, now=lambda: clock.now().timestamp())
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
        assert facts.answering[0].total("gate_candidate_requests_total", tier="remote") == 20
        assert names(facts) == {"version_mismatch"}

    def test_a_store_that_went_away_is_one_finding(self, look, rounds, store):
        """Though the agent has an incident of it, too."""
        rounds(2)
        store.up = False
        rounds(1)
        found = [one for one in findings(look(agent=AGENT)) if one.check == "store_unreachable"]
        assert [one.where for one in found] == ["host-a"]

    def test_a_store_of_two_addresses_is_one(self, network, rounds, store, clock):
        """Its own file may name it otherwise than the agent does; another boot of the same name is another store."""
        rounds(2)
        store.health["remote"] = "dead"
        told = store.get_status

        def handle(request):
            if request.url.host == "127.0.0.1":
                return store.handle(request)
            return network.handle_request(request)

        def look(boots):
            store.get_status = lambda request: httpx.Response(
                200, json=json.loads(told(request).content) | {"boot_id": next(boots)}
            )
            reader = Reader({}, httpx.MockTransport(handle), now=lambda: clock.now().timestamp())
            return examine(Endpoints(agent=AGENT, stores={"http://127.0.0.1:7410": called}), reader=reader)

        called = ""

        facts = look(itertools.repeat("one"))
        assert [(one.url, one.known, one.heard) for one in facts.stores] == [("http://127.0.0.1:7410", "host-a", True)]
        assert [one.check for one in findings(facts)].count("tier_dead") == 1
        assert len(look(itertools.count()).stores) == 2
        called = "host-b"  # the settings are wrong at this address
        wrong = [one for one in findings(look(itertools.repeat("one"))) if one.check == "store_misnamed"]
        assert [one.where for one in wrong] == ["host-a"]

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
        """The command line has none; the store is well."""
        rounds(2)
        store.get_status = lambda _request: httpx.Response(401, json={"message": "no"})
        facts = look(agent=AGENT)
        assert names(facts) == set()
        assert any("TIERTUNE_TOKEN_FILE" in why for why in facts.unknown)

    def test_a_token_is_shown_to_stores_of_the_settings_alone(self, network, rounds, clock):
        """An address that only the agent names may be somebody else's by now."""
        rounds(2)
        shown = []

        def handle(request):
            shown.append((request.url.host, request.headers.get("authorization")))
            return network.handle_request(request)

        reader = Reader({}, httpx.MockTransport(handle), now=lambda: clock.now().timestamp())
        own = {"headers": {"Authorization": "Bearer fleet"}}
        examine(Endpoints(agent=AGENT, stores={"http://mine:7410": "mine"}, access=own), reader=reader)
        assert {host for host, token in shown if token} == {"mine"}
        assert "host-a" in {host for host, _ in shown}

    def test_what_an_operator_left_behind_is_found(self, look, rounds, agent, store, policy_file):
        """A freeze without an end, a bypass, an edit of the policy that is none, a dead remote."""
        rounds(2)
        api = TestClient(agent.app, base_url="http://127.0.0.1")
        assert api.post("/api/v1/freeze", json={"reason": "release"}).status_code == 200
        assert api.post("/api/v1/bypass", json={"on": True}).status_code == 200
        policy_file.write_text("version: 1\nmode: aotu\n")
        store.health["remote"] = "dead"
        rounds(1)
        told = names(look(agent=AGENT))
        assert {"frozen", "bypassed", "policy_invalid", "tier_dead"} <= told

    def test_a_clock_that_went_off_is_found(self, look, rounds, store, clock):
        """An hour ahead of the agent's."""
        rounds(2)
        other = type(clock)(clock.now())
        other.advance(3600)
        store.clock = other
        found = {one.check: one.wrong for one in findings(look(agent=AGENT))}
        assert "1h 00m ahead of the agent's" in found["clock_skew"]

    def test_an_engine_is_read_by_its_own_metrics(self, look):
        """Its version and what it offloads; this one is not TierTune's, and nothing is said of a store."""
        facts = look(engines=["http://engine:8000"])
        assert facts.engines[0].version == "0.32.0"
        assert not {"engine_unreachable", "engine_without_store"} & names(facts)
        assert names(look(engines=["http://gone:8000"])) == {"engine_unreachable"}

    def test_what_was_not_looked_at_is_said(self, look, rounds, store):
        """With the option that would tell."""
        store.bandwidth = SLOW
        rounds(3)
        told = document(look(agent=AGENT), [])
        assert any("--engine" in why for why in told["not_checked"])
        assert any("engines have not told what computing costs" in why for why in told["not_checked"])
        assert told["looked_at"]["stores"] == 1

    def test_another_program_is_no_agent(self, look):
        """What answers something else is told as such."""
        (found,) = findings(look(agent="http://engine:8000"))
        assert found.check == "agent_unreachable"


class TestFiles:
    def test_a_store_is_told_from_an_agent_by_its_keys(self, tmp_path):
        """Whatever is neither is read as an agent's, whose reader names the mistake."""
        for text, expected in (
            (STORE.format(folder=tmp_path), True),
            ("stores: [{url: 'http://127.0.0.1:1'}]\n", False),
            ("- a\n", False),
            ("{", False),
        ):
            (tmp_path / "s.yaml").write_text(text)
            assert is_store(tmp_path / "s.yaml") is expected

    def test_an_address_with_parameters_names_the_same_file(self, tmp_path):
        """A file that is not there yet is nothing wrong, and none is made; one that is there has its schema told."""
        url = f"sqlite:///{tmp_path}/new/a.sqlite"
        assert database(url, None).problem == f"database: there is no folder {tmp_path}/new: make it, or mend the path"
        (tmp_path / "new").mkdir()
        for address in (url, f"{url}?timeout=3"):
            assert (database(address, None).problem, database(address, None).have) == ("", None)
        assert not list((tmp_path / "new").iterdir())
        open_current(url).dispose()
        for address in (url, f"{url}?timeout=3"):
            found = database(address, None)
            assert found.have == found.newest

    def test_an_old_schema_is_found_and_left_alone(self, bare, tiertune, sql, tmp_path):
        """By the agent's settings; the mend that it names is the command that mends it."""
        (tmp_path / "a.yaml").write_text(
            f"database: {bare}\nstores: [{{url: 'http://127.0.0.1:9'}}]\nhttp: {{port: 0}}"
        )
        assert database(bare, None).problem == ""
        assert tiertune("db", "upgrade", "--database", bare)[0] == 0
        newest = sql(bare, "select version_num from alembic_version")[0][0]
        sql(bare, "update alembic_version set version_num = '0001'")
        code, out, _ = tiertune("doctor", "--config", tmp_path / "a.yaml", "--json", tmp_path / "d.json")
        told = {one["check"]: one for one in json.loads((tmp_path / "d.json").read_text())["findings"]}
        assert code == 1
        assert told["database"]["mend"] == "tiertune db upgrade --config FILE"
        assert f"this version needs {newest}" in told["database"]["wrong"]
        assert "schema is at revision 0001" in " ".join(out.split())
        assert sql(bare, "select version_num from alembic_version") == [("0001",)]

    def test_a_store_that_never_ran_is_not_checked(self, tiertune, tmp_path):
        """Its file alone tells no address; nothing is wrong with it, as far as one can see."""
        (tmp_path / "s.yaml").write_text(STORE.format(folder=tmp_path))
        code, out, _ = tiertune("doctor", "--config", tmp_path / "s.yaml")
        assert code == 0
        assert "not checked: store host-a: it has not served on this host" in " ".join(out.split())

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (("--storage", "gopher://x"), "--storage: expected a redis://"),
            (("--storage", "file:///", "--chunk", "many"), "--chunk: 'many' is not understood"),
            (("--storage", "file:///nowhere-at-all", "--model", "gpt"), "--model: unknown name 'gpt'"),
            (("--storage", "file:///", "--gpu", "abacus"), "--gpu: unknown name 'abacus'"),
            (("--storage", "file:///", "--chunk", "0"), "--chunk: at least 64.0 KiB"),
            (("--storage", "file:///", "--chunk", "4KiB"), "less tells no bandwidth"),
            (("--storage", "file:///", "--chunk", "100TiB"), "at most 4.0 GiB"),
            (("--agent", "nonsense"), "--agent: write the agent's address as http://host:port"),
            (("--engine", "engine:8000"), "write an engine's address as http://host:port"),
            (("--engine", "http://user:word@engine:8000"), "no user and no password"),
            (("--config", "nowhere.yaml"), "nowhere.yaml: cannot be read"),
        ],
    )
    def test_wrong_usage_is_exit_2(self, tiertune, arguments, said):
        """One message that says what to mend."""
        code, _, err = tiertune("doctor", *arguments)
        assert (code, said in err) == (2, True), err


class TestStorage:
    def test_a_folder_is_measured_and_left_as_it_was(self, tiertune, tmp_path):
        """Latency, bandwidth and the break-even; exit 0 where fetching wins, and nothing stays behind."""
        (tmp_path / "tier").mkdir()
        code, out, err = tiertune(
            *("doctor", "--storage", f"file://{tmp_path}/tier", "--chunk", "1MiB", "--chunks", 2),
            *("--model", "llama-3-8b", "--gpu", "a10", "--prompt-tokens", 1, "--json", tmp_path / "d.json"),
        )
        told = json.loads((tmp_path / "d.json").read_text())["storage"]
        assert (err, told["problem"]) == ("", "")
        assert told["bytes_per_s"] > 0
        assert told["latency_s"] > 0
        assert code == int(told["fetch_s"] >= told["recompute_s"])
        assert "break-even" in out
        assert list((tmp_path / "tier").iterdir()) == []

    def test_a_folder_that_is_away_is_found(self, tiertune, tmp_path):
        """It is not made: exit 1 and what failed."""
        code, out, _ = tiertune("doctor", "--storage", f"file://{tmp_path}/away")
        assert (code, "write: error" in out) == (1, True)
        assert not (tmp_path / "away").exists()

    def test_what_was_measured_is_weighed_by_the_closed_form(self):
        """A token of llama-3-8b is 128 KiB: at 1 GB/s 8,000 of them take 1.05 s and a latency; an H100 needs 0.27 s."""
        timed = StorageTimes("file:///x", 8 << 20, 4, "", 0.001, 0.001, 0.001 + (8 << 20) / 1e9, 0.02)
        told = weighed(timed, model="llama-3-8b", gpu="h100", prompt_tokens=8000)
        assert told.bytes_per_s == pytest.approx(1e9)
        assert told.fetch_s == pytest.approx(0.001 + 8000 * 131072 / 1e9)
        assert told.recompute_s == pytest.approx((2 * 8.03e9 * 8000 + 2 * 32 * 4096 * 8000**2) / (989e12 / 2))
        per_token, linear, quadratic = 131072 / 1e9, 2 * 8.03e9 / (989e12 / 2), 2 * 32 * 4096 / (989e12 / 2)
        assert told.break_even_tokens == pytest.approx((per_token - linear) / quadratic)


@pytest.mark.real
def test_a_redis_is_measured_and_left_as_it_was(tiertune, tmp_path):
    """The tier of a store itself: its chunks, by its windows; other keys stay as they are."""
    with redis_server() as server:
        code, out, err = tiertune(
            "doctor", "--storage", server.url, "--chunk", "2MiB", "--chunks", 2, "--json", tmp_path / "d.json"
        )
        told = json.loads((tmp_path / "d.json").read_text())["storage"]
        assert (err, told["problem"]) == ("", "")
        assert told["bytes_per_s"] > 0
        assert code in (0, 1)
        assert "break-even" in out
        with redis.Redis(port=server.port) as raw:
            assert raw.dbsize() == 0


@pytest.mark.real
def test_a_redis_without_its_password_is_told_where_to_give_it(tiertune, monkeypatch):
    """The mend names the variable, and with that it is measured."""
    with redis_server(options=["--requirepass", "a long password"]) as server:
        asked = ("doctor", "--storage", f"redis://127.0.0.1:{server.port}/0", "--chunk", "64KiB", "--chunks", 1)
        assert "TIERTUNE_REMOTE_PASSWORD" in tiertune(*asked)[1]
        monkeypatch.setenv("TIERTUNE_REMOTE_PASSWORD", "a long password")
        assert "break-even" in tiertune(*asked)[1]


@pytest.mark.real
@pytest.mark.slow
def test_a_real_fleet_with_a_stopped_redis_and_two_seeds(tiertune, tmp_path):
    """Two stores on one Redis, an engine at each with another PYTHONHASHSEED; then Redis hangs: all of it is named."""
    with short_folder() as one, short_folder() as two, redis_server(policy="noeviction") as server:
        remote = f'remote: {{url: "{server.url}", timeout: 3s, probe_every: 0.2s}}\n'
        stores, clients, files = [], [], []
        try:
            for seed, folder in enumerate((one, two)):
                text = STORE.format(folder=folder).replace("host-a", f"host-{seed}") + remote
                files += ["--config", folder / "store.yaml"]
                files[-1].write_text(text)
                stores.append(StoreProcess(parse_yaml(text, StoreSettings, name="store.yaml")))
                stores[-1].start()
                space = Namespace(model="llama", weights="w", hash_algorithm="xxhash", hash_seed=str(seed))
                clients.append(
                    StoreClient(
                        folder / "s.sock", space, chunk_bytes=65536, chunk_tokens=256, engine=f"e{seed}", stage="all"
                    )
                )
                assert clients[-1].connect()

            def told():
                code = tiertune("doctor", *files, "--json", tmp_path / "d.json")[0]
                found = json.loads((tmp_path / "d.json").read_text())["findings"]
                return code, {finding["check"]: finding for finding in found}

            code, found = told()
            assert code == 1
            assert set(found) - {"gpus_unseen"} == {"namespaces_differ", "remote_keeps_all"}
            assert "e0 at host-0 | e1 at host-1" in found["namespaces_differ"]["wrong"]
            assert "differ in hash_seed" in found["namespaces_differ"]["wrong"]
            assert "PYTHONHASHSEED" in found["namespaces_differ"]["mend"]
            server.process.send_signal(signal.SIGSTOP)
            eventually(lambda: all(each.store.health.told("remote")[0] == "dead" for each in stores))
            code, found = told()
            assert code == 1
            assert {"namespaces_differ", "tier_dead", "remote_unreachable"} <= set(found)
        finally:
            server.process.send_signal(signal.SIGCONT)
            for client in clients:
                client.close()
            for store in stores:
                store.stop()
