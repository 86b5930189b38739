# SPDX-License-Identifier: Apache-2.0
"""What a command checks before it imports torch, which takes seconds: whether its paths and packages are there.

The commands check the same again, and more, in what they call.
"""

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..utils.files import check_destination, check_writable


# By command: the packages that not every installation has, besides those of some options
PACKAGES = {
    "finetune": ("datasets", "peft", "matplotlib"),
    "pretrain": ("datasets", "peft", "matplotlib"),
    "eval": ("lm_eval", "datasets", "matplotlib", "scipy", "statsmodels"),
    "report": ("lm_eval", "datasets", "matplotlib", "scipy", "statsmodels"),
    "inspect": ("matplotlib",),
    "explore": ("gradio", "matplotlib"),
    "bench": ("matplotlib",),
    "tokenizer": ("datasets", "peft", "matplotlib"),
    "scaling": ("datasets", "peft", "matplotlib", "scipy"),
    "chat": ("fastapi", "openai", "uvicorn"),
    "demo": ("lm_eval", "datasets", "peft", "trl", "matplotlib", "scipy", "statsmodels"),
}


# Files of runs that come with the package
CONFIGS = Path(__file__).parents[1] / "training/configs"


def need_packages(command: str, *others: str):
    """Raise a `ModuleNotFoundError` for the first that is not installed."""
    for name in (*PACKAGES.get(command, ()), *others):
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"{name} is not installed", name=name)


def need_checkpoints(sources: Iterable[str | None], revision: str | None = None):
    """Raise an `OSError` or a `ValueError` for the first that is no folder, no repository, or has no config."""
    from ..checkpoints.location import read_config_dict  # which takes half a second; `--help` does not need it

    for source in sources:
        if source is not None:
            read_config_dict(source, revision)


def need_checkpoint(source: str, revision: str | None) -> str | None:
    """The same for one.

    Returns:
        The revision to use: for a repository the commit that was checked, so that nothing is requested twice.
    """
    from ..checkpoints.location import locate

    location = locate(source, revision)
    location.config_dict()
    return location.commit


def need_source(source: str, gguf_file: str | None, revision: str | None) -> str | None:
    """The same for the source of a conversion, which may be a GGUF file."""
    if gguf_file is None and not source.lower().endswith(".gguf"):
        return need_checkpoint(source, revision)
    if gguf_file is None:
        need_files([source])
    return revision


def need_files(paths: Iterable[str | Path | None]):
    """Raise an `OSError` or a `ValueError` for the first that is no file."""
    for path in paths:
        if path is None:
            continue
        if not Path(path).expanduser().exists():
            raise OSError(f"There is no file `{path}`.")
        if Path(path).is_dir():
            raise ValueError(f"`{path}` is a folder: name a file.")


def need_folders(paths: Iterable[str | Path | None]):
    """Raise an `OSError` for the first that is no folder."""
    for path in paths:
        if path is not None and not Path(path).expanduser().is_dir():
            raise OSError(f"There is no folder `{path}`.")


def need_destination(destination: Path, source: str):
    """Raise an `OSError` or a `ValueError` for a folder that cannot be written to."""
    check_writable(check_destination(destination, source))


def packaged_configs(command: str) -> list[str]:
    """The names of the files for `finetune` or `pretrain` that come with the package."""
    marks = {"finetune": "\nmode:", "pretrain": "\nmodel_config:"}
    files = sorted(CONFIGS.glob("*.yaml"))
    return [file.stem for file in files if marks[command] in file.read_text(encoding="utf-8")]


def need_config(command: str, config: Path) -> Path:
    """The file of a run, given by its path or, of those that come with the package, by its name."""
    if config.expanduser().is_file():
        return config
    names = packaged_configs(command)
    if str(config) in names:
        return CONFIGS / f"{config}.yaml"
    if config.is_dir():
        need_files([config])
    raise ValueError(
        f"There is no file `{config}`. Name a YAML file, or one of those that come with attnres: {', '.join(names)}."
    )


def need_run(command: str, file: Path, overrides: dict[str, Any]):
    """Raise for what a run of `finetune` or `pretrain` names but is not there. Other mistakes are found later."""
    from ..data.location import check_rows
    from ..utils.untrusted import read_yaml

    fields = read_yaml(file)
    if not isinstance(fields, dict):
        raise ValueError(f"`{file}` is not a list of `field: value` lines.")
    fields = {**fields, **overrides}
    packs = command == "finetune" and fields.get("packing") is not False
    need_packages(command, *(["trl"] if packs else []))
    texts = {name: value for name, value in fields.items() if isinstance(value, str) and value}
    is_folder = Path(texts.get("model", "")).expanduser().is_dir()
    need_checkpoints([texts.get("model"), texts.get("model_config")], None if is_folder else texts.get("revision"))
    for name in ("dataset", "eval_dataset"):
        if name in texts:
            check_rows(texts[name])
    if "output_dir" in texts:
        check_writable(Path(texts["output_dir"]))
