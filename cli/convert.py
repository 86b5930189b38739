# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The commands that convert checkpoints, and the one that checks whether two compute the same."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..utils.ranges import in_ranges, read_ranges
from .checks import need_checkpoint, need_checkpoints, need_destination, need_files, need_source
from .console import Revision, console, is_verbose, json_option, print_json, say, say_written, show_markdown, working


if TYPE_CHECKING:
    from ..conversion import ConversionReport, LayerCosts


# The same words for the same things, whatever the command
Source = Annotated[str, typer.Argument(metavar="SOURCE", help="Read the checkpoint from this folder or Hub id.")]
Destination = Annotated[
    Path, typer.Argument(metavar="OUTPUT", help="Write to this folder, which must not exist or must be empty.")
]
Link = Annotated[bool, typer.Option("--link", help="Make hard links to the weight files instead of copies.")]
NoVerify = Annotated[bool, typer.Option("--no-verify", help="Skip the comparison of the two models.")]
VerifyText = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Compare the models on this UTF-8 text instead of the built-in one."),
]
# The panel of `--help` for reads over depth other than the paper's
READ = "Other reads over depth (default: the paper's, or those of SOURCE)"
SpreadDevice = Annotated[str, typer.Option(help="Run the models on this device: auto, cpu, cuda:0 ...")]
ConversionJson = Annotated[bool, json_option("operation, source, destination, verification, notes and wrote")]


def convert(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="Read the checkpoint from this folder, Hub id or GGUF file.")
    ],
    destination: Destination,
    block_size: Annotated[
        int | None, typer.Option(min=1, help="Put this many sublayers into a block (most layers have two).")
    ] = None,
    num_blocks: Annotated[int | None, typer.Option(min=1, help="Make this many blocks. \\[default: 8]")] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Use Full AttnRes, in which every sublayer is a block.")
    ] = False,
    num_heads: Annotated[
        int | None,
        typer.Option(
            min=1, help="Read with this many heads, each on its slice of the hidden dimension.", rich_help_panel=READ
        ),
    ] = None,
    query: Annotated[
        Literal["learned", "input", "hybrid"] | None,
        typer.Option(
            help="Use a learned vector as the query, a projection of the newest source, or the sum of both.",
            rich_help_panel=READ,
        ),
    ] = None,
    query_rank: Annotated[
        int | None,
        typer.Option(min=1, help="Limit the rank of that projection. \\[default: full rank]", rich_help_panel=READ),
    ] = None,
    weights: Annotated[
        Literal["softmax", "sigmoid", "softmax1"] | None,
        typer.Option(help="Turn scores into weights with this function.", rich_help_panel=READ),
    ] = None,
    open_block: Annotated[
        Literal["sum", "each"] | None,
        typer.Option(help="Read the open block as one sum, or each of its outputs.", rich_help_panel=READ),
    ] = None,
    stream: Annotated[
        Literal["replaced", "kept"] | None,
        typer.Option(
            help="Replace the residual stream by what is read, or add it to the stream.", rich_help_panel=READ
        ),
    ] = None,
    revision: Revision = None,
    gguf_file: Annotated[str | None, typer.Option(metavar="NAME", help="Read this GGUF file in SOURCE.")] = None,
    link: Link = False,
    self_contained: Annotated[
        bool,
        typer.Option(
            "--self-contained", help="Add the model code to OUTPUT, for programs that do not import attnres."
        ),
    ] = False,
    no_verify: NoVerify = False,
    verify_text: VerifyText = None,
    device: SpreadDevice = "auto",
    as_json: ConversionJson = False,
):
    """Turn a PreNorm checkpoint into an equivalent AttnRes one, or change the blocks of an AttnRes one."""
    if (block_size is not None) + (num_blocks is not None) + full > 1:
        raise typer.BadParameter("--block-size, --num-blocks and --full contradict: give one of them.")
    with working(as_json):
        need_destination(destination, source)
        revision = need_source(source, gguf_file, revision)
        need_files([verify_text])
        from ..conversion import convert

        report = convert(
            source,
            destination,
            block_size=block_size,
            num_blocks=num_blocks,
            full=full,
            revision=revision,
            link=link,
            self_contained=self_contained,
            verify=not no_verify,
            verify_text=verify_text,
            device=device,
            gguf_file=gguf_file,
            num_heads=num_heads,
            query=query,
            query_rank=query_rank,
            weights=weights,
            open_block=open_block,
            stream=stream,
        )
    from ..base.config import has_own_classes

    # Encoders and encoder-decoders are not served
    can_serve = not has_own_classes(report.base_model_type or "")
    serve = f" To serve it: attnres serve {destination}" if can_serve else ""
    if (destination / "modeling_attnres.py").exists():
        hint = f"The model code is in the folder: programs that do not import attnres need `trust_remote_code`.{serve}"
    elif report.model_type == "attnres_multimodal":
        from ..checkpoints.checkpoint import auto_class_of

        auto_class = auto_class_of(report.base_model_type).__name__
        hint = f"Import attnres before you load it with `{auto_class}`."
    else:
        hint = f"Import attnres before you load it. For programs that do not: convert with --self-contained.{serve}"
    show(report, destination, as_json, hint)


