"""The store's HTTP: what each path answers, and to what it does not."""

import asyncio
import base64
import json
import re
import socket
import sys
from contextlib import suppress
from types import SimpleNamespace
from unittest.mock import Mock
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families

from connector.store.serving import serving
from connector.stores import (
    CHUNK_BYTES,
    CHUNK_TOKENS,
    NAMESPACE,
    PATIENCE_S,
    STRIDE,
    Engine,
    Http,
    at_once,
    chain,
    eventually,
    pool,
    running,
)
from tiertune_connector.catalogue import BY_NAME, METRICS, PREFIX
from tiertune_connector.keys import tenant_digest
from tiertune_connector.protocol.messages import Report, StepReport, TierReport
from tiertune_connector.settings import HttpSettings
from tiertune_connector.state import StateDir
from tiertune_connector.tiers.base import Outcome

pytestmark = pytest.mark.slow
IPV6 = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")

DIGEST = NAMESPACE.digest


@pytest.fixture
def store(home, remote):
    with serving(home, remote, disk="2MiB") as process:
        yield process


@pytest.fixture
def traffic(store, http):
    """Something of everything has happened."""
    with Engine(store) as engine:
        eventually(lambda: pool(store).provisioned == 64)
        keys = chain("k", 70)
        engine.find(keys)
        engine.put(keys[:40])
        engine.put(keys[40:])
        engine.put(chain("more", 20))
        engine.find(keys)
        engine.get(keys[:10])
        report = TierReport("remote", 3, 48, 48, "cheaper", 0.1, 0.5, 0.2, "won")
        lost = TierReport("disk", 3, 48, 48, "cheaper", 0.1, 0.15, 0.2, "late", vain_tokens=48)
        engine.client.tell(Report([report, lost]))
        engine.client.report_steps([StepReport("all", "prefill", 0.25, 100)])
        engine.find(keys)
        eventually(lambda: all(lane.writers.queued() == 0 for lane in store.store.lanes.values()))
        asked = {"stage": "all", "tier": "dram"}
        eventually(lambda: http.total("tier_lookup_tokens_total", **asked) == 3 * 70 * CHUNK_TOKENS)  # it comes last
        yield engine


# -- reading


def test_metrics_are_what_the_catalogue_says(http, traffic):
    """Prometheus's own parser reads them; every family is declared, with its labels and the store's name."""
    families = list(text_string_to_metric_families(http.text("/metrics")))
    assert {family.name for family in families} == {(PREFIX + m.name).removesuffix("_total") for m in METRICS}
    with_values = 0
    for family in families:
        name = family.name.removeprefix(PREFIX)
        metric = BY_NAME.get(name) or BY_NAME[name + "_total"]
        assert family.type == metric.kind
        for sample in family.samples:
            labels = {"store", *metric.labels} | ({"le"} if sample.name.endswith("_bucket") else set())
            assert set(sample.labels) == labels
            assert sample.labels["store"] == "host-a"
        with_values += bool(family.samples)
    assert with_values > 25


def test_metrics_come_as_openmetrics_too(http):
    """For a scraper that prefers it."""
    answer = http.raw("GET", "/metrics", b"", accept="application/openmetrics-text; version=1.0.0")
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


@pytest.mark.parametrize(("version", "kind"), [('"1.0.0"', "application/openmetrics-text"), ("1.x", "text/plain")])
def test_metrics_come_to_whoever_asks_otherwise(http, version, kind):
    """A version may be quoted (RFC 9110); who asks for none that there is gets the oldest form."""
    answer = http.raw("GET", "/metrics", b"", accept=f"application/openmetrics-text;version={version}")
    assert (answer.status_code, answer.headers["content-type"].partition(";")[0]) == (200, kind)


