"""Results as JSON: laid over what the file has, and written whole or not at all."""

import argparse
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Document = dict[str, Any]
MACHINE = f"{platform.machine()}, {os.cpu_count()} cores"


def target(text: str) -> Path:
    """An argument: a file for results. One that is unfit, or holds anything else, is refused before the work."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder" if path.is_dir() else f"no folder {path.parent}")
    try:
        known(path)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{path} is there and has no results: name another file ({error})") from error
    return path


def folder(text: str) -> Path:
    """An argument: an existing folder."""
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"no folder {text}")
    return Path(text)


def add_bench_json(parser: argparse.ArgumentParser) -> None:
    """Add the option for the file of a benchmark's results, by default ``bench.json``."""
    parser.add_argument("--json", type=target, default=Path("bench.json"), help="results are laid over what is there")


def known(path: Path) -> Document:
    """What the file has; nothing if it is missing or empty. ValueError if it is no JSON object."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    found: Document = json.loads(text or "{}")
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")  # noqa: TRY004 (as of any other text)
    return found


def lay(path: Path, told: Mapping[str, Any]) -> None:
    write(path, laid(known(path), told))


def laid(known: Mapping[str, Any], told: Mapping[str, Any]) -> Document:
    """``told`` over ``known``, one level into both: what was not measured now stays."""
    over = {name: known.get(name, {}) | part if isinstance(part, dict) else part for name, part in told.items()}
    return {**known, **over}


def write(path: Path, document: Mapping[str, Any]) -> None:
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)
