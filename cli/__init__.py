# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The `attnres` program: all its commands with an example of each, and how it ends.

The commands are in `start.py`, `convert.py`, `train.py`, `measure.py`, `share.py` and `programs.py`. `console.py`
prints for all of them, `help.py` shows their help, and `checks.py` has what they check before anything that takes
seconds is imported.
"""

from collections.abc import Callable
from typing import Annotated

import typer

from ..utils.installation import how_to_install
from .console import fail, with_verbosity
from .convert import convert, export, import_, prune, revert, verify
from .help import Command, Group
from .measure import bench, eval_, explore, inspect, plan, report, scaling
from .programs import chat, run
from .share import card, push, serve
from .start import demo, env, families
from .train import finetune, pretrain, tokenizer


# What not every installation has, and the extra that brings it
OPTIONAL_MODULES = {
    "datasets": "train",
    "fastapi": "serving",
    "gradio": "demo",
    "lm_eval": "eval",
    "matplotlib": "eval",
    "openai": "serving",
    "peft": "train",
    "scipy": "eval",
    "statsmodels": "eval",
    "trl": "train",
    "uvicorn": "serving",
    "vllm": "vllm",
}


def show_version(wanted: bool):
    if wanted:
        from .. import __version__

        print(f"attnres {__version__}")
        raise typer.Exit


def attnres(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
):
    """Attention Residuals for transformers."""


# By panel of the help: the commands, in its order, with an example
COMMANDS: dict[str, dict[Callable, str]] = {
    "Start": {
        demo: "attnres demo --output attnres-demo",
        families: "attnres families llama qwen3_moe",
        env: "attnres env --json",
    },
    "Convert": {
        convert: "attnres convert Qwen/Qwen3-0.6B qwen3-attnres --num-blocks 8",
        revert: "attnres revert qwen3-attnres qwen3",
        verify: "attnres verify Qwen/Qwen3-0.6B qwen3-attnres",
        prune: "attnres prune qwen3-attnres qwen3-20-layers --drop 8 --text text.txt",
        import_: "attnres import fla-model attnres-model",
        export: "attnres export attnres-model fla-model --to fla",
    },
    "Train": {
        tokenizer: "attnres tokenizer texts -o my-tokenizer --vocab-size 16000",
        pretrain: "attnres pretrain pretrain.yaml max_steps=1000 output_dir=pretrained",
        finetune: "attnres finetune run.yaml max_steps=100 output_dir=run",
    },
    "Measure": {
        eval_: "attnres eval base tuned --suite quick --limit 100",
        report: "attnres report attnres-eval",
        inspect: "attnres inspect tuned --base base -o attnres-depth",
        explore: "attnres explore tuned base-attnres",
        bench: "attnres bench --shape tiny --variants 4,full --pairs 5",
        plan: "attnres plan qwen3-attnres --gpus 64 --tp 8 --pp 4",
        scaling: "attnres scaling run ladder.yaml -o attnres-scaling",
    },
    "Serve": {
        serve: "attnres serve qwen3-attnres --continuous-batching --port 8000",
        chat: "attnres chat qwen3-attnres max_new_tokens=100 --system-prompt 'Be brief.'",
        run: "attnres run -- trl sft --model_name_or_path qwen3-attnres --dataset_name data",
    },
    "Share": {
        card: "attnres card qwen3-attnres --base-model Qwen/Qwen3-0.6B",
        push: "attnres push qwen3-attnres user/qwen3-attnres --dry-run",
    },
}
# The options of an engine, and those of a program, go through
CONTEXT_SETTINGS: dict[Callable, dict[str, bool]] = {
    serve: {"allow_extra_args": True, "ignore_unknown_options": True},
    run: {"allow_interspersed_args": False},
}
app = typer.Typer(
    cls=Group,
    help="Attention Residuals for transformers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.callback()(attnres)
for panel, commands in COMMANDS.items():
    for command, example in commands.items():
        name = command.__name__.rstrip("_")  # `eval` and `import` are words of Python
        register = app.command(
            name,
            cls=Command,
            rich_help_panel=panel,
            epilog=f"Example: {example}",
            context_settings=CONTEXT_SETTINGS.get(command),
        )
        register(with_verbosity(command))


def main():
    """Run the program; what the user can mend is one line and exit code 1, anything else a traceback.

    `__main__.py`, which calls it, is for interruptions.
    """
    try:
        app(prog_name="attnres")
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL_MODULES:
            raise
        fail(f"{error.name} is not installed: {how_to_install(OPTIONAL_MODULES[error.name])}")
    except (ValueError, OSError) as error:
        fail(str(error))
