# Everything here runs in .venv, made on first use and renewed only when pyproject.toml or constraints.txt change;
# `make test-gpu` alone uses the python at hand, since a GPU machine brings a torch of its own.
PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= hf,dev,conformance
ARGS ?=
# Processes that run the tests; each test file stays in one. 0 runs them here, as a debugger wants it.
WORKERS ?= auto

# Absolute, because the example package is tested from its own folder.
BIN := $(abspath $(VENV))/bin
STAMP := $(VENV)/.installed

# The tests of the real torch_npu run in an environment of their own: once installed, torch_npu stops `import torch`
# wherever no NPU runtime is found. It stands on $(VENV), so that torch and the rest are there once.
NPU_VENV ?= .venv-npu
NPU_BIN := $(abspath $(NPU_VENV))/bin
NPU_STAMP := $(NPU_VENV)/.installed

.PHONY: help run test check test-gpu test-npu-sim clean
.DEFAULT_GOAL := help

help:
	@echo "make run       core run --device auto      (ARGS='--device cpu --json' replaces the arguments)"
	@echo "make test      all tests but the GPU ones  (ARGS='-k word' adds arguments of pytest, WORKERS=0 for one process)"
	@echo "make check     ruff check, ruff format --check, mypy"
	@echo "make test-gpu  the tests marked gpu, in the python at hand (PYTHON=$(PYTHON)), no venv"
	@echo "make test-npu-sim  the tests marked npu_sim: the real torch_npu on a simulated runtime (needs gcc and binutils;"
	@echo "               ARGS=plugins/npu/tests/FILE runs that file alone)"
	@echo "make clean     remove $(VENV), $(NPU_VENV), caches and build results"

$(STAMP): pyproject.toml constraints.txt
	@if [ ! -x "$(BIN)/python" ]; then echo "== making $(VENV) with $$($(PYTHON) --version)"; $(PYTHON) -m venv "$(VENV)"; fi
	@echo "== installing core[$(EXTRAS)] into $(VENV), pinned by constraints.txt (minutes the first time)"
	@"$(BIN)/python" -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch "$@"

run: $(STAMP)
	@echo "== core run $(or $(ARGS),--device auto)"
	@"$(BIN)/core" run $(or $(ARGS),--device auto)

test: $(STAMP)
	@echo "== pytest: core, its plugins"
	@OMP_NUM_THREADS=1 "$(BIN)/python" -m pytest --numprocesses $(WORKERS) --maxprocesses 8 --dist loadfile $(ARGS)
	@echo "== pytest: the example vendor, by its own configuration"
	@cd examples/acme_device && "$(BIN)/python" -m pytest

check: $(STAMP)
	@echo "== ruff check"
	@"$(BIN)/ruff" check .
	@echo "== ruff format --check"
	@"$(BIN)/ruff" format --check .
	@echo "== mypy: core, its plugins"
	@"$(BIN)/mypy"
	@echo "== mypy: the example vendor"
	@cd examples/acme_device && "$(BIN)/mypy"

test-gpu:
	@echo "== pytest -m gpu, with $$($(PYTHON) -c 'import sys; print(sys.executable)')"
	@$(PYTHON) -m pytest -m gpu $(ARGS)

$(NPU_STAMP): $(STAMP) constraints-npu.txt
	@echo "== installing torch_npu into $(NPU_VENV), which stands on $(VENV)"
	@"$(BIN)/python" -m venv "$(NPU_VENV)"
	@"$(NPU_BIN)/python" -c "import sysconfig as s; from pathlib import Path; \
		base = next(Path('$(abspath $(VENV))').glob('lib/python*/site-packages')); \
		Path(s.get_paths()['purelib'], 'base.pth').write_text(f'import site; site.addsitedir({str(base)!r})\n')"
	@"$(NPU_BIN)/python" -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --constraint constraints-npu.txt torch_npu
	@touch "$@"

# All of the plugin's tests, unless ARGS holds a path below plugins/, which is to be all that is collected.
NPU_TESTS = $(if $(filter plugins/% ./plugins/% $(CURDIR)/plugins/%,$(ARGS)),,plugins/npu/tests)

test-npu-sim: $(NPU_STAMP)
	@echo "== pytest -m npu_sim: torch_npu on the simulated runtime"
	@OMP_NUM_THREADS=1 "$(NPU_BIN)/python" plugins/npu/simulator/launch.py -- "$(NPU_BIN)/python" -m pytest -m npu_sim \
		--numprocesses $(WORKERS) --maxprocesses 8 --dist loadfile $(NPU_TESTS) $(ARGS)

clean:
	@echo "== removing $(VENV), $(NPU_VENV), caches and build results"
	@rm -rf "$(VENV)" "$(NPU_VENV)" build dist .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
	@rm -rf examples/*/dist examples/*/.mypy_cache examples/*/.pytest_cache
