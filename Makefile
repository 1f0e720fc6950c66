# The few verbs people use; `make help` lists them and the switches below. Everything is set up on first use in $(VENV);
# nothing outside this folder is touched.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= $(shell command -v python3.11 || command -v python3)
#:PYTHON=python3.12          interpreter of the environment, 3.11 or newer
VENV ?= .venv
#:VENV=FOLDER                where the environment is made
TORCH_SPEC ?= torch==2.13.0
#:TORCH_SPEC="torch==2.9.*"  another torch, from 2.6 up to (not including) 2.14
PIP_FLAGS ?=
#:PIP_FLAGS="..."            options for pip, such as your own package index
ALLOW_CUDA ?=
#:ALLOW_CUDA=1               accept a CUDA build of torch on a machine without a GPU
DEMO_FLAGS ?=
#:DEMO_FLAGS="--help"        options for rollcache demo
ABLATE_FLAGS ?=
#:ABLATE_FLAGS="--help"      options for rollcache ablate
PYTEST_FLAGS ?= -n 2
#:PYTEST_FLAGS="-k measure"  options for pytest

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install $(PIP_FLAGS)

.PHONY: help demo test lint types docs ablate clean

help: ## list the verbs and switches
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1 \t\2/' | expand -t 16
	@echo 'Switches, as in make test VENV=/tmp/venv:'
	@sed -n 's/^#:/  /p' $(MAKEFILE_LIST)

demo: $(VENV)/.bench ## full compute against X-Cache on the embedded world; writes runs/
	$(BIN)/rollcache demo $(DEMO_FLAGS)

ablate: $(VENV)/.bench ## the paper's ablations on the embedded world, beside its own figures
	$(BIN)/rollcache ablate $(ABLATE_FLAGS)

# Each test worker computes on one thread, so that the workers do not fight for cores.
test: $(VENV)/.test ## all tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_FLAGS)

docs: $(VENV)/.test ## run every example of the README, docs/ and the docstrings
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/test_docs.py

lint: $(VENV)/.test ## ruff: lint and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test ## mypy, strict
	$(BIN)/mypy

clean: ## remove the environment and caches; runs/ stays
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist

# Stamps: written only after a step has succeeded, so an interrupted one is done again. torch comes first and alone:
# whatever is installed later finds it satisfied and does not replace it.
$(VENV)/.python:
	@test -n "$(PYTHON)" || { echo "No python3 found; install Python 3.11 or newer, or set PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON) is older than Python 3.11; set PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.torch: $(VENV)/.python
	$(PIP) "$(TORCH_SPEC)"
	@$(BIN)/python -W ignore .ci/check_torch.py $(if $(ALLOW_CUDA),--allow-cuda)
	@touch $@

$(VENV)/.bench: $(VENV)/.torch pyproject.toml
	$(PIP) --quiet --editable ".[bench]"
	@$(BIN)/python -W ignore .ci/check_torch.py $(if $(ALLOW_CUDA),--allow-cuda)
	@touch $@

$(VENV)/.test: $(VENV)/.torch pyproject.toml
	$(PIP) --quiet --editable ".[test]"
	@$(BIN)/python -W ignore .ci/check_torch.py $(if $(ALLOW_CUDA),--allow-cuda)
	@touch $@ $(VENV)/.bench
