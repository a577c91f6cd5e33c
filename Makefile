# Two commands need nothing but make and Python 3.11 to 3.13: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-fast lint format bench clean

$(VENV)/.base: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.test: $(VENV)/.base
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

demo: $(VENV)/.base
	$(BIN)/python -m jaxspec.generate --demo

test: $(VENV)/.test
	$(BIN)/python -m pytest -n auto --dist loadfile

test-fast: $(VENV)/.test
	$(BIN)/python -m pytest -n auto --dist loadfile -m "not slow"

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.test
	$(BIN)/python -m jaxspec.bench

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache
