"""A process learns of a signal at any moment, also in the midst of its look whether one came."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from connector.stores import eventually
from tiertune_connector.ending import Ending, until_told

LOOKS = """
import signal
from tiertune_connector.ending import until_told
with until_told() as ending:
    {arm}
    while not ending.wait(1e-6):
        pass
"""
HANGS = """
import atexit, logging, threading
from concurrent.futures import ThreadPoolExecutor
from tiertune_connector.ending import leave
logging.basicConfig(format="%(message)s")
hung, threads = threading.Event(), ThreadPoolExecutor(2, thread_name_prefix="disk-read")
threads.submit({call})
threads.shutdown(wait=False)
leave({patience_s})
atexit.register(print, "left as any other")
"""
FIRST = ("unshare", "--map-root-user", "--pid", "--fork", "--kill-child")
"""Before a command: it runs as the first process of a pid namespace, as in a container."""
ALARM = "signal.signal(signal.SIGALRM, lambda *_: ending.set()); signal.setitimer(signal.ITIMER_REAL, {seconds})"


@pytest.fixture
def hangup():
    """Sets what SIGHUP does, whatever the tests were started under."""
    before = signal.getsignal(signal.SIGHUP)
    yield lambda handler: signal.signal(signal.SIGHUP, handler)
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_told_and_goes_on_being_told(number, hangup):
    """To who looks, waits or waits no time at all; the process goes on, and its own handlers are back afterwards."""
    hangup(signal.SIG_DFL)
    before = signal.getsignal(number)
    with until_told() as ending:
        assert not ending.is_set()
        assert not ending.wait(-1.0)
        os.kill(os.getpid(), number)
        assert ending.wait(10)
        assert ending.wait(0.0)
        assert ending.is_set()
    assert signal.getsignal(number) is before


def test_a_terminal_that_closes_ends_nothing_under_nohup(hangup):
    """SIGHUP is ignored there, and stays so, also afterwards."""
    hangup(signal.SIG_IGN)
    with until_told() as ending:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not ending.wait(0.0)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_a_signal_that_meets_a_look_ends_the_process():
    """Where the handler waited for a lock that the look holds, a process in some would hang: none of a hundred does."""
    code = "".join(LOOKS.format(arm=ALARM.format(seconds=0.001 + index * 1.3e-5)) for index in range(100))
    subprocess.run([sys.executable, "-c", code], timeout=30, check=True)


@pytest.mark.parametrize(
    "command",
    [
        ("-m", "tiertune_connector.serve", "/dev/stdin"),
        ("-c", "from tiertune_agent.cli import main; main()", "store", "serve", "--config", "/dev/stdin"),
    ],
    ids=["module", "command line"],
)
def test_a_container_that_is_still_starting_ends_when_told(command, tmp_path):
    """The kernel keeps a signal without a handler from its first process, which would serve until it is killed."""
    (tmp_path / "uvicorn.py").write_text("input()")  # what it imports takes its time
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    if subprocess.run([*FIRST, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine gives no pid namespace of one's own")
    with subprocess.Popen([*FIRST, sys.executable, *command], stdin=subprocess.PIPE, env=env) as outer:
        try:
            children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
            (first,) = eventually(lambda: children.read_text().split())
            caught = lambda: int(re.search(r"SigCgt:\t(\w+)", Path(f"/proc/{first}/status").read_text())[1], 16)  # noqa: E731
            eventually(lambda: caught() >> signal.SIGTERM - 1 & 1)
            os.kill(int(first), signal.SIGTERM)
            assert outer.wait(10) == 128 + signal.SIGTERM
        finally:
            outer.kill()


def test_a_process_does_not_wait_for_what_hangs():
    """Python itself would: it ends well, and says what it left; where all ends in time it goes the usual way."""

    def left(**how):
        command = [sys.executable, "-c", HANGS.format(**how)]
        return subprocess.run(command, timeout=30, check=True, capture_output=True, text=True)

    said = left(call="hung.wait", patience_s=0.3)
    assert (said.stdout, said.stderr) == ("", "ends though these hang: disk-read_0\n")
    said = left(call="lambda: hung.wait(0.1)", patience_s=20)
    assert (said.stdout, said.stderr) == ("left as any other\n", "")


def test_the_end_is_told_by_hand():
    """As often as one likes."""
    ending = Ending()
    ending.set()
    ending.set()
    assert ending.wait(0.0)
    assert ending.is_set()
