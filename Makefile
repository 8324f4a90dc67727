# Everything runs in the project's .venv, which `setup` keeps in sync with requirements/lock.txt and
# setup.py.
PY := .venv/bin/python

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-fast lint benchmark support-matrix flag-reference clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## create .venv with the pinned requirements (instant without changes)
	@tools/setup_env.sh

demo: setup ## train a small GPT on real text on 4 CPU ranks with dmuon, then with adam
	@$(PY) examples/demo.py

# One thread per rank: several ranks share the cores, and more threads only compete for them.
test test-all test-fast: export OMP_NUM_THREADS := 1
# Tests start many Python processes; without its cache each would compile the package again.
test test-all test-fast: export PYTHONDONTWRITEBYTECODE :=

# Two tests at a time: much of a test is one process, and ranks wait for each other.
PYTEST := $(PY) -m pytest -q --numprocesses 2 --dist loadfile --no-loadscope-reorder

test: lint ## lint, types, and the tests, with a fixed sample of the slow cases
	$(PYTEST)

test-all: lint ## lint, types, and the tests with every case (about 45 minutes)
	$(PYTEST) --all-cases

test-fast: setup ## the tests that are not marked slow, one case of each test on several ranks
	$(PYTEST) -m "not slow" --one-case

lint: setup ## ruff and mypy
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy

benchmark: setup ## compare AdamW, megatron-core's own muon, dmuon and Orth-Dion on 4 ranks
	$(PY) -m benchmarks

support-matrix: export OMP_NUM_THREADS := 1
support-matrix: setup ## train all models at all layouts and write the table to docs/support.md
	$(PY) -m pytest -q --all-cases tests/distributed/test_layouts.py
	$(PY) tools/support_matrix.py

flag-reference: setup ## write docs/flags.md from the table in megatron_muon/config.py
	$(PY) tools/flag_reference.py

clean: ## remove .venv, caches and the demo's output
	rm -rf .venv demo_output benchmark_output build dist *.egg-info \
	  .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
