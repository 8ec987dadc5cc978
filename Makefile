# Every command of the README. Each target installs what it needs into .venv/ with a pinned uv.
SHELL := /bin/bash
.DEFAULT_GOAL := help

UV_VERSION := 0.13.9
UV := $(shell command -v uv 2>/dev/null || echo .cache/uv/bin/uv)
PYTHON ?= python3
RUN := $(UV) run --frozen --no-sync
EXTRAS := --extra jobs --extra tasks --extra s3
export OMP_NUM_THREADS ?= 1
# The repository's own interpreter choice is requires-python; never download one behind the user's back in CI.
export UV_PYTHON_PREFERENCE ?= system

.PHONY: help
help: ## This list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

.cache/uv/bin/uv:
	@echo "uv is not on the PATH: installing uv $(UV_VERSION) into .cache/uv"
	@$(PYTHON) -m venv .cache/uv || { echo "make: python3 with venv is needed: install it (Debian: apt-get install python3-venv) and try again"; exit 1; }
	@.cache/uv/bin/pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)

.PHONY: install
install: $(filter .cache/uv/bin/uv,$(UV)) ## Environment in .venv/ (PyTorch and all; about 5 GB)
	@command -v cc >/dev/null || { echo "make: a C compiler is needed for one dependency of reasoning-gym: install one (Debian: apt-get install gcc) and try again"; exit 1; }
	@$(UV) sync --frozen --quiet $(EXTRAS)

.PHONY: canary
canary: install ## Train a tiny MoE with TRACE on this machine, two to three minutes; ends with a table and report.html
	$(RUN) tracerl run jobs/examples/canary.yaml --out runs/canary-$$(date +%Y%m%d-%H%M%S)

.PHONY: test
test: install ## Unit and integration tests, about 5 minutes on 2 cores
	$(RUN) pytest -n 2 --dist loadgroup

.PHONY: test-peers
test-peers: install ## Numerics bit for bit against fouroversix, torchao, modelopt and compressed-tensors
	UV=$(UV) bash tests/peers/run.sh

.PHONY: test-transport
test-transport: install ## Kills, corruption and soak of the record store, and the object store on a real S3 server
	@command -v strace >/dev/null || { echo "make: strace is needed to kill processes at their system calls: install it (Debian: apt-get install strace) and try again"; exit 1; }
	@$(UV) sync --frozen --quiet $(EXTRAS) --group s3
	$(RUN) pytest -c tests/transport/pytest.ini tests/transport

.PHONY: test-cluster
test-cluster: install ## The CustomResourceDefinition on a real API server, built from Go modules (5 minutes the first time)
	bash tests/cluster/build.sh
	$(RUN) pytest -c tests/cluster/pytest.ini tests/cluster

.PHONY: lint
lint: install ## ruff, mypy --strict, import-linter
	$(RUN) ruff format --check .
	$(RUN) ruff check .
	$(RUN) mypy
	$(RUN) lint-imports

.PHONY: docs
docs: install ## Write the generated reference pages
	$(RUN) python -m tracerl.api.docs

.PHONY: crds
crds: install ## Write the CustomResourceDefinition
	$(RUN) python -m tracerl.api.crd

.PHONY: drift
drift: docs crds ## Fail when a generated file or the lock file is stale
	$(UV) lock --check
	git diff --exit-code -- docs/reference crds || { echo "make: generated files are stale: run 'make docs crds' and commit them"; exit 1; }

.PHONY: bench
bench: install ## Benchmarks that fit a laptop; results in benchmarks/results/
	$(RUN) python benchmarks/numerics/pack.py

.PHONY: bench-transport
bench-transport: install ## The ring, the object store and the cost of records beside their peers, about 20 minutes
	UV=$(UV) bash benchmarks/transport/run.sh

.PHONY: clean
clean: ## Remove environments and caches, keep runs/
	rm -rf .venv .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
