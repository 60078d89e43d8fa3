"""Writes references, architecture and results from the code into docs, and the schema of policies.

With ``--check`` only says what is stale.

Run as ``python -m reference.build [--check]``. Exits 1 where ``--check`` finds a difference.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import BaseModel

from dashboards.generated import update
from reference import layers
from reference.fields import rows
from reference.results import figures
from tiertune_agent import catalogue as of_agent
from tiertune_agent.policy.document import Policy
from tiertune_agent.settings import AgentSettings
from tiertune_connector import catalogue as of_store
from tiertune_connector.catalogue import LABELS, PREFIX, Metric
from tiertune_connector.settings import StoreSettings
from tiertune_connector.tuning import Tuning
from tiertune_connector.vllm import stats as of_engine
from tiertune_connector.vllm.settings import EngineSettings

TEXTS = Path(__file__).parent / "texts"
FOLDER = Path(__file__).parents[1] / "docs" / "reference"
ELSEWHERE = {"architecture.md": FOLDER.parent, "results.md": FOLDER.parent}
PICTURE = FOLDER.parent / "pictures" / "layers.svg"
SCHEMA = FOLDER.parents[1] / "policies" / "schema.json"
HEADER = "<!-- Written by `python -m reference.build` from reference/texts/{name} and the code. -->\n\n"
UNITS = (
    "bytes_per_second", "seconds", "bytes", "tokens", "chunks", "requests", "slots", "joules", "watts", "ratio",
)  # fmt: skip


def files() -> dict[Path, str]:
    """Every generated file and its text; pages are written by hand, with tables where it says so."""
    tables = {
        "store-metrics": _metrics(of_store.METRICS),
        "agent-metrics": _metrics(of_agent.METRICS),
        "engine-metrics": _metrics(of_engine.METRICS),
        "labels": _table(("label", "meaning"), ((f"`{label}`", meaning) for label, meaning in LABELS.items())),
        "store-settings": _fields(StoreSettings),
        "agent-settings": _fields(AgentSettings),
        "engine-settings": _fields(EngineSettings),
        "tuning": _fields(Tuning),
        "policy": _fields(Policy),
        "figures-short": _figures("short"),
        "figures-reached": _figures("reached"),
        "layers-connector": _layers("tiertune_connector"),
        "layers-agent": _layers("tiertune_agent"),
    }
    pages = {PICTURE: layers.picture(), SCHEMA: schema()}
    for path in sorted(TEXTS.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        for name, table in tables.items():
            text = text.replace(f"<!-- table: {name} -->\n", table)
        pages[ELSEWHERE.get(path.name, FOLDER) / path.name] = HEADER.format(name=path.name) + text
    return pages


def schema() -> str:
    """JSON Schema of policy files, for editors."""
    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Policy.model_json_schema(by_alias=True)}
    return json.dumps(document, indent=2, sort_keys=True) + "\n"


def unit(name: str) -> str:
    """The unit in a metric's name, as Prometheus wants it; empty: a number of what the name says."""
    bare = name.removesuffix("_total")
    return next((unit.replace("_", " ") for unit in UNITS if bare.endswith(unit)), "")


def _metrics(metrics: Iterable[Metric]) -> str:
    told = (
        (f"`{PREFIX}{one.name}`", one.kind, unit(one.name), ", ".join(f"`{label}`" for label in one.labels), one.help)
        for one in metrics
    )
    return _table(("metric", "type", "unit", "labels", "meaning"), told)


def _fields(model: type[BaseModel]) -> str:
    told = ((f"`{row.name}`", row.kind, row.default, row.bounds, row.meaning) for row in rows(model))
    return _table(("field", "type", "default", "bounds", "meaning"), told)


def _figures(end: str) -> str:
    return _table(("benchmark", "figure", "measured", "goal"), (one[:4] for one in figures() if one.end == end))


def _layers(package: str) -> str:
    told = ([cell.replace("``", "`") for cell in row] for row in layers.rows(package))
    return _table(("layer", "part", "what it is", "imports"), told)


def _table(head: Sequence[str], told: Iterable[Sequence[str]]) -> str:
    lines = (head, ["---"] * len(head), *told)
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def main(arguments: list[str]) -> int:
    return update(arguments, files, there=list(FOLDER.glob("*.md")), module="reference.build", about=__doc__ or "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
