"""What sharing does on a GPU: ``python -m benchmarks.gpu [--parts prefill fetch engines] [--json PATH]``.

``prefill``: how well the gate predicts a prefill; ``fetch``: chunks from the store to the GPU, beside the GPU's copy
alone; ``engines``: vLLM with and without TierTune. The first two need PyTorch with a GPU in this environment, the last
vLLM for it: ``TIERTUNE_ENGINE_PYTHON`` names its interpreter. All need some 40 GB of host memory, and ``engines`` 70 GB
of the GPU's.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks import document

ROOT = Path(__file__).parents[2]
PARTS = ("prefill", "fetch", "engines")


def _run(part: str) -> dict[str, Any]:
    measure: Callable[[Path], dict[str, Any]] = import_module(f"benchmarks.gpu.{part}").measure
    with tempfile.TemporaryDirectory(prefix="tt-") as home:
        return measure(Path(home))


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    document.add_bench_json(parser)
    options = parser.parse_args(given)
    sys.path.insert(0, str(ROOT / "tests"))  # engines of the tests
    known = document.known(options.json).get("gpu", {})
    for part in options.parts:
        known[part] = _run(part)
        document.lay(options.json, {"machine": document.MACHINE, "gpu": known})
        print(json.dumps({part: known[part]}, indent=1), flush=True)


if __name__ == "__main__":
    main()
