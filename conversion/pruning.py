# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""What each layer of a model is worth, and checkpoints with fewer layers, or with some repeated.

A weight does not say what a source is worth (docs/weights.md), so layers are measured: each is left out in turn, and
the loss is that of the model which `select_layers` makes.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from huggingface_hub.utils import tqdm
from torch import nn
from transformers import PreTrainedModel
from typing_extensions import Unpack

from ..checkpoints.checkpoint import (
    ZERO_AT_FIRST,
    Checkpoint,
    load_config,
    load_language_model,
    load_tokenizer,
    open_checkpoint,
)
from ..checkpoints.location import hub_commit
from ..checkpoints.reports import ConversionReport
from ..inspection.measure import evaluation_mode
from ..inspection.text import TextToRead, read_windows
from ..utils.devices import check_device, default_device, is_dtype
from ..utils.files import check_destination
from ..utils.keywords import with_keywords_of
from .checks import check_base_type, check_config, check_tensors, refuse_other_naming
from .layers import (
    check_is_decoder,
    check_layers,
    check_model,
    check_same_layers,
    config_with_layers,
    layers_name,
    rows_of_layers,
    select_layers,
    trunk_on_meta,
)
from .options import Writing, WritingOptions
from .running import quiet_loading
from .writing import Conversion, write_checkpoint


@dataclass(frozen=True)
class LayerCosts:
    """What layers are worth on a text.

    Attributes:
        loss: of the model with all its layers, in nats per token.
        costs: by how much the loss rises if a single layer is left out, one number for each layer; `None` where the
            config cannot express the model without it. Empty if it was not measured.
        layers: the layers that are proposed to be kept.
        left_out: the others, in the order in which they were left out.
        losses: the loss after each of those steps.
    """

    loss: float
    costs: list[float | None] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)
    left_out: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


@torch.no_grad()
def layer_costs(model: PreTrainedModel, windows: torch.Tensor, *, drop: int = 0, batch_size: int = 4) -> LayerCosts:
    """Measure by how much the loss rises if a layer is left out, and propose layers to leave out.

    The text is read once with all `n` layers, and once without each of them. To drop several, the cheapest is left out
    and the others are measured again without it, because costs do not add up: that is `n + (n - 1) + ...` times, a
    term for each of them.

    Args:
        model: a causal language model, as for [`select_layers`].
        windows: token ids, `[windows, length]`.
        drop: how many layers to propose.
        batch_size: windows at a time.

    Raises:
        ValueError: if the model cannot be pruned, has not that many layers, or its loss is not a number.
    """
    check_model(model)
    num_layers = model.config.num_hidden_layers
    if isinstance(drop, bool) or not isinstance(drop, int) or not 0 <= drop < num_layers:
        raise ValueError(f"`drop={drop!r}` must be a number of layers, from 0 to {num_layers - 1}: one has to stay.")
    if windows.ndim != 2 or not len(windows) or windows.shape[1] < 2:
        raise ValueError(f"`windows` must be `[windows, length]` of at least 2 tokens, not {list(windows.shape)}.")
    layers, left_out, losses, costs = list(range(num_layers)), [], [], []
    total = sum(num_layers - step for step in range(max(drop, 1))) + 1
    with evaluation_mode(model), tqdm(total=total, unit="pass", desc="Measuring layers") as progress:
        loss = mean_loss(model, windows, batch_size)
        progress.update()
        if not math.isfinite(loss):
            raise ValueError(f"The loss of the model on this text is {loss}, so layers cannot be compared.")
        for step in range(max(drop, 1)):
            without = {}
            for number in layers:
                without[number] = _loss_without(model, layers, number, windows, batch_size)
                progress.update()
            if step == 0:
                costs = [None if found is None else found - loss for found in without.values()]
            if drop == 0:
                break
            measured = {number: found for number, found in without.items() if found is not None}
            if not measured:
                raise ValueError(f"The config of the model cannot express it without any of its layers {layers}.")
            cheapest = min(measured, key=lambda number: measured[number])
            layers.remove(cheapest)
            left_out.append(cheapest)
            losses.append(measured[cheapest])
    return LayerCosts(loss, costs, layers, left_out, losses)


def _loss_without(
    model: PreTrainedModel, layers: list[int], number: int, windows: torch.Tensor, batch_size: int
) -> float | None:
    others = [other for other in layers if other != number]
    try:
        selected = select_layers(model, others)
    except ValueError:
        return None
    loss = mean_loss(selected, windows, batch_size)
    return loss if math.isfinite(loss) else math.inf


@torch.no_grad()
def mean_loss(model: nn.Module, windows: torch.Tensor, batch_size: int = 4) -> float:
    """The cross-entropy of the next token over windows of token ids, `[windows, length]`, in nats per token."""
    total = 0.0
    for ids in windows.split(batch_size):
        ids = ids.to(model.device)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        total += nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").item()
    return total / windows[:, 1:].numel()


def measure_checkpoint(
    source: str | Path,
    text: TextToRead,
    *,
    drop: int = 0,
    layers: Iterable[int] | None = None,
    revision: str | None = None,
    batch_size: int = 4,
    dtype: str = "auto",
    device: str | None = None,
) -> tuple[LayerCosts, int]:
    """`layer_costs` of a checkpoint on a text, or only the loss with `layers`.

    Returns:
        The costs, and how many tokens were read.

    Raises:
        ValueError, OSError: for what [`layer_costs`] and [`select_layers`] refuse, for a text without tokens, and for
            a checkpoint that does not load.
    """
    device = device or default_device()
    check_device(device, "is not available")
    if dtype != "auto" and not is_dtype(dtype):
        raise ValueError(f"`dtype={dtype!r}` is not a dtype of torch. Use float32, bfloat16, float16 or auto.")
    commit = hub_commit(str(source)) if revision is None else revision
    config = load_config(source, commit)
    check_is_decoder(config)
    kept = None if layers is None else check_layers(layers, config.num_hidden_layers)
    longest = min(text.length, getattr(config, "max_position_embeddings", None) or text.length)
    windows = read_windows(text.tokens(load_tokenizer(source, commit)), text.max_tokens, longest, text.name)
    with quiet_loading():
        model = load_language_model(source, revision=commit or "main", dtype=dtype).to(device).eval()
    if kept is None:
        return layer_costs(model, windows, drop=drop, batch_size=batch_size), windows.numel()
    selected = select_layers(model, kept)
    with tqdm(total=2, unit="pass", desc="Measuring layers") as progress:
        losses = []
        for network in (model, selected):
            losses.append(mean_loss(network, windows, batch_size))
            progress.update()
    left_out = [number for number in range(config.num_hidden_layers) if number not in kept]
    return LayerCosts(losses[0], [], kept, left_out, losses[1:]), windows.numel()


@with_keywords_of(Writing, but=["may_differ"])
def prune(
    source: str | Path,
    destination: str | Path,
    layers: Iterable[int],
    *,
    revision: str | None = None,
    **options: Unpack[WritingOptions],
) -> ConversionReport:
    """Write a checkpoint with some layers of another one: the model that `select_layers` makes, as files.

    Tensors are copied byte for byte, so memory does not grow with the model, except for layers that are repeated.
    Verification compares the written model with the source's in memory, with the same layers.

    Args:
        source: folder or Hub id of an AttnRes checkpoint, or of an ordinary one of a supported family.
        destination: folder to write, which must be empty or not exist. It appears only when everything is done.
        layers: numbers of the layers to keep, from 0, in the order in which they run, as for [`select_layers`].
        revision: branch, tag or commit of a Hub id.
        link: make hard links to weight files that stay as they are, on the same disk.
        verify: run both models and compare them. Otherwise, only names, shapes and files are checked.
        verify_text: file with the text to compare on, instead of the built-in one.
        device: where to run the models, as `device_map` in `from_pretrained`; one device.

    Raises:
        ValueError: if there is no such layer, if the config cannot express the result, or if the checkpoint is
            quantised or multimodal. Then `destination` is not written.
        OSError: if files cannot be found, read or written.
        TypeError: for an unknown argument, or layers that are not ints.
    """
    path = check_destination(destination, source)
    checkpoint = open_checkpoint(source, revision, check_type=check_base_type)
    return write_checkpoint(planned(checkpoint, layers), path, Writing.of(options))


