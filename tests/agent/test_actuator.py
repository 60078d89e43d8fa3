"""The actuator: exactly once, with the expected version, and looked at afterwards."""

from dataclasses import replace

import httpx
import pytest

from agent.fakes import START, transport
from tiertune_agent.changes.actuator import Actuator
from tiertune_agent.collector.stores import StoreHttp
from tiertune_agent.credentials import Access
from tiertune_agent.fields import read, replaced
from tiertune_agent.records import Decision, State, Target

DECISION = Decision(
    id=1,
    key="k1",
    tuner="remote_fetch",
    target=Target("host-a", "remote"),
    field="tiers.remote.fetch",
    before="on",
    after="off",
    mode="auto",
    state=State.APPROVED,
    reason="it costs",
    evidence={},
    expected_version=1,
    applied_version=None,
    policy_revision=1,
    created_at=START,
    updated_at=START,
    approved_at=START,
    approved_by="policy",
    applied_at=None,
)


@pytest.fixture
def actuator(store):
    client = StoreHttp("http://host-a:7410", Access(transport=transport(store)))
    yield Actuator({"host-a": client}.get, list, lambda: None)
    client.close()


def test_a_change_is_made_and_nothing_else(actuator, store):
    """The field has its new value, the version is one higher, the rest of the document is as before."""
    before = store.tuning
    outcome = actuator.apply(DECISION)
    assert (outcome.state, outcome.version) == ("applied", 2)
    assert store.tuning == {**replaced(before, "tiers.remote.fetch", "off"), "version": 2}


def test_another_version_expires_the_decision(actuator, store):
    """Somebody changed the tuning since the evidence was read: nothing is sent."""
    store.tuning["version"] = 5
    outcome = actuator.apply(DECISION)
    assert outcome.state == "expired"
    assert "version 5, expected 1; tiers.remote.fetch is on" in outcome.reason
    assert store.puts == []


def test_another_value_of_the_same_version_expires_the_decision(actuator, store):
    """A store that was never tuned began anew with other settings, and with version 1 again: they stand."""
    field = "tiers.dram.capacity_bytes"
    store.tuning = replaced(store.tuning, field, 128)
    outcome = actuator.apply(replace(DECISION, field=field, before=64, after=96))
    assert outcome.state == "expired"
    assert f"{field} is 128" in outcome.reason
    assert (read(store.tuning, field), store.puts) == (128, [])


def test_a_change_between_reading_and_writing_expires_the_decision(actuator, store):
    """412: somebody was faster by a moment; theirs stands."""

    store.before_put = lambda: store.by_hand("bypass", True)
    outcome = actuator.apply(DECISION)
    assert outcome.state == "expired"
    assert "version 2, expected 1" in outcome.reason
    assert store.tuning["bypass"] is True
    assert read(store.tuning, "tiers.remote.fetch") == "on"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"after": "sideways"}, "the store refused: tiers.remote.fetch: Input should be 'on' or 'off'"),
        ({"field": "tiers.remote.colour"}, "the store refused: tiers.remote.colour: unknown field"),
    ],
)
def test_a_refused_document_fails_the_decision(actuator, store, change, said):
    """422: the store's own words are the reason, and nothing changed."""
    outcome = actuator.apply(replace(DECISION, **change))
    assert (outcome.state, outcome.reason) == ("failed", said)
    assert store.tuning["version"] == 1


def test_a_reused_key_fails_the_decision(actuator, store):
    """409: the key was used for another change."""
    store.keys["k1"] = {"something": "else"}
    outcome = actuator.apply(DECISION)
    assert outcome.state == "failed"
    assert "used for another change" in outcome.reason


def test_a_knob_without_effect_fails_the_decision(actuator, store):
    """Accepted is not enough: what reads back must be what was wished."""
    store.put_tuning = store.get_tuning
    outcome = actuator.apply(DECISION)
    assert outcome.state == "failed"
    assert "accepted without effect: tiers.remote.fetch reads back as on" in outcome.reason


