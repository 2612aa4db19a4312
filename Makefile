# Two commands from zero: `make demo`, `make test`. Needs Python 3.11 or newer and make, nothing else.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
SOURCES := $(shell find src -type f -not -name '*.pyc')
NEEDED := import sys; sys.exit("Flatlens needs Python 3.11 or newer, and $(PYTHON) is " \
  + sys.version.split()[0] + "; name another one: make PYTHON=python3.12" \
  if sys.version_info < (3, 11) else 0)
LOWEST := build/lowest/bin/python -m pip install --quiet --disable-pip-version-check
# The tests of the core, which need no extra.
CORE_TESTS := tests/passes/test_zoo.py tests/passes/test_short.py tests/passes/test_closed_forms.py \
  tests/passes/test_minimal.py tests/passes/test_invariance.py tests/inequalities tests/measurement \
  tests/capture tests/track/test_quantities.py

.PHONY: demo test test-fast test-lowest lint docs dist clean python

demo: $(VENV)/.demo
	$(BIN)/flatlens demo

# FLATLENS_DATA (a folder with real data sets) reaches the tests if it is set. One thread each: the
# networks are tiny, and two workers with two threads each would fight over two cores.
test: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

# The tests for daily work: all but those marked slow, and of a test with many cases a few.
test-fast: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow"

# The tests of the core with the lowest versions that pyproject.toml declares, in an environment of
# its own. torch comes first: pip tries for an hour to find packages that fit all of them at once.
# Old packages warn beside newer ones that they depend on, so such warnings are no errors here. Shapes
# are not checked: the lowest jaxtyping also checks the functions that check their arguments themselves.
test-lowest: | python
	$(PYTHON) -m venv build/lowest
	$(LOWEST) $$($(PYTHON) tests/lowest_versions.py | tr ' ' '\n' | grep '^torch=')
	$(LOWEST) $$($(PYTHON) tests/lowest_versions.py pytest hypothesis beartype) -e .
	OMP_NUM_THREADS=1 build/lowest/bin/python -m pytest -q -W ignore::DeprecationWarning \
	  -o addopts=--doctest-modules $(CORE_TESTS)

# The site, in docs/_build/html. Runs every code cell; a warning, a failing cell or a link that leads
# nowhere fails the build.
docs: $(VENV)/.docs
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -W --keep-going -j 2 -b html docs docs/_build/html
	$(BIN)/python docs/links.py docs/_build/html

# A wheel and an sdist in dist/. The wheel is built from the sdist, installed into an environment of
# its own without extras, and measures there.
dist: | $(BIN)/python
	rm -rf dist build/dist-check
	$(PIP) build
	$(BIN)/python -m build --outdir dist .
	$(PYTHON) -m venv build/dist-check
	build/dist-check/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	cd build && dist-check/bin/flatlens --version && dist-check/bin/python ../examples/measure_network.py

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) flatlens-demo docs/_build docs/_notebooks dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis

# A stamp file says what the environment holds, so that a second call installs nothing. The demo
# takes the package as a user gets it, tests and lint take the tree itself: one replaces the other.
$(BIN)/python: | python
	$(PYTHON) -m venv $(VENV)

python:
	@test -n "$(PYTHON)" || { echo "Flatlens needs Python 3.11 or newer; install it." >&2; exit 1; }
	@$(PYTHON) -c '$(NEEDED)'

$(VENV)/.demo: pyproject.toml constraints.txt $(SOURCES) | $(BIN)/python
	$(PIP) .
	rm -f $(VENV)/.test $(VENV)/.dev $(VENV)/.docs
	touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[test]'
	rm -f $(VENV)/.demo
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[dev]'
	rm -f $(VENV)/.demo
	touch $(VENV)/.test $@

$(VENV)/.docs: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[docs]'
	rm -f $(VENV)/.demo
	touch $@
