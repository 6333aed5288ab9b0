# Everything a contributor runs. `make demo` and `make test` each set up what they need.
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
EXTRAS ?= dev,transformers
BIN    := $(VENV)/bin
# Test processes: each may take 15 GB of a GPU.
JOBS   ?= 2
DEMO   := build/demo.parquet
DEMO_VARIANTS ?= union8 union8-regroup union8-precomputed

.PHONY: help setup demo replay test lint kernels docs docs-check gate clean

help:
	@echo 'make demo     set up, replay the stored captures on this machine and print the report'
	@echo 'make test     set up and run the tests (those that need a GPU run where there is one)'
	@echo 'make lint     ruff and mypy'
	@echo 'make kernels  compile every CUDA kernel for sm_90a; needs no GPU'
	@echo 'make gate     compare the counters of the stored captures with the blessed baseline'
	@echo 'make docs     rewrite the tables of the documentation from the code and the stored results'

# torch comes first and alone: the rest then accepts whichever build of it (CPU or CUDA) is there.
$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV) || { echo 'This Python cannot make a venv; install python3-venv first.'; exit 2; }
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	touch $@

setup: $(VENV)/.ready

demo replay: setup
	mkdir -p $(dir $(DEMO))
	$(BIN)/pwbench replay captures/real-8k $(DEMO_VARIANTS:%=--variant %) --out $(DEMO)
	$(BIN)/pwbench report $(DEMO) --baseline union8

test: setup
	$(BIN)/python -m pytest -n $(JOBS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

kernels: setup
	$(BIN)/python -m pwbench.kernels

gate: setup
	$(BIN)/pwbench gate

docs: setup
	$(BIN)/python -c "import pwbench.columns as c; print(c.column_dictionary(), end='')" > docs/columns.md
	$(BIN)/pwbench report --fill README.md --fill docs/results.md
	$(BIN)/python -m pwbench.report.page_union

docs-check: setup
	$(BIN)/pwbench report --fill README.md --fill docs/results.md --check
	$(BIN)/python -m pwbench.report.page_union --check

clean:
	rm -rf build dist $(VENV) .pytest_cache .mypy_cache .ruff_cache
