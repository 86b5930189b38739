# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Checkpoint folders: checked before they are used, and written whole or not at all."""

import contextlib
import fnmatch
import functools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from huggingface_hub import constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    StrictDataclassError,
)
from huggingface_hub.utils import get_session, tqdm
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from ..configuration_attnres import base_config_class


INDEX_NAME = "model.safetensors.index.json"
REPORT_NAMES = ("conversion_report.json", "conversion_report.md")
# Weights that are not read: of other formats, and pickles, which can run code when loaded
OTHER_WEIGHTS = {
    *(".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".msgpack", ".h5", ".npz", ".tflite", ".mlmodel"),
    *(".safetensors", ".gguf", ".ggml", ".onnx", ".onnx_data"),
}
QUERY_NAMES = ("depth_queries.query", "depth_queries.key_norm")
PICTURES = ("*.png", "*.jpg", "*.jpeg", "*.gif", "*.svg", "*.webp")
# What a checkpoint is made of beside its config and weights, by folder; nothing else is copied or uploaded, as it may
# be anything: keys, logs, notes, states of an optimizer
COMPANIONS = {
    "": (
        *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
        *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "*.model", "*.tiktoken", "tekken.json"),
        *("tokenizer.model.v*", "chat_template.jinja", "chat_template.json", "params.json", "configuration.json"),
        *("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"),
        *("recipe.yaml", "quant*_config.json"),
        *("hf_quant_config.json", "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"),
        *("configuration_*.py", "modeling_*.py", "tokenization_*.py", "generation_*.py", "depth_*.py"),
        *("README*.md", "LICENSE*", "LICENCE*", "NOTICE*", "COPYING*", "USE_POLICY*", "CITATION*", *REPORT_NAMES),
        ".gitattributes",
    ),
    "additional_chat_templates": ("*.jinja",),
    "1_Pooling": ("config.json",),
    "assets": PICTURES,
    "figures": PICTURES,
    "images": PICTURES,
    "depth": PICTURES,  # the page and the JSON quote the text that was read
    "evaluation": ("table.md", "differences.png"),
}
# Configuration classes make a name for each, in memory
MAX_LABELS = 1_000_000
# Of the first request to the Hub, after which it is taken to be out of reach: the client itself tries six times
HUB_TIMEOUT = 5
# That of httpx or httpx2, whichever huggingface_hub stands on
HTTPError = HfHubHTTPError.__bases__[0]


@dataclass(frozen=True)
class Checkpoint:
    """A folder with a config, safetensors weights that are whole, and what else belongs to a checkpoint.

    `name` is what the user called it, `commit` the revision it has on the Hub, `weight_map` the file of every tensor
    and `companions` the other files that belong to it, relative to the folder. All others are in `left_behind`:
    weights in other formats, and whatever `COMPANIONS` does not name, whole folders where nothing in them does.
    """

    name: str
    folder: Path
    commit: str | None
    config_dict: dict
    weight_map: dict[str, str]
    companions: tuple[str, ...]
    left_behind: tuple[str, ...]

    @functools.cached_property
    def config(self) -> PreTrainedConfig:
        with valid_config(self.name):
            return AutoConfig.from_pretrained(self.folder, trust_remote_code=False)

    @property
    def title(self) -> str:
        """What to call it in what others will read: its id on the Hub, or the name of its folder."""
        return self.name if self.commit is not None else Path(self.name).absolute().name

    @property
    def shards(self) -> list[str]:
        return sorted(set(self.weight_map.values()))

    @property
    def text_config(self) -> PreTrainedConfig:
        """That of the decoder: of a multimodal model that of its language model, else the config itself."""
        return self.config.text_config if self.is_multimodal else self.config

    @property
    def is_multimodal(self) -> bool:
        """Whether its decoder is the language model within another model."""
        return "text_config" in type(self.config).sub_configs

    @functools.cached_property
    def lm_class(self) -> type[PreTrainedModel]:
        """The base's model with a language-modelling head: its causal language model, or multimodal model."""
        base_model_type = getattr(self.config, "base_model_type", self.config.model_type)
        if self.is_multimodal:
            return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[CONFIG_MAPPING[base_model_type]]
        return MODEL_FOR_CAUSAL_LM_MAPPING[base_config_class(base_model_type)]

    @property
    def auto_class(self) -> Any:
        """What loads it with its head, or the trunk alone where that is not one of a language model."""
        if self.is_multimodal:
            return AutoModelForImageTextToText
        return AutoModelForCausalLM if self.has_lm_head else AutoModel

    @functools.cached_property
    def prefix(self) -> str:
        """Of the names of the decoder's tensors: empty where a checkpoint holds the decoder alone."""
        if self.is_multimodal:
            return self._prefix_of_language_model()
        # What a class says of its prefix is not always so, and then it is the usual one
        prefixes = (f"{self.lm_class.base_model_prefix}.", "model.")
        return next((p for p in prefixes if any(name.startswith(p) for name in self.weight_map)), "")

    def _prefix_of_language_model(self) -> str:
        """Found by its embedding, as files may have other names than the model that is loaded from them."""
        with valid_config(self.name), torch.device("meta"):
            decoder = AutoModel.from_config(self.text_config)
        embedding = decoder.get_input_embeddings().weight
        name = next(name for name, parameter in decoder.named_parameters() if parameter is embedding)
        prefixes = [found.removesuffix(name) for found in self.weight_map if found.endswith(f".{name}")]
        if len(prefixes) != 1:
            raise ValueError(
                f"`{self.name}` has {len(prefixes)} tensors named `...{name}`, the embedding of its language model,"
                " where there should be one."
            )
        return prefixes[0]

    @property
    def has_lm_head(self) -> bool:
        """Whether it is a language model's; of other checkpoints the trunk is looked at."""
        names = self.lm_class.__name__, "AttnResForCausalLM", "AttnResForConditionalGeneration"
        architectures = self.config_dict.get("architectures") or names  # a list, see `read_config_dict`
        return bool(self.prefix) and architectures[0] in names

    @property
    def num_bytes(self) -> int:
        return sum((self.folder / name).stat().st_size for name in [*self.shards, *self.companions])

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer; `None` if there is none that loads here, and without running code of its own."""
        if not {"tokenizer.json", "tokenizer_config.json", "tokenizer.model"} & set(self.companions):
            return None
        try:
            return AutoTokenizer.from_pretrained(self.folder, trust_remote_code=False)
        except (ValueError, OSError, ImportError):
            return None

    def tensors(self, names: list[str]) -> dict[str, torch.Tensor]:
        """Some of the tensors, in memory."""
        found = {}
        for shard in sorted({self.weight_map[name] for name in names}):
            with safe_open(self.folder / shard, framework="pt") as file:
                found.update({name: file.get_tensor(name) for name in names if self.weight_map[name] == shard})
        return found


def read_config_dict(source: str | Path, revision: str | None = None) -> dict:
    """The config of a checkpoint as it is in its file. Of a Hub repository, nothing else is downloaded.

    Raises:
        OSError: if there is no such folder or repository, or no config in it.
        ValueError: if it is not a config.
    """
    folder = _local_folder(source, revision)
    if folder is None:
        with _hub_errors(source, revision):
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
            hint = " (GGUF files are not read; take the safetensors checkpoint)" if any(folder.glob("*.gguf")) else ""
            raise OSError(f"`{source}` holds no config.json, so it is not a transformers checkpoint{hint}.")
    config_dict = _read_json(path)
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
    if _local_folder(source, revision) is not None:
        return None
    with _hub_errors(source, revision):
        try:
            path = hf_hub_download(str(source), file, revision=revision, local_files_only=not hub_can_be_reached())
            return Path(path).parent.name
        except LocalEntryNotFoundError:
            raise
        except EntryNotFoundError:
            raise OSError(f"`{source}` holds no {file}.") from None


def open_checkpoint(source: str | Path, revision: str | None = None) -> Checkpoint:
    """A checkpoint from a folder, or from the Hub through its cache, with everything about it checked but the values.

    Raises:
        OSError: if files are missing or cannot be read.
        ValueError: if they are not what they should be; the message names the file and the way out.
    """
    config_dict = read_config_dict(source, revision)
    folder, commit = _local_folder(source, revision), None
    if folder is None:
        skipped = [f"*{suffix}" for suffix in OTHER_WEIGHTS - {".safetensors"}] + ["consolidated*"]
        with _hub_errors(source, revision):
            folder = Path(
                snapshot_download(
                    str(source),
                    revision=revision,
                    ignore_patterns=skipped,
                    local_files_only=not hub_can_be_reached(),
                )
            )
        commit = folder.name
    files = sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file() or path.is_symlink()
    )
    weight_map = _read_weight_map(folder, files, source)
    used = {"config.json", INDEX_NAME, *weight_map.values()}
    others = [name for name in files if name not in used]
    companions = [name for name in others if is_companion(name)]
    folders = {name.split("/")[0] for name in [*used, *companions] if "/" in name}
    left_behind = {
        name if "/" not in name or name.split("/")[0] in folders else name.split("/")[0] + "/"
        for name in set(others) - set(companions)
    }
    return Checkpoint(
        name=str(source),
        folder=folder,
        commit=commit,
        config_dict=config_dict,
        weight_map=weight_map,
        companions=tuple(companions),
        left_behind=tuple(sorted(left_behind)),
    )


def is_companion(name: str) -> bool:
    """Whether a file belongs to a checkpoint by its name, relative to the folder."""
    parent, _, base = name.rpartition("/")
    return any(fnmatch.fnmatchcase(base, pattern) for pattern in COMPANIONS.get(parent, ()))


def refuse_links_out(checkpoint: Checkpoint, names: Iterable[str]):
    """Raise a `ValueError` if one of the files is a link out of the folder: what lies there was not meant.

    In the Hub's cache files are links into the folder `blobs` of their repository.
    """
    folder = checkpoint.folder.resolve()
    allowed = [folder]
    if folder.parent.name == "snapshots":
        allowed.append(folder.parent.parent / "blobs")
    for name in names:
        target = (folder / name).resolve()
        if not any(target.is_relative_to(path) for path in allowed):
            raise ValueError(
                f"`{name}` of `{checkpoint.name}` is a link out of the folder, to `{target}`. Put the file itself"
                " there, or remove the link."
            )


def hub_can_be_reached() -> bool:
    """Whether anything answers at the Hub's address, told at once: the client tries for half a minute."""
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT)
    except HTTPError:
        return False
    return True


def _local_folder(source: str | Path, revision: str | None) -> Path | None:
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
def valid_config(name: str) -> Iterator[None]:
    """A `ValueError` of one line that names the checkpoint, for whatever a bad config makes transformers raise."""
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, ValueError | TypeError | StrictDataclassError) else f"{type(error).__name__}: "
        raise ValueError(f"config.json of `{name}` is not valid: {kind}{' '.join(str(error).split())}") from error


@contextlib.contextmanager
def _hub_errors(source: str | Path, revision: str | None) -> Iterator[None]:
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


def _read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"`{path}` is not JSON: {error}.") from None
    if not isinstance(content, dict):
        raise ValueError(f"`{path}` holds no JSON object.")
    return content


def _read_weight_map(folder: Path, files: list[str], source: str | Path) -> dict[str, str]:
    """The file of every tensor, as transformers would find them, checked against the files themselves."""
    if "model.safetensors" in files:  # comes before an index, as in transformers
        return dict.fromkeys(tensor_names(folder / "model.safetensors"), "model.safetensors")
    if INDEX_NAME not in files:
        pickled = [name for name in files if Path(name).suffix in {".bin", ".pt", ".pth", ".ckpt"}]
        if pickled:
            raise ValueError(
                f"`{source}` has its weights in `{pickled[0]}`, a pickle, which can run code when it is read. If you"
                " trust it, save it as safetensors: `AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)`."
            )
        raise OSError(f"`{source}` holds neither model.safetensors nor {INDEX_NAME}.")
    weight_map = _read_json(folder / INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"`{folder / INDEX_NAME}` has no `weight_map`.")
    for name in sorted(set(map(str, weight_map.values()))):
        if name not in files:  # which also keeps names like `../x` out
            raise OSError(f"`{INDEX_NAME}` of `{source}` names the file `{name}`, which is not there.")
        listed = {tensor for tensor, file in weight_map.items() if file == name}
        present = set(tensor_names(folder / name))
        if listed - present:
            raise ValueError(
                f"`{name}` of `{source}` lacks the tensor `{min(listed - present)}`, which the index lists."
            )
        if present - listed:
            raise ValueError(
                f"`{name}` of `{source}` holds the tensor `{min(present - listed)}`, which the index does not list"
                " as its own. Write the index anew: `from_pretrained(...).save_pretrained(...)`."
            )
    return weight_map


def tensor_names(path: Path) -> list[str]:
    """The tensors of a safetensors file, after a look whether it is whole."""
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except SafetensorError as error:
        raise ValueError(f"`{path}` is truncated or not a safetensors file ({error}). Get it anew.") from None


def check_destination(destination: str | Path, source: str | Path) -> Path:
    """The folder to write, after a look that nothing is there and that nothing of the source would be touched.

    Raises:
        ValueError: otherwise.
    """
    path, folder = Path(destination).expanduser().absolute(), Path(source).expanduser()
    if path.is_symlink():
        raise ValueError(f"`{destination}` is a link, to `{path.readlink()}`; name the folder itself.")
    if folder.is_dir() and path.resolve() == folder.resolve():
        raise ValueError(f"`{destination}` is the source itself; name another folder.")
    if folder.is_dir() and folder.resolve() in path.resolve().parents:
        raise ValueError(f"`{destination}` is inside of the source; name a folder outside of it.")
    if path.exists() and not path.is_dir():
        raise ValueError(f"`{destination}` is a file; name a folder.")
    if path.exists() and any(path.iterdir()):
        raise ValueError(f"`{destination}` is not empty; name a new folder or delete it first.")
    return path


@contextlib.contextmanager
def whole_folder(path: Path, num_bytes: int) -> Iterator[Path]:
    """A hidden folder beside `path` to write to. It takes the place of `path` when all went well, or it is removed.

    Where a process was killed it stays, until the next one that writes to the same place.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path.with_name(f".{path.name}.lock"))
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise OSError(f"Another process is writing `{path}`.") from None
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        free = shutil.disk_usage(path.parent).free
        if num_bytes > free:
            raise OSError(
                f"`{path}` needs {num_bytes / 1e9:.1f} GB, on its disk {free / 1e9:.1f} GB are free."
                " Within one disk `--link` needs next to nothing."
            )
        unfinished.mkdir()
        yield unfinished
        if path.exists():
            path.rmdir()  # an empty folder; what has been put there meanwhile makes this fail
        unfinished.rename(path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


def copy_companions(source: Checkpoint, folder: Path, names: dict[str, str | None]):
    """Copy what belongs to the weights: tokenizer, templates, generation config, licence, see `COMPANIONS`.

    Args:
        names: new names of some of the files, `None` for those to leave out.
    """
    for name in source.companions:
        new_name = names.get(name, name)
        if new_name is not None:
            target = folder / new_name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source.folder / name, target)


def write_weights(
    source: Checkpoint,
    folder: Path,
    *,
    add: dict[str, torch.Tensor],
    rename: Callable[[str], str | None],
    link: bool,
):
    """Write the source's tensors, bit for bit, and one file with those that are added.

    Nothing larger than a buffer is read into memory: files are copied, or linked; where a tensor gets another name or
    goes (`rename` gives `None`), the file is written from the memory map of the old one.
    """
    kept = {name: shard for name, shard in source.weight_map.items() if rename(name) is not None}
    shards = sorted(set(kept.values()))
    count = len(shards) + bool(add)
    names = {shard: f"model-{i:05d}-of-{count:05d}.safetensors" for i, shard in enumerate(shards, start=1)}
    if count == 1:
        names = {shards[0]: "model.safetensors"}
    total = sum((source.folder / shard).stat().st_size for shard in shards)
    with tqdm(total=total, unit="B", unit_scale=True, desc="Linking" if link else "Copying") as progress:
        for shard, name in names.items():
            path = source.folder / shard
            if any(rename(tensor) != tensor for tensor, file in source.weight_map.items() if file == shard):
                _rewrite(path, folder / name, rename)
            elif link:
                _link(path, folder / name)
            else:
                shutil.copyfile(path, folder / name)
            progress.update(path.stat().st_size)
    weight_map = {rename(tensor): names[shard] for tensor, shard in kept.items()}
    if add:
        last = f"model-{count:05d}-of-{count:05d}.safetensors"
        _save(add, folder / last, {"format": "pt"})
        weight_map |= dict.fromkeys(add, last)
    if count > 1:
        sizes = [_sizes(folder / shard) for shard in set(weight_map.values())]
        num_parameters, num_bytes = (sum(column) for column in zip(*sizes))
        index = {
            "metadata": {"total_parameters": num_parameters, "total_size": num_bytes},
            "weight_map": dict(sorted(weight_map.items())),
        }
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _sizes(path: Path) -> tuple[int, int]:
    """Number of parameters and of bytes in a safetensors file: its length in 8 bytes, a JSON header, the tensors."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    shapes = [entry["shape"] for name, entry in header.items() if name != "__metadata__"]
    return sum(map(math.prod, shapes)), path.stat().st_size - 8 - length


def _link(source: Path, target: Path):
    source = source.resolve()  # in the Hub's cache files are symbolic links
    try:
        os.link(source, target)
    except OSError as error:
        raise OSError(f"`{source}` cannot be linked ({error.strerror}); leave `--link` out to copy it.") from None


def _rewrite(source: Path, target: Path, rename: Callable[[str], str | None]):
    with safe_open(source, framework="pt") as file:
        kept = {name: rename(name) for name in file.keys() if rename(name) is not None}
        _save({new: file.get_tensor(name) for name, new in kept.items()}, target, file.metadata())


def _save(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str] | None):
    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:
        raise OSError(f"`{path.name}` cannot be written: {error}.") from None
    shutil.copymode(path.with_name("config.json"), path)  # safetensors lets nobody else read
