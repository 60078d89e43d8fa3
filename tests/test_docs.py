"""The documentation is true: links lead somewhere, commands exist, settings are valid, outputs are what is printed."""

import json
import os
import re
import shlex
import shutil
import subprocess
from importlib.util import find_spec

import pytest
import yaml
from typer.main import get_command

from pages import PAGES, ROOT, anchors, blocks, commands, links, prose, spans
from tiertune_agent.catalogue import METRICS as AGENT_METRICS
from tiertune_agent.cli import app
from tiertune_agent.plan import PlannedFleet
from tiertune_agent.policy.document import Policy
from tiertune_agent.replay.scenario import MODELS, Scenario
from tiertune_agent.settings import AgentSettings
from tiertune_connector.catalogue import LABELS, METRICS, PREFIX, SECONDS_BUCKETS
from tiertune_connector.documents import DocumentError, parse_yaml
from tiertune_connector.keys import tenant_digest
from tiertune_connector.settings import StoreSettings
from tiertune_connector.vllm.settings import PASSED_ON, parse
from tiertune_connector.vllm.stats import METRICS as ENGINE_METRICS

BLOCKS = [block for page in PAGES for block in blocks(page)]
SHELL = [block for block in BLOCKS if block.kind in ("", "sh", "console")]
CONSOLE = [block for block in BLOCKS if block.kind == "console"]
TIERTUNE = get_command(app)
REFERENCE = ROOT / "docs" / "reference"
OURS = (
    *("acceptance", "agent", "benchmarks", "connector", "dashboards", "deploy"),
    *("docs", "examples", "policies", "scripts", "tests"),
)
MADE = ("deploy/secrets",)
"""What a command makes."""
MODELS_OF = {
    "store": (StoreSettings, {"socket": "s", "state_dir": "d", "dram": {"capacity": 0}}),
    "agent": (AgentSettings, {"stores": [{"url": "http://127.0.0.1:7410"}]}),
    "policy": (Policy, {"version": 1}),
    "fleet": (PlannedFleet, {}),
    "scenario": (Scenario, {}),
}
"""Each with what a snippet may leave out."""


def of_pages(pages=PAGES):
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(ROOT)))


# -- links


@of_pages()
def test_every_link_leads_somewhere(page):
    """The file is there, and the heading in it."""
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: there is no {target}"
        assert not anchor or anchor in anchors(target), f"{link}: {target.name} has {sorted(anchors(target))}"


def test_the_index_names_every_page():
    """Whoever opens docs/README.md finds all of it; decisions by their own index."""
    index = ROOT / "docs" / "README.md"
    named = {(index.parent / link.partition("#")[0]).resolve() for link in links(index)}
    written = {page for page in PAGES if page.is_relative_to(index.parent) and page.parent.name != "adr"}
    assert written - {index} <= named


@of_pages()
def test_every_path_that_is_named_is_there(page):
    """Files of this repository that commands and prose name, patterns among them."""
    shell = [block.text for block in blocks(page) if block.kind in ("", "sh", "console")]
    for text in (*spans(page), *shell):
        for path in re.findall(rf"(?<![\w./-])(?:{'|'.join(OURS)})/[\w./*-]*[\w*]", text):
            gone = not list(ROOT.glob(path))
            assert not gone or path.startswith(MADE), f"{path} is named and is not there"


SOURCES = {f"/{path.relative_to(ROOT)}" for folder in OURS for path in ROOT.glob(f"{folder}/**/*.py")}


@of_pages()
def test_every_python_file_that_is_named_is_there(page):
    """Also where only the end of its path is written, as the pages do within one package."""
    for name in re.findall(r"`([\w/]+\.py)`", prose(page)):
        assert any(path.endswith(f"/{name}") for path in SOURCES), f"{name} is named and is not there"


# -- commands


def leaf(words):
    """The command that some words call, and its arguments; AssertionError names the one that there is not."""
    command, rest = TIERTUNE, list(words)
    while hasattr(command, "commands") and rest:
        assert rest[0] in command.commands, f"tiertune has no {rest[0]!r}, but {', '.join(command.commands)}"
        command = command.commands[rest.pop(0)]
    return command, rest


def check_call(words, *, whole):
    """A call of tiertune fits its command; ``whole``: nothing that is needed is left out."""
    command, rest = leaf(words)
    options = {name: option for option in command.params for name in (*option.opts, *option.secondary_opts)}
    given, places = set(), 0
    while rest:
        name, _, value = rest.pop(0).partition("=")
        if not name.startswith("-"):
            places += 1
            continue
        assert name in options or name == "--help", f"{command.name} has no {name}, but {', '.join(options)}"
        given.add(options.get(name))
        if name in options and not options[name].is_flag and not value:
            assert rest, f"{name} wants a value"
            rest.pop(0)
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    assert places <= len(arguments) or any(each.nargs < 0 for each in arguments), f"too many words: {words}"
    if whole:
        needed = {each for each in command.params if each.required and each not in arguments}
        assert needed <= given, f"{[each.opts[0] for each in needed - given]} is needed"
        assert places >= sum(each.required for each in arguments), f"too few words: {words}"


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_every_command_in_a_block_can_be_called(block):
    """`tiertune` with words and options that it has, and those that it needs; targets of the Makefile; modules."""
    for line in block.script:
        for words in commands(line, "tiertune"):
            check_call(words, whole=True)
        for words in commands(line, "make"):
            check_make(words)
        check_modules(line)


