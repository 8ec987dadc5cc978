# Every command of the README. Each target installs what it needs into .venv/ with a pinned uv.
SHELL := /bin/bash
.DEFAULT_GOAL := help

UV_VERSION := 0.13.9
UV := $(shell command -v uv 2>/dev/null || echo .cache/uv/bin/uv)
PYTHON ?= python3
RUN := $(UV) run --frozen --no-sync
# Targets that run side by side must not remove what another one has added.
SYNC = $(UV) sync --frozen --inexact --quiet $(EXTRAS)
EXTRAS := --extra jobs --extra tasks --extra s3 --extra operator --extra tensorboard
export OMP_NUM_THREADS ?= 1
# The repository's own interpreter choice is requires-python; never download one behind the user's back in CI.
export UV_PYTHON_PREFERENCE ?= system

.PHONY: help
help: ## This list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 26

.cache/uv/bin/uv:
	@echo "uv is not on the PATH: installing uv $(UV_VERSION) into .cache/uv"
	@$(PYTHON) -m venv .cache/uv || { echo "make: python3 with venv is needed: install it (Debian: apt-get install python3-venv) and try again"; exit 1; }
	@.cache/uv/bin/pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)

.PHONY: install
install: $(filter .cache/uv/bin/uv,$(UV)) ## Environment in .venv/ (PyTorch and all; about 5 GB)
	@command -v cc >/dev/null || { echo "make: a C compiler is needed for one dependency of reasoning-gym: install one (Debian: apt-get install gcc) and try again"; exit 1; }
	@$(SYNC)

.PHONY: canary
canary: install ## Train a tiny MoE with TRACE on this machine, two to three minutes; ends with a table and report.html
	$(RUN) tracerl run jobs/examples/canary.yaml --out runs/canary-$$(date +%Y%m%d-%H%M%S)

.PHONY: test
test: install ## Unit and integration tests, about 8 minutes on 2 cores
	$(RUN) pytest -n 2 --dist loadgroup

.PHONY: test-peers
test-peers: install ## Numerics bit for bit against fouroversix, torchao, modelopt and compressed-tensors
	UV=$(UV) bash tests/peers/run.sh

# An engine brings its own versions of the same packages, so each has an environment from a lock file of its own.
ENGINES ?= sglang megatron megatron-0.19
ENGINE_PYTHON = $(if $(filter megatron-0.19,$*),3.12,3.11)
# pyenv's shims are no interpreters for uv.
ENGINE_PYTHON_PATH = $(firstword $(wildcard $(HOME)/.pyenv/versions/$(ENGINE_PYTHON).*/bin/python) $(ENGINE_PYTHON))
ENGINE = .cache/engines/$(1)/bin/python

.cache/engines/%/installed: images/engines/%.txt tests/engines/requirements.txt pyproject.toml $(filter .cache/uv/bin/uv,$(UV))
	@echo "engines: $* in .cache/engines/$*"
	@$(UV) venv --quiet --clear --python $(ENGINE_PYTHON_PATH) .cache/engines/$* || { echo "make: Python $(ENGINE_PYTHON) is needed for $*: install it, or leave $* out (make engines ENGINES=\"sglang megatron\")"; exit 1; }
	@$(UV) pip install --quiet --python .cache/engines/$* --no-deps --require-hashes -r images/engines/$*.txt
	@$(UV) pip install --quiet --python .cache/engines/$* --no-deps -r tests/engines/requirements.txt
	@$(UV) pip install --quiet --python .cache/engines/$* --no-deps --editable .
	@touch $@

.PHONY: engines
engines: $(ENGINES:%=.cache/engines/%/installed) ## Environments of SGLang and Megatron-Core in .cache/engines/ (6 GB each, most of it shared)

.PHONY: canary-engines
canary-engines: install .cache/engines/sglang/installed .cache/engines/megatron/installed ## A tiny MoE again, with SGLang as rollout and Megatron-Core as trainer, on CPU cores
	TRACERL_ROLLOUT_PYTHON=$(call ENGINE,sglang) TRACERL_TRAINER_PYTHON=$(call ENGINE,megatron) \
		$(RUN) tracerl run jobs/examples/canary-engines.yaml --out runs/canary-engines-$$(date +%Y%m%d-%H%M%S)

