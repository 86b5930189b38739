# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The `attnres` program."""

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.markup import escape


if TYPE_CHECKING:
    from .conversion import ConversionReport


app = typer.Typer(
    help="Attention Residuals for transformers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


console = Console()
# What not every installation has, and the extra that brings it
OPTIONAL_MODULES = {
    "datasets": "train",
    "lm_eval": "eval",
    "matplotlib": "eval",
    "peft": "train",
    "scipy": "eval",
    "statsmodels": "eval",
    "trl": "train",
}
# What results depend on
ENVIRONMENT = (
    "transformers",
    "torch",
    "triton",
    "flash-linear-attention",
    "accelerate",
    "peft",
    "datasets",
    "lm-eval",
)


class InterruptedRun(SystemExit):
    """The end of a program that has said that it was interrupted."""

    is_said = True


def show_version(wanted: bool):
    if wanted:
        from . import __version__

        print(f"attnres {__version__}")
        raise typer.Exit


@app.callback()
def attnres(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
):
    """Attention Residuals for transformers."""


@app.command()
def env():
    """Show versions, devices, and which code computes reads over depth on them and why."""
    import platform
    from importlib import metadata

    from . import __version__
    from .depth_backends import describe

    print(f"attnres {__version__}, Python {platform.python_version()}, {platform.platform()}")
    for package in ENVIRONMENT:
        try:
            print(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            print(f"{package} not installed")
    print("Reads over depth (ATTNRES_BACKEND chooses another way)")
    for line in describe():
        print(f"  {line}")


@app.command()
def demo(
    model: Annotated[
        str | None,
        typer.Option(help="Checkpoint to use, a folder or a Hub id. By default a small Qwen3 is trained first."),
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for the checkpoints.")] = Path("attnres-demo"),
    num_blocks: Annotated[int, typer.Option(min=1, help="Number of AttnRes blocks.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Training steps of the small model.")] = 500,
):
    """Turn a PreNorm model into an AttnRes one and show that it computes the same. Offline, on a CPU, in minutes."""
    from .demo import run_demo

    run_demo(model=model, output=output, num_blocks=num_blocks, steps=steps)


@app.command()
def families(
    types: Annotated[list[str] | None, typer.Argument(metavar="[TYPE]...", help="Model types. [default: all]")] = None,
    probe: Annotated[str | None, typer.Option(metavar="FOLDER_OR_ID", help="Look at a checkpoint's code.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the code that the checkpoint brings.")
    ] = False,
):
    """Show which decoders can be a base, or whether a checkpoint can: where its code reads and writes the stream."""
    from .families import describe_probe, read_decoder_config, survey_table

    if probe is not None:
        if types:
            raise typer.BadParameter("--probe looks at one checkpoint, and takes no model types.")
        for line in describe_probe(read_decoder_config(probe, revision, trust_remote_code)):
            print(line)
        return
    table, summary = survey_table(types)
    console.print(table)
    console.print(summary, highlight=False)


Source = Annotated[str, typer.Argument(metavar="SRC", help="Checkpoint: a folder or a Hub id.")]
Destination = Annotated[Path, typer.Argument(metavar="DST", help="Folder to write; must not exist or be empty.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.")]
Link = Annotated[bool, typer.Option("--link", help="Hard links in place of copies of the weight files.")]
NoVerify = Annotated[bool, typer.Option("--no-verify", help="Do not run the models to compare them.")]
VerifyText = Annotated[Path | None, typer.Option(help="UTF-8 text to compare on, in place of the built-in one.")]
Device = Annotated[str, typer.Option(help="Where to run the models: auto, cpu, cuda:0 ...")]


@app.command()
def convert(
    source: Source,
    destination: Destination,
    block_size: Annotated[int | None, typer.Option(min=1, help="Sublayers per block; a layer has two.")] = None,
    num_blocks: Annotated[int | None, typer.Option(min=1, help="Number of blocks. [default: 8]")] = None,
    full: Annotated[bool, typer.Option("--full", help="Full AttnRes: every sublayer is a block.")] = False,
    revision: Revision = None,
    link: Link = False,
    self_contained: Annotated[
        bool, typer.Option("--self-contained", help="Put the model code into the folder, see the last line.")
    ] = False,
    no_verify: NoVerify = False,
    verify_text: VerifyText = None,
    device: Device = "auto",
):
    """Turn a PreNorm checkpoint into an AttnRes one that computes the same, or change the blocks of one."""
    if (block_size is not None) + (num_blocks is not None) + full > 1:
        raise typer.BadParameter("--block-size, --num-blocks and --full contradict: give one of them.")
    from .conversion import convert

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
    )
    show(report, destination)
    if (destination / "modeling_attnres.py").exists():
        hint = "The model code is in the folder: programs without attnres, such as vLLM, need --trust-remote-code."
    elif report.model_type == "attnres_multimodal":
        hint = "`import attnres` before loading it, with `AutoModelForImageTextToText`."
    else:
        hint = "`import attnres` before loading it. For programs that do not, such as vLLM: convert --self-contained."
    console.print(hint, highlight=False, soft_wrap=True)


@app.command()
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
    device: Device = "auto",
):
    """Give the PreNorm checkpoint back that an AttnRes one was made of, bit for bit."""
    from .conversion import revert

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
    show(report, destination)


@app.command()
def verify(
    first: Annotated[str, typer.Argument(metavar="A", help="Checkpoint: a folder or a Hub id.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Checkpoint: a folder or a Hub id.")],
    text: Annotated[Path | None, typer.Option(help="UTF-8 text to compare on, in place of the built-in one.")] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="How much of the text to use.")] = 512,
    device: Device = "auto",
):
    """Tell whether two checkpoints are the same function, up to rounding. Exit code 1 if not."""
    from .conversion import verify

    report = verify(first, second, text=text, max_tokens=max_tokens, device=device)
    console.print(Markdown(report.to_markdown()))
    if not report.equal:
        raise typer.Exit(1)


