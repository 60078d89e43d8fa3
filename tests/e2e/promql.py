"""Queries of the dashboards and rules, and which metrics and labels they ask for."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import yaml

ROOT = Path(__file__).parents[2]
DASHBOARDS = sorted((ROOT / "dashboards" / "json").glob("*.json"))
RULES = sorted((ROOT / "dashboards" / "alerts").glob("*.rules.yaml"))
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::\w+)?\}|(\w+))")
_BUILT_IN = {"__rate_interval": "5m"}


@dataclass(frozen=True)
class PanelQuery:
    dashboard: str
    panel: str
    ref: str
    expr: str

    def __str__(self) -> str:
        return f"{self.dashboard}: {self.panel}: {self.ref}"


def panel_queries(path: Path) -> Iterator[PanelQuery]:
    """Every query of a dashboard's panels, as committed."""
    for panel in json.loads(path.read_text())["panels"]:
        for target in panel.get("targets", []):
            yield PanelQuery(path.stem, panel["title"], target["refId"], target["expr"])


def rules(path: Path) -> list[dict[str, Any]]:
    """Every rule of a Prometheus rule file."""
    return [rule for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]


def concrete(expression: str, rate_interval: str = "5m") -> str:
    """The expression as Grafana sends it with every variable on "All"."""
    values = {**_BUILT_IN, "__rate_interval": rate_interval, "store": ".*", "namespace": ".*"}
    return _VARIABLE.sub(lambda match: values[match[1] or match[2]], expression)


def selectors(expression: str) -> list[tuple[str, frozenset[str]]]:
    """Metric name and matched labels of every selector; ValueError where it is not PromQL."""
    found: list[tuple[str, frozenset[str]]] = []

    def visit(node: Any) -> None:
        if isinstance(node, promql_parser.MatrixSelector):
            node = node.vector_selector
        if isinstance(node, promql_parser.VectorSelector):
            found.append((node.name or "", frozenset(matcher.name for matcher in node.matchers.matchers)))

    promql_parser.walk(promql_parser.parse(expression), pre_visit=visit)
    return list(dict.fromkeys(found))


def groupings(expression: str) -> set[str]:
    """Labels that aggregations of the expression keep."""
    labels: set[str] = set()

    def visit(node: Any) -> None:
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            labels.update(node.modifier.labels)

    promql_parser.walk(promql_parser.parse(expression), pre_visit=visit)
    return labels
