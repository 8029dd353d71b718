PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Two processes; an idle one takes over tests of the other.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal
INTERPRETED := TRITON_INTERPRET=1 $(PYTEST) -k "kernels or triton" tests/kernels tests/ops tests/layers
# Python compiles the modules that are used when they are used; compiling all takes 44 CPU seconds.
INSTALL := -m pip install --quiet --no-compile

# The pinned release of transformers; `make test-hf` runs its own tests.
TRANSFORMERS := $(shell sed -n 's/^transformers==//p' constraints-cpu.txt)
TRANSFORMERS_SOURCE ?= build/transformers-$(TRANSFORMERS)

# Release tools and documentation have their own environments, so that the tested environment holds
# only what is locked.
TOOLS := build/tools
DOCS := build/docs-tools
TORCH := $(shell grep '^torch==' constraints-cpu.txt)

.PHONY: quickstart test test-plain test-interpreted test-slow test-gpu test-hf test-faults lint types bench bench-model figures screenshots clean
.PHONY: docs lock audit sbom package-check release-check

# The environment is rebuilt only when its requirements change. LOCKED=1, as in CI, installs the
# hashed packages of the lock file, for Python 3.11 on x86-64 Linux. The lock file omits torch,
# because its builds (CUDA or not) differ in hashes and dependencies.
$(VENV)/ready: pyproject.toml constraints-cpu.txt requirements-cpu.txt requirements-lock.txt
	$(PYTHON) -m venv $(VENV)
ifdef LOCKED
	$(BIN)/python $(INSTALL) $(TORCH)
	$(BIN)/python $(INSTALL) --no-deps --require-hashes -r requirements-lock.txt
	$(BIN)/python $(INSTALL) --no-deps -e .
else
	$(BIN)/python $(INSTALL) -r requirements-cpu.txt
endif
	touch $@

# The quickstart needs less than half of these packages.
$(VENV)/quickstart: pyproject.toml constraints-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(INSTALL) -c constraints-cpu.txt -e .[quickstart]
	touch $@

quickstart: $(VENV)/quickstart  ## train a small model on an embedded text, and inspect it
	$(BIN)/frac quickstart

test: lint types docs           ## lint, types, documentation and all tests, as in CI
	MAKEFLAGS= $(MAKE) --jobs 2 test-plain test-interpreted

test-plain: $(VENV)/ready
	$(PYTEST)

# One process beside the two of test-plain, which often wait. Its output comes at the end.
test-interpreted: $(VENV)/ready
	mkdir -p build
	$(INTERPRETED) -n 1 > build/interpreted.log 2>&1; status=$$?; cat build/interpreted.log; exit $$status

test-slow: $(VENV)/ready        ## the tests marked slow, which `make test` leaves out
	$(PYTEST) -m slow
	$(INTERPRETED) -m slow

test-gpu: $(VENV)/ready         ## the kernels, and all tests marked gpu, on this machine's GPU
	$(BIN)/python -m pytest tests/kernels tests/ops/test_contracts.py tests/layers
	$(BIN)/python -m pytest -m gpu

test-hf: $(VENV)/ready $(TRANSFORMERS_SOURCE)     ## transformers' own tests on our models; TRL
	$(BIN)/python $(INSTALL) -r requirements-hf.txt
	TRANSFORMERS_SOURCE=$(TRANSFORMERS_SOURCE) $(BIN)/python -m pytest -m hf tests/hf

test-faults: $(VENV)/ready      ## random kills, full disks and damaged files; SEED=n repeats a run
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

bench-model: $(VENV)/ready      ## speed of the 1.3B model; needs a GPU
	$(BIN)/python benchmarks/model.py

figures: $(VENV)/ready          ## docs/figures; speed figures use the rows in benchmarks/results
	$(BIN)/python benchmarks/plot.py
	$(BIN)/python docs/draw.py

$(DOCS)/ready: requirements-docs.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python $(INSTALL) --no-deps --require-hashes -r requirements-docs.txt
	touch $@

# Warnings are errors; --quiet would hide them. The variable silences the theme's advertisement.
docs: $(DOCS)/ready             ## the documentation in build/site; checks CITATION.cff
	$(DOCS)/bin/cffconvert --validate -i CITATION.cff
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

# Browser screenshots of the model that `make quickstart` saves in quickstart.
screenshots: $(VENV)/ready      ## docs/figures/*.png; needs chromium
	test -d quickstart/final || $(BIN)/frac quickstart
	$(BIN)/python docs/screenshots.py quickstart

$(TOOLS)/ready: requirements-tools.txt
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python $(INSTALL) -r requirements-tools.txt
	touch $@

COMPILE = $(TOOLS)/bin/uv pip compile --quiet --generate-hashes --no-header --no-annotate \
	--python-version 3.11 --python-platform x86_64-manylinux_2_28 \
	$(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS))

lock: $(TOOLS)/ready            ## both lock files, from pyproject.toml and the constraints
	$(COMPILE) pyproject.toml --extra dev -c constraints-cpu.txt --no-emit-package torch \
		-o requirements-lock.txt
	$(COMPILE) --group docs -o requirements-docs.txt

# The whole tested set: the lock file, and torch.
build/tested.txt: requirements-lock.txt constraints-cpu.txt
	mkdir -p build
	(echo "$(TORCH)"; sed -n 's/^\([^ #]*==[^ ]*\).*/\1/p' requirements-lock.txt) > $@

audit: $(TOOLS)/ready build/tested.txt    ## known vulnerabilities of the tested set; needs a network
	$(TOOLS)/bin/pip-audit --strict --disable-pip --no-deps -r build/tested.txt

sbom: $(TOOLS)/ready build/tested.txt     ## build/sbom.json: the tested set, as CycloneDX
	$(TOOLS)/bin/cyclonedx-py requirements --pyproject pyproject.toml --output-reproducible \
		-o build/sbom.json build/tested.txt

# PYTHONS="python3.11 python3.12 python3.13" tests each version.
package-check: $(TOOLS)/ready   ## build sdist and wheel, and test them in empty environments
	$(TOOLS)/bin/python tests/release.py $(or $(PYTHONS),$(PYTHON))

release-check: test-slow audit sbom package-check  ## release checks in addition to `make test`

clean:
	rm -rf $(VENV) build *.egg-info
