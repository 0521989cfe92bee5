# Two commands do everything on a fresh machine: `make quickstart` and `make test`. Both make the environment first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RUN ?=

# Images often switch this on. Without bytecode each of the hundreds of processes that the tests start compiles all it
# imports again, torch and SGLang too.
unexport PYTHONDONTWRITEBYTECODE

# SGLang and its router live in an environment of their own, and only runs with --engine sglang or a router need it.
SGLANG_VENV := .venv-sglang
SGLANG_PYTHON := $(SGLANG_VENV)/bin/python
SGLANG_PIP := $(SGLANG_PYTHON) -m pip install --quiet --disable-pip-version-check --no-compile --prefer-binary
SGLANG_ENV ?= $(if $(shell command -v nvidia-smi 2>/dev/null),gpu,cpu)
LAUNCH := models/engines/launch

# openai-agents, with its own versions of what others need too. Tests that want it are skipped where it does not install.
AGENTS_VENV := .venv-agents
AGENTS_LIST := stages/agents/packs/requirements-openai-agents.txt

.PHONY: docs gpu-env gpu-smoke gpu-wheels install quickstart sglang-env agents-env test test-fast test-full full lint types bench chaos clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $(STAMP)

# Flags can be added: make quickstart RUN="--num-rollout 20 --run-dir runs/short"
quickstart: $(STAMP)
	$(BIN)/python launch.py --mode async $(RUN)

sglang-env: $(SGLANG_VENV)/.installed-$(SGLANG_ENV)

# The CPU list is complete, so that pip has nothing to resolve and three of them can share the work.
$(SGLANG_VENV)/.installed-cpu: $(LAUNCH)/requirements-cpu.txt $(wildcard $(LAUNCH)/shims/*.py)
	@test -x $(SGLANG_PYTHON) || $(PYTHON) -m venv $(SGLANG_VENV)
	@echo '*' >$(SGLANG_VENV)/.gitignore
	@echo "installing SGLang for the CPU into $(SGLANG_VENV): 2.3 GB, one to four minutes"
	@grep -v '^#' $< | sort -r | xargs -P 3 -n 34 $(SGLANG_PIP) --no-deps
	@$(SGLANG_PYTHON) $(LAUNCH)/inside.py install-shim $(SGLANG_PYTHON)
	@$(SGLANG_PYTHON) -m models.engines.launch.environment $(SGLANG_PYTHON)
	@rm -f $(SGLANG_VENV)/.installed-* && touch $@

$(SGLANG_VENV)/.installed-gpu: $(LAUNCH)/requirements-gpu.txt
	@test -x $(SGLANG_PYTHON) || $(PYTHON) -m venv $(SGLANG_VENV)
	@echo '*' >$(SGLANG_VENV)/.gitignore
	@echo "installing SGLang for the GPU into $(SGLANG_VENV): 10 GB, some minutes"
	@$(SGLANG_PIP) -r $<
	@$(SGLANG_PYTHON) $(LAUNCH)/inside.py install-shim $(SGLANG_PYTHON)
	@$(SGLANG_PYTHON) -m models.engines.launch.environment $(SGLANG_PYTHON)
	@rm -f $(SGLANG_VENV)/.installed-* && touch $@

agents-env: $(AGENTS_VENV)/.installed

$(AGENTS_VENV)/.installed: $(AGENTS_LIST)
	@test -x $(AGENTS_VENV)/bin/python || $(PYTHON) -m venv $(AGENTS_VENV)
	@echo '*' >$(AGENTS_VENV)/.gitignore
	@$(AGENTS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --prefer-binary --no-deps -r $< \
		&& touch $@ || echo "openai-agents cannot be installed here; what needs it will say so"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# More workers than cores, for many tests wait. On two cores it takes one and a half to five minutes, by the machine.
test-fast: $(STAMP)
	$(BIN)/python -m pytest -q -m "not slow and not full" -n 4 --dist worksteal

# Tests of one xdist_group share what they set up.
PYTEST_SLOW := $(BIN)/python -m pytest -q -n 6 --dist loadgroup --durations=20

# Fast suite first, with mypy beside it, then what starts processes and trains. On two cores, with the environments
# installed, both take 7 to 15 minutes, by the machine.
test: $(STAMP) sglang-env agents-env
	@$(MAKE) --no-print-directory -j 3 lint types test-fast
	$(PYTEST_SLOW) -m "slow and not full"

# Then the same on more cases, and the benchmarks' short forms.
test-full: test full

full: $(STAMP) sglang-env agents-env
	$(PYTEST_SLOW) -m full

# Kills at random moments, and what an oracle says of them: make chaos KILLS=100 SEED=7
KILLS ?= 30
chaos: $(STAMP)
	$(BIN)/python -m tests.chaos --kills $(KILLS) $(if $(SEED),--seed $(SEED)) $(if $(CALLS),--calls) $(if $(SYNC),--sync) \
		$(if $(AUTO),--auto) $(if $(STOPS),--stops) $(if $(AGENTS),--agents)

bench: $(STAMP)
	$(BIN)/python -m bench.transport --quick
	$(BIN)/python -m bench.modes --quick
	$(BIN)/python -m bench.control_plane --quick
	$(BIN)/python -m bench.observe --quick
	$(BIN)/python -m bench.off_policy --quick
	$(BIN)/python -m bench.weights --quick
	$(BIN)/python -m bench.train --quick
	$(BIN)/python -m bench.engine --quick
	$(BIN)/python -m bench.plan --quick
	$(BIN)/python -m bench.scale --quick
	$(BIN)/python -m bench.peers --quick

# The documentation as a site in site/; a broken link is an error. `.venv/bin/mkdocs serve` shows it while you write.
docs: $(STAMP)
	$(BIN)/mkdocs build --strict

# Kernels for the trainer, built for the installed torch: minutes to an hour. Runs work without them, more slowly.
gpu-env: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -e ".[gpu]"

# On a machine with a GPU: everything that it can show in nine minutes, written to bench_results/gpu_smoke.txt. It takes the
# torch and transformers that are there. `make gpu-wheels`, where packages can be downloaded, puts the small packages
# that such a machine may lack into wheels/, for Python 3.12.
GPU_PYTHON ?= python3
GPU_PACKAGES := pyzmq msgspec uvloop xxhash six megatron-core math-verify latex2sympy2_extended antlr4-python3-runtime \
	tensorboard tensorboard-data-server
GPU_PLATFORMS := manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014
gpu-wheels:
	@mkdir -p wheels && echo '*' >wheels/.gitignore
	@for name in $(GPU_PACKAGES); do $(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 \
		--implementation cp $(GPU_PLATFORMS:%=--platform %_x86_64) -c constraints.txt -d wheels $$name || echo "$$name: no wheel"; done

gpu-smoke:
	@test ! -d wheels || $(GPU_PYTHON) -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target wheels/site wheels/*.whl
	PYTHONPATH=wheels/site:. $(GPU_PYTHON) -m bench.gpu_smoke

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
