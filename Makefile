# Each target does its own set-up into .venv/ with plain venv and pip; a second call installs nothing.
PYTHON ?= python3
BIN := .venv/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# One process a core and one thread a process: many small matrix products do not share cores well.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n auto

.PHONY: demo test quick check toy system format clean help

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

demo: .venv/installed  ## translate a text live with a shipped model
	$(BIN)/simulmt demo

test: .venv/installed-dev check system  ## everything: format, lint, types, import rules, tests
	$(PYTEST)

quick: .venv/installed-dev  ## lint and the fast tests, for daily work
	$(BIN)/ruff check
	$(PYTEST) -x -m 'not slow and not gpu and not learning'

check: .venv/installed-dev
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

toy: .venv/installed-dev  ## every system of the paper on a synthetic pair, with a report; 15 minutes
	$(BIN)/simulmt run recipes/toy.toml

# Tests drive the page in Chromium and start nginx, which come from Debian; where they are missing, those tests skip.
system:
	@{ command -v chromium && command -v nginx; } >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	  { apt-get -qq update && apt-get -qq install --yes --no-install-recommends chromium nginx-light; } >/dev/null 2>&1; } || true

format: .venv/installed-dev  ## format the code
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:  ## remove the environment and all caches
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo 'simulmt needs Python 3.11 or later: make PYTHON=python3.12 ...' >&2; exit 1; }
	$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP_INSTALL) --editable .
	touch $@

.venv/installed-dev: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP_INSTALL) --editable '.[train,eval,align,serve,speech,dev]'
	touch $@ .venv/installed
