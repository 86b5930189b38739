# SPDX-License-Identifier: Apache-2.0
"""The house is as `docs/architecture.md` says: every file is in a room, and imports from the floors below alone."""

import ast
import graphlib
from pathlib import Path

import pytest
import rooms
from mutations import MUTATIONS
from rooms import (
    EXCEPTIONS,
    FLOORS,
    PAGE,
    PICTURE,
    ROOMS,
    ROOT,
    files,
    imported_modules,
    imported_rooms,
    page,
    picture,
    room_of,
)


def rooms_not_below(file: Path, source: str) -> list[str]:
    own = room_of(file)
    found = imported_rooms(file, source)
    return sorted(room for room in found if ROOMS[room] >= ROOMS[own] and (own, room) not in EXCEPTIONS)


@pytest.mark.parametrize("file", files(), ids=str)
def test_arrows_go_down(file):
    assert rooms_not_below(file, (ROOT / file).read_text(encoding="utf-8")) == []


def test_no_circles():
    """Nor among the files of a room, whatever is imported when it is first needed included."""
    sources = {rooms.module_of(file): (file, (ROOT / file).read_text(encoding="utf-8")) for file in files()}
    imported = {
        module: {name for name in imported_modules(file, source) if name in sources}
        for module, (file, source) in sources.items()
        if "sandbox/inside" not in file.as_posix()  # programs of their own
    }
    for own, room in EXCEPTIONS:
        for module in [name for name in imported if name.split(".")[0] == own]:
            imported[module] = {name for name in imported[module] if name.split(".")[0] != room}
    graphlib.TopologicalSorter(imported).prepare()  # raises a `CycleError` that names one


def test_every_file_is_in_a_room():
    """And an exception that is no longer needed goes."""
    at_root = {path.stem for path in ROOT.glob("*.py")} - {"__init__"}
    folders = {path.parts[0] for path in rooms.python_files() if len(path.parts) > 1} - {"tests", "docs"}
    assert at_root | folders == set(ROOMS)
    assert len(list(ROOT.glob("*.py"))) <= 8
    for own, room in EXCEPTIONS:
        of_room = [file for file in files() if room_of(file) == own]
        assert any(room in imported_rooms(file, (ROOT / file).read_text(encoding="utf-8")) for file in of_room)


def test_picture_and_list_are_true():
    assert PICTURE.read_text(encoding="utf-8") == picture(), "run tests/tools/rooms.py"
    assert PAGE.read_text(encoding="utf-8") == page(), "run tests/tools/rooms.py"


def test_every_mutation_can_be_made():
    """Each is told by what stands in a file, once."""
    counts = {(name, before): (ROOT / name).read_text().count(before) for name, before, *_ in MUTATIONS}
    assert {mutation: count for mutation, count in counts.items() if count != 1} == {}


def test_nothing_is_too_large():
    """Classes of 25 methods, functions of 60 lines and 10 parameters. A command may have an option more."""
    found = []
    for file in files():
        if room_of(file) == "studies":
            continue
        for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                methods = [child for child in node.body if isinstance(child, ast.FunctionDef)]
                if len(methods) > 25:
                    found.append(f"{file}: class {node.name} has {len(methods)} methods")
            elif isinstance(node, ast.FunctionDef):
                arguments = node.args
                parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
                parameters = [a for a in parameters if a.arg not in ("self", "cls")]
                is_command = room_of(file) == "cli"
                length = node.end_lineno - node.lineno + 1 - rooms.docstring_lines(node)
                # Kernels cannot be divided, and are given every address and size
                if is_command or "jit" in ast.dump(ast.Tuple(node.decorator_list)):
                    continue
                if length > 60:
                    found.append(f"{file}: {node.name} has {length} lines")
                if len(parameters) > 10:
                    found.append(f"{file}: {node.name} has {len(parameters)} parameters")
    assert found == []


@pytest.mark.parametrize(
    "file, source, found",
    [
        ("eval/a.py", "from ..training import data", ["training"]),
        ("eval/a.py", "def f():\n    from ..training.data import pack", ["training"]),
        ("eval/a.py", "import attnres.cli", ["cli"]),
        ("eval/inside/a.py", "from ...benchmarks.twin import bench", ["benchmarks"]),
        ("registration.py", "from . import cli, utils", ["cli"]),
        ("registration.py", "from attnres.inspection import inspect", ["inspection"]),
        ("registration.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .cli import app", []),
        ("training/a.py", "from . import data\nfrom ..eval import evaluate\nimport json", []),
        ("training/a.py", "from studies.common import runs", ["studies"]),
    ],
)
def test_that_the_test_sees_imports(file, source, found):
    assert rooms_not_below(Path(file), source) == found


def test_floors_have_every_room_once():
    assert len(ROOMS) == sum(map(len, FLOORS))
