# SPDX-License-Identifier: Apache-2.0
"""The rooms of the package and their floors: a picture of who imports whom, and a list of all files.

    python tests/tools/rooms.py    # writes docs/rooms.svg, and the list into docs/architecture.md

A room is a folder, or a file at the root. It may import rooms on the floors below its own, and nothing else.
"""

import ast
from collections.abc import Iterator
from pathlib import Path


ROOT = Path(__file__).parents[2]
PICTURE, PAGE = ROOT / "docs/rooms.svg", ROOT / "docs/architecture.md"
# Around the list of files in the page
START, END = "<!-- Made by tests/tools/rooms.py -->\n", "<!-- End -->\n"
# From the lowest
FLOORS = (
    ("depth", "utils"),
    ("base", "data"),
    ("configuration_attnres", "checkpoints", "registration"),
    ("modeling_attnres", "eval", "inspection", "benchmarks"),
    ("multimodal_attnres", "model_cards", "parallel", "serving"),
    ("conversion", "training"),
    ("cli", "studies"),
    ("__main__",),
)
ROOMS = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# What is imported when it is first needed, by a room below
EXCEPTIONS = {
    ("configuration_attnres", "checkpoints"): "a config is saved with the code, which is computed in the package",
    ("modeling_attnres", "model_cards"): "`push_to_hub` writes a card where the package is installed",
}


def python_files() -> list[Path]:
    """All of the repository, relative to its root, those of environments and builds left out."""
    places = [path for path in ROOT.iterdir() if path.name[0] != "." and path.name not in ("build", "site")]
    found = [file for place in places for file in (place.rglob("*.py") if place.is_dir() else [place])]
    return sorted(file.relative_to(ROOT) for file in found if file.suffix == ".py")


def files() -> list[Path]:
    """Those of the rooms."""
    return [path for path in python_files() if room_of(path) in ROOMS]


def module_of(file: Path) -> str:
    """Its name in the package, such as `conversion.parity`."""
    return ".".join(file.with_suffix("").parts).removesuffix(".__init__")


def docstring_lines(node: ast.FunctionDef) -> int:
    first = node.body[0]
    is_text = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )
    return first.end_lineno - first.lineno + 1 if is_text else 0


def room_of(file: Path) -> str:
    return file.parts[0].removesuffix(".py")


