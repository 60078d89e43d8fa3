"""A bar tells how far long work has come: on standard error, and only where that is a terminal."""

import re
import sys

import pytest

from agent.engine_server import fake_engine
from replay.files import SCENARIO, columns, write_trace
from tiertune_agent.terminal.progress import bar

FULL = re.compile(r"(?<!\d)(\d+)/\1(?!\d)")
"""All steps are done."""


@pytest.fixture
def terminal(monkeypatch):
    """Makes standard error one; within the test, whose streams those of its fixtures are not."""

    def make():
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)

    return make


@pytest.fixture(scope="module")
def engine():
    with fake_engine() as one:
        yield one


@pytest.fixture
def calls(tmp_path, engine):
    """Commands that may take long, on something short."""
    trace = write_trace(tmp_path / "t.parquet", columns())
    (tmp_path / "p.yaml").write_text("version: 1\nmode: auto\n")
    (tmp_path / "p.txt").write_text("one two three")
    (tmp_path / "tier").mkdir()
    return {
        "curve": ("curve", trace, "--sizes", "0.1,0.5"),
        "replay": ("replay", trace, trace, "--scenario", SCENARIO, "--run", "never,rule"),
        "backtest": ("policy", "backtest", tmp_path / "p.yaml", "--trace", trace, "--scenario", SCENARIO),
        "doctor": ("doctor", "--storage", f"file://{tmp_path}/tier"),
        "prewarm": ("prewarm", tmp_path / "p.txt", tmp_path / "p.txt", "--engine", engine.url),
    }


NAMES = ("curve", "replay", "backtest", "doctor", "prewarm")


@pytest.mark.parametrize("name", NAMES)
def test_a_terminal_sees_how_far_it_is(tiertune, terminal, calls, name):
    """To its end, on standard error alone: what is printed and written is as ever."""
    terminal()
    done, document = tiertune.json(*calls[name])
    assert FULL.search(done.stderr), done.stderr
    assert "\x1b" not in done.stdout
    assert "━" not in done.stdout
    assert done.stdout
    assert document


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_terminal_sees_nothing(tiertune, calls, monkeypatch, name):
    """Not even where the environment asks for colour."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert tiertune(*calls[name]).stderr == ""


def test_what_is_said_meanwhile_stands_on_standard_output(terminal, capsys):
    """While it is said the bar is not drawn."""
    terminal()
    with bar("work", 2) as progress:
        progress.step()
        capsys.readouterr()
        progress.aside(lambda: print("one is done"))  # noqa: T201
        progress.step()
    out, err = capsys.readouterr()
    assert out == "one is done\n"
    assert "one is done" not in err
    assert FULL.search(err)


def test_a_bar_is_gone_after_a_failure(terminal, capsys):
    """The cursor is shown again, and the failure goes on."""
    terminal()
    with pytest.raises(ZeroDivisionError), bar("work", 2):
        raise ZeroDivisionError
    assert "\x1b[?25h" in capsys.readouterr().err