def test_metrics_name_no_tenant(http, store):
    """Neither salt nor digest, while it is asked, refused for its quota, and flushed; both forms, however spelt."""
    salt = "acme-corporation"
    tenant = tenant_digest(salt, b"key of the fleet")
    http.retune(tenants={tenant.hex(): {"quota_bytes": 4 * CHUNK_BYTES}})
    with Engine(store) as engine:
        engine.client.lookup("r", chain("a", 6), prompt_tokens=96, tenant=tenant).result(10)
        assert engine.put(chain("a", 6), tenant=tenant) == [""] * 4 + ["over_quota"] * 2
        assert http.get("/v1/status")["tenants"].keys() == {tenant.hex()}, "the status names it, for operators"
        assert http.post("/v1/flush", {"tenant": tenant.hex()}).status_code == 200
    eventually(lambda: http.total("requests_total", salted="yes") == 1)  # counted behind the answer
    assert http.total("quota_refused_chunks_total") == 2
    for accept in ("text/plain", "application/openmetrics-text; version=1.0.0"):
        told = http.raw("GET", "/metrics", b"", accept=accept).text
        spellings = (salt, tenant.hex(), tenant.hex(":"), base64.b64encode(tenant).decode(), repr(tenant)[2:-1])
        assert "tiertune_quota_refused_chunks_total{" in told
        assert not [one for one in spellings if one.lower() in told.lower()]
        assert not re.search(r"[{,](tenant|cache_salt|salt)=", told)


def both(http):
    """Counters and metrics of one moment: nothing, such as a probe, was counted between the two answers."""
    before, text = http.get("/v1/counters"), http.text("/metrics")
    while counted(after := http.get("/v1/counters")) != counted(before):
        before, text = after, http.text("/metrics")
    return before, text


def counted(table):
    return {name: rows for name, rows in table["metrics"].items() if BY_NAME[name].kind != "gauge"}


def test_counters_agree_with_metrics(http, traffic):
    """The compact form tells the same numbers, rows as long as their labels say."""
    table, text = both(http)
    assert (table["store"], table["since"], table["tuning_version"], table["bypass"]) == ("host-a", None, 1, False)
    told = {family.name: family for family in text_string_to_metric_families(text)}
    for name, rows in table["metrics"].items():
        metric = BY_NAME[name]
        assert rows["labels"] == list(metric.labels)
        samples = told[(PREFIX + name).removesuffix("_total")].samples
        for row in rows["rows"]:
            labels = dict(zip(metric.labels, row, strict=False)) | {"store": "host-a"}
            if metric.kind == "counter":
                assert [s.value for s in samples if s.labels == labels] == [row[-1]]
            elif metric.kind == "histogram":
                buckets, _, count = row[len(metric.labels) :]
                assert len(buckets) == len(metric.buckets) + 1
                assert sum(buckets) == count
                assert [s.value for s in samples if s.labels == labels and s.name.endswith("_count")] == [count]


def test_counters_since_tell_what_changed(http, store, traffic):
    """Rows that moved after the answer named; a number that is none is refused."""
    seq = http.get("/v1/counters")["seq"]
    traffic.client.report_steps([StepReport("all", "decode", 0.5, 7)])
    traffic.heard()  # to ask for counters until they tell would use up the numbers that are remembered
    answer = http.get("/v1/counters", since=seq)
    assert answer["since"] == seq < answer["seq"]
    assert answer["metrics"]["stage_tokens_total"]["rows"] == [["all", "decode", 7.0]]
    assert "prompt_tokens_total" not in answer["metrics"]
    assert "prompt_tokens_total" in http.get("/v1/counters", since=10**17)["metrics"]
    for nonsense in ("x", "-1", "1.5", "9" * 5000, "", "²"):
        answer = http._http.get("/v1/counters", params={"since": nonsense})
        assert (answer.status_code, answer.json()["field"]) == (422, "since")


def test_numbers_of_the_traffic(http, store, traffic):
    """Tokens asked, gates, saved and lost seconds, evictions."""
    assert http.total("prompt_tokens_total", stage="all", namespace=DIGEST, model="llama") == 3 * 70 * 16
    assert http.total("gate_requests_total", tier="remote", decision="fetch", reason="cheaper") == 1
    assert http.total("gate_candidate_bytes_total", tier="remote") == 3 * traffic.chunk_bytes
    assert http.total("saved_seconds_total", tier="remote") == pytest.approx(0.3)
    assert http.total("lost_seconds_total", tier="disk") == pytest.approx(0.2), "waited, and recomputed all the same"
    assert http.total("gate_outcomes_total", tier="disk", outcome="late") == 1
    assert http.total("tier_evictions_total", tier="dram", algorithm="lru", reason="room") > 0
    assert http.total("tier_resident_bytes", tier="dram") == len(pool(store).pool) * STRIDE > 0
    for state in ("desired", "effective"):
        assert http.total("tier_capacity_bytes", tier="dram", state=state) == 64 * STRIDE
    assert http.total("tier_transfer_bytes_total", tier="remote", operation="write") > 0
    assert http.total("tier_health", tier="remote", state="ok") == http.total("tier_health", tier="remote") == 1
    assert http.total("tier_errors_total") == 0
    assert http.total("clients") == 1


