"""The HTTP interface tells: documents, charts, metrics, whether it is alive and well."""

import json

import pytest

from agent.agents import POLICY
from agent.fakes import DIGEST, SLOW, START, after
from tiertune_agent.catalogue import METRICS
from tiertune_agent.records import State
from tiertune_agent.verdicts.verdict import Verdict
from tiertune_connector.catalogue import PREFIX

pytestmark = pytest.mark.slow


def test_the_fleet_is_told(api, rounds):
    """Stores with tiers and tuning; answers of the tuners; incidents; whether frozen."""
    rounds(2)
    fleet = api("fleet")
    (told,) = fleet["stores"]
    assert (told["name"], told["reachable"], told["bypass"]) == ("host-a", True, False)
    assert told["tiers"]["remote"]["health"] == "ok"
    assert told["tuning"]["version"] == 1
    assert (fleet["leader"], fleet["frozen"]) == (True, None)
    assert {a["tuner"] for a in fleet["answers"]} >= {"remote_fetch", "tier_size", "eviction", "balance"}


def test_answers_on_a_pool_that_its_store_has_no_more_are_not_told(api, rounds, agent, store):
    """Each revision of the weights is another pool; history keeps them for a fortnight."""
    rounds(2)
    store.tells("get_status", lambda told: {**told, "pools": {"cd" * 16: told["pools"][DIGEST]}})
    rounds(2)
    kept = {(answer["tuner"], answer["pool"]) for answer in agent.history.answers.newest()}
    told = {(answer["tuner"], answer["pool"]) for answer in api("fleet")["answers"]}
    assert {pool for _, pool in kept} == {"", DIGEST, "cd" * 16}
    assert told == {one for one in kept if one[1] != DIGEST}


def test_every_document_is_there_from_the_start(http):
    """On an empty history every path answers JSON."""
    for path in ("fleet", "decisions", "ledger", "curves", "auto", "policies", "incidents", "audit"):
        answer = http.get(f"/api/v1/{path}")
        assert answer.status_code == 200, path
        assert json.loads(answer.text), path


def test_ledger_and_policies_are_told(api, rounds):
    """Sums by tier with their rows; the policy in force with its revisions."""
    rounds(3)
    assert api("ledger", hours=2)["tiers"]["remote"]["saved"] == pytest.approx(12.0)
    policies = api("policies")
    assert policies["policy"]["tuners"]["remote_fetch"]["mode"] == "auto"
    assert policies["problem"] is None
    assert len(policies["revisions"]) == 1


@pytest.mark.parametrize("hours", [0.5, 1])
def test_the_ledger_of_an_hour_has_the_one_that_it_began_in(api, clock, rounds, hours):
    """Rows are of whole hours: the last half of one is in its row, and so is what came just before a new one."""
    rounds(3)
    clock.advance(60 * 60 if hours == 1 else 50 * 60)
    document = api("ledger", hours=hours)
    assert document["tiers"]["remote"]["saved"] == pytest.approx(12.0)
    assert (document["since"], len({row["hour"] for row in document["ledger"]})) == (START.isoformat(), 1)
    clock.advance(3600)
    assert api("ledger", hours=hours)["tiers"] == {}


def test_a_long_ledger_is_sent_an_hour_after_another(api, agent, clock, rounds):
    """A year of many stores has millions of rows: nobody holds them all at a time."""
    for _ in range(3):
        rounds(2)
        clock.advance(2 * 3600)
    read = list(agent.history.ledger.hours(START))
    assert [{row["hour"] for row in rows} for rows in read] == [
        {after(hours=2 * number).isoformat()} for number in range(3)
    ]
    assert api("ledger", hours=8760)["ledger"] == [row for rows in read for row in rows] != []


def test_curves_are_told_by_pool(api, store, rounds):
    """Each pool with what is in force, its points by algorithm and size, and what is to be read of them."""
    rounds(1)
    for _ in range(3):
        store.larger_pays()
        rounds(1)
    (told,) = api("curves")["curves"]
    assert (told["store"], told["namespace"], told["capacity_bytes"], told["algorithm"]) == (
        *("host-a", DIGEST, 1 << 30, "lru"),
    )
    assert [point["hit_ratio"] for point in told["points"]] == [pytest.approx(0.3), pytest.approx(0.4)]
    assert told["sentence"] == "lru hits 30% at 1 GiB; the best simulated, lru at 4 GiB, 40%."


