# hotrain: `make demo` and `make test` work on a fresh machine with python3 and make; each installs what it needs.
PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
# With a GPU the installed PyTorch is used (through pip, since uv ignores system packages); elsewhere the constraints
# pin the tested versions.
HAS_GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 && echo yes)
ifeq ($(HAS_GPU),yes)
VENV_FLAGS  := --system-site-packages
CONSTRAINTS :=
else
VENV_FLAGS  :=
CONSTRAINTS := -c constraints-cpu.txt
endif

# GPU targets use the installed PyTorch: in the environment of `make setup` if it exists, else without one.
GPU_PY := PYTHONPATH=src:recipes $(if $(wildcard $(STAMP)),$(PY),$(PYTHON))

.DEFAULT_GOAL := help
.PHONY: help setup check format test test-gpu demo bench docs package clean

help:  ## print the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## make .venv with everything that demo, test and check need

# $(call install,EXTRA): by uv if it can be had, else by pip
define install
@if [ "$(HAS_GPU)" != yes ] && $(PY) -m uv --version >/dev/null 2>&1; then \
  UV_FIND_LINKS="$${PIP_FIND_LINKS:-$$($(PY) -m pip config get global.find-links 2>/dev/null)}" $(PY) -m uv pip install --python $(PY) $(CONSTRAINTS) -e '.[$(1)]' \
  || $(PY) -m pip install $(CONSTRAINTS) -e '.[$(1)]'; \
else $(PY) -m pip install $(CONSTRAINTS) -e '.[$(1)]'; fi
endef

$(STAMP): pyproject.toml constraints-cpu.txt
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	@$(PY) -m pip install -q uv || true
	$(call install,dev)
	@touch $@

# What builds the site, which nothing else needs.
$(STAMP)-docs: $(STAMP)
	$(call install,docs)
	@touch $@

check: $(STAMP)  ## lint, types, import directions
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m pytest -q tests/test_import_directions.py

format: $(STAMP)  ## rewrite the layout of the code
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# Tests start forty processes, the demo three. Where Python is told to write no bytecode, each would compile PyTorch's
# sources again.
BYTECODE := PYTHONDONTWRITEBYTECODE= PYTHONPYCACHEPREFIX=$(abspath $(VENV))/bytecode

test: $(STAMP)  ## every test that needs no GPU (about 40 minutes on 2 cores)
	$(BYTECODE) OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal -m "not gpu"

# Compiling kernels takes most of the time: if pytest-xdist is installed, eight processes share the work and the GPU.
WITH_XDIST = $(shell $(GPU_PY) -c 'import importlib.util as u; print("-p no:benchmark -n 8 --dist worksteal" if u.find_spec("xdist") else "")')

test-gpu:  ## the tests that need a CUDA device, in the environment that has its PyTorch (a quarter of an hour)
	$(GPU_PY) -m pytest -m gpu $(WITH_XDIST)

demo: $(STAMP)  ## train two small models six ways on real digits; writes runs/demo/report.html (at most 5 minutes)
	$(BYTECODE) $(PY) -m hotrain.cli demo

ifeq ($(HAS_GPU),yes)
bench:  ## times on this machine: kernels, layers and training steps on a GPU, converted layers on a CPU
	$(GPU_PY) -m hotrain.cli bench ops
	$(GPU_PY) -m hotrain.cli bench layers
	$(GPU_PY) -m hotrain.cli bench step
else
bench: $(STAMP)
	$(PY) benchmarks/layers.py
endif

# --quiet would hide warnings from --strict.
docs: $(STAMP)-docs  ## rewrite the generated parts of the documents, and build the site: site/index.html
	$(PY) tools/docs.py
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

package: $(STAMP)  ## build the wheel and the source archive into dist/
	$(PY) -m uv build --out-dir dist

clean:  ## remove .venv, site and caches
	rm -rf $(VENV) site dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
