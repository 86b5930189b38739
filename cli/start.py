# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The commands to begin with: a demonstration, the model types that can be converted, and what is installed."""

import importlib
from pathlib import Path
from typing import Annotated

import typer

from ..utils.files import check_writable
from .checks import need_checkpoints, need_packages
from .console import Revision, console, json_option, print_json, say, working


# What results depend on, and what shows whether it can be imported: transformers itself imports little
ENVIRONMENT = {
    "transformers": "transformers.modeling_utils",
    "torch": "torch",
    "triton": "triton",
    "flash-linear-attention": "fla",
    "kernels": "kernels",
    "accelerate": "accelerate",
    "peft": "peft",
    "datasets": "datasets",
    "lm-eval": "lm_eval",
}


def demo(
    model: Annotated[
        str | None,
        typer.Option(help="Use this folder or Hub id. Without it, the demo first trains a small Qwen3."),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Write the checkpoints to this folder.")] = Path(
        "attnres-demo"
    ),
    num_blocks: Annotated[int, typer.Option(min=1, help="Make this many AttnRes blocks.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Train the small model for this many steps.")] = 300,
):
    """Convert a PreNorm model to AttnRes and show that it computes the same. Runs offline on a CPU in minutes."""
    need_packages("demo")
    need_checkpoints([model])
    check_writable(output)
    with working():
        from .demo import commands_to_try, run_demo

        written = run_demo(model=model, output=output, num_blocks=num_blocks, steps=steps)
    for name, path, what in written:
        say(f"{name}: {path}{what and f', {what}'}")
    with working():
        say("\nTry next:")
        for command in commands_to_try(output):
            say(f"  {command}")


def families(
    types: Annotated[
        list[str] | None, typer.Argument(metavar="TYPE", help="Show these model types. \\[default: all]")
    ] = None,
    probe: Annotated[
        str | None, typer.Option(metavar="FOLDER_OR_ID", help="Analyse the code of this checkpoint.")
    ] = None,
    revision: Revision = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Allow the checkpoint to run its own code.")
    ] = False,
    as_json: Annotated[
        bool, json_option("transformers, supported, refused and others; with --probe model_type, num_sites and layers")
    ] = False,
):
    """Show which model types can be converted, or whether a checkpoint can and where its code uses the stream."""
    if probe is not None and not types:
        need_checkpoints([probe], revision)
    from ..base.families import survey, survey_table
    from ..checkpoints.checkpoint import read_config
    from ..conversion.probe_report import describe_probe, probe_report

    if probe is not None and types:
        raise typer.BadParameter("--probe looks at one checkpoint, and takes no model types.")
    if probe is not None:
        with working(as_json):
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


def env(as_json: Annotated[bool, json_option("attnres, python, platform, packages, errors and reads")] = False):
    """Show versions, packages that cannot be imported, devices, and the code that computes reads on them."""
    import platform

    from .. import __version__

    with working(as_json):
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
