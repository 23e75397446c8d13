PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1

.PHONY: demo test proofs bench format clean

demo: .venv/installed
	OMP_NUM_THREADS=2 $(BIN)/python -m purestep.examples.docstrings

test: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -q -n 2 --dist worksteal

proofs: .venv/installed
	HYPOTHESIS_PROFILE=explore $(BIN)/pytest -q -n 2 --dist worksteal proofs

bench: .venv/installed
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[bench]'
	OMP_NUM_THREADS=2 $(BIN)/python benchmarks/batching.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/ranks.py
	OMP_NUM_THREADS=2 $(BIN)/python -m benchmarks.peers
	OMP_NUM_THREADS=2 $(BIN)/python -m benchmarks.step
	OMP_NUM_THREADS=2 $(BIN)/python -m benchmarks.memory
	OMP_NUM_THREADS=2 $(BIN)/python -m benchmarks.normalize
	OMP_NUM_THREADS=2 $(BIN)/python -m benchmarks.compile

format: .venv/installed
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[testing,examples,dev]'
	touch $@

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
