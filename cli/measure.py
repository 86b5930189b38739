# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The commands that measure models: their scores, what they read from where, and what they cost."""

import enum
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..utils.files import check_writable
from .checks import need_checkpoints, need_files, need_folders, need_packages
from .console import (
    WroteJson,
    console,
    json_option,
    note,
    only_json_on_stdout,
    print_json,
    say,
    say_written,
    show_markdown,
)


Device = Annotated[str | None, typer.Option(help="cpu, cuda:0 ... \\[default: a GPU if there is one]")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 ...; auto is that of the checkpoint.")]


def eval_(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="The first is the baseline.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="For samples, tables, plots.")] = Path("attnres-eval"),
    suite: Annotated[str | None, typer.Option(help="paper, core, chat, quick, offline, or a YAML file.")] = None,
    tasks: Annotated[str | None, typer.Option(help="Tasks of lm-eval, separated by commas.")] = None,
    peft: Annotated[str | None, typer.Option(help="Adapter on the last model.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Documents per task, to try things out.")] = None,
    batch_size: Annotated[str, typer.Option(help="A number, or auto.")] = "1",
    device: Device = None,
    dtype: Dtype = "auto",
    apply_chat_template: Annotated[
        bool,
        typer.Option(
            "--apply-chat-template", "--chat-template", help="Make the prompts conversations; chat implies it."
        ),
    ] = False,
    max_gen_toks: Annotated[
        int | None, typer.Option(min=1, help="Tokens that an answer may have. \\[default: by benchmark]")
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
    as_json: Annotated[
        bool, json_option("models, rows, skipped, as in results.json, and wrote; of a prefetch there, skipped")
    ] = False,
):
    """Evaluate models with lm-eval and compare them with the first one. Exit code 3 if benchmarks were skipped."""
    names = tasks.split(",") if tasks else []
    if prefetch:
        skipped = _prefetch(models, suite, names, as_json)
    else:
        settings = {
            "limit": limit,
            "apply_chat_template": apply_chat_template,
            "max_gen_toks": max_gen_toks,
            "seed": seed,
            "dtype": dtype,
            "backend": backend,
        }
        arguments = {
            "suite": suite,
            "tasks": names,
            "device": device,
            "batch_size": int(batch_size) if batch_size.isdecimal() else batch_size,
            "data_root": data_root,
            "include_path": include_path,
            "allow_code_execution": allow_code_execution,
            "keep_samples": not no_samples,
        }
        skipped = _evaluate(models, peft, output, settings, arguments, as_json)
    if skipped:
        raise typer.Exit(3)


def _prefetch(models: list[str], suite: str | None, tasks: list[str], as_json: bool) -> dict[str, str]:
    """Fetch and tell; what was skipped."""
    with only_json_on_stdout(as_json):
        need_packages("eval")
        from ..eval import prefetch

        there, skipped = prefetch(models, suite=suite, tasks=tasks)
    if as_json:
        print_json({"there": there, "skipped": skipped})
    else:
        console.print(f"There now: {', '.join(there)}", highlight=False, markup=False)
        _say_skipped(skipped)
    return skipped


def _evaluate(
    models: list[str],
    peft: str | None,
    output: Path,
    settings: dict[str, Any],
    arguments: dict[str, Any],
    as_json: bool,
) -> dict[str, str]:
    """Evaluate and tell; what was skipped.

    Args:
        settings: of `EvalOptions`.
        arguments: of `evaluate`.
    """
    with only_json_on_stdout(as_json):
        need_packages("eval", *(["vllm"] if settings["backend"] == "vllm" else []))
        need_checkpoints(models)
        need_folders([peft if peft is not None and peft.startswith((".", "/", "~")) else None])
        need_folders([arguments["data_root"], arguments["include_path"]])
        check_writable(output)
        from ..eval import EvalModel, EvalOptions, evaluate
        from ..eval.report import NAMES, answer_warnings, scores

        described = [EvalModel(model) for model in models]
        if peft is not None:
            described[-1] = EvalModel(models[-1], peft=peft)
        command = shlex.join(["attnres", *sys.argv[1:]])
        results = evaluate(described, output, options=EvalOptions(**settings), command=command, **arguments)
    wrote = [path for path in (*(output / name for name in NAMES), output / "models") if path.exists()]
    if as_json:
        print_json(results, wrote)
    else:
        if results["rows"]:
            console.print(scores(results))
        else:
            say("No benchmark was run.")
        for warning in answer_warnings(results):
            note("Note:", warning)
        _say_skipped(results["skipped"])
        say_written(wrote)
    return results["skipped"]


def _say_skipped(skipped: dict[str, str]):
    for name, reason in skipped.items():
        note("Skipped", f"{name}: {reason}")


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of `attnres eval`.")],
    as_json: WroteJson = False,
):
    """Write the tables and plots of finished evaluations again, without running anything."""
    with only_json_on_stdout(as_json):
        need_packages("report")
        need_folders(folders)
        from ..eval.report import rebuild

        wrote = []
        for folder in folders:
            written = rebuild(folder)
            wrote += written
            if not as_json:  # at once, as a later folder may be damaged
                say_written(written)
    if as_json:
        print_json({}, wrote)


def inspect(
    models: Annotated[list[str], typer.Argument(metavar="MODEL [OTHER]", help="One checkpoint, or two to compare.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="For figures, pictures and the page.")] = Path(
        "attnres-depth"
    ),
    text: Annotated[str | None, typer.Option(help="What to read, in place of the built-in text.")] = None,
    file: Annotated[Path | None, typer.Option(help="A UTF-8 text to read.")] = None,
    dataset: Annotated[str | None, typer.Option(help="Hub id, file (JSONL, Parquet, text) or folder to read.")] = None,
    dataset_config: Annotated[str | None, typer.Option(help="Configuration of a data set on the Hub.")] = None,
    split: Annotated[str | None, typer.Option(help="Split of a data set on the Hub. \\[default: train]")] = None,
    name: Annotated[
        list[str] | None, typer.Option(help="Name of a model in the pictures; repeat it for the second.")
    ] = None,
    base: Annotated[str | None, typer.Option(help="PreNorm checkpoint whose stream is drawn for comparison.")] = None,
    gradients: Annotated[bool, typer.Option("--gradients", help="Measure gradients over depth as well.")] = False,
    ablate: Annotated[
        bool, typer.Option("--ablate", help="Measure the loss without each source at each site, on 512 tokens.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(min=2, help="How much of the text to read.")] = 10_000,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows of 512 tokens at a time.")] = 4,
    dtype: Dtype = "auto",
    device: Device = None,
    as_json: Annotated[
        bool, json_option("models (each with model, num_tokens, relative_entropy, newest_source_weight) and wrote")
    ] = False,
):
    """Show what a model reads from where: depth weights over text, as pictures, a page and JSON."""
    with only_json_on_stdout(as_json):
        need_packages("inspect", *(["datasets"] if dataset is not None else []))
        need_checkpoints([*models, base])
        need_files([file])
        check_writable(output)
        from ..inspection import inspect

        results = inspect(
            models,
            output,
            names=name or None,
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
    summaries = [_summary(model) for model in results["models"]]
    pictures = ("weights", "profiles", "ablation") if ablate else ("weights", "profiles")
    wrote = [output / "index.html", output / "depth.json"]
    wrote += [output / f"{name}{suffix}" for name in pictures for suffix in (".png", ".svg")]
    if as_json:
        print_json({"models": summaries}, wrote)
        return
    for summary, model in zip(summaries, results["models"]):
        _say_summary(summary)
        if model["zero_queries"]:
            say("  All its queries are zero, so all sources of a read have equal weights, as in a PreNorm model.")
    say_written(wrote)


def _say_summary(summary: dict[str, Any]):
    console.print(
        f"{summary['model']}: {summary['num_tokens']:,} tokens; entropy {summary['relative_entropy']:.3f} of"
        f" its maximum, weight of the newest source {summary['newest_source_weight']:.3f}",
        highlight=False,
        markup=False,
    )


def _summary(model: dict[str, Any]) -> dict[str, Any]:
    """Means over the sites of an inspected model that have a choice."""
    sites = [site for site in model["sites"] if len(site["weights"]) > 1]
    return {
        "model": model["model"],
        "num_tokens": model["num_tokens"],
        "relative_entropy": sum(site["relative_entropy"] for site in sites) / len(sites),
        "newest_source_weight": sum(site["predecessor_weight"] for site in sites) / len(sites),
    }


def bench(
    output: Annotated[Path, typer.Option("--output", "-o", help="For figures, table and plot.")] = Path(
        "attnres-bench"
    ),
    shape: Annotated[
        str | None, typer.Option(help="qwen3-0.6b, llama-3.2-1b, qwen3-8b, tiny. \\[default: qwen3-0.6b]")
    ] = None,
    model: Annotated[str | None, typer.Option(help="A checkpoint, in place of a shape with random weights.")] = None,
    variants: Annotated[
        str, typer.Option(help="Numbers of blocks, or full, and fields of the read: 8,8:num_heads=4.")
    ] = "8,4,full",
    cases: Annotated[
        str, typer.Option(help="decode-BATCH-KVLENGTH, prefill-LENGTH, train-LENGTH, separated by commas.")
    ] = "decode-1-64,prefill-512,train-512",
    layers: Annotated[int | None, typer.Option(min=1, help="Fewer layers, where the shape does not fit.")] = None,
    pairs: Annotated[int, typer.Option(min=1, help="Alternating pairs per case.")] = 25,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 ...")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda:0 ...")] = "cpu",
    compiled: Annotated[bool, typer.Option("--compile", help="With torch.compile as well.")] = False,
    as_json: Annotated[bool, json_option("settings, machine, time, activations, peaks and wrote")] = False,
):
    """Measure AttnRes models against their PreNorm twin, alternating in one process."""
    try:
        with only_json_on_stdout(as_json):
            need_packages("bench")
            need_checkpoints([model])
            check_writable(output)
            from ..benchmarks.twin import bench

            results = bench(
                output,
                shape=shape,
                model=model,
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
            with only_json_on_stdout(as_json):
                say(f"What was measured is in {partial}; the same command goes on from there.")
        raise
    wrote = [output / f"bench{suffix}" for suffix in (".json", ".md", ".png", ".svg")]
    if as_json:
        print_json(results, wrote)
    else:
        show_markdown((output / "bench.md").read_text())
        say_written(wrote)


class ScalingStep(str, enum.Enum):
    run = "run"
    fit = "fit"
    plot = "plot"


def scaling(
    step: Annotated[ScalingStep, typer.Argument(help="Train the models, fit a law to their losses, or draw it.")],
    ladder: Annotated[Path | None, typer.Argument(help="YAML file of sizes, arms and data, for run.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="For the runs, the fit and the plot.")] = Path(
        "attnres-scaling"
    ),
    as_json: Annotated[bool, json_option("of fit: sizes, compute, seeds, baseline, arms, times; and wrote")] = False,
):
    """Train a ladder of small models, with and without AttnRes, and fit their losses. Run again, it resumes."""
    if (step == ScalingStep.run) != (ladder is not None):
        raise typer.BadParameter("run takes a YAML file of a ladder, and fit and plot take none.")
    with only_json_on_stdout(as_json):
        need_packages("scaling")
        need_files([ladder])
        check_writable(output)
        from ..training.scaling import fit_ladder, plot_ladder, run_ladder

        results: dict[str, Any] = {}
        if ladder is not None:
            wrote = run_ladder(ladder, output)
        elif step == ScalingStep.fit:
            results = fit_ladder(output)
            wrote = [output / "fit.json", output / "fit.md"]
        else:
            wrote = plot_ladder(output)
    if as_json:
        print_json(results, wrote)
        return
    if step == ScalingStep.fit:
        show_markdown((output / "fit.md").read_text())
    say_written(wrote)


def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint, of an AttnRes model or of a base.")],
    gpus: Annotated[int, typer.Option(min=1, help="Number of processes.")] = 1,
    tp: Annotated[int, typer.Option(min=1, help="Processes that share a layer.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Processes among which the layers are spread.")] = 1,
    stages_per_rank: Annotated[int, typer.Option(min=1, help="Stages of a pipeline in each process.")] = 1,
    schedule: Annotated[str, typer.Option(help="1F1B, GPipe, Interleaved1F1B ...")] = "1F1B",
    num_blocks: Annotated[int | None, typer.Option(min=1, help="Number of blocks of a base. \\[default: 8]")] = None,
    microbatches: Annotated[int, typer.Option(min=1, help="Of a step.")] = 8,
    microbatch_size: Annotated[int, typer.Option(min=1, help="Samples in one.")] = 1,
    sequence_length: Annotated[int, typer.Option(min=1, help="Tokens of a sample.")] = 4096,
    prefill_length: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 131072,
    prefill_chunk: Annotated[
        int | None, typer.Option(min=1, help="Tokens of it that are read at once. \\[default: all]")
    ] = None,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Compute layers again in the backward pass.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="Of activations: float32, bfloat16 ...")] = "bfloat16",
    as_json: Annotated[
        bool, json_option("parameters, stages, training, transfers, bubble, prefill; sizes in bytes")
    ] = False,
):
    """Say what a run would cost before it is started: memory of a process, what crosses between stages, the bubble."""
    with only_json_on_stdout(as_json):
        need_checkpoints([model])
        from ..parallel.plan import Layout, describe, plan_checkpoint

        layout = Layout(
            gpus=gpus,
            tp=tp,
            pp=pp,
            stages_per_rank=stages_per_rank,
            schedule=schedule,
            microbatches=microbatches,
            microbatch_size=microbatch_size,
            sequence_length=sequence_length,
            prefill_length=prefill_length,
            prefill_chunk=prefill_chunk,
            gradient_checkpointing=gradient_checkpointing,
            dtype=dtype,
        )
        found = plan_checkpoint(model, layout, num_blocks)
    if as_json:
        print_json(found)
    else:
        show_markdown(describe(found, layout))
