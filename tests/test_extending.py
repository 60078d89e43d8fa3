"""The guides in docs/extending are true: their code is the examples', and who follows them has what they promise."""

import os
import re
import shutil
import subprocess
import sys
import time

import pytest

from extending.slru import SLRU
from pages import ROOT, Block, blocks
from tiertune_agent.replay.curve import curve_document
from tiertune_agent.replay.traces import builtin_trace
from tiertune_connector.eviction import ALGORITHMS

GUIDES = ROOT / "docs" / "extending"
EXAMPLES = ROOT / "examples" / "extending"
EXAMPLE_OF = {"adapter": "kv_exporter", "eviction": "slru", "tier": "sqlite_tier", "tuner": "write_off"}
of_guides = pytest.mark.parametrize("guide", EXAMPLE_OF)
REGISTERED = {
    "adapter": """
from tiertune_agent.collector.targets import ObservedSource
assert ObservedSource(name="a", url="http://h:1/metrics", kind="kv_exporter")
""",
    "eviction": """
from tiertune_connector.tuning import Defaults
assert Defaults(eviction="slru")
from tiertune_agent.replay.curve import KNOWN
assert "slru" in KNOWN
""",
    "tier": """
from tiertune_connector.counters import Counters
from tiertune_connector.serve.main import remote_tier
from tiertune_connector.settings import RemoteSettings
tier = remote_tier(RemoteSettings(url="sqlite:///nowhere/at/all", capacity="1GiB"), "host-a", Counters(), None)
assert (type(tier).__name__, tier.usage().capacity_bytes) == ("SqliteTier", 1 << 30)
""",
    "tuner": """
from tiertune_agent.policy.document import Policy, mode_of, rules_for, settable, settings_of
from tiertune_agent.policy.document import made
from tiertune_agent.tuners.registry import OF_STORES
rule = Policy.model_validate({"version": 1, "tuners": {"write_off": {"mode": "auto", "least_found": 0.1}}})
(tuner,) = [made(kind, rule) for kind in OF_STORES if kind.name == "write_off"]
assert tuner.settings.least_found == 0.1 == settings_of(rule, "write_off").least_found
assert mode_of(rule, "write_off") == rules_for(rule, "write_off", "disk", elsewhere={}).mode == "recommend"
assert "write_off" not in settable()
type(tuner.settings).advisory = False
assert "write_off" in settable()
""",
}
"""What is so when a guide was followed."""


def of_kind(guide: str, kind: str) -> list[Block]:
    return [block for block in blocks(GUIDES / f"{guide}.md") if block.kind == kind]


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line]


@of_guides
def test_a_guide_shows_the_whole_example(guide):
    """Its blocks of Python, put together, are the file: every line, in the same order."""
    shown = [line for block in of_kind(guide, "python") for line in lines(block.text)]
    assert shown == lines((EXAMPLES / f"{EXAMPLE_OF[guide]}.py").read_text())


def test_every_example_has_its_guide():
    """And every guide an example."""
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(EXAMPLE_OF.values())
    assert {path.stem for path in GUIDES.glob("*.md")} == set(EXAMPLE_OF)


@of_guides
def test_every_test_that_a_guide_calls_is_there(guide):
    """Files of `pytest` exist, and what stands behind `-k` names tests or classes of theirs."""
    calls = [line for block in of_kind(guide, "sh") for line in block.script if "-m pytest" in line]
    assert len(calls) >= 1
    for call in calls:
        files = [ROOT / path for path in re.findall(r"tests/\S+\.py", call)]
        texts = "".join(path.read_text() for path in files)
        for name in re.findall(r"\w+", call.partition(" -k ")[2]):
            assert name == "or" or name in texts, f"{name}: {call}"


@of_guides
def test_who_follows_a_guide_has_it_registered(guide, tmp_path):
    """Its files copied and its lines changed as it says, in a copy of the packages, the new one is known."""
    for package in ("agent", "connector"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__", "data"))
    copies = [line.split()[1:] for block in of_kind(guide, "sh") for line in block.script if line.startswith("cp ")]
    for source, target in copies:
        shutil.copy(ROOT / source, tmp_path / target)
    for block in of_kind(guide, "diff"):
        change(block.text, tmp_path)
    paths = os.pathsep.join(str(tmp_path / package) for package in ("agent", "connector"))
    told = subprocess.run(
        [sys.executable, "-c", REGISTERED[guide]],
        env={**os.environ, "PYTHONPATH": paths},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stderr


def change(diff, root):
    """Make the change that a block shows: ``+++`` names the file, ``@@`` stands between places."""
    head, _, rest = diff.partition("\n")
    path = root / head.removeprefix("+++ ")
    text = path.read_text()
    for place in re.split(r"^@@\n", rest, flags=re.MULTILINE):
        told = place.splitlines(keepends=True)
        before, after = ("".join(line[1:] for line in told if line[0] in kinds) for kinds in (" -", " +"))
        if after not in text:  # else somebody has followed the guide here
            stale = "another one is registered since the guide was written? Show its lines in the guide's diff, too"
            assert text.count(before) == 1, f"{path} has not once: {before}{stale}"
            text = text.replace(before, after)
    path.write_text(text)


@pytest.mark.slow
def test_the_measured_hits_of_the_example_are_so(monkeypatch):
    """The rows of LRU and of the example in the guide, by the traces that come along."""
    monkeypatch.setitem(ALGORITHMS, "slru", SLRU)
    rows = re.findall(
        r"^\| (?:`(\w+)`)? *\| `(\w+)` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$",
        (GUIDES / "eviction.md").read_text(),
        re.MULTILINE,
    )
    assert len(rows) == 10
    trace = None
    for name, algorithm, *told in rows:
        trace = builtin_trace(name) if name else trace
        if algorithm in ("lru", "slru"):
            points = curve_document(trace, algorithm, [0.01, 0.03, 0.1], time.perf_counter)["points"]
            assert [f"{100 * point['hit_ratio']:.2f}" for point in points] == told, (trace.name, algorithm)
