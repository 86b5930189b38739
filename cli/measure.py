# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The commands that measure models: their scores, their depth weights, and their costs."""

import enum
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..utils.files import check_writable
from ..utils.installation import ADDRESS
from .checks import need_checkpoints, need_files, need_folders, need_packages
from .console import (
    WroteJson,
    console,
    json_option,
    note,
    print_json,
    say,
    say_written,
    show_markdown,
    working,
)


Device = Annotated[
    str | None, typer.Option(help="Run on this device: cpu, cuda:0 ... \\[default: a GPU if there is one]")
]
Dtype = Annotated[str, typer.Option(help="Load the weights as float32, bfloat16 ..., or with auto as they are saved.")]


def eval_(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL", help="Evaluate these checkpoints; the first is the baseline.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Write samples, tables and plots to this folder.")
    ] = Path("attnres-eval"),
    suite: Annotated[
        str | None, typer.Option(help="Run this suite: paper, core, chat, quick, offline, or a YAML file.")
    ] = None,
    tasks: Annotated[str | None, typer.Option(help="Run these tasks of lm-eval, separated by commas.")] = None,
    peft: Annotated[str | None, typer.Option(help="Load this adapter on the last model.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use only this many documents per task, to try things out.")
    ] = None,
    batch_size: Annotated[str, typer.Option(help="Run this many requests at a time, or auto.")] = "1",
    device: Device = None,
    dtype: Dtype = "auto",
    apply_chat_template: Annotated[
        bool,
        typer.Option(
            "--apply-chat-template",
            "--chat-template",
            help="Put prompts into the chat template (the chat suite always does).",
        ),
    ] = False,
    max_gen_toks: Annotated[
        int | None, typer.Option(min=1, help="Stop answers after this many tokens. \\[default: set by each benchmark]")
    ] = None,
    no_samples: Annotated[bool, typer.Option("--no-samples", help="Save the scores without the answers.")] = False,
    seed: Annotated[int, typer.Option(help="Seed the choice of few-shot examples and the resampling.")] = 0,
    data_root: Annotated[
        Path | None, typer.Option(help="Read data sets from this folder, by their names on the Hub.")
    ] = None,
    include_path: Annotated[Path | None, typer.Option(help="Add the tasks of lm-eval in this folder.")] = None,
    backend: Annotated[str, typer.Option(help="Run the models with hf (transformers) or vllm.")] = "hf",
    allow_code_execution: Annotated[
        bool, typer.Option("--allow-code-execution", help="Run programs that the models write, in a sandbox.")
    ] = False,
    prefetch: Annotated[bool, typer.Option("--prefetch", help="Only download the models and the data.")] = False,
    as_json: Annotated[
        bool, json_option("models, rows and skipped as in results.json, and wrote; with --prefetch there and skipped")
    ] = False,
):
    """Evaluate models with lm-eval and compare them with the first one.

    The exit code is 3 if benchmarks were skipped.
    """
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
    with working(as_json):
        need_packages("eval")
        from ..eval import prefetch

        there, skipped = prefetch(models, suite=suite, tasks=tasks)
    if as_json:
        print_json({"there": there, "skipped": skipped})
    else:
        console.print(f"Downloaded: {', '.join(there)}", highlight=False, markup=False)
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
    with working(as_json):
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
    folders: Annotated[
        list[Path], typer.Argument(metavar="FOLDER", help="Read the results of `attnres eval` from these folders.")
    ],
    as_json: WroteJson = False,
):
    """Rewrite the tables and plots of finished evaluations without running anything."""
    with working(as_json):
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
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL [OTHER]", help="Inspect one checkpoint, or compare two.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Write the page, pictures and data to this folder.")
    ] = Path("attnres-depth"),
    text: Annotated[str | None, typer.Option(help="Read this text instead of the built-in one.")] = None,
    file: Annotated[Path | None, typer.Option(help="Read this UTF-8 text file.")] = None,
    dataset: Annotated[
        str | None, typer.Option(help="Read this data set: a Hub id, a file (JSONL, Parquet, text) or a folder.")
    ] = None,
    dataset_config: Annotated[
        str | None, typer.Option(help="Use this configuration of the data set on the Hub.")
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="Use this split of the data set on the Hub. \\[default: train]")
    ] = None,
    name: Annotated[
        list[str] | None, typer.Option(help="Name the model in the pictures. Repeat it for the second model.")
    ] = None,
    base: Annotated[str | None, typer.Option(help="Draw the residual stream of this PreNorm checkpoint too.")] = None,
    gradients: Annotated[bool, typer.Option("--gradients", help="Measure gradients over depth too.")] = False,
    ablate: Annotated[
        bool, typer.Option("--ablate", help="Mask each source at each site and measure the loss, on 512 tokens.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(min=2, help="Read at most this many tokens.")] = 10_000,
    batch_size: Annotated[int, typer.Option(min=1, help="Run this many windows of 512 tokens at a time.")] = 4,
    dtype: Dtype = "auto",
    device: Device = None,
    as_json: Annotated[
        bool, json_option("models (each with model, num_tokens, relative_entropy, newest_source_weight) and wrote")
    ] = False,
):
    """Show which layers a model reads from: its depth weights on a text, as a page, pictures and JSON."""
    with working(as_json):
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


def explore(
    models: Annotated[list[str], typer.Argument(metavar="MODEL", help="Offer these checkpoints on the page.")],
    host: Annotated[str, typer.Option(help="Listen on this address; 0.0.0.0 is all of this machine.")] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Listen on this port. \\[default: the first free one from 7860]"),
    ] = None,
    dtype: Dtype = "auto",
    device: Device = None,
    space: Annotated[
        Path | None, typer.Option(help="Serve nothing; write the files of a Space on the Hub to this folder.")
    ] = None,
):
    """Open a page in the browser to try models on: depth weights of each token, and predictions without a source."""
    with working(False):
        need_packages("explore")
        need_checkpoints(models)
        from ..inspection.explorer import Explorer, launch, write_space

        explorer = Explorer(models, dtype=dtype, device=device)
        wrote = None if space is None else write_space(explorer, space)
    if wrote is None:
        launch(explorer, host=host, port=port)
        return
    say_written(wrote)
    if ADDRESS is None:
        note("Note:", "put the address of attnres in place of ADDRESS in requirements.txt.")


