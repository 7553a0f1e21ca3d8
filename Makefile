# One command each. `make test` needs Python 3.11 or newer and make; it brings the rest and, once that is there, no
# network. The environment and the wheel are below .venv: `rm -rf .venv` starts afresh.

PYTHON ?= python3
# More than cores: tests with servers wait more than they work. Jobs share servers, but each may start its own of those
# that its tests break: up to 1 GB.
JOBS ?= 8
ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --no-input --disable-pip-version-check -qq
# Each job begins with a part of the tests in one piece, so that fewer start the same server, and helps out at the end.
PYTEST := -m pytest -n $(JOBS) --dist worksteal

# The tests start a thousand interpreters. Without compiled modules each takes twice as long, and pytest rewrites all
# tests in every job; so they are kept, below .venv, even if the environment asks for none beside the sources.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX := $(CURDIR)/$(VENV)/pycache

# What the wheel is made of. Folders are listed too: their time changes when a file is deleted.
PACKED := pyproject.toml $(wildcard README.md LICENSE tools/hatch_build.py tools/man.py tools/version.py) \
    $(shell find src docs/ -not -name '*.pyc' -not -name __pycache__ 2>/dev/null)

# Branch coverage, in per cent, that each of the gated parts must reach, and the tests that are run for it: without
# servers, and of the simulations one of each kind, because coverage makes them four times slower.
GATE := 95
COVERED := tests/client tests/core $(wildcard tests/records/test_*.py) tests/records/stores/test_value.py \
    tests/engines/test_memory.py tests/simulation/test_many_callers.py tests/simulation/test_multilock_election.py \
    tests/simulation/test_seeds.py::test_formerly_failing_seed_has_no_findings \
    tests/simulation/test_exhaustive.py::test_lock_scenario_survives_every_cancelled_await \
    tests/conformance/test_conformance.py::test_memory tests/conformance/test_conformance.py::test_memory_broken
UNCOVERED := postgresql or mysql or redis or etcd or zookeeper
GATED := 'src/leasehold/client/*,src/leasehold/records/*.py' src/leasehold/client/watchdog.py src/leasehold/engines/memory.py

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

.PHONY: help
help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

# -- the tests ---------------------------------------------------------------------------------------------------------

.PHONY: test
test: $(VENV)/.installed servers ## first tier: passes on any machine, however busy; a part: make test ARGS="tests/core -k queue"
	$(PY) $(PYTEST) $(ARGS)

.PHONY: extended
extended: $(VENV)/.installed servers ## second tier: promises in seconds, more deployments of each engine
	LEASEHOLD_MEASURE=1 $(PY) $(PYTEST) -n 3 -m "(extended or measured) and not faults" -o faulthandler_timeout=1800 $(ARGS)

.PHONY: faults
faults: $(VENV)/.installed servers ## the second tier, the whole fault matrix and the long simulations: an hour or more
	LEASEHOLD_MEASURE=1 LEASEHOLD_SEEDS=10000 $(PY) $(PYTEST) -m "extended or measured or faults" -o faulthandler_timeout=7200 $(ARGS)

.PHONY: interpreters
interpreters: $(VENV)/.installed ## the tests without servers on each other Python that this machine has; needs the network
	$(PY) tools/interpreters.py "$$(echo ./$(VENV)/wheel/*.whl)" -n $(JOBS) --dist worksteal $(ARGS)

.PHONY: oldest
oldest: $(VENV)/.oldest servers ## the tests of the integrations, with the oldest versions of the frameworks; needs the network
	$(VENV)/oldest/bin/python -m pytest -n 2 -m "not faults" tests/integrations $(ARGS)

.PHONY: slow
slow: $(VENV)/.installed servers ## where the time of the first tier goes: processor time, and waiting
	$(PY) $(PYTEST) -q -p tools.slow $(ARGS)

.PHONY: busy
busy: $(VENV)/.installed servers ## the first tier beside four busy loops, with the failures of each run: make busy ARGS="--runs 20 --record FILE"
	$(PY) tools/busy.py -n $(JOBS) --dist worksteal $(ARGS)

.PHONY: bench
bench: $(VENV)/.peers $(VENV)/.installed servers ## measure, beside other lock packages; all of it into bench/RESULTS.md: make bench ARGS=report
ifeq ($(strip $(ARGS)),report)
	$(VENV)/peers/bin/python -m bench.report
	$(PY) tests/docs/test_tables.py
else
	$(VENV)/peers/bin/python -m bench $(ARGS)
endif

.PHONY: comparison
comparison: $(VENV)/.installed servers ## every approach against pause, crash and failover, for docs/comparison.md: ten minutes
	$(PY) -m comparison $(ARGS)
	$(PY) tests/docs/test_tables.py

.PHONY: lab
lab: $(VENV)/.installed servers ## the fault lab, for docs/reliability.md: all cells, or ARGS="etcd partition", or ARGS="soak"
	@$(PY) -m harness.lab $(ARGS); code=$$?; $(PY) tests/docs/test_tables.py && exit $$code

