# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""What is said of rows that are not there, at once: this module imports nothing that takes long."""

from pathlib import Path


# Of files with rows of a data set, see `rows.LOADERS`
ROW_SUFFIXES = (".jsonl", ".json", ".parquet", ".txt", ".md", ".py")


def check_rows(source: str):
    """Raise a `ValueError` for rows that are named like a file or a folder, and not like a data set, and not there."""
    path = Path(source).expanduser()
    if not path.exists() and (path.suffix in ROW_SUFFIXES or source.startswith((".", "/", "~"))):
        raise ValueError(f"There is no file or folder `{source}`.")
