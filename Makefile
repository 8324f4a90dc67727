# Everything runs inside the project's own .venv, which `setup` makes and keeps in step with
# requirements/lock.txt and setup.py.
PY := .venv/bin/python

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-fast lint benchmark support-matrix flag-reference clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## make .venv with the pinned requirements (instant when nothing changed)
	@tools/setup_env.sh

demo: setup ## train a small GPT on real text on 4 CPU ranks with dmuon, then with adam
	@$(PY) examples/demo.py

# One thread per rank: several ranks share the cores, and more threads only fight over them.
test test-all test-fast: export OMP_NUM_THREADS := 1
# Tests start many Python processes; each would compile the package anew without its cache.
test test-all test-fast: export PYTHONDONTWRITEBYTECODE :=

# Two tests at once keep the cores busy: much of a test is one process, and ranks wait for each other.
PYTEST := $(PY) -m pytest -q --numprocesses 2 --dist loadfile --no-loadscope-reorder

test: lint ## lint, types, and the tests, slow cases by a fixed sample
	$(PYTEST)

test-all: lint ## lint, types, and the tests with every case (about 45 minutes)
	$(PYTEST) --all-cases

test-fast: setup ## the tests that are not marked slow, of those with several ranks one case each
	$(PYTEST) -m "not slow" --one-case

lint: setup ## ruff and mypy
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy

benchmark: setup ## AdamW, megatron-core's own muon, dmuon and Orth-Dion side by side on 4 ranks
	$(PY) -m benchmarks

support-matrix: export OMP_NUM_THREADS := 1
support-matrix: setup ## train every model at every layout and put the table into docs/support.md
	$(PY) -m pytest -q --all-cases tests/distributed/test_layouts.py
	$(PY) tools/support_matrix.py

flag-reference: setup ## write docs/flags.md from the table in megatron_muon/config.py
	$(PY) tools/flag_reference.py

clean: ## remove .venv, caches and what the demo wrote
	rm -rf .venv demo_output benchmark_output build dist *.egg-info \
	  .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