.PHONY: docs
docs: $(VENV)/.installed ## run the snippets of the docs and compare their generated tables
	$(PY) -m pytest tests/docs $(ARGS)

.PHONY: examples
examples: $(VENV)/.installed ## run the programs in examples/
	@for example in examples/*.py examples/*.sh; do \
	    echo "$$example"; PATH="$(CURDIR)/$(VENV)/bin:$$PATH"; \
	    case $$example in *.py) python $$example;; *) sh $$example;; esac || exit 1; \
	done

.PHONY: site
site: $(VENV)/.installed ## the documentation as a site in build/site, one folder per version; needs no network
	$(PY) site/build.py $(ARGS)

# -- the release -------------------------------------------------------------------------------------------------------

.PHONY: dist
dist: $(VENV)/.dist ## sdist, wheel, SBOM and checksums of the last commit in dist/, built twice and compared
	$(VENV)/dist/bin/python tools/dist.py

.PHONY: man
man: $(VENV)/.installed ## the manual pages in build/man: man -l build/man/leasehold-run.1
	$(PY) tools/man.py build/man

# -- the checks --------------------------------------------------------------------------------------------------------

.PHONY: check
check: format lint types imports commits coverage ## format, lint, types, imports, commit messages, coverage of the core

.PHONY: format lint types imports commits coverage
format: $(VENV)/.installed
	$(PY) -m ruff format --check

lint: $(VENV)/.installed
	$(PY) -m ruff check

types: $(VENV)/.installed
	$(PY) -m mypy

imports: $(VENV)/.installed
	$(PY) -m pytest -q tests/test_imports.py

commits: $(VENV)/.installed
	$(PY) tools/commits.py

# `coverage run` rather than pytest-cov: our own pytest plugin imports leasehold before pytest-cov would look.
coverage: $(VENV)/.installed
	@$(PY) -m coverage erase
	$(PY) -m coverage run $(PYTEST) -q --durations=0 --durations-min=30 -k "not ($(UNCOVERED))" $(COVERED)
	@$(PY) -m coverage combine -q
	@for part in $(GATED); do \
	    $(PY) -m coverage report --include="$$part" --fail-under=$(GATE) || { echo "$$part: below $(GATE) %"; exit 1; }; \
	done

.PHONY: audit
audit: $(VENV)/.installed ## bandit, and known vulnerabilities of the dependencies; needs the network
	$(PIP) install bandit pip-audit
	$(PY) tools/audit.py

.PHONY: fix
fix: $(VENV)/.installed ## format, and mend what ruff can mend
	$(PY) -m ruff format
	$(PY) -m ruff check --fix

# -- the environment ---------------------------------------------------------------------------------------------------

.PHONY: servers
servers:
	@tools/servers.sh

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "Leasehold needs Python 3.11 or newer: make PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || tools/servers.sh python3-venv  # Debian packs it apart
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# The tests meet the package as users do: built, then installed. pip asks the network only for what is not there yet.
$(VENV)/.built: $(VENV)/.made $(PACKED)
	@rm -rf $(VENV)/wheel
	$(PIP) install hatchling click
	$(PY) -m hatchling build --target wheel --directory $(VENV)/wheel
	@touch $@

# The packages to compare with, in an environment of their own: nothing of ours may need them.
$(VENV)/.peers: $(VENV)/.built bench/requirements.txt
	$(PYTHON) -m venv --clear $(VENV)/peers
	$(VENV)/peers/bin/python -m pip --no-input --disable-pip-version-check -qq install \
	    "$$(echo ./$(VENV)/wheel/*.whl)[all,otel,server]" -r bench/requirements.txt
	@touch $@

# The frameworks in their oldest versions, in an environment of their own.
$(VENV)/.oldest: $(VENV)/.built tools/oldest-frameworks.txt
	$(PYTHON) -m venv --clear $(VENV)/oldest
	$(VENV)/oldest/bin/python -m pip --no-input --disable-pip-version-check -qq install \
	    "$$(echo ./$(VENV)/wheel/*.whl)[all,alembic,apscheduler,celery,cron,django,fastapi,prometheus,otel,server]" \
	    -r tools/oldest-frameworks.txt
	@touch $@

# The tools that build a release, checked against their hashes.
$(VENV)/.dist: $(VENV)/.made tools/build-requirements.txt
	$(PYTHON) -m venv --clear $(VENV)/dist
	$(VENV)/dist/bin/python -m pip --no-input --disable-pip-version-check -qq install \
	    --require-hashes --only-binary :all: -r tools/build-requirements.txt
	@touch $@

$(VENV)/.installed: $(VENV)/.built
	$(PIP) install "$$(echo ./$(VENV)/wheel/*.whl)[dev]"
	$(PIP) install --force-reinstall --no-deps ./$(VENV)/wheel/*.whl
	@touch $@
