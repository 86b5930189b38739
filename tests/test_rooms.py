# SPDX-License-Identifier: Apache-2.0
"""The rooms of the package stand in one order, and no file imports from a room that is further down."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from mutations import MUTATIONS


ROOT = Path(__file__).parents[1]
# A room is a folder, or a file beside `__init__.py`. Each may import those in front of it
ROOMS = (
    *("depth_backends", "depth_attention", "triton_kernels", "depth_stream", "base_config", "depth_probe"),
    *("attn_res_fields", "configuration_attnres", "depth_reads", "depth_queries"),
    *("library_lookups", "base_classes"),
    *("depth_forward", "generation_attnres", "depth_pipeline", "saving_attnres", "modeling_attnres"),
    "multimodal_attnres",
    *("installation", "markup", "outputs", "untrusted", "runtime", "fingerprint", "sources", "rows"),
    *("checkpoint", "reports", "families", "liger"),
    *(
        "eval",
        "model_cards",
        "hub",
        "conversion",
        "inspection",
        "parallel",
        "training",
        "serving",
        "demo",
        "benchmarks",
        "scaling",
        "console",
    ),
    *("cli_checks", "cli_convert", "cli_measure", "cli", "__main__"),
)
# What is imported when it is first needed, by a file that is loaded before it
UPWARD = {
    ("depth_backends", "depth_attention"): "a backend is tried on the operator",
    ("saving_attnres", "model_cards"): "`push_to_hub` writes a card where the package is installed",
    ("cli", "__main__"): "`python -m attnres.cli` is the program as well",
}
FILES = sorted(
    path.relative_to(ROOT)
    for path in ROOT.rglob("*.py")
    if path.relative_to(ROOT).parts[0] in ROOMS or path.parent == ROOT and path.stem in ROOMS
)


def is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def nodes_that_run(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes, those in functions included, without what only type checkers read."""
    for node in ast.iter_child_nodes(tree):
        if not is_for_type_checkers(node):
            yield node
            yield from nodes_that_run(node)


def imported_modules(file: Path, source: str) -> set[str]:
    """Names of modules of the package, relative to it, such as `conversion.parity`."""
    package = list(file.parts[:-1])
    found = []
    for node in nodes_that_run(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name.split(".")[1:] for alias in node.names if alias.name.startswith("attnres.")]
        elif isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").split(".")[0] == "attnres"):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = above + (node.module or "").split(".")[0 if node.level else 1 :]
            module = [part for part in module if part]
            # `from . import name` may name modules
            found += [module] if module else [[alias.name] for alias in node.names]
    return {".".join(module) for module in found if module}


def rooms_imported_upward(file: Path, source: str) -> list[str]:
    own = file.parts[0].removesuffix(".py")
    rooms = {module.split(".")[0] for module in imported_modules(file, source)} & set(ROOMS)
    below = [room for room in rooms if ROOMS.index(room) > ROOMS.index(own) and (own, room) not in UPWARD]
    return sorted(below)


@pytest.mark.parametrize("file", FILES, ids=str)
def test_nothing_is_imported_upward(file):
    assert rooms_imported_upward(file, (ROOT / file).read_text(encoding="utf-8")) == []


def test_every_mutation_can_be_made():
    """Each is told by what stands in a file, once."""
    counts = {(name, before): (ROOT / name).read_text().count(before) for name, before, *_ in MUTATIONS}
    assert {mutation: count for mutation, count in counts.items() if count != 1} == {}


def test_every_file_is_in_a_room():
    """And what may be imported upward is: an exception that is no longer needed goes."""
    files = {path.stem for path in ROOT.glob("*.py")} - {"__init__"}
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert files | folders == set(ROOMS)
    for own, room in UPWARD:
        source = (ROOT / f"{own}.py").read_text(encoding="utf-8")
        assert room in imported_modules(Path(f"{own}.py"), source), f"{own} does not import {room} any more"


@pytest.mark.parametrize(
    "file, source, found",
    [
        ("conversion/a.py", "from ..training import data", ["training"]),
        ("conversion/a.py", "def f():\n    from ..training.data import pack", ["training"]),
        ("conversion/a.py", "import attnres.cli", ["cli"]),
        ("conversion/inside/a.py", "from ...benchmarks.twin import bench", ["benchmarks"]),
        ("hub.py", "from . import cli, outputs", ["cli"]),
        ("hub.py", "from attnres.inspection import inspect", ["inspection"]),
        ("hub.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .cli import app", []),
        ("training/a.py", "from . import data\nfrom ..conversion import convert\nimport json", []),
    ],
)
def test_that_the_test_sees_imports(file, source, found):
    assert rooms_imported_upward(Path(file), source) == found