@of_pages()
def test_every_command_in_prose_is_one_that_there_is(page):
    """The same for what stands between backticks; what a sentence leaves out is no mistake."""
    for span in spans(page):
        for words in commands(span, "tiertune"):
            check_call(words, whole=False)
        for words in commands(span, "make"):
            check_make(words)
        check_modules(span)


def check_make(words):
    text = (ROOT / "Makefile").read_text()
    for word in words:
        name, assigns, _ = word.partition("=")
        pattern = rf"^{name} \?=" if assigns else rf"^{re.escape(name)}:"
        assert re.search(pattern, text, re.MULTILINE), f"the Makefile has no {word!r}"


def check_modules(line):
    for name in re.findall(r"python3? -m ([\w.]+)", line):
        path = ROOT / name.replace(".", "/")
        ours = path.with_suffix(".py").exists() or (path / "__main__.py").exists()
        assert ours or name.startswith("vllm") or find_spec(name), f"there is no module {name}"


@pytest.mark.parametrize(
    ("call", "handed"),
    [
        (("acceptance", "JSON=my results/a.json"), "my results/a.json"),
        (("bench-tuning", "TRACES=my traces"), "my traces"),
        (("test-next",), "TIERTUNE_ENGINE_PYTHON={}/.venv-engine/bin/python-next"),
    ],
)
def test_make_hands_a_path_with_a_space_on_as_one(tmp_path, call, handed):
    """Whether it was given, or is where the repository lies."""
    folder = tmp_path / "my folder"
    for name in ("Makefile", "pyproject.toml", "constraints/base.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    ran = subprocess.run(
        ["make", "--dry-run", *call], cwd=folder, check=True, capture_output=True, text=True, timeout=30
    )
    lines = [line for line in ran.stdout.replace("\\\n", "").splitlines() if "python -m" in line]
    assert handed.format(folder) in [word for line in lines for word in shlex.split(line)]


@pytest.mark.parametrize("block", CONSOLE, ids=str)
def test_what_is_shown_is_what_is_printed(block, tiertune, monkeypatch):
    """Each command of a console block is run; `...` stands for what differs from run to run, or is left out."""
    monkeypatch.chdir(ROOT)
    for call, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n?)*)", block.text, re.MULTILINE):
        (words,) = commands(call, "tiertune")
        done = tiertune(*words)
        assert done.returncode == 0, done.stderr
        printed = "\n".join(line.rstrip() for line in done.stdout.splitlines())
        pattern = re.escape(shown.strip("\n")).replace(re.escape("..."), "(?s:.*?)")
        assert re.fullmatch(pattern, printed.strip("\n")), printed


# -- settings


def check_document(text, kind, where):
    """A settings file, or a part of one, of some kind; of any where none is named."""
    problems = []
    for name in [kind] if kind else MODELS_OF:
        model, left_out = MODELS_OF[name]
        lacking = {key: value for key, value in left_out.items() if key not in yaml.safe_load(text)}
        try:
            parse_yaml(f"{text}\n{yaml.safe_dump(lacking) if lacking else ''}", model, name=f"{where} as {name}")
        except DocumentError as error:
            problems += error.problems
        else:
            return
    pytest.fail("\n".join(problems))


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.kind.startswith("yaml")], ids=str)
def test_every_yaml_snippet_is_a_valid_document(block):
    """Of a store, an agent, a policy, a fleet or a scenario; those of other programs are at least YAML."""
    _, _, kind = block.kind.partition(" ")
    if kind == "other":
        assert yaml.safe_load(block.text)
    else:
        check_document(block.text, kind, block)


@pytest.mark.parametrize("block", [block for block in SHELL if block.heredocs], ids=str)
def test_every_file_that_a_guide_writes_is_valid(block):
    """By its name: store*.yaml, agent.yaml, policy.yaml."""
    for name, text in block.heredocs.items():
        plain = re.sub(r"\$\w+", "x", re.sub(r"\$\([^)]*\)", "7410", text))
        if (kind := re.match(r"store|agent|policy", name)) is not None:
            check_document(plain, kind[0], f"{block} {name}")
        elif name.endswith((".yml", ".yaml")):
            assert yaml.safe_load(plain)


@pytest.mark.parametrize("block", [block for block in BLOCKS if "kv_connector_extra_config" in block.text], ids=str)
def test_every_engine_setting_is_one_that_there_is(block):
    """What stands in `kv_connector_extra_config` is read as an engine reads it."""
    found = re.findall(r'"kv_connector_extra_config":\s*(\{[^{}]*\})', block.text)
    assert found
    for text in found:
        assert parse(json.loads(text))


