# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The commands that share models: on a server, and on the Hub."""

import enum
from pathlib import Path
from typing import Annotated, Any

import typer

from .checks import need_checkpoints, need_folders
from .console import WroteJson, json_option, print_json, say, say_written, working


CheckpointFolder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Use the AttnRes checkpoint in this folder.")]


def card(
    folder: CheckpointFolder,
    base_model: Annotated[str | None, typer.Option(help="Name this Hub id as the base in the metadata.")] = None,
    license_: Annotated[
        str | None, typer.Option("--license", help="Name this licence, such as apache-2.0. \\[default: the base's]")
    ] = None,
    language: Annotated[
        list[str] | None, typer.Option(help="Name this language, such as en. Repeat it for several.")
    ] = None,
    dataset: Annotated[
        list[str] | None, typer.Option(help="Name this Hub id of training data. Repeat it for several.")
    ] = None,
    example: Annotated[
        str | None, typer.Option(help="Run the model on this prompt and show its answer in the card.")
    ] = None,
    repo_id: Annotated[str | None, typer.Option(help="Use this Hub id in the examples.")] = None,
    evaluation: Annotated[
        Path | None, typer.Option(help="Add the scores in this output folder of `attnres eval`.")
    ] = None,
    as_json: WroteJson = False,
):
    """Rewrite the model card of a checkpoint, and keep the entries of its metadata."""
    with working(as_json):
        need_folders([folder, evaluation])
        need_checkpoints([str(folder)])
        from ..model_cards.card import write_model_card
        from ..model_cards.example import answered

        given = {"base_model": base_model, "license": license_, "language": language, "datasets": dataset}
        base_metadata: dict[str, Any] = {name: value for name, value in given.items() if value}
        if example is not None:
            base_metadata["widget"] = [answered(folder, example)]
        path = write_model_card(folder, base_metadata=base_metadata, repo_id=repo_id, evaluation=evaluation)
    if as_json:
        print_json({}, [path])
    else:
        say_written([path])


def push(
    folder: CheckpointFolder,
    repo_id: Annotated[
        str, typer.Argument(metavar="REPO_ID", help="Push to this repository on the Hub, such as user/name.")
    ],
    private: Annotated[bool, typer.Option("--private", help="Make the repository private if it is created.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the files, their size and the card.")] = False,
    as_json: Annotated[
        bool, json_option("files (their sizes in bytes), bytes, left_out, card, url and commit (null with --dry-run)")
    ] = False,
):
    """Push a checkpoint to the Hub, with the code that loads it without attnres installed."""
    with working(as_json):
        need_folders([folder])
        need_checkpoints([str(folder)])
        from ..model_cards.hub import plan_push, push

        plan = plan_push(folder, repo_id)
        sizes = {name: plan.num_bytes(name) for name in sorted(plan.files)}
        if dry_run and not as_json:
            for name, size in sizes.items():
                say(f"Would push {name}, {size:,} bytes")
            say(f"In all {len(sizes)} files, {sum(sizes.values()):,} bytes")
        for name in plan.left_out:
            say(f"Left out {name}: it is not part of a checkpoint")
        if dry_run and not as_json:
            say(f"\nREADME.md:\n\n{plan.card}")
            if plan.missing:
                say(f"The card has no {' and no '.join(plan.missing)}: see `attnres card --help`")
        commit = None if dry_run else push(folder, repo_id, private=private)
    if as_json:
        url, oid = (None, None) if commit is None else (str(commit.repo_url), commit.oid)
        found = {"files": sizes, "bytes": sum(sizes.values()), "left_out": plan.left_out, "card": plan.card}
        print_json({**found, "url": url, "commit": oid})
    elif commit is not None:
        say(f"Pushed to {commit.repo_url}, commit {commit.oid}")


class Engine(str, enum.Enum):
    transformers = "transformers"
    vllm = "vllm"


def serve(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            help="Serve this folder or Hub id. Without one, transformers' server loads the models that requests name."
        ),
    ] = None,
    engine: Annotated[Engine, typer.Option(help="Serve with this engine.")] = Engine.transformers,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Refuse longer prompts. \\[default: the context of the model]")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Refuse requests for longer answers. \\[default: 4096]")
    ] = None,
):
    """Serve checkpoints with an OpenAI-compatible API. All other options are passed to the engine.

    transformers takes --port 8000, --host localhost, --continuous-batching, --dtype bfloat16, --device cpu,
    --model-timeout 300 and more (see `transformers serve --help`). vLLM takes the options of `vllm serve`.
    """
    from ..serving import server

    options = context.args
    if model is not None and model.startswith("-"):  # an option that is not ours stands in front, and is no model
        model, options = None, [model, *options]
    run = server.serve_with_vllm if engine == Engine.vllm else server.serve_with_transformers
    run(model, options, max_prompt_tokens, max_new_tokens)
