"""A flush reaches what engines keep by themselves: first the engines, then the stores, acknowledged one by one."""

from dataclasses import replace

import httpx
import pytest

from agent.agents import client_of
from agent.engine_server import fake_engine
from agent.test_cli import served  # noqa: F401 (a fixture)
from e2e.servers import app_served
from tiertune_agent.credentials import Access
from tiertune_agent.engines import BUSY, NO_ENDPOINT, PATIENCE_S, Engines, shown
from tiertune_agent.records import Rates
from tiertune_agent.settings import AgentSettings
from tiertune_connector.documents import DocumentError, parse_yaml


class Time:
    """Passes when slept."""

    def __init__(self):
        self.now, self.naps = 0.0, 0

    def sleep(self, seconds):
        self.now, self.naps = self.now + seconds, self.naps + 1


@pytest.fixture
def passing():
    return Time()


def reset(engine, passing):
    return Engines([engine.url], clock=lambda: passing.now, sleep=passing.sleep).reset()[engine.url]


class TestReset:
    def test_an_idle_engine_acknowledges_at_once(self, passing):
        """Staging is emptied with the GPU's cache: the connector's part is asked for."""
        with fake_engine() as engine:
            assert reset(engine, passing) == {"ok": True, "reason": "ok"}
            assert engine.resets == ["reset_external=true"]
        assert passing.naps == 0

    def test_a_busy_engine_is_asked_again(self, passing):
        """Until its requests have ended."""
        with fake_engine(running=3) as engine:
            assert reset(engine, passing)["ok"]
            assert len(engine.resets) == 4

    def test_one_that_stays_busy_is_told(self, passing):
        """After a bounded time, with what to do."""
        with fake_engine(running=10_000) as engine:
            assert reset(engine, passing) == {"ok": False, "reason": BUSY}
        assert passing.now == pytest.approx(PATIENCE_S)

    def test_an_engine_that_takes_long_to_refuse_is_asked_no_longer(self, passing):
        """Its answers are in the bounded time, too: it first waits for its transfers under way."""
        asked = []

        def refuse(request):
            asked.append(request)
            passing.now += 2.0
            return httpx.Response(200, json={"success": False})

        access = Access(transport=httpx.MockTransport(refuse))
        engines = Engines(["http://e:8000"], access, clock=lambda: passing.now, sleep=passing.sleep)
        assert engines.reset() == {"http://e:8000": {"ok": False, "reason": BUSY}}
        assert (len(asked), passing.now < PATIENCE_S + 2.0) == (3, True)

    def test_one_without_the_endpoint_is_told_how_to_have_it(self, passing):
        """vLLM has it in its development mode alone."""
        with fake_engine(dev_mode=False) as engine:
            assert reset(engine, passing) == {"ok": False, "reason": NO_ENDPOINT}
        assert "VLLM_SERVER_DEV_MODE=1" in NO_ENDPOINT

    @pytest.mark.parametrize(
        ("answer", "reason"),
        [
            (httpx.Response(200), "what answers is no engine"),
            (httpx.Response(500, text="no"), "answered 500"),
            (httpx.Response(200, text="<html>"), "what answers is no engine"),
            (httpx.Response(200, json=[]), "what answers is no engine"),
        ],
    )
    def test_only_what_was_said_counts(self, answer, reason):
        """Whatever else is no acknowledgement."""
        network = httpx.MockTransport(lambda _: answer)
        assert Engines(["http://e:8000"], Access(transport=network)).reset()["http://e:8000"]["reason"] == reason

    @pytest.mark.parametrize("letter", ["\u00fc".encode(), "\u00fc".encode("latin-1")])
    def test_a_header_in_any_encoding_is_no_failure(self, letter):
        """As a proxy before an engine may add one: the engine acknowledged, and nothing is raised."""
        answer = httpx.Response(200, headers=[(b"Via", b"M" + letter + b"nchen")], json={"success": True})
        network = httpx.MockTransport(lambda _: answer)
        assert Engines(["http://e:8000"], Access(transport=network)).reset()["http://e:8000"]["ok"]

    def test_one_that_is_away_is_told(self):
        """And nothing is raised."""
        assert "no engine answers: " in Engines(["http://127.0.0.1:9"]).reset()["http://127.0.0.1:9"]["reason"]

    def test_the_key_is_of_our_own_variable_first(self):
        """Else vLLM's; none is shown where there is none."""
        assert shown({"TIERTUNE_ENGINE_KEY": "a", "VLLM_API_KEY": "b"}) == {"Authorization": "Bearer a"}
        assert shown({"VLLM_API_KEY": "b"}) == {"Authorization": "Bearer b"}
        assert shown({"OPENAI_API_KEY": "c"}) == {}
        assert shown({"TIERTUNE_ENGINE_KEY": "\n", "VLLM_API_KEY": "b\n"}) == {"Authorization": "Bearer b"}

    @pytest.mark.parametrize("key", ["s3cret\u00fc", "s3\ncret", "s3cret\x1b"])
    def test_a_key_that_no_header_can_hold_is_told_to_nobody(self, monkeypatch, key):
        """Only where it stands: what refuses to send it would say it."""
        monkeypatch.setenv("TIERTUNE_ENGINE_KEY", key)
        network = httpx.MockTransport(lambda _: httpx.Response(200, json={"success": True}))
        told = Engines(["http://e:8000"], Access(transport=network)).reset()["http://e:8000"]
        assert told == {"ok": False, "reason": "TIERTUNE_ENGINE_KEY: a key has visible ASCII characters alone"}


