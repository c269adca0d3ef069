# `make` alone lists what can be done. Everything is set up on first use, and again only when a requirement changed.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet install
ARGS   ?=
# Most of a test's time is waiting for servers. A file stays with one worker, which has servers of its own.
# Files go out in the order of tests/conftest.py: the long ones first.
WORKERS ?= 3
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
FAST := not postgres and not rabbitmq and not s3 and not browser and not slow

# Hundreds of processes are started by the tests: each would compile the whole program anew.
unexport PYTHONDONTWRITEBYTECODE

MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.PHONY: help run demo screenshots test test-fast test-matrix soak check fix bench ci lock clean

help: ## List the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: $(VENV)/.ready-run ## Serve on the embedded default and print the address (ARGS="--listen 127.0.0.1:9000")
	@exec $(BIN)/holdfast serve $(ARGS)

demo: $(VENV)/.ready-run ## Serve an incident to look at, in ./holdfast-demo (ARGS="--remove" deletes it)
	@exec $(BIN)/holdfast demo $(ARGS)

test: $(VENV)/.ready-dev ## Set up everything, then run the tests (ARGS="-k lease")
	@bash scripts/servers.sh
	@$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

test-fast: $(VENV)/.ready-dev ## Run what needs no server and no long time, within a minute
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -p no:schemathesis -m "$(FAST)" $(ARGS)

test-matrix: export HOLDFAST_TEST_RABBITMQ := 3.10,4.0,4.3
test-matrix: export HOLDFAST_TEST_PAGES := all
test-matrix: $(VENV)/.ready-dev ## Run the broker tests on every RabbitMQ version, and pages in every look; none may be missing
	@bash scripts/servers.sh
	@$(BIN)/python -m pytest $(PARALLEL) -m "rabbitmq or browser" $(ARGS)

screenshots: $(VENV)/.ready-dev ## Take pictures of every page of the console into docs/images
	@HOLDFAST_TEST_WITHOUT=postgres,rabbitmq bash scripts/servers.sh
	@$(BIN)/python -m scripts.screenshots docs/images $(ARGS)

soak: $(VENV)/.ready-dev ## Run the long crash tests; one JSON line per scenario
	@HOLDFAST_TEST_WITHOUT=browser,$$HOLDFAST_TEST_WITHOUT bash scripts/servers.sh
	@$(BIN)/python -m tests.soak $(ARGS)

check: $(VENV)/.ready-dev ## Lint, format and types
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --quiet --check
	@$(BIN)/mypy --no-error-summary src tests scripts $(wildcard bench)

fix: $(VENV)/.ready-dev ## Repair what lint and format can repair
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

bench: $(VENV)/.ready-bench ## Measure, side by side with the peers
	@HOLDFAST_TEST_WITHOUT=browser,$$HOLDFAST_TEST_WITHOUT bash scripts/servers.sh
	@$(BIN)/python -m bench $(ARGS)

ci: ## What a change must pass: check, then test
	@$(MAKE) check
	@$(MAKE) test

lock: $(VENV)/.ready-dev ## Pin the newest allowed versions in requirements/
	@UV=$(BIN)/uv bash scripts/lock.sh

clean: ## Remove what the set-up and the tools made (never any data)
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage .coverage.* htmlcov dist build

# The stamps: one per set of requirements, newer than the files that it was made from.
$(VENV)/.made:
	@echo "Setting up, once, in $(VENV) (about half a minute): an environment of Python ..."
	@PYTHON="$(PYTHON)" bash scripts/venv.sh $(VENV)
	@touch $@

$(VENV)/.ready-run: $(VENV)/.made requirements/build.txt requirements/run.txt pyproject.toml
	@echo "... the packages that Holdfast runs on ..."
	@$(PIP) --require-hashes -r requirements/build.txt
	@$(PIP) --require-hashes -r requirements/run.txt
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.ready-run requirements/dev.txt
	@echo "... the tools of its tests ..."
	@$(PIP) --require-hashes -r requirements/dev.txt
	@touch $@

$(VENV)/.ready-bench: $(VENV)/.ready-dev requirements/bench.txt
	@$(PIP) --require-hashes -r requirements/bench.txt
	@touch $@
