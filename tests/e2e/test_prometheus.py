"""Two stores on a real Redis, scraped by a real Prometheus with the files of deploy/: what the demo does not have."""

import contextlib
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import redis
import yaml

from e2e.promql import ROOT
from e2e.servers import READY_S, Prometheus, program, prometheus, running, wait_until
from tiertune_agent.demo.ports import free_port
from tiertune_connector.client.store_client import StoreClient
from tiertune_connector.cost import gain_s
from tiertune_connector.documents import load_yaml
from tiertune_connector.keys import Namespace
from tiertune_connector.protocol.messages import Report, StepReport, TierReport
from tiertune_connector.serve.main import StoreProcess
from tiertune_connector.settings import StoreSettings

pytestmark = [pytest.mark.real, pytest.mark.slow]

HERE, THERE = "host-a", "host-b"
CHUNK_BYTES, CHUNK_TOKENS, PROMPT_CHUNKS = 64 << 10, 256, 8
GONE = 8
"""Prompts after which one has left memory, and is found in the remote: a tier that is only written is an alert."""
NAMESPACE = Namespace(model="test", chunk_tokens=CHUNK_TOKENS)
DECISIONS = "sum by (tuner, state) (tiertune_agent_decisions_total)"


@dataclass
class Engine:
    """What an engine does with a store, without a model."""

    client: StoreClient

    def keep(self, keys: list[bytes], payload: np.ndarray) -> None:
        """Compute a prompt's chunks and hand them over."""
        self.client.lookup("store", keys, prompt_tokens=len(keys) * CHUNK_TOKENS).result(5)
        slots = [slot for slot in self.client.reserve(keys).result(5).slots if slot is not None]
        for slot in slots:
            assert self.client.write(slot, payload)
        assert all(self.client.commit(slots).result(5))
        self.client.report_steps([StepReport("all", "prefill", 0.01, len(keys) * CHUNK_TOKENS)])

    def fetch(self, keys: list[bytes], *, recompute_s: float) -> None:
        """Load what is found, and report it as a gate that expects recomputing to take ``recompute_s``."""
        found = self.client.lookup("load", keys, prompt_tokens=len(keys) * CHUNK_TOKENS).result(5)
        loaded = self.client.load(keys[: len(found.tiers)], deadline_s=5).result(6)
        assert "error" not in loaded.outcomes
        self.client.release(loaded)
        for tier in set(found.tiers):
            chunks = found.tiers.count(tier)
            fetch_s = found.costs[tier].seconds(chunks, chunks * CHUNK_BYTES) if tier in found.costs else None
            actual_s = loaded.seconds.get(tier, 1e-4)
            kind = "won" if gain_s(fetch_s, recompute_s, actual_s, 0.0) > 0 else "lost"
            tokens = chunks * CHUNK_TOKENS
            report = TierReport(tier, chunks, tokens, tokens, "cheaper", fetch_s, recompute_s, actual_s, kind)
            self.client.tell(Report([report]))


