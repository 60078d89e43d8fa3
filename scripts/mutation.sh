#!/bin/sh
# Mutation testing of what decides: cost, transit, pool and guard. Mutants are made in a temporary copy; the fast tests
# of these modules must kill them. Prints how many they do by module, and every one that survived; half an hour.
# Exit 1: fewer than 80 % of a module's are killed.
set -eu
cd "$(dirname "$0")/.."

root=$(pwd)
python=$root/.venv/bin/python
copy=$(mktemp -d)
child=
end() {
  trap - EXIT INT TERM HUP
  [ -z "$child" ] || kill "$child" 2>/dev/null || true
  rm -rf "$copy"
  exit "$1"
}
trap 'end $?' EXIT
trap 'end 130' INT
trap 'end 143' TERM
trap 'end 129' HUP

"$python" -m pip install --quiet --disable-pip-version-check --target "$copy/tool" -c constraints/base.txt mutmut
cp -r connector/tiertune_connector agent/tiertune_agent tests examples "$copy"
cd "$copy"
cat > conftest.py <<'END'
from hypothesis import HealthCheck, settings

settings.register_profile("mutation", suppress_health_check=[HealthCheck.differing_executors], deadline=None)
settings.load_profile("mutation")
END
cat > pyproject.toml <<'END'
[tool.pytest.ini_options]
pythonpath = ["tests", "examples"]
addopts = "--import-mode=importlib -p no:cacheprovider"
markers = ["slow", "real", "vllm", "gpu", "long"]

[tool.mutmut]
source_paths = ["tiertune_connector", "tiertune_agent"]
only_mutate = [
  "tiertune_connector/cost/*.py",
  "tiertune_connector/slower/transit.py",
  "tiertune_connector/pool.py",
  "tiertune_agent/policy/guard.py",
]
also_copy = ["tests", "examples", "conftest.py"]
pytest_add_cli_args_test_selection = [
  "tests/agent/test_guard.py",
  "tests/connector/test_cost_backlog.py",
  "tests/connector/test_cost_fetch.py",
  "tests/connector/test_cost_handling.py",
  "tests/connector/test_cost_prefill.py",
  "tests/connector/test_cost_prefill_hidden.py",
  "tests/connector/test_gate.py",
  "tests/connector/test_gate_cuts.py",
  "tests/connector/test_lane.py",
  "tests/connector/test_lane_probes.py",
  "tests/connector/test_pool.py",
  "tests/connector/test_slow_link.py",
  "tests/connector/test_transit.py",
  "tests/contract/test_eviction_contract.py",
]
END
export PYTHONPATH="$copy/tool"
"$python" -m mutmut run > run.log 2>&1 &
child=$!
wait "$child" || { tail -n 40 run.log >&2; exit 2; }
child=
"$python" -m mutmut results --all true > results.txt
"$python" "$root/scripts/mutants.py" < results.txt
