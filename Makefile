# `make help` lists the targets. All of them but test-gpu and bench work in .venv, which `make setup` makes.

PYTHON ?= python3
PYTHON_CHOSEN := $(filter-out file,$(origin PYTHON))

# Torch brings the Triton that it was built with; any from 3.6 to 3.9 serves. A build of torch for the CPU brings none:
# there TRITON is installed, the oldest that serves. What the tests run on is pinned; TORCH=torch takes the newest.
TORCH ?= torch==2.13.0
TRITON ?= triton==3.6.0

VENV := .venv
STAMP := $(VENV)/.setup-stamp
LOG := $(VENV)/setup.log
RUN := $(VENV)/bin/python
WORKERS ?= 2
# Kernels, compiled or interpreted, need Triton, which macOS and Windows have none of.
HAS_TRITON = $(RUN) -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("triton") is None)'
IS_LINUX = test "$$(uname -s)" = Linux
NO_TRITON = echo "Not run, because there is no Triton here:"
# What pip says goes to a log, whose end is shown when it fails.
INSTALL = install() { \
	echo "installing $$*"; \
	$(RUN) -m pip install --disable-pip-version-check "$$@" >>$(LOG) 2>&1 && return; \
	tail -n 40 $(LOG); echo "The set-up failed; $(LOG) is the whole log."; exit 1; \
}

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-jax render check test test-all test-setup test-gpu fuzz lint lint-kernels tune autotune bench hub docs docs-serve clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  PYTHON=...     interpreter that makes .venv, or that test-gpu, tune and bench run with (default: python3)"
	@echo "  ARGS=...       options of demo (--full), tune and bench; for pytest in test-gpu: with pytest-xdist, -n 14"
	@echo "  TORCH=torch    install the newest torch instead of $(TORCH)"

setup: $(STAMP) ## make .venv with torch, triton, jax and the development tools

# torch comes first, so that nothing installed later can choose another build of it.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.11 ..." if sys.version_info < (3, 11) else 0)'
	@$(PYTHON) -m venv $(VENV)
	@: >$(LOG)
	@$(INSTALL); install "$(TORCH)"
	@$(HAS_TRITON) || ! $(IS_LINUX) || { $(INSTALL); install "$(TRITON)"; }
	@$(INSTALL); install -e ".[test,dev]"
	@$(HAS_TRITON) || echo "Triton has no build for this machine: the generator and the references of the ops work without."
	@touch $@

demo: render ## set up, render, compare every variant with float64, train a small model, write a page; ARGS=--full
	$(RUN) -m codegen check
	$(RUN) -m examples.demo $(ARGS)

demo-jax: render ## the same for the JAX ops, with a model in Flax
	$(RUN) -m codegen check
	$(RUN) -m examples.demo_jax

render: $(STAMP) ## write generated/ from variants.yaml and templates/
	$(RUN) -m codegen render

lint: $(STAMP) ## formatter, linter, import contracts and type checker
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(VENV)/bin/lint-imports --no-logo
	$(RUN) -m mypy

lint-kernels: $(STAMP) ## whether kernels compile for every chip and its default configs fit it: a part of them
	@if $(HAS_TRITON); then set -x; $(RUN) -m codegen lint --fast --jobs $(WORKERS); else $(NO_TRITON) codegen lint; fi

check: lint ## lint, and whether generated/ is what the spec renders to
	$(RUN) -m codegen check

# A worker that has no test left takes some of another's. mypy needs one core: kernels are compiled beside it.
PYTEST = $(RUN) -m pytest -q -n $(WORKERS) --dist worksteal $(SELECTION)
# Of what XLA compiles most runs once: it need not be fast.
test test-all: export JAX_DISABLE_MOST_OPTIMIZATIONS := 1
test-all: SELECTION := --full
test test-all: $(STAMP)
	@$(MAKE) --no-print-directory -j 2 check lint-kernels
	$(PYTEST) tests codegen docs/generators --ignore=tests/kernels --doctest-modules
	@if $(HAS_TRITON); then set -x; TRITON_INTERPRET=1 $(PYTEST) tests/kernels; else $(NO_TRITON) tests/kernels; fi

test: ## check, lint-kernels, then tests on the CPU, kernels in Triton's interpreter: each pair of variants and calls
test-all: ## the same with every variant in every call, an hour on two cores

test-setup: $(STAMP) ## check under every Python here, the set-up against the public index, kernels on the newest Triton
	$(RUN) -m tests.setup "$(TORCH)"

test-gpu: ## the kernel tests, compiled, with $(PYTHON) as it is: no .venv, no install, no network
	$(PYTHON) -m pytest tests/kernels -q $(ARGS)

fuzz: $(if $(PYTHON_CHOSEN),,$(STAMP)) ## random variants against float64; ARGS='--seed 7 --variants 2000 --what dense,hopper'
	TRITON_INTERPRET=1 $(if $(PYTHON_CHOSEN),$(PYTHON),$(RUN)) -m tests.fuzz $(ARGS)

tune: $(if $(PYTHON_CHOSEN),,$(STAMP)) ## measure tiles on this GPU, with PYTHON=... or .venv; ARGS='causal --budget 5'
	$(if $(PYTHON_CHOSEN),$(PYTHON),$(RUN)) -m codegen tune $(ARGS)

autotune: tune ## the same

bench: $(if $(PYTHON_CHOSEN),,$(STAMP)) ## measure against the peers, with PYTHON=... or .venv
	$(if $(PYTHON_CHOSEN),$(PYTHON),$(RUN)) -m bench $(ARGS)

# What the hub's library brings is no part of the set-up either.
HUB := $(VENV)/.hub-stamp
$(HUB): $(STAMP)
	@$(INSTALL); install -e ".[hub]"
	@touch $@

hub: render $(HUB) ## write the torch ops as a kernel of Hugging Face's hub into build/hub, and check it; ARGS='--owner NAME'
	$(RUN) -m codegen hub --check $(ARGS)

# The site's tools are no part of the set-up: only these two targets install them.
DOCS := $(VENV)/.docs-stamp
$(DOCS): $(STAMP)
	@$(INSTALL); install -e ".[docs]"
	@touch $@

docs: $(DOCS) ## build the documentation into build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet

docs-serve: $(DOCS) ## show the documentation at http://127.0.0.1:8000 while you write
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs serve

clean: ## remove .venv and every cache
	rm -rf $(VENV) .pythons .triton build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
