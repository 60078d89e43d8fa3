"""Writes the dashboards and the rules from their builders; with ``--check`` only says whether they are up to date.

Run as ``python -m dashboards.build [--check]``. Exits 1 where ``--check`` finds a difference.
"""

import sys
from pathlib import Path

from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from dashboards import decisions, fleet, gate, prometheus, stages, tiers, whatif
from dashboards.generated import update

FOLDER = Path(__file__).parent / "json"
BOARDS = {module.NAME: module.dashboard for module in (fleet, tiers, gate, whatif, stages, decisions)}


def render(dashboard: Dashboard) -> str:
    """JSON with sorted keys: the same builders give the same bytes."""
    return str(JSONEncoder(sort_keys=True, indent=2).encode(dashboard.build())) + "\n"


def files() -> dict[Path, str]:
    """Every generated file and the text that it should have."""
    boards = {FOLDER / f"{name}.json": render(dashboard()) for name, dashboard in BOARDS.items()}
    return {**boards, **prometheus.files()}


def main(arguments: list[str]) -> int:
    return update(arguments, files, there=list(FOLDER.glob("*.json")), module="dashboards.build", about=__doc__ or "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
