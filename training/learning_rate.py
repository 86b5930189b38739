# SPDX-License-Identifier: Apache-2.0
"""The depth queries' learning rate, measured on the model and the text at hand.

A step of Adam moves every number of a query by about the rate, and so a score by up to `rate * sum |key|`, which
grows with the width; all sites move at once, and what they do adds up over the depth. How much of that the loss bears
differs from model to model by orders of magnitude, so it is tried: the gradient over some rows of the training data
gives the direction of Adam's first step, which is the sign of every number, and the loss on other rows is read along
that line. The rate at which it is lowest is the peak rate of the training.
"""

import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.utils import broadcast

from ..base.library_lookups import is_depth_query
from .progress import bar, duration


if TYPE_CHECKING:
    from transformers import Trainer


AUTO = "auto"
RATES = [float(f"{digit}e{exponent}") for exponent in range(-7, 1) for digit in (1, 2, 5)]
# Keys have entries of about 1: a step of this much over the width moves a score by about this much at most
SMALLEST_MOVE, LARGEST_MOVE = 0.02, 1.0
# The line is followed up to a rate that raises the loss by this part of it
LARGEST_RISE = 0.02
# The gradient is taken of the rows of one step, but of so many at least and at most; the rates are tried on others
FEWEST_GRADIENT_ROWS, MOST_GRADIENT_ROWS = 16, 64
LOSS_ROWS = 16
# Measuring may take this share of the compute of a run, counted in forward passes of a row. A training step is three
LARGEST_SHARE = 0.1
STEP_COST = 3
# A shorter measurement tries every second rate on fewer rows, and with still fewer than this there is none
FEWEST_ROWS = 4


def check_query_rate(value: float | str | None) -> float | str | None:
    """A rate as it was written in YAML, on a command line or in Python.

    Raises:
        ValueError: for what is neither a rate nor `auto` nor `None`.
    """
    if value is None or value == AUTO:
        return value
    try:
        rate = float(value)
    except (TypeError, ValueError):
        rate = float("nan")
    if isinstance(value, bool) or not 0 <= rate < float("inf"):
        raise ValueError(f"`query_learning_rate: {value}` is neither a number from 0 up nor `{AUTO}` nor null.")
    return rate


def check_optimizer(trainer: "Trainer"):
    """Raise a `ValueError` where a step of Adam cannot be tried before the first one is taken."""
    optimizer = str(getattr(trainer.args.optim, "value", trainer.args.optim))
    reason = None
    if not any(kind in optimizer for kind in ("adam", "ademamix", "lion")) or "layerwise" in optimizer:
        reason = f"`optim: {optimizer}` takes other steps than Adam"
    elif trainer.is_deepspeed_enabled:
        reason = "DeepSpeed shards the queries"
    elif trainer.is_fsdp_enabled and trainer.accelerator.state.fsdp_plugin.fsdp_version == 1:
        reason = "FSDP shards the queries (FSDP2 keeps them whole)"
    if reason is not None:
        raise ValueError(f"`query_learning_rate: {AUTO}` cannot be measured: {reason}. Give a number.")


@dataclass(frozen=True)
class Effort:
    """What a measurement may compute: rows for the gradient, others for the losses, and the rates to try."""

    gradient_rows: int
    loss_rows: int
    rates: list[float]
    cut_short: bool = False

    @property
    def cost(self) -> int:
        """In forward passes of a row."""
        return STEP_COST * self.gradient_rows + (1 + len(self.rates)) * self.loss_rows


def plan_effort(run_rows: int, step_rows: int, rates: list[float]) -> Effort | None:
    """The whole measurement if it takes at most a tenth of the run, or else one cut down to that; `None` if too short.

    Args:
        run_rows: rows that a process trains on in the whole run.
        step_rows: rows of a step, in all processes.
    """
    whole = Effort(min(max(FEWEST_GRADIENT_ROWS, step_rows), MOST_GRADIENT_ROWS), LOSS_ROWS, rates)
    budget = LARGEST_SHARE * STEP_COST * run_rows
    if whole.cost <= budget:
        return whole
    rates = rates[::2]
    rows = min(LOSS_ROWS, int(budget / (STEP_COST + 1 + len(rates))))
    return Effort(rows, rows, rates, cut_short=True) if rows >= FEWEST_ROWS else None


@dataclass(frozen=True)
class Measurement:
    """A learning rate of the depth queries, and how it was found.

    Attributes:
        losses: by rate the mean loss, from rate 0; empty if the run is too short to measure.
        rows: how many rows of the training data were taken for them, at most.
    """

    rate: float
    losses: dict[float, float]
    rows: int
    seconds: float
    cut_short: bool

    def to_log(self) -> dict[str, float]:
        losses = {f"query_rate_loss/{rate:g}": loss for rate, loss in self.losses.items()}
        return {"query_learning_rate": self.rate, **losses}

    def in_words(self) -> str:
        line = f"Learning rate of the depth queries: {self.rate:g}"
        if not self.losses:
            return (
                f"{line}, the lowest of those to try, as the run is too short to measure one."
                " `query_learning_rate` sets another."
            )
        line += f", measured in {duration(self.seconds)}"
        if self.cut_short:
            line += f" (cut short to {self.rows} rows: it may take a tenth of the run)"
        return line


