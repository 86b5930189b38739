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
"""transformers' Trainer, with a learning rate of their own for the depth queries, and a look at what they do."""

import math
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import ProgressCallback, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback


@dataclass
class AttnResTrainingArguments(TrainingArguments):
    """`TrainingArguments` and what the depth queries need. The defaults come from the study (see the README)."""

    query_learning_rate: float | None = field(
        default=3e-3, metadata={"help": "Peak learning rate of queries and key norms; null takes `learning_rate`."}
    )
    query_weight_decay: float = field(
        default=0.0, metadata={"help": "Weight decay of the queries; it pulls them back to a PreNorm model."}
    )


class AttnResTrainer(Trainer):
    """A `Trainer` for AttnRes models, with adapters or without; other models train as with `Trainer`.

    It takes [`AttnResTrainingArguments`]. With every loss it logs, over the first two rows of the evaluation data (or
    of the training data):

    - `query_norm`: mean norm of the folded queries over the sites.
    - `depth_entropy`: mean entropy of the depth weights over sites and tokens, as a part of its largest value: 1 is
      the uniform read of a PreNorm model.
    - `depth/query_norm_SITE` and `depth/entropy_SITE`: the same of every site with more than one source.
    """

    def __init__(self, *args, **kwargs):
        model = kwargs.get("model", args[0] if args else None)
        self._use_cache = getattr(getattr(model, "config", None), "use_cache", None)
        super().__init__(*args, **kwargs)
        for loud, quiet in ((ProgressCallback, QuietProgressCallback), (PrinterCallback, QuietPrinterCallback)):
            if self.pop_callback(loud) is not None:
                self.add_callback(quiet)
        self.initial_queries = self.read_queries()
        self._observed = None

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        super().create_optimizer(model)
        args = self.args
        if isinstance(args, AttnResTrainingArguments) and len(self.optimizer.state) == 0:
            names = {id(parameter): name for name, parameter in (model or self.model).named_parameters()}
            queries = []
            for group in self.optimizer.param_groups:
                queries += [p for p in group["params"] if ".depth_queries." in f".{names[id(p)]}"]
                group["params"] = [p for p in group["params"] if ".depth_queries." not in f".{names[id(p)]}"]
            lr = self.query_learning_rate
            for parameter in queries:
                # The key norm is a factor of the query: to decay it as well would be to decay twice
                decay = args.query_weight_decay if names[id(parameter)].endswith(".query") else 0.0
                self.optimizer.add_param_group({"params": [parameter], "lr": lr, "weight_decay": decay})
            self.optimizer.param_groups[:] = [group for group in self.optimizer.param_groups if group["params"]]
        return self.optimizer

    @property
    def query_learning_rate(self) -> float:
        lr = getattr(self.args, "query_learning_rate", None)
        return self.args.learning_rate if lr is None else lr

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False):
        # The Trainer switches the KV cache off, and so would leave models that generate slowly ever after
        config = self.model.config
        in_training, config.use_cache = config.use_cache, self._use_cache
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            config.use_cache = in_training

    def evaluate(self, *args, **kwargs) -> dict[str, float]:
        with torch.random.fork_rng():  # a data loader draws from the generator that training goes on with
            return super().evaluate(*args, **kwargs)

    def _run_epoch(self, *args, resume_from_checkpoint: str | None = None, **kwargs):
        # CODEPATH: resumed from the checkpoint of its last step, or of the one that stopped it early, transformers'
        # Trainer would take another step before it looks
        if resume_from_checkpoint is not None:
            saved = self.state.stateful_callbacks.get("TrainerControl", {}).get("args", {})
            if self.state.global_step >= self.state.max_steps or saved.get("should_training_stop"):
                self.control.should_training_stop = True
                return
        super()._run_epoch(*args, resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if ("loss" in logs or "eval_loss" in logs) and self.initial_queries is not None:
            logs |= self.observe()
        super().log(logs, start_time)

    @torch.no_grad()
    def read_queries(self) -> torch.Tensor | None:
        """The folded queries, those of the adapter if there is one, `[sites, hidden]`; `None` for a model without."""
        found = {
            name.split(".")[-1]: parameter
            for name, parameter in self.model.named_parameters()
            if ".depth_queries." in f".{name}" and ".original_module." not in name
        }
        if not found:
            return None
        # The module is not called for them: FSDP allows that in a forward pass of the whole model only
        query, key_norm = (
            found[name].full_tensor() if hasattr(found[name], "full_tensor") else found[name]
            for name in ("query", "key_norm")
        )
        return query.float() * key_norm.float()

    @torch.no_grad()
    def observe(self) -> dict[str, float]:
        if self._observed is None:
            with torch.random.fork_rng():  # a data loader draws from the generator that training goes on with
                loader = self.get_train_dataloader() if self.eval_dataset is None else self.get_eval_dataloader()
                batch = next(iter(loader))
            self._observed = {k: batch[k][:2] for k in ("input_ids", "attention_mask", "position_ids") if k in batch}
        batch = self._prepare_inputs(self._observed)
        training = self.model.training
        self.model.eval()
        with self.compute_loss_context_manager():
            reads = self.model(**batch, output_depth_attentions=True, use_cache=False).depth_attentions
        self.model.train(training)
        norms = self.read_queries().norm(dim=-1)
        mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        if "position_ids" in batch:  # packed: padding, and the first token of a document, are at position 0
            mask &= batch["position_ids"] > 0
        entropies = {}
        for site, weights in enumerate(reads):
            if weights.shape[-1] > 1:
                entropy = torch.special.entr(weights[mask]).sum(-1).mean() / math.log(weights.shape[-1])
                entropies[site] = entropy.item()
        return {
            "query_norm": norms.mean().item(),
            "depth_entropy": sum(entropies.values()) / len(entropies),
            **{f"depth/query_norm_{site:03}": norms[site].item() for site in entropies},
            **{f"depth/entropy_{site:03}": entropy for site, entropy in entropies.items()},
        }

    def explain_queries(self) -> str | None:
        """One line if the queries have hardly moved, with what to do about it."""
        if self.initial_queries is None:
            return None
        moved = (self.read_queries() - self.initial_queries).norm(dim=-1).max().item()
        # Keys have a norm of sqrt(hidden) and random directions: a query of norm 0.05 moves a score by about 0.05
        if moved >= 0.05:
            return None
        lr, decay = self.query_learning_rate, getattr(self.args, "query_weight_decay", self.args.weight_decay)
        return (
            f"The depth queries have hardly moved, by a norm of {moved:.1e} at most in {self.state.global_step} steps,"
            f" and all depths are still read about equally. Raise query_learning_rate (now {lr:g}) or train longer"
            + (f", and lower query_weight_decay (now {decay:g})." if decay else ".")
        )


class _WithoutSites:
    """Logs go to the terminal without the figures of every site."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        super().on_log(args, state, control, {k: v for k, v in (logs or {}).items() if "/" not in k}, **kwargs)


class QuietProgressCallback(_WithoutSites, ProgressCallback):
    pass


class QuietPrinterCallback(_WithoutSites, PrinterCallback):
    pass
