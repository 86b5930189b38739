# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Which blocks cross between two stages of a pipeline. No tensors, no processes: numbers alone.

A stage needs every block that is closed in front of it. Sent naively, all of them cross every boundary. A process
that runs several stages has met most of them before (cross-stage caching, arXiv 2603.15031, section 4.1), so only
those that it lacks are sent. What a stage sends, in this order:

    the partial sum of the open block and, if each of its outputs is a source, these; nothing between two blocks
    every closed block that the process of the next stage lacks, the oldest first

Blocks go by number: 0 is the embedding, and block `n` is the sum of the outputs at sites `(n - 1) * S` to `n * S - 1`.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StageRoute:
    """Which blocks a stage receives, has and sends.

    Args:
        entry_site: number of outputs that are written before the stage.
        exit_site: number of outputs that are written by the end of the stage.
        received: blocks that are sent to the stage.
        cached: blocks that its process has kept from an earlier stage.
        closed: blocks that the stage closes itself. In the first stage, also the embedding.
        sent: blocks that the stage sends to the next one.
        kept: blocks that its process keeps for a later stage.
    """

    entry_site: int
    exit_site: int
    received: tuple[int, ...]
    cached: tuple[int, ...]
    closed: tuple[int, ...]
    sent: tuple[int, ...]
    kept: tuple[int, ...]


def route_blocks(
    sites: Sequence[int], ranks: Sequence[int], block_size: int, *, cache: bool = True
) -> tuple[StageRoute, ...]:
    """The routes of all stages.

    Args:
        sites: the result of `sites_of_stages`, with one number more than there are stages.
        ranks: the process of each stage.
        block_size: outputs per block.
        cache: `False` sends every block to every stage.

    Raises:
        ValueError: if the numbers of stages in `sites` and `ranks` differ, or a stage is empty.
    """
    if len(sites) != len(ranks) + 1 or sites[0] != 0 or any(a >= b for a, b in zip(sites, sites[1:])):
        raise ValueError(
            f"`sites={tuple(sites)}` must grow from 0, with one number more than there are stages ({len(ranks)})."
        )
    num_stages = len(ranks)
    closed = [tuple(range(a // block_size + 1, b // block_size + 1)) for a, b in zip(sites, sites[1:])]
    closed[0] = 0, *closed[0]
    known: dict[int, set[int]] = {rank: set() for rank in ranks}
    received: list[tuple[int, ...]] = []
    cached: list[tuple[int, ...]] = []
    for stage, rank in enumerate(ranks):
        needed = range(sites[stage] // block_size + 1) if stage else range(0)
        # From its own process a stage is handed what the one before it has closed, which costs nothing
        own = closed[stage - 1] if stage and ranks[stage - 1] == rank else ()
        cached.append(tuple(block for block in needed if cache and block in known[rank] and block not in own))
        received.append(tuple(block for block in needed if block not in cached[-1]))
        known[rank].update(received[-1], closed[stage])
    sent = [*received[1:], ()]
    kept = []
    for stage, rank in enumerate(ranks):
        later = {block for other in range(stage + 1, num_stages) if ranks[other] == rank for block in cached[other]}
        kept.append(tuple(sorted(later)))
    return tuple(map(StageRoute, sites, sites[1:], received, cached, closed, sent, kept))


def num_transfers(routes: Sequence[StageRoute], ranks: Sequence[int]) -> int:
    """Number of closed blocks sent between processes in the forward pass of a microbatch. As many gradients return."""
    return sum(len(route.sent) for route, rank, other in zip(routes, ranks, [*ranks[1:], ranks[-1]]) if rank != other)