@app.command("import")
def import_(source: Source, destination: Destination, revision: Revision = None):
    """Make an AttnRes checkpoint of one in Kimi K3's naming or of flash-linear-attention."""
    from .conversion import import_checkpoint

    show(import_checkpoint(source, destination, revision=revision), destination)


@app.command()
def export(
    source: Source,
    destination: Destination,
    naming: Annotated[Literal["kimi", "fla"], typer.Option("--to", help="Whose naming.")],
    force: Annotated[bool, typer.Option("--force", help="Also where epsilons cannot be expressed there.")] = False,
    revision: Revision = None,
):
    """Write an AttnRes checkpoint in Kimi K3's naming or for flash-linear-attention."""
    from .conversion import export_checkpoint

    show(export_checkpoint(source, destination, naming, force=force, revision=revision), destination)


@app.command("eval")
def eval_(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="The first is the baseline.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="For samples, tables, plots.")] = Path("attnres-eval"),
    suite: Annotated[str | None, typer.Option(help="paper, core, chat, quick, or a YAML file.")] = None,
    tasks: Annotated[str | None, typer.Option(help="Tasks of lm-eval, separated by commas.")] = None,
    peft: Annotated[str | None, typer.Option(help="Adapter on the last model.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Documents per task, to try things out.")] = None,
    batch_size: Annotated[str, typer.Option(help="A number, or auto.")] = "1",
    device: Annotated[str | None, typer.Option(help="cpu, cuda:0 ... [default: a GPU if there is one]")] = None,
    dtype: Annotated[str, typer.Option(help="auto is that of the checkpoint.")] = "auto",
    apply_chat_template: Annotated[
        bool,
        typer.Option(
            "--apply-chat-template", "--chat-template", help="Make the prompts conversations; chat implies it."
        ),
    ] = False,
    max_gen_toks: Annotated[
        int | None, typer.Option(min=1, help="Tokens that an answer may have. [default: by benchmark]")
    ] = None,
    no_samples: Annotated[bool, typer.Option("--no-samples", help="Keep scores alone, not the answers.")] = False,
    seed: Annotated[int, typer.Option(help="Of the examples in prompts and of the resampling.")] = 0,
    data_root: Annotated[Path | None, typer.Option(help="Folder with data sets named like the Hub's.")] = None,
    include_path: Annotated[Path | None, typer.Option(help="Folder with further tasks of lm-eval.")] = None,
    backend: Annotated[str, typer.Option(help="hf or vllm.")] = "hf",
    allow_code_execution: Annotated[
        bool, typer.Option("--allow-code-execution", help="Run programs that the models write, in a sandbox.")
    ] = False,
    prefetch: Annotated[bool, typer.Option("--prefetch", help="Only download models and data.")] = False,
):
    """Evaluate models with lm-eval and compare them with the first one. Exit code 3 if benchmarks were skipped."""
    from .eval import EvalModel, EvalOptions, evaluate
    from .eval import prefetch as fetch
    from .eval.report import cut_off_warnings, scores

    names = tasks.split(",") if tasks else []
    if prefetch:
        there, skipped = fetch(models, suite=suite, tasks=names)
        console.print(f"There now: {', '.join(there)}", highlight=False)
    else:
        described = [EvalModel(model) for model in models]
        if peft is not None:
            described[-1] = EvalModel(models[-1], peft=peft)
        options = EvalOptions(
            limit=limit,
            apply_chat_template=apply_chat_template,
            max_gen_toks=max_gen_toks,
            seed=seed,
            dtype=dtype,
            backend=backend,
        )
        results = evaluate(
            described,
            output,
            suite=suite,
            tasks=names,
            options=options,
            device=device,
            batch_size=int(batch_size) if batch_size.isdecimal() else batch_size,
            data_root=data_root,
            include_path=include_path,
            allow_code_execution=allow_code_execution,
            keep_samples=not no_samples,
            command=shlex.join(["attnres", *sys.argv[1:]]),
        )
        console.print(scores(results))
        for warning in cut_off_warnings(results):
            console.print(f"[yellow]Note:[/] {escape(warning)}", highlight=False)
        console.print(f"Wrote {output}/results.json, table.md, the samples and plots", highlight=False)
        skipped = results["skipped"]
    for name, reason in skipped.items():
        console.print(f"[yellow]Skipped[/] {escape(name)}: {escape(reason)}", highlight=False)
    if skipped:
        raise typer.Exit(3)


