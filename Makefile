PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: test lint types bench clean

# The environment is made once, and again when what it is made of changes.
$(VENV)/ready: pyproject.toml constraints-cpu.txt requirements-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r requirements-cpu.txt
	touch $@

test: lint types                ## lint, types and all tests, as in CI
	$(BIN)/python -m pytest -n 2

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/ready
	$(BIN)/pyright

bench: $(VENV)/ready            ## speed of the op on this machine
	$(BIN)/python benchmarks/ops.py

clean:
	rm -rf $(VENV) build *.egg-info
