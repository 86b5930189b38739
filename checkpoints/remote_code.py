# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The code of the model as files that go with a checkpoint, so that it loads where the package is not installed.

transformers copies remote code into one flat folder. There `depth/stream.py` becomes `depth_stream.py`, and imports
follow. Nothing else changes, so that line numbers in tracebacks are those of the package.
"""

import ast
import functools
import hashlib
import os
from importlib import resources
from pathlib import Path
from typing import Any

from .. import __version__


ENTRY = "modeling_attnres"
# At the end of the config's file. transformers finds the files to copy by the text of imports, and would leave out the
# model where a config is loaded and saved alone
ALL_FILES = f"\n\nif False:\n    from .{ENTRY} import AttnResModel  # noqa: F401\n"
# The names of a module and the folders around it
Module = tuple[str, ...]


def flattened(source: str, module: Module) -> tuple[str, list[Module]]:
    """The source of a module with imports of siblings, and the modules that it imports of its package.

    Raises:
        ValueError: for an import that transformers would not follow.
    """
    lines = source.splitlines(keepends=True)
    imported = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        at = f"{'/'.join(module)}.py, line {node.lineno}"
        if node.module is None:
            raise ValueError(
                f"{at}: `from . import {node.names[0].name}` is not followed by transformers' loader of remote code."
                " Import names from the module instead."
            )
        target = (*module[: len(module) - node.level], *node.module.split("."))
        written, line = f"from {'.' * node.level}{node.module} import", lines[node.lineno - 1]
        if not line[node.col_offset :].startswith(written) or line[: node.col_offset].strip():
            raise ValueError(f"{at}: `{written}` must begin its line, as transformers finds imports by their text.")
        lines[node.lineno - 1] = line.replace(written, f"from .{'_'.join(target)} import", 1)
        imported.append(target)
    return "".join(lines), imported


def closure(package: Any, entry: Module = (ENTRY,)) -> dict[str, bytes]:
    """A module and all that it imports of its package, as flat files by name.

    Args:
        package: its folder, a path or what `importlib.resources` has for one.

    Raises:
        ValueError: for an import that transformers would not follow, and where two modules would be one file.
    """
    modules: dict[str, Module] = {}
    files: dict[str, bytes] = {}
    waiting = [entry]
    while waiting:
        module = waiting.pop()
        name = f"{'_'.join(module)}.py"
        if modules.setdefault(name, module) != module:
            raise ValueError(f"`{'/'.join(module)}.py` and `{'/'.join(modules[name])}.py` would both be `{name}`.")
        if name in files:
            continue
        path = package.joinpath("/".join(module) + ".py")
        if not path.is_file():
            raise ValueError(f"`{'/'.join(module)}` is no module: import names from modules, not from folders.")
        source, imported = flattened(path.read_text(encoding="utf-8"), module)
        files[name] = source.encode()
        waiting += imported
    return dict(sorted(files.items()))


@functools.cache
def code_files() -> dict[str, bytes]:
    """The files, by name: the model's, and all that it imports of the package."""
    files = closure(resources.files(__package__.partition(".")[0]))
    return {**files, "configuration_attnres.py": files["configuration_attnres.py"] + ALL_FILES.encode()}


def code_metadata() -> dict[str, str]:
    """Which code it is: the version of the package, and a hash over the files."""
    digest = hashlib.sha256(b"".join(code_files().values())).hexdigest()
    return {"attnres_version": __version__, "attnres_code_sha256": digest}


def write_code(folder: str | os.PathLike):
    """Write the files into the folder of a checkpoint."""
    for name, content in code_files().items():
        (Path(folder) / name).write_bytes(content)
