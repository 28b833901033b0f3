# `make demo` and `make test` do all their own set-up in .venv; nothing but Python, make and a package index is needed.
PYTHON ?= python3
BIN := .venv/bin
export TF_CPP_MIN_LOG_LEVEL ?= 2

.PHONY: demo test format clean

demo: .venv/.installed
	$(BIN)/python -m keras_sn.benchmarks demo --out demo_output

test: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/pytest -n 2 --dist loadgroup

format: .venv/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/.installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv demo_output
