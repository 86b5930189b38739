# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The commands that make one checkpoint of another, and the one that tells whether two are the same function."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from .checks import need_checkpoint, need_checkpoints, need_destination, need_files, need_source
from .console import Revision, json_option, only_json_on_stdout, print_json, say, say_written, show_markdown


if TYPE_CHECKING:
    from ..conversion import ConversionReport


# The same words for the same things, whatever the command
Source = Annotated[str, typer.Argument(metavar="SRC", help="Checkpoint: a folder or a Hub id.")]
Destination = Annotated[Path, typer.Argument(metavar="DST", help="Folder to write; must not exist or be empty.")]
Link = Annotated[bool, typer.Option("--link", help="Hard links in place of copies of the weight files.")]
NoVerify = Annotated[bool, typer.Option("--no-verify", help="Do not run the models to compare them.")]
VerifyText = Annotated[
    Path | None, typer.Option(metavar="FILE", help="UTF-8 text to compare on, in place of the built-in one.")
]
# The panel of `--help` for reads over depth other than the paper's
READ = "Other reads over depth (default: as in the paper, or as SRC has it)"
SpreadDevice = Annotated[str, typer.Option(help="Where to run the models: auto, cpu, cuda:0 ...")]
ConversionJson = Annotated[bool, json_option("operation, source, destination, verification, notes and wrote")]


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Checkpoint: a folder, a Hub id or a GGUF file.")],
    destination: Destination,
    block_size: Annotated[int | None, typer.Option(min=1, help="Sublayers per block; a layer has two.")] = None,
    num_blocks: Annotated[int | None, typer.Option(min=1, help="Number of blocks. \\[default: 8]")] = None,
    full: Annotated[bool, typer.Option("--full", help="Full AttnRes: every sublayer is a block.")] = False,
    num_heads: Annotated[
        int | None, typer.Option(min=1, help="Heads of a read, each on its slice.", rich_help_panel=READ)
    ] = None,
    query: Annotated[
        Literal["learned", "input", "hybrid"] | None,
        typer.Option(help="A learned vector, a projection of the newest source, or both.", rich_help_panel=READ),
    ] = None,
    query_rank: Annotated[
        int | None, typer.Option(min=1, help="Rank of that projection. \\[default: whole]", rich_help_panel=READ)
    ] = None,
    weights: Annotated[
        Literal["softmax", "sigmoid", "softmax1"] | None,
        typer.Option(help="How scores become weights.", rich_help_panel=READ),
    ] = None,
    open_block: Annotated[
        Literal["sum", "each"] | None,
        typer.Option(help="What is read of the open block: its sum, or each output.", rich_help_panel=READ),
    ] = None,
    stream: Annotated[
        Literal["replaced", "kept"] | None,
        typer.Option(
            help="Whether what is read replaces the residual stream, or is added to it.", rich_help_panel=READ
        ),
    ] = None,
    revision: Revision = None,
    gguf_file: Annotated[str | None, typer.Option(metavar="NAME", help="A GGUF file in SRC.")] = None,
    link: Link = False,
    self_contained: Annotated[
        bool, typer.Option("--self-contained", help="Put the model code into the folder, for other programs.")
    ] = False,
    no_verify: NoVerify = False,
    verify_text: VerifyText = None,
    device: SpreadDevice = "auto",
    as_json: ConversionJson = False,
):
    """Turn a PreNorm checkpoint into an AttnRes one that computes the same, or change the blocks of one."""
    if (block_size is not None) + (num_blocks is not None) + full > 1:
        raise typer.BadParameter("--block-size, --num-blocks and --full contradict: give one of them.")
    with only_json_on_stdout(as_json):
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
    serve = f"To serve it: attnres serve {destination}"
    if (destination / "modeling_attnres.py").exists():
        hint = f"The model code is in the folder: what does not import attnres needs `trust_remote_code`. {serve}"
    elif report.model_type == "attnres_multimodal":
        from ..checkpoints.checkpoint import auto_class_of

        auto_class = auto_class_of(report.base_model_type).__name__
        hint = f"`import attnres` before loading it, with `{auto_class}`."
    else:
        hint = f"`import attnres` before loading it; for programs that do not: convert --self-contained. {serve}"
    show(report, destination, as_json, hint)


def revert(
    source: Source,
    destination: Destination,
    force: Annotated[
        bool, typer.Option("--force", help="Also if trained queries are lost; measures by how much.")
    ] = False,
    revision: Revision = None,
    link: Link = False,
    no_verify: NoVerify = False,
    verify_text: VerifyText = None,
    device: SpreadDevice = "auto",
    as_json: ConversionJson = False,
):
    """Give the PreNorm checkpoint back that an AttnRes one was made of, bit for bit."""
    with only_json_on_stdout(as_json):
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
    first: Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint: a folder or a Hub id.")],
    second: Annotated[str, typer.Argument(metavar="OTHER", help="Checkpoint: a folder or a Hub id.")],
    text: Annotated[
        Path | None,
        typer.Option(
            "--file", "--text", metavar="FILE", help="UTF-8 text to compare on, in place of the built-in one."
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="How much of the text to use.")] = 512,
    device: SpreadDevice = "auto",
    as_json: Annotated[bool, json_option("first, second, equal, first_difference, parities")] = False,
):
    """Tell whether two checkpoints are the same function, up to rounding. Exit code 1 if not."""
    with only_json_on_stdout(as_json):
        need_checkpoints([first, second])
        need_files([text])
        from ..conversion import verify

        report = verify(first, second, text=text, max_tokens=max_tokens, device=device)
    if as_json:
        print_json(report.to_dict())
    else:
        show_markdown(report.to_markdown())
    if not report.equal:
        raise typer.Exit(1)


def import_(source: Source, destination: Destination, revision: Revision = None, as_json: ConversionJson = False):
    """Make an AttnRes checkpoint of one in Kimi K3's naming or of flash-linear-attention."""
    with only_json_on_stdout(as_json):
        need_destination(destination, source)
        revision = need_checkpoint(source, revision)
        from ..conversion import import_checkpoint

        report = import_checkpoint(source, destination, revision=revision)
    show(report, destination, as_json)


def export(
    source: Source,
    destination: Destination,
    naming: Annotated[Literal["kimi", "fla"], typer.Option("--to", help="Whose naming.")],
    force: Annotated[bool, typer.Option("--force", help="Also where epsilons cannot be expressed there.")] = False,
    revision: Revision = None,
    as_json: ConversionJson = False,
):
    """Write an AttnRes checkpoint in Kimi K3's naming or for flash-linear-attention."""
    with only_json_on_stdout(as_json):
        need_destination(destination, source)
        revision = need_checkpoint(source, revision)
        from ..conversion import export_checkpoint

        report = export_checkpoint(source, destination, naming, force=force, revision=revision)
    show(report, destination, as_json)


def show(report: "ConversionReport", destination: Path, as_json: bool, hint: str | None = None):
    """Tell what a conversion did, and what to know before the checkpoint is loaded."""
    if as_json:
        print_json(report.to_dict(), [destination])
        return
    show_markdown(report.to_markdown())
    if hint is not None:
        say(hint)
    say_written([destination])