@app.command()
def finetune(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="Fields of the run; see training/configs.")],
    fields: Annotated[
        list[str] | None, typer.Argument(metavar="FIELD=VALUE...", help="In place of those of the file.")
    ] = None,
    show_batch: Annotated[
        bool, typer.Option("--show-batch", help="Print the first batch and what is learned in it; do not train.")
    ] = False,
):
    """Fine-tune a checkpoint: all of it, LoRA and the depth queries, or the queries alone. Run again, it resumes."""
    try:
        _finetune(config, fields, show_batch)
    except KeyboardInterrupt:
        again = "" if show_batch else " Run the same command again, and it goes on."
        Console(stderr=True).print(f"\nInterrupted.{again}", highlight=False, soft_wrap=True)  # below a progress bar
        raise InterruptedRun(130) from None


def _finetune(config: Path, fields: list[str] | None, show_batch: bool):
    import yaml

    from . import training

    overrides = {}
    for field in fields or []:
        name, equals, value = field.partition("=")
        if not equals:
            raise typer.BadParameter(f"`{field}` is not of the form field=value.")
        overrides[name] = yaml.safe_load(value)
    is_first = os.environ.get("RANK", "0") == "0"  # of several processes the first one tells
    if show_batch:
        batch = training.show_batch(config, overrides)
        if is_first:
            console.print(batch, soft_wrap=True)
        return
    result = training.finetune(config, overrides)
    if not is_first:
        return
    before, after = result.losses[0], result.losses[-1]
    console.print(f"Trained {result.trainable_parameters:,} parameters.", highlight=False)
    if result.query_learning_rate is not None:
        console.print(f"Peak learning rate of the depth queries: {result.query_learning_rate:g}", highlight=False)
    console.print(f"Held-out loss: {before:.4f} before, {after:.4f} after", highlight=False)
    if result.explanation is not None:
        console.print(f"[yellow]Note:[/] {escape(result.explanation)}", highlight=False)
    for path in (result.folder, *result.files):
        console.print(f"Wrote {path}", highlight=False)


