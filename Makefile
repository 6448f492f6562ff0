# `make demo` and `make test` need only Python 3.11 or later (with venv and pip), make and, the first time, a network.
#
#   PYTHON=python3.12     the interpreter of a new environment
#   TORCH_INDEX=URL       where pip finds torch (for example PyTorch's CPU wheel index); default: pip's own index
#   RUN=runs/demo         where the demo writes

PYTHON ?= python3
TORCH_INDEX ?=
RUN ?= runs/demo

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
EVAL := $(VENV)/installed-eval
GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU && echo yes)
# A CPU machine takes one known release, a GPU machine whatever CUDA build pip finds.
TORCH := $(if $(GPU),torch>=2.11,torch==2.13.0)

.DEFAULT_GOAL := help
.PHONY: help demo test lint types imports unit clean

help:
	@echo "make demo    convert SmolLM2-135M into a hybrid and write $(RUN)/report.html"
	@echo "make test    ruff, mypy, import-linter, pytest"
	@echo "make clean   remove the environment (.venv)"

demo: $(STAMP)
	@echo "==> demo: converting SmolLM2-135M; results go to $(RUN)"
	$(BIN)/hybridize demo --out $(RUN)

test: lint types imports unit
	@echo "==> all checks passed"

lint: $(STAMP)
	@echo "==> ruff: lint and format"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	@echo "==> mypy: types of src"
	$(BIN)/mypy

imports: $(STAMP)
	@echo "==> import-linter: who may import whom"
	PYTHONPATH=src $(BIN)/lint-imports

# Two processes of one thread each: tiny models gain nothing from threads, and two processes with two each on two cores take
# several times as long.
unit: $(EVAL)
	@echo "==> pytest"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

clean:
	rm -rf $(VENV)

$(BIN)/python:
	@command -v "$(PYTHON)" >/dev/null 2>&1 || \
	  { echo "error: '$(PYTHON)' was not found; install Python 3.11 or later, or name one: make PYTHON=/path/to/python3"; exit 2; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: '$(PYTHON)' is $$("$(PYTHON)" -V 2>&1); hybridize needs 3.11 or later: make PYTHON=/path/to/python3"; exit 2; }
	@echo "==> environment: creating $(VENV) with $$("$(PYTHON)" -V 2>&1)"
	@"$(PYTHON)" -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "error: no venv module; on Debian and Ubuntu: apt-get install python3-venv"; exit 2; }

# torch goes first and alone: a range that another package asks for could otherwise bring a CUDA build to a CPU machine.
$(STAMP): pyproject.toml | $(BIN)/python
	@echo "==> environment: installing $(TORCH) ($(if $(GPU),NVIDIA GPU found,no NVIDIA GPU)), minutes the first time"
	$(BIN)/python -m pip install -qq $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"
	@echo "==> environment: installing hybridize and its tools"
	$(BIN)/python -m pip install -qq -e ".[dev,gguf,track]"
	@touch $@

# lm-eval serves `hybridize eval --tasks` and its tests; the demo does without its 200 MB.
$(EVAL): $(STAMP)
	@echo "==> environment: installing lm-eval"
	$(BIN)/python -m pip install -qq -e ".[eval]"
	@touch $@