def test_status_tells_tiers_pools_and_clients(http, store, traffic):
    """Health with its reason, desired, applied and effective."""
    status = http.get("/v1/status")
    assert (status["store"], status["boot_id"], status["bypass"]) == ("host-a", store.server.boot_id, False)
    assert {tier: told["health"] for tier, told in status["tiers"].items()} == dict.fromkeys(
        ("dram", "disk", "remote"), "ok"
    )
    pool = status["pools"][DIGEST]
    assert (pool["model"], pool["chunk_bytes"]) == ("llama", traffic.chunk_bytes)
    assert pool["dram"]["desired"] == {"capacity_bytes": None, "eviction": "lru"}
    assert pool["dram"]["effective"] == {"capacity_bytes": 64 * STRIDE, "eviction": "lru"}
    assert pool["dram"]["chunks"] * STRIDE == pool["dram"]["resident_bytes"]
    slots = (2 << 20) // (6 * 4096)
    assert (
        pool["disk"]["applied"] == pool["disk"]["effective"] == {"capacity_bytes": slots * 6 * 4096, "eviction": "lru"}
    )
    assert [client["engine"] for client in status["clients"]] == ["engine-0"]


def test_a_tier_that_raises_when_its_usage_is_asked_hides_nothing_else(http, remote, monkeypatch):
    """Else an agent would take the whole store for unreachable: its windows and its tuning."""

    def raises():
        raise ValueError("a tier must not do this")

    monkeypatch.setattr(remote, "usage", raises)
    tiers = http.get("/v1/status")["tiers"]
    assert tiers["remote"] == {
        "health": "ok",
        "reason": "",
        **dict.fromkeys(("resident_bytes", "capacity_bytes", "chunks")),
    }
    assert tiers["disk"]["resident_bytes"] is not None
    assert http.total("internal_errors_total", place="usage") == 1


def test_health_tells_of_a_socket_that_was_removed(http, store):
    """Engines that are there are served; no other can come, as if there were no store."""
    store.server.path.unlink()
    told = f"socket: {store.server.path} was removed: engines that come find no store until it is started anew\n"
    assert http.text("/healthz") == f"ok\n{told}"


def test_health_is_200_and_tells_what_is_not_well(http, store, remote, monkeypatch):
    """A dead remote is no reason to end the store; nor does a bypass hide it."""
    eventually(lambda: http.total("probes_total", tier="remote") == 1)
    health = store.store.health
    probe = health.probe
    monkeypatch.setattr(health, "probe", lambda: False)  # the store's own, every second of a remote that is not well
    assert http.text("/healthz") == "ok\n"
    remote.fault = lambda _: Outcome.ERROR
    for _ in range(3):
        probe()
    assert http.text("/healthz") == "ok\nremote: dead: 3 operations in a row ended in error\n"
    assert http.get("/v1/status")["tiers"]["remote"]["health"] == "dead"
    http.post("/v1/bypass", {"on": True})
    tiers = http.get("/v1/status")["tiers"]
    assert [tiers[tier]["health"] for tier in ("dram", "disk", "remote")] == ["bypassed", "bypassed", "dead"]


# -- tuning


def test_a_change_needs_its_preconditions(http):
    """428 without a version or a key, 412 for another version, or for what is none; nothing is changed."""
    document = http.get("/v1/tuning")
    body = json.dumps(document).encode()
    for headers in ({}, {"If_Match": '"1"'}, {"Idempotency_Key": "k"}):
        assert http.raw("PUT", "/v1/tuning", body, **headers).status_code == 428
    for nonsense in ("abc", "*", '"' + "9" * 5000 + '"'):
        answer = http.raw("PUT", "/v1/tuning", body, If_Match=nonsense, Idempotency_Key="k")
        assert answer.status_code == 412
    assert http.put(document, 7, "k").status_code == 412
    assert http.get("/v1/tuning") == document


