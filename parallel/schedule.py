# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""What torch's schedules ask for, and how layers are divided into stages. No tensors, no processes: numbers alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from ..configuration_attnres import AttnResConfig


# Of which a process has the first and the last stage; with the others stage `i` is of process `i % processes`
V_SCHEDULES = ("zbvzerobubble", "dualpipev")


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """How a batch and the layers of a model are divided. The fields are keywords of [`AttnResPipeline`].

    Attributes:
        microbatches: number of microbatches in a batch.
        batch_size: samples in a batch of this pipeline.
        sequence_length: tokens in a sample.
        schedule: `GPipe`, `1F1B`, `LoopedBFS`, `Interleaved1F1B`, `InterleavedZeroBubble`, `ZBVZeroBubble` or
            `DualPipeV`.
        stages_per_rank: 1 with the first two schedules, 2 with the last two, and any number with the others.
        layers_per_stage: number of layers of each stage. By default as even as possible, with more in the first ones.
        cache: whether a process keeps blocks for its later stages. `False` sends every block over every boundary, for
            comparison. Bases whose layers scale the stream always do that.

    Raises:
        ValueError: if the schedule is unknown, or the batch cannot be divided.
    """

    microbatches: int
    batch_size: int
    sequence_length: int
    schedule: str = "1F1B"
    stages_per_rank: int | None = None
    layers_per_stage: Sequence[int] | None = None
    cache: bool = True

    def __post_init__(self):
        get_schedule_class(self.schedule)
        if self.batch_size % self.microbatches:
            raise ValueError(f"`microbatches={self.microbatches}` must divide `batch_size={self.batch_size}`.")

    @property
    def takes_one_stage(self) -> bool:
        """Whether each process has one stage with this schedule."""
        return issubclass(get_schedule_class(self.schedule), PipelineScheduleSingle)

    @property
    def microbatch_shape(self) -> tuple[int, int]:
        """Number of samples and tokens in a microbatch."""
        return self.batch_size // self.microbatches, self.sequence_length

    def ranks(self, num_ranks: int) -> list[int]:
        """The process of each stage.

        Raises:
            ValueError: if the schedule takes another number of stages or microbatches.
        """
        stages_per_rank = self.stages_per_rank
        if stages_per_rank is None:
            stages_per_rank = 1 if self.takes_one_stage else 2
        ranks = ranks_of_stages(num_ranks, stages_per_rank, self.schedule)
        needed = microbatches_needed(self.microbatches, num_ranks, len(ranks), self.schedule)
        if needed is not None:
            raise ValueError(
                f"`microbatches={self.microbatches}` must be {needed}, with `schedule={self.schedule!r}`."
            )
        return ranks

    def layers(self, config: AttnResConfig, ranks: Sequence[int]) -> list[int]:
        """The number of layers of each stage.

        Raises:
            ValueError: if they do not sum to the layers of the model, or there are not as many stages as `ranks`.
        """
        num_stages = len(ranks)
        layers = list(self.layers_per_stage or spread(len(config.sublayers_per_layer()), num_stages))
        sites_of_stages(config, layers)
        if len(layers) != num_stages:
            num_ranks = len(set(ranks))
            raise ValueError(
                f"`layers_per_stage={layers}` is of {len(layers)} stages, and {num_ranks} processes with"
                f" {num_stages // num_ranks} each have {num_stages}."
            )
        return layers


def sites_of_stages(config: AttnResConfig, layers_per_stage: Sequence[int]) -> list[int]:
    """The sublayer at which each stage begins, followed by the one at which the last stage ends.

    Raises:
        ValueError: if the layers of the stages do not sum to those of the model.
    """
    sublayers = config.sublayers_per_layer()
    if sum(layers_per_stage) != len(sublayers) or min(layers_per_stage) < 1:
        raise ValueError(
            f"`layers_per_stage={list(layers_per_stage)}` must be numbers >= 1 that sum to the {len(sublayers)} layers"
            " of the model."
        )
    ends = list(accumulate(layers_per_stage, initial=0))
    return [sum(sublayers[:end]) for end in ends]


def ranks_of_stages(num_ranks: int, stages_per_rank: int, schedule: str) -> list[int]:
    """The process of each stage.

    Raises:
        ValueError: if the schedule is unknown, or takes another number of stages.
    """
    is_single, is_v = issubclass(get_schedule_class(schedule), PipelineScheduleSingle), schedule.lower() in V_SCHEDULES
    if is_single != (stages_per_rank == 1) or (is_v and stages_per_rank != 2):
        allowed = "1 stage" if is_single else "2 stages" if is_v else "2 stages or more"
        raise ValueError(f"Schedule {schedule} takes {allowed} of each process, not {stages_per_rank}.")
    num_stages = num_ranks * stages_per_rank
    return [i if i < num_ranks else num_stages - 1 - i if is_v else i % num_ranks for i in range(num_stages)]


def num_rounds(microbatches: int, num_ranks: int) -> int:
    """How often a process comes back to a stage, in schedules with interleaved stages: torch's rule."""
    return max(1, microbatches // num_ranks)


def microbatches_needed(microbatches: int, num_ranks: int, num_stages: int, schedule: str) -> str | None:
    """What torch's schedule needs in place of so many microbatches; `None` if it takes them."""
    schedule = schedule.lower()
    if schedule in ("1f1b", "dualpipev") and microbatches < num_stages:
        return f"at least {num_stages}, the number of stages"
    if schedule in ("interleaved1f1b", "interleavedzerobubble") and microbatches % num_rounds(microbatches, num_ranks):
        return f"a multiple of {num_ranks}, the number of processes in the pipeline"
    return None


def spread(num_layers: int, num_stages: int) -> list[int]:
    """Layers of each stage, as even as they can be, the first ones with a layer more."""
    if num_layers < num_stages:
        raise ValueError(f"A model of {num_layers} layers cannot be divided into {num_stages} stages.")
    fewest, others = divmod(num_layers, num_stages)
    return [fewest + (i < others) for i in range(num_stages)]
