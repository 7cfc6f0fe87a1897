# make install    create .venv with pinned versions and the C++ operators
# make demo       install, train the tiny HunyuanVideo 1.5 testbed on this machine, write runs/demo/report.html
# make demo-long  the same with more iterations, in runs/demo-long
# make test       install, then check and run the tests that tell in minutes whether the trainer still trains
# make test-all   install, then run all other tests (tests/tiers.py); `.ci/run` runs both
# make check      only lint, type check and the tests of the source's layout and names, in seconds
# make docs       install, build the documentation into site/ (open site/index.html)
# make soak       inject every fault that a run must survive, 100 of them at random moments (writes the table of
#                 docs/reference/faults.md), and run the long tests
# make bench      time operators and rollout; fail if a timing in README is older than the code
# make reproduce  study the paper's claims (docs/results/paper.md); takes hours; CLAIMS="ema --quick" runs less
# make race       race recipes at equal compute (docs/results/race.md); hours; RECIPES="paper precise --quick" runs less
# make gpu        verify and measure on a GPU, offline: WHEELS=folder OUT=folder PARTS="...", docs/how-to/first-gpu.md
# make gpu-stack  run what needs no GPU with the software of a GPU machine, in .venv-gpu-stack (7 GB)

PYTHON ?= python3
VENV := .venv
STACK := .venv-gpu-stack
BIN := $(VENV)/bin
SOURCES := pyproject.toml setup.py constraints.txt $(wildcard csrc/*)

WHEELS ?= wheels
OUT ?= runs/gpu
WORKERS ?= 4
CLAIMS ?= all
RECIPES ?=
TIER ?=

unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo demo-long test test-all check suite docs soak bench reproduce race gpu gpu-stack clean

install: $(VENV)/installed

# Install torch first and without build isolation, so that the C++ operators are built against the torch that runs them.
# A module is compiled when it is first imported, and kept; most never are.
$(VENV)/installed $(STACK)/installed: $(SOURCES)
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@echo "installing into $(@D), 1 of 2: torch and what builds the C++ operators"
	@sed -E '$(OTHER_PINS)' constraints.txt > $(@D)/constraints.txt
	@$(@D)/bin/python -m pip --disable-pip-version-check install --quiet --no-compile -c $(@D)/constraints.txt setuptools ninja torch numpy
	@echo "installing into $(@D), 2 of 2: diffusers and the other packages; compiling the C++ operators"
	@$(@D)/bin/python -m pip --disable-pip-version-check install --quiet --no-compile -c $(@D)/constraints.txt --no-build-isolation --editable ".[dev]"
	@touch $@

$(STACK)/installed: OTHER_PINS = s/^torch==.*/torch==2.11.0/; s/^triton==.*/triton==3.6.0/; \
  s/^transformers==.*/transformers==5.17.0/; s/^huggingface_hub==.*/huggingface_hub==1.33.0/; \
  s/^setuptools==.*/setuptools==81.0.0/

demo: install
	rm -rf runs/demo
	$(BIN)/sage-fast train configs/demo.yaml --output runs/demo

demo-long: install
	rm -rf runs/demo-long
	$(BIN)/sage-fast train configs/demo.yaml --output runs/demo-long --train.iterations 175

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/style

# The check beside the tests, and four workers on two cores: a test that waits leaves its core to another one.
test: install
	+$(MAKE) --no-print-directory --jobs 2 check suite TIER="not full"

test-all: install
	+$(MAKE) --no-print-directory suite TIER="full"

suite: install
	$(BIN)/python -m pytest -m "$(TIER)" -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=15 \
	  --ignore=tests/style

# Silences the theme's notice of its own end of life, in May 2027.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Prints which lines of the package its tests do not reach in their own process.
soak: export SAGE_FAST_SOAK := 1
soak: COVER := --cov=sage_fast --cov-append --cov-report=
soak: install
	rm -f .coverage
	$(BIN)/python -m pytest $(COVER) -m fault
	$(BIN)/python -m pytest $(COVER) -m soak
	$(BIN)/python -m pytest $(COVER)term-missing:skip-covered tests/test_gpu_script.py tests/test_ranks.py \
	  tests/test_engine_deepspeed.py tests/test_bench.py tests/test_sequence.py tests/test_new_user.py \
	  tests/ops/test_compile.py tests/ops/test_operators.py

bench: install
	$(BIN)/sage-fast bench
	$(BIN)/sage-fast bench rollout
	$(BIN)/python -m pytest benchmarks

reproduce: install
	$(BIN)/python -m studies.paper $(CLAIMS)

race: install
	$(BIN)/python -m studies.race $(RECIPES)

gpu:
	PYTHON=$(PYTHON) scripts/gpu.sh $(WHEELS) $(OUT) $(PARTS)

gpu-stack: $(STACK)/installed
	$(STACK)/bin/python -m pytest tests/ops tests/test_graphs.py tests/test_attention.py tests/test_checkpointing.py \
	  tests/test_forward.py tests/test_decode.py tests/test_pretend_cuda.py
	$(STACK)/bin/sage-fast bench --compile
	mkdir -p $(STACK)/wheels
	PYTHON=$(STACK)/bin/python GPU_VENV=$(abspath $(STACK))/gpu scripts/gpu.sh --tiny $(STACK)/wheels runs/gpu-stack

clean:
	rm -rf $(VENV) $(STACK) build site *.egg-info sage_fast/*.so
