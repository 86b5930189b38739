# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Where a checkpoint comes from: a folder, or a repository on the Hub through its cache; and its config as it is."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants, hf_hub_download, snapshot_download
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

from ..utils.untrusted import read_json


# Configuration classes make a name for each, in memory
MAX_LABELS = 1_000_000
# Nor are there models with so many layers, of which configuration classes make lists
MAX_LAYERS = 10_000
# Of the first request to the Hub, after which it is taken to be out of reach: the client itself tries six times
HUB_TIMEOUT = 5
# That of httpx or httpx2, whichever huggingface_hub stands on
HTTPError = HfHubHTTPError.__bases__[0]


@dataclass(frozen=True)
class Location:
    """Where a checkpoint is: a folder, or a snapshot of a Hub repository in the cache, at first with the config alone.

    `commit` is that of the repository, of which all files are, and `can_be_reached` whether the Hub has answered.
    """

    source: str | Path
    folder: Path
    commit: str | None = None
    can_be_reached: bool = False

    def config_dict(self) -> dict:
        """The config as it is in its file; errors as for `read_config_dict`."""
        return _read_config_dict(self.folder / "config.json")

    def download(self, ignore_patterns: list[str]):
        """Fetch all files of a repository that are not in the cache; errors as for `read_config_dict`."""
        if self.commit is not None:
            with hub_errors_explained(self.source, self.commit):
                snapshot_download(
                    str(self.source),
                    revision=self.commit,
                    ignore_patterns=ignore_patterns,
                    local_files_only=not self.can_be_reached,
                )


def locate(source: str | Path, revision: str | None = None) -> Location:
    """Find a checkpoint by its config. Of a Hub repository, nothing else is downloaded.

    Raises:
        OSError: if there is no such folder or repository, or no config in it.
        ValueError: if it is that of an adapter.
    """
    folder = local_folder(source, revision)
    if folder is None:
        can_be_reached = hub_can_be_reached()
        with hub_errors_explained(source, revision):
            path = hf_hub_download(str(source), "config.json", revision=revision, local_files_only=not can_be_reached)
        folder = Path(path).parent
        return Location(source, folder, commit=folder.name, can_be_reached=can_be_reached)
    if not (folder / "config.json").exists():
        if (folder / "adapter_config.json").exists():
            raise ValueError(
                f"`{source}` is a PEFT adapter, not a model. Merge it into its base first:"
                " `AutoPeftModelForCausalLM.from_pretrained(...).merge_and_unload().save_pretrained(...)`."
            )
        gguf = min((path.name for path in folder.glob("*.gguf")), default=None)
        hint = "" if gguf is None else f"; `attnres convert --gguf-file {gguf}` converts its GGUF file"
        raise OSError(f"`{source}` holds no config.json, so it is not a transformers checkpoint{hint}.")
    return Location(source, folder)


def read_config_dict(source: str | Path, revision: str | None = None) -> dict:
    """The config of a checkpoint as it is in its file. Of a Hub repository, nothing else is downloaded.

    Raises:
        OSError: if there is no such folder or repository, or no config in it.
        ValueError: if it is not a config.
    """
    return locate(source, revision).config_dict()


def _read_config_dict(path: Path) -> dict:
    config_dict = read_json(path)
    if not isinstance(config_dict.get("model_type"), str):
        raise ValueError(f"`{path}` names no `model_type`, so it is not a transformers config.")
    architectures = config_dict.get("architectures")
    if not isinstance(architectures, list | None) or not all(isinstance(name, str) for name in architectures or ()):
        raise ValueError(f'`architectures={architectures!r}` in `{path}` must be a list such as ["LlamaForCausalLM"].')
    num_labels = config_dict.get("num_labels")
    if isinstance(num_labels, int | float) and not num_labels <= MAX_LABELS:
        raise ValueError(f"`num_labels={num_labels}` in `{path}` must be at most {MAX_LABELS:,}.")
    _check_layers(config_dict, path)
    return config_dict


def _check_layers(config_dict: dict, path: Path):
    """Raise a `ValueError` for a number of layers that would fill the memory, in the config or in one within."""
    for name, value in config_dict.items():
        if isinstance(value, dict):
            _check_layers(value, path)
        elif not isinstance(value, int | float) or "size" in name:
            continue
        elif ("layer" in name or name == "num_blocks") and abs(value) > MAX_LAYERS:
            raise ValueError(f"`{name}={value}` in `{path}` must be at most {MAX_LAYERS:,}.")


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
