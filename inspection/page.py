# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The same figures as a page to look around in: one file, which loads nothing."""

from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment

from ..utils.files import write_file


def write_page(results: dict[str, Any], path: Path):
    """Write the page of the content of a `depth.json`."""
    template = resources.files(__package__).joinpath("page.html.jinja").read_text(encoding="utf-8")
    # `tojson` writes <, >, & and quotes as escapes, so no text can end the script that holds it
    write_file(path, Environment(autoescape=True).from_string(template).render(results=results))