def test_the_readme_of_the_connector_lists_every_key():
    """The table by hand has the keys that an engine takes, and no other."""
    page = ROOT / "connector" / "README.md"
    section = prose(page).partition("### Keys of")[2].partition("\n### ")[0]
    listed = set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
    told = set(
        re.findall(r"^\| `(\w+)` \|", (REFERENCE / "settings.md").read_text().partition("## Engine")[2], re.MULTILINE)
    )
    assert listed == told
    assert set(spans(page)) >= PASSED_ON


# -- references


def test_the_references_are_what_the_code_says(monkeypatch, capsys):
    """Generated anew they differ in no byte, and nothing else lies there."""
    monkeypatch.syspath_prepend(ROOT)
    from reference.build import main

    assert main(["--check"]) == 0, capsys.readouterr().out


@of_pages(sorted(REFERENCE.glob("*.md")))
def test_every_row_of_a_reference_has_a_meaning(page):
    """A field without a docstring, or a metric without help, is found out here."""
    rows = [line for line in page.read_text().splitlines() if line.startswith("| `")]
    assert len(rows) >= 20
    assert [row for row in rows if re.search(r"\|\s*\|$", row)] == []


def test_every_variable_of_the_environment_is_told():
    """What the code reads by the name TIERTUNE_... is in the reference of settings."""
    code = [*ROOT.glob("agent/**/*.py"), *ROOT.glob("connector/**/*.py")]
    read = {name for path in code for name in re.findall(r'"(TIERTUNE_[A-Z_]+)"', path.read_text())}
    assert read == set(re.findall(r"`(TIERTUNE_\w+)`", (REFERENCE / "settings.md").read_text()))


@pytest.mark.parametrize("key", ["fleet " * 20, None])
def test_a_tenants_digest_is_computed_as_engines_do(key):
    """Quotas and `flush --tenant` want it, and nobody else tells it. Also with a key longer than is used, or none."""
    (block,) = (block for block in blocks(REFERENCE / "tuning.md") if "hashlib" in block.text)
    set_to = {"SALT": "ü salt", "TIERTUNE_TENANT_KEY": key}
    named = " ".join(f"{name}={shlex.quote(value)}" for name, value in set_to.items() if value)
    script = block.text.replace("SALT=... TIERTUNE_TENANT_KEY=...", named)
    told = subprocess.check_output(["sh", "-ec", script], text=True, env={"PATH": os.environ["PATH"]})
    assert told.strip() == tenant_digest("ü salt", os.fsencode(key or "")).hex()


def test_every_label_is_explained():
    """Of all three catalogues; and none that no metric has."""
    used = {label for metric in (*METRICS, *AGENT_METRICS, *ENGINE_METRICS) for label in metric.labels}
    assert used | {"store"} == set(LABELS)


def test_histograms_of_buckets_of_their_own_are_named():
    """Of all others one range is told."""
    told, _, _ = (REFERENCE / "metrics.md").read_text().partition("\n## ")
    own = [f"{PREFIX}{one.name}" for one in (*METRICS, *AGENT_METRICS) if one.buckets not in ((), SECONDS_BUCKETS)]
    assert [name for name in own if f"`{name}`" not in told] == []


# -- figures and proofs


def test_bytes_per_token_are_those_of_the_replay():
    """The table of sizes has every model that a scenario can name."""
    text = (ROOT / "docs" / "sizing.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)`[^|]*\| ([\d.]+) \| ([\d.]+) MiB \| ([\d.]+) GiB \|$", text, re.MULTILINE)
    told = {
        name: (
            f"{spec.kv_token_bytes / 1024:.3g}",
            256 * spec.kv_token_bytes / 2**20,
            8000 * spec.kv_token_bytes / 2**30,
        )
        for name, spec in MODELS.items()
    }
    assert {name: (kib, float(chunk), float(prompt)) for name, kib, chunk, prompt in rows} == {
        name: (kib, round(chunk, 1), round(prompt, 1)) for name, (kib, chunk, prompt) in told.items()
    }


def test_every_fault_names_tests_that_there_are():
    """A line of the faults' page stands on a test by its name."""
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "faults.md").read_text())
    assert len(named) > 40
    gone = [f"{path}::{name}" for path, name in named if f"def {name}(" not in (ROOT / path).read_text()]
    assert gone == []


def test_files_that_scripts_name_are_there():
    """A test file that is merged into another one must not end mutation testing."""
    named = [
        (script.name, path)
        for script in sorted((ROOT / "scripts").glob("*.sh"))
        for path in re.findall(r'"(tests/[\w/]+\.py)"', script.read_text())
    ]
    assert len(named) >= 10
    assert [each for each in named if not (ROOT / each[1]).is_file()] == []


def test_servers_that_cannot_be_installed_end_no_target(tmp_path):
    """Where Debian's lists cannot be read, or a package is not to be had, it is named, and tests are skipped for it."""
    for name, does in (("id", "echo 0"), ("apt-get", 'echo "apt-get: $*" >&2; exit 100')):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{does}\n")
        program.chmod(0o755)
    ran = subprocess.run(
        ["/bin/bash", ROOT / "scripts/setup_servers.sh"],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "not installed: redis-server; tests that need it are skipped" in ran.stdout
