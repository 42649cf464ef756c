# `make` lists the targets. Everything runs in .venv, which `make train` and `make test` set up by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help setup train test test-slow parity bench lint types check data tiny-model wheel clean

help: ## This list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

setup: $(VENV)/installed ## Make .venv and install cookbook with its development tools

train: $(VENV)/installed ## The main job: GRPO on the shipped model, to a policy that visibly learned (ARGS="..." adds overrides)
	$(BIN)/cookbook train recipe=grpo $(ARGS)

test: $(VENV)/installed ## The tests, in under five minutes
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: $(VENV)/installed ## Learning runs over seeds, the installed wheel, the shipped model rebuilt: some twenty minutes
	$(BIN)/python -m pytest -m slow

# TRL lives in an environment of its own. TRL=trl takes its newest version (remove .venv-trl first).
TRL ?= trl==1.16.0
.venv-trl/installed: constraints.txt
	$(PYTHON) -m venv .venv-trl
	@echo '*' > .venv-trl/.gitignore
	.venv-trl/bin/python -m pip install --quiet --constraint constraints.txt $(TRL)
	@touch $@

parity: $(VENV)/installed .venv-trl/installed ## Losses, gradients and runs beside TRL's, as a table; fails when they part
	@rm -rf runs/parity && mkdir -p runs/parity
	$(BIN)/python benchmarks/parity/prepare.py runs/parity
	HF_HUB_OFFLINE=1 CI=1 .venv-trl/bin/python benchmarks/parity/trl_side.py runs/parity > runs/parity/trl.log
	$(BIN)/python benchmarks/parity/cookbook_side.py runs/parity
	$(BIN)/python benchmarks/parity/compare.py runs/parity

lint: $(VENV)/installed ## Style
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(VENV)/installed ## Types, strict
	$(BIN)/mypy

check: lint types test ## Everything that must be green before a commit

data: $(VENV)/installed ## Make data/arithmetic anew
	$(BIN)/python scripts/make_arithmetic.py

tiny-model: $(VENV)/installed ## Make data/tiny anew, from nothing
	$(BIN)/python scripts/make_tiny_model.py

bench: $(VENV)/installed ## What a step costs: a table of CPU seconds and ratios
	$(BIN)/python benchmarks/step.py

wheel: $(VENV)/installed ## Build the wheel into dist/
	$(BIN)/python -m build --wheel --no-isolation

clean: ## Remove what was built and installed; runs/ stays
	rm -rf $(VENV) .venv-trl dist build .mypy_cache .ruff_cache .pytest_cache
