# Two commands are enough: `make demo` and `make test`. Both make .venv first, and are quick the second time.

PYTHON ?= python3
BIN := .venv/bin
RANKS ?= 2

.PHONY: demo test test-slow checks docs bench

demo: .venv/installed
	$(BIN)/deepspeed --num_gpus $(RANKS) --module framework.train recipe=tiny resume=never

test: .venv/installed-test
	$(BIN)/python -m pytest -m "not slow"

test-slow: .venv/installed-test
	$(BIN)/python -m pytest -m slow

checks: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/python -m pytest tests/test_house.py

docs: .venv/installed
	$(BIN)/python -m tests.docs

bench: .venv/installed-test
	$(BIN)/python -m tests.bench.overhead
	$(BIN)/python -m tests.bench.checkpoint
	$(BIN)/python -m tests.bench.parallel
	$(BIN)/python -m tests.bench.pipeline
	$(BIN)/python -m tests.bench.recompute
	$(BIN)/python -m tests.bench.planner
	$(BIN)/python -m tests.bench.ledger
	$(BIN)/python -m tests.bench.timers
	$(BIN)/python -m tests.bench.scaling
	$(BIN)/python -m tests.bench.data

# torch comes first and alone: resolved together with deepspeed it may be taken from another index.
.venv/installed: constraints.txt setup.cfg
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch setuptools wheel
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation --editable ".[kjv]"
	touch $@

.venv/installed-test: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation --editable ".[kjv,test]"
	touch $@