class TestAgent:
    @pytest.fixture
    def calls(self):
        return []

    @pytest.fixture
    def api(self, agents, store, calls):
        """An agent with one store and two engines, all of which note when they are called."""

        def handle(request):
            calls.append(f"{request.url.host}{request.url.path}")
            if request.url.host.startswith("engine"):
                return httpx.Response(200, json={"success": True})
            return store.handle(request)

        engines = ["http://engine-0:8000", "http://engine-1:8000"]
        return client_of(agents(store, engines=engines, network=httpx.MockTransport(handle)))

    def test_engines_come_before_stores(self, api, calls):
        """What an engine still had would be stored again in a store that is empty."""
        answer = api.post("/api/v1/flush", json={"engines": True})
        assert answer.json()["complete"] is True
        assert sorted(calls[:2]) == ["engine-0/reset_prefix_cache", "engine-1/reset_prefix_cache"]
        assert calls[2:] == ["host-a/v1/flush"]
        assert answer.json()["engines"]["http://engine-1:8000"] == {"ok": True, "reason": "ok"}

    def test_the_audit_row_says_that_engines_were_meant(self, api):
        """Who flushed engines can be told from who flushed stores alone."""
        api.post("/api/v1/flush", json={"engines": True})
        api.post("/api/v1/flush", json={})
        rows = api.get("/api/v1/audit").json()["audit"]
        assert [row["detail"] for row in rows if row["what"] == "flush"] == [{}, {"engines": True}]

    def test_a_flush_without_a_body_is_of_all_stores(self, api, calls):
        """As at a store itself: nothing named is nothing left out."""
        answer = api.post("/api/v1/flush")
        assert (answer.status_code, answer.json()["complete"], calls) == (200, True, ["host-a/v1/flush"])

    def test_what_is_named_after_a_question_mark_is_no_flush_of_everything(self, api, calls):
        """It is not read: a tenant's flush would be one of all tenants."""
        answer = api.post(f"/api/v1/flush?tenant={'ab' * 16}")
        assert (answer.status_code, "in the body" in answer.json()["detail"], calls) == (422, True, [])

    def test_without_the_word_engines_are_left_alone(self, api, calls):
        """Their caches are whole: a flush of one tenant need not cost all others theirs."""
        assert "engines" not in api.post("/api/v1/flush", json={"tenant": "ab" * 16}).json()
        assert calls == ["host-a/v1/flush"]


