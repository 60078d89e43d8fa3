"""docker-compose.yml, the Dockerfiles and deploy/ fit each other and the project's own settings."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from e2e.promql import ROOT
from tiertune_agent import settings as agent_settings
from tiertune_connector.documents import load_yaml
from tiertune_connector.settings import StoreSettings
from tiertune_connector.units import parse_size
from tiertune_connector.vllm.settings import parse as parse_engine

DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES = COMPOSE["services"]
DOCKERFILES = sorted(ROOT.glob("*/Dockerfile"))
ENDS = {"migrate"}
"""Services that do their work once."""
MADE_BY_OPERATORS = {"deploy/secrets/grafana_admin_password"}


def document(name: str):
    return yaml.safe_load((DEPLOY / name).read_text())


def bind_mounts(service: dict) -> list[tuple[str, str]]:
    """Host path (from the repository's root) and container path of each."""
    parts = [volume.split(":") for volume in service.get("volumes", [])]
    return [(host.removeprefix("./"), inside) for host, inside, *_ in parts if host.startswith("./")]


def memory(text: str) -> int:
    """Bytes of docker's 6g, or Redis's 4gb."""
    return parse_size(re.sub(r"([kmg])b?$", lambda unit: f"{unit[1].upper()}iB", text))


def instructions(dockerfile: Path, name: str) -> list[str]:
    text = re.sub(r"\\\n", " ", dockerfile.read_text())
    return [line.removeprefix(f"{name} ") for line in text.splitlines() if line.startswith(f"{name} ")]


def store_settings() -> StoreSettings:
    return load_yaml(DEPLOY / "store.yaml", StoreSettings)


def address(http: object) -> str:
    return f"{http.host}:{http.port}"


def test_compose_file_follows_the_compose_schema():
    """check-jsonschema finds nothing against its copy of the compose specification."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    result = subprocess.run(
        [*command, str(ROOT / "docker-compose.yml")], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stdout


def test_the_schema_would_catch_a_misspelt_key(tmp_path):
    """The check above can fail."""
    broken = tmp_path / "docker-compose.yml"
    broken.write_text((ROOT / "docker-compose.yml").read_text().replace("healthcheck:", "heathcheck:"))
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(broken)]
    assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 1


@pytest.mark.parametrize("name", SERVICES)
class TestService:
    def test_image_is_pinned(self, name):
        """Every image names a version."""
        _, _, tag = SERVICES[name]["image"].rpartition(":")
        assert re.search(r"\d+\.\d+\.\d+", tag)

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
        """Not root, no capabilities, no new privileges, bounded memory and processes; restarted and looked after."""
        service = SERVICES[name]
        user = service.get("user") or instructions(ROOT / service["build"]["dockerfile"], "USER")[-1]
        assert not user.startswith(("0", "root"))
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert memory(service["mem_limit"]) > 0
        assert service["pids_limit"] > 0
        assert service["restart"] == ("no" if name in ENDS else "unless-stopped")
        assert name in ENDS or service["healthcheck"]["test"][0] == "CMD"

    def test_takes_no_secret_from_the_environment(self, name):
        """Passwords and tokens are named as files, and none has a default."""
        for variable in SERVICES[name].get("environment", {}):
            assert not re.search("PASSWORD|TOKEN|SECRET", variable) or variable.endswith("_FILE"), variable

    def test_is_reached_from_this_host_alone(self, name):
        """No port is published; who shares the host's network listens on loopback."""
        assert "ports" not in SERVICES[name]
        assert SERVICES[name]["network_mode"] in {"host", "none"}


def test_secrets_are_files_that_are_not_in_the_repository():
    """Operators make them; git and the images leave them out."""
    assert {secret["file"].removeprefix("./") for secret in COMPOSE["secrets"].values()} == MADE_BY_OPERATORS
    assert "deploy/secrets/" in (ROOT / ".gitignore").read_text().splitlines()
    assert "!deploy" not in (ROOT / ".dockerignore").read_text()


@pytest.mark.parametrize("name", [name for name in SERVICES if "build" in SERVICES[name]])
def test_builds_name_a_dockerfile_and_a_target_in_it(name):
    """docker compose build would find both."""
    build = SERVICES[name]["build"]
    stages = re.findall(r"^FROM .* AS (\w+)$", (ROOT / build["dockerfile"]).read_text(), flags=re.MULTILINE)
    assert build.get("target", stages[0]) in stages


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.parent.name)
def test_dockerfiles_copy_what_the_build_context_has(path):
    """Every copied path exists and passes .dockerignore."""
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for copied in instructions(path, "COPY"):
        *sources, _ = copied.split()
        for source in sources if not copied.startswith("--from") else ():
            assert (ROOT / source).exists(), source
            assert source.split("/")[0] in allowed, source


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
    assert settings.database.removeprefix("sqlite:///").startswith("/var/lib/tiertune/")


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


def test_prometheus_scrapes_store_and_agent():
    """The jobs that rules know have the addresses of the settings, and the rule files are mounted beside."""
    config = document("prometheus.yml")
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in config["scrape_configs"]}
    agent = agent_settings.load(DEPLOY / "agent.yaml")
    assert targets == {"tiertune-store": [address(store_settings().http)], "tiertune-agent": [address(agent.http)]}
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


@pytest.mark.parametrize("name", [name for name in SERVICES if name.startswith("engine")])
def test_engines_are_told_of_the_store(name):
    """Engines' settings are understood by the adapter, and name the store's socket and a staging that fits."""
    (flag,) = (part for part in SERVICES[name]["command"] if part.startswith("--kv-transfer-config="))
    transfer = json.loads(flag.partition("=")[2])
    settings = parse_engine(transfer["kv_connector_extra_config"])
    assert settings.socket == str(store_settings().socket)
    assert settings.staging < memory(SERVICES[name]["shm_size"])
    assert (ROOT / "connector" / transfer["kv_connector_module_path"].replace(".", "/")).with_suffix(".py").exists()
    assert SERVICES[name]["profiles"] == ["gpu"]


def test_health_checks_ask_the_ports_of_the_settings():
    """Store and agent are asked where they serve."""
    agent = agent_settings.load(DEPLOY / "agent.yaml")
    for name, http in (("store", store_settings().http), ("agent", agent.http)):
        assert f"http://{address(http)}/healthz" in SERVICES[name]["healthcheck"]["test"][-1]
