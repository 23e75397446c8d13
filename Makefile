# The first Python that can make an environment and has headers for torch's compiler. A distribution's comes first: it is
# built with profile-guided optimization, and runs the tests in nine tenths of the time of one that pyenv builds.
HAS_ALL := import ensurepip, os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")
PYTHON ?= $(shell for python in /usr/bin/python3.11 python3.11 python3; \
  do $$python -c '$(HAS_ALL)' 2> /dev/null && echo $$python && break; done)
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1
# Programs in processes import what others have compiled.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test checks tests proofs mutants docs versions oldest pinned newest bench conformance format clean

demo: .venv/installed
	OMP_NUM_THREADS=2 $(BIN)/python -m purestep.examples.docstrings

test: .venv/installed
	$(MAKE) --no-print-directory -j 2 checks tests

# Side by side: mypy takes one core for ten seconds.
checks: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

tests: .venv/installed
	$(BIN)/pytest -q -n 2 --dist worksteal

proofs: .venv/installed
	HYPOTHESIS_PROFILE=explore $(BIN)/pytest -q -n 2 --dist worksteal -o timeout=3600 proofs

docs: .venv-docs/installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build -f docs/mkdocs.yml

mutants: .venv/installed
	$(BIN)/python -m benchmarks.mutation --record build/lines.json
	$(BIN)/python -m benchmarks.mutation --recorded build/lines.json --sample 300 --table build/mutants.md

versions:
	$(PYTHON) -m tests.versions

oldest pinned newest:
	$(PYTHON) -m tests.versions $@

bench: .venv/installed
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[bench]'
	OMP_NUM_THREADS=2 $(BIN)/python -m benchmarks.speed.batching
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.speed.ranks
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.speed.sharded
	OMP_NUM_THREADS=2 $(BIN)/python -m benchmarks.speed.peers
	OMP_NUM_THREADS=2 $(BIN)/python -m benchmarks.speed.step
	OMP_NUM_THREADS=2 $(BIN)/python -m benchmarks.speed.memory
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.speed.remat
	OMP_NUM_THREADS=2 $(BIN)/python -m benchmarks.speed.normalize
	OMP_NUM_THREADS=2 $(BIN)/python -m benchmarks.speed.compile
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.speed.overhead
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.speed.scale
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.speed.modules
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.speed.families
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.speed.losses
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.speed.dropout
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.speed.stacked
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.speed.limit
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.speed.warm
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.speed.coverage
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.random_losses

conformance: .venv/installed
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[conformance]'
	for each in fastai composer llamafactory axolotl olmo tunix torchtitan; do $(BIN)/python -m pip install -q --no-deps --upgrade --target build/$$each -r benchmarks/trainers/$$each.txt; done
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.trainers

format: .venv/installed
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

# Without bytecode, which takes half of the time: Python writes that of modules which it imports. That of torch's
# compiler is written while pip installs the rest: the tests' two workers would both write it.
# A new pip first: it installs in two thirds of the time that Python's own needs. The pip beside this Python installs it, if there
# is one: without Python's own, the environment is made in a tenth of the time. Then large packages and those that torch
# imports, side by side, since a pip takes one core. Without isolation, setuptools has to be there to build purestep.
LARGE := 'torch sympy mpmath networkx typing_extensions filelock fsspec jinja2 markupsafe mypy ruff hypothesis setuptools>=77.0.3' 'transformers jaxlib jax scipy pyarrow pandas numpy matplotlib datasets tokenizers pillow fonttools hf-xet accelerate peft aiohttp pytorch-lightning torchmetrics'
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv --without-pip .venv
	$(PYTHON) -m pip --python $(BIN)/python install -q -c constraints.txt -U pip 2> /dev/null || \
		{ $(PYTHON) -m venv .venv && $(BIN)/python -m pip install -q -c constraints.txt -U pip; }
	printf '%s\n' $(LARGE) | xargs -P 2 -L 1 $(BIN)/python -m pip install -q --no-compile --no-deps -c constraints.txt
	$(BIN)/python -c 'import torch._inductor.compile_fx' & \
		$(BIN)/python -m pip install -q --no-compile --no-build-isolation -c constraints.txt -e '.[examples,huggingface,dev]' && wait
	touch $@

# The tools alone: they read the package's source, and import nothing of it.
.venv-docs/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-docs
	sed -n 's/^docs = //p' pyproject.toml | grep -oE '[a-z-]+>=[0-9.]+' | .venv-docs/bin/python -m pip install -q -c constraints.txt -r /dev/stdin
	touch $@

.venv-%/installed: .venv-%/constraints.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install -q --no-compile -c $< -e '.[examples,huggingface,dev]'
	touch $@

# The oldest of all that pyproject.toml claims, not of torch alone.
.venv-oldest/constraints.txt: pyproject.toml
	mkdir -p $(@D)
	grep -oE '[a-z-]+>=[0-9.]+' $< | sed 's/>=/==/' | sort -u > $@

.venv-newest/constraints.txt: constraints.txt pyproject.toml purestep/torch_private.py
	mkdir -p $(@D)
	sed "s/^torch==.*/torch==$$(sed -n 's/^NEWEST = "\(.*\)"/\1/p' purestep/torch_private.py)/" $< > $@

clean:
	rm -rf .venv* build .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
