# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The commands that train models: from scratch, or from a checkpoint."""

from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from .checks import need_run
from .console import console, json_option, note, print_json, say, say_written, working


RunFile = Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="Fields of the run; see training/configs.")]
RunFields = Annotated[list[str] | None, typer.Argument(metavar="FIELD=VALUE", help="Override fields of the file.")]
RunJson = Annotated[bool, json_option("trainable_parameters, query_learning_rate, losses, explanation and wrote")]


class InterruptedRun(SystemExit):
    """The end of a program that has said that it was interrupted."""

    is_said = True


def finetune(
    config: RunFile,
    fields: RunFields = None,
    show_batch: Annotated[
        bool, typer.Option("--show-batch", help="Print the first batch, mark the tokens to learn, and do not train.")
    ] = False,
    as_json: RunJson = False,
):
    """Fine-tune a checkpoint: all of it, LoRA and the depth queries, or only the queries.

    Run the same command again to resume an interrupted run.
    """
    if show_batch and as_json:
        raise typer.BadParameter("--show-batch is for people to read: leave --json out.")
    try:
        if show_batch:
            _show_batch(config, fields)
        else:
            _train("finetune", config, fields, as_json)
    except KeyboardInterrupt:
        _say_interrupted("" if show_batch else " Run the same command again, and it goes on.")


def pretrain(
    config: RunFile,
    fields: RunFields = None,
    as_json: RunJson = False,
):
    """Train a model from scratch, or continue with a checkpoint, in one process or over the stages of a pipeline.

    Run the same command again to resume an interrupted run.
    """
    try:
        _train("pretrain", config, fields, as_json)
    except KeyboardInterrupt:
        _say_interrupted(" Run the same command again, and it goes on.")


def _say_interrupted(again: str) -> NoReturn:
    Console(stderr=True).print(f"\nInterrupted.{again}", highlight=False, soft_wrap=True)  # below a progress bar
    raise InterruptedRun(130) from None


def _overrides(fields: list[str] | None) -> dict[str, Any]:
    from ..utils.untrusted import parse_yaml

    overrides = {}
    for field in fields or []:
        name, equals, value = field.partition("=")
        if not equals:
            raise typer.BadParameter(f"`{field}` is not of the form field=value.")
        overrides[name] = parse_yaml(value, f"`{field}`")
    return overrides


def _is_first_process() -> bool:
    """Of several processes the first one tells."""
    from ..utils.devices import is_first_process

    return is_first_process()


def _show_batch(config: Path, fields: list[str] | None):
    overrides = _overrides(fields)
    need_run("finetune", config, overrides)
    from .. import training

    batch = training.show_batch(config, overrides)
    if _is_first_process():
        console.print(batch, soft_wrap=True)


def _train(kind: str, config: Path, fields: list[str] | None, as_json: bool):
    overrides = _overrides(fields)
    with working(as_json):
        need_run(kind, config, overrides)
        from .. import training

        result = getattr(training, kind)(config, overrides)
    if not _is_first_process():
        return
    wrote = (result.folder, *result.files)
    if as_json:
        of_run = {name: getattr(result, name) for name in ("trainable_parameters", "query_learning_rate", "losses")}
        print_json({**of_run, "explanation": result.explanation}, wrote)
        return
    say(f"Trained {result.trainable_parameters:,} parameters.")
    if result.query_learning_rate is not None:
        say(f"Peak learning rate of the depth queries: {result.query_learning_rate:g}")
    if len(result.losses) > 1:
        say(f"Held-out loss: {result.losses[0]:.4f} before, {result.losses[-1]:.4f} after")
    else:  # with `eval_on_start: false`
        say(f"Held-out loss: {result.losses[-1]:.4f}")
    if result.explanation is not None:
        note("Note:", result.explanation)
    say_written(wrote)
