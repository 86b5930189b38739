# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The commands that train models: from scratch, or from a checkpoint."""

from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from ..data.location import check_rows
from ..utils.files import check_destination, check_writable
from .checks import need_config, need_packages, need_run
from .console import Verbosity, console, json_option, note, print_json, say, say_written, set_verbosity, working


def show_fields(context: typer.Context, wanted: bool):
    if wanted:
        set_verbosity(Verbosity.NORMAL)
        need_packages(context.info_name)
        from ..training.fields import fields_table

        console.print(fields_table(context.info_name))
        raise typer.Exit


def write_init(context: typer.Context, file: Path | None):
    if file is not None:
        set_verbosity(Verbosity.NORMAL)
        need_packages(context.info_name)
        from ..training.fields import write_starting_file

        write_starting_file(context.info_name, file)
        say_written([file])
        raise typer.Exit


RunFile = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG.yaml", help="Read the fields of the run from this file, or from one that comes with attnres."
    ),
]
RunFields = Annotated[list[str] | None, typer.Argument(metavar="FIELD=VALUE", help="Override fields of the file.")]
ShowFields = Annotated[
    bool, typer.Option("--fields", callback=show_fields, is_eager=True, help="Show all fields with their defaults.")
]
Init = Annotated[
    Path | None,
    typer.Option(
        "--init", metavar="FILE", callback=write_init, is_eager=True, help="Write a commented file of a run to edit."
    ),
]
RunJson = Annotated[bool, json_option("trainable_parameters, query_learning_rate, losses, explanation and wrote")]


def tokenizer(
    sources: Annotated[
        list[str],
        typer.Argument(metavar="DATA", help="Learn from these files or folders (text, JSONL, Parquet), or Hub ids."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Write the tokenizer to this folder.")] = Path(
        "tokenizer"
    ),
    vocab_size: Annotated[int, typer.Option(min=257, help="Make at most this many tokens.")] = 32_000,
    like: Annotated[
        str | None,
        typer.Option(help="Keep the rules and special tokens of this tokenizer, a folder or a Hub id."),
    ] = None,
    text_column: Annotated[str, typer.Option(help="Read the text from this column.")] = "text",
    as_json: Annotated[bool, json_option("vocab_size, bytes_per_token and wrote")] = False,
):
    """Train a tokenizer (byte-level BPE) on your texts, for a model that you train from scratch."""
    with working(as_json):
        need_packages("tokenizer")
        for source in sources:
            check_rows(source)
            check_destination(output, source)
        check_writable(output)
        from ..training.tokenizer import train_tokenizer

        made = train_tokenizer(sources, output, vocab_size, like, text_column)
    if as_json:
        print_json({"vocab_size": made.vocab_size, "bytes_per_token": made.bytes_per_token}, [output])
        return
    say(f"{made.vocab_size:,} tokens, {made.bytes_per_token:.2f} bytes of the text per token")
    if made.vocab_size < vocab_size:
        note("Note:", f"The text has no more than {made.vocab_size:,} tokens to learn.")
    say_written([output])


class InterruptedRun(SystemExit):
    """The end of a program that has said that it was interrupted."""

    is_said = True


def finetune(
    config: RunFile,
    fields: RunFields = None,
    show_fields: ShowFields = False,
    init: Init = None,
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
        _say_interrupted("" if show_batch else " Run the same command again to resume.")


def pretrain(
    config: RunFile,
    fields: RunFields = None,
    show_fields: ShowFields = False,
    init: Init = None,
    as_json: RunJson = False,
):
    """Train a model from scratch, or continue with a checkpoint, in one process or over the stages of a pipeline.

    Run the same command again to resume an interrupted run.
    """
    try:
        _train("pretrain", config, fields, as_json)
    except KeyboardInterrupt:
        _say_interrupted(" Run the same command again to resume.")


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
    config = need_config("finetune", config)
    need_run("finetune", config, overrides)
    from .. import training

    batch = training.show_batch(config, overrides)
    if _is_first_process():
        console.print(batch, soft_wrap=True)


def _train(kind: str, config: Path, fields: list[str] | None, as_json: bool):
    overrides = _overrides(fields)
    config = need_config(kind, config)
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
