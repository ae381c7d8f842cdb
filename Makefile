# The few commands of this repository, the same for a person and for CI. Each makes .venv once and installs into it once.
#
#   make demo     the closed loop on this machine, ending in demo/report.md     make test    the whole test suite
#   make serve    the server alone; ARGS="model=tiny server.http_port=0"        make check   lint, types, layout, stubs
#   make train    the trainer alone; ARGS="state_dir=DIR"                       make proto   regenerate the gRPC stubs
#   make agreement   loss and drafts against speculators and SpecForge          make clean   remove what these commands made
#
# PYTHON=python3.12 picks the interpreter. WORKERS is the number of processes that share the tests: one for each core, at most
# four, if it is not given; with 0 the tests run one after the other, as plain pytest does it. TORCH_INDEX=URL adds a package
# index for torch: on Linux x86-64 give that of the CPU builds, as the default one carries CUDA builds there, which work but are
# large.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
OTHERS := build/others
WORKERS ?= logical# cores, hyperthreads too
ARGS ?=
export OMP_WAIT_POLICY ?= PASSIVE# idle threads sleep: several processes share the cores

.PHONY: help demo serve train test check agreement proto clean
.DEFAULT_GOAL := help

help:
	@sed -n '/^$$/q; s/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

$(INSTALLED): pyproject.toml constraints-cpu.txt
	@echo 'installing into $(VENV), once; this takes some minutes'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-cpu.txt \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) --editable ".[dev]"
	touch $@

demo: $(INSTALLED)
	$(BIN)/python benchmarks/demo.py $(if $(FROM),--from $(FROM)) $(ARGS)

serve: $(INSTALLED)
	$(BIN)/python -m serving $(ARGS)

train: $(INSTALLED)
	$(BIN)/python -m training $(ARGS)

test: $(INSTALLED)
	$(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 4 --dist worksteal $(ARGS)

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy packages
	$(BIN)/buf lint proto
	$(BIN)/python -m pytest -q tests/test_layout.py

agreement: $(INSTALLED) $(OTHERS)/.installed
	PYTHONPATH=$(OTHERS) $(BIN)/python -m pytest -q tests/training/learning/test_agreement.py tests/runtime/eagle3/test_other_engines.py

$(OTHERS)/.installed: others.txt $(INSTALLED)
	rm -rf $(OTHERS)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(OTHERS) --requirement others.txt
	touch $@

proto: $(INSTALLED)
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=packages --pyi_out=packages --grpc_python_out=packages \
		$$(find proto -name '*.proto' | sort)

clean:
	rm -rf $(VENV) build dist demo outputs multirun .pytest_cache .mypy_cache .ruff_cache .hypothesis packages/*.egg-info
	find packages tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
