# Everything runs in .venv, which is made when it is missing or older than pyproject.toml.
# Another Python than python3: make PYTHON=python3.12 setup

PYTHON ?= python3
SECONDS ?= 600
MINUTES ?= 60
SEEDS ?= 0-999
# Tests wait for processes and clocks, so two cores run four at once.
WORKERS ?= 4
FAULTS ?= all
SEED ?= 1
ROUNDS ?= 20
ONLY ?= all
MQTT_CLIENTS ?= hivemq-3 hivemq-5 paho-3 paho-5 go-3 go-5 rust-3 rust-5 js-3 js-5 gmqtt-3 gmqtt-5 mosquitto-3 mosquitto-5
# What `make test-clients` installs first, by the names in tests/clients/install: everything if it is empty.
INSTALL ?=
CLIENTS ?= python node go rust java-5.0.7 java-5.1.0 java-5.2.0
BIN := .venv/bin
READY := .venv/.ready

# Where memory can hold them, the files of `make test` are there: waits for a disk are most of its time. Losses of power are
# simulated, and the suites that kill (`make nightly`) run on the disk. Tests install commands there and run them.
IN_MEMORY := $(shell grep -qs '^[^ ]* /dev/shm [^ ]* [^ ]*noexec' /proc/mounts || df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 && $$4 > 2000000 {print "/dev/shm"}')

# Without its bytecode, each of the many processes that the tests start compiles all of Penstock again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-fast nightly test-clients test-chaos test-attack fuzz simulate simulate-cluster cluster cluster-demo soak docs docs-serve lint types layout format bench bench-mqtt bench-pop bench-store bench-spark bench-timer proto clean

help:  ## Show this list
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)$$/make \1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r name doc; do printf '%-24s %s\n' "$$name" "$$doc"; done

setup: $(READY)  ## Make .venv with everything that the other targets need

demo: $(READY)  ## Run a fleet of devices, failing consumers and the reconciliation, by Spark where there is Java 17+
	$(BIN)/penstock demo

test: $(READY)  ## Run the tests, WORKERS at a time (about four minutes on two cores)
	PYTEST_DEBUG_TEMPROOT=$(IN_MEMORY) $(BIN)/python -m pytest --numprocesses=$(WORKERS) $(ARGS)
	@if [ -z "$(ARGS)" ] && [ -z "$$(git status --porcelain 2>&1)" ]; then git rev-parse 'HEAD^{tree}' > .venv/.tested; fi

test-fast: $(READY)  ## Run the tests that a change breaks first, in under a minute
	$(BIN)/python -m pytest --numprocesses=$(WORKERS) -m 'not slow and not nightly' $(ARGS)

nightly: $(READY)  ## Search, kill, flood, soak, and drive foreign clients: make nightly MINUTES=60 SEED=7 ONLY=tests,chaos
	$(BIN)/python -m tests.nightly --minutes $(MINUTES) --only $(ONLY) $(if $(filter command line,$(origin SEED)),--seed $(SEED)) $(ARGS)

test-clients: $(READY)  ## Run RocketMQ's official clients and MQTT clients of other projects through all their tests (ten minutes)
	tests/clients/install $(INSTALL)
	PENSTOCK_ROCKETMQ_CLIENTS="$(CLIENTS)" PENSTOCK_MQTT_CLIENTS="$(MQTT_CLIENTS)" $(BIN)/python -m pytest --numprocesses=$(WORKERS) -m nightly tests/system/test_rocketmq_clients.py tests/system/test_mqtt_clients.py $(ARGS)

test-chaos: $(READY)  ## Inject real faults under load: make test-chaos FAULTS=kill-*,power-cut SEED=7 ROUNDS=100 (root for some)
	$(BIN)/python -m tests.chaos --faults '$(FAULTS)' --seed $(SEED) --rounds $(ROUNDS) --report chaos-report.md $(ARGS)

test-attack: $(READY)  ## Attack a node with honest clients beside, and judge their latency: make test-attack ONLY=huge-*,login-flood
	$(BIN)/python -m tests.attack --only '$(ONLY)' --report attack-report.md $(ARGS)

fuzz: $(READY)  ## Fuzz the codec and a live node: make fuzz SECONDS=600
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS)

soak: $(READY)  ## Run everything under a small retention, and fail if anything grows: make soak MINUTES=60
	$(BIN)/python -m bench soak --minutes $(MINUTES) $(ARGS)

simulate: $(READY)  ## Simulate nodes on faulty machines: make simulate SEEDS=0-999, or ARGS=--mutations; a seed repeats exactly
	$(BIN)/python -m tests.simulation --seeds $(SEEDS) $(ARGS)

simulate-cluster: $(READY)  ## Simulate the replicas of a cluster: make simulate-cluster SEEDS=0-999999, or ARGS=--mutations
	$(BIN)/python -m tests.cluster --seeds $(SEEDS) $(ARGS)

cluster: $(READY)  ## Run three nodes and etcd on this machine, to try a cluster out (needs etcd)
	$(BIN)/python -m tests.clusterdemo --run

cluster-demo: $(READY)  ## Kill the leader of a cluster again and again under a fleet, and look for losses: make cluster-demo ARGS='--kills 20'
	$(BIN)/python -m tests.clusterdemo $(ARGS)

lint: $(READY)  ## Check style and formatting
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(READY)  ## Check types
	$(BIN)/mypy

docs: $(READY)  ## Build the documentation site into site/, and fail on any warning
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: $(READY)  ## Show the documentation site on 127.0.0.1:8000, and build it again when a page changes
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

layout: $(READY)  ## Print the folders of the code, the arrows between them, and the circles
	@$(BIN)/python -m tests.layout

format: $(READY)  ## Format the code, and fix what ruff can fix
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

bench: $(READY)  ## Run the benchmarks
	$(BIN)/python -m bench $(ARGS)

bench-mqtt: $(READY)  ## Measure MQTT beside mosquitto and nats-server, where they are installed (ten minutes)
	$(BIN)/python -m bench mqtt $(ARGS)

bench-pop: $(READY)  ## Measure POP beside Redis streams and beanstalkd, where they are installed (ten minutes)
	$(BIN)/python -m bench pop $(ARGS)

bench-store: $(READY)  ## Measure the store by itself, against its goals (half an hour)
	$(BIN)/python -m bench store $(ARGS)

bench-spark: $(READY)  ## Measure the tables and their reconciliation by Spark and DuckDB (fifteen minutes, 8 GB of disk)
	$(BIN)/python -m bench spark $(ARGS)

bench-timer: $(READY)  ## Measure delayed messages up to ten million, beside a sorted set of Redis and nats-server (an hour)
	$(BIN)/python -m bench timer $(ARGS)

# Run from the root, with the path below penstock/: only so do the generated modules import each other by their full names.
proto: $(READY)  ## Make pop/proto/pop_pb2* and cluster/proto/etcd_pb2* again from their .proto files
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I. --python_out=. --grpc_python_out=. --mypy_out=. --mypy_grpc_out=. penstock/pop/proto/pop.proto
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I. --python_out=. --mypy_out=. penstock/cluster/proto/etcd.proto

clean:  ## Delete .venv, caches and builds; data stays
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "Penstock needs Python 3.11 or newer, and there is no $(PYTHON). Name one: make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Penstock needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + ". Name another: make PYTHON=/path/to/python")'
	$(BIN)/python -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || $(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@
