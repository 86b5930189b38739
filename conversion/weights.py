# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The files of a converted checkpoint: its weights byte for byte, and what belongs to them."""

import json
import math
import os
import shutil
from pathlib import Path

import torch
from huggingface_hub.utils import tqdm
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..checkpoints.checkpoint import INDEX_NAME, Checkpoint


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
    source: Checkpoint, folder: Path, *, add: dict[str, torch.Tensor], names: dict[str, str | None], link: bool
):
    """Write the source's tensors, bit for bit, and one file with those that are added.

    Nothing larger than a buffer is read into memory: files are copied, or linked; where a tensor gets another name or
    goes, the file is written from the memory map of the old one.

    Args:
        names: new names of all tensors, `None` for those to leave out.
    """
    kept = {name: shard for name, shard in source.weight_map.items() if names[name] is not None}
    changed = {shard for name, shard in source.weight_map.items() if names[name] != name}
    shards = sorted(set(kept.values()))
    count = len(shards) + bool(add)
    files = {shard: f"model-{i:05d}-of-{count:05d}.safetensors" for i, shard in enumerate(shards, start=1)}
    if count == 1:
        files = {shards[0]: "model.safetensors"}
    total = sum((source.folder / shard).stat().st_size for shard in shards)
    with tqdm(total=total, unit="B", unit_scale=True, desc="Linking" if link else "Copying") as progress:
        for shard, file in files.items():
            path = source.folder / shard
            if shard in changed:
                _rewrite(path, folder / file, names)
            elif link:
                _link(path, folder / file)
            else:
                shutil.copyfile(path, folder / file)
            progress.update(path.stat().st_size)
    weight_map = {names[tensor]: files[shard] for tensor, shard in kept.items()}
    if add:
        last = f"model-{count:05d}-of-{count:05d}.safetensors"
        _save(add, folder / last, {"format": "pt"})
        weight_map |= dict.fromkeys(add, last)
    if count > 1:
        _write_index(folder, weight_map)


def _write_index(folder: Path, weight_map: dict[str, str]):
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


def _rewrite(source: Path, target: Path, names: dict[str, str | None]):
    with safe_open(source, framework="pt") as file:
        kept = {name: new for name in file.keys() if (new := names[name]) is not None}
        _save({new: file.get_tensor(name) for name, new in kept.items()}, target, file.metadata())


def _save(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str] | None):
    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:
        raise OSError(f"`{path.name}` cannot be written: {error}.") from None
    shutil.copymode(path.with_name("config.json"), path)  # safetensors lets nobody else read
