# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Where a checkpoint comes from: a folder, or a repository on the Hub through its cache; and its config as it is."""

import contextlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import constants, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import get_session


# Of what is read whole into memory beside the weights; the largest of ours, `depth.json`, has some megabytes
MAX_BYTES = 64 * 2**20
# Configuration classes make a name for each, in memory
MAX_LABELS = 1_000_000
# Of the first request to the Hub, after which it is taken to be out of reach: the client itself tries six times
HUB_TIMEOUT = 5
# That of httpx or httpx2, whichever huggingface_hub stands on
HTTPError = HfHubHTTPError.__bases__[0]


def read_config_dict(source: str | Path, revision: str | None = None) -> dict:
    """The config of a checkpoint as it is in its file. Of a Hub repository, nothing else is downloaded.

    Raises:
        OSError: if there is no such folder or repository, or no config in it.
        ValueError: if it is not a config.
    """
    folder = local_folder(source, revision)
    if folder is None:
        with hub_errors_explained(source, revision):
            path = Path(
                hf_hub_download(
                    str(source), "config.json", revision=revision, local_files_only=not hub_can_be_reached()
                )
            )
    else:
        path = folder / "config.json"
        if not path.exists():
            if (folder / "adapter_config.json").exists():
                raise ValueError(
                    f"`{source}` is a PEFT adapter, not a model. Merge it into its base first:"
                    " `AutoPeftModelForCausalLM.from_pretrained(...).merge_and_unload().save_pretrained(...)`."
                )
            gguf = min((path.name for path in folder.glob("*.gguf")), default=None)
            hint = "" if gguf is None else f"; `attnres convert --gguf-file {gguf}` converts its GGUF file"
            raise OSError(f"`{source}` holds no config.json, so it is not a transformers checkpoint{hint}.")
    config_dict = read_json(path)
    if not isinstance(config_dict.get("model_type"), str):
        raise ValueError(f"`{path}` names no `model_type`, so it is not a transformers config.")
    architectures = config_dict.get("architectures")
    if not isinstance(architectures, list | None) or not all(isinstance(name, str) for name in architectures or ()):
        raise ValueError(f'`architectures={architectures!r}` in `{path}` must be a list such as ["LlamaForCausalLM"].')
    num_labels = config_dict.get("num_labels")
    if isinstance(num_labels, int | float) and not num_labels <= MAX_LABELS:
        raise ValueError(f"`num_labels={num_labels}` in `{path}` must be at most {MAX_LABELS:,}.")
    return config_dict


def hub_commit(source: str | Path, revision: str | None = None, file: str = "config.json") -> str | None:
    """The commit that a revision of a Hub repository is at, `None` for a folder. Errors as for `read_config_dict`.

    Args:
        file: one that such a repository has; it is downloaded. Without internet the commit is the one in the cache.
    """
    if local_folder(source, revision) is not None:
        return None
    with hub_errors_explained(source, revision):
        try:
            path = hf_hub_download(str(source), file, revision=revision, local_files_only=not hub_can_be_reached())
            return Path(path).parent.name
        except LocalEntryNotFoundError:
            raise
        except EntryNotFoundError:
            raise OSError(f"`{source}` holds no {file}.") from None


def hub_can_be_reached() -> bool:
    """Whether anything answers at the Hub's address, told at once: the client tries for half a minute."""
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT)
    except HTTPError:
        return False
    return True


def local_folder(source: str | Path, revision: str | None) -> Path | None:
    """The folder that is meant; `None` if it is the name of a repository on the Hub."""
    path = Path(source).expanduser()
    if path.is_dir():
        if revision is not None:
            raise ValueError(f"`revision={revision!r}` is for Hub ids; `{source}` is a folder.")
        return path
    if path.exists():
        raise ValueError(f"`{source}` is a file; name the folder of a checkpoint or a Hub id.")
    name = str(source)
    if isinstance(source, Path) or name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name:
        raise OSError(f"There is no folder `{source}`.")
    return None


@contextlib.contextmanager
def hub_errors_explained(source: str | Path, revision: str | None) -> Iterator[None]:
    """One line with the way out for what can go wrong with a repository."""
    try:
        yield
    except HFValidationError:
        message = f"`{source}` is neither a folder nor a Hub id"
    except GatedRepoError:
        message = f"`{source}` is gated: accept its terms on the Hub, then `hf auth login`"
    except RevisionNotFoundError:
        message = f"`{source}` has no revision `{revision}`"
    except RepositoryNotFoundError:
        message = f"There is no folder and no Hub repository `{source}`, or it is private: `hf auth login`"
    except LocalEntryNotFoundError:
        message = f"There is no folder `{source}`, and the Hub cannot be reached or HF_HUB_OFFLINE is set"
    except EntryNotFoundError:
        message = f"`{source}` holds no config.json, so it is not a transformers checkpoint"
    else:
        return
    raise OSError(f"{message}.") from None


def file_inside(folder: Path, name: str) -> Path | None:
    """Where a file of a folder is in truth, `None` if there is none.

    Raises:
        ValueError: if it is a link out of the folder, or no regular file. In the Hub's cache files are links into the
            folder `blobs` of their repository.
    """
    path, root = folder / name, folder.resolve()
    if not os.path.lexists(path):
        return None
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError):  # of a loop of links, which depends on the version of Python
        raise ValueError(f"`{path}` is a link to nowhere. Remove it.") from None
    blobs = root.parent.parent / "blobs"
    if not target.is_relative_to(root) and not (root.parent.name == "snapshots" and target.is_relative_to(blobs)):
        raise ValueError(
            f"`{path}` is a link out of the folder, to `{target}`. Put the file itself there, or remove the link."
        )
    if not stat.S_ISREG(target.stat().st_mode):
        raise ValueError(f"`{path}` is not a regular file. Remove it.")
    return target


def read_inside(folder: Path, name: str, max_bytes: int = MAX_BYTES) -> bytes | None:
    """The content of a file of a folder, `None` if there is none; errors as for `file_inside`, also of large ones."""
    target = file_inside(folder, name)
    if target is None:
        return None
    # What has taken its place meanwhile is not followed, nor waited for
    with open(os.open(target, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"`{folder / name}` has more than {max_bytes / 1e6:.0f} MB, so it is not what it should be.")
    return content


def read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"`{path}` is not JSON: {error}.") from None
    if not isinstance(content, dict):
        raise ValueError(f"`{path}` holds no JSON object.")
    return content
