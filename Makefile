# Two commands from zero: `make demo`, `make test`. Needs Python 3.11 or newer and make, nothing else.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
SOURCES := $(shell find src -type f -not -name '*.pyc')

.PHONY: demo test lint clean

demo: $(VENV)/.demo
	$(BIN)/flatlens demo

# FLATLENS_DATA (a folder with real data sets) reaches the tests if it is set. One thread each: the
# networks are tiny, and two workers with two threads each would fight over two cores.
test: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) flatlens-demo .pytest_cache .mypy_cache .ruff_cache .hypothesis

# A stamp file says what the environment holds, so that a second call installs nothing. The demo
# takes the package as a user gets it, tests and lint take the tree itself: one replaces the other.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt $(SOURCES) | $(BIN)/python
	$(PIP) .
	rm -f $(VENV)/.test $(VENV)/.dev
	touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[test]'
	rm -f $(VENV)/.demo
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[dev]'
	rm -f $(VENV)/.demo
	touch $(VENV)/.test $@