def test_a_change_answers_with_what_is_in_force_and_a_key_stands_for_one(http):
    """The effective document, its version as ETag; the same again is the same answer, another under the key 409."""
    document = http.get("/v1/tuning")
    document["tiers"]["remote"]["margin"] = 2.0
    for _ in range(2):
        answer = http.put(document, 1, "k")
        assert (answer.status_code, answer.headers["etag"]) == (200, '"2"')
        assert answer.json() == document | {"version": 2} == http.get("/v1/tuning")
    document["tiers"]["remote"]["margin"] = 3.0
    assert http.put(document, 2, "k").status_code == 409
    assert http.get("/v1/tuning")["tiers"]["remote"]["margin"] == 2.0


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"tiers": {"dram": {"capacity_bytes": -5}}}, "tiers.dram.capacity_bytes"),
        ({"tiers": {"dram": {"capacity_bytes": 5}, "remote": {"fetch": "maybe"}}}, "tiers.remote.fetch"),
        ({"bypas": True}, "bypas"),
        ({"pools": {"x": {}}}, "pools.x"),
    ],
)
def test_a_wrong_field_is_named_and_nothing_is_applied(http, change, field):
    """422; the capacity that stood beside it is not in force either."""
    before = http.get("/v1/tuning")
    answer = http.put(before | change, 1, "k")
    assert (answer.status_code, answer.json()["field"]) == (422, field)
    assert answer.json()["message"]
    assert http.get("/v1/tuning") == before


def test_a_field_that_stands_twice_is_named_and_nothing_is_applied(http, traffic):
    """As in files of settings and policies: one of them would be dropped unseen."""
    for method, path, body, field in (
        ("PUT", "/v1/tuning", b'{"tiers": {"dram": {"capacity_bytes": 0, "capacity_bytes": 9}}}', "capacity_bytes"),
        ("POST", "/v1/flush", b'{"epoch": 7, "epoch": null}', "epoch"),
        ("POST", "/v1/bypass", b'{"on": false, "on": true}', "on"),
    ):
        answer = http.raw(method, path, body, If_Match='"1"', Idempotency_Key="k")
        told = {"field": field, "message": "the field stands here a second time"}
        assert (answer.status_code, answer.json()) == (422, told)
    assert http.get("/v1/tuning")["version"] == 1
    assert http.get("/v1/status")["pools"][DIGEST]["dram"]["chunks"] > 0


def test_of_changes_at_once_one_wins(http, store):
    """All for the same version: exactly one is applied, the others are told."""
    document, codes = http.get("/v1/tuning"), []

    def put(number: int) -> None:
        mine = document | {"tiers": document["tiers"] | {"dram": {"capacity_bytes": number}}}
        other = Http(store.address)
        codes.append((other.put(mine, 1, f"k{number}").status_code, number))
        other.close()

    at_once(put, 8)
    assert sorted(code for code, _ in codes) == [200] + [412] * 7
    (winner,) = [number for code, number in codes if code == 200]
    assert http.get("/v1/tuning")["tiers"]["dram"]["capacity_bytes"] == winner


# -- bad requests


BAD_BODIES = [
    b"{", b"[]", b"5", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"on": "maybe", "namespace": 5}', b'{"nonsense": 1}',
    b"{" + b" " * (1 << 20) + b"}",
]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), [("PUT", "/v1/tuning"), ("POST", "/v1/flush"), ("POST", "/v1/bypass")])
def test_a_bad_body_is_422_and_nothing_happens(http, traffic, method, path):
    """Never a server error."""
    for body in BAD_BODIES:
        answer = http.raw(method, path, body, If_Match='"1"', Idempotency_Key="k")
        assert answer.status_code == 422, answer.text
        assert answer.json()["message"]
    assert http.get("/v1/tuning")["version"] == 1
    assert http.get("/v1/status")["pools"][DIGEST]["dram"]["chunks"] > 0


def test_a_state_directory_without_room_is_told(http, monkeypatch):
    """507 with the file and the reason, and what holds: a bypass, but no tuning."""
    tuning = json.dumps(http.get("/v1/tuning")).encode()
    monkeypatch.setattr(StateDir, "write", Mock(side_effect=OSError(28, "No space left on device")))
    for method, path, body, said in (
        ("PUT", "/v1/tuning", tuning, "nothing was changed"),
        ("POST", "/v1/bypass", b'{"on": true}', "bypass is on, until the store is started anew"),
    ):
        answer = http.raw(method, path, body, If_Match='"1"', Idempotency_Key="k")
        assert (answer.status_code, "No space left on device" in answer.json()["message"]) == (507, True)
        assert said in answer.json()["message"]
    assert http.get("/v1/status")["bypass"]


