# make demo   the main job, offline, on a CPU, in minutes
# make test   the test suite
# make test-all   what it leaves out because it takes long
# make lint   ruff and transformers' modelling rules
# make test-5.19   what has to hold on transformers 5.19 as well, in an environment of its own
# Each sets up .venv first if it is missing or older than what it is made from.

PYTHON ?= python3
VENV := .venv
# Not in constraints.txt: torch for GPUs brings the one it was built with. For CPUs it brings none
TRITON := 3.9.0
BIN := $(VENV)/bin

.PHONY: demo test test-all test-5.19 lint clean

demo: $(VENV)/installed
	$(BIN)/attnres demo

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest -n 2

test-all: $(VENV)/installed-dev
	$(BIN)/python -m pytest -n 2 -m slow

test-5.19: $(VENV)-5.19/installed
	$(VENV)-5.19/bin/python -m pytest -n 2 -p no:cacheprovider tests/test_conversion.py \
		tests/test_families.py tests/test_generation.py tests/test_interchange.py tests/test_loading.py tests/test_readme.py

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mlinter configuration_attnres.py modeling_attnres.py

$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[eval,train]"
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt triton==$(TRITON) --editable ".[dev]"
	touch $@

$(VENV)-5.19/installed: pyproject.toml constraints-5.19.txt
	test -x $(VENV)-5.19/bin/python || $(PYTHON) -m venv $(VENV)-5.19
	$(VENV)-5.19/bin/python -m pip install --quiet --constraint constraints-5.19.txt \
		pytest pytest-timeout pytest-xdist hqq --editable ".[train]"
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-5.19 attnres-demo
