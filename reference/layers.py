"""Who imports whom, as the source says it: folders in layers, each of which imports only from those below.

Run as ``python -m reference.layers`` for the list; ``reference.build`` draws the picture and writes the tables.
"""

import ast
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
PACKAGES = {"tiertune_connector": ROOT / "connector", "tiertune_agent": ROOT / "agent"}
PURE = {
    "tiertune_connector": frozenset(("cost", "eviction", "pool", "whatif")),
    "tiertune_agent": frozenset(("tuners", "verdicts")),
}
"""Parts without I/O and clock; ``tests/test_imports.py`` holds them to it."""
_ROW, _BOX, _HEAD, _LEFT, _WIDTH, _LETTER = 66, 30, 44, 40, 960, 7.8
_STYLE = (
    "text{font:13px ui-monospace,monospace;fill:#1c2733}.head{font-weight:bold;font-size:15px}"
    "rect{fill:#eef3f8;stroke:#9db2c6}.pure{fill:#e6f4e4;stroke:#8fbd88}path{fill:none;stroke:#9db2c6;stroke-opacity:.55}"
    "svg{background:#fff}"
)


@dataclass(frozen=True)
class Part:
    """A folder of a package, or a module beside its folders."""

    name: str
    told: str
    """The first paragraph of its docstring."""
    imports: frozenset[str]
    """Other parts of the same package."""


def parts(package: str) -> dict[str, Part]:
    """A package's parts by name; its own ``__init__`` is none."""
    root = PACKAGES[package] / package
    named = dict[str, set[Path]]()
    for path in sorted(root.rglob("*.py")):
        if path != root / "__init__.py":
            named.setdefault(path.relative_to(root).with_suffix("").parts[0], set()).add(path)
    return {name: _part(root, name, files, named) for name, files in named.items()}


def _part(root: Path, name: str, files: set[Path], names: Collection[str]) -> Part:
    head = root / f"{name}.py" if (root / f"{name}.py") in files else root / name / "__init__.py"
    told = ast.get_docstring(ast.parse(head.read_text(encoding="utf-8"))) or ""
    used = {one.split(".")[1] for path in files for one in imported(path) if one.startswith(f"{root.name}.")}
    return Part(name, " ".join(told.split("\n\n")[0].split()), frozenset(used.intersection(names) - {name}))


def imported(path: Path) -> Iterator[str]:
    """Dotted names of all that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layers(found: Mapping[str, Part]) -> list[list[str]]:
    """Names from the lowest layer up: each part stands one above the highest that it imports.

    Raises ValueError, which names the circle, if parts import each other.
    """
    level = dict[str, int]()
    try:
        for name in TopologicalSorter({one.name: one.imports for one in found.values()}).static_order():
            level[name] = max((level[other] + 1 for other in found[name].imports), default=0)
    except CycleError as error:
        raise ValueError("in a circle: " + " imports ".join(reversed(error.args[1]))) from error
    return [sorted(name for name in level if level[name] == at) for at in range(max(level.values(), default=-1) + 1)]


def rows(package: str) -> Iterator[tuple[str, str, str, str]]:
    """For a table, the highest layer first: its number, the part, what it is, what it imports."""
    found = parts(package)
    for number, names in reversed(list(enumerate(layers(found)))):
        for name in names:
            part = found[name]
            yield str(number), f"`{name}`", part.told, ", ".join(sorted(part.imports))


def picture() -> str:
    """Both packages as SVG, a row for each layer. A line that others imply is not drawn."""
    drawn, top = list[str](), 0
    for package in PACKAGES:
        found = parts(package)
        ordered = layers(found)[::-1]
        boxes = _boxes(ordered, top + _HEAD)
        drawn.append(f'<text class="head" x="12" y="{top + 26}">{escape(package)}</text>')
        drawn += (_line(boxes[one], boxes[other]) for one in sorted(found) for other in sorted(_direct(found, one)))
        drawn += (_drawn(name, box, pure=name in PURE[package]) for name, box in boxes.items())
        top += _HEAD + len(ordered) * _ROW
    size = f'width="{_WIDTH}" height="{top}" viewBox="0 0 {_WIDTH} {top}"'
    body = "\n".join(drawn)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{_STYLE}</style>\n{body}\n</svg>\n'


Box = tuple[float, float, float]
"""Left, top, width."""


def _boxes(ordered: list[list[str]], top: float) -> dict[str, Box]:
    """Each row takes the whole width."""
    boxes = dict[str, Box]()
    for row, names in enumerate(ordered):
        for place, name in enumerate(names):
            centre = _LEFT + (_WIDTH - _LEFT) * (2 * place + 1) / (2 * len(names))
            boxes[name] = (centre - _wide(name) / 2, top + row * _ROW, _wide(name))
    return boxes


def _wide(name: str) -> float:
    return len(name) * _LETTER + 20


def _direct(found: Mapping[str, Part], name: str) -> set[str]:
    """What a part imports, without what it also reaches by way of another."""
    below = dict[str, set[str]]()

    def reached(one: str) -> set[str]:
        if one not in below:
            below[one] = set(found[one].imports).union(*map(reached, found[one].imports))
        return below[one]

    return {one for one in found[name].imports if not any(one in reached(other) for other in found[name].imports)}


def _line(upper: Box, lower: Box) -> str:
    (x, y, wide), (to_x, to_y, to_wide) = upper, lower
    start, end = (x + wide / 2, y + _BOX), (to_x + to_wide / 2, to_y)
    bend = (end[1] - start[1]) / 2
    return (
        f'<path d="M{start[0]:.0f} {start[1]:.0f}C{start[0]:.0f} {start[1] + bend:.0f} '
        f'{end[0]:.0f} {end[1] - bend:.0f} {end[0]:.0f} {end[1]:.0f}"/>'
    )


def _drawn(name: str, box: Box, *, pure: bool) -> str:
    x, y, wide = box
    kind = ' class="pure"' if pure else ""
    shape = f'<rect{kind} x="{x:.0f}" y="{y:.0f}" width="{wide:.0f}" height="{_BOX}" rx="4"/>'
    return f'{shape}<text x="{x + 10:.0f}" y="{y + 20:.0f}">{escape(name)}</text>'


def main() -> int:
    for package in PACKAGES:
        sys.stdout.write(f"{package}\n")
        for number, name, _, used in rows(package):
            sys.stdout.write(f"{number:>4}  {name.strip('`'):14}{used or '-'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
