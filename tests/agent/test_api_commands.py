"""The HTTP interface is commanded: each command with its audit, who may call, what is refused."""

import httpx
import pytest
from fastapi.testclient import TestClient

from agent.agents import POLICY
from agent.fakes import SLOW, fetch
from tiertune_agent.changes.operators import Caller
from tiertune_connector.httpd.guarded import REMARK

pytestmark = pytest.mark.slow


def test_an_approval_changes_the_store(http, api, proposed, store):
    """Approving makes the change, once, and is audited."""
    answer = api("decisions/1/approve", {})
    assert (answer["state"], answer["approved_by"], answer["to"]) == ("applied", "local", "off")
    assert fetch(store) == "off"
    again = http.post("/api/v1/decisions/1/approve")
    assert (again.status_code, again.json()["detail"]) == (409, "decision 1 is applied, not proposed")
    assert [row["what"] for row in api("audit")["audit"]] == ["approve", "approve"]


def test_a_rollback_sets_the_value_back(http, api, proposed, store):
    """What was approved is undone by number; it is audited, recorded, and says who did it."""
    http.post("/api/v1/decisions/1/approve")
    answer = api("decisions/1/rollback", {})
    assert (answer["state"], answer["rolled_back_by"]) == ("rolled_back", "local")
    assert fetch(store) == "on"
    told = api("decisions/1")
    assert [verdict["reason"] for verdict in told["verdicts"]] == ["rolled back by local"]
    assert api("audit")["audit"][0]["what"] == "rollback"


def test_a_rollback_is_refused_while_frozen(http, proposed, store):
    """A freeze holds also for what people undo."""
    http.post("/api/v1/decisions/1/approve")
    http.post("/api/v1/freeze", json={"reason": "release", "for": "2h"})
    assert http.post("/api/v1/decisions/1/rollback").status_code == 409
    assert fetch(store) == "off"


def test_a_rejection_changes_nothing(api, proposed, store):
    """Rejecting ends the decision and leaves the store alone."""
    assert api("decisions/1/reject", {})["state"] == "rejected"
    assert fetch(store) == "on"
    assert api("decisions", state="rejected")["decisions"][0]["id"] == 1
    assert api("decisions/1")["verdicts"] == []


def test_an_approval_is_refused_while_frozen(http, proposed, store):
    """A freeze holds also for what people approve."""
    http.post("/api/v1/freeze", json={"reason": "release", "for": "2h"})
    refused = http.post("/api/v1/decisions/1/approve")
    assert refused.status_code == 409
    assert "frozen by local until 2025-03-05 14:" in refused.json()["detail"]
    assert fetch(store) == "on"


def test_the_policys_calendar_holds_up_nobody_who_approves(api, proposed, store, rounds, policy_file):
    """It binds the agent; whoever approves a change then, or undoes it, has decided to. The page says when it is."""
    always = 'guard: {freeze: [{from: "00:00", to: "00:00"}], '
    policy_file.write_text(policy_file.read_text().replace("guard: {", always))
    rounds(1)
    assert api("fleet")["frozen"]["who"] == "policy"
    api("decisions/1/approve", {})
    assert fetch(store) == "off"
    assert api("decisions/1/rollback", {})["state"] == "rolled_back"
    assert fetch(store) == "on"


def test_an_approval_of_what_changed_meanwhile_expires(http, api, proposed, store, rounds):
    """A field that somebody set by hand since is not overwritten."""
    store.by_hand("tiers.remote.fetch", "off")
    rounds(1)
    assert http.post("/api/v1/decisions/1/approve").status_code == 409
    assert api("decisions/1")["state"] == "expired"


def test_a_proposal_made_to_observe_cannot_be_approved(http, store, rounds, policy_file):
    """Mode observe shows what it would do, and allows no change."""
    policy_file.write_text(POLICY.replace("mode: auto", "mode: observe"))
    store.bandwidth = SLOW
    rounds(3)
    refused = http.post("/api/v1/decisions/1/approve")
    assert (refused.status_code, fetch(store)) == (409, "on")
    assert "mode observe" in refused.json()["detail"]


