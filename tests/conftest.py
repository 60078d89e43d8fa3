"""What holds for every test."""

import gc
import os
import sys
import threading
from typing import NamedTuple

import pytest
from hypothesis import settings

# A busy machine is no finding. On a build server a run must say the same of the same code: new examples are searched
# for at a developer's.
settings.register_profile("tests", deadline=None)
settings.register_profile("build server", deadline=None, derandomize=True)
settings.load_profile("build server" if os.environ.get("CI") else "tests")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported and collected stays: to look through it for garbage again and again takes seconds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    """A thread that a failed test left behind does not keep the run from ending, and fails a run that is green."""
    left = [one.name for one in threading.enumerate() if one is not threading.main_thread() and not one.daemon]
    if left:
        print(f"\nThreads that go on after the last test: {', '.join(left)}", file=sys.__stderr__)
        sys.stdout.flush()
        sys.__stderr__.flush()
        os._exit(getattr(config, "exit_status", 0) or 1)


def pytest_sessionfinish(session, exitstatus):
    """What the run's verdict is, for :func:`pytest_unconfigure`."""
    session.config.exit_status = int(exitstatus)


class Done(NamedTuple):
    """What a command left behind."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def tiertune(monkeypatch, capsys):
    """Runs one command as the shell would, but in this process: starting another costs more than most commands."""

    def run(*arguments):
        from tiertune_agent import cli

        monkeypatch.setattr(sys, "argv", ["tiertune", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return Done(ended.value.code or 0, *capsys.readouterr())

    return run
