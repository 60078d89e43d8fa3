"""What the doctor and the agent's detectors read is told under these names: a renamed metric disables no check."""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tiertune_agent import doctor
from tiertune_agent.catalogue import METRICS as OF_AGENT
from tiertune_agent.doctor.checks.of_engines import LOST, WANTED
from tiertune_agent.incidents import detectors as incidents
from tiertune_connector.catalogue import LABELS, METRICS, PREFIX
from tiertune_connector.cost import Reason
from tiertune_connector.vllm.stats import METRICS as OF_ENGINE
from tiertune_connector.vllm.stats import RESULTS

ROOT = Path(__file__).parents[2]
TOLD = {metric.name: metric for metric in (*OF_AGENT, *METRICS)}
KINDS = {"total": {"counter", "gauge"}, "split": {"counter", "gauge"}, "gauge": {"gauge"}, "count": {"histogram"}}
"""What the ways to read a metric can read."""


@dataclass(frozen=True)
class Reading:
    """One call in the code: ``store.total("name", label=value)`` or ``total(windows, "name", label=value)``."""

    name: str
    way: str
    labels: tuple[tuple[str, str | None], ...]
    """With the value, where it stands there."""


def readings(path):
    """Of a file, those whose metric is named where it is read."""
    for call in ast.walk(ast.parse(path.read_text())):
        if not isinstance(call, ast.Call):
            continue
        method = isinstance(call.func, ast.Attribute)
        way, arguments = (call.func.attr, call.args) if method else (getattr(call.func, "id", ""), call.args[1:])
        first, *others = [getattr(argument, "value", None) for argument in arguments] or [None]
        if way in KINDS and isinstance(first, str):
            given = tuple((keyword.arg, getattr(keyword.value, "value", None)) for keyword in call.keywords)
            yield Reading(first, way, (*given, *((label, None) for label in others)))


OF_DOCTOR = sorted(Path(doctor.__file__).parent.rglob("*.py"))
READINGS = {reading for path in OF_DOCTOR for reading in readings(path)}
DETECTED = set(readings(Path(incidents.__file__)))


def test_readings_are_found():
    """As many as there are at least: a way of reading that this file does not know is no proof."""
    assert len({reading.name for reading in READINGS}) >= 8
    assert len({reading.name for reading in DETECTED}) >= 7


@pytest.mark.parametrize("reading", sorted(READINGS | DETECTED, key=str), ids=lambda one: f"{one.way} {one.name}")
def test_what_is_read_is_in_the_catalogue(reading):
    """Under this name, with these labels and their values, of a kind that can be read so."""
    metric = TOLD[reading.name]
    assert metric.kind in KINDS[reading.way]
    for label, value in reading.labels:
        assert label in metric.labels
        if isinstance(value, str):
            assert value in {*re.findall(r"`(\w+)`", LABELS[label]), *(Reason if label == "reason" else ())}


def test_detectors_read_nothing_that_is_left_out():
    """The hour that they look through holds what they name, and no name that nobody tells."""
    assert {reading.name for reading in DETECTED} <= incidents.READ
    assert TOLD.keys() | {incidents.OBSERVED} >= incidents.READ


def test_what_is_read_of_an_engine_is_what_the_connector_tells():
    """Its own metrics on vLLM's page, and the results of chunks that were lost."""
    ours = {name for name in WANTED if name.startswith(PREFIX)}
    assert len(ours) == 3
    assert ours <= {PREFIX + metric.name for metric in OF_ENGINE}
    assert set(LOST) <= set(RESULTS)


@pytest.mark.vllm
@pytest.mark.parametrize("name", [name for name in WANTED if not name.startswith(PREFIX)])
def test_what_is_read_of_vllm_is_vllms(name):
    """The installed vLLM declares it under this name: exporters add the ending."""
    text = source("v1/metrics", "v1/kv_offload", "distributed/kv_transfer")
    assert f'"{re.sub("_(total|count)$", "", name)}"' in text


@pytest.mark.vllm
@pytest.mark.parametrize("label", ["enable_prefix_caching", "prefix_caching_hash_algo"])
def test_labels_of_vllms_settings_are_its_fields(label):
    """What ``vllm:cache_config_info`` carries as labels are the fields of its settings."""
    assert f"\n    {label}:" in source("config")


def source(*folders):
    """Of the installed vLLM, all files of these; skips the test where there is none."""
    found = list((ROOT / ".venv-engine").glob("lib/python*/site-packages/vllm"))
    if not found:
        pytest.skip("there is no .venv-engine with vLLM (make setup-engine)")
    return "".join(path.read_text() for folder in folders for path in (found[0] / folder).rglob("*.py"))
