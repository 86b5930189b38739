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
def test_it_runs(tmp_path):
    """The other one has the code of its page, which tests/test_readme.py runs, and takes minutes.

    Fractions are not compared: a model that learns this much on another CPU is another one.
    """
    client = pytest.importorskip("nbclient")
    found = nbformat.read(path_of("tutorial.md"), as_version=4)
    expected = [printed(cell) for cell in found.cells]
    client.NotebookClient(found, timeout=1200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    for cell, before in zip(found.cells, expected):
        whole = [line for line in before.splitlines() if "." not in line]
        assert set(whole) <= set(printed(cell).splitlines())


def printed(cell) -> str:
    """Without what goes to stderr, where bars and logs come at any time."""
    streams = (output for output in cell.get("outputs", ()) if output.output_type == "stream")
    return "".join(stream.text for stream in streams if stream.name == "stdout")
