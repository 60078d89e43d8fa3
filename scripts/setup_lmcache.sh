#!/bin/sh
# Makes .venv-lmcache: an LMCache server for the CPU, pinned by constraints/lmcache.txt, for the tests that observe one.
# Its pins exclude those of vLLM and of TierTune, hence an environment of its own. Quick if that is done.
# PYTHON names the interpreter (3.11 to 3.13; default python3). Exit 2: what is needed cannot be had, and what to do.
set -eu
cd "$(dirname "$0")/.."

pins=constraints/lmcache.txt
venv=.venv-lmcache
python=${PYTHON:-python3}
stamp=$venv/.tiertune-setup
wanted=$(cat "$pins" scripts/setup_lmcache.sh | sha256sum | cut -d ' ' -f 1)

if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
  exit 0
fi

if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; then
  echo "setup-lmcache: $python is not Python 3.11 to 3.13: set PYTHON to one that is" >&2
  exit 2
fi
if [ "$(uname -sm)" != "Linux x86_64" ]; then
  echo "setup-lmcache: the pins of $pins are for Linux on x86-64, this is $(uname -sm)" >&2
  exit 2
fi

rm -f "$stamp"
[ -x "$venv/bin/pip" ] || "$python" -m venv "$venv"
pip="$venv/bin/pip --disable-pip-version-check --quiet"

torch=$(grep '^torch==' "$pins")
if ! $pip install --no-deps "$torch"; then
  cat >&2 <<TEXT
setup-lmcache: none of pip's indexes has $torch, torch's build for the CPU.
Name one that has it: set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels or to a mirror of it (pip's option
--extra-index-url), or PIP_FIND_LINKS to a folder with the wheel (--find-links); then run make setup-lmcache again.
TEXT
  exit 2
fi
$pip install --no-deps --requirement "$pins"
LMCACHE_TRACK_USAGE=false "$venv/bin/python" -c 'import lmcache.cli, torch' 2>/dev/null || {
  echo "setup-lmcache: $venv is installed but does not import lmcache; remove $venv and try again" >&2
  exit 1
}
echo "$wanted" > "$stamp"
