# Two commands: `make demo` converts and proves the bundled model (and installs only what that needs),
# `make test` runs the suite. `make test-all` runs what is slow too, `make test-slow` only that;
# `make test-browser` looks at pages in Chromium, which must be there.
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1
FUZZ_SECONDS ?= 1800
COMPILED := fp8-block q8_0 q4_k q5_k q6_k f32  # what the default recipes and gguf-q4_k_m run
# A tenth of what is installed is ever imported: Python compiles that at its first import, and keeps it.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable
unexport PYTHONDONTWRITEBYTECODE

PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadgroup

.PHONY: demo test test-all test-slow test-browser fuzz faults lint format clean

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/ready: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) .
	$(BIN)/python -m qwen35_convert.run.first_use $(COMPILED)
	touch $@

.venv/tools: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) '.[test,lint]'
	touch $@

# all loops, by two processes: tests that need one at the same time would wait for each other
.venv/loops: .venv/tools $(shell find quant -name '*.py')
	$(BIN)/python -m qwen35_convert.run.first_use
	touch $@

demo: .venv/ready
	mkdir -p demo
	$(BIN)/qwen35 convert tests/data/nano-dense -o demo/nano-fp8 --recipe fp8-block --overwrite
	$(BIN)/qwen35 verify demo/nano-fp8 --against tests/data/nano-dense --level logits
	$(BIN)/qwen35 run demo/nano-fp8 --prompt "In the beginning" --max-tokens 48

test: .venv/loops
	$(PYTEST) -m 'not gpu and not hub and not big and not browser and not all'

test-slow: .venv/loops
	$(PYTEST) -m 'all and not gpu and not hub and not big and not browser'

test-all: .venv/loops
	$(PYTEST) -m 'not gpu and not hub and not big and not browser'

test-browser: .venv/tools
	$(PYTEST) -m browser

fuzz: .venv/tools
	-$(BIN)/python -m pip install --quiet atheris  # where it installs, it follows coverage
	for p in safetensors config gguf recipe; do \
		$(BIN)/python -m tests.fuzz.fuzz_$$p --seconds $(FUZZ_SECONDS) || exit 1; done

faults: .venv/tools
	$(BIN)/python -m benchmarks.faults local --count 10000 --what steps writes
	$(BIN)/python -m benchmarks.faults local --count 240
	$(BIN)/python -m benchmarks.faults network

lint: .venv/tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/tools
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv out build dist
