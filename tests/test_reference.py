# SPDX-License-Identifier: Apache-2.0
"""The pages of the reference are what the docstrings and the help of the commands say now."""

import importlib
import re

import pytest


pytest.importorskip("griffe")

import reference_pages


PAGES = {path.stem: path.read_text(encoding="utf-8") for path in reference_pages.PAGES}


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_up_to_date(page):
    if reference_pages.written(PAGES[page]) != PAGES[page]:
        pytest.fail(
            f"Run `python tests/tools/reference_pages.py`: docs/reference/{page}.md is older than its docstrings"
        )


def test_a_changed_text_is_written_again():
    page = PAGES["conversion"]
    old = page.replace("### revert", "### something else").replace(
        "Write the PreNorm checkpoint", "Write a checkpoint"
    )
    assert old != page and reference_pages.written(old) == page


@pytest.mark.parametrize(
    "page, module",
    {
        "models": "attnres",
        "conversion": "attnres.conversion",
        "training": "attnres.training",
        "parallel": "attnres.parallel",
        "inspection": "attnres.inspection",
        "evaluation": "attnres.eval",
    }.items(),
)
def test_reference_has_every_public_name(page, module):
    if module == "attnres.eval":
        pytest.importorskip("lm_eval")
    paths = re.findall(r"^<!-- attnres\.([\w.]+)", PAGES[page], flags=re.MULTILINE)
    names = [path.rpartition(".")[2] for path in paths]
    assert len(names) == len(set(names)) and set(importlib.import_module(module).__all__) <= set(names)
