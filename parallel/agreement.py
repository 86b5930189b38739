# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""What the processes of a pipeline agree on before they compute: the model and the settings, and then every batch."""

from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn


def check_agreement(model: nn.Module, settings: tuple, group: dist.ProcessGroup | None):
    """Whether every process makes the same pipeline: of a part of one model and a part of another nothing comes."""
    hashed = xxhash.xxh3_64()
    for name, tensor in model.state_dict().items():
        hashed.update(name.encode())
        hashed.update(bytes_of(tensor))
    mine = {
        "model": hashed.intdigest(),
        "config": model.config.to_json_string(),
        "requires_grad": [parameter.requires_grad for parameter in model.parameters()],
        "settings": settings,
    }
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, mine, group=group)
    for rank, other in enumerate(gathered):
        different = [key for key in mine if other[key] != gathered[0][key]]
        if different:
            raise ValueError(
                f"The processes of a pipeline have different models: {' and '.join(different)} of process {rank} are"
                " others than those of process 0. Make the model with the same seed, or load the same checkpoint."
            )


def bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())


def check_batch(batch: dict[str, Any], group: dist.ProcessGroup | None, device: torch.device):
    """Whether every process was given the same: the first stage takes the ids of a batch, and the last one its labels.

    Args:
        batch: tensors and other arguments, by name.
        device: where this process communicates.
    """
    hashed = xxhash.xxh3_64()
    for name, value in sorted(batch.items()):
        hashed.update(name.encode())
        hashed.update(bytes_of(value) if torch.is_tensor(value) else str(value).encode())
    number = float(hashed.intdigest() >> 16)  # of 48 bits, which a double has room for
    found = torch.tensor([number, -number], dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    if found[0] != -found[1]:
        raise ValueError(
            f"The processes of a pipeline were given different batches ({', '.join(batch)}): all of them take the"
            " whole batch. Give every process the same data, in the same order."
        )
