"""A process learns of a signal at any moment, also in the midst of its look whether one came."""

import os
import signal
import subprocess
import sys

import pytest

from tiertune_connector.ending import Ending, until_told

LOOKS = """
import signal
from tiertune_connector.ending import until_told
with until_told() as ending:
    {arm}
    while not ending.wait(1e-6):
        pass
"""
ALARM = "signal.signal(signal.SIGALRM, lambda *_: ending.set()); signal.setitimer(signal.ITIMER_REAL, {seconds})"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_told_and_goes_on_being_told(number):
    """To who looks, waits or waits no time at all; the process goes on, and its own handlers are back afterwards."""
    before = signal.getsignal(number)
    with until_told() as ending:
        assert not ending.is_set()
        assert not ending.wait(-1.0)
        os.kill(os.getpid(), number)
        assert ending.wait(10)
        assert ending.wait(0.0)
        assert ending.is_set()
    assert signal.getsignal(number) is before


def test_a_signal_that_meets_a_look_ends_the_process():
    """Where the handler waited for a lock that the look holds, a process in some would hang: none of a hundred does."""
    code = "".join(LOOKS.format(arm=ALARM.format(seconds=0.001 + index * 1.3e-5)) for index in range(100))
    subprocess.run([sys.executable, "-c", code], timeout=30, check=True)


def test_the_end_is_told_by_hand():
    """As often as one likes."""
    ending = Ending()
    ending.set()
    ending.set()
    assert ending.wait(0.0)
    assert ending.is_set()
