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


@pytest.mark.parametrize("spread", [(), ("--numprocesses=2",)])
def test_a_thread_that_a_test_left_fails_a_green_run(tmp_path, spread):
    """And is named; it does not keep the run from ending."""
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_leaves.py").write_text(LEAVES)
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", tmp_path, *spread, tmp_path]
    run = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert "2 passed" in run.stdout
    assert run.returncode == 1
    assert "Threads that go on after the last test: left\n" in run.stderr