@app.command()
def inspect(
    models: Annotated[list[str], typer.Argument(metavar="MODEL [OTHER]", help="One checkpoint, or two to compare.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="For figures, pictures and the page.")] = Path(
        "attnres-depth"
    ),
    text: Annotated[str | None, typer.Option(help="What to read, in place of the built-in text.")] = None,
    file: Annotated[Path | None, typer.Option(help="A UTF-8 text to read.")] = None,
    dataset: Annotated[str | None, typer.Option(help="Hub id, file (JSONL, Parquet, text) or folder to read.")] = None,
    dataset_config: Annotated[str | None, typer.Option(help="Configuration of a data set on the Hub.")] = None,
    split: Annotated[str | None, typer.Option(help="Split of a data set on the Hub. [default: train]")] = None,
    base: Annotated[str | None, typer.Option(help="PreNorm checkpoint to draw the stream of.")] = None,
    gradients: Annotated[bool, typer.Option("--gradients", help="Measure gradients over depth as well.")] = False,
    ablate: Annotated[
        bool, typer.Option("--ablate", help="Mask every source out at every site: what is it worth? On 512 tokens.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(min=2, help="How much of the text to read.")] = 10_000,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows of 512 tokens at a time.")] = 4,
    dtype: Annotated[str, typer.Option(help="auto is that of the checkpoint.")] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, cuda:0 ... [default: a GPU if there is one]")] = None,
):
    """Show what a model reads from where: depth weights over text, as pictures, a page and JSON."""
    from .inspection import inspect

    results = inspect(
        models,
        output,
        text=text,
        file=file,
        dataset=dataset,
        dataset_config=dataset_config,
        split=split,
        base=base,
        gradients=gradients,
        ablation=ablate,
        max_tokens=max_tokens,
        batch_size=batch_size,
        dtype=dtype,
        device=device,
    )
    for model in results["models"]:
        sites = [site for site in model["sites"] if len(site["weights"]) > 1]
        entropy = sum(site["relative_entropy"] for site in sites) / len(sites)
        newest = sum(site["predecessor_weight"] for site in sites) / len(sites)
        console.print(
            f"{model['model']}: {model['num_tokens']:,} tokens; entropy {entropy:.3f} of its maximum, weight of the"
            f" newest source {newest:.3f}",
            highlight=False,
        )
    pictures = "weights.png, profiles.png, ablation.png" if ablate else "weights.png, profiles.png"
    console.print(f"Wrote {output}/index.html, depth.json, {pictures} and the same as SVG", highlight=False)


@app.command()
def bench(
    output: Annotated[Path, typer.Option("--output", "-o", help="For figures, table and plot.")] = Path(
        "attnres-bench"
    ),
    shape: Annotated[str, typer.Option(help="qwen3-0.6b, llama-3.2-1b, qwen3-8b, tiny.")] = "qwen3-0.6b",
    variants: Annotated[str, typer.Option(help="Numbers of blocks, and full, separated by commas.")] = "8,4,full",
    cases: Annotated[
        str, typer.Option(help="decode-BATCH-KVLENGTH, prefill-LENGTH, train-LENGTH, separated by commas.")
    ] = "decode-1-64,prefill-512,train-512",
    layers: Annotated[int | None, typer.Option(min=1, help="Fewer layers, where the shape does not fit.")] = None,
    pairs: Annotated[int, typer.Option(min=1, help="Alternating pairs per case.")] = 25,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 ...")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda:0 ...")] = "cpu",
    compiled: Annotated[bool, typer.Option("--compile", help="With torch.compile as well.")] = False,
):
    """Measure AttnRes models against their PreNorm twin, alternating in one process."""
    from .benchmarks.twin import bench

    try:
        bench(
            output,
            shape=shape,
            variants=tuple(variants.split(",")),
            cases=tuple(cases.split(",")),
            layers=layers,
            pairs=pairs,
            dtype=dtype,
            device=device,
            compiled=compiled,
        )
    except KeyboardInterrupt:
        partial = output / "bench.partial.json"
        if partial.exists():
            console.print(f"What was measured is in {partial}; the same command goes on from there.", highlight=False)
        raise
    console.print(Markdown((output / "bench.md").read_text()))
    console.print(f"Wrote {output}/bench.json, bench.md, bench.png, bench.svg", highlight=False)


