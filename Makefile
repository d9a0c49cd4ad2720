# Everything here runs in .venv, made on first use and renewed only when pyproject.toml or constraints.txt change;
# `make test-gpu` alone uses the python at hand, since a GPU machine brings a torch of its own.
# A Python that is named (make PYTHON=...) is used or refused; else a newer one stands in for a python3 that is too old.
PYTHON ?= python3
NAMED := $(if $(filter file,$(origin PYTHON)),,$(PYTHON))
VENV ?= .venv
EXTRAS ?= hf,dev,conformance
RUN_EXTRAS ?= hf,serve
ARGS ?=
# Processes that run the tests; each test file stays in one. 0 runs them here, as a debugger wants it.
WORKERS ?= auto

# Absolute, because the example package is tested from its own folder.
BIN := $(abspath $(VENV))/bin
STAMP := $(VENV)/.installed
RUN_STAMP := $(VENV)/.installed-to-run

# The tests of the real torch_npu run in an environment of their own: once installed, torch_npu stops `import torch`
# wherever no NPU runtime is found. It stands on $(VENV), so that torch and the rest are there once.
NPU_VENV ?= .venv-npu
NPU_BIN := $(abspath $(NPU_VENV))/bin
NPU_STAMP := $(NPU_VENV)/.installed

# As constraints.txt pins the newest Triton only, the kernels are tested with the oldest of the extra `cuda` in an
# environment that stands on $(VENV) too.
RAY_VENV ?= .venv-ray
RAY_BIN := $(abspath $(RAY_VENV))/bin
RAY_STAMP := $(RAY_VENV)/.installed
TRITON_VENV ?= .venv-triton36
TRITON_BIN := $(abspath $(TRITON_VENV))/bin
TRITON_STAMP := $(TRITON_VENV)/.installed

# intel-extension-for-pytorch needs torch 2.8, so nothing of $(VENV) can be there: gigabytes, since that torch comes with CUDA.
# transformers 4.51 is the newest that its part for language models was validated with.
IPEX_VENV ?= .venv-ipex
IPEX_BIN := $(abspath $(IPEX_VENV))/bin
IPEX_STAMP := $(IPEX_VENV)/.installed

# The site's generator and what it brings, which nothing else needs; it stands on $(VENV).
DOCS_VENV ?= .venv-docs
DOCS_BIN := $(abspath $(DOCS_VENV))/bin
DOCS_STAMP := $(DOCS_VENV)/.installed

# What checks the metadata of a release, which nothing else needs; it stands on $(VENV).
DIST_VENV ?= .venv-dist
DIST_BIN := $(abspath $(DIST_VENV))/bin
DIST_STAMP := $(DIST_VENV)/.installed

# Whatever the shell says: tests start hundreds of processes, each of which would compile the modules of core anew.
export PYTHONDONTWRITEBYTECODE =

.PHONY: help run serve-demo test test-slow test-exhaustive test-interpreter test-all check check-install docs dist reports test-gpu test-npu-sim test-ray test-triton36 test-ipex test-openreg clean
.DEFAULT_GOAL := help

help:
	@echo "make run       core run --device auto      (ARGS='--device cpu --json' replaces the arguments)"
	@echo "make serve-demo  core serve on the embedded model, on 127.0.0.1:8000  (ARGS replaces the arguments)"
	@echo "make test      the tests that every change owes  (ARGS='-k word' adds arguments of pytest, WORKERS=0: one process)"
	@echo "make test-slow  the tests marked slow: whole models, processes, compilers"
	@echo "make test-exhaustive  the tests marked exhaustive: hundreds of drawn cases, and what takes minutes each"
	@echo "make test-interpreter  the tests of the CUDA kernels in Triton's interpreter"
	@echo "make test-all  these four, the oldest Triton, and the simulated NPU"
	@echo "make check     ruff check, ruff format --check, mypy"
	@echo "make check-install  install every extra from public wheels, on each tested Python that is here (tens of minutes;"
	@echo "               ARGS='--python 3.12 --resolve-only' narrows it; CI calls it when the requirements changed)"
	@echo "make docs      the site of the documentation, in build/site; a warning or a broken link is an error"
	@echo "make dist      the wheel and the source distribution, in dist, checked (docs/releasing.md; ARGS='--tag v0.1.0')"
	@echo "make reports   the reports below docs/ that this machine can write: conformance, planted faults, coverage,"
	@echo "               architectures (hours; ARGS=cpu writes one; ARGS=--pages renders conformance's pages, running nothing)"
	@echo "make test-gpu  the tests marked gpu, in the python at hand (PYTHON=$(PYTHON)), no venv"
	@echo "make test-npu-sim  the tests marked npu_sim: the real torch_npu on a simulated runtime (needs gcc and binutils;"
	@echo "               ARGS=plugins/npu/tests/FILE runs that file alone)"
	@echo "make test-triton36  the tests of the CUDA kernels with Triton 3.6, in Triton's interpreter"
	@echo "make test-ray  the tests marked ray: replicas by Ray Serve, on a cluster of two nodes of this machine"
	@echo "make test-ipex  the tests marked ipex: intel-extension-for-pytorch and torch 2.8 (7 GB the first time)"
	@echo "make test-openreg  the tests marked openreg, in the python at hand (PYTHON=$(PYTHON)), which has torch_openreg of PyTorch's sources"
	@echo "make clean     remove $(VENV), $(NPU_VENV), $(RAY_VENV), $(TRITON_VENV), $(DOCS_VENV), $(DIST_VENV), caches and build results"

# Make $(VENV) if there is none, and install core with the extras $(1) into it. pip would compile every file of torch and of
# transformers to bytecode, which takes longer than all else: Python compiles the tenth of them that is imported.
define install
@if [ ! -x "$(BIN)/python" ]; then python="$$(sh tools/choose_python.sh "$(NAMED)")" || exit 1; \
	echo "== making $(VENV) with $$("$$python" --version)"; \
	"$$python" -m venv "$(VENV)" || { rm -rf "$(VENV)"; exit 1; }; fi
@echo "== installing core[$(1)] into $(VENV), pinned by constraints.txt (minutes the first time)"
@"$(BIN)/python" -m pip install --quiet --disable-pip-version-check --no-compile \
	--constraint constraints.txt --editable '.[$(1)]' \
	|| { echo "error: pip could not install core[$(1)], for the reason above; this step needs a network, and no other"; exit 1; }
endef

$(STAMP): pyproject.toml constraints.txt
	$(call install,$(EXTRAS))
	@touch "$@" "$(RUN_STAMP)"

# What `core run` and `core serve` need, in half the time of all that the tests need.
$(RUN_STAMP): pyproject.toml constraints.txt
	$(call install,$(RUN_EXTRAS))
	@touch "$@"

run: $(RUN_STAMP)
	@echo "== core run $(or $(ARGS),--device auto)"
	@"$(BIN)/core" run $(or $(ARGS),--device auto)

serve-demo: $(RUN_STAMP)
	@echo "== core serve $(or $(ARGS),--device auto --mode off): the embedded model; docs/serving.md has the curl line"
	@"$(BIN)/core" serve $(or $(ARGS),--device auto --mode off)

# No new worker for one that crashed: with `--dist loadfile` pytest-xdist then waits for ever, and names no test.
# Threads of a test that asks for several sleep while they wait for each other: they would spin on the other workers' cores.
PYTEST = OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE "$(BIN)/python" -m pytest --numprocesses $(WORKERS) --maxprocesses 8 --max-worker-restart 0 \
	--durations 20

test: $(STAMP)
	@echo "== pytest: core, its plugins; not the tests marked slow or interpreter"
	@$(PYTEST) --dist loadfile -m "not slow and not interpreter and not exhaustive" $(ARGS)
	@echo "== pytest: the example vendor, by its own configuration"
	@cd examples/acme_device && $(PYTEST) --dist loadfile -m "not slow"

test-slow: $(STAMP)
	@echo "== pytest: the tests marked slow"
	@$(PYTEST) --dist worksteal -m "slow and not interpreter and not exhaustive" $(ARGS)

test-exhaustive: $(STAMP)
	@echo "== pytest: the tests marked exhaustive"
	@$(PYTEST) --dist worksteal -m exhaustive $(ARGS)

test-interpreter: $(STAMP)
	@echo "== pytest: the CUDA kernels in Triton's interpreter"
	@$(PYTEST) --dist worksteal -m interpreter plugins/cuda $(ARGS)
	@$(if $(ARGS),,"$(BIN)/python" tools/interpreted.py --note)

test-all: test test-slow test-exhaustive test-interpreter test-triton36 test-npu-sim

check: $(STAMP)
	@echo "== ruff check"
	@"$(BIN)/ruff" check .
	@echo "== ruff format --check"
	@"$(BIN)/ruff" format --check .
	@echo "== mypy: core, its plugins"
	@"$(BIN)/mypy"
	@echo "== mypy: the example vendor"
	@cd examples/acme_device && "$(BIN)/mypy"

check-install:
	@python="$$(sh tools/choose_python.sh "$(NAMED)")" && "$$python" tools/check_install.py $(ARGS)

reports: $(STAMP)
	@"$(BIN)/python" tools/reports.py --npu-python "$(NPU_BIN)/python" $(ARGS)

test-gpu:
	@echo "== pytest -m gpu, with $$("$(PYTHON)" -c 'import sys; print(sys.executable)')"
	@"$(PYTHON)" -m pytest -m gpu $(ARGS)

# Make the virtual environment $(1) see what is installed in $(VENV), behind what is installed in itself.
define stand_on_venv
	@"$(BIN)/python" -m venv "$(1)"
	@"$(1)/bin/python" -c "import sysconfig as s; from pathlib import Path; \
		base = next(Path('$(abspath $(VENV))').glob('lib/python*/site-packages')); \
		Path(s.get_paths()['purelib'], 'base.pth').write_text(f'import site; site.addsitedir({str(base)!r})\n')"
endef

$(NPU_STAMP): $(STAMP) constraints-npu.txt
	@echo "== installing torch_npu into $(NPU_VENV), which stands on $(VENV)"
	$(call stand_on_venv,$(NPU_VENV))
	@"$(NPU_BIN)/python" -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --constraint constraints-npu.txt torch_npu
	@touch "$@"

$(TRITON_STAMP): $(STAMP)
	@echo "== installing triton 3.6.0 into $(TRITON_VENV), which stands on $(VENV)"
	$(call stand_on_venv,$(TRITON_VENV))
	@"$(TRITON_BIN)/python" -m pip install --quiet --disable-pip-version-check --no-deps --ignore-installed triton==3.6.0
	@touch "$@"

$(RAY_STAMP): $(STAMP) pyproject.toml
	@echo "== installing the extra ray into $(RAY_VENV), which stands on $(VENV)"
	$(call stand_on_venv,$(RAY_VENV))
	@"$(RAY_BIN)/python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[ray]'
	@touch "$@"

test-ray: $(RAY_STAMP)
	@echo "== pytest -m ray, with ray $$("$(RAY_BIN)/python" -c 'import ray; print(ray.__version__)')"
	@OMP_NUM_THREADS=1 "$(RAY_BIN)/python" -m pytest -m ray tests/engine/replicas $(ARGS)

test-triton36: $(TRITON_STAMP)
	@echo "== pytest: core_cuda, with triton $$("$(TRITON_BIN)/python" -c 'import triton; print(triton.__version__)')"
	@OMP_NUM_THREADS=1 "$(TRITON_BIN)/python" -m pytest --numprocesses $(WORKERS) --maxprocesses 8 --max-worker-restart 0 --dist loadfile \
		plugins/cuda $(ARGS)

# All of the plugin's tests, unless ARGS holds a path below plugins/, which is to be all that is collected.
NPU_TESTS = $(if $(filter plugins/% ./plugins/% $(CURDIR)/plugins/%,$(ARGS)),,plugins/npu/tests)

test-npu-sim: $(NPU_STAMP)
	@echo "== pytest -m npu_sim: torch_npu on the simulated runtime"
	@OMP_NUM_THREADS=1 "$(NPU_BIN)/python" plugins/npu/simulator/launch.py -- "$(NPU_BIN)/python" -m pytest -m npu_sim \
		--numprocesses $(WORKERS) --maxprocesses 8 --max-worker-restart 0 --dist loadfile $(NPU_TESTS) $(ARGS)

$(DOCS_STAMP): $(STAMP) requirements-docs.txt
	@echo "== installing mkdocs and its theme into $(DOCS_VENV), which stands on $(VENV)"
	$(call stand_on_venv,$(DOCS_VENV))
	@"$(DOCS_BIN)/python" -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --requirement requirements-docs.txt
	@touch "$@"

# Its theme warns of a later mkdocs, which the pins keep out.
docs: $(DOCS_STAMP)
	@echo "== mkdocs build --strict, into build/site"
	@NO_MKDOCS_2_WARNING=1 "$(DOCS_BIN)/python" -m mkdocs build --strict

$(DIST_STAMP): $(STAMP) requirements-dist.txt
	@echo "== installing build and twine into $(DIST_VENV), which stands on $(VENV)"
	$(call stand_on_venv,$(DIST_VENV))
	@"$(DIST_BIN)/python" -m pip install --quiet --disable-pip-version-check --requirement requirements-dist.txt
	@touch "$@"

# The wheel is built from the source distribution, as an installer without wheels builds it.
dist: $(DIST_STAMP)
	@echo "== build, twine check --strict, tools/releases/check_dist.py"
	@rm -rf dist && "$(DIST_BIN)/python" -m build --no-isolation --outdir dist .
	@"$(DIST_BIN)/python" -m twine check --strict dist/*
	@"$(DIST_BIN)/python" tools/releases/check_dist.py dist $(ARGS)

$(IPEX_STAMP): pyproject.toml
	@echo "== installing core[ipex,conformance] and transformers 4.51 into $(IPEX_VENV), with a torch of its own: 7 GB"
	@python="$$(sh tools/choose_python.sh "$(NAMED)")" && "$$python" -m venv "$(IPEX_VENV)"
	@"$(IPEX_BIN)/python" -m pip install --quiet --disable-pip-version-check --editable '.[ipex,conformance]' 'transformers==4.51.*'
	@touch "$@"

# What core.compile does with this torch is tested too; it needs a trace of its own for one row, which one test counts.
test-ipex: $(IPEX_STAMP)
	@echo "== pytest -m ipex: intel-extension-for-pytorch, with torch $$("$(IPEX_BIN)/python" -c 'import torch; print(torch.__version__)')"
	@OMP_NUM_THREADS=1 "$(IPEX_BIN)/python" -m pytest -m "ipex or not (slow or exhaustive)" \
		plugins/cpu/tests/test_ipex.py tests/compilation/test_program.py \
		--deselect tests/compilation/test_program.py::test_the_report_counts_traces_and_captures $(ARGS)

# torch_openreg is no package of an index: whoever has built it from PyTorch's sources names a python that has it.
test-openreg:
	@if "$(PYTHON)" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch_openreg") is None)'; then \
		echo "== pytest -m openreg: PyTorch's example accelerator, with $$("$(PYTHON)" -c 'import sys; print(sys.executable)')"; \
		"$(PYTHON)" -m pytest -m openreg tests/accelerator $(ARGS); \
	else echo "skipped: the tests on torch_openreg (make test-openreg PYTHON=...); $(PYTHON) has no torch_openreg"; fi

clean:
	@echo "== removing $(VENV), $(NPU_VENV), $(RAY_VENV), $(TRITON_VENV), $(IPEX_VENV), $(DOCS_VENV), $(DIST_VENV), caches and build results"
	@rm -rf "$(VENV)" "$(NPU_VENV)" "$(RAY_VENV)" "$(TRITON_VENV)" "$(IPEX_VENV)" "$(DOCS_VENV)" "$(DIST_VENV)" build dist .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
	@rm -rf examples/*/dist examples/*/.mypy_cache examples/*/.pytest_cache
