"""Where long tests leave their figures: ``benchmarks/results/database.json``, and ``soak.json`` beside it."""

import os
import platform
from pathlib import Path
from typing import Any

from benchmarks import document

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "database.json"
SOAK = RESULTS.with_name("soak.json")
_FEWER = os.environ.get("TIERTUNE_LONG_STORES")
COMMAND = f"{f'TIERTUNE_LONG_STORES={_FEWER} ' if _FEWER else ''}make test-long"


def record(what: str, case: str, figures: Any, *, file: Path = RESULTS) -> None:
    """Replace one case's figures, leave the others."""
    machine = {"cpus": os.cpu_count(), "python": platform.python_version()}
    document.lay(file, {"command": COMMAND, "machine": machine, what: {case: figures}})
