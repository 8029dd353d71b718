PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Two processes; one that has nothing left takes tests of the other.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

# The release of transformers that is pinned, whose own tests `make test-hf` runs.
TRANSFORMERS := $(shell sed -n 's/^transformers==//p' constraints-cpu.txt)
TRANSFORMERS_SOURCE ?= build/transformers-$(TRANSFORMERS)

# Tools of a release have an environment of their own, so that the tested one is what is locked.
TOOLS := build/tools
TORCH := $(shell grep '^torch==' constraints-cpu.txt)

.PHONY: quickstart test test-gpu test-hf test-faults lint types bench bench-model figures clean
.PHONY: lock audit sbom release-check

# The environment is made once, and again when what it is made of changes. LOCKED=1, as in CI, takes
# what the lock file names by hash: for Python 3.11 on x86-64 Linux. Builds of torch differ in their
# hashes and in what they need (CUDA or not), so that torch alone is not in it.
$(VENV)/ready: pyproject.toml constraints-cpu.txt requirements-cpu.txt requirements-lock.txt
	$(PYTHON) -m venv $(VENV)
ifdef LOCKED
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes -r requirements-lock.txt
	$(BIN)/python -m pip install --quiet --no-deps -e .
else
	$(BIN)/python -m pip install --quiet -r requirements-cpu.txt
endif
	touch $@

# A quickstart needs less than half of that.
$(VENV)/quickstart: pyproject.toml constraints-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints-cpu.txt -e .[quickstart]
	touch $@

quickstart: $(VENV)/quickstart  ## train a small model on an embedded text, and look at it
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

test-faults: $(VENV)/ready      ## kills, full disks and damaged files at random; SEED=n repeats a run
	$(BIN)/python -m tests.faults $(if $(SEED),--seed $(SEED))

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

$(TOOLS)/ready: requirements-tools.txt
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip install --quiet -r requirements-tools.txt
	touch $@

lock: $(TOOLS)/ready            ## requirements-lock.txt from pyproject.toml and the constraints
	$(TOOLS)/bin/uv pip compile --quiet pyproject.toml --extra dev -c constraints-cpu.txt \
		--generate-hashes --no-emit-package torch --no-header --no-annotate \
		--python-version 3.11 --python-platform x86_64-manylinux_2_28 \
		$(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS)) -o requirements-lock.txt

# The whole tested set: the lock file, and torch.
build/tested.txt: requirements-lock.txt constraints-cpu.txt
	mkdir -p build
	(echo "$(TORCH)"; sed -n 's/^\([^ #]*==[^ ]*\).*/\1/p' requirements-lock.txt) > $@

audit: $(TOOLS)/ready build/tested.txt    ## known weaknesses of the tested set; needs a network
	$(TOOLS)/bin/pip-audit --strict --disable-pip --no-deps -r build/tested.txt

sbom: $(TOOLS)/ready build/tested.txt     ## build/sbom.json: the tested set, as CycloneDX
	$(TOOLS)/bin/cyclonedx-py requirements --pyproject pyproject.toml --output-reproducible \
		-o build/sbom.json build/tested.txt

release-check: audit sbom       ## what a release needs beside `make test`

clean:
	rm -rf $(VENV) build *.egg-info
