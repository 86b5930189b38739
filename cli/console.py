# SPDX-License-Identifier: Apache-2.0
"""How the program speaks: options that several commands have, a result for people or as JSON, and errors."""

import contextlib
import json
import math
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape


# Without colours where it is not a terminal that is written to, as rich sees to
console = Console()


def json_option(keys: str) -> Any:
    return typer.Option("--json", help=f"Print only JSON: an object with {keys}.")


Revision = Annotated[str | None, typer.Option(help="Use this branch, tag or commit of the Hub repository.")]
WroteJson = Annotated[bool, json_option("wrote")]


def say(line: str):
    """Print a line as it is; not wrapped, so that a path in it can be copied."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def note(label: str, line: str):
    """Print a line behind a label that stands out."""
    console.print(f"[yellow]{label}[/] {escape(line)}", highlight=False)


def show_markdown(text: str):
    """Print Markdown as it looks."""
    from rich.markdown import Markdown  # which takes a tenth of a second to import

    console.print(Markdown(text))


def say_written(paths: Iterable[Path]):
    """The end of what a command says."""
    for path in paths:
        say(f"Wrote {path}")


@contextlib.contextmanager
def only_json_on_stdout(as_json: bool) -> Iterator[None]:
    """Inside, what is printed goes to standard error if the result is to be JSON, and otherwise where it goes."""
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield


def print_json(result: dict[str, Any], wrote: Iterable[Path] | None = None):
    """Print a result as JSON, with the paths of what was written under `wrote` if the command writes."""
    if wrote is not None:
        result = {**result, "wrote": [str(path) for path in wrote]}
    print(json.dumps(_in_json(result), indent=2, allow_nan=False))


def _in_json(value: Any) -> Any:
    """What JSON has no word for as what it has: the loss of a run that has diverged is `null`."""
    if isinstance(value, dict):
        return {name: _in_json(item) for name, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_in_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def fail(message: str) -> NoReturn:
    """Print an error and end the program with exit code 1."""
    Console(stderr=True).print(f"[bold red]Error:[/] {escape(message)}", highlight=False, soft_wrap=True)
    sys.exit(1)
