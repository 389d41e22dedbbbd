# racktwin: every target sets up what it needs in .venv first (see deploy/setup/venv.sh).
#   make test PYTHON=python3.12      another interpreter (>= 3.11)
#   make test ARGS='-k units -x'     more arguments for the command
#   make test JOBS=1                 one test at a time
#   make test EXTRAS=torch           with PyTorch, and the tests that want it (requirements-torch.txt)
#   make test EXTRAS='torch chdb'    with ClickHouse in process too (requirements-chdb.txt)
#   make lock UPGRADE=               keep the versions that the lock files name

SHELL := /bin/bash
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
# Without compiled files each process of a test compiles the whole product anew
unexport PYTHONHOME PYTHONPATH PYTHONDONTWRITEBYTECODE
export PYTHON
# For the tests: what was asked for and is not there is then a failure.
export RACKTWIN_EXTRAS := $(EXTRAS)

RUN := .venv/bin/python
# Tests that run at once; those with servers mostly wait, so four suit two cores
JOBS ?= 4
# File by file, in the order of tests/conftest.py: what the tests of a file share is set up once
SPREAD := --dist loadfile --no-loadscope-reorder
UPGRADE := --upgrade
LOCK := uv pip compile -q $(UPGRADE) --universal --generate-hashes --python-version 3.11 --fork-strategy fewest \
	--no-emit-index-url --custom-compile-command 'make lock' pyproject.toml
CODE := twin policies connectors models

.PHONY: help boards demo fleet-demo test test-long check sbom audit docs bench evaluate client test-evaluation storm format lock clean distclean page pictures setup-run setup-dev setup-servers

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-15s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: setup-run ## Set up what is missing and show a simulated site under control
	@.venv/bin/racktwin demo $(ARGS)

fleet-demo: setup-run ## Show two simulated halls below a shared feeder that is lost (ARGS=--once ends after it)
	@$(RUN) deploy/fleet/demo.py $(ARGS)

test: setup-dev setup-servers ## Run the tests of up to a second each, in about ten minutes on two cores
	@$(RUN) -m pytest -n $(JOBS) $(SPREAD) $(ARGS)

test-long: setup-dev setup-servers ## Run the simulations and live stories that `make test` leaves out (half an hour)
	@$(RUN) -m pytest -n $(JOBS) $(SPREAD) -m 'long and not storm and not evaluation' $(ARGS)

check: setup-dev ## Lint, format, types and direction of imports
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy
	@.venv/bin/lint-imports --no-logo
	@mkdir -p build && $(RUN) deploy/setup/sbom.py >build/sbom.json

sbom: setup-run ## Write the bill of materials, build/sbom.json (CycloneDX), from the lock files
	@mkdir -p build && $(RUN) deploy/setup/sbom.py >build/sbom.json

audit: ## Look up the locked packages among known vulnerabilities (needs pip-audit and the network)
	@command -v pip-audit >/dev/null || { echo "make audit: expected pip-audit on the PATH"; exit 1; }
	@pip-audit --disable-pip --require-hashes -r requirements.lock

docs: setup-dev ## Build the documentation into build/site; a broken link fails
	@$(RUN) -m twin.config.reference >docs/reference.md
	@$(RUN) -m tests.support.word_list >docs/words.md
	@NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict -q

boards: setup-dev ## Build the boards of Grafana into deploy/grafana/boards
	@PYTHONPATH=deploy/grafana $(RUN) -m racktwin_boards deploy/grafana/boards

bench: setup-run ## Measure ticks, start and memory (ARGS='--against CHECKOUT' compares)
	@mkdir -p build
	@$(RUN) -m tests.evaluation bench --out build/bench.json $(ARGS)

evaluate: setup-run ## Run the score suites into tests/evaluation/RESULTS.md (ARGS='SUITE ..')
	@$(RUN) -m tests.evaluation results $(ARGS)

test-evaluation: setup-dev ## Run the long tests of the evaluation
	@$(RUN) -m pytest -n $(JOBS) --maxschedchunk 1 -m evaluation $(ARGS)

storm: setup-dev ## Run the storms, which take hours
	@$(RUN) -m pytest -m storm $(ARGS)

format: setup-dev ## Format the code and mend what the linter can
	@$(RUN) -m ruff check --fix-only .
	@$(RUN) -m ruff format .

lock: ## Resolve the lock files anew (needs uv)
	@command -v uv >/dev/null || { echo "make lock: expected uv on the PATH; remedy: pip install uv"; exit 1; }
	@$(LOCK) --group build -o requirements.lock
	@$(LOCK) --group build --group dev --group docs -c requirements.lock -o requirements-dev.lock

page: ## Build the web application of the daemon into twin/web/assets (needs Node 20)
	@command -v npm >/dev/null || { echo "make page: expected Node 20 with npm on the PATH"; exit 1; }
	@cd twin/web && npm ci --no-audit --no-fund --loglevel error && npx --no-install tsc --noEmit && node build.mjs

pictures: setup-dev setup-servers ## Make the pictures of the documentation (ARGS='--check build/pictures': all pages)
	@$(RUN) -m tests.support.pictures $(ARGS)

client: setup-dev ## Build the wheel racktwin-client into dist
	@$(RUN) -m pip wheel -q --no-build-isolation --no-deps --no-index -w dist deploy/client

clean: ## Remove what was built, but not .venv
	@rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
	@find $(CODE) tests deploy -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## Remove .venv too
	@rm -rf .venv

setup-run:
	@deploy/setup/venv.sh run '$(EXTRAS)'

setup-dev:
	@deploy/setup/venv.sh dev '$(EXTRAS)'

setup-servers:
	@deploy/setup/servers.sh
