"""A run of tests notices threads that a test left behind, also where the tests are spread over processes."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

LEAVES = """\
import threading

def test_that_passes():
    threading.Thread(target=threading.Event().wait, name="left").start()

def test_that_leaves_nothing():
    pass
"""


ENDS = """\
import threading
import time
from concurrent.futures import ThreadPoolExecutor

def test_that_passes():
    threading.Thread(target=time.sleep, args=(0.5,), name="ends").start()

def test_that_leaves_an_executor_to_the_collector():
    mine = [ThreadPoolExecutor()]
    mine.append(mine)
    mine[0].submit(time.time).result()
"""


def run(folder, tests, *words):
    """A run of ``tests`` alone, with what holds for every test."""
    shutil.copy(Path(__file__).with_name("conftest.py"), folder)
    (folder / "test_leaves.py").write_text(tests)
    call = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", folder, *words, folder]
    return subprocess.run(call, cwd=folder, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("spread", [(), ("--numprocesses=2",)])
def test_a_thread_that_a_test_left_fails_a_green_run(tmp_path, spread):
    """And is named; it does not keep the run from ending."""
    done = run(tmp_path, LEAVES, *spread)
    assert "2 passed" in done.stdout
    assert done.returncode == 1
    assert "Threads that go on after the last test: left\n" in done.stderr


@pytest.mark.parametrize("spread", [(), ("--numprocesses=2",)])
def test_a_thread_that_is_about_to_end_is_waited_for(tmp_path, spread):
    """Else whether a green run fails depends on which test was the last, and on when garbage was collected."""
    done = run(tmp_path, ENDS, *spread)
    assert "2 passed" in done.stdout
    assert (done.returncode, done.stderr) == (0, "")
