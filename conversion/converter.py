# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""PreNorm checkpoint -> AttnRes checkpoint -> PreNorm checkpoint, without changing what they compute."""

import copy
from dataclasses import fields, replace
from pathlib import Path

import torch
from transformers import PreTrainedConfig
from typing_extensions import Unpack

from ..base.probe import probe_stacks
from ..checkpoints.checkpoint import (
    ATTNRES_TYPES,
    BASE_CONFIG_NAME,
    PROJECTION_NAMES,
    QUERY_NAMES,
    Checkpoint,
    config_errors_explained,
    depth_config_of,
    open_checkpoint,
    refuse_links_out,
)
from ..checkpoints.reports import ConversionReport
from ..configuration_attnres import AttnResConfig, remote_code_auto_map
from ..depth.queries import AttnResDepthQueries
from ..depth.reads import ReadConfig
from ..modeling_attnres import AttnResForCausalLM
from ..multimodal_attnres import AttnResForConditionalGeneration, AttnResMultimodalConfig
from ..utils.files import check_destination, hidden_folder
from ..utils.keywords import with_keywords_of
from ..utils.untrusted import read_json
from .checks import (
    check_base_type,
    check_config,
    check_head,
    check_tensors,
    refuse_multimodal,
    refuse_other_naming,
    refuse_trained_queries,
    refuse_unscaled_eps,
)
from .gguf import find_gguf
from .options import Blocks, Choice, ConvertOptions, ReadChoice, Writing
from .writing import Conversion, write_checkpoint


DEFAULT_NUM_BLOCKS = 8


@with_keywords_of(Writing, ReadChoice, but=["may_differ"])
def convert(
    source: str | Path,
    destination: str | Path,
    *,
    block_size: int | None = None,
    num_blocks: int | None = None,
    full: bool = False,
    revision: str | None = None,
    gguf_file: str | None = None,
    self_contained: bool = False,
    **options: Unpack[ConvertOptions],
) -> ConversionReport:
    """Convert a PreNorm checkpoint to an AttnRes checkpoint that computes the same: its tensors and queries of zero.

    An AttnRes checkpoint whose queries are zero can be given other blocks or another read in the same way. Weight
    files are copied byte for byte, so memory does not grow with the model. Verification loads one model at a time.

    Args:
        source: folder or Hub id of a checkpoint of a supported family, or a GGUF file.
        destination: folder to write, which must be empty or not exist. It appears only when everything is done.
        block_size: sublayers per block.
        num_blocks: number of blocks. By default 8, or the number of sublayers if the base has fewer.
        full: Full AttnRes, the same as `block_size=1`.
        revision: branch, tag or commit of a Hub id.
        gguf_file: name of a GGUF file in `source`. transformers dequantises its weights to fp32 first.
        self_contained: put the model code into the folder, for programs that do not import this package. They load it
            with `trust_remote_code=True`. A checkpoint that already carries the code keeps it.
        link: make hard links to the weight files instead of copies, on the same disk.
        verify: run both models and compare them. Otherwise, only names, shapes and files are checked.
        verify_text: file with the text to compare on, instead of the built-in one.
        device: where to run the models, as `device_map` in `from_pretrained`.
        num_heads, query, query_rank, weights, open_block, stream: the read over depth, as the fields of
            `AttnResConfig` that begin with `attn_res_`. By default the read of the checkpoint, or else the paper's.

    Raises:
        ValueError: if the checkpoint cannot be converted, or the result is not equal. Then `destination` is not
            written.
        OSError: if files cannot be found, read or written.
        TypeError: for an unknown argument.
    """
    choice = Choice(Blocks(block_size, num_blocks, full), ReadChoice.of(options), self_contained)
    path = check_destination(destination, source)
    gguf = find_gguf(source, gguf_file, revision)
    how = Writing.of(options)
    if gguf is None:
        checkpoint = open_checkpoint(source, revision, check_type=check_base_type)
        return write_checkpoint(planned(checkpoint, choice), path, how)
    check_base_type(gguf.config_dict()["model_type"])
    with hidden_folder(path, "dequantised", gguf.num_bytes) as folder:
        weights = gguf.weights()
        conversion = planned(gguf.dequantize(folder), choice)
        return write_checkpoint(replace(conversion, weights=weights), path, how)