@pytest.mark.parametrize(("method", "path"), [("PUT", "/v1/tuning"), ("POST", "/v1/flush"), ("POST", "/v1/bypass")])
def test_a_page_of_another_site_cannot_command(http, traffic, method, path):
    """Browsers tell where a call comes from, and send a text without asking; a name of their own leads nowhere."""
    evil = {"Origin": "http://evil.example"}
    for headers, code in ((evil, 403), ({**evil, "Host": "evil.example"}, 400), ({"Host": "evil.example"}, 400)):
        answer = http.raw(method, path, b'{"on": true}', **headers, Content_Type="text/plain")
        assert answer.status_code == code
    status = http.get("/v1/status")
    assert status["bypass"] is False
    assert status["pools"][DIGEST]["dram"]["chunks"] > 0


def test_a_flush_that_is_mistyped_drops_nothing(http, traffic):
    """It does not become a flush of everything."""
    for field, value in (
        ("namespace", "x"),
        ("tenant", "A" * 32),
        ("epoch", -1),
        ("epoch", True),
        ("epoch", "0"),
        ("everything", 1),
    ):
        answer = http.post("/v1/flush", {field: value})
        assert (answer.status_code, answer.json()["field"]) == (422, field)
    answer = http.raw("POST", f"/v1/flush?tenant={'0' * 32}", b"")
    assert (answer.status_code, "in the body" in answer.json()["message"]) == (422, True)
    assert http.get("/v1/status")["pools"][DIGEST]["dram"]["chunks"] > 0


def test_other_paths_and_methods_are_not_served(http):
    """404 and 405."""
    assert http.raw("GET", "/v1/nothing", b"").status_code == 404
    assert http.raw("DELETE", "/v1/tuning", b"").status_code == 405
    assert http.raw("GET", "/v1/flush", b"").status_code == 405


def test_the_address_is_written_down_for_others(home, store):
    """A store on a free port tells it in its state directory."""
    assert (home / "state" / "http").read_text().strip() == store.address


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=IPV6)])
def test_an_answer_does_not_wait_for_its_head_to_be_acknowledged(host):
    """On a connection that is kept the caller's system puts that off by 40 ms."""

    async def delays():
        accepted = asyncio.Future()
        settings = HttpSettings(host=host, port=0)
        listener = settings.listen()
        server = await asyncio.start_server(lambda _, writer: accepted.set_result(writer), sock=listener)
        async with server:
            _, ours = await asyncio.open_connection(*listener.getsockname()[:2])
            theirs = await accepted
            at_once = theirs.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            ours.close()
            theirs.close()
        return not at_once

    assert not asyncio.run(delays())


def place(store):
    """Host and port of its HTTP."""
    parts = urlsplit(store.address)
    return parts.hostname, parts.port


@pytest.mark.parametrize("head", ["GET /healthz?", "GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX: "])
def test_a_head_without_end_ends_its_connection(tmp_path, monkeypatch, head):
    """Also where vLLM's environment has a parser that would keep all of it: 80 MB were seconds without an answer."""

    class Endless(asyncio.Protocol):
        """What uvicorn would choose by itself."""

        def __init__(self, **_):
            pass

    monkeypatch.setitem(sys.modules, "uvicorn.protocols.http.auto", SimpleNamespace(AutoHTTPProtocol=Endless))
    with running(tmp_path) as store, socket.create_connection(place(store)) as caller:
        caller.settimeout(PATIENCE_S)
        with suppress(ConnectionError):
            caller.sendall(head.encode() + b"a" * (1 << 20))
            while caller.recv(4096):
                pass


@IPV6
def test_an_address_of_ipv6_can_be_called(tmp_path):
    """It is written down as a URL has it, in brackets."""
    with running(tmp_path, http={"host": "::1", "port": 0}) as other:
        told = (tmp_path / "state" / "http").read_text().strip()
        assert (told, told.startswith("http://[::1]:")) == (other.address, True)
        with Http(told) as http:
            assert http.text("/healthz") == "ok\n"