def bench(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Write the data, the table and the plot to this folder.")
    ] = Path("attnres-bench"),
    shape: Annotated[
        str | None,
        typer.Option(help="Measure this shape: qwen3-0.6b, llama-3.2-1b, qwen3-8b, tiny. \\[default: qwen3-0.6b]"),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Measure this checkpoint instead of a shape with random weights.")
    ] = None,
    variants: Annotated[
        str, typer.Option(help="Measure these numbers of blocks, or full, with fields of the read: 8,8:num_heads=4.")
    ] = "8,4,full",
    cases: Annotated[
        str,
        typer.Option(
            help="Time these cases: decode-BATCH-KVLENGTH, prefill-LENGTH, train-LENGTH, separated by commas."
        ),
    ] = "decode-1-64,prefill-512,train-512",
    layers: Annotated[
        int | None, typer.Option(min=1, help="Keep only this many layers, if the shape does not fit into memory.")
    ] = None,
    pairs: Annotated[int, typer.Option(min=1, help="Time each case in this many alternating pairs.")] = 25,
    dtype: Annotated[str, typer.Option(help="Run in float32, bfloat16 ...")] = "float32",
    device: Annotated[str, typer.Option(help="Run on this device: cpu, cuda:0 ...")] = "cpu",
    compiled: Annotated[bool, typer.Option("--compile", help="Measure with torch.compile too.")] = False,
    as_json: Annotated[bool, json_option("settings, machine, time, activations, peaks and wrote")] = False,
):
    """Compare the speed and memory of AttnRes models with their PreNorm twin, in one process."""
    try:
        with working(as_json):
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
            with working(as_json):
                say(f"The measurements so far are in {partial}. Run the same command again to continue.")
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
    step: Annotated[
        ScalingStep,
        typer.Argument(metavar="run|fit|plot", help="Train the models, fit a law to their losses, or plot it."),
    ],
    ladder: Annotated[
        Path | None,
        typer.Argument(metavar="LADDER.yaml", help="Read sizes, arms and data from this file (only for run)."),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Write the runs, the fit and the plot to this folder.")
    ] = Path("attnres-scaling"),
    as_json: Annotated[
        bool, json_option("wrote, and after fit sizes, compute, seeds, baseline, arms and times")
    ] = False,
):
    """Train small models of several sizes, with and without AttnRes, and fit a scaling law to their losses.

    Run the same command again to resume.
    """
    if (step == ScalingStep.run) != (ladder is not None):
        raise typer.BadParameter("run takes a YAML file of a ladder, and fit and plot take none.")
    with working(as_json):
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
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Plan for this checkpoint, an AttnRes one or a base.")],
    gpus: Annotated[int, typer.Option(min=1, help="Use this many processes.")] = 1,
    tp: Annotated[int, typer.Option(min=1, help="Share each layer among this many processes.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Spread the layers over this many processes.")] = 1,
    stages_per_rank: Annotated[int, typer.Option(min=1, help="Put this many pipeline stages into each process.")] = 1,
    schedule: Annotated[
        str, typer.Option(help="Use this pipeline schedule: 1F1B, GPipe, Interleaved1F1B ...")
    ] = "1F1B",
    num_blocks: Annotated[int | None, typer.Option(min=1, help="Give a base this many blocks. \\[default: 8]")] = None,
    microbatches: Annotated[int, typer.Option(min=1, help="Divide a step into this many microbatches.")] = 8,
    microbatch_size: Annotated[int, typer.Option(min=1, help="Put this many samples into a microbatch.")] = 1,
    sequence_length: Annotated[int, typer.Option(min=1, help="Train on samples of this many tokens.")] = 4096,
    prefill_length: Annotated[int, typer.Option(min=1, help="Plan for prompts of this many tokens.")] = 131072,
    prefill_chunk: Annotated[
        int | None, typer.Option(min=1, help="Process this many tokens of a prompt at once. \\[default: all]")
    ] = None,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Recompute layers in the backward pass.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="Keep activations in float32, bfloat16 ...")] = "bfloat16",
    as_json: Annotated[
        bool, json_option("parameters, stages, training, transfers, bubble and prefill, with sizes in bytes")
    ] = False,
):
    """Estimate what a run would cost: memory per process, traffic between stages, and the pipeline bubble."""
    with working(as_json):
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
