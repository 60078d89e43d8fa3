"""Every write to a store leaves a trace: who, from where, what and when; in its log, and in its status."""

import json
import logging
import string
import threading
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.stores import PATIENCE_S, Http, eventually, running
from connector.test_tokens import FILE, READ, TUNE, bearer
from tiertune_connector.serve import writes
from tiertune_connector.serve.writes import MOST_FIELDS, changed
from tiertune_connector.state import StateDir

pytestmark = pytest.mark.slow

NAMESPACE = "ab" * 16
SAMPLING = {"seed": 1, "rate": 0.5, "hot": ["ab" * 8], "version": 1}


@pytest.fixture
def logged(caplog):
    """What the store's log has of writes."""
    caplog.set_level(logging.INFO)

    def lines():
        texts = [record.getMessage() for record in caplog.records if record.name.endswith("serve.writes")]
        return [json.loads(text.removeprefix("write ")) for text in texts if text.startswith("write ")]

    return lines


def told(http):
    return http.get("/v1/status")["writes"]


def test_every_write_leaves_a_trace(http, logged):
    """Bypass, flush and tuning in the status and the log; sampling, which nobody commands, in the log alone."""
    assert http.retune(tiers__dram__capacity_bytes=0).status_code == 200
    assert http.post("/v1/bypass", {"on": True}).status_code == 200
    assert http.post("/v1/flush", {"namespace": NAMESPACE}).status_code == 200
    assert http.raw("PUT", "/v1/sampling", json.dumps(SAMPLING).encode()).status_code == 200
    size = http.get("/v1/tuning")["tiers"]["dram"]["capacity_bytes"]
    kept = told(http)
    (tuning, *others) = [(write["what"], write["detail"]) for write in kept]
    assert tuning[0] == "tuning"
    assert tuning[1]["changed"]["version"] == [1, 2]
    assert tuning[1]["changed"]["tiers.dram.capacity_bytes"][1] == size == 0
    assert others == [("bypass", {"on": True}), ("flush", {"namespace": NAMESPACE})]
    assert {(write["who"], write["source"], write["status"]) for write in kept} == {("local", "127.0.0.1", 200)}
    assert [write["at"] for write in kept] == sorted({write["at"] for write in kept})
    assert logged()[:3] == kept
    assert [(line["what"], line["detail"]) for line in logged()[3:]] == [("sampling", {"version": 1, "rate": 0.5})]


def test_reading_leaves_none(http, logged):
    """Nor does a path where nothing can be written."""
    http.get("/v1/status")
    assert [http.post(path, {}).status_code for path in ("/v1/status", "/v1/nothing")] == [405, 404]
    assert (told(http), logged()) == ([], [])


def test_what_was_refused_is_logged_alone(http, logged):
    """It changed nothing."""
    assert http.post("/v1/bypass", {"on": "maybe"}).status_code == 422
    assert http.put({}, 7, "key").status_code == 412
    assert [(line["what"], line["status"]) for line in logged()] == [("bypass", 422), ("tuning", 412)]
    assert told(http) == []


def test_the_last_ones_stay_over_a_restart(home, monkeypatch):
    """So many, oldest first; an agent that comes later finds them."""
    monkeypatch.setattr(writes, "KEPT", 4)
    with running(home) as process, Http(process.address) as http:
        for number in range(7):
            http.post("/v1/flush", {"epoch": number})
        kept = told(http)
    assert [write["detail"]["epoch"] for write in kept] == [3, 4, 5, 6]
    with running(home) as process, Http(process.address) as http:
        assert told(http) == kept


def test_a_file_that_is_none_keeps_no_store_away(tmp_path):
    """What cannot be read is forgotten."""
    state = StateDir(tmp_path)
    for text in ("{", "{}", "\x00"):
        state.write("writes.json", text)
        assert state.kept("writes.json", list) == []
    state.close()


def test_a_disk_that_takes_nothing_stops_no_command(http, store, monkeypatch):
    """The write is done, answered and told; only a restart would forget it."""
    monkeypatch.setattr(store._state, "write", Mock(side_effect=OSError("no space")))
    assert http.post("/v1/flush", {}).status_code == 200
    assert [write["what"] for write in told(http)] == ["flush"]


def test_a_state_directory_that_hangs_holds_up_no_answer_for_long(http, store, monkeypatch, caplog):
    """Neither of a command nor, however many come, of who reads; one that no longer hangs has them all with the next.

    Each command would hold one of the threads on which everybody is answered, some forty in all.
    """
    hangs, real = threading.Event(), store._state.keep
    monkeypatch.setattr(store._state, "keep", lambda *kept: hangs.wait(PATIENCE_S) and real(*kept))
    monkeypatch.setattr(writes, "_PATIENCE_S", 0.01)
    for _ in range(50):
        assert http.post("/v1/flush", {}).status_code == 200
    assert http.text("/metrics")
    assert (len(told(http)), store._state.kept("writes.json", list)) == (50, [])
    assert "the last writes are not kept yet: the state directory does not answer" in caplog.text
    hangs.set()
    eventually(lambda: store._state.kept("writes.json", list))
    monkeypatch.setattr(writes, "_PATIENCE_S", PATIENCE_S)
    assert http.post("/v1/flush", {}).status_code == 200
    assert store._state.kept("writes.json", list) == told(http)


def test_a_holder_is_named_and_no_token_told(home, tmp_path, logged, caplog):
    """Whose token it was; the token itself stands neither in the log nor in the status."""
    path = tmp_path / "tokens"
    path.write_text(FILE)
    with running(home, http={"port": 0, "tokens_file": path}) as process, Http(process.address) as http:
        assert http._http.post("/v1/bypass", json={"on": True}, headers=bearer(READ)).status_code == 403
        assert http._http.post("/v1/bypass", json={"on": True}, headers=bearer(TUNE)).status_code == 200
        text = http.text("/v1/status")
    assert [(write["who"], write["source"]) for write in json.loads(text)["writes"]] == [("agent", "127.0.0.1")]
    assert [line["who"] for line in logged()] == ["agent"]
    assert TUNE not in text + caplog.text


def test_a_caller_cannot_write_lines_into_the_log(http, logged):
    """What it calls itself is cut, and every trace is a line of JSON."""
    http.raw("POST", "/v1/flush", b"{}", user_agent='x"' * 100)
    (line,) = logged()
    assert len(line["client"]) == 80


LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=3)
TREES = st.dictionaries(
    st.text(string.ascii_letters, min_size=1, max_size=3),
    st.recursive(LEAVES, lambda inner: st.dictionaries(st.text(string.ascii_letters, min_size=1), inner), max_leaves=9),
    max_size=6,
)


@given(TREES)
def test_nothing_changed_is_nothing_told(tree):
    """Equal documents differ nowhere."""
    assert changed(tree, tree) == {"changed": {}}


@given(st.integers(0, 40))
def test_of_many_fields_the_number_is_told(count):
    """As many as are told and as are not add up to all that changed."""
    found = changed({"pools": {str(n): 0 for n in range(count)}}, {"pools": {str(n): 1 for n in range(count)}})
    assert len(found["changed"]) <= MOST_FIELDS
    assert len(found["changed"]) + found.get("more", 0) == count
    assert all(name.startswith("pools.") and values == [0, 1] for name, values in found["changed"].items())
