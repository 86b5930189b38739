# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Groups of parameters: depth queries with a learning rate of their own, and Muon for the matrices of the layers."""

import re
from typing import Any

import torch
from torch.optim import Muon, Optimizer

from ..base.library_lookups import is_depth_query
from .arguments import AttnResTrainingArguments
from .learning_rate import AUTO


class WithMuon(Optimizer):
    """Some groups of parameters are Muon's, and the others another optimizer's. To all who look at it, it is one.

    Muon scales its steps to the size of AdamW's (`match_rms_adamw`), so that rates of the one suit the other.

    Args:
        groups: of the other optimizer, as lists or with settings of their own.
        matrices: those of Muon, with `params`, `lr` and `weight_decay`. All parameters in them are of two dimensions.
        others: the class of the other optimizer.
        kwargs: its settings.
    """

    def __init__(
        self, groups: list[dict[str, Any]], matrices: list[dict[str, Any]], others: type[Optimizer], **kwargs: Any
    ):
        self.parts = others(groups, **kwargs), Muon(matrices, adjust_lr_fn="match_rms_adamw")
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self._share()

    def _share(self):
        """Both see the groups and the state that this one has: a scheduler changes them, or a checkpoint."""
        number = 0
        for part in self.parts:
            part.state = self.state
            part.param_groups = self.param_groups[number : number + len(part.param_groups)]
            number += len(part.param_groups)

    def load_state_dict(self, state_dict: dict[str, Any]):
        super().load_state_dict(state_dict)
        self._share()

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else closure()
        for part in self.parts:
            part.step()
        return loss


def separate_queries(optimizer: Optimizer, names: dict[int, str], args: AttnResTrainingArguments):
    """Put the depth queries into groups of their own, with their learning rate and decay."""
    queries = []
    for group in optimizer.param_groups:
        queries += [p for p in group["params"] if is_depth_query(names[id(p)])]
        group["params"] = [p for p in group["params"] if not is_depth_query(names[id(p)])]
    lr = args.learning_rate if args.query_learning_rate in (None, AUTO) else args.query_learning_rate
    for parameter in queries:
        # The key norm is a factor of the query: to decay it as well would be to decay twice
        decay = 0.0 if names[id(parameter)].endswith(".key_norm") else args.query_weight_decay
        optimizer.add_param_group({"params": [parameter], "lr": lr, "weight_decay": decay})
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]


def with_muon(optimizer: Optimizer, names: dict[int, str], args: AttnResTrainingArguments, **kwargs: Any) -> Optimizer:
    """Muon for the matrices of the layers, and an optimizer, which has taken no step yet, for what is left.

    Embeddings, heads and depth queries are no such matrices, although they have two dimensions, and neither are
    experts that are kept in one tensor of three.

    Args:
        names: of the parameters, by their ids.
        kwargs: of the optimizer.
    """
    matrices = []
    for group in optimizer.param_groups:
        # What lies in a list of modules has a number in its name
        taken = {id(p) for p in group["params"] if p.ndim == 2 and re.search(r"\.\d+\.", names[id(p)])}
        of_muon = [p for p in group["params"] if id(p) in taken]
        group["params"] = [p for p in group["params"] if id(p) not in taken]
        if of_muon:
            matrices.append({"params": of_muon, "lr": args.muon_learning_rate, "weight_decay": group["weight_decay"]})
    groups = [group for group in optimizer.param_groups if group["params"]]
    return WithMuon(groups, matrices, type(optimizer), **kwargs) if matrices else optimizer
