"""deploy/kubernetes.yaml fits the images, the settings, and itself."""

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest

from e2e.promql import ROOT
from e2e.servers import exporter, prometheus
from pages import blocks
from tiertune_connector.counters import Counters, PrometheusCollector
from tiertune_connector.documents import parse_yaml
from tiertune_connector.settings import StoreSettings
from tiertune_connector.units import parse_size
from tiertune_connector.vllm.settings import parse as parse_engine

DOCUMENTS = list(yaml.safe_load_all((ROOT / "deploy/kubernetes.yaml").read_text()))
OF = {document["kind"]: document for document in DOCUMENTS}
STORE, ENGINE = (OF[kind]["spec"]["template"]["spec"] for kind in ("DaemonSet", "Deployment"))
SETTINGS = parse_yaml(OF["ConfigMap"]["data"]["store.yaml"], StoreSettings, name="store.yaml")
IMAGES = {
    service["image"] for service in yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"].values()
}
PODS = pytest.mark.parametrize("pod", [STORE, ENGINE], ids=["store", "engine"])


def size(text: str) -> int:
    return parse_size(f"{text}B")


def main(pod: dict) -> dict:
    (container,) = pod["containers"]
    return container


def mounted(pod: dict) -> dict[str, dict]:
    """The volume at each path of its container."""
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    return {mount["mountPath"]: volumes[mount["name"]] for mount in main(pod)["volumeMounts"]}


@PODS
def test_a_pod_is_confined_and_runs_as_the_images_user(pod):
    """Store and engine are one user, for the socket opens to no other; only what gives folders to it is root."""
    (user,) = set(re.findall(r"^USER (.*)$", (ROOT / "connector/Dockerfile").read_text(), re.MULTILINE))
    context = pod["securityContext"]
    assert f"{context['runAsUser']}:{context['runAsGroup']}" == user
    for container in (main(pod), *pod.get("initContainers", ())):
        assert container["image"] in IMAGES
        assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
        assert container["securityContext"]["allowPrivilegeEscalation"] is False


@PODS
def test_it_is_asked_whether_it_is_well_where_it_listens(pod):
    """A probe names a port of its container; starting may take longer than a probe of a running one waits."""
    container = main(pod)
    ports = {port["name"] for port in container["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] in ports
    assert container["startupProbe"]["failureThreshold"] >= 60


@PODS
def test_it_runs_on_nodes_that_are_kept_for_gpus(pod):
    """Whoever asks for a GPU may be let onto such a node by the cluster; the store asks for none."""
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]


def test_the_store_finds_what_its_settings_name():
    """Its settings, its tokens, its socket and its state are on volumes; DRAM fits into its memory."""
    mounts, container = mounted(STORE), main(STORE)
    assert container["args"][:3] == ["store", "serve", "--config"]
    config = Path(container["args"][3])
    assert mounts[str(config.parent)]["configMap"]["name"] == OF["ConfigMap"]["metadata"]["name"]
    assert config.name in OF["ConfigMap"]["data"]
    assert SETTINGS.http.tokens_file is not None
    assert str(SETTINGS.http.tokens_file.parent) in mounts
    assert str(SETTINGS.socket.parent) in mounts
    assert any(SETTINGS.state_dir.is_relative_to(path) for path in mounts)
    assert size(container["resources"]["limits"]["memory"]) >= SETTINGS.dram.capacity + 2**30
    (folders,) = STORE["initContainers"]
    assert {mount["mountPath"] for mount in folders["volumeMounts"]} == set(folders["command"][2:])


def test_the_agent_finds_the_stores():
    """The service selects them, at the port where they serve; the pods' probes ask that one, too."""
    service, template = OF["Service"]["spec"], OF["DaemonSet"]["spec"]["template"]
    assert service["clusterIP"] == "None"
    assert service["selector"].items() <= template["metadata"]["labels"].items()
    assert [port["port"] for port in service["ports"]] == [SETTINGS.http.port]
    assert [port["containerPort"] for port in main(STORE)["ports"]] == [SETTINGS.http.port]
    assert main(STORE)["livenessProbe"]["httpGet"]["path"] == "/healthz"


@pytest.mark.parametrize("kind", ["DaemonSet", "Deployment"])
def test_pods_are_selected_by_their_labels(kind):
    """Else Kubernetes would refuse them."""
    spec = OF[kind]["spec"]
    assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()


def test_the_engine_finds_the_store():
    """The adapter understands its settings; the socket lies in a folder that both mount, and staging fits."""
    container = main(ENGINE)
    (transfer,) = (text.partition("=")[2] for text in container["args"] if text.startswith("--kv-transfer-config"))
    settings = parse_engine(json.loads(transfer)["kv_connector_extra_config"])
    assert settings.socket == str(SETTINGS.socket)
    folder = str(SETTINGS.socket.parent)
    assert mounted(ENGINE)[folder]["hostPath"] == mounted(STORE)[folder]["hostPath"]
    shared = size(mounted(ENGINE)["/dev/shm"]["emptyDir"]["sizeLimit"])
    assert settings.staging < shared < size(container["resources"]["limits"]["memory"])


@pytest.mark.real
@pytest.mark.slow
def test_the_operator_leaves_pools_their_namespace():
    """It calls a target's Kubernetes namespace as we call a pool's; what the page has it do after that undoes it."""
    (dropped,) = (yaml.safe_load(each.text) for each in blocks(ROOT / "docs/alerts.md") if "relabelings" in each.text)
    counters, registry = Counters(), CollectorRegistry()
    registry.register(PrometheusCollector(counters, "host-a"))
    for namespace in ("one", "two"):
        counters.add("requests_total", ("no", namespace, "model"))
    with exporter(lambda: generate_latest(registry)) as target:
        job = {
            "job_name": "tiertune-store",
            "relabel_configs": [{"target_label": "namespace", "replacement": "serving"}, *dropped["relabelings"]],
            "static_configs": [{"targets": [target]}],
        }
        with prometheus({"global": {"scrape_interval": "1s"}, "scrape_configs": [job]}) as server:
            server.wait_targets_up()
            found = server.query("tiertune_requests_total")
    assert {(row["metric"]["namespace"], row["metric"].get("exported_namespace")) for row in found} == {
        ("one", None),
        ("two", None),
    }
