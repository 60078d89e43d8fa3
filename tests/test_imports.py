"""Who may import whom: the rules that keep the core pure and the connector light."""

import ast
from pathlib import Path

import pytest

from reference.layers import PACKAGES, PURE, Part, imported, layers, parts

ROOT = Path(__file__).parents[1]
CONNECTOR = ROOT / "connector" / "tiertune_connector"
AGENT = ROOT / "agent" / "tiertune_agent"

IMPURE = {
    "asyncio", "httpx", "io", "logging", "mmap", "os", "pathlib", "prometheus_client", "random", "redis",
    "socket", "sqlalchemy", "subprocess", "threading", "time", "torch", "urllib", "vllm",
}  # fmt: skip
SHARED_WITH_AGENT = {
    "access",
    "addresses",
    "catalogue",
    "tuning",
    "documents",
    "ending",
    "eviction",
    "httpd",
    "units",
    "whatif",
}
SIMULATION = {"replay", "demo"}
MEASURED = CONNECTOR / "slower" / "transit.py"
"""Gives what costs are measured by: as pure as they are, but for a lock, as many threads report to it."""
TIMERS = CONNECTOR / "profile" / "timers.py"


def files(*roots: Path) -> list[Path]:
    return [file for root in roots for file in ([root] if root.is_file() else sorted(root.rglob("*.py")))]


def in_(root: Path, name: str) -> list[Path]:
    """A part of a package: a folder, or a module beside the folders."""
    return [path for path in (root / name, root / f"{name}.py") if path.exists()]


def rooms(*roots: Path):
    return pytest.mark.parametrize("path", files(*roots), ids=lambda path: str(path.relative_to(ROOT)))


@rooms(*(part for root in (CONNECTOR, AGENT) for name in sorted(PURE[root.name]) for part in in_(root, name)), MEASURED)
def test_the_pure_core_imports_no_io_clock_sql_or_metrics(path):
    """Decisions and data structures do no I/O, read no clock, count no metrics."""
    lock = {"threading"} if path == MEASURED else set()
    assert {name.split(".")[0] for name in imported(path)} & IMPURE == lock
    attributes = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    assert attributes & {"now", "utcnow", "today"} == set(), "time is an argument here"


@rooms(CONNECTOR, AGENT)
def test_only_the_adapter_imports_vllm(path):
    """vLLM and torch are imported in connector/.../vllm alone; torch also where events of a CUDA device are made."""
    if (CONNECTOR / "vllm") not in path.parents:
        torch = set() if path == TIMERS else {"torch"}
        assert {name.split(".")[0] for name in imported(path)} & {"vllm", *torch} == set()


def test_timing_a_device_costs_those_nothing_who_have_none():
    """torch is imported when a CUDA device is timed, not with the module: the store has no torch."""
    tree = ast.parse(TIMERS.read_text())
    assert not any("torch" in ast.dump(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom))


@rooms(CONNECTOR, AGENT)
def test_only_history_speaks_sql(path):
    """SQLAlchemy is imported in history/ alone."""
    if (AGENT / "history") not in path.parents:
        assert not any(name.split(".")[0] == "sqlalchemy" for name in imported(path))


@rooms(CONNECTOR)
def test_the_connector_never_imports_the_agent(path):
    """The store runs without the agent."""
    assert not any(name.startswith("tiertune_agent") for name in imported(path))


@rooms(AGENT)
def test_the_agent_takes_only_documents_from_the_connector(path):
    """The agent knows the store by its documents; replay and demo alone run the store's own code."""
    if path.relative_to(AGENT).parts[0] in SIMULATION | {"cli.py"}:
        return
    used = {name.split(".")[1] for name in imported(path) if name.startswith("tiertune_connector.")}
    assert used <= SHARED_WITH_AGENT


@rooms(ROOT / "migrations")
def test_migrations_never_import_the_application(path):
    """A migration says what the schema was then, not what the models are now."""
    assert not any(name.startswith(("tiertune_agent", "tiertune_connector")) for name in imported(path))


@pytest.mark.parametrize("package", PACKAGES)
def test_no_two_folders_import_each_other(package):
    """Folders, and the modules beside them, stand in layers; each imports only from those below."""
    found = parts(package)
    ordered = layers(found)
    height = {name: number for number, names in enumerate(ordered) for name in names}
    assert height.keys() == found.keys() >= PURE[package]
    assert all(height[other] < height[one.name] for one in found.values() for other in one.imports)


def test_a_circle_is_named():
    """Where parts import each other, the message tells which."""
    circle = {name: Part(name, "", frozenset(used)) for name, used in {"a": "b", "b": "c", "c": "b"}.items()}
    with pytest.raises(ValueError, match=r"b imports c imports b|c imports b imports c"):
        layers(circle)


@rooms(*PACKAGES.values(), ROOT / "migrations")
def test_imports_are_absolute(path):
    """A line of an import says where it comes from."""
    found = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    assert all(node.level == 0 for node in found)
