SHELL := /bin/bash
VENV ?= .venv
PY := $(VENV)/bin/python
MODEL ?= gemma3
VLLM ?= 0.30.0
GPU_PYTHON ?= python3
GPU_PATH := build/gpu-test

.DEFAULT_GOAL := help
.PHONY: help venv demo check test bench gpu-test test-vllm clean

help: ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: ## make .venv: vLLM for the CPU, this package, the tools (2 minutes, once)
	@scripts/setup_venv.sh $(VENV)

demo: venv ## serve a tiny hybrid model, restore a document (1 minute); MODEL=gemma-3-270m: real weights
	@$(PY) tools/demo.py $(MODEL)

check: venv ## ruff, mypy, architecture and unit tests (under 1 minute)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m pytest tests/architecture tests/unit

test: check ## check, then kernels and real vLLM engines on the CPU
	$(PY) -m pytest tests/kernels tests/e2e

bench: venv ## the benchmarks
	@for script in benchmarks/*.py; do echo "==> $$script"; $(PY) $$script || exit 1; done

# With nothing but torch, triton, numpy and pytest: the package is laid out as a wheel would
# install it, and tests run from there so that the sources beside them are not found first.
gpu-test: ## the kernels on this machine's GPU; needs no .venv, GPU_PYTHON=python3 has torch and triton
	@rm -rf $(GPU_PATH) && mkdir -p $(GPU_PATH)
	@cp -r lmcache_connector $(GPU_PATH) && cp -r triton_kernels $(GPU_PATH)/lmcache_connector
	cd $(GPU_PATH) && $(GPU_PYTHON) -m pytest -c $(CURDIR)/pyproject.toml --rootdir $(CURDIR) \
	  $(CURDIR)/tests/kernels/test_on_gpu.py

test-vllm: ## the engine tests on another vLLM, in an environment of its own: VLLM=0.30.0
	@scripts/setup_venv.sh .venv-vllm-$(VLLM) $(VLLM)
	.venv-vllm-$(VLLM)/bin/python -m pytest tests/e2e

clean: ## remove all that make has made, environments and models too
	rm -rf .venv .venv-vllm-* .cache build dist demo-out *.egg-info .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
