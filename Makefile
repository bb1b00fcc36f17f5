# Every target works on a fresh machine with Python >= 3.11, make and git, and in any order.
#
# Two stamps in the virtual environment say what it holds: the stamp of the users' packages and the stamp of the
# developers', a superset. Both are older than pyproject.toml or constraints.txt when either has changed.

SHELL := bash
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
USER_STAMP := $(VENV)/.installed-models
DEV_STAMP := $(VENV)/.installed-dev
DOCS_STAMP := $(VENV)/.installed-docs
BROWSER_STAMP := $(VENV)/.installed-browser
# glibc would give memory back to the system after each of many tables, and take it again: a tenth of the time.
# What was compiled of the tests is kept, whatever the shell says: to rewrite their assertions takes a process six seconds.
PYTEST := PYTHONDONTWRITEBYTECODE= MALLOC_TRIM_THRESHOLD_=1000000000 MALLOC_MMAP_THRESHOLD_=1000000000 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help
help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1|\2/p' Makefile | while IFS='|' read -r target what; do \
		printf '  make %-15s %s\n' "$$target" "$$what"; done

.PHONY: demo
demo: $(USER_STAMP) ## plan GPT-2 for a budget of 20 GiB, on any machine
	$(BIN)/remat plan --model gpt2 --budget 20GiB

.PHONY: test
test: $(DEV_STAMP) ## run the tests, without the exhaustive ones; those that need CUDA are reported as skipped without it
	$(PYTEST) -m "not exhaustive" $(PYTEST_ARGS)

.PHONY: test-exhaustive
test-exhaustive: $(DEV_STAMP) ## run what `make test` leaves out: one claim over many models, targets and budgets
	$(PYTEST) -m "exhaustive and not nightly" $(PYTEST_ARGS)

.PHONY: test-all
test-all: test test-exhaustive ## run every test but the nightly ones

# Downloads 530 MB of torch and 200 MB of Triton once, and compiles for a minute; says so where it cannot.
.PHONY: card
card: $(DEV_STAMP) ## build PyTorch's CUDA build on stand-in libraries, so that CUDA tests run without a GPU
	$(BIN)/python tests/card/build.py

.PHONY: test-cuda
test-cuda: card ## run what is marked `cuda` and `any_device` on that build, with arithmetic
	@if [ -x build/card/python ]; then \
		CARD_ARITHMETIC=all $(subst $(BIN)/python,build/card/python,$(PYTEST)) --device cuda $(PYTEST_ARGS); \
	else echo "NO CARD: tests that need CUDA are skipped"; fi

.PHONY: test-nightly
test-nightly: $(DEV_STAMP) ## property tests with examples that are drawn anew, and lists of dozens of architectures
	$(PYTEST) -m nightly $(PYTEST_ARGS)
	$(PYTEST) --hypothesis-profile nightly $(shell grep -lE '^from hypothesis' tests/test_*.py) $(PYTEST_ARGS)

# Chromium is Debian's package, since playwright's own is a download from elsewhere; not root: say so and go on.
.PHONY: browser
browser: $(BROWSER_STAMP) ## what tests that open a page need: playwright, and Chromium where root may install it
	@command -v chromium > /dev/null \
		|| { [ "$$(id -u)" = 0 ] && apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium; } > /dev/null 2>&1 \
		|| echo "no Chromium here, and none that apt-get installs: tests that open a page are skipped"

.PHONY: check
check: lint types ## everything that reads the code without running it

.PHONY: lint
lint: $(DEV_STAMP) ## ruff: format and rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

.PHONY: format
format: $(DEV_STAMP) ## let ruff rewrite the files
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# solvers/ and models/ are installed as remat.solvers and remat.models (package-dir in pyproject.toml), which mypy
# cannot know: it takes a module's name from its path. So it reads links laid out as the package is installed. They are
# made anew each time: a strict editable install also makes such links, but only when installing, and misses new files.
# The paths in mypy's messages are turned back into the files'.
TYPED := .mypy_cache/layout
.PHONY: types
types: $(DEV_STAMP) ## mypy: the package, its tests, benchmarks and examples
	@rm -rf $(TYPED) && mkdir -p $(TYPED)/remat
	@ln -s "$(CURDIR)"/remat/[!_]* "$(CURDIR)"/remat/_torch "$(CURDIR)"/remat/_*.py "$(CURDIR)/solvers" "$(CURDIR)/models" $(TYPED)/remat
	@ln -s "$(CURDIR)/tests" "$(CURDIR)/benchmarks" "$(CURDIR)/examples" "$(CURDIR)/examples/common.py" $(TYPED)
	@set -o pipefail; cd $(TYPED) && "$(CURDIR)/$(BIN)/mypy" --config-file "$(CURDIR)/pyproject.toml" --cache-dir "$(CURDIR)/.mypy_cache" \
		remat tests benchmarks examples | sed -E 's,^remat/(solvers|models)/,\1/,'

.PHONY: docs
docs: $(DOCS_STAMP) ## build the documentation into build/docs, offline; a warning is an error
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs

.PHONY: bench
bench: $(DEV_STAMP) ## measure what README claims, on this machine, and write it to results/ (minutes)
	$(BIN)/python -m benchmarks

.PHONY: bench-peers
bench-peers: $(DEV_STAMP) ## torch.compile's memory budget and Hugging Face's checkpointing beside plans (minutes)
	$(BIN)/python -m benchmarks peers

.PHONY: matrix
matrix: $(DEV_STAMP) ## plans made under one version of torch and transformers, validated under the others (GBs, an hour)
	$(BIN)/python -m benchmarks matrix

.PHONY: clean
clean: ## remove the virtual environment and all that tools leave behind
	rm -rf $(VENV) .matrix build remat.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(USER_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e ".[models,plots]"
	@touch $@

$(DEV_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e ".[models,plots,frameworks,dev]"
	@touch $(USER_STAMP) $@

$(DOCS_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e ".[docs]"
	@touch $@

$(BROWSER_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e ".[browser]"
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(PYTHON) is $$($(PYTHON) --version 2>&1); remat needs Python 3.11 or newer: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
