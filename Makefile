# Everything runs in .venv, which the first target that needs it makes. `make help` lists the targets.
.DEFAULT_GOAL := help
# Where it is set, each process of a test run would compile anew what it imports of vLLM and PyTorch.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help install run check test test-costly test-all model faults versions bench crds chart kube e2e lock clean
BIN := .venv/bin
PORT ?= 8000
ARGS ?=
N ?= 500
SEED ?= 1
# Five groups of files on two cores: some wait while others compute. Which file comes next: tests/scheduling.py.
WORKERS ?= 5
SIDE_BY_SIDE = -n $(WORKERS) --dist loadfile --no-loadscope-reorder

help:     ## what can be made
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST)

install:  ## system libraries, virtual environment, locked packages; nothing when they are there
	@tools/bootstrap.sh

run: install  ## a prefill engine, a decode engine and the router; one question; serve until Ctrl-C (ARGS=--once ends then)
	@$(BIN)/pdcluster local --port $(PORT) $(ARGS)

check: install  ## the fast part: format, lint, types, layers, unit and property tests
	@$(MAKE) --no-print-directory --output-sync=target -j 3 check-parts check-router check-laws check-connector check-style

# Three at a time on two cores, since tests of the parts wait for processes. Only check-connector imports vLLM, 14 s of CPU: pytest's own workers would do so each.
.PHONY: check-style check-laws check-connector check-router check-parts
BRIEF_TESTS = PDCLUSTER_FEW_EXAMPLES=1 $(BIN)/python -m pytest -q -m "not slow and not long"
WITH_VLLM = tests/unit/connector tests/unit/benchmarks tests/unit/test_examples.py

check-style:
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check-laws:
	$(BRIEF_TESTS) tests/property

check-connector:
	$(BRIEF_TESTS) $(WITH_VLLM)

check-router:
	$(BRIEF_TESTS) tests/unit/router

check-parts:
	$(BRIEF_TESTS) tests/unit $(addprefix --ignore=,$(WITH_VLLM) tests/unit/router)

# The linters beside the tests: their one core would leave the other idle for a minute, and they end long before.
test: kube  ## check, and tests of all parts, also with real engines: when a piece of work is done
	@$(MAKE) --no-print-directory -j 2 run-most check-style

test-costly: kube  ## what test leaves out, and more examples of each law: CI runs both, before every merge
	$(TESTS) -m "(costly or law) and not slow"

test-all: kube  ## the same with the slow ones, as all models and rank sizes: before every release
	@$(MAKE) --no-print-directory -j 2 run-all check-style

.PHONY: run-most run-all
TESTS = $(BIN)/python -m pytest -q $(SIDE_BY_SIDE) --durations=100 --durations-min=3
run-most:
	PDCLUSTER_FEW_EXAMPLES=1 $(TESTS) -m "not slow and not costly"
run-all:
	PDCLUSTER_ALL_EXAMPLES=1 $(TESTS)

model: install  ## every interleaving of a small system of the real cores (ARGS=small: one minute)
	$(BIN)/python -m tests.model $(ARGS)

faults: install  ## random faults on real engines and the real router (N=10000 SEED=7 ARGS="--report FILE"); a report
	@$(BIN)/python -m tests.campaign --requests $(N) --seed $(SEED) $(ARGS)

versions: install  ## real engines of older versions of vLLM (ARGS="0.23 --short --keep"); 6 GB and minutes for each
	@$(BIN)/python -m tests.versions $(ARGS)

bench: install  ## what the hook costs, and how fast bytes leave (benchmarks/ttft.py takes longer: run it by hand)
	$(BIN)/python benchmarks/save_kv_layer.py
	$(BIN)/python -m benchmarks.push_bandwidth --quick

crds: install  ## write crds/ and docs/reference from the operator's API, all settings and the router's errors
	@$(BIN)/python -m tools.crds

chart: install  ## write what is made of charts/pdcluster: values, schema, README, dashboard, copies of crds/
	@$(BIN)/python -m tools.crds
	@$(BIN)/python -m tools.chart

kube: install  ## Kubernetes' control plane, Prometheus' rules and an OpenTelemetry collector for tests: nine minutes, once
	@$(BIN)/python -m tests.control_plane
	@$(BIN)/python -m tests.collector
	@$(BIN)/python -m tests.prometheus

e2e: install  ## stories on a real cluster: a node of our own in a box (root; see e2e/README.md), or that of KUBECONFIG
	@tools/e2e_packages.sh
	@$(BIN)/python -m e2e $(ARGS)

lock: install  ## resolve the dependencies anew
	$(BIN)/uv pip compile requirements/bootstrap.in --universal --python-version 3.11 --generate-hashes --no-annotate \
	  --no-header -o requirements/bootstrap.lock
	$(BIN)/uv pip compile pyproject.toml --extra router --extra otlp --extra picker --extra jwt --extra connector --extra operator --extra cpu --group dev \
	  --override requirements/overrides.txt --universal --python-version 3.11 --generate-hashes --no-annotate \
	  --no-header -o requirements/dev.lock
	$(BIN)/uv pip compile requirements/build.in --universal --python-version 3.11 --generate-hashes --no-annotate \
	  --no-header --constraints requirements/dev.lock -o requirements/build.lock
	$(BIN)/uv pip compile pyproject.toml --extra router --extra otlp --extra picker --extra jwt --extra operator --universal --python-version 3.11 \
	  --generate-hashes --no-annotate --no-header --constraints requirements/dev.lock -o requirements/control.lock
	$(BIN)/uv pip compile requirements/clients.in --universal --python-version 3.11 --generate-hashes --no-annotate \
	  --no-header -o requirements/clients.lock

clean:    ## remove the virtual environment and every cache in this folder
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
