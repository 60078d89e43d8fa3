"""docs/getting-started.md as a newcomer follows it: its scripts start the real servers, engines aside."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import httpx
import pytest

from connector.stores import Engine, chain, eventually, short_folder
from e2e.servers import HTTP, free_ports, program, wait_until
from pages import ROOT, blocks

pytestmark = [pytest.mark.real, pytest.mark.slow]

GUIDE = ROOT / "docs" / "getting-started.md"
FOLLOWED = ("store.yaml", "agent.yaml", "store-$host.yaml", "redis.conf", "prometheus.yml", "policy.yaml")
"""Blocks that write one of these are run, but for the lines of the second."""
LEFT_OUT = r"prometheus --config.*\n.*&\n"
"""Prometheus is asked whether it takes the file; its targets are those of a fleet with engines."""


def scripts(part: str) -> str:
    """What the blocks of one part of the guide do, in order."""
    start = GUIDE.read_text().split(f"\n## {part}\n")[0].count("\n")
    end = start + GUIDE.read_text().split(f"\n## {part}\n")[1].split("\n## ")[0].count("\n")
    wanted = [block for block in blocks(GUIDE) if start < block.line <= end + 2 and {*block.heredocs} & {*FOLLOWED}]
    return re.sub(LEFT_OUT, "", "\n".join(block.text for block in wanted))


class Followed:
    """A guide's scripts at work in a folder of the test, with ports of their own."""

    def __init__(self, folder: Path, part: str) -> None:
        self.folder = folder
        names = ("6379", "7410", "7411", "7420")
        self.ports = dict(zip(names, count(free_ports(len(names))), strict=False))
        words = {port: str(own) for port, own in self.ports.items()}
        words |= {".venv/bin/": f"{Path(sys.executable).parent}/"}
        words |= {"database: sqlite": "window: 1s\ndatabase: sqlite"}
        script = re.sub("|".join(map(re.escape, words)), lambda word: words[word[0]], scripts(part))
        for name in ("policies", "dashboards"):
            (folder / name).symlink_to(ROOT / name)
        (folder / "guide.sh").write_text(f"set -eu\n{script}\nwait\n")

    def get(self, port: str, path: str) -> httpx.Response:
        return HTTP.get(f"http://127.0.0.1:{self.ports[port]}{path}", timeout=5)

    def answers(self, port: str, path: str = "/healthz") -> bool:
        with suppress(httpx.TransportError):
            return self.get(port, path).is_success
        return False


@contextmanager
def followed(folder: Path, part: str) -> Iterator[Followed]:
    guide = Followed(folder, part)
    with (folder / "guide.log").open("wb") as log:
        process = subprocess.Popen(
            ["bash", "guide.sh"], cwd=folder, stdout=log, stderr=subprocess.STDOUT, process_group=0
        )
    try:
        yield guide
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(20)
        wait_until(lambda: not _lives(process.pid), "the guide's servers have ended")


def _lives(group: int) -> bool:
    with suppress(ProcessLookupError):
        os.killpg(group, 0)
        return True
    return False


@pytest.fixture
def folder():
    with short_folder() as made:
        yield made


def test_one_host_serves_and_is_watched(folder):
    """The store has DRAM and disk, and the agent leads, knows the store and has the shipped policy."""
    with followed(folder, "One host with vLLM") as guide:
        wait_until(lambda: guide.answers("7410") and guide.answers("7420"), "store and agent answer")
        tiers = guide.get("7410", "/v1/status").json()["tiers"]
        assert {tier: told["health"] for tier, told in tiers.items()} == {
            "dram": "ok",
            "disk": "ok",
            "remote": "absent",
        }
        eventually(lambda: [each["name"] for each in guide.get("7420", "/api/v1/fleet").json()["stores"]] == ["host-a"])
        assert guide.get("7420", "/api/v1/fleet").json()["leader"] is True
        assert guide.get("7420", "/api/v1/policies").json()["policy"]["mode"] == "recommend"
        with Engine(folder / "try" / "one-host" / "store.sock") as engine:
            eventually(lambda: engine.put(chain("k", 3)) in ([""] * 3, ["present"] * 3))
            assert engine.get(chain("k", 3)) == 3


def test_a_fleet_shares_by_its_redis_and_is_watched(folder):
    """What host-a stored host-b finds in the remote; the agent sees both and Redis; Prometheus takes its file."""
    program("redis-server")
    promtool = program("promtool")
    with followed(folder, "A fleet") as guide:
        wait_until(lambda: all(map(guide.answers, ("7410", "7411", "7420"))), "two stores and the agent answer")
        for port in ("7410", "7411"):
            eventually(lambda port=port: guide.get(port, "/v1/status").json()["tiers"]["remote"]["health"] == "ok")
        fleet = folder / "try" / "fleet"
        with Engine(fleet / "store-a.sock") as left, Engine(fleet / "store-b.sock") as right:
            eventually(lambda: "" not in left.put(chain("k", 3)))
            eventually(lambda: right.find(chain("k", 3)) == ["remote"] * 3)
            assert right.get(chain("k", 3)) == 3
        names = {"host-a", "host-b"}
        eventually(lambda: {each["name"] for each in guide.get("7420", "/api/v1/fleet").json()["stores"]} == names)
        eventually(lambda: 'tiertune_tier_capacity_bytes{state="effective"' in guide.get("7420", "/metrics").text)
        assert guide.get("7420", "/api/v1/policies").json()["policy"]["mode"] == "observe"
        checked = subprocess.run(
            [promtool, "check", "config", fleet / "prometheus.yml"], capture_output=True, text=True, check=False
        )
        assert checked.returncode == 0, checked.stdout + checked.stderr
