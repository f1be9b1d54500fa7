# make run and make test are all a fresh machine with Python 3.11+ needs; everything goes into .venv.
PYTHON ?= python3
BIN := .venv/bin
LINKED := build/linked

.PHONY: audit constraints docs examples pictures release locked sbom run test lint bench soak chaos mutants topologies clean

run: .venv/installed
	@$(BIN)/quota demo

test: .venv/installed-test
	@$(BIN)/python -m pytest -n auto --dist worksteal -q

# Formatting, lint, strict types and import layers. The checkers know nothing of the mapping in pyproject.toml that makes jobs/ the package
# quota.jobs: they are shown a tree in which it stands there.
lint: .venv/installed-test .venv/installed-lint
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@rm -rf $(LINKED) && mkdir -p $(LINKED)/quota
	@ln -s $(CURDIR)/quota/[a-z_]* $(CURDIR)/jobs $(CURDIR)/lua $(CURDIR)/config $(LINKED)/quota/
	@cd $(LINKED) && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml --linecount-report lines
	@cd $(LINKED) && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml $(CURDIR)/tests/typed/user_program.py \
		$(CURDIR)/docs/examples/*.py $(CURDIR)/docs/site/*.py
	@cd $(LINKED) && PYTHONPATH=. $(CURDIR)/$(BIN)/lint-imports --config $(CURDIR)/pyproject.toml --no-cache --no-logo \
		>imports.txt || (cat imports.txt; exit 1)
	@grep -q "quota.jobs.runner" $(LINKED)/lines/linecount.txt || (echo "mypy did not see quota.jobs"; exit 1)

# Both ledgers beside the field and in processes of their own, as ratios to floors of the same run; inbound limits; the first byte
# of the page; 20 processes on one Redis.
# BEFORE=REVISION puts decisions as that revision made them into the same races.
bench: .venv/installed-test .venv/installed-bench
	@cd tests && ../$(BIN)/python -m bench $(if $(BEFORE),--before '$(BEFORE)') && ../$(BIN)/python -m bench.inbound && \
		../$(BIN)/python -m bench.page && ../$(BIN)/python -m bench.crowd

# The full counts: 60,000 random operations on each ledger and 3,000 decisions that arrive late, two months around each
# change of the clocks, 50 runs of a job whose machines die, 100,000 random inputs to everything that reads what others
# wrote, a hundred kills of each job, the uploads of 500 channels, 1,500 random plans, schemas and environments, ledgers
# that lose what they have for 10 minutes and at any call of 4,000 operations, 2,000 faults of the connections of event
# loops, 100 histories of cut connections under each library that is instrumented, bodies of 2 GB and 1,000 slow callers
# of the proxy, decisions interrupted by signals at every place, runs that have their whole time to stop, and every
# command of the tests of commands in a process that starts from nothing.
soak: .venv/installed-test
	@QUOTA_TEST_OPERATIONS=60000 $(BIN)/python -m pytest -n auto -q --timeout 3600 tests/contract/rules
	@QUOTA_TEST_DAYS=61 $(BIN)/python -m pytest -n auto -q --timeout 3600 tests/e2e/jobs/test_simulated_months.py
	@QUOTA_TEST_RUNS=50 $(BIN)/python -m pytest -n auto -q --timeout 3600 tests/e2e/jobs/test_machines_that_die.py
	@QUOTA_TEST_INPUTS=100000 $(BIN)/python -m pytest -n auto -q --timeout 3600 tests/fuzz
	@QUOTA_TEST_WALLS="8, 9" $(BIN)/python -m pytest -n auto -q --timeout 3600 tests/e2e/jobs/test_hostile_upstream.py
	@QUOTA_TEST_KILLS=100 QUOTA_TEST_CROWD=16 $(BIN)/python -m pytest -n auto -q --timeout 3600 -k "anywhere or at_once" tests/e2e/test_processes.py tests/e2e/jobs/test_fetches.py
	@QUOTA_TEST_CHANNELS=500 $(BIN)/python -m pytest -n 0 -q --timeout 3600 -k 500 tests/e2e/jobs/test_fetches.py
	@QUOTA_TEST_CALLS=50 $(BIN)/python -m pytest -n auto -q --timeout 3600 tests/e2e/test_reservations_at_once.py
	@QUOTA_TEST_EXAMPLES=1500 $(BIN)/python -m pytest -n auto -q --timeout 3600 tests/unit/jobs/test_simulation.py $(addprefix tests/unit/settings/test_,schema.py environment.py)
	@cd tests && ../$(BIN)/python -m support.torture 600 6
	@QUOTA_TEST_LOSSES=4000 $(BIN)/python -m pytest -n auto -q --timeout 3600 tests/contract/recovery/test_any_moment.py
	@QUOTA_TEST_LENGTH=90 $(BIN)/python -m pytest -n auto -q --timeout 3600 tests/unit/settings/test_large_configurations.py
	@QUOTA_TEST_REQUESTS=20000 $(BIN)/python -m pytest -n auto -q --timeout 3600 tests/contract/inbound/test_histories.py
	@QUOTA_TEST_EVERY_BYTE=1 QUOTA_TEST_BODY_MB=2000 QUOTA_TEST_SLOW=1000 $(BIN)/python -m pytest -n auto -q --timeout 3600 tests/e2e/proxy
	@QUOTA_TEST_CUTS=100 $(BIN)/python -m pytest -n auto -q --timeout 3600 tests/e2e/clients/test_instrument.py -k cut
	@QUOTA_TEST_FAULTS=2000 $(BIN)/python -m pytest -n auto -q --timeout 3600 tests/contract/test_async_budget.py -k twice
	@QUOTA_TEST_ROWS=1000000 $(BIN)/python -m pytest -n auto -q --timeout 3600 -k constant tests/e2e/jobs/test_data.py
	@QUOTA_TEST_WORKERS=300 $(BIN)/python -m pytest -n auto -q --timeout 3600 -k killed tests/e2e/jobs/test_shared_places.py
	@QUOTA_TEST_EXEC=1 $(BIN)/python -m pytest -n auto -q --timeout 3600 tests/e2e $(addprefix tests/contract/test_,status.py spending.py explain.py)
	@QUOTA_TEST_INTERRUPTED=1 $(BIN)/python -m pytest -n auto -q --timeout 3600 tests/contract/test_interrupts.py
	@QUOTA_TEST_INTERRUPTED=1 $(BIN)/python -m pytest -n auto -q --timeout 3600 -k interrupted tests/unit/jobs/test_store.py

# The site, into build/site; a warning is an error. Sphinx is in an environment of its own.
docs: build/docs-tools/installed
	@build/docs-tools/bin/python docs/site/assemble.py build/site-source
	@rm -rf build/site && build/docs-tools/bin/python -m sphinx -W --keep-going -q -c docs/site build/site-source build/site
	@echo "wrote build/site/index.html"

# The pictures in docs/pictures/, from the real thing: needs Chromium.
pictures: .venv/installed-test
	@$(BIN)/python docs/site/pictures.py

build/docs-tools/installed:
	@$(PYTHON) -m venv build/docs-tools
	@build/docs-tools/bin/pip install --quiet --disable-pip-version-check furo myst-parser -e .
	@touch $@

# The examples in docs/examples/, and programs under `quota exec --auto`, that are too heavy for the tests: each with its real
# package in an environment of its own.
EXAMPLES := airbyte-cdk apache-airflow dagster ddtrace eventlet gevent google-analytics-data niquests prefect
examples: .venv/installed-test $(EXAMPLES:%=build/examples/%/installed)
	@$(BIN)/python -m pytest -n 0 -q tests/e2e/examples/on_*.py

build/examples/%/installed:
	@$(PYTHON) -m venv build/examples/$*
	@echo "installing $* into build/examples/$* ..."
	@build/examples/$*/bin/python -m pip install --quiet --disable-pip-version-check -e . $*
	@touch $@

