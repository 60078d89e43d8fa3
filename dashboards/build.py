"""Writes ``dashboards/json/*.json`` from the builders; with ``--check`` only says whether they are up to date.

Run as ``python -m dashboards.build [--check]``. Exits 1 where ``--check`` finds a difference.
"""

import argparse
import sys
from pathlib import Path

from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from dashboards import fleet

FOLDER = Path(__file__).parent / "json"


def render(dashboard: Dashboard) -> str:
    """JSON with sorted keys: the same builders give the same bytes."""
    return str(JSONEncoder(sort_keys=True, indent=2).encode(dashboard.build())) + "\n"


def files() -> dict[Path, str]:
    """Every generated file and the text that it should have."""
    return {FOLDER / "fleet.json": render(fleet.dashboard())}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m dashboards.build", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a file is not up to date")
    check = parser.parse_args(arguments).check
    stale = [path for path, text in files().items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if check:
            print(f"{path.relative_to(FOLDER.parents[1])}: not up to date; run python -m dashboards.build")
        else:
            path.write_text(files()[path])
            print(f"{path.relative_to(FOLDER.parents[1])}: written")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
