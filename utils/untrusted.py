# SPDX-License-Identifier: Apache-2.0
"""Files of strangers, opened in one way: regular, of a sane size, nested within reason, and inside of their folder.

Whoever made a checkpoint decides what its files are. A pipe keeps its reader waiting for ever, a device has no end,
and by a link another file of this machine is copied and published with the checkpoint.
"""

import contextlib
import fnmatch
import json
import os
import stat
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub.errors import StrictDataclassError


# The largest known tokenizer.json has 35 MB, the largest other file of this kind a few
MAX_BYTES = 64 << 20
MAX_BYTES_OF_TOKENIZERS = 512 << 20
TOKENIZER_FILES = {"tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "tekken.json"}
TOKENIZER_SUFFIXES = {".model", ".tiktoken"}
# Weights and data are mapped into memory or read in pieces
WITHOUT_LIMIT = {".safetensors", ".gguf"}
# What transformers, PEFT and tokenizers open in a folder that is a checkpoint
OPENED = {".json", ".jinja", ".txt", ".py", *TOKENIZER_SUFFIXES, *WITHOUT_LIMIT}
# Of them, those that have a name by which loaders ask for them. Others of these kinds are somebody's own
NAMED = {
    ".json": (
        *("*config*.json", "*vocab*.json", "*.index.json", "*token*.json", "chat_template*.json", "tekken.json"),
        *("params.json", "normalizer.json", "emoji.json", "word_*.json", "byte_maps.json", "speaker_*.json"),
    ),
    ".txt": ("*vocab*.txt", "merges.txt", "dict.txt"),
    ".py": ("configuration_*.py", "modeling_*.py", "tokenization_*.py", "*processing_*.py"),
}
# Those that Python parses, whose recursion has an end
PARSED = {
    *("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "adapter_config.json", "model.safetensors.index.json", "chat_template.json"),
    *("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"),
}
# Of a library's message in one of ours
MAX_MESSAGE = 600
PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"}


def max_bytes_of(path: Path) -> int | None:
    """How large a file may be by its name; `None` without a limit."""
    if path.suffix in WITHOUT_LIMIT:
        return None
    if path.name in TOKENIZER_FILES or path.suffix in TOKENIZER_SUFFIXES:
        return MAX_BYTES_OF_TOKENIZERS
    return MAX_BYTES


def check_file(path: Path):
    """Raise an `OSError` unless a file is there, and a `ValueError` unless it is regular and not too large."""
    _check_stat(path, path.stat())


def _check_stat(path: Path, found: os.stat_result):
    if not stat.S_ISREG(found.st_mode):
        kind = "folder" if stat.S_ISDIR(found.st_mode) else "pipe, a socket or a device"
        raise ValueError(f"`{path}` is a {kind}, not a file: remove it.")
    limit = max_bytes_of(path)
    if limit is not None and found.st_size > limit:
        raise ValueError(
            f"`{path}` has {found.st_size:,} bytes, more than the limit of {limit:,} for such a file, so it is not"
            " read."
        )


def read_bytes(path: str | Path) -> bytes:
    """The content of a file, which is looked at once it is open; errors as for `check_file`."""
    path = Path(path)
    # Without `O_NONBLOCK` the opening of a pipe waits for whoever writes to it
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        _check_stat(path, os.fstat(file.fileno()))
        limit = max_bytes_of(path)
        return file.read() if limit is None else file.read(limit)


def read_text(path: str | Path) -> str:
    """The content of a UTF-8 text.

    Raises:
        ValueError: if it is none; others as for `check_file`.
    """
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"`{path}` is not UTF-8 text: {error}.") from None


def read_json(path: str | Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: if it is not JSON, no object or nested too deeply; others as for `check_file`.
    """
    return parse_json(read_bytes(path), f"`{path}`")


def parse_json(content: bytes, name: str) -> dict[str, Any]:
    """The object in a JSON text.

    Args:
        name: what to call it.

    Raises:
        ValueError: if it is not JSON, no object or nested too deeply.
    """
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError(f"{name} is nested too deeply to be read.") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{name} is not JSON: {error}.") from None
    if not isinstance(value, dict):
        raise ValueError(f"{name} holds no JSON object.")
    return value


def parse_yaml(text: str, name: str) -> Any:
    """What a YAML text holds, in plain types.

    Args:
        name: what to call it.

    Raises:
        ValueError: if it is not valid, or nested too deeply.
    """
    try:
        return yaml.safe_load(text)
    except RecursionError:
        raise ValueError(f"{name} is nested too deeply to be read.") from None
    except (yaml.YAMLError, ValueError, TypeError, AttributeError) as error:  # those of keys and dates
        raise ValueError(f"{name} is not valid YAML: {' '.join(str(error).split())}") from None


def read_yaml(path: str | Path) -> Any:
    """The same of a file; errors as for `parse_yaml` and `read_text`."""
    return parse_yaml(read_text(path), f"`{path}`")


def check_inside(folder: Path, names: Iterable[str], title: str | None = None):
    """Raise a `ValueError` if one of the files is a link out of the folder: what lies there was not meant.

    In the Hub's cache files are links into the folder `blobs` of their repository.

    Args:
        names: of files, relative to the folder.
        title: what to call the folder.
    """
    resolved = folder.resolve()
    allowed = [resolved]
    if resolved.parent.name == "snapshots":
        allowed.append(resolved.parent.parent / "blobs")
    for name in names:
        try:
            target = (resolved / name).resolve()
        except RuntimeError:  # of a loop of links, in some versions of Python
            raise ValueError(f"`{folder / name}` is a broken link: remove it.") from None
        if not any(target.is_relative_to(path) for path in allowed):
            raise ValueError(
                f"`{name}` of `{title or folder}` is a link to `{target}`, outside the folder. To include the file,"
                f" replace the link by it: `cp -rL {folder} COPY` does this for all links."
            )


def file_inside(folder: Path, name: str) -> Path | None:
    """Where a file of a folder is in truth, `None` if there is none.

    Raises:
        ValueError: if it is a link out of the folder, see `check_inside`, or errors as for `check_file`.
    """
    path = folder / name
    if not os.path.lexists(path):
        return None
    check_inside(folder, [name])
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError):  # of a loop of links, which depends on the version of Python
        raise ValueError(f"`{path}` is a broken link: remove it.") from None
    check_file(target)
    return target


def read_inside(folder: Path, name: str, max_bytes: int = MAX_BYTES) -> bytes | None:
    """The content of a file of a folder, `None` if there is none; errors as for `file_inside`, also of large ones."""
    target = file_inside(folder, name)
    if target is None:
        return None
    content = read_bytes(target)
    if len(content) > max_bytes:
        raise ValueError(f"`{folder / name}` has more than {max_bytes / 1e6:.0f} MB, too many for such a file.")
    return content


def opened_files(folder: Path) -> Iterator[Path]:
    """What lies in a folder, and in one of chat templates within, that has the name of what loaders open."""
    for place in (folder, folder / "additional_chat_templates"):
        if place.is_dir():
            for path in sorted(place.iterdir()):
                if path.suffix in OPENED and not path.is_dir():
                    yield path


def is_asked_for(name: str) -> bool:
    """Whether a loader asks for files of this name, and could save anew elsewhere what is in it."""
    name = Path(name).name
    patterns = NAMED.get(Path(name).suffix, ("*",))
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def check_folder(folder: str | Path, *, follow_links: bool, parsed: Container[str] = ()):
    """Look at all files that a loader would open in the folder of a checkpoint or an adapter, before it does.

    Args:
        parsed: names of files that have been read already, by `read_json`.
        follow_links: whether links out of the folder are taken for what their owner wants to be read. Where files are
            copied they are refused, under names by which loaders ask for files.

    Raises:
        ValueError: for what is no regular file, is too large or nested too deeply, for such a link, and for weights
            that are pickles alone.
        OSError: if a file cannot be read.
    """
    folder = Path(folder).expanduser()
    names = []
    for path in opened_files(folder):
        if not path.exists():
            raise ValueError(f"`{path}` is a broken link: remove it, or put the file itself there.")
        names.append(path.relative_to(folder).as_posix())
        check_file(path)
        if path.name in PARSED and path.name not in parsed:
            read_json(path)
    if not follow_links:
        check_inside(folder, filter(is_asked_for, names))
    if not any(name.endswith((".safetensors", ".gguf")) for name in names):
        pickle = next((path for path in sorted(folder.iterdir()) if path.suffix in PICKLES), None)
        if pickle is not None:
            refuse_pickle(folder, pickle.name)


def refuse_pickle(folder: str | Path, name: str):
    """Raise the `ValueError` for a checkpoint or an adapter whose weights are a pickle."""
    model_class = "PeftModel" if name.startswith("adapter_") else "AutoModelForCausalLM"
    raise ValueError(
        f"`{folder}` has its weights in `{name}`, a pickle, which can run code when it is read. If you trust it, save"
        f" it as safetensors: `{model_class}.from_pretrained(...).save_pretrained(...)`."
    )


@contextlib.contextmanager
def stranger_errors_explained(what: str) -> Iterator[None]:
    """A `ValueError` of one line for whatever a stranger's files make a library raise.

    Args:
        what: what is wrong, which the first line of the library's message follows.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # of torch
            raise
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk's
        raise ValueError(f"{what}: {in_one_line(error)}") from error


def in_one_line(error: BaseException) -> str:
    """What an error says, cut off where it goes on for pages, and of which kind it is unless it is one of values."""
    if "trust_remote_code" in str(error):
        return (
            "it needs code of its own, which is not run here. If you trust it, load it with transformers and"
            " `trust_remote_code=True`"
        )
    kind = "" if isinstance(error, ValueError | TypeError | OSError | StrictDataclassError) else type(error).__name__
    text = " ".join(str(error).split()) or type(error).__name__
    text = text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]} ..."
    return f"{kind}: {text}" if kind else text