def planned(checkpoint: Checkpoint, choice: Choice) -> Conversion:
    """What is written of a checkpoint.

    Raises:
        ValueError: if it cannot be converted, or not as chosen.
    """
    if choice.self_contained:
        refuse_multimodal(checkpoint)
    refuse_other_naming(checkpoint)
    check_config(checkpoint)
    if checkpoint.is_attnres:
        conversion = change_of_read(checkpoint, choice)
    else:
        conversion = new_conversion(checkpoint, choice)
    depth = conversion.depth_config
    if choice.self_contained:
        depth.auto_map = remote_code_auto_map(depth.base_model_type)
    notes = []
    if checkpoint.is_multimodal:
        notes.append("compared on text only; the parts for images and sound are the base's, byte for byte")
    wanted, num_blocks = choice.blocks.num_blocks, num_blocks_of(depth)
    if wanted not in (None, num_blocks):
        notes.append(
            f"{wanted} blocks were requested, and the closest that fit are {num_blocks} of"
            f" {depth.attn_res_block_size} sublayers"
        )
    return replace(conversion, notes=notes)


def new_conversion(checkpoint: Checkpoint, choice: Choice) -> Conversion:
    """Of a PreNorm checkpoint: queries of zero are added."""
    config = config_with_depth_attention(checkpoint, choice)
    check_tensors(checkpoint)
    check_head(checkpoint, config)
    if checkpoint.has_lm_head and not checkpoint.is_multimodal:
        config.architectures = [AttnResForCausalLM.__name__]  # whatever the base calls itself
    return Conversion(
        "Conversion",
        checkpoint,
        config,
        add=initial_queries(query_prefixes_of(checkpoint), depth_config_of(config)),
        files={BASE_CONFIG_NAME: checkpoint.folder / "config.json"},
    )


def change_of_read(checkpoint: Checkpoint, choice: Choice) -> Conversion:
    """Of an AttnRes checkpoint: other blocks, or another read, whose queries may be of other tensors."""
    check_tensors(checkpoint)
    config = config_with_other_read(checkpoint, choice)
    if choice.is_empty:
        size = checkpoint.text_config.attn_res_block_size
        raise ValueError(
            f"`{checkpoint.name}` is an AttnRes checkpoint already, with blocks of {size} sublayers: give the"
            " blocks or the read to change to, such as `--num-blocks 8`."
        )
    check_head(checkpoint, config)
    read = choice.read.as_fields()
    conversion = Conversion("Change of the read" if read else "Change of blocks", checkpoint, config)
    if {"attn_res_query", "attn_res_query_rank"}.isdisjoint(read):
        return conversion
    queries = initial_queries(query_prefixes_of(checkpoint), depth_config_of(config))
    return replace(conversion, add=queries, rename=without_queries)


def query_prefixes_of(checkpoint: Checkpoint) -> list[str]:
    """The prefixes of the names that depth queries have, or will have, in the files of a checkpoint.

    There is one for each stack of layers.

    Files of multimodal models may have other names than the model, and then transformers knows each of those, and not
    what they would be of the queries.
    """
    if not checkpoint.is_multimodal or checkpoint.is_attnres:
        return checkpoint.query_prefixes
    with torch.device("meta"):
        model = AttnResForConditionalGeneration(AttnResMultimodalConfig.from_base_config(checkpoint.config))
    return [f"{model.trunk_name}."]


def config_with_depth_attention(checkpoint: Checkpoint, choice: Choice) -> PreTrainedConfig:
    config_class = AttnResMultimodalConfig if checkpoint.is_multimodal else AttnResConfig
    blocks = choice.blocks.as_arguments()
    if not blocks:
        blocks = {"num_blocks": min(DEFAULT_NUM_BLOCKS, max(map(sum, probe_stacks(checkpoint.text_config))))}
    read = choice.read.as_fields()
    return config_class.from_base_config(checkpoint.config, **blocks, **read, attn_res_scale_norm_eps=True)


