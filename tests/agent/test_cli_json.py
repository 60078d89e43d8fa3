"""Every command writes its result as JSON where it is asked to; the documents of those that tell of files."""

import os

import pytest
from typer.main import get_command

from agent.test_preview import FakePrometheus
from tiertune_agent.cli import app
from tiertune_agent.preview import prometheus

PROCESSES = {"store serve", "agent run"}
"""They serve until they are told to end: there is no result."""


def leaves(command, words=()):
    """All commands below one, by the words that call them."""
    below = getattr(command, "commands", None)
    if below is None:
        return {" ".join(words): command}
    return {call: leaf for name, each in below.items() for call, leaf in leaves(each, (*words, name)).items()}


LEAVES = leaves(get_command(app))


@pytest.mark.parametrize("call", sorted(LEAVES.keys() - PROCESSES))
def test_every_command_has_json(call):
    """With a path, as everywhere."""
    options = {name: option for option in LEAVES[call].params for name in option.opts}
    assert "--json" in options, f"tiertune {call} has no --json"
    assert options["--json"].metavar == "PATH"


def test_a_place_that_may_not_be_written_is_told_before_the_work(tiertune, tmp_path, monkeypatch):
    """A folder, or a file in it, that others own."""
    (tmp_path / "there.json").touch()
    monkeypatch.setattr("os.access", lambda path, mode: mode != os.W_OK or not str(path).startswith(str(tmp_path)))
    for name in ("there.json", "new.json"):
        code, out, err = tiertune("policy", "check", "policy.yaml", "--json", tmp_path / name)
        assert (code, out, "cannot be written" in " ".join(err.split())) == (2, "", True)


def test_a_name_that_is_too_long_is_told_before_the_work(tiertune, tmp_path):
    """As other paths that no file can have."""
    code, out, err = tiertune("policy", "check", "policy.yaml", "--json", tmp_path / ("a" * 300))
    assert (code, out, "File name too long" in " ".join(err.split())) == (2, "", True)


def test_a_link_into_no_folder_is_told_before_the_work(tiertune, tmp_path):
    """The file would be made where the link leads; one that leads to a folder makes it there."""
    (tmp_path / "policy.yaml").write_text("version: 1\n")
    call = ("policy", "check", tmp_path / "policy.yaml", "--json", tmp_path / "link.json")
    (tmp_path / "link.json").symlink_to(tmp_path / "results" / "found.json")
    code, out, err = tiertune(*call)
    assert (code, out, "does not exist: make it" in " ".join(err.split())) == (2, "", True)
    (tmp_path / "results").mkdir()
    assert tiertune(*call)[0] == 0
    assert (tmp_path / "results" / "found.json").is_file()


def test_a_result_that_finds_no_room_names_its_file(tiertune, tmp_path):
    """What failed is not the command: its work is done."""
    (tmp_path / "policy.yaml").write_text("version: 1\n")
    done = tiertune("policy", "check", tmp_path / "policy.yaml", "--json", "/dev/full")
    assert (done[0], done[2]) == (1, "/dev/full: No space left on device\n")


def test_only_processes_are_left_out():
    """Both are there, so that a command renamed is not left out unseen."""
    assert LEAVES.keys() > PROCESSES


@pytest.fixture
def written(tiertune):
    """Runs a command with --json, and without: all else is the same."""

    def run(*words):
        plain, told = tiertune(*words), tiertune.json(*words)
        assert plain == told[0]
        return told

    return run


class TestPolicyCheck:
    def test_a_sound_file_with_its_notes(self, written, tmp_path):
        """As the API's `lint`."""
        path = tmp_path / "p.yaml"
        path.write_text("version: 1\nobjectives: {ttft_p99: 2s}\n")
        done, document = written("policy", "check", path)
        (note,) = document.pop("lint")
        assert (done.returncode, document) == (0, {"file": str(path), "good": True})
        assert done.stdout == f"{note['place']}: note: {note['message']}\n{path}: good\n"
        assert (note["level"], note["place"]) == ("note", f"{path}:2:1")
        assert "no tuner aims at an objective" in note["message"]

    def test_every_error_with_its_place(self, written, tmp_path):
        """Exit 2, and the document is there all the same."""
        path = tmp_path / "p.yaml"
        path.write_text("version: 1\nmode: aotu\nmood: good\n")
        done, document = written("policy", "check", path)
        assert (done.returncode, done.stdout, document["good"]) == (2, "", False)
        assert [one["place"] for one in document["lint"]] == [f"{path}:2:7", f"{path}:3:1"]
        assert done.stderr == "".join(f"{one['place']}: {one['message']}\n" for one in document["lint"])


def test_db_upgrade(tiertune, tmp_path):
    """From which revision to which; none before the first, and again, nothing is left to do."""
    url, told = f"sqlite:///{tmp_path}/h.sqlite", []
    (tmp_path / "a.yaml").write_text(f"database: {url}\nstores: [{{url: 'http://127.0.0.1:9'}}]\n")
    for was in ("was empty, now", "already"):
        done, document = tiertune.json("db", "upgrade", "--config", tmp_path / "a.yaml")
        assert (done.returncode, f"{was} at revision" in done.stdout) == (0, True)
        told.append(document)
    assert {path.name for path in tmp_path.iterdir()} == {"a.yaml", "h.sqlite", "told.json"}
    assert [(one["database"], one["before"]) for one in told] == [(url, None), (url, told[0]["after"])]
    assert told[0]["after"] == told[1]["after"]


def test_dashboards_preview(tiertune, tmp_path, monkeypatch):
    """A page for each dashboard, with how many panels have data."""
    monkeypatch.setattr(
        prometheus, "Prometheus", lambda _: FakePrometheus([({"capacity_bytes": "1"}, [1.0, 2.0])]).source()
    )
    done, document = tiertune.json("dashboards", "preview", "--out", tmp_path / "pages")
    assert done.returncode == 0
    assert [one["file"] for one in document["pages"]] == [line.partition(": ")[0] for line in done.stdout.splitlines()]
    assert all(0 < one["with_data"] <= one["panels"] for one in document["pages"])
    assert {one["file"] for one in document["pages"]} == {str(path) for path in (tmp_path / "pages").iterdir()}
