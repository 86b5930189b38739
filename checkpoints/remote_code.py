# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The code of the model as files that go with a checkpoint, so that it loads where the package is not installed.

transformers copies remote code into one flat folder. There `depth/stream.py` becomes `depth_stream.py`, and imports
follow. Nothing else changes, so that line numbers in tracebacks are those of the package.
"""

import ast
import functools
import hashlib
from importlib import resources
from pathlib import Path

from .. import __version__


ENTRY = "modeling_attnres"
# At the end of the config's file. transformers finds the files to copy by the text of imports, and would leave out the
# model where a config is loaded and saved alone
ALL_FILES = f"\n\nif False:\n    from .{ENTRY} import AttnResModel  # noqa: F401\n"


def _imports(tree: ast.AST, module: tuple[str, ...]) -> dict[ast.ImportFrom, tuple[str, ...]]:
    """The relative imports of a module, and the modules that they name.

    Raises:
        ValueError: for `from . import name`, which transformers does not follow.
    """
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            if node.module is None:
                raise ValueError(
                    f"{'/'.join(module)}.py, line {node.lineno}: `from . import {node.names[0].name}` is not followed"
                    " by transformers' loader of remote code. Import names from the module instead."
                )
            found[node] = (*module[: len(module) - node.level], *node.module.split("."))
    return found


def _flattened(source: str, module: tuple[str, ...]) -> tuple[str, list[tuple[str, ...]]]:
    """The source with imports of siblings, and the modules that are imported."""
    imports = _imports(ast.parse(source), module)
    lines = source.splitlines(keepends=True)
    for node, target in imports.items():
        named = "." * node.level + node.module
        line = lines[node.lineno - 1]
        lines[node.lineno - 1] = line.replace(f"from {named} import", f"from .{'_'.join(target)} import", 1)
    return "".join(lines), list(imports.values())


@functools.cache
def code_files() -> dict[str, bytes]:
    """The files, by name: the model's, and all that it imports of the package."""
    package = resources.files(__package__.partition(".")[0])
    waiting: list[tuple[str, ...]] = [(ENTRY,)]
    files: dict[str, bytes] = {}
    while waiting:
        module = waiting.pop()
        name = f"{'_'.join(module)}.py"
        if name in files:
            continue
        path = package.joinpath("/".join(module) + ".py")
        source, imported = _flattened(path.read_text(encoding="utf-8"), module)
        files[name] = (source + ALL_FILES * (name == "configuration_attnres.py")).encode()
        waiting += imported
    return dict(sorted(files.items()))


def code_metadata() -> dict[str, str]:
    """Which code it is: the version of the package, and a hash over the files."""
    digest = hashlib.sha256(b"".join(code_files().values())).hexdigest()
    return {"attnres_version": __version__, "attnres_code_sha256": digest}


def write_code(folder: str | Path):
    """Write the files into the folder of a checkpoint."""
    for name, content in code_files().items():
        (Path(folder) / name).write_bytes(content)
