# SPDX-License-Identifier: Apache-2.0
"""What all commands share: `--quiet`, `--verbose` and other options, results for people or as JSON, and errors."""

import contextlib
import enum
import functools
import inspect
import json
import logging
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from ..base.library_lookups import after_import


# rich leaves out the colours where the output is not a terminal
console = Console()


class Verbosity(enum.Enum):
    QUIET = enum.auto()
    NORMAL = enum.auto()
    VERBOSE = enum.auto()


_verbosity = Verbosity.NORMAL
VERBOSITY_OPTIONS = {
    "quiet": Annotated[bool, typer.Option("--quiet", help="Print only errors and the final result.")],
    "verbose": Annotated[bool, typer.Option("--verbose", help="Print the logs of transformers and other libraries.")],
}


def json_option(keys: str) -> Any:
    return typer.Option("--json", help=f"Print only JSON: an object with {keys}.")


Revision = Annotated[str | None, typer.Option(help="Use this branch, tag or commit of the Hub repository.")]
WroteJson = Annotated[bool, json_option("wrote")]


def say(line: str):
    """Print a line as it is. It is not wrapped, so that a path in it can be copied."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def note(label: str, line: str):
    """Print a line after a label that stands out."""
    console.print(f"[bold]{label}[/] {escape(line)}", highlight=False)


def show_markdown(text: str):
    """Print Markdown, rendered."""
    from rich.markdown import Markdown  # which takes a tenth of a second to import

    console.print(Markdown(text))


def say_written(paths: Iterable[Path]):
    """Print where the results are, at the end of a command."""
    for path in paths:
        say(f"Wrote {path}")


def with_verbosity(command: Callable) -> Callable:
    """The command with the options `--quiet` and `--verbose`, which are at the end of its help."""

    @functools.wraps(command)
    def run(*args, quiet: bool, verbose: bool, **kwargs):
        if quiet and verbose:
            raise typer.BadParameter("--quiet and --verbose contradict each other: leave one out.")
        set_verbosity(Verbosity.QUIET if quiet else Verbosity.VERBOSE if verbose else Verbosity.NORMAL)
        return command(*args, **kwargs)

    signature = inspect.signature(command)
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=annotation)
        for name, annotation in VERBOSITY_OPTIONS.items()
    ]
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *options])  # type: ignore
    run.__annotations__ = {**command.__annotations__, **VERBOSITY_OPTIONS}
    return run


def set_verbosity(verbosity: Verbosity):
    """Decide what this process prints besides results, and what libraries print as soon as they are imported."""
    global _verbosity
    _verbosity = verbosity
    if verbosity == Verbosity.QUIET or not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"  # a bar in a file is a line of carriage returns
    if verbosity == Verbosity.QUIET:
        logging.disable(logging.WARNING)
    level = "info" if verbosity == Verbosity.VERBOSE else "error"
    libraries = ("transformers", "datasets", "huggingface_hub")
    after_import({f"{name}.utils.logging": lambda log: getattr(log, f"set_verbosity_{level}")() for name in libraries})
    if verbosity != Verbosity.VERBOSE:
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
        if not sys.warnoptions:
            warnings.simplefilter("ignore")
        after_import(
            {
                "transformers.utils.logging": lambda log: log.disable_progress_bar(),
                "datasets.utils.tqdm": lambda bars: bars.disable_progress_bars(),
                "huggingface_hub.utils.tqdm": _keep_one_bar_of_downloads,
            }
        )


def _keep_one_bar_of_downloads(bars):
    """That of all bytes of a repository, and not those of its files."""
    for name in ("http_get", "xet_get", "snapshot_download.transfer"):
        bars.disable_progress_bars(f"huggingface_hub.{name}")


def is_verbose() -> bool:
    return _verbosity == Verbosity.VERBOSE


@contextlib.contextmanager
def working(as_json: bool = False) -> Iterator[None]:
    """Inside, what is printed is progress: with `--quiet` it is dropped, with `--json` it goes to standard error."""
    with contextlib.ExitStack() as stack:
        if _verbosity == Verbosity.QUIET:
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        elif as_json:
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield


def print_json(result: dict[str, Any], wrote: Iterable[Path] | None = None):
    """Print a result as JSON, with the paths that the command wrote to as `wrote` if it writes."""
    if wrote is not None:
        result = {**result, "wrote": [str(path) for path in wrote]}
    print(json.dumps(_in_json(result), indent=2, allow_nan=False))


def _in_json(value: Any) -> Any:
    """Numbers that JSON does not have become `null`, such as the loss of a run that has diverged."""
    if isinstance(value, dict):
        return {name: _in_json(item) for name, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_in_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def fail(message: str) -> NoReturn:
    """Print an error and end the program with exit code 1."""
    Console(stderr=True).print(f"[bold red]Error:[/] {escape(message)}", highlight=False, soft_wrap=True)
    sys.exit(1)
