# SPDX-License-Identifier: Apache-2.0
"""Settings that hold for every test, before transformers is imported."""

import gc
import logging
import os
import random
import shutil
import signal
import tempfile
import time
import warnings


# What the shell says must not decide: caches and accounts of the user, colours, how wide a terminal is
if of_the_shell := os.environ.keys() & {
    *("HF_DATASETS_CACHE", "HF_ENDPOINT", "HF_HUB_CACHE", "HF_MODULES_CACHE", "HF_TOKEN", "TRANSFORMERS_VERBOSITY"),
    *("FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS", "TERMINAL_WIDTH", "TQDM_DISABLE"),
}:
    for name in of_the_shell:
        del os.environ[name]
os.environ.update(COLUMNS="120", HF_HUB_OFFLINE="1", HF_HOME=tempfile.mkdtemp(prefix="attnres-tests-"))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch


if not torch.cuda.is_available():  # read when Triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tiny_models import TINY
from transformers import set_seed
from transformers.utils import logging as transformers_logging

from attnres.base import probe as depth_probe
from attnres.cli import main


# What a shell starts in the background ignores it, and so would all programs that are tested with it
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_unconfigure():
    gc.unfreeze()  # or nanobind reports what it still finds at the end as leaked
    shutil.rmtree(os.environ["HF_HOME"], ignore_errors=True)


class Checkout:
    """The project's folder is the package `attnres`, whatever the name of a checkout: pytest is not to import it."""

    @staticmethod
    def pytest_collect_directory(path, parent):
        return pytest.Dir.from_parent(parent, path=path) if path == parent.config.rootpath else None


def pytest_configure(config):
    config.pluginmanager.register(Checkout)  # what a conftest.py itself has is not asked of the folders above it


OUT_OF_TIME = "out of time"


def pytest_addoption(parser):
    help = "start no test after this many minutes. The order of the files is random"
    parser.addoption("--minutes", type=float, help=help)


def pytest_sessionstart(session):
    session.config.started = time.monotonic()


def pytest_runtest_setup(item):
    minutes = item.config.getoption("--minutes")
    if minutes is not None and time.monotonic() - item.config.started > 60 * minutes:
        pytest.skip(OUT_OF_TIME)


def pytest_terminal_summary(terminalreporter):
    left_out = sum(OUT_OF_TIME in str(report.longrepr) for report in terminalreporter.getreports("skipped"))
    if left_out:
        minutes = terminalreporter.config.getoption("--minutes")
        terminalreporter.write_line(f"{left_out} tests were not run, as {minutes:g} minutes were over")


@pytest.hookimpl(tryfirst=True)  # before those that are deselected are looked for
def pytest_collection_modifyitems(config, items):
    """`one_in(n)`: the first case of a test and every n-th with every change, the others in `make test-all`."""
    if config.getoption("--minutes") is not None:
        # The same in all processes of a run. Tests of a file stay together, as they share what is made for them
        draw = random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID"))
        places = {name: draw.random() for name in dict.fromkeys(item.path.name for item in items)}
        items.sort(key=lambda item: places[item.path.name])
    cases = {}
    for item in items:
        if (marker := item.get_closest_marker("one_in")) is not None and item.get_closest_marker("slow") is None:
            number = cases.setdefault(item.function, 0)
            cases[item.function] += 1
            if number % marker.args[0]:
                item.add_marker("slow")


def pytest_collection_finish():
    """Imports stay, so the collector need not look through them at each of its rounds: a quarter of the time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    """transformers 5.24 loads adapters with PEFT 0.22 alone, which is not released yet."""
    try:
        return (yield)
    except (Exception, pytest.fail.Exception) as error:
        if "version of PEFT you are using is not compatible" in str(error):
            pytest.skip("transformers wants a newer PEFT")
        raise


@pytest.fixture(autouse=True)
def seeds():
    """Every test draws the same numbers, whatever ran before it."""
    set_seed(0)


@pytest.fixture
def probed_anew(monkeypatch):
    """Nothing is known of configs that have been probed before."""
    monkeypatch.setattr(depth_probe, "_COUNTS", {})


@pytest.fixture
def input_ids():
    return torch.randint(3, TINY["vocab_size"], (3, 11), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def run_attnres(monkeypatch):
    """The `attnres` program in this process, `main` included: arguments in, exit code out."""

    def run(*args) -> int:
        monkeypatch.setattr("sys.argv", ["attnres", *map(str, args)])
        try:
            main()
        except SystemExit as exit:
            return exit.code or 0
        return 0

    # What the program makes libraries print lasts as long as its process
    monkeypatch.setenv("TQDM_DISABLE", "")
    monkeypatch.delenv("TQDM_DISABLE")
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    with warnings.catch_warnings():
        yield run
    logging.disable(logging.NOTSET)
    transformers_logging.set_verbosity(level)
    if bars:
        transformers_logging.enable_progress_bar()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A Chromium without a window, whose log of errors can be read."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("chromium and chromedriver are not installed")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-dev-shm-usage"):
        options.add_argument(f"--{flag}")
    for flag in ("background-networking", "component-update", "sync"):
        options.add_argument(f"--disable-{flag}")
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('chromium')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options, webdriver.ChromeService(driver)) as browser:
        yield browser
