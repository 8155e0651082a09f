# Every target sets up .venv by itself; the set-up is skipped while pyproject.toml and constraints.txt are unchanged.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.chatmill-installed

.PHONY: demo test test-slow test-gpu check bench browser clean setup

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

demo: setup
	$(BIN)/python examples/demo.py

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check
	$(BIN)/python -m pytest -n 2 -m "not slow and not gpu"

test-slow: setup
	$(BIN)/python -m pytest -m slow

test-gpu: setup
	$(BIN)/python -m pytest -m gpu

bench: setup
	$(BIN)/python -m benchmarks.run

browser:
	command -v chromium >/dev/null || (apt-get update -qq && apt-get install -y -qq chromium)

clean:
	rm -rf $(VENV) .venv-bench .pytest_cache .mypy_cache .ruff_cache .hypothesis demo_out