@dataclass
class Fleet:
    """Engine ``here`` computes; it and the engine ``there``, on another host, use what it computed."""

    here: Engine
    there: Engine
    remote: "redis.Redis"
    prometheus: Prometheus
    end_here: Callable[[], None]
    """Ends the store of ``here``."""
    rounds: int = 0

    def traffic(self, *, worth_fetching: bool = True) -> None:
        """One prompt. Every second one, or each, recomputes faster than any fetch; some chunks rot in the remote."""
        self.rounds += 1
        keys, older = self.prompt(self.rounds), self.prompt(self.rounds - 1)
        payload = np.full(CHUNK_BYTES, self.rounds % 256, np.uint8)
        self.here.keep(keys, payload)
        recompute_s = 1.0 if worth_fetching and self.rounds % 2 else 1e-9
        self.here.fetch(keys, recompute_s=recompute_s)
        if self.rounds % 5 == 0:
            name = b"tiertune:%b:%b" % (NAMESPACE.digest.encode(), older[-1])
            self.remote.setrange(name, CHUNK_BYTES // 2, b"rot")
        self.there.fetch(older, recompute_s=recompute_s)
        self.here.fetch(self.prompt(self.rounds - GONE), recompute_s=recompute_s)

    @staticmethod
    def prompt(number: int) -> list[bytes]:
        return [b"prompt-%d-%d" % (number, position) for position in range(PROMPT_CHUNKS)]


@contextlib.contextmanager
def native_redis(folder: Path) -> Iterator[str]:
    """Redis from deploy/redis.conf, its socket elsewhere; yields the URL."""
    path = folder / "redis.sock"
    command = [program("redis-server"), ROOT / "deploy/redis.conf", "--unixsocket", path, "--dir", folder]
    with running(command, log=folder / "redis.log"):
        wait_until(path.exists, "Redis has its socket")
        yield f"unix://{path}?db=0"


@contextlib.contextmanager
def native_store(folder: Path, name: str, remote: str) -> Iterator[StoreProcess]:
    """A store from deploy/store.yaml, small, and its paths elsewhere; its remote has all the time that it takes."""
    settings = load_yaml(ROOT / "deploy/store.yaml", StoreSettings)
    assert settings.remote is not None
    process = StoreProcess(
        settings.model_copy(
            update={
                "name": name,
                "socket": folder / f"{name}.sock",
                "state_dir": folder / name,
                "http": settings.http.model_copy(update={"port": 0}),
                "dram": settings.dram.model_copy(update={"capacity": 2 << 20, "segment": 1 << 20}),
                "remote": settings.remote.model_copy(update={"url": remote, "timeout": READY_S}),
            }
        )
    )
    process.start()
    try:
        yield process
    finally:
        process.stop()


@contextlib.contextmanager
def engine_of(store: StoreProcess, name: str) -> Iterator[Engine]:
    client = StoreClient(store.server.path, NAMESPACE, chunk_bytes=CHUNK_BYTES, chunk_tokens=CHUNK_TOKENS, engine=name)
    assert client.connect()
    try:
        yield Engine(client)
    finally:
        client.close()


@contextlib.contextmanager
def native_agent(folder: Path, stores: list[StoreProcess]) -> Iterator[str]:
    """The agent from deploy/agent.yaml as a process, quick to act; yields its address."""
    port, path = free_port(), folder / "agent.yaml"
    own = {
        "http": {"host": "127.0.0.1", "port": port},
        "database": f"sqlite:///{folder}/agent.sqlite",
        "database_password_file": None,
        "stores": [{"name": store.name, "url": store.address} for store in stores],
        "policy": str(ROOT / "policies/demo.yaml"),
        "window": "1s",
    }
    path.write_text(yaml.safe_dump(yaml.safe_load((ROOT / "deploy/agent.yaml").read_text()) | own))
    command = [Path(sys.executable).with_name("tiertune"), "agent", "run", "--config", path]
    with running(command, log=folder / "agent.log"):
        yield f"127.0.0.1:{port}"


def scrape_config(stores: list[StoreProcess], agent: str) -> dict[str, object]:
    """deploy/prometheus.yml on these stores and this agent, every second."""
    config = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str((ROOT / "deploy" / pattern).resolve()) for pattern in config["rule_files"]]
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    targets = [store.address.removeprefix("http://") for store in stores]
    jobs["tiertune-store"]["static_configs"] = [{"targets": targets}]
    jobs["tiertune-agent"]["static_configs"] = [{"targets": [agent]}]
    config["scrape_configs"] = [jobs["tiertune-store"], jobs["tiertune-agent"]]
    return config


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tiertune-")))
        url = stack.enter_context(native_redis(folder))
        own = stack.enter_context(contextlib.ExitStack())
        stores = [own.enter_context(native_store(folder, HERE, url))]
        stores.append(stack.enter_context(native_store(folder, THERE, url)))
        engines = [stack.enter_context(engine_of(store, f"engine-{n}")) for n, store in enumerate(stores)]
        agent = stack.enter_context(native_agent(folder, stores))
        server = stack.enter_context(prometheus(scrape_config(stores, agent)))
        remote = stack.enter_context(contextlib.closing(redis.Redis.from_url(url)))
        server.wait_targets_up()
        yield Fleet(*engines, remote, server, own.close)