def measure_rate(trainer: "Trainer", num_steps: int) -> Measurement:
    """The rate of the depth queries, for a trainer that is about to take so many steps."""
    begun, args = time.perf_counter(), trainer.args
    width = next(
        p.shape[-1] for name, p in trainer.model.named_parameters() if is_depth_query(name) and p.requires_grad
    )
    rates = rates_for(width)
    rows = (trainer.state.train_batch_size or args.train_batch_size) * args.gradient_accumulation_steps
    effort = plan_effort(num_steps * rows, rows * args.world_size, rates)
    if effort is None:
        return Measurement(rates[0], {}, 0, 0.0, cut_short=True)
    losses = measure_losses(trainer, effort)
    means = {rate: loss.mean().item() for rate, loss in losses.items()}
    return Measurement(best_rate(losses), means, effort.loss_rows, time.perf_counter() - begun, effort.cut_short)


def rates_for(width: int) -> list[float]:
    return [rate for rate in RATES if SMALLEST_MOVE <= rate * width <= LARGEST_MOVE]


def measure_losses(trainer: "Trainer", effort: Effort) -> dict[float, torch.Tensor]:
    """Losses of some batches by rate along Adam's first step of the depth queries, from rate 0 up to one that harms.

    Weights, gradients, random numbers and the order of the data are left as they were. The same rows are taken in
    every process, so that what is measured does not depend on how many share the work.

    Args:
        trainer: one that is about to train.
    """
    model = trainer.model
    queries = [p for name, p in model.named_parameters() if is_depth_query(name) and p.requires_grad]
    modes = [(module, module.training) for module in model.modules()]
    with unchanged_random_state(trainer.args.seed):
        gradient_batches, loss_batches = draw_batches(trainer, effort)
        passes = len(gradient_batches) + (1 + len(effort.rates)) * len(loss_batches)
        hidden = trainer.args.disable_tqdm or not trainer.is_world_process_zero()
        progress = bar("Measuring the learning rate of the depth queries", passes, hidden, leave=False)
        before = [query.detach().clone() for query in queries]
        model.zero_grad()
        model.train()  # as in training, or gradient checkpointing is off
        for batch in gradient_batches:
            loss_of(trainer, batch).backward()
            progress.update()
        directions = [torch.zeros_like(query) if query.grad is None else query.grad.sign() for query in queries]
        model.zero_grad()
        model.eval()

        @torch.no_grad()
        def losses_at(rate: float) -> torch.Tensor:
            for query, start, direction in zip(queries, before, directions):
                query.copy_(start - rate * direction)
            losses = []
            for batch in loss_batches:
                losses.append(loss_of(trainer, batch).detach().float())
                progress.update()
            return broadcast(torch.stack(losses)).double().cpu()  # the same for all processes, as they go on together

        try:
            return losses_along_direction(losses_at, effort.rates)
        finally:
            progress.close()
            with torch.no_grad():
                for query, start in zip(queries, before):
                    query.copy_(start)
            for module, training in modes:
                module.training = training


def losses_along_direction(
    losses_at: Callable[[float], torch.Tensor], rates: list[float]
) -> dict[float, torch.Tensor]:
    losses = {0.0: losses_at(0.0)}
    for rate in rates:
        losses[rate] = losses_at(rate)
        if not losses[rate].mean() <= losses[0.0].mean() * (1 + LARGEST_RISE):  # or it is not a number
            break
    return losses


def best_rate(losses: dict[float, torch.Tensor]) -> float:
    """The rate with the lowest loss, where a standard error of its change is added to it: it may have been luck."""

    def score(rate: float) -> float:
        changes = losses[rate] - losses[0.0]
        error = changes.std() / len(changes) ** 0.5 if len(changes) > 1 else 0.0
        change = float(changes.mean() + error)
        return change if math.isfinite(change) else math.inf

    return min((rate for rate in losses if rate > 0), key=score)


def loss_of(trainer: "Trainer", batch: dict[str, Any]) -> torch.Tensor:
    with trainer.compute_loss_context_manager():
        return trainer.compute_loss(trainer.model, trainer._prepare_inputs(dict(batch))).mean()


def draw_batches(trainer: "Trainer", effort: Effort) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Batches to take the gradient of, and others, the same ones in every process and every time."""
    args = trainer.args
    loader = trainer.get_train_dataloader()  # for its data and collator; iterated over it would draw from the sampler
    size = trainer.state.train_batch_size or args.train_batch_size
    dataset, count = loader.dataset, effort.gradient_rows + effort.loss_rows
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        order = random.Random(args.seed).sample(range(len(dataset)), min(count, len(dataset)))
        rows = [dataset[index] for index in order]
    else:
        rows = list(islice(dataset, count))
    others = max(1, min(effort.loss_rows, len(rows) // 2))
    # Losses of several batches show by how much they differ
    parts = (rows[others:] or rows, size), (rows[:others], 1 if effort.cut_short else min(size, 2))
    first, second = (
        [loader.collate_fn(part[start : start + size]) for start in range(0, len(part), size)] for part, size in parts
    )
    return first, second


@contextmanager
def unchanged_random_state(seed: int) -> Iterator[None]:
    """Random numbers from `seed` inside, and afterwards those that would have come without."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
