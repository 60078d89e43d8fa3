"""kill -9 of an engine, a store and the agent amid traffic: the rest goes on, and what comes back takes up again."""

import json

import httpx
import pytest

from e2e.servers import wait_until
from tiertune_agent.demo.ports import free_port
from tiertune_agent.demo.world import World, world
from tiertune_agent.replay.traces import builtin_trace
from tiertune_connector.ending import Ending

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def fleet():
    """Two stores, four players, a remote and an agent, at work."""
    with world(Ending(), free_port()) as made:
        made.start(builtin_trace("lmcache_agents"))
        yield made
        made.stop("player")
        assert made.counted()["wrong"] == 0


def child(fleet: World, name: str):
    return next(child for child in fleet._children if child.name == name)


def kill(fleet: World, name: str):
    """As the kernel does it when memory is short."""
    killed = child(fleet, name)
    killed.process.kill()
    killed.process.wait(10)
    fleet._children.remove(killed)
    return killed.process.args


def store(fleet: World, host: str, path: str):
    return httpx.get(f"{fleet.stores[host]}{path}", trust_env=False, timeout=5)


def agent(fleet: World, path: str):
    return httpx.get(f"{fleet.page}{path}", trust_env=False, timeout=5).json()


def hits(fleet: World, host: str) -> float:
    """Tokens hit in its DRAM since it booted; 0 while it does not answer."""
    try:
        metrics = store(fleet, host, "/v1/counters").json()["metrics"]
    except httpx.HTTPError:
        return 0.0
    rows = metrics.get("tier_lookup_tokens_total", {"rows": []})["rows"]
    return sum(row[-1] for row in rows if row[0] == "dram" and row[1] == "hit")


def quarantined(fleet: World, host: str) -> float:
    """Slots that a client may still be writing."""
    metrics = store(fleet, host, "/v1/counters").json()["metrics"]
    return sum(row[-1] for row in metrics["quarantined_slots"]["rows"])


def retune(fleet: World, host: str, **remote) -> dict:
    """Put a tuning; again if the agent was quicker with one of its own."""
    for attempt in range(5):
        tuning = store(fleet, host, "/v1/tuning").json()
        tuning["tiers"]["remote"].update(remote)
        headers = {"If-Match": str(tuning["version"]), "Idempotency-Key": f"test-{attempt}"}
        answer = httpx.put(f"{fleet.stores[host]}/v1/tuning", json=tuning, headers=headers, trust_env=False)
        if answer.status_code != 412:
            assert answer.status_code == 200, answer.text
            return answer.json()
    raise AssertionError("the agent was always quicker")


def served(fleet: World, players) -> list[int]:
    return [fleet.tallies[index].read()["requests"] for index in players]


def keep_serving(fleet: World, players, what: str) -> None:
    """Every one of the players serves five requests more."""
    before = served(fleet, players)
    wait_until(lambda: all(now >= was + 5 for now, was in zip(served(fleet, players), before, strict=True)), what)


def test_a_killed_engine_leaves_nothing_held(fleet):
    """The others go on, its slots come back, and started again it shares again."""
    command = kill(fleet, "player-0")
    keep_serving(fleet, [1, 2, 3], "the other engines serve")
    wait_until(lambda: len(store(fleet, "host-a", "/v1/status").json()["clients"]) == 1, "the store forgets it")
    wait_until(lambda: quarantined(fleet, "host-a") == 0, "its slots are free")
    fleet._spawn("player-0", command)
    keep_serving(fleet, [0], "the engine serves again")


def test_a_killed_store_costs_recomputing_and_comes_back_with_its_tuning(fleet):
    """Its engines go on without it, the other host does not notice; restarted it serves them, tuned as before."""
    tuning = retune(fleet, "host-a", deadline_factor=2.75)
    boot = store(fleet, "host-a", "/v1/status").json()["boot_id"]

    command = kill(fleet, "host-a")
    keep_serving(fleet, [0, 1, 2, 3], "engines serve without the store")
    path = fleet.folder / "host-a.yaml"
    config = json.loads(path.read_text())
    config["http"]["port"] = int(fleet.stores["host-a"].rsplit(":", 1)[1])
    path.write_text(json.dumps(config))
    fleet._spawn("host-a", command)

    wait_until(lambda: hits(fleet, "host-a") > 0, "engines hit in the restarted store")
    assert store(fleet, "host-a", "/v1/status").json()["boot_id"] != boot
    wait_until(lambda: len(store(fleet, "host-a", "/v1/status").json()["clients"]) == 2, "both engines are back")
    again = store(fleet, "host-a", "/v1/tuning").json()
    assert again["version"] >= tuning["version"]
    assert again["tiers"]["remote"]["deadline_factor"] == 2.75


def test_a_killed_agent_is_not_missed_and_goes_on_with_its_history(fleet):
    """Engines and stores do not notice; started again it leads on the same history and collects windows."""
    revisions = agent(fleet, "api/v1/policies")
    command = kill(fleet, "agent")
    hosts = {name: store(fleet, name, "/v1/tuning").json()["version"] for name in fleet.stores}
    keep_serving(fleet, [0, 1, 2, 3], "engines serve without the agent")
    assert {name: store(fleet, name, "/v1/tuning").json()["version"] for name in fleet.stores} == hosts
    fleet._spawn("agent", command)

    def leads():
        try:
            return agent(fleet, "api/v1/fleet")["leader"]
        except httpx.HTTPError:
            return False

    wait_until(leads, "the agent leads again")
    assert agent(fleet, "api/v1/policies") == revisions
