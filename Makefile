# make demo: a tiny random DeepSeek-V4.1 checkpoint is written, loaded and generates.   make test: what runs before
# every commit.   make test-slow: the long tests, which CI runs too.   make pages: docs, tables and notebooks from the code.
# make notebooks: JupyterLab on colab/.
CANDIDATES := python3.14 python3.13 python3.12 python3 $(wildcard $(HOME)/.pyenv/versions/*/bin/python3)
WORKS := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))
PYTHON ?= $(firstword $(foreach p,$(CANDIDATES),$(shell $(p) -c '$(WORKS)' 2>/dev/null && echo $(p))))
BIN := .venv/bin

.PHONY: demo test test-slow pages notebooks clean

demo: .venv/installed
	$(BIN)/dsa-jax demo

PYTEST := JAX_PLATFORMS=cpu $(BIN)/python -m pytest -x -n 2 --dist worksteal tests

test: .venv/installed-test
	$(PYTEST) -m "not slow"

test-slow: .venv/installed-test
	$(PYTEST) -m slow

pages: .venv/installed-test
	JAX_PLATFORMS=cpu $(BIN)/python tools/pages.py

notebooks: .venv/installed-notebooks
	$(BIN)/python -m jupyterlab colab

.venv/bin/python:
	@if [ -z "$(PYTHON)" ]; then \
	  echo "dsa-jax needs Python 3.12 or newer with the venv module, and none was found (looked for: $(CANDIDATES))." \
	       "Install one, or name it: make PYTHON=/path/to/python3.12" >&2; exit 1; fi
	"$(PYTHON)" -m venv .venv

.venv/installed: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

.venv/installed-test: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[test]"
	touch $@ .venv/installed

.venv/installed-notebooks: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[colab,$(if $(shell command -v nvidia-smi),cuda13,interpret)]" jupyterlab
	touch $@ .venv/installed

clean:
	rm -rf .venv build *.egg-info
