# `make help` lists what there is. Every target sets up what it needs; the environment is made once.

PYTHON ?= python3
VENV ?= .venv
# Versions of torch and friends; empty (`make report CONSTRAINTS=`) takes what pyproject.toml allows.
CONSTRAINTS ?= constraints.txt
PROFILE ?= quick
LABS ?=
# Processes that share the files of the tests: three on two cores, as each waits for ranks and programs now and then.
WORKERS ?= 3
# More for `make lab`, as jupyter takes it, and for `make mutants`.
ARGS ?=

BIN := $(VENV)/bin
PIP_CONSTRAINTS := $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS))
IS_ROOT := $(filter 0,$(shell id -u))
# Not quiet: torch alone takes a minute, and whoever waits sees what for.
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --no-compile $(PIP_CONSTRAINTS)
# What pip would do on one core; some packages have files that are not for this Python.
COMPILE = @echo "compiling Python files (a minute)"; $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true

# OpenMP's threads wait in a loop, which takes the cores from the other process: the memory lab at smoke, in two
# processes on two cores, takes 24 s in this way, and 14 s where they sleep. One thread is what each has of the cores;
# ranks that measure set their own number. Bytecode is kept, whatever a container says: the tests start a thousand
# processes, and each would compile labkit anew.
TESTS = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE \
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

LINT = $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy
# Style and types are checked while the tests run; what is wrong with them is said below, so it does not scroll away.
BESIDE_LINT = ($(LINT)) > $(VENV)/lint.txt 2>&1 & trap "kill $$!" INT TERM; $(1); tests=$$?; wait $$!; lint=$$?; \
	cat $(VENV)/lint.txt; exit $$((tests + lint))

.DEFAULT_GOAL := help
# `make -j report test` would install into one environment twice at once, and measure beside the tests.
.NOTPARALLEL:
.PHONY: help install report test test-all stress faults gpu torch-tests mutants versions versions-oldest versions-newest of-these-versions lab lint clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

install: $(VENV)/installed ## labkit and what it needs, in .venv

report: install ## measure and write reports/index.html; PROFILE=quick, LABS="all_reduce ..." picks some
	$(BIN)/labkit report $(LABS) --profile $(PROFILE)

test: $(VENV)/installed-test ## lint, types and the tests that every change must pass
	@$(call BESIDE_LINT,$(TESTS) -m "not slow")

test-all: $(VENV)/installed-test ## the same with the tests marked slow
	@$(call BESIDE_LINT,$(TESTS))

stress: $(VENV)/installed-test ## messages through shared memory, 100,000 rounds for 2 to 8 ranks; half an hour
	LABKIT_STRESS_ROUNDS=100000 $(BIN)/python -m pytest --timeout 0 tests/parallel/test_shared_memory.py -m slow -k written

faults: $(VENV)/installed-test ## every injected fault, two hundred kills, hosts in network namespaces: a line per case (some 20 minutes)
	LABKIT_FAULTS=all $(BIN)/python -m pytest -v --numprocesses 2 tests/faults tests/hosts tests/parallel/test_leftovers.py

gpu: $(VENV)/installed-test ## everything that a GPU can show, in at most 25 minutes; ends in one zip to send
	$(BIN)/python -m benchmarks.first_gpu

torch-tests: $(VENV)/installed-test ## torch's own tests of its wrapper and of SyncBatchNorm, on labkit's (docs/torch-tests.md)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/torch_tests/ddp.py

mutants: $(VENV)/installed-test ## random changes of a few modules, and which of them no test notices (tests/mutants.py); some hours
	$(INSTALL) cosmic-ray
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutants.py $(ARGS)

versions: versions-oldest versions-newest ## `make test` with the oldest and the newest torch and Triton allowed, each installed anew

versions-oldest:
	$(MAKE) VENV=.venv-oldest CONSTRAINTS=.ci/oldest.txt of-these-versions

versions-newest:
	$(MAKE) VENV=.venv-newest CONSTRAINTS= of-these-versions

# All labs at smoke among the tests: tests/test_notebooks.py. What is newest may be newer than when the environment was made.
of-these-versions: $(VENV)/installed-test
	$(INSTALL) --upgrade torch triton
	$(COMPILE)
	$(BIN)/python -c "import torch, triton; print('torch', torch.__version__, 'Triton', triton.__version__)"
	env -u MAKEFLAGS -u VENV -u CONSTRAINTS $(TESTS) -m "not slow" # tests that call make want its defaults

lint: $(VENV)/installed-test ## style and types only
	$(LINT)

# What JupyterLab starts (its terminals, `!labkit`) finds this environment's commands first; a login shell, which is what
# its terminals run where nobody looks at its output, would set another PATH.
lab: export PATH := $(abspath $(BIN)):$(PATH)
# It would ask, in a window over the tour, whether it may fetch news.
lab: export JUPYTER_CONFIG_PATH := $(CURDIR)/.jupyter$(addprefix :,$(JUPYTER_CONFIG_PATH))
lab: install ## JupyterLab on the notebooks; ARGS="--port 9999 --no-browser" for jupyter
	$(if $(IS_ROOT),@echo "running as root: JupyterLab is started with --allow-root")
	$(BIN)/jupyter lab --ServerApp.root_dir="$(CURDIR)" --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb \
		--KernelManager.transport_encryption=auto --ServerApp.terminado_settings="shell_command=['$${SHELL:-sh}']" \
		--FileContentsManager.pre_save_hook=labkit.lab.project.forget_version \
		$(if $(IS_ROOT),--allow-root) $(ARGS)

clean: ## remove the environments and the pages; runs are kept
	rm -rf $(VENV) .venv-oldest .venv-newest reports

# Programs of an environment begin with its own path: of one that was moved or copied none starts. One that make did
# not make is left alone.
MOVED := $(shell [ ! -f $(VENV)/installed ] || grep -qF '$(abspath $(VENV))' $(VENV)/bin/activate || echo environment-again)

.PHONY: environment-again
environment-again:
	@echo "$(VENV) was made in another folder: making it again"
	rm -rf $(VENV)

# Half an environment would be taken for a whole one by the next make.
$(VENV)/bin/python: $(MOVED)
	@$(PYTHON) -c "import sys; v = sys.version_info[:2]; (3, 11) <= v < (3, 14) or sys.exit( \
		'labkit needs Python 3.11 to 3.13, and $(PYTHON) is %d.%d: make PYTHON=python3.12 ...' % v)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# What `make test` needs has all of what the labs need: one installation, not two, where there is neither.
INSTALLED_BY = pyproject.toml $(wildcard $(CONSTRAINTS)) $(MOVED)
$(VENV)/installed: $(INSTALLED_BY) | $(VENV)/bin/python
	@echo "installing labkit into $(VENV) (once; a few minutes; to use a GPU, NVIDIA's driver 580 or newer is needed)"
	$(INSTALL) --editable .
	$(COMPILE)
	@touch $@

$(VENV)/installed-test: $(INSTALLED_BY) | $(VENV)/bin/python
	@echo "installing labkit and its tests' tools into $(VENV) (once; a few minutes)"
	$(INSTALL) --editable '.[test]'
	$(COMPILE)
	@touch $(VENV)/installed $@
