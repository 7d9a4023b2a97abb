# Everything a person or a machine runs here goes through these targets; `make` lists them.
# It holds no logic: .ci/setup.py sets up, .ci/tests.py runs the tiers, pyproject.toml configures the tools.

PYTHON ?= python3
BIN := .venv/bin
MODEL := .cache/models/SmolLM2-135M-Instruct.Q4_1.gguf
PYTEST := $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help setup demo up test test-fast test-gpu check lint docs bench bench-peers bench-gateway fuzz fuzz-api transcript
MAKEFLAGS += --no-print-directory

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|' 2>/dev/null \
		|| sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1  \2/p' $(MAKEFILE_LIST)

setup: ## make .venv and fetch the demo model (nothing to do the second time)
	@$(PYTHON) .ci/setup.py

demo: setup ## start a yard in a temporary folder, serve a model, tell the story of one cold request
	@$(BIN)/python -m controlplane.ctl.demo -- $(BIN)/python -m tests.hub --file $(MODEL) --rate 40MiB

up: setup ## start a yard for real use; Ctrl-C stops it
	@$(BIN)/yardctl up

test: setup ## every test, every tier
	@$(BIN)/python .ci/tests.py

test-fast: setup ## the tests that start no yard
	@$(BIN)/python .ci/tests.py fast

test-gpu: setup ## the tests of a real NVIDIA card; fails on a machine without one
	@YARD_TEST_GPU=1 $(PYTEST) tests/gpu

check: setup ## imports, style, types, generated docs
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/basedpyright
	@$(BIN)/python docs/generate.py --check

lint: setup ## repair what tools can: style, format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: setup ## write the generated documents anew
	@$(BIN)/python docs/generate.py

bench: setup ## print the rows of the performance targets
	@$(BIN)/python bench/log.py
	@$(BIN)/python bench/activation.py
	@$(BIN)/python bench/waiters.py
	@$(BIN)/python bench/proxy.py
	@$(BIN)/python bench/mirror.py
	@$(BIN)/python bench/adapters.py

FUZZ := .cache/fuzz
FUZZ_S ?= 60

$(FUZZ)/ready: constraints.txt
	@$(PYTHON) -m venv $(FUZZ)
	@$(FUZZ)/bin/pip install -q -c constraints.txt atheris
	@touch $@

fuzz: setup $(FUZZ)/ready ## fuzz what reads HTTP, guided by coverage, for FUZZ_S seconds
	@PYTHONPATH=.:$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])') \
		$(FUZZ)/bin/python -m tests.fuzz.heads tests/fuzz/corpus -max_total_time=$(FUZZ_S)

fuzz-api: setup ## ask both doors everything their descriptions allow, and more
	@$(BIN)/python -m tests.fuzz.api controlplane
	@$(BIN)/python -m tests.fuzz.api gateway

transcript: setup ## ask a gateway as curl, openai, anthropic and Chromium do; writes docs/transcript.md
	@$(BIN)/python -m tests.clients

bench-peers: setup ## install what the gateway is compared with, each in an environment of its own
	@$(BIN)/python bench/peers/peers.py

bench-gateway: bench-peers ## compare the gateway with nginx and the peers; writes docs/performance.md
	@$(BIN)/python bench/gateway.py
