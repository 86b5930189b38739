# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""What moves the loss: gradients over depth, and the effect of masking a source, as a weight is not its importance."""

import torch
from rich.progress import track
from torch import nn

from ..base.probe import probe_sublayers
from ..depth.recorder import DepthRecorder
from .measure import evaluation_mode, run_recorded, source_names


def summed_loss(model: nn.Module, ids: torch.Tensor, recorder: DepthRecorder, num_sites: int) -> torch.Tensor:
    """Cross-entropy of the next token in nats, summed over `[batch, seq]`."""
    logits = run_recorded(model, ids, recorder, num_sites).logits[:, :-1].float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


def gradient_rms(model: nn.Module, windows: torch.Tensor, *, name: str = "model", batch_size: int = 4) -> list[float]:
    """The size of the gradient of every sublayer's output, over tokens and hidden dimensions.

    It is that of the summed loss with respect to what the sublayer adds to the residual stream, so that it does not
    depend on the number of tokens. A PreNorm model is measured at the same places, and at zero queries, where both are
    the same function of what sublayers write, the gradients are the same.

    Args:
        windows: token ids, `[windows, length]`.

    Returns:
        One root mean square per sublayer.
    """
    config = model.config
    num_sites = config.num_sites if config.model_type == "attnres" else sum(probe_sublayers(config)) + 1
    squares, elements = 0.0, 0
    for ids in track(windows.split(batch_size), description=f"Gradients of {name}"):
        squares = squares + _gradient_squares(model, ids.to(model.device), num_sites)
        elements += ids.numel() * config.hidden_size
    return (squares / elements).sqrt().tolist()  # type: ignore[union-attr]


def _gradient_squares(model: nn.Module, ids: torch.Tensor, num_sites: int) -> torch.Tensor:
    """Sums over a batch, `[sublayers]`; its graph is gone before the next one is made."""
    recorder = DepthRecorder()
    with evaluation_mode(model), torch.enable_grad():
        loss = summed_loss(model, ids, recorder, num_sites)
    outputs = [output for _, output in sorted(recorder.outputs.items())]
    gradients = torch.autograd.grad(loss, outputs)
    return torch.stack([gradient.double().square().sum().cpu() for gradient in gradients])


@torch.no_grad()
def ablate(
    model: nn.Module, windows: torch.Tensor, *, name: str = "model", batch_size: int = 4
) -> list[list[float | None]]:
    """By how much the loss rises when a source is masked out at a site; runs the model once for each pair of them.

    Args:
        windows: token ids, `[windows, length]`.

    Returns:
        Per site and source the change of the mean loss, in nats per token; `None` where there is no other source, or
        where the base reads nothing.
    """

    config = model.config

    def mean_loss(recorder: DepthRecorder) -> float:
        with evaluation_mode(model):
            losses = [
                summed_loss(model, ids.to(model.device), recorder, config.num_sites).item()
                for ids in windows.split(batch_size)
            ]
        return sum(losses) / windows[:, 1:].numel()

    unmasked = DepthRecorder()
    unchanged = mean_loss(unmasked)
    counts = [len(source_names(site, config)) for site in range(config.num_sites)]
    pairs = [(site, source) for site in unmasked.weights if counts[site] > 1 for source in range(counts[site])]
    rises: list[list[float | None]] = [[None] * count for count in counts]
    for site, source in track(pairs, description=f"Masking sources of {name}"):
        rises[site][source] = mean_loss(DepthRecorder(masked_source={site: source})) - unchanged
    return rises
