# make demo | make test | make help
PYTHON ?= python3
VENV ?= .venv
HOST ?= 127.0.0.1
PORT ?= 7860
TORCH_CPU = torch==2.13.0
CPU_INDEX = https://download.pytorch.org/whl/cpu

# An NVIDIA GPU gets the CUDA build; any other machine the CPU build.
HAS_GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU && echo 1)
REQUIREMENTS := $(if $(HAS_GPU),requirements.txt,requirements-cpu.txt)
READY = $(VENV)/.ready-$(notdir $(REQUIREMENTS))
PY = $(VENV)/bin/python

.DEFAULT_GOAL := help
.PHONY: help demo test lint install browser golden

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/:/' | awk -F: '{printf "  make %-10s %s\n", $$1, $$2}'

$(READY): $(REQUIREMENTS) Makefile
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --upgrade pip
ifeq ($(HAS_GPU),)
	$(PY) -m pip install -q '$(TORCH_CPU)' || $(PY) -m pip install -q --index-url $(CPU_INDEX) '$(TORCH_CPU)'
	$(PY) -c "import torch,sys; sys.exit(torch.version.cuda is not None)" || \
		$(PY) -m pip install -q --force-reinstall --no-deps --index-url $(CPU_INDEX) '$(TORCH_CPU)'
	$(PY) -m pip install -q --no-deps -r requirements-cpu.txt
else
	$(PY) -m pip install -q -r requirements.txt
	$(PY) -m pip install -q --no-deps openai-whisper distillmos xls-r-sqa speechmos
endif
	touch $@

install: $(READY)  ## create the environment

demo: $(READY)  ## open the page (MODEL=<folder or hub id>, PORT=7860, HOST=127.0.0.1)
	$(PY) app.py --host $(HOST) --port $(PORT) $(if $(MODEL),--model $(MODEL))

lint: $(READY)  ## ruff, and types on engine/
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

browser:  ## a Chromium for the page tests, where there is none
	@command -v chromium >/dev/null 2>&1 || command -v google-chrome >/dev/null 2>&1 || \
		(apt-get update -qq && apt-get install -y -qq chromium) || $(PY) -m playwright install chromium

# Two files side by side, in the order of tests/conftest.py; the browser's by themselves, as they watch things happen.
SIDE_BY_SIDE = -n 2 --dist loadfile --no-loadscope-reorder --ignore tests/page
test: $(READY) browser  ## every test that runs on this machine
	OMP_NUM_THREADS=1 $(PY) -m pytest $(SIDE_BY_SIDE)
	OMP_NUM_THREADS=1 $(PY) -m pytest tests/page

GOLDEN = .venv-golden
golden:  ## make tests/golden again with the reference implementation (minutes; needs no GPU)
	test -x $(GOLDEN)/bin/python || $(PYTHON) -m venv $(GOLDEN)
	$(GOLDEN)/bin/python -m pip install -q '$(TORCH_CPU)' || \
		$(GOLDEN)/bin/python -m pip install -q --index-url $(CPU_INDEX) '$(TORCH_CPU)'
	$(GOLDEN)/bin/python -m pip install -q --no-deps -r tests/golden/oracle/requirements.txt
	$(GOLDEN)/bin/python -m tests.golden.oracle
