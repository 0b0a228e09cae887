# Everything runs from .venv, which the first command makes: Python 3.11 or newer is all that must be there.
PYTHON ?= python3
BIN := .venv/bin
# oneDNN's AMX kernels for bfloat16 crash on some virtual machines; AVX-512 gives the same numbers.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE

.PHONY: demo test test-all test-oldest lint fuzz bench coverage test-gpu bench-gpu peers clean

demo: .venv/cli
	$(BIN)/samplewise demo

# One process a core, each with one thread.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto

# All cases of the table are traced, not a third of each family.
test-all: lint
	SAMPLEWISE_ALL=1 $(BIN)/pytest

# The oldest torch that is supported, in an environment of its own; its deprecations are not ours. The interpreter of its Triton
# takes no newer NumPy.
test-oldest: | .venv/bin/uv
	$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python .venv-oldest
	$(BIN)/uv pip install --quiet --python .venv-oldest/bin/python --editable '.[dev,bench]' 'torch==2.11.*' 'numpy<2.4'
	OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest -n auto -W default

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

N ?= 10000
fuzz: .venv/dev
	$(BIN)/python tests/fuzz.py --num $(N)

bench: .venv/bench
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/recurrent.py
	$(BIN)/python benchmarks/routes.py
	$(BIN)/python benchmarks/norms_memory.py
	$(BIN)/python benchmarks/first_use.py

coverage: .venv/dev .venv/bench
	$(BIN)/python benchmarks/coverage.py
	$(BIN)/python benchmarks/coverage.py --of models

# JOBS=14 runs them side by side.
test-gpu:
	PYTHONPATH=src:.peers $(PYTHON) -m pytest tests/test_gpu.py tests/test_kernels.py tests/test_channels_last.py -W default $(if $(JOBS),-n $(JOBS))

# COMMIT names what is measured where there is no repository to ask.
bench-gpu:
	PYTHONPATH=src $(PYTHON) benchmarks/gpu.py $(if $(COMMIT),--commit $(COMMIT))
	PYTHONPATH=src $(PYTHON) benchmarks/gpu_plot.py

# What bench-gpu compares with and test-gpu runs side by side with, for a GPU machine that cannot install: pure Python, 8 MB, beside a
# torch, scipy, transformers and pytest.
peers: | .venv/bin/uv
	$(BIN)/uv pip install --quiet --python-version 3.12 --target .peers --no-deps \
		opacus backpack-for-pytorch opt-einsum einops unfoldnd peft pytest-xdist execnet

# .venv/EXTRA stands for "installed with that extra".
.venv/bin/uv:
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv

.venv/%: pyproject.toml | .venv/bin/uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --editable '.[$*]'
	@touch $@

clean:
	rm -rf .venv .venv-oldest .peers
