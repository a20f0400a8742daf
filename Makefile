# `make help` lists the targets. All of them but test-gpu and bench work in .venv, which `make setup` makes.

PYTHON ?= python3
PYTHON_CHOSEN := $(filter-out file,$(origin PYTHON))

# A plain `torch` pulls gigabytes of CUDA libraries onto a machine that has no GPU, and its newest Triton has an
# interpreter the tests were not written against. On a machine with an NVIDIA GPU: make setup TORCH=torch
TORCH ?= torch==2.13.0
TRITON ?= $(if $(filter file,$(origin TORCH)),triton==3.6.0,triton<3.10)

VENV := .venv
STAMP := $(VENV)/.setup-stamp
RUN := $(VENV)/bin/python
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-jax render check test test-gpu fuzz lint lint-kernels tune autotune bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  PYTHON=...     interpreter that makes .venv, or that test-gpu, tune and bench run with (default: python3)"
	@echo "  ARGS=...       options of tune and bench; for pytest in test-gpu: with pytest-xdist, -n 14 uses as many cores"
	@echo "  TORCH=torch    on a machine with an NVIDIA GPU: install the newest torch, with CUDA, instead of $(TORCH)"

setup: $(STAMP) ## make .venv with torch, triton, jax and the development tools

# torch comes first and alone with triton, so that nothing installed later can choose another build of it.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.11 ..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --disable-pip-version-check "$(TORCH)" "$(TRITON)"
	$(RUN) -m pip install --disable-pip-version-check -e ".[test,dev]"
	@touch $@

demo: render ## set up, render, compare every variant with float64, and train a small model on real text
	$(RUN) -m codegen check
	$(RUN) -m bench.demo

demo-jax: render ## the same for the JAX ops, with a model in Flax
	$(RUN) -m codegen check
	$(RUN) -m bench.demo_jax

render: $(STAMP) ## write generated/ from variants.yaml and templates/
	$(RUN) -m codegen render

lint: $(STAMP) ## formatter, linter and type checker
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy

lint-kernels: $(STAMP) ## whether kernels compile for every chip and its default configs fit it: a part of them
	$(RUN) -m codegen lint --fast --jobs $(WORKERS)

check: lint ## lint, and whether generated/ is what the spec renders to
	$(RUN) -m codegen check

# Of what XLA compiles most runs once: it need not be fast.
test: export JAX_DISABLE_MOST_OPTIMIZATIONS := 1
test: check lint-kernels ## check, lint-kernels, then all tests on the CPU, kernels in Triton's interpreter
	$(RUN) -m pytest tests --ignore=tests/kernels -q -n $(WORKERS)
	TRITON_INTERPRET=1 $(RUN) -m pytest tests/kernels -q -n $(WORKERS)

test-gpu: ## the kernel tests, compiled, with $(PYTHON) as it is: no .venv, no install, no network
	$(PYTHON) -m pytest tests/kernels -q $(ARGS)

fuzz: $(if $(PYTHON_CHOSEN),,$(STAMP)) ## random variants against float64; ARGS='--seed 7 --variants 2000 --what dense,hopper'
	TRITON_INTERPRET=1 $(if $(PYTHON_CHOSEN),$(PYTHON),$(RUN)) -m tests.fuzz $(ARGS)

tune: $(if $(PYTHON_CHOSEN),,$(STAMP)) ## measure tiles on this GPU, with PYTHON=... or .venv; ARGS='causal --budget 5'
	$(if $(PYTHON_CHOSEN),$(PYTHON),$(RUN)) -m codegen tune $(ARGS)

autotune: tune ## the same

bench: $(if $(PYTHON_CHOSEN),,$(STAMP)) ## measure against the peers, with PYTHON=... or .venv
	$(if $(PYTHON_CHOSEN),$(PYTHON),$(RUN)) -m bench $(ARGS)

clean: ## remove .venv and every cache
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
