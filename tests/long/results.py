"""Where long tests leave their figures: ``benchmarks/results/database.json``."""

import json
import os
import platform
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "database.json"
_FEWER = os.environ.get("TIERTUNE_LONG_STORES")
COMMAND = f"{f'TIERTUNE_LONG_STORES={_FEWER} ' if _FEWER else ''}make test-long"


def record(what: str, case: str, figures: Any) -> None:
    """Replace one case's figures, leave the others."""
    document = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    document["command"] = COMMAND
    document["machine"] = {"cpus": os.cpu_count(), "python": platform.python_version()}
    document.setdefault(what, {})[case] = figures
    RESULTS.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
