# Every task, as CI runs it. `make` lists them.

VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed.stamp

# The first interpreter that runs, is new enough and can make an environment. Asking each by running it, because a
# version manager's shim can exist and fail. `make PYTHON=/path/to/python` overrides it.
CANDIDATES := python3.13 python3.12 python3.11 python3
PROBE := import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in $(CANDIDATES); do if $$p -c '$(PROBE)' >/dev/null 2>&1; then echo $$p; break; fi; done)

# Test processes. Two keep a small machine busy without starving the tests that start processes of their own.
JOBS ?= 2
# How long `make fuzz` runs, in seconds.
FUZZ_SECONDS ?= 60

.DEFAULT_GOAL := help
.PHONY: help $(VENV) demo test lowest lint docs bench bench-peers fuzz mutate clean

help: ## list the targets
	@awk -F ':.*## ' '/^[^#[:space:]].*:.*## / {sub(/\$$\(VENV\)/, "$(VENV)", $$1); printf "%-11s %s\n", $$1, $$2}' \
	  $(firstword $(MAKEFILE_LIST))

$(VENV): $(STAMP) ## make the environment with everything for development (PYTHON=... chooses the interpreter)

$(STAMP): pyproject.toml
	@"$(PYTHON)" -c '$(PROBE)' >/dev/null 2>&1 || { \
	  echo "make: '$(PYTHON)' is no Python >= 3.11 with venv; say which: make PYTHON=/path/to/python" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: $(STAMP) ## sign a small checkpoint, load it, then try to cheat
	@$(BIN)/safeload demo

test: $(STAMP) ## run every test but the fuzzers
	$(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --hypothesis-profile ci

# The oldest Python: some of those releases have wheels for no later one.
LOWEST_PYTHON ?= python3.11

lowest: ## run every test on the lowest releases that pyproject.toml admits (LOWEST_PYTHON=... is a Python 3.11)
	@$(VENV)-lowest/bin/python -m pip --version >/dev/null 2>&1 || "$(LOWEST_PYTHON)" -m venv --clear $(VENV)-lowest
	$(VENV)-lowest/bin/python -m pip install --quiet --disable-pip-version-check --constraint tests/lowest.txt \
	  --editable '.[dev]'
	$(VENV)-lowest/bin/python -m pytest -q -n $(JOBS) --dist loadfile --hypothesis-profile ci

lint: $(STAMP) ## check style, types and who imports whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(STAMP) ## make docs/cli.md and docs/demo.svg anew
	$(BIN)/python docs/make_cli.py
	$(BIN)/python docs/make_demo.py

bench: $(STAMP) ## run every benchmark; each prints one table
	@set -e; for f in benchmarks/bench_*.py; do \
	  echo "== $$f"; $(BIN)/python -m "benchmarks.$$(basename "$$f" .py)"; done

bench-peers: ## install the peers that the benchmarks compare with, in an environment of their own
	@$(VENV)-peers/bin/python -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv --clear $(VENV)-peers
	$(VENV)-peers/bin/python -m pip install --quiet --disable-pip-version-check picklescan modelscan fickling model-signing pyOpenSSL \
	  safetensors numpy jax orbax-checkpoint torch==2.13.0

fuzz: $(STAMP) ## feed damaged and random bytes to the parsers for FUZZ_SECONDS (default 60)
	@$(BIN)/python -c 'import atheris' 2>/dev/null || \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,fuzz]'
	$(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS)

mutate: $(STAMP) ## remove each check of the pickle gate in turn, and see that a test fails for it
	$(BIN)/python -m tests.mutate

clean: ## remove the environment and everything that was made
	rm -rf $(VENV) build dist .coverage* .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