def test_freeze_and_unfreeze(api):
    """A freeze shows in the fleet until lifted, and both commands are audited with their caller."""
    assert api("freeze", {"reason": "release"}) == {"frozen": True, "until": None}
    assert api("fleet")["frozen"]["reason"] == "release"
    assert api("unfreeze", {}) == {"frozen": False, "lifted": 1}
    assert api("fleet")["frozen"] is None
    audit = api("audit")["audit"]
    assert [(row["what"], row["who"]) for row in audit] == [("unfreeze", "local"), ("freeze", "local")]


def test_a_freeze_does_not_shorten_another(api):
    """What is answered is until when nothing changes, as the fleet tells it."""
    long = api("freeze", {"reason": "release", "for": "2h"})
    assert api("freeze", {"reason": "look", "for": "5m"}) == long
    assert api("fleet")["frozen"]["until"] == long["until"]
    assert api("freeze", {"reason": "stop"}) == {"frozen": True, "until": None}


def test_bypass_and_flush_reach_the_stores(api, store, rounds):
    """Both fan out and tell what every store answered."""
    rounds(1)
    assert api("bypass", {"on": True})["stores"] == {"host-a": "ok"}
    assert store.bypass is True
    assert api("fleet")["stores"][0]["bypass"] is True  # at once, not with the next window
    flushed = api("flush", {})
    assert flushed == {
        "complete": True,
        "stores": {"host-a": {"ok": True, "dropped": {"dram": 7, "remote": 3}, "reason": "ok"}},
    }
    store.up = False
    refused = {"ok": False, "dropped": {}, "reason": "no store answers: connection refused"}
    assert api("flush", {}) == {"complete": False, "stores": {"host-a": refused}}


def test_a_flush_that_left_something_is_not_complete(api, store, rounds):
    """Why a store could not drop everything is told, and what it dropped all the same."""
    rounds(1)
    answer = {"message": "remote: timeout, some chunks may be left", "dropped": {"dram": 7, "remote": 2}}
    store.answers("post_flush", 503, json=answer)
    flushed = api("flush", {})
    assert flushed["complete"] is False
    assert flushed["stores"]["host-a"]["dropped"] == {"dram": 7, "remote": 2}
    assert flushed["stores"]["host-a"]["reason"] == "remote: timeout, some chunks may be left"


@pytest.mark.parametrize("answer", [httpx.Response(200, text="<html>"), httpx.Response(200, json=[1])])
def test_what_answers_in_a_stores_place_has_flushed_nothing(api, store, rounds, answer):
    """A page, or JSON of another shape."""
    rounds(1)
    store.post_flush = lambda _request: answer
    told = {"ok": False, "dropped": {}, "reason": "what answers is no store"}
    assert api("flush", {}) == {"complete": False, "stores": {"host-a": told}}


@pytest.fixture
def seen(agent, store):
    """A store that the agent knows."""
    agent.tick()
    return store


WRONG_CALLS = [
    ("decisions/99/approve", None, 404),
    *((f"decisions/{number}/approve", None, 422) for number in ("x", 0, 10**20)),
    ("freeze", {}, 422),
    ("freeze", {"reason": "x", "for": "2 moons"}, 422),
    ("freeze", {"reason": " \t"}, 422),
    ("bypass", {"on": True, "store": "host-z"}, 404),
    ("bypass", {"on": True, "strength": 3}, 422),
    ("flush", {"namespace": "short"}, 422),
]


def test_wrong_calls_are_told_and_change_nothing(http, api, seen):
    """Bad input is 4xx with a detail."""
    for path, body, code in WRONG_CALLS:
        answer = http.post(f"/api/v1/{path}", json=body) if body is not None else http.post(f"/api/v1/{path}")
        assert answer.status_code == code, (path, body)
        assert answer.json()["detail"], (path, body)
        assert (seen.bypass, api("fleet")["frozen"]) == (False, None), (path, body)