@pytest.mark.parametrize("turned", [False, True])
def test_commands_reach_both_of_two_stores_that_have_one_name(agents, clock, store, turned):
    """One is misnamed, and an incident says so: until it is mended, it is flushed and bypassed all the same."""
    calls = []

    def handle(request):
        calls.append(f"{request.url.host}{request.url.path}")
        return store.handle(request)

    stores = [{"url": "http://other:7410"}, {"url": f"http://{store.name}:7410", "name": store.name}]
    agent = agents(stores=stores[::-1] if turned else stores, network=httpx.MockTransport(handle))
    agent.loop.run_once()
    if turned:  # the other one is known, and the first does not answer
        clock.advance(15)
        agent.history.remember([(replace(agent.collector.collect()[0], url="http://other:7410"), Rates())])
    calls.clear()
    api = client_of(agent)
    flushed, bypassed = api.post("/api/v1/flush", json={}).json(), api.post("/api/v1/bypass", json={"on": True}).json()
    assert sorted(calls) == sorted(
        f"{host}/v1/{what}" for host in (store.name, "other") for what in ("bypass", "flush")
    )
    second = "http://other:7410" if turned else f"http://{store.name}:7410"
    assert sorted(flushed["stores"]) == sorted(bypassed["stores"]) == [store.name, second]
    assert flushed["complete"] is True


def test_an_agent_that_knows_no_engines_refuses(agent):
    """Nothing is flushed by halves: 404 says what the settings lack."""
    answer = client_of(agent).post("/api/v1/flush", json={"engines": True})
    assert answer.status_code == 404
    assert "name no engines" in answer.json()["detail"]


class TestCommand:
    @pytest.fixture
    def flush(self, agents, store, tiertune):
        """By command, at an agent with a store and one engine, which answers so."""

        def run(answer):
            network = httpx.MockTransport(lambda asked: answer if asked.url.host == "engine" else store.handle(asked))
            agent = agents(store, engines=["http://engine:8000"], network=network)
            agent.loop.run_once()
            with app_served(agent.served) as url:
                return tiertune.json("flush", "--engines", "--agent", url)

        return run

    def test_engines_and_stores_acknowledge(self, flush):
        """Each by its name: exit 0."""
        done, document = flush(httpx.Response(200, json={"success": True}))
        assert (done.returncode, document["complete"]) == (0, True)
        assert "http://engine:8000: its caches are empty" in done.stdout
        assert "host-a: flushed 7 in dram, 3 in remote" in done.stdout

    def test_one_that_does_not_acknowledge_is_exit_1(self, flush):
        """The stores are flushed all the same."""
        done, document = flush(httpx.Response(404))
        assert (done.returncode, document["complete"]) == (1, False)
        assert "VLLM_SERVER_DEV_MODE=1" in done.stdout
        assert "host-a: flushed" in done.stdout
        assert "not all stores and engines acknowledged" in done.stderr

    @pytest.mark.parametrize("wrong", [("--namespace", "abc"), ("--tenant", "AB" * 16)])
    def test_a_wrong_digest_empties_no_engine(self, agents, store, tiertune, wrong):
        """What the stores would refuse is refused before anything is done."""
        network = httpx.MockTransport(lambda request: pytest.fail(f"{request.url} was asked"))
        with app_served(agents(store, engines=["http://engine:8000"], network=network).served) as url:
            code, _, err = tiertune("flush", "--engines", *wrong, "--agent", url)
        assert code == 2
        assert wrong[0].strip("-") in err

    def test_engines_that_the_agent_does_not_know_are_exit_2(self, served, tiertune):  # noqa: F811
        """The message says how to name them."""
        code, _, err = tiertune("flush", "--engines")
        assert (code, "name no engines" in err) == (2, True)


@pytest.mark.parametrize("url", ["engine:8000", "http://", "http://a:b@engine:8000", "http://engine:8000/?x=1"])
def test_settings_take_addresses_alone(url):
    """What is none is an error at its place in the file."""
    text = f"stores: [{{url: 'http://127.0.0.1:7410'}}]\nengines: ['{url}']\n"
    with pytest.raises(DocumentError, match=r"agent.yaml:2:11: engines.0: "):
        parse_yaml(text, AgentSettings, name="agent.yaml")