def test_a_store_that_is_away_leaves_the_decision_in_flight(actuator, store):
    """No answer is no outcome."""
    store.up = False
    assert actuator.apply(DECISION).state == "approved"


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_store_that_lets_the_agent_change_nothing_fails_the_decision(actuator, store, status):
    """Its own words are the reason, with the status; and no attempt after it would end otherwise."""
    store.answers("put_tuning", status, json={"message": "agent has the role approve"})
    outcome = actuator.apply(DECISION)
    assert (outcome.state, outcome.reason) == ("failed", f"the store refused: {status}: agent has the role approve")
    store.tuning["tiers"]["remote"]["fetch"] = "off"
    assert actuator.undo(DECISION).reason == outcome.reason


@pytest.mark.parametrize("status", [302, 408, 429, 503])
def test_what_passes_leaves_the_decision_in_flight(actuator, store, status):
    """Another attempt may get around it; what is told is what the store answers."""
    store.answers("put_tuning", status, text="<html>")
    outcome = actuator.apply(DECISION)
    assert (outcome.state, outcome.reason) == ("approved", f"the store answers status {status}")


def test_a_store_that_is_not_to_be_read_leaves_the_decision_in_flight(actuator, store):
    """It says nothing of a change that may have arrived before."""
    store.answers("get_tuning", 401, json={"message": "no such token"})
    for outcome in (actuator.apply(DECISION), actuator.apply(DECISION, late="too late"), actuator.undo(DECISION)):
        assert (outcome.state, outcome.reason) == ("approved", "the store answers 401: no such token")


def test_what_rests_on_no_version_rests_on_its_field(actuator, store):
    """Other fields may have changed; in this very moment: it is in flight, and the next attempt makes it."""
    unversioned = replace(DECISION, expected_version=None)

    def faster():
        store.before_put = lambda: None
        store.by_hand("bypass", True)

    store.tuning["version"], store.before_put = 5, faster
    outcome = actuator.apply(unversioned)
    assert (outcome.state, outcome.reason) == ("approved", "the tuning changed meanwhile")
    assert actuator.apply(unversioned).state == "applied"
    assert store.tuning["bypass"] is True
    store.tuning["tiers"]["remote"]["fetch"] = "sideways"
    assert "tiers.remote.fetch is sideways" in actuator.apply(unversioned).reason


@pytest.mark.parametrize("late", ["", "it is too late"])
def test_a_lost_answer_is_found_out_about(actuator, store, late):
    """The change arrived, its answer did not: looking again, however late, finds it, and sends nothing twice."""
    store.lose_answers = True
    assert actuator.apply(DECISION).state == "approved"
    outcome = actuator.apply(DECISION, late=late)
    assert (outcome.state, outcome.version) == ("applied", 2)
    assert len(store.puts) == 1


@pytest.mark.parametrize(("late", "state", "puts"), [("", "applied", ["k1"]), ("too late", "expired", [])])
def test_a_change_that_never_arrived_is_made_again_with_its_key(actuator, store, late, state, puts):
    """Resumed in time, the same change under the same key is sent again; resumed too late, it expires."""
    assert actuator.apply(DECISION, late=late).state == state
    assert store.puts == puts


def test_an_unknown_store_expires_the_decision(actuator):
    """A store that left the settings is not looked for."""
    assert actuator.apply(replace(DECISION, target=Target("host-z", "remote"))).state == "expired"


def test_fields_are_replaced_without_touching_the_original():
    """A dotted field is replaced in a copy; missing parts of the way are made."""
    document = {"a": {"b": 1, "c": 2}}
    assert replaced(document, "a.b", 9) == {"a": {"b": 9, "c": 2}}
    assert replaced(document, "x.y", 9)["x"] == {"y": 9}
    assert document == {"a": {"b": 1, "c": 2}}
    assert read(document, "a.b.c") is None


@pytest.mark.parametrize("text", ["<html>", "[]", "3", '{"tiers": []}', 100_000 * "["])
def test_what_no_store_answers_leaves_open_what_became_of_it(actuator, store, text):
    """A page in its place after it took the change: it is found out about, as of one that does not answer."""
    told = store.get_tuning

    def broken(request):
        return httpx.Response(200, text=text) if store.puts else told(request)

    store.get_tuning = broken
    outcome = actuator.apply(DECISION)
    assert outcome.state == "approved"
    assert "answers what no store answers" in outcome.reason
    assert actuator.undo(DECISION).state == "approved"
    store.get_tuning = told
    assert actuator.apply(DECISION).state == "applied"
    assert len(store.keys) == 1
