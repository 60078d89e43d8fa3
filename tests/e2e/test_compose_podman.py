"""docker-compose.yml brought up by podman-compose: all that does not depend on what is in the images."""

from collections.abc import Iterator

import pytest
import yaml

from e2e.podman import Containers, containers
from e2e.promql import ROOT
from e2e.servers import wait_until
from tiertune_connector.units import parse_size

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(300)]

SERVICES = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]


@pytest.fixture(scope="module")
def fleet() -> Iterator[Containers]:
    with containers() as found:
        found.compose("up", "-d", "--no-build", *found.services)
        yield found


def test_services_come_up_well(fleet):
    """Each is well by its own health check, though podman-compose waits for none; the migration has ended."""
    for name in set(fleet.services) - {"migrate"}:
        try:
            wait_until(lambda name=name: fleet.healthy(name), f"{name} is well", timeout_s=30)
        except TimeoutError as error:
            raise AssertionError(f"{error}: {fleet.log(name)}") from error
    assert fleet.inspect("migrate")["State"]["ExitCode"] == 0, fleet.log("migrate")
    told = fleet.log("migrate").splitlines()  # after its result comes, if it had to wait for the database, what it said
    assert any(line.startswith("postgresql://tiertune@127.0.0.1:5432/tiertune") for line in told), told


def test_services_are_confined_as_written(fleet):
    """User, limits and the read-only root are those of the file, and no capability is left."""
    for name in fleet.services:
        service, found = SERVICES[name], fleet.inspect(name)
        assert found["Config"]["User"] == service["user"]
        limits = found["HostConfig"]
        assert limits["Memory"] == parse_size(service["mem_limit"][:-1] + service["mem_limit"][-1].upper() + "iB")
        assert limits["NanoCpus"] == service["cpus"] * 10**9
        assert limits["PidsLimit"] == service["pids_limit"]
        assert limits["ReadonlyRootfs"]
        assert not found["EffectiveCaps"]


def test_the_store_has_redis_and_the_agent_the_store(fleet):
    """They find each other by the addresses of deploy/: through the shared socket, and on loopback."""
    tiers = fleet.get("http://127.0.0.1:7410/v1/status")["tiers"]
    assert {name: tier["health"] for name, tier in tiers.items()} == {"dram": "ok", "disk": "absent", "remote": "ok"}
    wait_until(lambda: "host-a" in str(fleet.get("http://127.0.0.1:7420/api/v1/fleet")), "the agent knows the store")


def test_the_command_line_is_in_the_agents_container(fleet):
    """As the pages of alerts say: it finds agent, store, Redis and database there. And redis-cli is in Redis's."""
    wait_until(lambda: "host-a" in str(fleet.get("http://127.0.0.1:7420/api/v1/fleet")), "the agent knows the store")
    for command in (
        ("agent", "tiertune", "decisions", "list"),
        ("agent", "tiertune", "doctor", "--config", "/etc/tiertune/deploy/agent.yaml"),
        ("redis", "redis-cli", "-s", "/run/tiertune/redis.sock", "ping"),
    ):
        service, *called = command
        done = fleet.run("podman", "exec", f"tiertune_{service}_1", *called)
        assert done.returncode == 0, done.stdout + done.stderr
        if "doctor" in called:
            assert "checks over 1 agent, 1 store, 1 server" in done.stdout