.PHONY: test-engines
test-engines: test-sglang test-megatron test-engine-pairs ## Plugin, adapter and their records against the real SGLang and Megatron-Core, on CPU cores

.PHONY: test-sglang
test-sglang: install .cache/engines/sglang/installed ## The part of it that needs SGLang alone
	$(call ENGINE,sglang) -m pytest -c tests/engines/pytest.ini tests/engines/test_sglang_*.py

.PHONY: test-megatron
test-megatron: install $(ENGINES:%=.cache/engines/%/installed) ## The part of it that needs Megatron-Core alone
	for engine in $(filter megatron%,$(ENGINES)); do \
		.cache/engines/$$engine/bin/python -m pytest -c tests/engines/pytest.ini tests/engines/test_megatron_*.py || exit 1; \
	done

.PHONY: test-engine-pairs
test-engine-pairs: install .cache/engines/sglang/installed .cache/engines/megatron/installed ## The part of it that needs both
	TRACERL_ROLLOUT_PYTHON=$(call ENGINE,sglang) $(call ENGINE,megatron) -m pytest -c tests/engines/pytest.ini tests/engines/test_compare_*.py
	TRACERL_ROLLOUT_PYTHON=$(call ENGINE,sglang) TRACERL_TRAINER_PYTHON=$(call ENGINE,megatron) \
		$(RUN) python -m pytest -c tests/engines/pytest.ini tests/engines/test_loop_*.py

.PHONY: test-gpu
test-gpu: install ## Kernels and engines on an NVIDIA GPU, two minutes; trainers on two GPUs, Megatron-Core's where it is built
	@$(RUN) python -c "import sys, torch; sys.exit(not torch.cuda.is_available())" || { echo "make: PyTorch sees no GPU here: run these tests on a machine with an NVIDIA GPU and its driver"; exit 1; }
	$(RUN) pytest -c tests/gpu/pytest.ini tests/gpu
	[ ! -x $(call ENGINE,megatron) ] || $(call ENGINE,megatron) -m pytest -c tests/gpu/pytest.ini tests/gpu/test_megatron_nccl.py

.PHONY: test-transport
test-transport: install ## Kills, corruption and soak of the record store, and the object store on a real S3 server
	@command -v strace >/dev/null || { echo "make: strace is needed to kill processes at their system calls: install it (Debian: apt-get install strace) and try again"; exit 1; }
	@$(SYNC) --group s3
	$(RUN) pytest -c tests/transport/pytest.ini tests/transport

.PHONY: test-monitoring
test-monitoring: install ## Dashboards and alerts on a real Prometheus that scrapes a real run, two minutes
	@{ command -v prometheus && command -v promtool; } >/dev/null || { echo "make: prometheus and promtool are needed: install them (Debian: apt-get install prometheus) and try again"; exit 1; }
	$(RUN) pytest -c tests/monitoring/pytest.ini tests/monitoring

# A whole cluster needs root and Debian packages; TRACERL_CLUSTER=api leaves out what needs it.
CLUSTER := $(RUN) python tests/cluster/cluster.py

.PHONY: test-cluster
test-cluster: export TRACERL_CLUSTER ?= ci
test-cluster: install ## Operator and jobs on a real Kubernetes, built from Go modules (11 minutes the first time), what fits CI
	@$(SYNC) --group s3
	@[ "$$TRACERL_CLUSTER" = api ] || $(CLUSTER) check
	bash tests/cluster/build.sh $$([ "$$TRACERL_CLUSTER" = api ] && echo kube helm)
	$(RUN) pytest -c tests/cluster/pytest.ini tests/cluster

.PHONY: test-cluster-full
test-cluster-full: install ## All of it, with Kueue and all faults; result in benchmarks/results/cluster-tests.json
	@$(SYNC) --group s3
	@$(CLUSTER) check
	bash tests/cluster/build.sh kube containerd helm jobset kueue
	TRACERL_CLUSTER=full TRACERL_CLUSTER_RESULTS=benchmarks/results/cluster-tests.json $(RUN) pytest -c tests/cluster/pytest.ini tests/cluster

