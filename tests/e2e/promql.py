"""Queries of the dashboards (panels, annotations, variables) and rules, and which metrics and labels they ask for."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import yaml

from tiertune_agent.preview.drawn import filled

ROOT = Path(__file__).parents[2]
DASHBOARDS = sorted((ROOT / "dashboards" / "json").glob("*.json"))
RULES = sorted((ROOT / "dashboards" / "alerts").glob("*.rules.yaml"))
_BUILT_IN = {"__rate_interval": "5m", "__range": "1h"}
_CHOICE = re.compile(r"label_values\((.*), (\w+)\)")
NO_GPU = "engines of the demo have no GPU: they sleep instead of computing"
NO_VLLM = "no vLLM plays in the demo"
NO_FAILURE = "nothing fails in a demo that runs well"
NO_ROLL_BACK = "the demo's changes are right, so none is rolled back"
UNFED = {
    "fleet: Time to first token: A": NO_VLLM,
    "fleet: Time to first token: B": NO_VLLM,
    "stages: Utilisation: A": NO_GPU,
    "stages: Memory: A": NO_GPU,
    "stages: Power: A": NO_GPU,
    "stages: Energy per 1000 tokens: A": NO_GPU,
}
"""Queries that have no data in a demo, and why; ``test_dashboards_fed`` feeds them."""
MAYBE_UNFED = {
    "tiers: Failed operations: A": NO_FAILURE,
    "decisions: Rounds that failed: A": NO_FAILURE,
    "tiers: Not written behind: B": "a queue may never be full",
    "whatif: Decisions on sizes, eviction and admission: A": "in so short a demo nothing may be proposed",
    "fleet: Open incidents: A": "no incident opens in a demo that runs well",
    "decisions: Open incidents: A": "no incident opens in a demo that runs well",
    "decisions: Verdicts by tuner: A": "a soak may not end within the demo",
    "decisions: Share kept: A": "a soak may not end within the demo",
}
"""Queries that have data only in some demos, and why; ``test_dashboards_fed`` feeds them."""


@dataclass(frozen=True)
class PanelQuery:
    """``panel``: the title of a panel, or the name of an annotation."""

    dashboard: str
    panel: str
    ref: str
    expr: str
    unit: str = ""
    legend: str = ""
    instant: bool = False

    def __str__(self) -> str:
        return f"{self.dashboard}: {self.panel}: {self.ref}"


def panel_queries(path: Path) -> Iterator[PanelQuery]:
    """Every query of a dashboard's panels, as committed."""
    for panel in json.loads(path.read_text())["panels"]:
        for target in panel.get("targets", []):
            unit = panel["fieldConfig"]["defaults"]["unit"]
            yield PanelQuery(
                path.stem,
                panel["title"],
                target["refId"],
                target["expr"],
                unit,
                target["legendFormat"],
                bool(target.get("instant")),
            )


def annotation_queries(path: Path) -> Iterator[PanelQuery]:
    for annotation in json.loads(path.read_text())["annotations"]["list"]:
        yield PanelQuery(path.stem, annotation["name"], "", annotation["expr"])


def choices(path: Path) -> Iterator[tuple[str, str, str]]:
    """Of each variable with a query: its name, the selector that it looks at, the label whose values it offers."""
    for variable in json.loads(path.read_text())["templating"]["list"]:
        if variable["type"] == "query":
            found = _CHOICE.fullmatch(variable["query"])
            assert found, variable["query"]
            yield variable["name"], found[1], found[2]


def rules(path: Path) -> list[dict[str, Any]]:
    """Every rule of a Prometheus rule file."""
    return [rule for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]


def scrape_config(agent: str, stores: Sequence[str] = ()) -> dict[str, Any]:
    """A prometheus.yml for these addresses: every second, with the rules."""
    jobs = {"tiertune-store": [*stores], "tiertune-agent": [agent]}
    return {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(path) for path in RULES],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": [url.removeprefix("http://") for url in urls]}]}
            for job, urls in jobs.items()
            if urls
        ],
    }


def concrete(expression: str, rate_interval: str = "5m") -> str:
    """The expression as Grafana sends it with every variable on "All"."""
    values = {**_BUILT_IN, "__rate_interval": rate_interval, "store": ".*", "namespace": ".*"}
    return filled(expression, values)


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
