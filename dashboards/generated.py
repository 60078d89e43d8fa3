"""Updates committed files that are generated from code, or only names those that differ."""

import argparse
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]


def update(
    arguments: list[str], files: Callable[[], Mapping[Path, str]], *, there: Collection[Path], module: str, about: str
) -> int:
    """Write the texts of ``files``; with ``--check`` only name those that differ. Exit status: 0, or 1 to be mended.

    ``there``: files where only generated ones belong; those that are not in ``files`` are named. ``module`` makes them,
    ``about`` is what its ``--help`` says.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a file is not up to date")
    check, wanted = parser.parse_args(arguments).check, files()
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    left = sorted(set(there) - set(wanted))
    for path in stale:
        if check:
            print(f"{path.relative_to(ROOT)}: not up to date; run python -m {module}")
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(wanted[path], encoding="utf-8")
            print(f"{path.relative_to(ROOT)}: written")
    for path in left:
        print(f"{path.relative_to(ROOT)}: no builder makes it; remove it")
    return 1 if (check and stale) or left else 0
