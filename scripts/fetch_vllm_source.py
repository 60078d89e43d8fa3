"""``fetch_vllm_source.py VERSION FOLDER``: vLLM's Python source, without its kernels and not installed.

pip has no command that only unpacks: it also asks a source for its dependencies, for which vLLM needs its whole build
environment. So pip is left to fail there, and told not to clean up.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path


def unpacked(version: str, scratch: Path) -> Path | None:
    """The package's folder in ``scratch``, or None if pip could not get it."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-clean", "--no-deps"]
    options = ["--no-binary", "vllm", "--no-build-isolation", "--dest", str(scratch), f"vllm=={version}"]
    environment = os.environ | {"TMPDIR": str(scratch), "VLLM_TARGET_DEVICE": "empty"}
    subprocess.run([*pip, *options], env=environment, check=False, capture_output=True)  # noqa: S603
    for archive in scratch.glob("vllm-*.tar.gz"):
        with tarfile.open(archive) as tar:
            tar.extractall(scratch, filter="data")
    return next((found.parent for found in scratch.rglob("vllm/__init__.py")), None)


def main(version: str, folder: Path) -> int:
    """Copy the Python files to ``folder``/vllm; 1 if they cannot be had."""
    with tempfile.TemporaryDirectory() as scratch:
        package = unpacked(version, Path(scratch))
        if package is None:
            sys.stderr.write(f"the source of vLLM {version} could not be fetched with pip\n")
            return 1
        files = [path for path in package.rglob("*.py") if path.is_file()]
        for path in files:
            copy = folder / "vllm" / path.relative_to(package)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
