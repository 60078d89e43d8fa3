"""The committed dashboards (``dashboards/json``), as Grafana reads them; fills in their queries and legends."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from tiertune_agent.fields import Json

ORDER = ("fleet", "tiers", "gate", "whatif", "stages", "decisions")
_PACKAGED = Path(__file__).with_name("json")
_REPOSITORY = Path(__file__).parents[3] / "dashboards" / "json"
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::\w+)?\}|(\w+))")
_LABEL = re.compile(r"{{\s*(\w+)\s*}}")


def boards(folder: Path | None = None) -> dict[str, Json]:
    """All dashboards by name, in the order in which they are read. FileNotFoundError if one is missing."""
    folder = folder or (_PACKAGED if _PACKAGED.is_dir() else _REPOSITORY)
    return {name: json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in ORDER}


def filled(expression: str, values: Mapping[str, str]) -> str:
    """The query with its variables replaced. KeyError for one that has no value."""
    return _VARIABLE.sub(lambda match: values[match[1] or match[2]], expression)


def named(legend: str, labels: Mapping[str, str]) -> str:
    """A legend with its labels filled in; absent ones are left empty."""
    return _LABEL.sub(lambda match: labels.get(match[1], ""), legend).strip()
