# SPDX-License-Identifier: Apache-2.0
"""Makes a notebook of each page of `PAGES`, with the output that the page shows: `python docs/notebooks/make.py`."""

import re
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output


FOLDER = Path(__file__).parent
PAGES = ("tutorial.md", "ten_minutes.md")
# A block of code, and of what it prints
EXAMPLE = re.compile(r"```python\n(.*?)\n```(?:\n\n```\n(.*?)```)?", flags=re.DOTALL)
# Of a page in the folder above this one
LINK = re.compile(r"(\]\()(?!https?://|#)")


def notebook(page: str) -> nbformat.NotebookNode:
    """A page as cells: its text, and its snippets with their outputs."""
    text = (FOLDER.parent / page).read_text(encoding="utf-8")
    # The notebook does not link to itself
    text = re.sub(r"\sThe same is in\sa \[notebook\]\(.*?\)\.", "", text)
    cells, end = [], 0
    for match in EXAMPLE.finditer(text):
        cells += text_cells(text[end : match.start()])
        code, printed = match.groups()
        cells.append(new_code_cell(code, outputs=[new_output("stream", name="stdout", text=printed or "")]))
        end = match.end()
    cells += text_cells(text[end:])
    for number, cell in enumerate(cells):
        cell["id"] = f"{Path(page).stem}-{number}"  # a random one would differ each time
    return new_notebook(
        cells=cells,
        metadata={"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}},
    )


def text_cells(text: str) -> list[nbformat.NotebookNode]:
    text = LINK.sub(r"\1../", text.strip())
    return [new_markdown_cell(text)] if text else []


def path_of(page: str) -> Path:
    return FOLDER / Path(page).with_suffix(".ipynb").name


if __name__ == "__main__":
    for page in PAGES:
        nbformat.write(notebook(page), path_of(page))
        print(f"Wrote {path_of(page).relative_to(FOLDER.parents[1])}")
