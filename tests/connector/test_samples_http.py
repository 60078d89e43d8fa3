"""Samples of a real store over HTTP, and the way to sample that its fleet gives it."""

import json

import pytest

from connector.stores import CHUNK_TOKENS, NAMESPACE, chain
from tiertune_connector.cost import ModelShape, PrefillCost
from tiertune_connector.protocol.reporting import prefill_line

DIGEST = NAMESPACE.digest
FLEET = {"seed": 3, "rate": 1.0, "hot": [], "version": 4}


def put(http, **changes):
    return http.raw("PUT", "/v1/sampling", json.dumps(FLEET | changes).encode())


def lines(http, since=""):
    header, *samples = map(json.loads, http.text(f"/v1/samples{since}").splitlines())
    return header, samples


def test_samples_come_as_json_lines(http, store, engine):
    """A header with the boot and where to go on, then every sample; all chunks at rate 1."""
    assert put(http).status_code == 200
    keys = chain("k", 5)
    engine.client.lookup("my request", keys, prompt_tokens=90, tenant=b"\x01" * 16).result(10)
    engine.heard()
    header, samples = lines(http)
    assert (header["boot_id"], header["next"], header["rate"], header["hash_seed"]) == (store.server.boot_id, 5, 1.0, 3)
    assert (header["hot_version"], header["dropped"]) == (4, 0)
    assert [sample["key"] for sample in samples] == [key.hex() for key in keys]
    assert [(sample["pos"], sample["chain_len"], sample["prompt_tokens"]) for sample in samples] == [
        (position, 5, 90) for position in range(5)
    ]
    assert {sample["tenant"] for sample in samples} == {"01" * 16}
    assert "my request" not in http.text("/v1/samples")
    assert lines(http, "?since=3")[1] == samples[3:]


def test_a_store_nobody_told_samples_one_in_a_hundred(http, engine):
    """And all requests count, sampled or not."""
    for index in range(40):
        engine.find(chain(f"r{index}", 100))
    engine.heard()
    header, samples = lines(http)
    assert (header["rate"], header["hot_version"]) == (0.01, 0)
    assert 10 < len(samples) < 90
    assert header["namespaces"][DIGEST]["requests"] == 40
    assert header["namespaces"][DIGEST]["chunks"] == 4000


def test_a_hot_chunk_is_sampled_whatever_its_hash(http, engine):
    """It is marked; the answer to the command is the version in force."""
    hot = chain("k", 3)
    answer = put(http, rate=1e-9, hot=[key.hex() for key in hot[:2]])
    assert answer.json() == {"version": 4}
    engine.find(hot)
    engine.heard()
    assert [(sample["pos"], sample["hot"]) for sample in lines(http)[1]] == [(0, True), (1, True)]


def test_a_stale_way_to_sample_is_412(http):
    """The same again is no error; an older one, or another of the same version, is."""
    assert put(http).status_code == put(http).status_code == 200
    for changes in ({"rate": 0.5}, {"version": 3}):
        answer = put(http, **changes)
        assert (answer.status_code, answer.json()["message"]) == (412, "sampling is at version 4")
    header, _ = lines(http)
    assert (header["hash_seed"], header["rate"], header["hot_version"]) == (3, 1.0, 4)


@pytest.mark.parametrize(
    "changes",
    [
        {"rate": 0}, {"rate": 1.5}, {"rate": "nan"}, {"seed": -1}, {"seed": 1 << 63}, {"version": 0}, {"version": "x"},
        {"hot": ["xyz"]}, {"hot": ["AB"]}, {"hot": ["a"]}, {"hot": ["ab" * 65]}, {"hot": ["ab"] * 1025}, {"more": 1},
    ],
)  # fmt: skip
def test_nonsense_is_422_and_changes_nothing(http, changes):
    """The field is named."""
    answer = put(http, **changes)
    assert answer.status_code == 422
    assert answer.json()["field"].split(".")[0] == next(iter(changes))
    assert lines(http)[0]["hot_version"] == 0


def test_a_since_that_is_no_number_is_422(http):
    """As with counters."""
    answer = http.raw("GET", "/v1/samples?since=x", b"")
    assert (answer.status_code, answer.json()["field"]) == (422, "since")


def test_a_bypassed_store_samples_nothing(http, engine):
    """Bypass is the way out of all that could do harm."""
    put(http)
    http.post("/v1/bypass", {"on": True})
    engine.find(chain("k", 3))
    engine.heard()
    assert lines(http)[1] == []


def test_status_tells_what_a_prefill_costs(http, engine):
    """From the engine's own line, which goes with its lookups."""
    pool = http.get("/v1/status")["pools"][DIGEST]
    assert (pool["chunk_tokens"], pool["prefill"]) == (CHUNK_TOKENS, None)
    cost = PrefillCost(ModelShape(8e9, 32, 4096), overhead_s=0.015, seconds_per_flop=2e-15, step_tokens=8192)
    engine.client.prefill = lambda: prefill_line(cost)
    engine.find(chain("k", 3))
    engine.heard()
    expected = {"overhead_s": 0.015, "seconds_per_flop": 2e-15, "params": 8e9, "layers": 32, "width": 4096}
    assert http.get("/v1/status")["pools"][DIGEST]["prefill"] == expected | {"step_tokens": 8192}


def test_a_cost_that_is_unknown_is_not_told():
    """An engine that has not prefilled yet says nothing, rather than nothing's cost."""
    assert prefill_line(PrefillCost()) is None