def _is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _nodes_that_run(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes, those in functions included, without what only type checkers read."""
    for node in ast.iter_child_nodes(tree):
        if not _is_for_type_checkers(node):
            yield node
            yield from _nodes_that_run(node)


def imported_modules(file: Path, source: str) -> set[str]:
    """Names of modules of the package and of `studies`, such as `conversion.parity`."""
    package = list(file.parts[:-1])
    found = []
    for node in _nodes_that_run(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            found += [
                name[1:] if name[0] == "attnres" else name for name in names if name[0] in ("attnres", "studies")
            ]
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").split(".")
            if node.level:
                module = [*package[: len(package) - node.level + 1], *module]
            elif module[0] == "attnres":
                module = module[1:]
            elif module[0] != "studies":
                continue
            module = [part for part in module if part]
            # `from . import name` may name modules
            found += [module] if module else [[alias.name] for alias in node.names]
    return {".".join(module) for module in found if module}


def imported_rooms(file: Path, source: str) -> set[str]:
    """The other rooms that a file imports."""
    rooms = {module.split(".")[0] for module in imported_modules(file, source)}
    return {room for room in rooms if room in ROOMS and room != room_of(file)}


def arrows() -> dict[tuple[str, str], int]:
    """By room and imported room, the number of files that import it."""
    counts: dict[tuple[str, str], int] = {}
    for file in files():
        for room in imported_rooms(file, (ROOT / file).read_text(encoding="utf-8")):
            counts[room_of(file), room] = counts.get((room_of(file), room), 0) + 1
    return dict(sorted(counts.items()))


WIDTH, HEIGHT, BOX, GAP = 860, 96, (150, 40), 24


def _box(room: str) -> tuple[float, float]:
    """The upper left corner."""
    rooms = FLOORS[ROOMS[room]]
    row = len(rooms) * BOX[0] + (len(rooms) - 1) * GAP
    left = 40 + (WIDTH - 40 - row) / 2 + rooms.index(room) * (BOX[0] + GAP)
    return left, 16 + (len(FLOORS) - 1 - ROOMS[room]) * HEIGHT


def picture() -> str:
    """The floors as SVG: a line for each arrow, as thick as the number of files that import."""
    total = len(FLOORS) * HEIGHT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {total}" font-family="sans-serif">',
        "<style>text{fill:#1a1a1a;font-size:13px}.n{fill:#777;font-size:11px}rect{fill:#fff;stroke:#0072b2}"
        ".band{fill:#f4f6f8;stroke:none}path{fill:none;stroke:#d55e00;stroke-opacity:.35}"
        "@media(prefers-color-scheme:dark){text{fill:#eee}rect{fill:#1e2329}.band{fill:#14181c}}</style>",
    ]
    for floor in range(len(FLOORS)):
        top = 4 + (len(FLOORS) - 1 - floor) * HEIGHT
        lines.append(f'<rect class="band" x="0" y="{top}" width="{WIDTH}" height="{BOX[1] + 24}"/>')
        lines.append(f'<text class="n" x="10" y="{top + 36}">{floor + 1}</text>')
    for (room, imported), count in arrows().items():
        if (room, imported) in EXCEPTIONS:
            continue
        (x1, y1), (x2, y2) = _box(room), _box(imported)
        x1, x2, y1 = x1 + BOX[0] / 2, x2 + BOX[0] / 2, y1 + BOX[1]
        middle = (y1 + y2) / 2
        width = min(4.0, 0.8 + 0.25 * count)
        lines.append(
            f'<path d="M{x1:.0f} {y1:.0f}C{x1:.0f} {middle:.0f} {x2:.0f} {middle:.0f} {x2:.0f} {y2:.0f}"'
            f' stroke-width="{width:g}"><title>{room} imports {imported}: {count} files</title></path>'
        )
    for room in ROOMS:
        left, top = _box(room)
        name = room if (ROOT / f"{room}.py").exists() else f"{room}/"
        lines.append(f'<rect x="{left:.0f}" y="{top:.0f}" width="{BOX[0]}" height="{BOX[1]}" rx="6"/>')
        lines.append(f'<text x="{left + BOX[0] / 2:.0f}" y="{top + 25:.0f}" text-anchor="middle">{name}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def first_line(file: Path) -> str:
    """Of its docstring, which says what it is."""
    return (ast.get_docstring(ast.parse((ROOT / file).read_text(encoding="utf-8"))) or "").split("\n")[0]


def list_of_files() -> str:
    """Every file of the package with its first line, room by room, from the lowest floor up. In Markdown."""
    lines = []
    for floor, of_floor in enumerate(FLOORS, start=1):
        lines += [f"Floor {floor}", ""]
        for room in of_floor:
            if room == "studies":
                lines.append("- `studies/`: What was found out about AttnRes models, a folder for each question.")
                continue
            inside = [file for file in files() if room_of(file) == room]
            entries = {file: first_line(file) for file in inside}
            if len(inside) == 1 and len(inside[0].parts) == 1:
                lines.append(f"- `{inside[0]}`: {entries[inside[0]]}")
                continue
            own = Path(room, "__init__.py")
            lines.append(f"- `{room}/`: {entries.pop(own)}")
            lines += [f"    - `{file.relative_to(room).as_posix()}`: {text}" for file, text in entries.items()]
        lines.append("")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The page with the list of today."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    return f"{before}{START}\n{list_of_files()}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
    print(f"Wrote {PICTURE.relative_to(ROOT)} and {PAGE.relative_to(ROOT)}")