def values(fleet: Fleet, expression: str) -> list[float]:
    """The latest value of each series; NaN never counts as data."""
    return [value for row in fleet.prometheus.query(expression) if not math.isnan(value := float(row["value"][1]))]


def test_recording_rules_give_the_shares_of_the_traffic(fleet):
    """Half of the prompts is computed anew, some of the rest was computed on another host."""
    names = ("tiertune:cross_replica_hit_ratio", "tiertune:fleet_hit_ratio")
    told: list[list[float]] = []

    def shares() -> bool:
        """The first scrapes that have counters give rates of 0, or of one store alone."""
        fleet.traffic()
        told[:] = [values(fleet, name) for name in names]
        return [len(each) for each in told] == [1, 1] and 0 < told[0][0] < told[1][0] < 1

    with contextlib.suppress(TimeoutError):
        wait_until(shares, "the rules have values", timeout_s=60)
    (elsewhere,), (found,) = told
    assert 0 < elsewhere < found < 1


def test_health_of_a_tier_is_one_state_at_a_time(fleet):
    """Every state of a tier is exported, and exactly one is 1: what TierTuneTierDead averages over."""
    states = fleet.prometheus.query("sum by (store, tier) (tiertune_tier_health)")
    assert {(row["metric"]["store"], row["metric"]["tier"]) for row in states} == {
        (store, tier) for store in (HERE, THERE) for tier in ("dram", "remote")
    }
    assert {row["value"][1] for row in states} == {"1"}
    assert len(values(fleet, 'tiertune_tier_health{state="dead"}')) == len(states)


def alert_states(fleet: Fleet) -> dict[str, str]:
    groups = fleet.prometheus.get("rules", type="alert")["groups"]
    return {rule["name"]: rule["state"] for group in groups for rule in group["rules"]}


def test_a_decision_of_the_agent_is_seen(fleet):
    """When recomputing is always quicker, the agent switches the remote off: its panel and the tuning version tell."""
    version = f'max(tiertune_tuning_version{{store="{THERE}"}})'
    assert values(fleet, version) == [1]

    def applied() -> bool:
        fleet.traffic(worth_fetching=False)
        return bool(values(fleet, DECISIONS)) and values(fleet, version) > [1]

    wait_until(applied, "the agent has decided", timeout_s=30)
    rows = fleet.prometheus.query(DECISIONS)
    assert "remote_fetch" in {row["metric"]["tuner"] for row in rows}
    health = f'tiertune_tier_health{{store="{THERE}", tier="remote", state="bypassed"}}'
    wait_until(lambda: values(fleet, health) == [1], "the remote is told as bypassed")


def test_alerts_are_quiet_until_a_store_is_down(fleet):
    """With too little memory for the traffic, and chunks that rot, alerts tell just that; then that a store ended."""
    true = {"TierTuneCorruptChunks", "TierTuneThrash", "TierTuneYoungChunksEvicted"}

    def restless() -> set[str]:
        return {name for name, state in alert_states(fleet).items() if state != "inactive"}

    (since,) = values(fleet, 'time() - tiertune_agent_last_success_timestamp_seconds{exported_job="loop"}')
    assert since < 60
    wait_until(lambda: bool(fleet.traffic() or restless() == true), "what is wrong, and nothing else, is told")
    fleet.end_here()
    wait_until(lambda: "TierTuneStoreDown" in restless(), "an alert reacts")
    assert alert_states(fleet)["TierTuneStoreDown"] == "pending"
    assert restless() <= true | {"TierTuneStoreDown", "TierTuneCountersStale"}
    named = {row["metric"]["store"] for row in fleet.prometheus.query("tiertune:store_info")}
    assert named == {HERE, THERE}
    assert values(fleet, "tiertune:fleet_hit_ratio")
