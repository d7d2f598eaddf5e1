# Every target makes and uses .venv on first use; nothing else needs to be set up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Without a GPU the CPU build of torch saves gigabytes: CONSTRAINTS= takes whatever pip finds best.
CONSTRAINTS ?= $(if $(shell command -v nvidia-smi),,constraints/cpu.txt)
READY := $(VENV)/.ready

.PHONY: demo test test-long check format clean help

help:  ## What there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: $(READY)  ## Train a small agent, live, and show what it learned
	$(BIN)/toolwise demo

test: $(READY)  ## All tests but the long ones
	$(BIN)/python -m pytest

test-long: $(READY)  ## The long tests: five seeds, ten kills
	$(BIN)/python -m pytest -m long

check: $(READY)  ## Style, types, layers
	$(BIN)/ruff check src tests scripts examples benchmarks
	$(BIN)/ruff format --check src tests scripts examples benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)  ## Put the style right
	$(BIN)/ruff check --fix src tests scripts examples benchmarks
	$(BIN)/ruff format src tests scripts examples benchmarks

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

$(READY): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Toolwise needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e '.[dev]'
	touch $@
