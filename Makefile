# Two commands need nothing but make and Python 3.11 to 3.13: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
AOT := $(VENV)/aot
# Tests of a folder stay together, for engines that are built once, until a worker has nothing left and takes some. A
# worker that dies ends the run: with another in its place, pytest-xdist can wait for ever (its issues 784 and 1378).
PARALLEL := -n auto --dist worksteal --max-worker-restart 0

.PHONY: environments demo serve-openai demo-multihost test test-all aot lint format bench proto clean

$(VENV)/.base: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.test: $(VENV)/.base
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

$(VENV)/.smg: $(VENV)/.base
	$(BIN)/python -m pip install --quiet --editable ".[smg]"
	touch $@

$(VENV)/.aot: pyproject.toml
	test -x $(AOT)/bin/python || $(PYTHON) -m venv $(AOT)
	$(AOT)/bin/python -m pip install --quiet --upgrade pip
	$(AOT)/bin/python -m pip install --quiet --editable ".[aot]" "pytest>=8.3" "pytest-timeout>=2.4"
	touch $@

# What the gate needs; `make -j 2 environments` makes both at once.
environments: $(VENV)/.test $(VENV)/.aot

demo: $(VENV)/.base
	$(BIN)/python -m jaxspec.generate --demo

# The server with an OpenAI-compatible API at http://127.0.0.1:8000/v1, until Ctrl-C. ARGS: further flags, --help shows them.
serve-openai: $(VENV)/.smg
	$(BIN)/python -m serve.openai $(ARGS)

# The demo over two processes of this machine, which share one engine: one request, and the end of both.
TWO := --policy static --depth 3 --max-batch-size 1 --no-structured-output --tensor-parallel 2 --coordinator 127.0.0.1:8476 --num-processes 2
demo-multihost: $(VENV)/.base
	$(BIN)/python -m serve $(TWO) --process-id 1 --port 0 --metrics-port none & \
	$(BIN)/python -m serve $(TWO) --process-id 0 --metrics-port none --withdrawal-seconds 0 & first=$$!; \
	trap 'kill $$first; wait' EXIT; \
	until $(BIN)/python -m serve.client "def fibonacci(n):" --max-tokens 64 --stats; do kill -0 $$first; sleep 2; done

# Every change: the gate. What it leaves out (CONTRIBUTING.md) is in test-all. Compilers for devices that are not there
# live in an environment of their own, where the tests of them start processes.
test: environments
	$(BIN)/python -m pytest $(PARALLEL)

# The gate and what it leaves out; the soak of the shipped model also as users compile it.
test-all: environments
	$(BIN)/python -m pytest $(PARALLEL) --exhaustive
	$(BIN)/python -m pytest $(PARALLEL) --exhaustive --optimized -k demo tests/serve/test_soak.py

# Every kernel and a whole round through the compilers of nine devices that need not be there.
aot: $(VENV)/.aot
	$(AOT)/bin/python -m pallas_kernels.aot

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.test
	$(BIN)/python -m jaxspec.bench

# The messages of serve/proto; a test fails when they are stale.
proto: $(VENV)/.test
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. serve/proto/*.proto

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache
