# Copyright 2026 The attnres authors.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""What moves the loss: gradients over depth, and what a source is worth at a site, for weight is not importance."""

import contextlib
from collections.abc import Iterator

import torch
from rich.progress import track
from torch import nn

from ..depth_attention import mix_and_norm, num_sources
from ..modeling_attnres import AttnResDepthRead
from .measure import evaluating


def sublayers(trunk: nn.Module) -> list[nn.Module]:
    """Attention, MLP, attention ...: of an AttnRes model or of its PreNorm base, which have them by the same names."""
    return [
        sublayer
        for layer in trunk.layers
        for sublayer in (layer.linear_attn if hasattr(layer, "linear_attn") else layer.self_attn, layer.mlp)
    ]


def reads(trunk: nn.Module) -> list[AttnResDepthRead]:
    """The reads of all sites, in the order of depth."""
    return [read for layer in trunk.layers for read in (layer.attention_read, layer.mlp_read)] + [
        trunk.final_depth_read
    ]


def summed_loss(model: nn.Module, ids: torch.Tensor, **kwargs) -> torch.Tensor:
    """Cross-entropy of the next token in nats, summed over `[batch, seq]`."""
    logits = model(ids, use_cache=False, **kwargs).logits[:, :-1].float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


def gradient_rms(model: nn.Module, windows: torch.Tensor, *, name: str = "model", batch_size: int = 4) -> list[float]:
    """How large the gradient is that every sublayer gets, over tokens and hidden dimensions.

    It is that of the summed loss with respect to what the sublayer writes, so that it does not depend on the number of
    tokens. A PreNorm model is measured at the same places, and at zero queries, where both are the same function of
    what sublayers write, the gradients are the same.

    Args:
        windows: token ids, `[windows, length]`.

    Returns:
        One root mean square per sublayer.
    """
    squares, elements = 0.0, 0
    for ids in track(windows.split(batch_size), description=f"Gradients of {name}"):
        squares = squares + _gradient_squares(model, ids.to(model.device))
        elements += ids.numel() * model.config.hidden_size
    return (squares / elements).sqrt().tolist()


def _gradient_squares(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Sums over a batch, `[sublayers]`; its graph is gone before the next one is made."""
    with evaluating(model), torch.enable_grad(), _outputs(sublayers(model.model)) as outputs:
        loss = summed_loss(model, ids)
    gradients = torch.autograd.grad(loss, outputs)
    return torch.stack([gradient.double().square().sum().cpu() for gradient in gradients])


@contextlib.contextmanager
def _outputs(modules: list[nn.Module]) -> Iterator[list[torch.Tensor]]:
    """What the modules return, in the order of their calls."""
    found: list[torch.Tensor] = []
    handles = [
        module.register_forward_hook(
            lambda module, args, output: found.append(output[0] if isinstance(output, tuple) else output)
        )
        for module in modules
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def masked_out(read: AttnResDepthRead, source: int) -> Iterator[None]:
    """A read as if one of its sources were not there: the softmax is over the others.

    It has to be called without a block cache, as `output_depth_attentions=True` makes sure.
    """
    forward = type(read).forward

    def without_source(queries, partial, blocks, scores, norm=None):
        _, _, partial_scores = forward(read, queries, partial, blocks, scores)
        scores = torch.stack([*scores, partial_scores[..., 0]], dim=-1)
        scores[..., source] = -torch.inf
        weights = torch.softmax(scores, dim=-1)
        return mix_and_norm(weights, [*blocks, partial], norm), weights, partial_scores

    read.forward = without_source
    try:
        yield
    finally:
        del read.forward


@torch.no_grad()
def ablate(
    model: nn.Module, windows: torch.Tensor, *, name: str = "model", batch_size: int = 4
) -> list[list[float | None]]:
    """By how much the loss rises when a source is masked out at a site; runs the model once for each pair of them.

    Args:
        windows: token ids, `[windows, length]`.

    Returns:
        Per site and source the change of the mean loss, in nats per token; `None` where there is no other source.
    """

    def mean_loss() -> float:
        with evaluating(model):
            losses = [
                summed_loss(model, ids.to(model.device), output_depth_attentions=True).item()
                for ids in windows.split(batch_size)
            ]
        return sum(losses) / windows[:, 1:].numel()

    unchanged = mean_loss()
    sites = reads(model.model)
    counts = [num_sources(read.site, model.config.attn_res_block_size) for read in sites]
    pairs = [(read, source) for read, count in zip(sites, counts) if count > 1 for source in range(count)]
    rises: list[list[float | None]] = [[None] * count for count in counts]
    for read, source in track(pairs, description=f"Masking sources of {name}"):
        with masked_out(read, source):
            rises[read.site][source] = mean_loss() - unchanged
    return rises
