"""What holds for every test."""

import gc
import json
import os
import sys
import threading
import time
from typing import NamedTuple

import pytest
from hypothesis import settings

# A busy machine is no finding. On a build server a run must say the same of the same code: new examples are searched
# for at a developer's.
settings.register_profile("tests", deadline=None)
settings.register_profile("build server", deadline=None, derandomize=True)
settings.load_profile("build server" if os.environ.get("CI") else "tests")

ENDING_S = 5.0
"""Patience with threads that the last test told to end."""


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported and collected stays: to look through it for garbage again and again takes seconds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def lasting():
    """Names of the threads that keep this process from ending; those that are about to end are waited for.

    Also those of an executor that nobody has any more: they end when it is collected, which is at no certain time.
    """
    gc.collect()
    until = time.monotonic() + ENDING_S
    threads = [one for one in threading.enumerate() if one is not threading.main_thread() and not one.daemon]
    for one in threads:
        one.join(max(0.0, until - time.monotonic()))
    return [one.name for one in threads if one.is_alive()]


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    """A thread that a failed test left behind does not keep the run from ending, and fails a run that is green."""
    left = [*lasting(), *getattr(config, "left_by_workers", ())]
    if left:
        print(f"\nThreads that go on after the last test: {', '.join(left)}", file=sys.__stderr__)
        sys.stdout.flush()
        sys.__stderr__.flush()
        os._exit(getattr(config, "exit_status", 0) or 1)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    """What the run's verdict is, for :func:`pytest_unconfigure`; where tests are spread, what this process left."""
    session.config.exit_status = int(exitstatus)
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left"] = lasting()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Where tests are spread, how a process that ran some of them ends is not the run's verdict."""
    left = getattr(node, "workeroutput", {}).get("left", ())  # one that crashed tells nothing
    node.config.left_by_workers = [*getattr(node.config, "left_by_workers", ()), *left]


class Done(NamedTuple):
    """What a command left behind."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def tiertune(monkeypatch, capsys, tmp_path):
    """Runs one command as the shell would, but in this process: starting another costs more than most commands.

    ``tiertune.json`` runs it with ``--json``, and returns the document too.
    """

    def run(*arguments):
        from tiertune_agent import cli

        monkeypatch.setattr(sys, "argv", ["tiertune", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return Done(ended.value.code or 0, *capsys.readouterr())

    def told(*arguments):
        path = tmp_path / "told.json"
        done = run(*arguments, "--json", path)
        return done, json.loads(path.read_text())

    run.json = told
    return run
