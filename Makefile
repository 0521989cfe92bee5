# Two commands do everything on a fresh machine: `make quickstart` and `make test`. Both make the environment first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RUN ?=

.PHONY: install quickstart test test-fast lint types bench clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $(STAMP)

# Flags can be added: make quickstart RUN="--num-rollout 20 --run-dir runs/short"
quickstart: $(STAMP)
	$(BIN)/python launch.py --mode async $(RUN)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

test-fast: $(STAMP)
	$(BIN)/python -m pytest -q -m "not slow" -n 2

# Fast suite first, then what starts processes and trains.
test: lint types test-fast
	$(BIN)/python -m pytest -q -m slow

bench: $(STAMP)
	$(BIN)/python -m bench.transport --quick
	$(BIN)/python -m bench.modes --quick
	$(BIN)/python -m bench.reward --quick
	$(BIN)/python -m bench.off_policy --quick

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
