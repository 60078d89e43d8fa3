"""The adapter's parts that import vLLM, tested where vLLM is."""

import subprocess

import pytest

from e2e.vllm_engines import PYTHON, ROOT, needs_engine


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(400)
@needs_engine
def test_the_adapters_modules_against_the_installed_vllm():
    """tests/engine passes, run by the interpreter of .venv-engine; its report is shown where it does not."""
    command = [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/engine"]
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert run.returncode == 0, run.stdout[-20_000:]