@app.command()
def report(folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of `attnres eval`.")]):
    """Write the tables and plots of finished evaluations anew, without running anything."""
    from .eval.report import rebuild

    for folder in folders:
        for path in rebuild(folder):
            console.print(f"Wrote {path}", highlight=False)


@app.command()
def card(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of an AttnRes checkpoint.")],
    base_model: Annotated[str | None, typer.Option(help="Hub id of the base, for the metadata.")] = None,
    repo_id: Annotated[str | None, typer.Option(help="Hub id of the checkpoint, for the examples.")] = None,
    evaluation: Annotated[Path | None, typer.Option(help="Folder of `attnres eval` with this checkpoint.")] = None,
):
    """Write the model card of a checkpoint anew; entries of its metadata are kept."""
    from .model_cards import write_model_card

    base_metadata = {"base_model": base_model} if base_model else None
    path = write_model_card(folder, base_metadata=base_metadata, repo_id=repo_id, evaluation=evaluation)
    console.print(f"Wrote {path}", highlight=False)


@app.command()
def push(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of an AttnRes checkpoint.")],
    repo_id: Annotated[str, typer.Argument(metavar="REPO_ID", help="user/name on the Hub.")],
    private: Annotated[bool, typer.Option("--private", help="Create the repository private.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be pushed, and what not.")] = False,
):
    """Put a checkpoint on the Hub, with the code that loads it where attnres is not installed."""
    from .hub import plan_push, push

    plan = plan_push(folder, repo_id)
    if dry_run:
        for name in sorted(plan.files):
            console.print(f"Would push {name}, {plan.num_bytes(name):,} bytes", highlight=False, markup=False)
    for name in plan.left_out:
        console.print(f"Left out {name}: it is not part of a checkpoint", highlight=False, markup=False)
    if not dry_run:
        commit = push(folder, repo_id, private=private)
        console.print(f"Pushed to {commit.repo_url}, commit {commit.oid}", highlight=False)


def show(report: "ConversionReport", destination: Path):
    console.print(Markdown(report.to_markdown()))
    console.print(f"Wrote {destination}", highlight=False)


def main():
    """Run the program; what the user can mend is one line and exit code 1, anything else a traceback.

    `__main__.py`, which calls it, is for interruptions.
    """
    try:
        app()
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL_MODULES:
            raise
        fail(f"{error.name} is not installed: pip install 'attnres[{OPTIONAL_MODULES[error.name]}]'")
    except (ValueError, OSError) as error:
        fail(str(error))


def fail(message: str):
    # Not wrapped: a path in it can be copied
    Console(stderr=True).print(f"[bold red]Error:[/] {escape(message)}", highlight=False, soft_wrap=True)
    sys.exit(1)


if __name__ == "__main__":
    from attnres.__main__ import main as main_quiet_when_interrupted

    main_quiet_when_interrupted()
