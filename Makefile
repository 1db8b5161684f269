PYTHON ?= python3
BIN := .venv/bin
SLOW ?= slow and not gpu
READY := .venv/ready

.PHONY: help setup demo test test-slow test-all lint bench aot clean

help:
	@echo "make demo      shard a FLUX.2 model over two CPU ranks and compare it with one; draw demo.png (3 minutes)"
	@echo "make test      lint, types and the tests (15 minutes at most)"
	@echo "make test-all  the same and the slow tests"
	@echo "make bench     microbenchmarks of layers and operations, and their cost on the host beside DTensor's"
	@echo "make aot       compile every kernel configuration, without a GPU, into bench/results/aot.csv (5 minutes)"

setup: $(READY)

$(READY): setup.py pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	touch $@

demo: $(READY)
	TRANSFORMERS_VERBOSITY=error $(BIN)/python examples/demo.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest

test-slow: $(READY)
	$(BIN)/python -m pytest -m "$(SLOW)"

test-all: test test-slow

bench: $(READY)
	$(BIN)/python -m pytest bench --benchmark-enable
	$(BIN)/python bench/host.py

aot: $(READY)
	$(BIN)/python bench/aot.py

clean:
	rm -rf .venv build dist *.egg-info