def test_a_page_of_another_site_cannot_command(http, api):
    """A foreign origin is refused, and so is a foreign name for this agent; the own page may."""
    body = {"reason": "x"}
    assert http.post("/api/v1/freeze", json=body, headers={"Origin": "http://evil.example"}).status_code == 403
    rebound = {"Origin": "http://evil.example", "Host": "evil.example"}
    assert http.post("/api/v1/freeze", json=body, headers=rebound).status_code == 400
    assert api("fleet")["frozen"] is None
    assert http.get("/api/v1/fleet", headers={"Host": "evil.example"}).status_code == 400
    assert http.post("/api/v1/freeze", json=body, headers={"Origin": "http://127.0.0.1:7420"}).status_code == 200


def test_who_stands_by_takes_no_commands(agents, agent):
    """Only the leader writes."""
    agent.tick()
    with TestClient(agents().served, base_url="http://127.0.0.1") as second:
        assert second.get("/api/v1/fleet").json()["leader"] is False
        assert second.post("/api/v1/unfreeze").status_code == 409


class TestStoreThatNeverAnswered:
    """Named in the settings, and not in history yet."""

    @pytest.fixture
    def late(self, other):
        other.up = False
        return other

    @pytest.fixture
    def agent(self, agents, store, late):
        agent = agents(store, late)
        agent.tick()
        return agent

    def test_flush_is_not_complete_without_it(self, api):
        """It may hold chunks as well as any other."""
        flushed = api("flush", {})
        assert (flushed["complete"], flushed["stores"]["host-a"]["ok"]) == (False, True)
        assert flushed["stores"]["host-b:7410"]["reason"].startswith("no store answers: ")

    def test_bypass_reaches_it_when_it_comes(self, api, agent, late):
        """It is told every window until it acknowledges."""
        told = api("bypass", {"on": True})["stores"]
        assert told["host-a"] == "ok"
        assert told["host-b:7410"].startswith("no store answers: ")
        late.up = True
        agent.tick()
        assert late.bypass is True

    def test_so_does_one_that_a_former_agent_was_told(self, http, agents, agent, store, late):
        """The last one, once: what operators set by hand after that stays."""
        for on in (False, True):
            http.post("/api/v1/bypass", json={"on": on})
        agents.end()
        late.up = True
        successor = agents(store, late)
        successor.tick()
        assert late.bypass is True
        late.bypass = False
        successor.tick()
        assert late.bypass is False

    def test_but_not_one_that_the_settings_did_not_name_meanwhile(self, http, agents, agent, store, late):
        """It was taken out: what was commanded of it is over, as its incidents are."""
        http.post("/api/v1/bypass", json={"on": True, "store": "host-b:7410"})
        agents.end()
        agents(store).tick()
        agents.end()
        late.up = True
        agents(store, late).tick()
        assert not late.bypass


def test_a_former_store_is_not_waited_for(agents, store, other):
    """A store that left the settings stays in history, and does not spoil every flush and bypass from then on."""
    first = agents(store, other)
    first.tick()
    first.close()
    caller = Caller("test", "")
    agent = agents(store)
    assert agent.operators.flush(caller, {})["complete"] is True
    assert agent.operators.bypass(caller, True, None)["stores"] == {"host-a": "ok"}


@pytest.mark.parametrize("known", [True, False])
def test_a_flush_of_an_epoch_that_no_store_knows_is_not_complete(agents, store, other, known):
    """One that knows nothing of it says so, and may be new; if none does, nothing was dropped at all."""
    remark = "no namespace of epoch 7 is known here"
    for each in (other,) if known else (store, other):
        each.answers("post_flush", 200, json={"dram": 0}, headers={REMARK: remark})
    agent = agents(store, other)
    agent.tick()
    flushed = agent.operators.flush(Caller("test", ""), {"epoch": 7})
    assert flushed["complete"] is known
    assert flushed["stores"]["host-b"] == {"ok": True, "dropped": {"dram": 0}, "reason": remark}
