# The two commands are `make demo` and `make test`. Both first make .venv, if it is missing or out of date
# (scripts/bootstrap.py).
#
#   PYTHON=/path/to/python3.12   the interpreter for .venv, 3.11 or 3.12 (default: see scripts/find_python.sh)
#   TORCH_INDEX=<URL>            an index of PyTorch's CPU builds, smaller than PyPI's (docs/dependencies.md)
#   DEMO_SECONDS=20              how long the demo runs
#   PYTEST_ARGS=...              more arguments for pytest, for example `test/engine -k stale`

.DEFAULT_GOAL := help
.PHONY: help venv demo test lint format clean distclean

BIN := .venv/bin
DEMO_SECONDS ?= 20
WORKERS ?= 2
PYTEST_ARGS ?=
export PYTHON TORCH_INDEX

# The environment is used without being activated: ROS finds its share folders, and `#!/usr/bin/env python3` the
# interpreter, through the two variables that are set. Those that are unset would mix in another ROS installation.
ACTIVE := env -u PYTHONPATH -u _ROS_WHEELS_BOOTSTRAP_COMPLETE \
	AMENT_PREFIX_PATH="$(CURDIR)/.venv" PATH="$(CURDIR)/.venv/bin:$$PATH"

help:  ## say what there is
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/^([a-z]+):.*## /make \1\t/' | expand -t 16

venv:  ## make .venv, or bring it up to date
	@python=$$(sh scripts/find_python.sh) && "$$python" scripts/bootstrap.py

demo: venv  ## cameras and an instruction in, action chunks out: real nodes for DEMO_SECONDS
	@$(ACTIVE) $(BIN)/python -m flashrt_ros.cli demo --seconds $(DEMO_SECONDS)

test: lint  ## lint, types and all tests
	$(ACTIVE) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

lint: venv  ## style and types only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: venv  ## rewrite the sources in the one format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove what builds, tests and the demo made
	rm -rf build install log dist demo_out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean  ## remove .venv too
	rm -rf .venv
