# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The commands that run other programs with AttnRes models: transformers' chat, and any program."""

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from .checks import need_checkpoint, need_packages


def chat(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="Talk to the model in this folder or Hub id, AttnRes or not.")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME=VALUE", help="Generate with these settings, such as max_new_tokens=100."),
    ] = None,
    system_prompt: Annotated[str | None, typer.Option(help="Begin every conversation with this message.")] = None,
    device: Annotated[str, typer.Option(help="Run the model here: auto, cpu, cuda:0 ...")] = "auto",
    dtype: Annotated[str, typer.Option(help="Run the model in this dtype; auto is that of the checkpoint.")] = "auto",
):
    """Talk to a model in the terminal, in transformers' own chat: !help lists what it takes, !exit ends it."""
    need_checkpoint(checkpoint, None)
    need_packages("chat")
    from ..serving.chat import chat

    chat(checkpoint, settings or [], system_prompt, device, dtype)


def run(
    program: Annotated[
        str, typer.Argument(metavar="PROGRAM", help="Run this program, this Python file or, with -m, a module.")
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGS", help="Pass these arguments to the program. After -m, the first is the module."),
    ] = None,
):
    """Run a program that knows AttnRes checkpoints: attnres is imported in it, and in every Python that it starts.

    Put -- before PROGRAM. Exit code and signals are the program's.
    """
    words = [program, *(arguments or [])]
    if program == "-m" or program.endswith(".py"):
        words = [sys.executable, *words]
    # Of the environment that attnres is in first, which need not be active
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    found = shutil.which(words[0], path=path)
    if found is None:
        raise FileNotFoundError(f"There is no program `{program}`: no file of this name, and none on the PATH.")
    folders = [str(Path(__file__).parent / "every_python"), *filter(None, [os.environ.get("PYTHONPATH")])]
    sys.stdout.flush()
    # By its path, as Python finds its environment by that
    os.execve(found, [found, *words[1:]], {**os.environ, "PYTHONPATH": os.pathsep.join(folders)})
