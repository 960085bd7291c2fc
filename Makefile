TORCH ?= torch==2.13.0
DEMO ?=
BIN := .venv/bin

.PHONY: demo test test-all lint types bench torture clean

demo: .venv/.stamp
	@echo "demo $(DEMO)"
	@$(BIN)/python -m funzero demo $(DEMO)

test: lint types
	@echo "tests without the slow ones"
	@$(BIN)/python -m pytest -q tests -m "not slow" --session-timeout=1080

test-all: lint types
	@echo "all tests"
	@$(BIN)/python -m pytest -q tests

lint: .venv/.stamp
	@echo "format and lint"
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/ruff check --quiet .

types: .venv/.stamp
	@echo "types"
	@$(BIN)/mypy --no-error-summary funzero/core funzero/transforms

bench: .venv/.stamp
	@echo "benchmarks"
	@$(BIN)/python -m tests.benchmarks

torture: .venv/.stamp
	@echo "saves that are killed, and full disks"
	@$(BIN)/python -m tests.torture

clean:
	@echo "removing .venv, build output and caches"
	@rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first and alone: a later step that finds it installed fetches no other build of it.
.venv/.stamp: pyproject.toml setup.py
	@test -x $(BIN)/pip || { echo "making .venv"; python3 -m venv .venv; }
	@echo "installing $(TORCH)"
	@$(BIN)/pip install -qq "$(TORCH)"
	@echo "installing funzero[dev]"
	@$(BIN)/pip install -qq --editable ".[dev]"
	@touch $@
