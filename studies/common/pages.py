# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Tables of the studies in the pages of `docs/`, each between two comments of its name."""

from pathlib import Path

from attnres.utils.files import write_file


def put_into_page(page: Path, name: str, table: str):
    """Replace what is between the two comments `<!-- name -->` of a page."""
    mark = f"<!-- {name} -->\n"
    before, _, after = page.read_text(encoding="utf-8").split(mark)
    write_file(page, f"{before}{mark}{table}{mark}{after}")
