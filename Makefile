# Every target does its own set-up: Python 3.11 or later and make are enough.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.stamp-$(shell cat pyproject.toml constraints/base.txt 2>/dev/null | cksum | cut -d' ' -f1)

# Tests of parts, on all processors. Those of whole processes come one after the other: they measure time, or need it.
SPREAD := $(BIN)/python -m pytest --numprocesses=auto --maxprocesses=8 --dist=worksteal

.DEFAULT_GOAL := help
.PHONY: help setup setup-engine setup-lmcache setup-ray setup-servers demo acceptance test test-fast test-long test-next mutation bench bench-peers bench-tuning graph lint format generate clean

help:  ## This list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(STAMP)  ## .venv with everything that runs

$(STAMP): pyproject.toml constraints/base.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "TierTune needs Python 3.11 or later: call make PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints/base.txt -e '.[agent,dashboards,postgres,dev]'
	@rm -f .venv/.stamp-* && touch $@

setup-engine:  ## .venv-engine with vLLM for the CPU (several GB)
	@PYTHON=$(PYTHON) bash scripts/setup_engine.sh

setup-lmcache:  ## .venv-lmcache with an LMCache server for the CPU (1.6 GB), to be observed in tests
	@PYTHON=$(PYTHON) bash scripts/setup_lmcache.sh

setup-ray: setup  ## Ray into .venv (250 MB), for the test of sweeps over it
	@$(BIN)/python -c 'import ray' 2>/dev/null \
	  || $(BIN)/pip install --quiet --disable-pip-version-check -c constraints/base.txt -e '.[ray]'

setup-servers:  ## Debian's servers (Redis, PostgreSQL, Prometheus, ...) and programs for the tests, where this is root
	@bash scripts/setup_servers.sh

demo: setup  ## The whole loop on this machine: stores, engines, remote tier, agent, page; ends by itself
	$(BIN)/tiertune demo

JSON ?=
acceptance: setup setup-servers  ## Proves the whole on shifting traffic, a sentence of evidence for each claim; 11 minutes (JSON=file)
	$(BIN)/python -m acceptance $(if $(JSON),--json "$(JSON)")

test: setup setup-servers  ## Everything that can run here; what cannot is skipped with its reason
	-@$(MAKE) --no-print-directory setup-engine
	-@$(MAKE) --no-print-directory setup-lmcache
	-@$(MAKE) --no-print-directory setup-ray
	@$(SPREAD) --ignore=tests/e2e --ignore=tests/engine; spread=$$?; \
	  $(BIN)/python -m pytest tests/e2e tests/engine && [ $$spread = 0 ] \
	  || { $(BIN)/python -m pytest --cache-show cache/lastfailed; echo "on all processors: exit status $$spread"; exit 1; }

test-fast: setup  ## What needs no server and no patience
	$(SPREAD) -m "not slow and not real and not vllm"

test-long: setup setup-servers  ## Half an hour of faults, a year of 50 stores, a round over 500; figures into benchmarks/results
	$(BIN)/python -m pytest -m long

test-next: setup setup-servers setup-engine  ## The adapter's tests with the next vLLM's code, over this one's kernels
	@test -x .venv-engine/bin/python-next || { echo "test-next: the next vLLM's source could not be fetched" >&2; exit 2; }
	TIERTUNE_ENGINE_PYTHON="$(CURDIR)/.venv-engine/bin/python-next" $(BIN)/python -m pytest \
	  tests/e2e/test_engine_modules.py tests/e2e/test_vllm_sharing.py tests/e2e/test_vllm_faults.py

mutation: setup  ## Mutants of cost, transit, pool and guard: how many the tests kill; half an hour
	@sh scripts/mutation.sh

bench: setup setup-servers  ## Benchmarks into bench.json: the store's data path, real engines with and without sharing
	$(BIN)/python -m benchmarks.store --json bench.json
	@$(MAKE) --no-print-directory setup-engine
	$(BIN)/python -m benchmarks.engines --json bench.json

bench-peers: setup setup-servers  ## LMCache beside the store, the same chunks in turns, into bench.json
	-@$(MAKE) --no-print-directory setup-lmcache
	$(BIN)/python -m benchmarks.store --parts peers --json bench.json

TRACES ?=
SEEDS ?= 1
PARTS ?=
bench-tuning: setup  ## The tuners' goals into tuning.json (TRACES=folder of traces, SEEDS=n, PARTS="gate cost")
	$(BIN)/python -m benchmarks.tuning --json tuning.json --seeds $(SEEDS) \
	  $(if $(TRACES),--traces "$(TRACES)") $(if $(PARTS),--parts $(PARTS))

lint: setup  ## ruff, mypy strict, import rules, generated files up to date
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_imports.py
	$(BIN)/python -m dashboards.build --check
	$(BIN)/python -m reference.build --check

graph: setup  ## Who imports whom, in layers; the picture is docs/pictures/layers.svg, drawn by `make generate`
	@$(BIN)/python -m reference.layers

format: setup  ## Rewrite the code as ruff wants it
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

generate: setup  ## Rewrite the generated files: dashboards, rules, references, architecture, results, schema
	$(BIN)/python -m dashboards.build
	$(BIN)/python -m reference.build

clean:  ## Remove the environments and caches that the other targets made; results stay
	rm -rf .venv .venv-engine .venv-lmcache .pytest_cache .mypy_cache .ruff_cache .hypothesis
