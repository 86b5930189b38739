# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""What the depth queries of a model in training do: how large they are, and how evenly each site reads its sources."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..base.library_lookups import is_depth_query


if TYPE_CHECKING:
    from transformers import Trainer


@torch.no_grad()
def read_queries(model: nn.Module) -> torch.Tensor | None:
    """The folded queries, those of the adapter if there is one, `[sites, hidden]`; `None` for a model without.

    Of queries that see the input, what is zero at first in their projections comes behind them: `[sites, n]`.
    """
    # The module is not called for them: FSDP allows that in a forward pass of the whole model only
    found = {
        name.split(".")[-1]: parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        for name, parameter in model.named_parameters()
        if is_depth_query(name) and ".original_module." not in name
    }
    if not found:
        return None
    parts = [found[name].float() for name in ("query", "projection", "projection_down") if name in found]
    if "query" in found:
        parts[0] = parts[0] * found["key_norm"].float()
    return torch.cat([part.flatten(1) for part in parts], dim=1)


def draw_rows(trainer: "Trainer") -> dict[str, torch.Tensor]:
    """The first two rows of the evaluation data, or of the training data if there is none, `[2, seq]` each.

    Of several data sets for evaluation the first.
    """
    of_evaluation = trainer.eval_dataset
    if isinstance(of_evaluation, dict):
        of_evaluation = next(iter(of_evaluation), None)
    with torch.random.fork_rng():  # a data loader draws from the generator that training goes on with
        no_evaluation = of_evaluation is None
        loader = trainer.get_train_dataloader() if no_evaluation else trainer.get_eval_dataloader(of_evaluation)
        batch = next(iter(loader))
    names = ("input_ids", "inputs_embeds", "attention_mask", "position_ids")
    return {name: batch[name][:2] for name in names if name in batch}


def token_mask(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Which tokens of a batch are no padding, `[batch, seq]`: all if its mask is one of attention scores, or none."""
    tokens = batch["input_ids"] if "input_ids" in batch else batch["inputs_embeds"][..., 0]
    mask = batch.get("attention_mask")
    return mask.bool() if torch.is_tensor(mask) and mask.shape == tokens.shape else torch.ones_like(tokens).bool()


@torch.no_grad()
def depth_metrics(trainer: "Trainer", rows: dict[str, torch.Tensor]) -> dict[str, float]:
    """The metrics that [`AttnResTrainer`] logs, by name.

    Args:
        rows: what the depth weights are taken of, as `draw_rows` gives it.
    """
    batch = trainer._prepare_inputs(rows)
    model, was_training = trainer.model, trainer.model.training
    model.eval()
    with trainer.compute_loss_context_manager():
        weights = model(**batch, output_depth_attentions=True, use_cache=False).depth_attentions
    model.train(was_training)
    mask = token_mask(batch)
    if "position_ids" in batch:  # packed: padding, and the first token of a document, are at position 0
        mask = mask & (batch["position_ids"] > 0)
    norms, entropies = read_queries(model).norm(dim=-1), relative_entropies(weights, mask)
    return {
        "query_norm": norms.mean().item(),
        "depth_entropy": sum(entropies.values()) / len(entropies),
        **{f"depth/query_norm_{site:03}": norms[site].item() for site in entropies},
        **{f"depth/entropy_{site:03}": entropy for site, entropy in entropies.items()},
    }


def relative_entropies(weights: Sequence[torch.Tensor], mask: torch.Tensor) -> dict[int, float]:
    """By site with more than one source, the mean entropy of its weights as a fraction of the largest: 1 is uniform.

    Args:
        weights: of every site, `[batch, seq, ..., sources]`.
        mask: the tokens that count, `[batch, seq]`.
    """
    entropies = {}
    for site, of_site in enumerate(weights):
        if of_site.shape[-1] > 1:
            # Weights of other kinds than the softmax do not sum to 1
            fractions = of_site[mask] / of_site[mask].sum(-1, keepdim=True).clamp_min(1e-30)
            entropy = torch.special.entr(fractions).sum(-1).mean() / math.log(of_site.shape[-1])
            entropies[site] = entropy.item()
    return entropies
