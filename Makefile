# `make demo` and `make test` do all their own set-up, in .venv beside this file.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# `make demo DATA=/some/folder` takes your own images.
DATA ?=

.PHONY: help setup demo test lint check bench clean
help:
	@echo "make demo [DATA=folder]  train on pictures drawn for it, or on yours, with 2 MPI ranks"
	@echo "make test                run the tests"
	@echo "make check               all that CI does: tests, lint, format, types"
	@echo "make bench               loading speed beside torch's DataLoader, on the demo's pictures"
	@echo "make docs                the documentation as a site, in .cache/site"
	@echo "make clean               remove the environment and what demo and tests left"

setup: $(VENV)/ready

# The stamp comes last: an interrupted set-up is done again. The lock keeps two makes apart; the
# one that waited finds the stamp.
$(VENV)/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "dlio needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Set PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "$(PYTHON) has no venv module: install it (Debian: apt install python3-venv)" >&2; exit 1; }
	@mkdir -p $(VENV)
	@echo "setting up $(VENV) (once; torch and Open MPI as wheels) ..."
	@if command -v flock >/dev/null; then exec 9>$(VENV)/lock; flock 9; fi; \
	  if [ $(VENV)/ready -nt pyproject.toml ] && [ $(VENV)/ready -nt constraints.txt ]; then exit 0; fi; \
	  set -e; $(PYTHON) -m venv $(VENV); \
	  PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	    hatchling editables; \
	  PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	    --no-build-isolation -e '.[dev,mpi]'; \
	  touch $(VENV)/ready

demo: setup
	$(BIN)/dlio demo $(if $(DATA),--data "$(DATA)")

test: setup
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check:
	bash .ci/run

bench: setup
	$(BIN)/dlio demo --draw-only
	$(BIN)/dlio bench loader .cache/dlio-demo/pictures/train

.PHONY: docs
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open .cache/site/index.html"

clean:
	rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
