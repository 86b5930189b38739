# Copyright 2026 The attnres authors.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""The `attnres` program."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape


app = typer.Typer(
    help="Attention Residuals for transformers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def attnres():
    """Attention Residuals for transformers."""


@app.command()
def demo(
    model: Annotated[
        str | None,
        typer.Option(help="Checkpoint to use, a folder or a Hub id. By default a small Qwen3 is trained first."),
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for the checkpoints.")] = Path("attnres-demo"),
    num_blocks: Annotated[int, typer.Option(min=1, help="Number of AttnRes blocks.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Training steps of the small model.")] = 1000,
):
    """Turn a PreNorm model into an AttnRes one and show that it computes the same. Offline, on a CPU, in minutes."""
    from .demo import run_demo

    run_demo(model=model, output=output, num_blocks=num_blocks, steps=steps)


def main():
    """Run the program; what the user can mend is one line and exit code 1, anything else a traceback."""
    try:
        app()
    except (ValueError, OSError) as error:
        Console(stderr=True).print(f"[bold red]Error:[/] {escape(str(error))}", highlight=False)
        sys.exit(1)


if __name__ == "__main__":
    main()
