# SPDX-License-Identifier: Apache-2.0
"""What a command can tell before torch is imported, which takes seconds: whether its paths and packages are there.

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
    "bench": ("matplotlib",),
    "scaling": ("datasets", "peft", "matplotlib", "scipy"),
    "chat": ("fastapi", "openai", "uvicorn"),
    "demo": ("lm_eval", "datasets", "peft", "trl", "matplotlib", "scipy", "statsmodels"),
}


def need_packages(command: str, *others: str):
    """Raise a `ModuleNotFoundError` for the first that is not installed."""
    for name in (*PACKAGES.get(command, ()), *others):
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"{name} is not installed", name=name)


def need_checkpoints(sources: Iterable[str | None], revision: str | None = None):
    """Raise an `OSError` or a `ValueError` for the first that is no folder, no repository, or has no config."""
    from ..checkpoints.location import read_config_dict  # which takes half a second, that `--help` does without

    for source in sources:
        if source is not None:
            read_config_dict(source, revision)


def need_checkpoint(source: str, revision: str | None) -> str | None:
    """The same for one.

    Returns:
        The revision to go on with: of a repository the commit that was looked at, so that nothing is asked for twice.
    """
    from ..checkpoints.location import locate

    location = locate(source, revision)
    location.config_dict()
    return location.commit


def need_source(source: str, gguf_file: str | None, revision: str | None) -> str | None:
    """The same for what is converted, which may be a GGUF file."""
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
            raise ValueError(f"`{path}` is a folder where a file should be.")


def need_folders(paths: Iterable[str | Path | None]):
    """Raise an `OSError` for the first that is no folder."""
    for path in paths:
        if path is not None and not Path(path).expanduser().is_dir():
            raise OSError(f"There is no folder `{path}`.")


def need_destination(destination: Path, source: str):
    """Raise an `OSError` or a `ValueError` for a folder that is not there to be written."""
    check_writable(check_destination(destination, source))


def need_run(command: str, file: Path, overrides: dict[str, Any]):
    """Raise for what a run of `finetune` or `pretrain` names and is not there; other mistakes are told later."""
    from ..data.location import check_rows
    from ..utils.untrusted import read_yaml

    need_files([file])
    fields = read_yaml(file)
    if not isinstance(fields, dict):
        raise ValueError(f"`{file}` is not a list of `field: value`.")
    fields = {**fields, **overrides}
    packs = command == "finetune" and fields.get("packing") is not False
    need_packages(command, *(["trl"] if packs else []))
    texts = {name: value for name, value in fields.items() if isinstance(value, str) and value}
    is_folder = Path(texts.get("model", "")).expanduser().is_dir()  # which has none, as is said later
    need_checkpoints([texts.get("model"), texts.get("model_config")], None if is_folder else texts.get("revision"))
    for name in ("dataset", "eval_dataset"):
        if name in texts:
            check_rows(texts[name])
    if "output_dir" in texts:
        check_writable(Path(texts["output_dir"]))