def config_with_other_read(checkpoint: Checkpoint, choice: Choice) -> PreTrainedConfig:
    """The config of an AttnRes checkpoint with other blocks, or another read.

    Raises:
        ValueError: if that would change what the model computes.
    """
    blocks, read = choice.blocks.as_arguments(), choice.read.as_fields()
    what = "read over depth" if read else "block size"
    refuse_trained_queries(checkpoint, f"its {what} cannot change without changing what it computes")
    refuse_unscaled_eps(checkpoint, "another block size would change what it computes")
    old = checkpoint.text_config
    if not blocks:
        blocks = {"block_size": old.attn_res_block_size}
    if read.get("attn_res_query") == "learned":
        read = {"attn_res_query_rank": None, **read}
    names = [f"attn_res_{of_read.name}" for of_read in fields(ReadConfig)]
    read = {name: getattr(old, name) for name in names} | read
    new = AttnResConfig.from_base_config(old.to_base_config(), **blocks, **read)
    config = copy.deepcopy(checkpoint.config)
    for name in ("attn_res_block_size", *names):
        setattr(depth_config_of(config), name, getattr(new, name))
    return config


def num_blocks_of(config: AttnResConfig) -> int:
    """Of an encoder and a decoder, in the one with more sublayers."""
    return -(-max(map(sum, config.sublayers_of_stacks())) // config.attn_res_block_size)


def initial_queries(prefixes: list[str], config: AttnResConfig) -> dict[str, torch.Tensor]:
    """Queries of zero and key norms of one by the names of their tensors; random ones are those of one seed."""
    found: dict[str, torch.Tensor] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for prefix, sublayers in zip(prefixes, config.sublayers_of_stacks()):
            queries = AttnResDepthQueries(config, sum(sublayers) + 1)
            found |= {f"{prefix}depth_queries.{name}": tensor for name, tensor in queries.state_dict().items()}
    return found


def says_the_same(file: Path, config: PreTrainedConfig) -> bool:
    """Whether a config file makes the same model as a config, which may have been changed since the file was written.

    Raises:
        ValueError: if the file is not a config.
    """

    def fields_of(config_dict: dict) -> dict:
        config_dict = {name: value for name, value in config_dict.items() if str(name)[:1] != "_"}
        for name in ("architectures", "auto_map", "transformers_version"):
            config_dict.pop(name, None)
        return {name: fields_of(value) if isinstance(value, dict) else value for name, value in config_dict.items()}

    config_dict = read_json(file)
    if config_dict.get("model_type") != config.model_type:
        return False
    with config_errors_explained(str(file)):
        found = type(config).from_dict(config_dict)
    return fields_of(found.to_dict()) == fields_of(config.to_dict())


def without_queries(name: str) -> str | None:
    return None if name.endswith((*QUERY_NAMES, *PROJECTION_NAMES)) else name


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
    """Restore the PreNorm checkpoint that an AttnRes one was made from: its tensors, bit for bit, without queries.

    If every query is zero, it computes the same. Otherwise, what the queries have learned is lost: this needs `force`,
    and the report shows how much it changes. Other arguments and errors are those of `convert`.
    """
    path = check_destination(destination, source)

    def check_is_attnres(model_type: str):
        if model_type not in ATTNRES_TYPES:
            raise ValueError(
                f"`{source}` is a `{model_type}` checkpoint, not an AttnRes one; there is nothing to revert."
            )

    checkpoint = open_checkpoint(source, revision, check_type=check_is_attnres)
    check_config(checkpoint)
    if not force:
        refuse_trained_queries(
            checkpoint, "without them it computes something else. `--force` writes it and measures the loss"
        )
        refuse_unscaled_eps(checkpoint, "its base computes something else, if by little. `--force` writes it")
    check_tensors(checkpoint)
    config = checkpoint.config.to_base_config()
    kept = checkpoint.folder / BASE_CONFIG_NAME
    refuse_links_out(checkpoint, [BASE_CONFIG_NAME])
    files = {"config.json": kept} if kept.exists() and says_the_same(kept, config) else {}
    conversion = Conversion("Reversal", checkpoint, config, rename=without_queries, files=files)
    return write_checkpoint(conversion, path, Writing(link, verify, verify_text, device, may_differ=force))
