# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""PreNorm checkpoint -> AttnRes checkpoint -> PreNorm checkpoint, without changing what they compute."""

import copy
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from ..checkpoint import QUERY_NAMES, Checkpoint, open_checkpoint
from ..configuration_attnres import AttnResConfig
from ..modeling_attnres import REMOTE_CODE_AUTO_MAP
from ..multimodal_attnres import AttnResMultimodalConfig
from ..reports import ConversionReport
from ..sources import read_config_dict
from .checks import (
    MODEL_TYPES,
    check_config,
    check_head,
    check_tensors,
    check_type,
    depth_config,
    is_attnres,
    refuse_multimodal,
    refuse_other_naming,
    refuse_trained_queries,
    refuse_unscaled_eps,
)
from .files import check_destination
from .writing import write_checkpoint


DEFAULT_NUM_BLOCKS = 8


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    block_size: int | None = None,
    num_blocks: int | None = None,
    full: bool = False,
    revision: str | None = None,
    link: bool = False,
    self_contained: bool = False,
    verify: bool = True,
    verify_text: str | Path | None = None,
    device: str = "auto",
) -> ConversionReport:
    """Write the AttnRes checkpoint that computes what a PreNorm one does: its tensors and queries of zero.

    An AttnRes checkpoint whose queries are zero gets another block size in the same way. Weight files are copied byte
    for byte, so memory does not grow with the model; to verify, one model at a time is loaded.

    Args:
        source: folder or Hub id of a checkpoint of a supported family.
        destination: folder to write, which must not exist or be empty. It is there when everything is done, or not at
            all.
        block_size: sublayers per block.
        num_blocks: number of blocks, 8 if nothing else is asked for.
        full: Full AttnRes, the same as `block_size=1`.
        revision: branch, tag or commit of a Hub id.
        link: hard links in place of copies of the weight files, on one disk.
        self_contained: put the model code into the folder, for programs that do not import this package; they load it
            with `trust_remote_code=True`. Of a checkpoint that carries the code it stays so.
        verify: run both and compare; without, only names, shapes and files are checked.
        verify_text: file with the text to compare on, in place of the built-in one.
        device: where to run them, what `from_pretrained` takes as `device_map`.

    Raises:
        ValueError: for what cannot be converted, and if the result is not equal; nothing is left at `destination`.
        OSError: if files cannot be found, read or written.
    """
    blocks = chosen_blocks(block_size, num_blocks, full)
    path = check_destination(destination, source)
    check_type(read_config_dict(source, revision))
    checkpoint = open_checkpoint(source, revision)
    if self_contained:
        refuse_multimodal(checkpoint)
    refuse_other_naming(checkpoint)
    check_config(checkpoint)
    check_tensors(checkpoint)

    is_new = not is_attnres(checkpoint)
    config = (
        config_with_depth_attention(checkpoint, blocks) if is_new else config_with_other_blocks(checkpoint, blocks)
    )
    check_head(checkpoint, config)
    if self_contained:
        config.auto_map = dict(REMOTE_CODE_AUTO_MAP)
    notes = ["compared on text; what reads images or sound is the base's, byte for byte"]
    return write_checkpoint(
        "Conversion" if is_new else "Change of blocks",
        checkpoint,
        path,
        config,
        add=initial_queries(checkpoint.prefix, depth_config(config)) if is_new else {},
        link=link,
        verify=verify,
        verify_text=verify_text,
        device=device,
        notes=notes if checkpoint.is_multimodal else [],
    )


def chosen_blocks(block_size: int | None, num_blocks: int | None, full: bool) -> dict[str, int]:
    """The one argument of `AttnResConfig.from_base_config` that says how layers are divided into blocks.

    Raises:
        ValueError: if more than one is given.
    """
    given = {"block_size": block_size, "num_blocks": num_blocks, "full": full or None}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) > 1:
        listed = ", ".join(f"`{name}={value}`" for name, value in given.items())
        raise ValueError(f"{listed} contradict: give one of them.")
    if full:
        return {"block_size": 1}
    return given or {"num_blocks": DEFAULT_NUM_BLOCKS}


def config_with_depth_attention(checkpoint: Checkpoint, blocks: dict[str, int]) -> PreTrainedConfig:
    config_class = AttnResMultimodalConfig if checkpoint.is_multimodal else AttnResConfig
    return config_class.from_base_config(checkpoint.config, **blocks, attn_res_scale_norm_eps=True)


def config_with_other_blocks(checkpoint: Checkpoint, blocks: dict[str, int]) -> PreTrainedConfig:
    """The config of an AttnRes checkpoint with another block size.

    Raises:
        ValueError: if that would change what the model computes.
    """
    refuse_trained_queries(checkpoint, "its block size cannot change without changing what it computes")
    refuse_unscaled_eps(checkpoint, "another block size would change what it computes")
    partition = AttnResConfig.from_base_config(checkpoint.text_config.to_base_config(), **blocks)
    config = copy.deepcopy(checkpoint.config)
    depth_config(config).attn_res_block_size = partition.attn_res_block_size
    return config


def initial_queries(prefix: str, config: AttnResConfig) -> dict[str, torch.Tensor]:
    """Queries of zero and key norms of one, `[sites, hidden]` each, by the names of their tensors."""
    shape = config.num_sites, config.hidden_size
    query, key_norm = (prefix + name for name in QUERY_NAMES)
    return {query: torch.zeros(shape), key_norm: torch.ones(shape)}


def revert(
    source: str | Path,
    destination: str | Path,
    *,
    force: bool = False,
    revision: str | None = None,
    link: bool = False,
    verify: bool = True,
    verify_text: str | Path | None = None,
    device: str = "auto",
) -> ConversionReport:
    """Write the PreNorm checkpoint that an AttnRes one was made of: its tensors, bit for bit, without the queries.

    That is the same function if every query is zero. Otherwise what they have learned is lost: only with `force`, and
    the report tells how much that changes. Other arguments and errors as for `convert`.
    """
    path = check_destination(destination, source)
    model_type = read_config_dict(source, revision)["model_type"]
    if model_type not in MODEL_TYPES:
        raise ValueError(f"`{source}` is a `{model_type}` checkpoint, not an AttnRes one; there is nothing to revert.")
    checkpoint = open_checkpoint(source, revision)
    check_config(checkpoint)
    if not force:
        refuse_trained_queries(
            checkpoint, "without them it computes something else. `--force` writes it and measures the loss"
        )
        refuse_unscaled_eps(checkpoint, "its base computes something else, if by little. `--force` writes it")
    check_tensors(checkpoint)
    return write_checkpoint(
        "Reversal",
        checkpoint,
        path,
        checkpoint.config.to_base_config(),
        rename=lambda name: None if name.endswith(QUERY_NAMES) else name,
        link=link,
        verify=verify,
        verify_text=verify_text,
        device=device,
        may_differ=force,
    )