def test_what_auto_would_have_done_is_told(api, proposed):
    """The wish that waits, with why it is wished."""
    told = api("auto")
    assert [(one["tuner"], one["to"], one["state"]) for one in told["would"]] == [("remote_fetch", "off", "proposed")]
    assert told["sentence"] == "On auto, TierTune would have made 1 change in the last day."
    assert told["would"][0]["reason"].startswith("in 3 windows in a row fetching cost more than recomputing")


def test_a_decision_is_told_with_its_counterfactual(api, store, rounds):
    """Once judged: before, after and without it, and the doubt."""
    store.bandwidth = SLOW
    rounds(10)
    told = api("decisions/1")["compared"]
    assert (told["before"], told["promised"], told["after"]) == (2.0, 1.0, 1.0)
    assert told["without"] == pytest.approx(2.002)
    assert told["windows"] >= 3


def test_weekly_reviews_are_no_figures_of_a_verdict(api, agent, proposed):
    """A soak that measured nothing has none; what was weighed weeks later is told beside it."""
    judged = proposed.judge(proposed.get(1), State.INCONCLUSIVE, "too little traffic", {}, START)
    weighed = Verdict(State.KEPT, "50% less", {"before": 2.0, "after": 1.0})
    agent.history.verdicts.review(judged, "still pays", weighed, after(days=7))
    told = api("decisions/1")
    assert [one["verdict"] for one in told["verdicts"]] == ["inconclusive", "still pays"]
    assert told["compared"] is None


def test_the_policy_is_told_with_its_lint(api, rounds, policy_file):
    """A key without effect has file, line and column; a bad edit is an error with its own."""
    policy_file.write_text(POLICY + "objectives: {ttft_p99: 2s}\n")
    rounds(1)
    (note,) = api("policies")["lint"]
    assert (note["level"], note["place"]) == ("note", f"{policy_file}:5:1")
    policy_file.write_text("version: 1\nmode: sometimes\n")
    rounds(1)
    assert [one["place"] for one in api("policies")["lint"] if one["level"] == "error"] == [f"{policy_file}:2:7"]


def test_metrics_are_those_of_the_catalogue(http, agent, store, rounds):
    """Every declared metric is exported, and none that is not declared; decisions and incidents are counted."""
    store.bandwidth = SLOW
    rounds(3)
    store.up = False
    agent.tick()
    text = http.get("/metrics").text
    declared = {PREFIX + metric.name for metric in METRICS}
    assert {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")} - {
        name.removesuffix("_total") + "_created" for name in declared
    } - {name + "_created" for name in declared} == declared
    assert 'tiertune_agent_decisions_total{state="applied",tuner="remote_fetch"} 1.0' in text
    assert 'tiertune_agent_incidents{kind="store_unreachable"} 1.0' in text


def test_alive_is_not_well(agent, http, clock, monkeypatch):
    """Who asks for its health is told of rounds that fail, since when, and that it leads nothing; it stays alive."""
    agent.tick()
    monkeypatch.setattr(agent.loop, "run_once", lambda: 1 / 0)
    since = f"{clock.now():%Y-%m-%d %H:%M:%S} UTC"
    for _ in range(2):
        agent.tick()
        clock.advance(15)
    agent.sum_up()
    answer = http.get("/healthz")
    assert (answer.status_code, answer.text) == (200, f"ok\nloop fails since {since}: see the log\n")
    assert http.head("/healthz").status_code == 200
    monkeypatch.undo()
    agent.tick()
    assert http.get("/healthz").text == "ok\n"
    agent.leader.resign()
    assert http.get("/healthz").text == "ok\nstands by: another agent leads, or the database is away\n"


def test_who_leads_no_more_fails_no_more(agent, http, monkeypatch):
    """What failed while it led says nothing of the time in which it leads again."""

    def lost():
        agent.leader.leading = False
        return False

    monkeypatch.setattr(agent.loop, "run_once", lambda: 1 / 0)
    agent.tick()
    monkeypatch.setattr(agent.leader, "leads", lost)
    agent.tick()
    monkeypatch.undo()
    agent.stand()
    assert http.get("/healthz").text == "ok\n"
