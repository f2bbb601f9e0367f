# Everything a person does with a checkout. `make serve` and `make test` set up whatever they need first.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
PORT ?= 8000
HOST ?= 127.0.0.1
PYTEST_ARGS ?=
BENCH_ARGS ?=
EXTRAS ?= dev

BIN := $(VENV)/bin
RUNTIME := $(VENV)/.runtime-installed
DEVELOP := $(VENV)/.develop-installed

.DEFAULT_GOAL := help
.PHONY: help install install-dev model serve test coverage check format bench clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(RUNTIME): pyproject.toml constraints.txt
	@echo "==> Creating $(VENV) and installing pinned packages (torch first; a few minutes the first time)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; set PYTHON=..."; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --upgrade pip
	@$(BIN)/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	@$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	@touch $@

$(DEVELOP): $(RUNTIME)
	@echo "==> Installing what tests and checks need"
	@$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@

install: $(RUNTIME) ## Create the virtual environment with the pinned packages

install-dev: $(DEVELOP) ## The same, with test and lint tools

model: $(RUNTIME) ## Fetch the default model into the user's cache
	@echo "==> Making sure that the default model is in the cache"
	@$(BIN)/conductor model pull

serve: model ## Set up, start a local cluster, and serve the default model on PORT
	@echo "==> Serving on http://$(HOST):$(PORT) (Ctrl-C stops it)"
	@exec $(BIN)/conductor serve --host $(HOST) --port $(PORT)

test: $(DEVELOP) model ## Set up and run the whole test suite
	@echo "==> Running the tests that need no cluster, two at a time"
	@$(BIN)/python -m pytest -n 2 -m "not live" $(PYTEST_ARGS) || [ $$? -eq 5 ]
	@echo "==> Running the tests on live clusters"
	@$(BIN)/python -m pytest -m live $(PYTEST_ARGS) || [ $$? -eq 5 ]

coverage: $(DEVELOP) ## Run the tests of the decision core, which must take every branch of it
	@echo "==> Running the tests of conductor/core with branch coverage"
	@$(BIN)/python -m pytest tests/core --cov=conductor.core --cov-branch --cov-report=term-missing:skip-covered --cov-fail-under=100

check: $(DEVELOP) ## Format, lint, types, spelling: the same as pre-commit
	@echo "==> ruff format, ruff check, mypy, codespell"
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/codespell conductor workers models traces tests README.md Makefile pyproject.toml

format: $(DEVELOP) ## Rewrite the sources in the house format
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(DEVELOP) model ## Measure and print the figures that the README quotes
	@$(BIN)/python -m tests.bench $(BENCH_ARGS)

clean: ## Remove the virtual environment and every build product (the model cache stays)
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage htmlcov out
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
