"""Rules in their two forms: files for Prometheus, and PrometheusRule objects for its Kubernetes operator.

The same rules give the same bytes.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from dashboards import alerting, recording
from dashboards.rules import Group

HERE = Path(__file__).parent
HEADER = "# Written by `python -m dashboards.build` from dashboards/{source}.py; change it there.\n"
WIDTH = 118
SOURCES = {"tiertune": ("alerting", alerting.GROUPS), "tiertune.recording": ("recording", recording.GROUPS)}
"""By file name: the module and its groups."""


def files() -> dict[Path, str]:
    """Path and text of every rule file and PrometheusRule."""
    texts: dict[Path, str] = {}
    for name, (source, groups) in SOURCES.items():
        texts[HERE / "alerts" / f"{name}.rules.yaml"] = rule_file(source, groups)
        texts[HERE / "kubernetes" / f"{name}.yaml"] = prometheus_rule(name.replace(".", "-"), source, groups)
    return texts


def rule_file(source: str, groups: Sequence[Group]) -> str:
    """A file for Prometheus's ``rule_files``."""
    return HEADER.format(source=source) + _yaml({"groups": [group.document() for group in groups]})


def prometheus_rule(name: str, source: str, groups: Sequence[Group]) -> str:
    """The same for the Prometheus operator."""
    labels = {"app.kubernetes.io/name": "tiertune", "app.kubernetes.io/component": "monitoring"}
    document = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": name, "labels": labels},
        "spec": {"groups": [group.document() for group in groups]},
    }
    return HEADER.format(source=source) + _yaml(document)


class _Dumper(yaml.SafeDumper):
    """Block sequences are indented, and texts of several lines stay readable."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002
        super().increase_indent(flow, False)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else ">" if len(text) > WIDTH else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def _yaml(document: Mapping[str, Any]) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=WIDTH)
