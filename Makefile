# make demo   trains a GPT over two ranks, from an unchanged single-device step
# make test   lints, type-checks and runs every test
# Both make their own environment in .venv first; nothing is needed but Python 3.11+ with venv, and make.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
RANKS ?= 2
export OMP_NUM_THREADS ?= 1

.PHONY: demo test bench clean

demo: $(VENV)/ready
	$(BIN)/torchrun --standalone --nproc-per-node $(RANKS) examples/train_gpt.py $(ARGS)

test: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -P -m pytest $(ARGS)

bench: $(VENV)/ready
	$(BIN)/torchrun --standalone --nproc-per-node $(RANKS) benchmarks/step_overhead.py
	$(BIN)/torchrun --standalone --nproc-per-node $(RANKS) benchmarks/collectives.py
	$(BIN)/python -P benchmarks/compile_time.py

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[test]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
