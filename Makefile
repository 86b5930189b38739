# make demo   the main job, offline, on a CPU, in minutes
# make test   the tests that run with every change: one of each kind
# make test-all   all the others
# make test-transformers TRANSFORMERS=DIR   transformers' own model tests, from a checkout of transformers in DIR, on the
#   model of BASE (llama) and BLOCK_SIZE (2); RUN_SLOW=1 runs those that take long as well
# make test-transformers-mixins   the part of them that transformers' source distribution carries
# make lint   ruff, transformers' modelling rules and mypy
# make docs   the pages as a site, in site/
# make test-5.19   what has to hold on transformers 5.19 as well, in an environment of its own; so for 5.16, the oldest
# make build   the source distribution and the wheel, in dist/
# Each sets up .venv first if it is missing or older than what it is made from.

PYTHON ?= python3
VENV := .venv
# Not in constraints.txt: torch for GPUs brings the one it was built with. For CPUs it brings none
TRITON := 3.9.0
BIN := $(VENV)/bin

BASE ?= llama
BLOCK_SIZE ?= 2
RUN_SLOW ?= 0
# As transformers' own tests are run, and without the settings of ours
SUITE := HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false DISABLE_SAFETENSORS_CONVERSION=true OMP_NUM_THREADS=1 \
	RUN_SLOW=$(RUN_SLOW) BASE=$(BASE) BLOCK_SIZE=$(BLOCK_SIZE)
# What transformers 5.16 does not have, or cannot do with the base itself
LEFT_OUT-5.16 := -k "not kimi_linear and not test_bases_do_not_touch_each_other and not assistant_early_exit \
	and not continuous_batching and not test_quantized_cache"
SUITE_OPTIONS := -q -n 2 -o addopts= -p no:cacheprovider -W ignore::pytest.PytestUnknownMarkWarning --timeout 900 -rfE

.PHONY: demo test test-all test-transformers test-transformers-mixins test-5.16 test-5.19 lint docs build clean

demo: $(VENV)/installed
	$(BIN)/attnres demo

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest -n 2

test-all: $(VENV)/installed-dev
	$(BIN)/python -m pytest -n 2 -m slow

test-transformers: $(VENV)/installed-suite
	@test -f "$(TRANSFORMERS)/tests/causal_lm_tester.py" || \
		{ echo "TRANSFORMERS=$(TRANSFORMERS) is not a checkout of transformers: name the folder that holds one"; exit 2; }
	TRANSFORMERS="$(abspath $(TRANSFORMERS))" $(SUITE) $(BIN)/python -m pytest $(SUITE_OPTIONS) tests/transformers_suite/suite.py

test-transformers-mixins: $(VENV)/installed-suite $(VENV)/transformers
	TRANSFORMERS="$(abspath $(VENV)/transformers)" $(SUITE) \
		$(BIN)/python -m pytest $(SUITE_OPTIONS) tests/transformers_suite/suite.py

test-5.16 test-5.19: test-%: $(VENV)-%/installed
	$(VENV)-$*/bin/python -m pytest -n 2 -p no:cacheprovider tests/test_conversion.py \
		tests/test_families.py tests/test_generation.py tests/test_interchange.py tests/test_loading.py \
		tests/test_multimodal.py tests/test_readme.py $(LEFT_OUT-$*)

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mlinter configuration_attnres.py modeling_attnres.py
	mkdir -p $(VENV)/types
	ln -sfn "$(CURDIR)" $(VENV)/types/attnres
	MYPYPATH=$(VENV)/types $(BIN)/mypy

build: $(VENV)/installed-dev
	$(BIN)/python -m build --no-isolation

# The switch is for an advertisement that mkdocs-material prints
docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[eval,train]"
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt triton==$(TRITON) --editable ".[dev]"
	touch $@

$(VENV)/installed-suite: $(VENV)/installed-dev
	$(BIN)/python -m pip install --quiet --constraint constraints.txt expecttest httpx parameterized timeout-decorator
	touch $@

$(VENV)/installed-docs: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	touch $@

# Its tests are read where they are and belong to nobody's wheel
$(VENV)/transformers: constraints.txt
	rm -rf $@ $@.download
	$(BIN)/python -m pip download --quiet --no-deps --no-binary transformers --dest $@.download \
		"$$(grep '^transformers==' constraints.txt)"
	mkdir $@.download/content
	tar -xzf $@.download/transformers-*.tar.gz -C $@.download/content --strip-components 1
	mv $@.download/content $@
	rm -r $@.download
	touch $@

$(VENV)-%/installed: pyproject.toml constraints-%.txt
	test -x $(VENV)-$*/bin/python || $(PYTHON) -m venv $(VENV)-$*
	$(VENV)-$*/bin/python -m pip install --quiet --constraint constraints-$*.txt \
		pytest pytest-timeout pytest-xdist hqq --editable ".[train]"
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-5.16 $(VENV)-5.19 attnres-demo build dist site *.egg-info
