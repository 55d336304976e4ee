# `make help` lists what there is. Every target sets up what it needs; the environment is made once.

PYTHON ?= python3
VENV ?= .venv
# Versions of torch and friends; empty (`make report CONSTRAINTS=`) takes what pyproject.toml allows.
CONSTRAINTS ?= constraints.txt
PROFILE ?= quick
LABS ?=

BIN := $(VENV)/bin
PIP_CONSTRAINTS := $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS))
INSTALL = $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check $(PIP_CONSTRAINTS)

.DEFAULT_GOAL := help
.PHONY: help install report test stress faults lab lint clean

help: ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

install: $(VENV)/installed ## labkit and what it needs, in .venv

report: install ## measure and write reports/index.html; PROFILE=quick, LABS="all_reduce ..." picks some
	$(BIN)/labkit report $(LABS) --profile $(PROFILE)

test: $(VENV)/installed-test lint ## lint, types and all tests
	$(BIN)/python -m pytest

stress: $(VENV)/installed-test ## messages through shared memory, 100,000 rounds for 2 to 8 ranks; some minutes
	LABKIT_STRESS_ROUNDS=100000 $(BIN)/python -m pytest tests/parallel/test_shared_transport.py \
		tests/parallel/test_swaps.py tests/parallel/test_boards.py -k written

faults: $(VENV)/installed-test ## every injected fault, two hundred kills, hosts joined by a wire, and a table (some 13 minutes)
	LABKIT_FAULTS=all $(BIN)/python -m pytest tests/faults tests/hosts tests/parallel/test_leftovers.py \
		tests/studies/test_cifar100_killed.py

lint: $(VENV)/installed-test ## style and types only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

lab: $(VENV)/installed-lab ## JupyterLab on the notebooks
	$(BIN)/jupyter lab --notebook-dir notebooks --LabApp.default_url=/lab/tree/00_start_here.ipynb \
		--KernelManager.transport_encryption=auto

clean: ## remove the environment and the pages; runs are kept
	rm -rf $(VENV) reports

# Programs of an environment begin with its own path: of one that was moved or copied none starts.
ifneq ($(filter-out help clean,$(MAKECMDGOALS)),)
ifneq ($(wildcard $(VENV)/bin/activate),)
ifeq ($(shell grep -F '$(abspath $(VENV))' $(VENV)/bin/activate),)
$(info $(VENV) was made in another folder: making it again)
$(shell rm -rf $(VENV))
endif
endif
endif

# Half an environment would be taken for a whole one by the next make.
$(VENV)/bin/python:
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/installed: pyproject.toml $(wildcard constraints.txt) | $(VENV)/bin/python
	@echo "installing labkit into $(VENV) (once; a few minutes)"
	$(INSTALL) --editable .
	@touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(INSTALL) --editable '.[test]'
	@touch $@

$(VENV)/installed-lab: $(VENV)/installed
	$(INSTALL) --editable '.[lab]'
	@touch $@
