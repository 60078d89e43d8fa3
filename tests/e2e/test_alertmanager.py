"""The files of deploy/ and the rules, with real Prometheus and Alertmanager: what reaches the webhook.

Only waiting is made shorter than what is shipped.
"""

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from connector.memory_tier import MemoryTier
from connector.stores import running as running_store
from e2e.promql import ROOT, RULES
from e2e.servers import (
    HTTP,
    Alertmanager,
    Prometheus,
    Webhook,
    alertmanager,
    program,
    prometheus,
    wait_until,
    webhook,
)
from tiertune_agent.demo.ports import free_port
from tiertune_connector.tiers.base import Outcome

STORE_DOWN, TIER_DEAD = "TierTuneStoreDown", "TierTuneTierDead"


def alertmanager_config(url: str) -> dict[str, Any]:
    """deploy/alertmanager.yml as Debian's Alertmanager 0.25 understands it."""
    config = yaml.safe_load((ROOT / "deploy/alertmanager.yml").read_text())
    for receiver in config["receivers"]:
        for hook in receiver["webhook_configs"]:
            assert Path(hook.pop("url_file")).is_absolute()
            hook["url"] = url
    return config


def impatient(route: dict[str, Any]) -> dict[str, Any]:
    """A route, and those under it, that wait for nothing."""
    quick = {key: "1s" for key in ("group_wait", "group_interval") if key in route}
    return route | quick | {"routes": [impatient(child) for child in route.get("routes", [])]}


def prometheus_config(folder: Path, store: str, receiver: Alertmanager) -> dict[str, Any]:
    """deploy/prometheus.yml, every second, with rules that fire after a second."""
    config = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text())
    for path in RULES:
        (folder / path.name).write_text(re.sub(r"for: \w+", "for: 1s", path.read_text()))
    (manager,) = config["alerting"]["alertmanagers"]
    manager["static_configs"] = [{"targets": [receiver.url.removeprefix("http://")]}]
    jobs = [job for job in config["scrape_configs"] if job["job_name"] == "tiertune-store"]
    jobs[0]["static_configs"] = [{"targets": [store]}]
    quick = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    return config | {"global": quick, "rule_files": [f"{folder}/*.rules.yaml"], "scrape_configs": jobs}


@contextlib.contextmanager
def store(folder: Path, port: int, *, dead_remote: bool) -> Iterator[None]:
    """A store on a port; a dead remote answers nothing but errors."""
    remote = MemoryTier()
    if dead_remote:
        remote.fault = lambda _: Outcome.ERROR
    (folder / "remote").mkdir(exist_ok=True)
    with running_store(
        folder,
        wrap_remote=lambda _: remote,
        http={"port": port},
        remote={"url": f"file://{folder}/remote", "probe_every": 0.2},
    ):
        yield


@contextlib.contextmanager
def chain(folder: Path, port: int) -> Iterator[tuple[Prometheus, Alertmanager, Webhook]]:
    """Everything between a store and whoever is told."""
    with webhook() as hook:
        config = alertmanager_config(hook.url)
        with (
            alertmanager(config | {"route": impatient(config["route"])}) as receiver,
            prometheus(prometheus_config(folder, f"127.0.0.1:{port}", receiver)) as server,
        ):
            yield server, receiver, hook


@pytest.mark.real
@pytest.mark.slow
def test_what_is_wrong_with_a_store_reaches_the_webhook():
    """A dead tier is told; the store's end is told with its name, and silences its tier; its return is told too."""
    with contextlib.ExitStack() as stack:
        folder, port = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tt-"))), free_port()
        life = stack.enter_context(contextlib.ExitStack())
        life.enter_context(store(folder, port, dead_remote=True))
        server, receiver, hook = stack.enter_context(chain(folder, port))
        server.wait_targets_up()
        server.wait_alertmanagers()

        wait_until(lambda: bool(hook.told(TIER_DEAD, "firing")), "the dead tier is told")
        told = hook.told(TIER_DEAD, "firing")[0]
        assert told["labels"] == {"alertname": TIER_DEAD, "severity": "warning", "store": "host-a", "tier": "remote"}
        assert told["annotations"]["summary"] == "host-a: the tier remote is dead"
        assert (ROOT / told["annotations"]["runbook_url"]).is_file()

        life.close()
        wait_until(lambda: bool(hook.told(STORE_DOWN, "firing")), "the store's end is told")
        told = hook.told(STORE_DOWN, "firing")[0]
        place = {"store": "host-a", "instance": f"127.0.0.1:{port}"}
        assert told["labels"] == {"alertname": STORE_DOWN, "severity": "critical", **place}

        def inhibited() -> bool:
            states = {alert["labels"]["alertname"]: alert["status"] for alert in receiver.alerts()}
            return bool(states[TIER_DEAD]["inhibitedBy"]) and not states[STORE_DOWN]["inhibitedBy"]

        wait_until(inhibited, "the dead tier of a store that is down is not told")
        with store(folder, port, dead_remote=False):
            wait_until(lambda: bool(hook.told(STORE_DOWN, "resolved")), "the store's return is told")
        assert {alert["labels"]["alertname"] for alert in hook.alerts} == {TIER_DEAD, STORE_DOWN}


@pytest.mark.real
def test_the_configurations_are_valid(tmp_path):
    """amtool and promtool accept deploy/alertmanager.yml (its address written out) and deploy/prometheus.yml."""
    file = tmp_path / "alertmanager.yml"
    file.write_text(yaml.safe_dump(alertmanager_config("http://127.0.0.1:1/")))
    for command in (
        [program("amtool"), "check-config", file],
        [program("promtool"), "check", "config", ROOT / "deploy/prometheus.yml"],
    ):
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.real
def test_a_dead_server_of_several_silences_that_its_share_is_not_written():
    """Its store's chunks for that tier are not told as dropped; those for another tier, and another store's, are."""
    places = [{"store": store, "tier": tier} for store in ("a", "b") for tier in ("remote", "disk")]
    dead = {"alertname": "TierTuneTierServerDead", "server": "redis-1:6379/0"} | places[0]
    dropping = [{"alertname": "TierTuneWriteBehindDropping"} | place for place in places]
    with alertmanager(alertmanager_config("http://127.0.0.1:1/")) as receiver:
        alerts = [{"labels": labels | {"severity": "warning"}} for labels in (dead, *dropping)]
        HTTP.post(f"{receiver.url}/api/v2/alerts", json=alerts, timeout=30).raise_for_status()

        def told() -> bool:
            silent = [alert["labels"] for alert in receiver.alerts() if alert["status"]["inhibitedBy"]]
            return silent == [alerts[1]["labels"]]

        wait_until(told, "of one store and tier alone nothing is told", 10)


def test_alerts_that_silence_others_are_alerts():
    """Every alert that an inhibition names is one of the rules: a misspelt one would silence nothing, and nobody."""
    rules = yaml.safe_load((ROOT / "dashboards/alerts/tiertune.rules.yaml").read_text())
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    config = yaml.safe_load((ROOT / "deploy/alertmanager.yml").read_text())
    for rule in config["inhibit_rules"]:
        for matcher in (*rule["source_matchers"], *rule["target_matchers"]):
            label, operator, value = re.fullmatch(r'(\w+) (=|!=|=~) "(.*)"', matcher).groups()
            if label == "alertname" and operator != "!=":
                pattern = value if operator == "=~" else re.escape(value)
                named = re.sub(r"[()]", "", pattern.removeprefix("TierTune")).split("|")
                assert {f"TierTune{name}" for name in named} <= alerts
