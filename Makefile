SHELL := /bin/bash
VENV ?= .venv
PY := $(VENV)/bin/python
MODEL ?= gemma3
VLLM ?= 0.30.0
GPU_PYTHON ?= python3

.DEFAULT_GOAL := help
.PHONY: help venv demo check test chaos fuzz soak test-matrix bench gpu-test test-vllm test-omni clean

help: ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: ## make .venv: vLLM for the CPU, this package, the tools (2 minutes, once)
	@scripts/setup_venv.sh $(VENV)

demo: venv ## serve a tiny hybrid model, restore a document (1 minute); MODEL=gemma-3-270m: real weights
	@$(PY) tools/demo.py $(MODEL)

check: venv ## ruff, mypy, architecture and unit tests (under 1 minute)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	@# Types and some of the tests beside the others: one core each.
	@told=$$(mktemp); ($(PY) -m mypy && $(PY) -m pytest tests/architecture tests/unit/test_[a-g]*) \
	  > $$told 2>&1 & beside=$$!; $(PY) -m pytest tests/unit/test_[!a-g]*; tests=$$?; \
	  wait $$beside; beside=$$?; cat $$told; rm $$told; exit $$((tests | beside))

test: check ## check, then kernels and real vLLM engines on the CPU
	$(PY) -m pytest tests/kernels tests/tiers tests/e2e

chaos: venv ## kills and stops around 200 requests (4 minutes); LMCACHE_CHAOS_SEED=2: another course
	LMCACHE_CHAOS_REQUESTS=$${LMCACHE_CHAOS_REQUESTS:-200} $(PY) -m pytest -s tests/e2e/test_chaos.py

fuzz: venv ## 200,000 random and mutated frames against a live server (1 minute)
	LMCACHE_FUZZ_FRAMES=200000 $(PY) -m pytest tests/unit/test_cache_server.py -k frames

soak: venv ## writers and readers of hidden states on a small pool (1 minute); LMCACHE_STRESS_SECONDS
	LMCACHE_STRESS_SECONDS=$${LMCACHE_STRESS_SECONDS:-60} $(PY) -m pytest -s tests/unit/test_hidden_store.py -k small_pool

test-matrix: venv ## all model families by all tiers on real servers; writes docs/matrix.md (6 minutes)
	LMCACHE_TEST_MATRIX=1 LMCACHE_MATRIX_TABLE=docs/matrix.md $(PY) -m pytest tests/e2e/test_tiers.py

bench: venv ## the benchmarks; LMCache, in an environment of its own, is one to measure against
	@scripts/setup_lmcache_venv.sh
	@for script in benchmarks/*.py; do echo "==> $$script"; $(PY) $$script || exit 1; done

gpu-test: ## the kernels on this machine's GPU; no .venv: GPU_PYTHON=python3 has torch, triton, pytest
	$(GPU_PYTHON) -m pytest -W default -s tests/kernels/test_on_gpu.py

test-vllm: ## the oracle on another vLLM, in an environment of its own: VLLM=0.30.0
	@scripts/setup_venv.sh .venv-vllm-$(VLLM) $(VLLM)
	.venv-vllm-$(VLLM)/bin/python -m pytest tests/e2e/test_view.py tests/e2e/test_families.py \
	  -k 'view or gemma3 or gptoss or qwen3next or deepseek'

test-omni: ## vLLM-Omni's runner with this connector's rows, in an environment of its own (2 minutes)
	@scripts/setup_omni_venv.sh
	.venv-omni/bin/python -m pytest tests/omni

clean: ## remove all that make has made, environments and models too
	rm -rf .venv .venv-lmcache .venv-omni .venv-vllm-* .cache build dist demo-out *.egg-info .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
