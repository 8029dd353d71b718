PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Two processes; one that has nothing left takes tests of the other.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

# The release of transformers that is pinned, whose own tests `make test-hf` runs.
TRANSFORMERS := $(shell sed -n 's/^transformers==//p' constraints-cpu.txt)
TRANSFORMERS_SOURCE ?= build/transformers-$(TRANSFORMERS)

.PHONY: quickstart test test-gpu test-hf lint types bench bench-model figures clean

# The environment is made once, and again when what it is made of changes.
$(VENV)/ready: pyproject.toml constraints-cpu.txt requirements-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r requirements-cpu.txt
	touch $@

quickstart: $(VENV)/ready       ## train a small model on an embedded text, and look at it
	$(BIN)/frac quickstart

test: lint types                ## lint, types and all tests, as in CI
	$(PYTEST)
	TRITON_INTERPRET=1 $(PYTEST) -k "kernels or triton" tests/kernels tests/ops tests/layers

test-gpu: $(VENV)/ready         ## the kernels, and all else that is marked gpu, on this machine's GPU
	$(BIN)/python -m pytest tests/kernels tests/ops/test_contracts.py tests/layers
	$(BIN)/python -m pytest -m gpu

test-hf: $(VENV)/ready $(TRANSFORMERS_SOURCE)     ## transformers' own tests around our models; TRL
	$(BIN)/python -m pip install --quiet -r requirements-hf.txt
	TRANSFORMERS_SOURCE=$(TRANSFORMERS_SOURCE) $(BIN)/python -m pytest -m hf tests/hf

build/transformers-$(TRANSFORMERS):
	$(BIN)/python -m pip download --quiet --no-deps --no-binary :all: --dest build \
		transformers==$(TRANSFORMERS)
	tar -xzf $@.tar.gz -C build

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/ready
	$(BIN)/pyright

bench: $(VENV)/ready            ## speed of the op on this machine
	$(BIN)/python benchmarks/ops.py

bench-model: $(VENV)/ready      ## speed of the 1.3B model, which needs a GPU
	$(BIN)/python benchmarks/model.py

figures: $(VENV)/ready          ## docs/figures from the rows in benchmarks/results
	$(BIN)/python benchmarks/plot.py

clean:
	rm -rf $(VENV) build *.egg-info
