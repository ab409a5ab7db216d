# Two commands do everything: `make notebooks` and `make test`. Both make the environment first.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# A test process a core: most of a test's time is the Ascend compiler's, which uses one.
PARALLEL := --numprocesses auto --dist loadgroup

# An installed torch_npu without CANN breaks `import torch` unless this is off.
export TORCH_DEVICE_BACKEND_AUTOLOAD := 0
# Threads that wait for each other asleep: spinning ones take minutes on a machine that is busy with other work.
export OMP_WAIT_POLICY := passive

.PHONY: help env toolchain notebooks test unit gate refresh lab lint clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/'

$(STAMP): requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

env: $(STAMP)  ## make the environment in .venv

toolchain: env  ## put the Ascend compiler into the user's cache (1 GB, once for all clones)
	$(BIN)/python -m wyfast_lib ascend install

notebooks: toolchain  ## execute every notebook in order into build/notebooks/ and build/figures/
	$(BIN)/python -m wyfast_lib notebooks

test: unit  ## unit tests, then every notebook through nbmake
	WYFAST_FIGURES=build/figures $(BIN)/python -m pytest --nbmake notebooks

unit: toolchain  ## lint and unit tests
	$(BIN)/python -m ruff check .
	$(BIN)/python -m pytest tests -m "not gate and not gpu" $(PARALLEL)

gate: toolchain  ## the slow tests: all Ascend kernels through the compiler, fresh environments
	$(BIN)/python -m pytest tests -m gate $(PARALLEL)

refresh: toolchain  ## update committed notebook outputs and figures/ from one clean run
	$(BIN)/python -m wyfast_lib notebooks --refresh

lab: toolchain  ## open JupyterLab on the workbook
	$(BIN)/jupyter lab notebooks

clean:  ## delete what the other targets made, the environment excepted
	rm -rf build dist *.egg-info .pytest_cache .hypothesis .ruff_cache
