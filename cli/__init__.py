# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The `attnres` program: all its commands with an example of each, and how it ends.

The commands themselves are in `cli_convert.py`, in `cli_measure.py` and below; `console.py` has how they speak.
"""

import enum
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from ..utils.files import check_writable
from ..utils.installation import how_to_install
from .checks import need_checkpoints, need_folders, need_packages, need_run
from .console import (
    Revision,
    WroteJson,
    console,
    fail,
    json_option,
    note,
    only_json_on_stdout,
    print_json,
    say,
    say_written,
)
from .convert import convert, export, import_, revert, verify
from .measure import bench, eval_, inspect, plan, report, scaling


# What not every installation has, and the extra that brings it
OPTIONAL_MODULES = {
    "datasets": "train",
    "fastapi": "serving",
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
# What results depend on, and what shows whether it can be imported: transformers itself imports little
ENVIRONMENT = {
    "transformers": "transformers.modeling_utils",
    "torch": "torch",
    "triton": "triton",
    "flash-linear-attention": "fla",
    "accelerate": "accelerate",
    "peft": "peft",
    "datasets": "datasets",
    "lm-eval": "lm_eval",
}


class InterruptedRun(SystemExit):
    """The end of a program that has said that it was interrupted."""

    is_said = True


RunFile = Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="Fields of the run; see training/configs.")]
RunFields = Annotated[
    list[str] | None, typer.Argument(metavar="FIELD=VALUE...", help="In place of those of the file.")
]
RunJson = Annotated[bool, json_option("trainable_parameters, query_learning_rate, losses, explanation, wrote")]
CheckpointFolder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of an AttnRes checkpoint.")]


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


def demo(
    model: Annotated[
        str | None,
        typer.Option(help="Checkpoint to use, a folder or a Hub id. By default a small Qwen3 is trained first."),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the checkpoints.")] = Path("attnres-demo"),
    num_blocks: Annotated[int, typer.Option(min=1, help="Number of AttnRes blocks.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Training steps of the small model.")] = 300,
):
    """Turn a PreNorm model into an AttnRes one and show that it computes the same. Offline, on a CPU, in minutes."""
    need_packages("demo")
    need_checkpoints([model])
    check_writable(output)
    from .demo import run_demo

    run_demo(model=model, output=output, num_blocks=num_blocks, steps=steps)


def families(
    types: Annotated[
        list[str] | None, typer.Argument(metavar="[TYPE]...", help="Model types. \\[default: all]")
    ] = None,
    probe: Annotated[str | None, typer.Option(metavar="FOLDER_OR_ID", help="Look at a checkpoint's code.")] = None,
    revision: Revision = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the code that the checkpoint brings.")
    ] = False,
    as_json: Annotated[
        bool, json_option("transformers, supported, refused, others; of a probe model_type, num_sites, layers")
    ] = False,
):
    """Show which decoders can be a base, or whether a checkpoint can: where its code reads and writes the stream."""
    if probe is not None and not types:
        need_checkpoints([probe], revision)
    from ..base.families import survey, survey_table
    from ..checkpoints.checkpoint import read_config
    from ..conversion.probe_report import describe_probe, probe_report

    if probe is not None and types:
        raise typer.BadParameter("--probe looks at one checkpoint, and takes no model types.")
    if probe is not None:
        with only_json_on_stdout(as_json):
            config = read_config(probe, revision, trust_remote_code)
            result = probe_report(config) if as_json else describe_probe(config)
        if as_json:
            print_json(result)
        else:
            print("\n".join(result))
    elif as_json:
        print_json(survey(types))
    else:
        table, summary = survey_table(types)
        console.print(table)
        console.print(summary, highlight=False)


def env(as_json: Annotated[bool, json_option("attnres, python, platform, packages, errors, reads")] = False):
    """Show versions, what cannot be imported, devices, and which code computes reads over depth on them and why."""
    import platform

    from .. import __version__

    with only_json_on_stdout(as_json):
        found = {"attnres": __version__, "python": platform.python_version(), "platform": platform.platform()}
        found["packages"] = packages = {package: _installed_version(package) for package in ENVIRONMENT}
        found["errors"] = errors = {
            package: error
            for package, module in ENVIRONMENT.items()
            if packages[package] is not None and (error := _import_error(module))
        }
        error = _import_error("attnres.depth.backends")
        found["reads"] = None
        if error is None:
            from ..depth.backends import describe

            found["reads"] = describe()
    if as_json:
        print_json(found)
        return
    print(f"attnres {__version__}, Python {found['python']}, {found['platform']}")
    for package, version in packages.items():
        row = f"{package} {version or 'not installed'}"
        print(f"{row}, cannot be imported: {errors[package]}" if package in errors else row)
    print("Reads over depth (ATTNRES_BACKEND chooses another way)")
    for line in [f"not known: {error}"] if found["reads"] is None else found["reads"]:
        print(f"  {line}")


def _installed_version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _import_error(module: str) -> str | None:
    """Why a module cannot be imported, in one line; `None` if it can."""
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:  # anything can be raised where packages do not fit each other
        return " ".join(f"{type(error).__name__}: {error}".split())
    return None


def finetune(
    config: RunFile,
    fields: RunFields = None,
    show_batch: Annotated[
        bool, typer.Option("--show-batch", help="Print the first batch and what is learned in it; do not train.")
    ] = False,
    as_json: RunJson = False,
):
    """Fine-tune a checkpoint: all of it, LoRA and the depth queries, or the queries alone. Run again, it resumes."""
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
    """Train a model from scratch, or further on, also over the stages of a pipeline. Run again, it resumes."""
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
    with only_json_on_stdout(as_json):
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


def card(
    folder: CheckpointFolder,
    base_model: Annotated[str | None, typer.Option(help="Hub id of the base, for the metadata.")] = None,
    repo_id: Annotated[str | None, typer.Option(help="Hub id of the checkpoint, for the examples.")] = None,
    evaluation: Annotated[Path | None, typer.Option(help="Folder of `attnres eval` with this checkpoint.")] = None,
    as_json: WroteJson = False,
):
    """Write the model card of a checkpoint anew; entries of its metadata are kept."""
    with only_json_on_stdout(as_json):
        need_folders([folder, evaluation])
        need_checkpoints([str(folder)])
        from ..model_cards.card import write_model_card

        base_metadata = {"base_model": base_model} if base_model else None
        path = write_model_card(folder, base_metadata=base_metadata, repo_id=repo_id, evaluation=evaluation)
    if as_json:
        print_json({}, [path])
    else:
        say_written([path])


def push(
    folder: CheckpointFolder,
    repo_id: Annotated[str, typer.Argument(metavar="REPO_ID", help="user/name on the Hub.")],
    private: Annotated[bool, typer.Option("--private", help="Create the repository private.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be pushed, and what not.")] = False,
    as_json: Annotated[bool, json_option("files (their bytes), left_out, url, commit (null of a dry run)")] = False,
):
    """Put a checkpoint on the Hub, with the code that loads it where attnres is not installed."""
    with only_json_on_stdout(as_json):
        need_folders([folder])
        need_checkpoints([str(folder)])
        from ..model_cards.hub import plan_push, push

        plan = plan_push(folder, repo_id)
        if dry_run and not as_json:
            for name in sorted(plan.files):
                say(f"Would push {name}, {plan.num_bytes(name):,} bytes")
        for name in plan.left_out:
            say(f"Left out {name}: it is not part of a checkpoint")
        commit = None if dry_run else push(folder, repo_id, private=private)
    if as_json:
        url, oid = (None, None) if commit is None else (str(commit.repo_url), commit.oid)
        sizes = {name: plan.num_bytes(name) for name in sorted(plan.files)}
        print_json({"files": sizes, "left_out": plan.left_out, "url": url, "commit": oid})
    elif commit is not None:
        say(f"Pushed to {commit.repo_url}, commit {commit.oid}")


class Engine(str, enum.Enum):
    transformers = "transformers"
    vllm = "vllm"


def serve(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(help="Folder or Hub id. Without one, transformers' server loads what requests name."),
    ] = None,
    engine: Annotated[Engine, typer.Option(help="Whose server.")] = Engine.transformers,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Refuse longer prompts. [default: the context of the model]")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Refuse requests for longer answers. [default: 4096]")
    ] = None,
):
    """Serve checkpoints with an OpenAI-compatible API. All other options are the engine's.

    Of transformers' server: --port 8000, --host localhost, --continuous-batching, --dtype bfloat16, --device cpu,
    --model-timeout 300 (`transformers serve --help` has all). Of vLLM: those of `vllm serve`.
    """
    from ..serving import server

    options = context.args
    if model is not None and model.startswith("-"):  # an option that is not ours stands in front, and is no model
        model, options = None, [model, *options]
    run = server.serve_with_vllm if engine == Engine.vllm else server.serve_with_transformers
    run(model, options, max_prompt_tokens, max_new_tokens)


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
        import_: "attnres import fla-model attnres-model",
        export: "attnres export attnres-model fla-model --to fla",
    },
    "Train": {
        pretrain: "attnres pretrain pretrain.yaml max_steps=1000 output_dir=pretrained",
        finetune: "attnres finetune run.yaml max_steps=100 output_dir=run",
    },
    "Measure": {
        eval_: "attnres eval base tuned --suite quick --limit 100",
        report: "attnres report attnres-eval",
        inspect: "attnres inspect tuned --base base -o attnres-depth",
        bench: "attnres bench --shape tiny --variants 4,full --pairs 5",
        plan: "attnres plan qwen3-attnres --gpus 64 --tp 8 --pp 4",
        scaling: "attnres scaling run ladder.yaml -o attnres-scaling",
    },
    "Serve": {
        serve: "attnres serve qwen3-attnres --continuous-batching --port 8000",
    },
    "Share": {
        card: "attnres card qwen3-attnres --base-model Qwen/Qwen3-0.6B",
        push: "attnres push qwen3-attnres user/qwen3-attnres --dry-run",
    },
}
app = typer.Typer(
    help="Attention Residuals for transformers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.callback()(attnres)
for panel, commands in COMMANDS.items():
    for command, example in commands.items():
        name = command.__name__.rstrip("_")  # `eval` and `import` are words of Python
        # The options of an engine go through
        settings = {"allow_extra_args": True, "ignore_unknown_options": True} if command is serve else None
        app.command(name, rich_help_panel=panel, epilog=f"Example: {example}", context_settings=settings)(command)


def main():
    """Run the program; what the user can mend is one line and exit code 1, anything else a traceback.

    `__main__.py`, which calls it, is for interruptions.
    """
    try:
        app()
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL_MODULES:
            raise
        fail(f"{error.name} is not installed: {how_to_install(OPTIONAL_MODULES[error.name])}")
    except (ValueError, OSError) as error:
        fail(str(error))