.PHONY: cluster-up
cluster-up: install ## A Kubernetes of your own with JobSet on this machine (root; 20 seconds once it is built)
	@$(CLUSTER) check
	bash tests/cluster/build.sh
	@$(CLUSTER) up

.PHONY: cluster-down
cluster-down: ## End it
	@$(CLUSTER) down

.PHONY: lint
lint: install ## ruff, mypy --strict, import-linter, hadolint
	$(RUN) ruff format --check .
	$(RUN) ruff check .
	$(RUN) mypy
	$(RUN) mypy images/assemble.py
	$(RUN) lint-imports
	$(RUN) hadolint images/Dockerfile

.PHONY: docs
docs: install ## Write the generated reference pages and the pictures
	$(RUN) python -m tracerl.api.docs
	$(RUN) python site/figures.py

.PHONY: site
site: export NO_MKDOCS_2_WARNING = 1
site: install ## The documentation as a site in .cache/site; a link that leads nowhere fails it
	@$(SYNC) --group docs
	$(RUN) mkdocs build --quiet --config-file site/mkdocs.yml

.PHONY: test-site
test-site: install ## The documentation's slow commands, and site and report in a browser; pictures in .cache/site-screens
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || { echo "make: chromium with its driver is needed to look at the pages: install them (Debian: apt-get install chromium chromium-driver) and try again"; exit 1; }
	@$(SYNC) --group docs
	$(RUN) pytest -c tests/site/pytest.ini tests/site

.PHONY: crds
crds: install ## Write the CustomResourceDefinition, and the chart's copies of it and of the canary
	$(RUN) python -m tracerl.api.crd
	cp crds/tracerljobs.yaml charts/tracerl/files/tracerljobs.yaml
	cp jobs/examples/canary.yaml charts/tracerl/files/canary.yaml

.PHONY: dashboards
dashboards: install ## Write the chart's dashboards and alerts
	PYTHONPATH=charts $(RUN) python -m tracerl_monitoring

.PHONY: drift
drift: docs crds dashboards ## Fail when a generated file or the lock file is stale
	$(UV) lock --check
	git diff --exit-code -- docs/reference docs/figures crds charts/tracerl/files || { echo "make: generated files are stale: run 'make docs crds dashboards' and commit them"; exit 1; }

.PHONY: bench
bench: install ## Benchmarks that fit a laptop; results in benchmarks/results/
	$(RUN) python benchmarks/numerics/pack.py

.PHONY: bench-transport
bench-transport: install ## The ring, the object store and the cost of records beside their peers, about 20 minutes
	UV=$(UV) bash benchmarks/transport/run.sh

.PHONY: bench-gpu
bench-gpu: install ## Kernels, capture and a training step on an NVIDIA GPU, about four minutes; then draws them
	$(RUN) python benchmarks/gpu/run.py kernels decode training
	$(RUN) python site/figures.py

# Where images go, and what they are called there; docs/how-to/images.md.
REGISTRY ?=
BASE ?=
PLATFORMS ?= linux/amd64,linux/arm64
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

.PHONY: images
images: ## Build and push the four images with docker buildx; REGISTRY=... and BASE=debian@sha256:... are needed
	@docker buildx version >/dev/null 2>&1 || { echo "make: docker with buildx is needed to build images: see docs/how-to/images.md"; exit 1; }
	@[ -n "$(REGISTRY)" ] || { echo "make: say where the images go: make images REGISTRY=registry.example.org/team BASE=debian@sha256:..."; exit 1; }
	@[[ "$(BASE)" == *@sha256:* ]] || { echo "make: give the base by its digest: make images BASE=debian@sha256:... (docker buildx imagetools inspect debian:bookworm-slim shows it)"; exit 1; }
	for target in operator rollout trainer canary; do \
		SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) docker buildx build --file images/Dockerfile --target $$target --platform $(PLATFORMS) \
			--build-arg BASE=$(BASE) --build-arg VERSION=$(VERSION) --build-arg REVISION=$$(git rev-parse HEAD) \
			--output type=image,name=$(REGISTRY)/tracerl-$$target:$(VERSION),push=true,rewrite-timestamp=true \
			--provenance=mode=max --sbom=true . || exit 1; \
	done

.PHONY: clean
clean: ## Remove environments and caches, keep runs/
	rm -rf .venv .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
