# fermion: `make serve` and `make test` do their own set-up and are quick the second time. `make help` lists the rest.
# Everything that is made lies in .venv and build; `make clean` removes both.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

HOST ?= 127.0.0.1
PORT ?= 8000
# A checkpoint directory; empty: the demo model that comes with the package.
MODEL ?=
CHECKPOINT = $(if $(MODEL),'$(MODEL)')
# More arguments for `fermion serve` or pytest: make serve ARGS='--threads 2', make test ARGS='-k cli'.
ARGS ?=
CC ?= cc
# The first of these that is Python 3.11 or newer makes the environment; PYTHON=/path/to/python overrides.
PYTHON ?= $(shell for name in python3 python3.13 python3.12 python3.11 /usr/bin/python3; do \
	"$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$name"; break; }; done)

VENV := .venv
BIN := $(VENV)/bin
# A leftover VIRTUAL_ENV or PYTHONPATH of the caller must not leak into ours.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV

# Environments hold absolute paths: one that has been moved with its checkout does not work any more.
ifneq ($(wildcard $(VENV)/.place),)
ifneq ($(shell cat $(VENV)/.place),$(CURDIR))
$(info setup: this checkout was moved, so $(VENV) is made anew)
$(shell rm -rf $(VENV))
endif
endif

NATIVE_SOURCES := $(wildcard setup.py simd_src/*)
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.PHONY: help
help: ## list what can be made
	@echo 'fermion: an OpenAI-compatible server for the Qwen3.6 family on old and small machines'
	@echo
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo '  HOST=0.0.0.0 PORT=9000 make serve    another address'
	@echo '  make serve MODEL=/path/to/checkpoint ARGS="--threads 8"'

# ---- set-up -----------------------------------------------------------------------------------------------------

.PHONY: setup setup-dev check-machine
setup: $(VENV)/.native ## environment with locked versions and native build: all that serving needs

setup-dev: $(VENV)/.dev setup ## setup, and what tests, lint and types need

check-machine:
	@requirements/check-machine.sh '$(PYTHON)' $(firstword $(CC))

# Each stamp is written last, so an interrupted step is repeated and a finished one is not.
$(VENV)/.base: requirements/base.txt
	@$(MAKE) --no-print-directory check-machine
	@echo "setup: environment $(VENV) ($$("$(PYTHON)" --version)) and packages"
	@[[ -x $(BIN)/python ]] && $(BIN)/python -c '' 2>/dev/null || { rm -rf $(VENV); "$(PYTHON)" -m venv $(VENV); }
	@$(PIP) --require-hashes --only-binary :all: -r requirements/base.txt
	@echo '$(CURDIR)' >$(VENV)/.place
	@touch $@

$(VENV)/.package: $(VENV)/.base pyproject.toml $(wildcard setup.py)
	@echo 'setup: installing fermion into $(VENV)'
	@$(PIP) --no-deps --no-build-isolation --no-index -e .
	@touch $@

# Installing has compiled everything once; after that, only changed sources are.
$(VENV)/.native: $(VENV)/.package $(NATIVE_SOURCES)
	@extension=engine/_simd$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))'); \
	if [[ ! -e $$extension || -n $$(find setup.py simd_src -newer "$$extension" -print -quit) ]]; then \
		echo 'setup: native kernels'; mkdir -p build; \
		$(BIN)/python setup.py --quiet build_ext --inplace >build/native.log 2>&1 \
			|| { cat build/native.log >&2; exit 1; }; fi
	@touch $@

$(VENV)/.dev: $(VENV)/.base requirements/dev.txt
	@echo 'setup: packages for tests, lint and types'
	@$(PIP) --require-hashes --only-binary :all: -r requirements/dev.txt
	@touch $@

# ---- use --------------------------------------------------------------------------------------------------------

.PHONY: serve chat bench bench-cache quality
serve: setup ## serve the demo model (or MODEL=DIR) at http://HOST:PORT/v1, default 127.0.0.1:8000
	@exec $(BIN)/fermion serve $(CHECKPOINT) --host '$(HOST)' --port '$(PORT)' $(ARGS)

chat: setup ## talk to the demo model (or MODEL=DIR) in the terminal
	@exec $(BIN)/fermion chat $(CHECKPOINT) $(ARGS)

bench: setup ## decode and prefill speed of the demo model (or MODEL=DIR)
	@$(BIN)/fermion bench decode $(CHECKPOINT) $(ARGS)
	@$(BIN)/fermion bench prefill $(CHECKPOINT) $(ARGS)

bench-cache: setup ## what the server recomputes of eleven kinds of conversation; ends in one line of JSON
	@$(BIN)/python tests/bench/cache_live.py $(if $(MODEL),--model '$(MODEL)') $(ARGS)

quality: setup-dev ## what 4 bits and pruning cost the demo model: tables, last one JSON line
	@$(BIN)/python -m engine.convert.quality tests/data/demo_bf16 --text tests/convert/data/held_out.jsonl \
		--calibration-text tests/convert/data/calibration.jsonl $(ARGS)

# ---- checks -----------------------------------------------------------------------------------------------------

CLIENTS := build/clients

.PHONY: test test-best test-ssse3 test-clients test-fast test-exhaustive lint typecheck check check-ptx format
test: test-best test-ssse3 test-clients ## the whole suite: best kernels, SSSE3 forced, other people's client libraries

test-best: setup-dev
	@echo 'test: best tier of this machine'
	@$(BIN)/python -m pytest $(ARGS)

test-ssse3: setup-dev ## the whole suite with the SSSE3 tier forced
	@echo 'test: FERMION_SIMD_TIER=ssse3'
	@FERMION_SIMD_TIER=ssse3 $(BIN)/python -m pytest $(ARGS)

# They bring over eighty packages, so they stay out of .venv.
$(CLIENTS)/.installed: $(VENV)/.dev requirements/clients.txt
	@echo 'setup: client libraries for the tests'
	@rm -rf $(CLIENTS)
	@$(PIP) --require-hashes --only-binary :all: --target $(CLIENTS) -r requirements/clients.txt
	@touch $@

test-clients: setup-dev $(CLIENTS)/.installed ## litellm, LangChain, pydantic-ai and Anthropic's client against the server
	@PYTHONPATH=$(CLIENTS) $(BIN)/python -m pytest tests/server/test_client_libraries.py

test-fast: setup-dev ## the suite without slow tests, best tier only
	@$(BIN)/python -m pytest -m 'not slow and not exhaustive' $(ARGS)

test-exhaustive: setup-dev ## the long searches that the suite leaves out
	@$(BIN)/python -m pytest -m exhaustive $(ARGS)

lint: setup-dev ## ruff (rules and format), shellcheck, hadolint
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/shellcheck .ci/run docker/*.sh requirements/*.sh
	@$(BIN)/hadolint docker/*.Dockerfile

typecheck: setup-dev ## mypy, strict, on server, engine and prefix_cache
	@$(BIN)/mypy

check: lint typecheck test check-ptx ## all that CI runs

check-ptx: setup-dev ## the CUDA kernels' PTX: hash, lint, and what the installed compilers and assemblers say of it
	@$(BIN)/python tests/cuda/check_ptx.py $(ARGS)

format: setup-dev ## rewrite sources as `make lint` wants them
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# ---- upkeep -----------------------------------------------------------------------------------------------------

.PHONY: lock docker docker-fermi clean
LOCK = build/lock/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
	--no-emit-index-url --custom-compile-command 'make lock' pyproject.toml requirements/build.in
lock: check-machine ## resolve the newest allowed versions again into requirements/*.txt
	@"$(PYTHON)" -m venv build/lock && build/lock/bin/python -m pip install --quiet uv
	@$(LOCK) --upgrade --output-file requirements/base.txt
	@$(LOCK) --upgrade --constraint requirements/base.txt --extra dev --output-file requirements/dev.txt
	@$(filter-out pyproject.toml requirements/build.in,$(LOCK)) --upgrade --constraint requirements/dev.txt \
		--output-file requirements/clients.txt requirements/clients.in

docker: ## build the CPU image fermion:cpu
	docker build --file docker/cpu.Dockerfile --tag fermion:cpu .

docker-fermi: ## build the image fermion:fermi for machines with a graphics card
	docker build --file docker/fermi.Dockerfile --tag fermion:fermi .

clean: ## remove .venv, build and everything compiled
	@rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache engine/_simd*.so engine/_simd.c
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