def revert(
    source: Source,
    destination: Destination,
    force: Annotated[
        bool, typer.Option("--force", help="Revert even if trained queries are lost, and measure the difference.")
    ] = False,
    revision: Revision = None,
    link: Link = False,
    no_verify: NoVerify = False,
    verify_text: VerifyText = None,
    device: SpreadDevice = "auto",
    as_json: ConversionJson = False,
):
    """Recover the PreNorm checkpoint that an AttnRes one was made from, bit for bit."""
    with working(as_json):
        need_destination(destination, source)
        revision = need_checkpoint(source, revision)
        need_files([verify_text])
        from ..conversion import revert

        report = revert(
            source,
            destination,
            force=force,
            revision=revision,
            link=link,
            verify=not no_verify,
            verify_text=verify_text,
            device=device,
        )
    show(report, destination, as_json)


def verify(
    first: Annotated[str, typer.Argument(metavar="MODEL", help="Compare this checkpoint, a folder or a Hub id ...")],
    second: Annotated[str, typer.Argument(metavar="OTHER", help="... with this one.")],
    text: Annotated[
        Path | None,
        typer.Option(
            "--file", "--text", metavar="FILE", help="Compare on this UTF-8 text instead of the built-in one."
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Use at most this many tokens of the text.")] = 512,
    device: SpreadDevice = "auto",
    as_json: Annotated[bool, json_option("first, second, equal, first_difference, parities")] = False,
):
    """Check whether two checkpoints compute the same, up to rounding.

    The exit code is 1 if they do not.
    """
    with working(as_json):
        need_checkpoints([first, second])
        need_files([text])
        from ..conversion import verify

        report = verify(first, second, text=text, max_tokens=max_tokens, device=device)
    if as_json:
        print_json(report.to_dict())
    else:
        show_markdown(report.to_markdown())
        say(report.verdict)
    if not report.equal:
        raise typer.Exit(1)


def prune(
    source: Source,
    destination: Annotated[
        Path | None,
        typer.Argument(
            metavar="OUTPUT",
            help="Write the pruned checkpoint to this folder, which must not exist or must be empty."
            " \\[default: only measure]",
        ),
    ] = None,
    drop: Annotated[
        int | None,
        typer.Option(min=1, help="Leave out this many layers: the cheapest one, then the cheapest of the others ..."),
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(metavar="LAYERS", help="Keep these layers, such as 0-5,8-11. Layers named twice are repeated."),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            "--file", "--text", metavar="FILE", help="Measure on this UTF-8 text instead of the built-in one."
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Use at most this many tokens of the text.")] = 2048,
    batch_size: Annotated[int, typer.Option(min=1, help="Run this many windows of 512 tokens at a time.")] = 4,
    dtype: Annotated[
        str, typer.Option(help="Measure with weights in float32, bfloat16 ..., or with auto as they are saved.")
    ] = "auto",
    revision: Revision = None,
    link: Link = False,
    no_verify: NoVerify = False,
    device: Annotated[
        str | None, typer.Option(help="Run on this device: cpu, cuda:0 ... \\[default: a GPU if there is one]")
    ] = None,
    as_json: Annotated[
        bool,
        json_option(
            "loss, costs, layers, left_out, losses, num_tokens and wrote; with OUTPUT also operation, source,"
            " destination, verification and notes"
        ),
    ] = False,
):
    """Measure what each layer is worth, and write a checkpoint without the cheapest, or with the layers you choose."""
    if drop is not None and keep is not None:
        raise typer.BadParameter("--drop and --keep contradict: give one of them.")
    if destination is not None and drop is None and keep is None:
        raise typer.BadParameter("OUTPUT needs --drop or --keep: what should it leave out?")
    report, wrote = None, [] if destination is None else [destination]
    with working(as_json):
        layers = None if keep is None else read_ranges(keep)
        if destination is not None:
            need_destination(destination, source)
        revision = need_checkpoint(source, revision)
        need_files([text])
        from ..conversion import prune
        from ..conversion.pruning import measure_checkpoint
        from ..inspection.text import TextToRead
        from ..utils.devices import default_device

        device = device or default_device()
        read = TextToRead(file=text, max_tokens=max_tokens)
        costs, num_tokens = measure_checkpoint(
            source,
            read,
            drop=drop or 0,
            layers=layers,
            revision=revision,
            batch_size=batch_size,
            dtype=dtype,
            device=device,
        )
        if destination is not None:
            report = prune(
                source,
                destination,
                costs.layers,
                revision=revision,
                link=link,
                verify=not no_verify,
                verify_text=text,
                device=device,
            )
    if as_json:
        found = {} if report is None else report.to_dict()
        print_json({**found, **vars(costs), "num_tokens": num_tokens}, wrote)
        return
    show_costs(costs, f"{read.name} ({num_tokens:,} tokens)")
    if report is not None:
        say(report.verdict)
    say_written(wrote)


def show_costs(costs: "LayerCosts", text: str):
    """Print what each layer costs, and the loss before and after.

    Args:
        text: what it was measured on, in words.
    """
    if costs.costs:
        from rich.table import Table

        table = Table("layer", "loss without it alone", "left out as", box=None)
        for number, cost in enumerate(costs.costs):
            rise = "not possible" if cost is None else f"{cost:+.4f}"
            step = costs.left_out.index(number) + 1 if number in costs.left_out else ""
            table.add_row(str(number), rise, f"{step}")
        console.print(table)
    say(f"Loss on {text}: {costs.loss:.4f} nats per token with all layers")
    if costs.losses:
        say(f"With the layers {in_ranges(costs.layers)}: {costs.losses[-1]:.4f}")


def import_(source: Source, destination: Destination, revision: Revision = None, as_json: ConversionJson = False):
    """Convert a checkpoint of flash-linear-attention, or one with Kimi K3's names, to an AttnRes one."""
    with working(as_json):
        need_destination(destination, source)
        revision = need_checkpoint(source, revision)
        from ..conversion import import_checkpoint

        report = import_checkpoint(source, destination, revision=revision)
    show(report, destination, as_json)


def export(
    source: Source,
    destination: Destination,
    naming: Annotated[
        Literal["kimi", "fla"], typer.Option("--to", help="Write for flash-linear-attention, or with Kimi K3's names.")
    ],
    force: Annotated[
        bool, typer.Option("--force", help="Export even if the other format cannot express the epsilons.")
    ] = False,
    revision: Revision = None,
    as_json: ConversionJson = False,
):
    """Convert an AttnRes checkpoint for flash-linear-attention, or to Kimi K3's names."""
    with working(as_json):
        need_destination(destination, source)
        revision = need_checkpoint(source, revision)
        from ..conversion import export_checkpoint

        report = export_checkpoint(source, destination, naming, force=force, revision=revision)
    show(report, destination, as_json)


def show(report: "ConversionReport", destination: Path, as_json: bool, hint: str | None = None):
    """Print what a conversion did, and how to load the checkpoint."""
    if as_json:
        print_json(report.to_dict(), [destination])
        return
    with working():
        show_markdown(report.to_markdown() if is_verbose() else report.summary_in_markdown())
    say(report.verdict)
    with working():
        if hint is not None:
            say(hint)
    say_written([destination])