# Real processes killed at random, a Redis that dies and comes back: 5 minutes of it, or QUOTA_TEST_SECONDS;
# QUOTA_TEST_SEED repeats one.
chaos: .venv/installed-test
	@cd tests && ../$(BIN)/python -m chaos

# 200 mutants of the core, one token changed in each: prints those that no test notices. Some hours. COUNT=15 SEED=2 makes fewer
# and others.
mutants: .venv/installed-test
	@cd tests && ../$(BIN)/python -m mutants $(if $(COUNT),--count $(COUNT)) $(if $(SEED),--seed $(SEED))

# Every topology of Redis, with each server at hand: the contract over it, what a decision costs, failover, a slot that moves,
# a network that parts. Root, and half an hour. The table is in build/topologies.md; PARTS="cost failover" runs these parts of it.
topologies: .venv/installed-test
	@cd tests && ../$(BIN)/python -m topologies $(PARTS)

.venv/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	@$(PYTHON) -m venv .venv
	@echo "installing into .venv ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

.venv/installed-%: .venv/installed
	@echo "installing what $* needs ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$*]'
	@touch $@

# What CI installs: the versions in .ci/constraints.txt, each file held to its hash, and nothing else.
locked: .ci/constraints.txt
	@$(PYTHON) -m venv .venv
	@echo "installing what .ci/constraints.txt says into .venv ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r .ci/constraints.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch .venv/installed
	@touch $(addprefix .venv/installed-,test lint browser bench)

# The newest versions that pyproject.toml allows, with the hashes of their files for every platform. Review what changed.
constraints: build/tools/installed
	@$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")' >build/build.in
	@build/tools/bin/uv pip compile --quiet --upgrade --all-extras --universal --python-version 3.11 --generate-hashes --no-annotate \
		--no-emit-index-url --no-emit-find-links --custom-compile-command "make constraints" --output-file .ci/constraints.txt pyproject.toml build/build.in

# What is in a release, for those who get it. It names the places that files came from, so it is never committed.
sbom: build/tools/installed .venv/installed
	@build/tools/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-file build/sbom.json $(BIN)/python
	@echo "wrote build/sbom.json"

# What a release is, into build/release: sdist and wheel, checked, installed and tried on each Python at hand; SBOM, checksums.
release: build/tools/installed .venv/installed-test
	@$(BIN)/python .ci/release.py build/tools/bin build/release

# Known vulnerabilities of what is installed. Where the database cannot be asked, it says so and counts as skipped.
audit: build/tools/installed .venv/installed
	@build/tools/bin/pip-audit --progress-spinner off --format json --output build/audit.json \
		--path "$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')" >build/audit.log 2>&1 || true
	@$(BIN)/python .ci/audited.py build/audit.json

build/tools/installed:
	@$(PYTHON) -m venv build/tools
	@build/tools/bin/pip install --quiet --disable-pip-version-check cyclonedx-bom pip-audit twine uv
	@touch $@

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache
