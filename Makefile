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
	@echo "  PYTHON=...     creates .venv and runs test-gpu; if set, also runs fuzz, tune and bench instead of .venv (default: python3)"
	@echo "  ARGS=...       options of demo, fuzz, tune, bench and hub; of pytest in test-gpu"
	@echo "  TORCH=torch    install the newest torch instead of $(TORCH)"

setup: $(STAMP) ## create .venv with torch, triton, jax and the development tools

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

demo: render ## compare every variant with float64, train a small model, write a page of results; ARGS=--full
	$(RUN) -m codegen check
	$(RUN) -m examples.demo $(ARGS)

demo-jax: render ## run the same demo with the JAX ops and a Flax model
	$(RUN) -m codegen check
	$(RUN) -m examples.demo_jax

render: $(STAMP) ## write generated/ from variants.yaml and templates/
	$(RUN) -m codegen render

lint: $(STAMP) ## run the formatter check, the linter, the import contracts and the type checker
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(VENV)/bin/lint-imports --no-logo
	$(RUN) -m mypy

lint-kernels: $(STAMP) ## compile a selection of kernels with their default tiles for every chip; needs no GPU
	@if $(HAS_TRITON); then set -x; $(RUN) -m codegen lint --fast --jobs $(WORKERS); else $(NO_TRITON) codegen lint; fi

check: lint ## run lint, and check that generated/ is up to date
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

test: ## run check, lint-kernels and the tests on the CPU; variants and calls are combined pairwise
test-all: ## run test with every variant in every call: an hour on two cores

test-setup: $(STAMP) ## run codegen check on every installed Python, resolve the installation on PyPI, test the newest Triton
	$(RUN) -m tests.setup "$(TORCH)"

test-gpu: ## run the kernel tests on this GPU with $(PYTHON); installs nothing
	$(PYTHON) -m pytest tests/kernels -q $(ARGS)

fuzz: $(if $(PYTHON_CHOSEN),,$(STAMP)) ## compare random variants with float64; ARGS='--seed 7 --variants 2000 --what dense,hopper'
	TRITON_INTERPRET=1 $(if $(PYTHON_CHOSEN),$(PYTHON),$(RUN)) -m tests.fuzz $(ARGS)

tune: $(if $(PYTHON_CHOSEN),,$(STAMP)) ## time tiles on this GPU and store the fastest; ARGS='causal --budget 5'
	$(if $(PYTHON_CHOSEN),$(PYTHON),$(RUN)) -m codegen tune $(ARGS)

autotune: tune ## same as tune

bench: $(if $(PYTHON_CHOSEN),,$(STAMP)) ## time the ops and other attention libraries on this GPU; ARGS='--suite front'
	$(if $(PYTHON_CHOSEN),$(PYTHON),$(RUN)) -m bench $(ARGS)

# What the hub's library brings is no part of the set-up either.
HUB := $(VENV)/.hub-stamp
$(HUB): $(STAMP)
	@$(INSTALL); install -e ".[hub]"
	@touch $@

hub: render $(HUB) ## write the torch ops as a Hugging Face Hub kernel to build/hub, and check it; ARGS='--owner NAME'
	$(RUN) -m codegen hub --check $(ARGS)

# The site's tools are no part of the set-up: only these two targets install them.
DOCS := $(VENV)/.docs-stamp
$(DOCS): $(STAMP)
	@$(INSTALL); install -e ".[docs]"
	@touch $@

docs: $(DOCS) ## build the documentation into build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet

docs-serve: $(DOCS) ## serve the documentation at http://127.0.0.1:8000 and reload it on changes
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs serve

clean: ## remove .venv, build folders and caches
	rm -rf $(VENV) .pythons .triton build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