def planned(checkpoint: Checkpoint, layers: Iterable[int]) -> Conversion:
    """What is written of a checkpoint.

    Raises:
        ValueError: if its model cannot have these layers.
    """
    refuse_other_naming(checkpoint)
    check_config(checkpoint)
    old = checkpoint.config
    check_is_decoder(old)
    if checkpoint.config_dict.get("quantization_config") is not None:
        raise ValueError(
            f"`{checkpoint.name}` is quantised, and what its config says of single layers is not known here: prune the"
            " checkpoint that it was made from, and quantise the result."
        )
    kept = check_layers(layers, old.num_hidden_layers)
    config = config_with_layers(old, kept)
    check_same_layers(old, config, kept)
    check_tensors(checkpoint)
    prefix = checkpoint.prefix + layers_name(trunk_on_meta(old))
    if not any(name.startswith(f"{prefix}.") for name in checkpoint.weight_map):
        raise ValueError(
            f"The files of `{checkpoint.name}` have no tensors named `{prefix}...`: transformers renames them while it"
            " loads them. Load the model, use `attnres.conversion.select_layers`, and save it."
        )
    add, queries, notes = repeated_layers(checkpoint, prefix, kept), {}, []
    if checkpoint.is_attnres:
        begin, rows = f"{checkpoint.query_prefixes[0]}depth_queries.", rows_of_layers(old, kept)
        tensors = checkpoint.tensors([name for name in checkpoint.weight_map if name.startswith(begin)])
        queries = {name: tensor[rows].contiguous() for name, tensor in tensors.items()}
        notes = note_on_blocks(checkpoint, kept)
    return Conversion(
        "Pruning",
        checkpoint,
        config,
        add=add | queries,
        rename=renaming(prefix, kept, queries),
        notes=notes,
        layers=tuple(kept),
    )


def renaming(prefix: str, layers: list[int], replaced: Collection[str]) -> Callable[[str], str | None]:
    """Of the name of a tensor, that in a checkpoint with some of the layers; `None` for those that go.

    Layers of other kinds behind the last one, as some carry to predict further tokens, go as well.

    Args:
        prefix: of the layers, such as `model.layers`.
        replaced: names of tensors that are added with other values.
    """
    pattern = re.compile(rf"{re.escape(prefix)}\.(\d+)\.")

    def rename(name: str) -> str | None:
        if name in replaced:
            return None
        match = pattern.match(name)
        if match is None:
            return name
        number = int(match[1])
        return f"{prefix}.{layers.index(number)}.{name[match.end() :]}" if number in layers else None

    return rename


def repeated_layers(checkpoint: Checkpoint, prefix: str, layers: list[int]) -> dict[str, torch.Tensor]:
    """The tensors of the second and further copies of layers, by their names."""
    found: dict[str, torch.Tensor] = {}
    for new, old in enumerate(layers):
        if old in layers[:new]:
            begin = f"{prefix}.{old}."
            tensors = checkpoint.tensors([name for name in checkpoint.weight_map if name.startswith(begin)])
            found |= {f"{prefix}.{new}.{name.removeprefix(begin)}": tensor for name, tensor in tensors.items()}
    return found


def note_on_blocks(checkpoint: Checkpoint, layers: list[int]) -> list[str]:
    """A note for the report where trained queries read blocks of other sublayers than before."""
    config = checkpoint.text_config
    tensors = checkpoint.tensors(checkpoint.query_names(ZERO_AT_FIRST))
    old, new = (
        blocks_of(rows_of_layers(config, kept)[:-1], config.attn_res_block_size)
        for kept in (range(config.num_hidden_layers), layers)
    )
    changed = [block for block in new if block not in old]
    if not changed or not any(tensor.any() for tensor in tensors.values()):
        return []
    return [
        f"{len(changed)} of {len(new)} blocks have other sublayers than the blocks that its queries were trained on"
    ]


def blocks_of(sublayers: Sequence[int], block_size: int) -> list[Sequence[int]]:
    return [sublayers[first : first + block_size] for first in range(0, len(sublayers), block_size)]
