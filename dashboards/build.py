"""Writes the dashboards and the rules from their builders; with ``--check`` only says whether they are up to date.

Run as ``python -m dashboards.build [--check]``. Exits 1 where ``--check`` finds a difference.
"""

import argparse
import sys
from pathlib import Path

from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from dashboards import decisions, fleet, gate, prometheus, stages, tiers, whatif

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
    parser = argparse.ArgumentParser(prog="python -m dashboards.build", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a file is not up to date")
    check = parser.parse_args(arguments).check
    wanted = files()
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    left = sorted(set(FOLDER.glob("*.json")) - set(wanted))
    for path in stale:
        if check:
            print(f"{path.relative_to(FOLDER.parents[1])}: not up to date; run python -m dashboards.build")
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(wanted[path])
            print(f"{path.relative_to(FOLDER.parents[1])}: written")
    for path in left:
        print(f"{path.relative_to(FOLDER.parents[1])}: no builder makes it; remove it")
    return 1 if (check and stale) or left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
