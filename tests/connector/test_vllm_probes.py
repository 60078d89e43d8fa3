"""What the adapter counts on in vLLM: found in a source, or named."""

import ast
import re
from pathlib import Path

import pytest

from tiertune_connector.vllm import probes
from tiertune_connector.vllm.probes import NEEDS, UnsupportedError, check, check_source

ROOT = Path(__file__).parents[2]
NEXT = ROOT / ".venv-engine" / "source" / "vllm-0.33.0" / "vllm"
WHY = "no source of vLLM 0.33: make setup-engine has not fetched it"

SOURCE = """
class Tier(ABC):
    medium: str = "x"
    SIZES = [color for color in "rgb"]
    if True:
        @property
        def size(self): ...

    def __init__(self, view, *, detector=None):
        self.locality = None

    @abstractmethod
    def lookup(self, key): ...


def build(config, *parts, **more): ...
"""


@pytest.fixture
def vllm(tmp_path):
    """A source that has every file of NEEDS and nothing in it, but for one."""
    for name in NEEDS:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "tier.py").write_text(SOURCE)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "has", "problems"),
    [
        ("Tier", "medium size locality lookup", []),
        ("Tier.__init__", "view detector", []),
        ("build", "config", []),
        ("Tier", "color", ["tier.py: Tier has no color"]),
        ("Tier.__init__", "spec", ["tier.py: Tier.__init__ has no parameter spec"]),
        ("build", "parts more", ["tier.py: build has no parameter parts", "tier.py: build has no parameter more"]),
        ("Tier.load", "", ["tier.py: no Tier.load"]),
    ],
)
def test_a_need_is_met_or_named(vllm, monkeypatch, name, has, problems):
    """Fields, properties, what a constructor sets, parameters; not what takes the rest, or is gone behind its line."""
    monkeypatch.setattr(probes, "NEEDS", {"tier.py": {name: has}})
    assert check_source(vllm) == problems


def test_a_file_that_is_not_there_is_named(vllm, monkeypatch):
    """Once for each that it should have."""
    monkeypatch.setattr(probes, "NEEDS", {"other.py": {"Tier": "medium"}})
    assert check_source(vllm) == ["other.py: no such file, for Tier"]


def test_a_source_that_is_not_python_is_no_file(vllm, monkeypatch):
    """A broken installation is told like a missing one."""
    (vllm / "tier.py").write_text("class")
    monkeypatch.setattr(probes, "NEEDS", {"tier.py": {"Tier": ""}})
    assert check_source(vllm) == ["tier.py: no such file, for Tier"]


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1.dev3+g12ab", "0.33.0"])
def test_known_versions_run(vllm, monkeypatch, version):
    """The tested one in silence, the one that was only looked at with a warning."""
    monkeypatch.setattr(probes, "NEEDS", {})
    warning = check(version, vllm, allow_untested=False)
    assert bool(warning) is version.startswith("0.33")


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0.0", "dev"])
def test_other_versions_are_refused_unless_allowed(vllm, monkeypatch, version):
    """The message says which were tested, and which key lets others run."""
    monkeypatch.setattr(probes, "NEEDS", {})
    with pytest.raises(UnsupportedError, match=rf"vLLM 0\.32 .* 0\.33; this is vLLM {version}\. .*allow_untested"):
        check(version, vllm, allow_untested=False)
    assert version in check(version, vllm, allow_untested=True)


@pytest.mark.parametrize("version", ["0.32.0", "0.34.0"])
def test_what_lacks_is_refused_whatever_is_allowed(vllm, version):
    """An engine that would fail later, and less clearly, does not start."""
    with pytest.raises(UnsupportedError, match=r"lacks what TierTune counts on: .*no SecondaryTierManager\.__init__"):
        check(version, vllm, allow_untested=True)


@pytest.mark.skipif(not NEXT.exists(), reason=WHY)
def test_the_next_vllm_has_what_the_adapter_counts_on():
    """The source of 0.33."""
    assert check_source(NEXT) == []
    assert '"0.33.0"' in (NEXT / "_version.py").read_text() or "'0.33.0'" in (NEXT / "_version.py").read_text()


@pytest.mark.skipif(not NEXT.exists(), reason=WHY)
@pytest.mark.parametrize(
    ("path", "name", "has"),
    [(path, name, has) for path, needed in NEEDS.items() for name, has in needed.items()],
    ids=lambda part: part.partition(" ")[0],
)
def test_every_name_would_be_missed(tmp_path, monkeypatch, path, name, has):
    """Taken out of the source of 0.33, each is named: no probe holds whatever is there."""
    tree = ast.parse((NEXT / path).read_text())
    tree.body = [node for node in tree.body if getattr(node, "name", "") == name.partition(".")[0]]
    spoiled = tmp_path / path
    spoiled.parent.mkdir(parents=True)
    monkeypatch.setattr(probes, "NEEDS", {path: {name: has}})
    source = ast.unparse(tree)
    spoiled.write_text(source)
    assert check_source(tmp_path) == [], "all that it looks at is here"
    for one in has.split() or [name.rpartition(".")[2]]:
        spoiled.write_text(re.sub(rf"\b{one}\b", "gone", source))
        assert any(one in line for line in check_source(tmp_path)), one
