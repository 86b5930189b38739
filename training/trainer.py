# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""transformers' Trainer, with a learning rate of their own for the depth queries, and a look at what they do."""

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import ProgressCallback, Trainer, TrainerCallback
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import rotate_checkpoints
from transformers.utils import logging

from ..base.library_lookups import is_depth_query
from .arguments import AttnResTrainingArguments
from .checkpoints import write_manifest
from .depth_metrics import depth_metrics, draw_rows, read_queries, token_mask
from .learning_rate import AUTO, check_optimizer, measure_rate
from .loss_guard import LossGuard
from .optimizer import separate_queries, with_muon
from .progress import ProgressLines


logger = logging.get_logger(__name__)


class AttnResTrainer(Trainer):
    """A `Trainer` for AttnRes models, with adapters or without; other models train as with `Trainer`.

    It takes [`AttnResTrainingArguments`]. With every loss it logs, over the first two rows of the evaluation data (or
    of the training data):

    - `query_norm`: mean norm of the folded queries over the sites.
    - `depth_entropy`: mean entropy of the depth weights over sites and tokens, as a part of its largest value: 1 is
      the uniform read of a PreNorm model.
    - `depth/query_norm_SITE` and `depth/entropy_SITE`: the same of every site with more than one source.

    With `query_learning_rate="auto"` the rate is measured before the first step (see `learning_rate.py`) and logged
    as `query_learning_rate`, the losses that it was chosen by as `query_rate_loss/RATE`; a resumed run takes it from
    there. The Trainer warns once if the loss rises above that of the start by more than noise (see `loss_guard.py`).
    """

    def __init__(self, *args, **kwargs):
        model = kwargs.get("model", args[0] if args else None)
        self._use_cache = getattr(getattr(model, "config", None), "use_cache", None)
        super().__init__(*args, **kwargs)
        for of_transformers in (ProgressCallback, PrinterCallback):
            if self.pop_callback(of_transformers) is not None:
                self.add_callback(ProgressLines(self))
        self.add_callback(_BeginTraining(self))
        self.initial_queries = read_queries(self.model)
        self._metric_rows: dict[str, torch.Tensor] | None = None
        self._measured: dict[str, float] = {}
        self._guard, self._warned = LossGuard(), False
        # Of a run that goes on where it was: what its checkpoints say that they were trained on
        self.run_fingerprints: dict[str, str | None] | None = None
        self._tokens: int | torch.Tensor = 0
        self._step_losses: dict[int, torch.Tensor] = {}
        self._batch_losses: list[torch.Tensor] = []

    optimizer: torch.optim.Optimizer

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        super().create_optimizer(model)
        args = self.args
        if isinstance(args, AttnResTrainingArguments) and len(self.optimizer.state) == 0:
            names = {id(parameter): name for name, parameter in (model or self.model).named_parameters()}
            separate_queries(self.optimizer, names, args)
            if args.muon_learning_rate is not None:
                kwargs = self.get_optimizer_cls_and_kwargs(args, self.model)[1]
                self.optimizer = with_muon(self.optimizer, names, args, **kwargs)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None):
        # The model lies where it trains, and what a checkpoint says of the run is read
        queries = {id(p) for name, p in self.model.named_parameters() if is_depth_query(name)}
        groups = (optimizer or self.optimizer).param_groups
        groups = [group for group in groups if all(id(parameter) in queries for parameter in group["params"])]
        if groups and getattr(self.args, "query_learning_rate", None) == AUTO:
            self._measured = {}
            if self.logged_query_rate is None:
                check_optimizer(self)
                measurement = measure_rate(self, num_training_steps)
                self._measured = measurement.to_log()
                if self.is_world_process_zero():
                    print(measurement.in_words())
            for group in groups:
                group["lr"] = self.query_learning_rate
        return super().create_scheduler(num_training_steps, optimizer)

    @property
    def logged_query_rate(self) -> float | None:
        logged = [entry["query_learning_rate"] for entry in self.state.log_history if "query_learning_rate" in entry]
        return logged[-1] if logged else None

    @property
    def query_learning_rate(self) -> float:
        """The peak rate: what was asked for, or what was measured as soon as it is."""
        lr = getattr(self.args, "query_learning_rate", None)
        if lr == AUTO:
            lr = self._measured.get("query_learning_rate", self.logged_query_rate)
        return self.args.learning_rate if lr is None else lr

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False):
        # The Trainer switches the KV cache off, and so would leave models that generate slowly ever after
        config = self.model.config
        in_training, config.use_cache = config.use_cache, self._use_cache
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            config.use_cache = in_training

    def _save_checkpoint(self, model, trial):
        if self.run_fingerprints is None:
            return super()._save_checkpoint(model, trial)
        output = Path(self._get_output_dir(trial=trial))
        folder = output / f"checkpoint-{self.state.global_step}"
        # Earlier ones go when this one is whole, and not before
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()  # whose states of generators are in it
            if self.args.should_save:
                write_manifest(folder, self.run_fingerprints)
        except BaseException:
            if self.args.should_save:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            self.args.save_total_limit = limit
        if self.args.should_save:
            rotate_checkpoints(str(output), limit, self.state.best_model_checkpoint, use_mtime=True)

    def _run_epoch(self, *args, resume_from_checkpoint: str | None = None, **kwargs):
        # CODEPATH: resumed from the checkpoint of its last step, or of the one that stopped it early, transformers'
        # Trainer would take another step before it looks
        if resume_from_checkpoint is not None:
            saved = self.state.stateful_callbacks.get("TrainerControl", {}).get("args", {})
            if self.state.global_step >= self.state.max_steps or saved.get("should_training_stop"):
                self.control.should_training_stop = True
                return
        super()._run_epoch(*args, resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def count_tokens(self) -> int:
        """Tokens that all processes have trained on so far, without padding if there is a mask of it."""
        return int(self._tokens) * self.args.world_size

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args, **kwargs) -> torch.Tensor:
        self._tokens = self._tokens + token_mask(inputs).sum()  # not a number yet: on a GPU that would wait for it
        loss = super().training_step(model, inputs, *args, **kwargs)
        step = self.state.global_step  # of several micro-batches, whose losses are parts of the step's
        self._step_losses[step] = self._step_losses.get(step, 0) + loss
        return loss

    def prediction_step(self, *args, **kwargs):
        loss, logits, labels = super().prediction_step(*args, **kwargs)
        if loss is not None:
            self._batch_losses.append(loss.mean())
        return loss, logits, labels

    def evaluate(self, eval_dataset=None, *args, **kwargs) -> dict[str, float]:
        self._batch_losses = []
        with torch.random.fork_rng():  # a data loader draws from the generator that training goes on with
            metrics = super().evaluate(eval_dataset, *args, **kwargs)
        if eval_dataset is None and "eval_loss" in metrics:
            losses = [entry["eval_loss"] for entry in self.state.log_history if "eval_loss" in entry]
            batches = [loss.item() for loss in self._batch_losses]
            if len(losses) == 1:
                self._guard.first_batches = batches
            self._warn(self._guard.check_held_out(losses[0], metrics["eval_loss"], batches))
        return metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if ("loss" in logs or "eval_loss" in logs) and self.initial_queries is not None:
            logs |= self.depth_metrics()
        super().log(logs, start_time)
        if "loss" in logs:
            self._guard.add_steps({step: loss.item() for step, loss in self._step_losses.items()})
            self._step_losses = {}
            self._warn(self._guard.check_training())

    def _warn(self, risen: str | None):
        """Say once, in the process that talks, that the training does harm."""
        if risen is not None and not self._warned and self.is_world_process_zero():
            self._warned = True
            logger.warning(f"{risen} (step {self.state.global_step}). Stop the run and {self.advice()}")

    def advice(self) -> str:
        """What to do against a loss that rises."""
        trained = {is_depth_query(name) for name, p in self.model.named_parameters() if p.requires_grad}
        rates = [f"query_learning_rate (now {self.query_learning_rate:g})"] if True in trained else []
        rates += [f"learning_rate (now {self.args.learning_rate:g})"] if False in trained else []
        return f"start again in another folder with a lower {' and '.join(rates)}, a third of it or less."

    def depth_metrics(self) -> dict[str, float]:
        """Norms of the queries and entropies of the depth weights as they are now, by the names in the log."""
        if self._metric_rows is None:
            self._metric_rows = draw_rows(self)
        return depth_metrics(self, self._metric_rows)

    def explain_losses(self) -> str | None:
        """One line if the held-out loss is above that of the start, with what to do about it."""
        names = ("eval_loss", "final_loss")  # the second is that of the best model, where that one is kept
        losses = [entry[name] for entry in self.state.log_history for name in names if name in entry]
        if not losses or losses[-1] <= losses[0]:
            return None
        return (
            f"The model is worse than at the start: the held-out loss has risen from {losses[0]:.4f} to"
            f" {losses[-1]:.4f}. Do not use it; {self.advice()}"
        )

    def explain_queries(self) -> str | None:
        """One line if the queries have hardly moved, with what to do about it."""
        if self.initial_queries is None or any(
            "depth_queries.projection" in n for n, _ in self.model.named_parameters()
        ):
            return None  # what a projection does depends on the size of what it sees
        moved = (read_queries(self.model) - self.initial_queries).norm(dim=-1).max().item()
        losses = [entry["eval_loss"] for entry in self.state.log_history if "eval_loss" in entry]
        measured = getattr(self.args, "query_learning_rate", None) == AUTO
        # Keys have a norm of sqrt(hidden) and random directions: a query of norm 0.05 moves a score by about 0.05. One
        # that goes where the loss falls needs less, and a measured rate is as high as the loss bears
        if moved >= 0.05 or (measured and losses and losses[-1] < losses[0]):
            return None
        lr, decay = self.query_learning_rate, getattr(self.args, "query_weight_decay", self.args.weight_decay)
        advice = (
            f"Train longer (query_learning_rate is {lr:g} by `auto`)"
            if measured
            else f"Raise query_learning_rate (now {lr:g}) or train longer"
        )
        return (
            f"The depth queries have hardly moved, by a norm of {moved:.1e} at most in {self.state.global_step} steps,"
            f" and all depths are still read about equally. {advice}"
            + (f", and lower query_weight_decay (now {decay:g})." if decay else ".")
        )


class _BeginTraining(TrainerCallback):
    """Logs what was measured as soon as the loggers listen, and forgets the losses of an earlier training."""

    def __init__(self, trainer: AttnResTrainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        self.trainer._guard, self.trainer._warned = LossGuard(), False
        if self.trainer._measured and self.trainer.logged_query_rate is None:
            self.trainer.log(self.trainer._measured)
