# Two commands do everything themselves: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: setup demo test lint bench clean

setup: $(READY)

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

test: lint  ## ruff, mypy, then every test that this machine can run
	$(BIN)/pytest

clean:
	rm -rf .venv runs dist
