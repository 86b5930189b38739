# SPDX-License-Identifier: Apache-2.0
"""What a training run prints: a line for each entry of its log and, on a terminal, one bar."""

import sys
import time
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers import TrainerCallback
from transformers.trainer_utils import has_length


if TYPE_CHECKING:
    from .trainer import AttnResTrainer


def bar(description: str, total: int, disable: bool = False, **kwargs: Any) -> tqdm:
    """A bar on standard error if that is a terminal: in a file, every update would add a line or a control character.

    `TQDM_DISABLE` in the environment leaves it out, too.
    """
    if disable or not sys.stderr.isatty():
        kwargs["disable"] = True  # and otherwise what the environment says
    return tqdm(desc=description, total=total, dynamic_ncols=True, **kwargs)


def duration(seconds: float) -> str:
    """Such as `45 s`, `3 min 20 s` and `2 h 5 min`."""
    seconds = max(0, round(seconds))
    if seconds < 60:
        return f"{seconds} s"
    minutes, seconds = divmod(seconds, 60)
    if minutes < 60:
        return f"{minutes} min {seconds} s"
    return f"{minutes // 60} h {minutes % 60} min"


def log_line(
    logs: dict[str, Any],
    step: int,
    max_steps: int,
    tokens_per_second: float | None = None,
    seconds_left: float | None = None,
) -> str | None:
    """A line for people of an entry of the log, `None` for one without a loss."""
    parts = [f"step {step:{len(str(max_steps))}}/{max_steps}"]
    if "eval_loss" in logs or "final_loss" in logs:
        parts.append(f"held-out loss {logs.get('eval_loss', logs.get('final_loss')):.4f}")
    elif "loss" in logs:
        parts.append(f"loss {logs['loss']:.4f}")
        if "learning_rate" in logs:
            parts.append(f"learning rate {logs['learning_rate']:.1e}".replace("e-0", "e-"))
        if tokens_per_second is not None:
            parts.append(f"{tokens_per_second:,.0f} tokens/s")
        if seconds_left is not None:
            parts.append(f"{duration(seconds_left)} left")
    else:
        return None
    return "  ".join(parts)


class ProgressLines(TrainerCallback):
    """Prints the log of a trainer as lines, in place of the dicts that transformers' callbacks print."""

    def __init__(self, trainer: "AttnResTrainer"):
        self.trainer = trainer
        self.bar: tqdm | None = None
        self.evaluation_bar: tqdm | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            self.bar = bar("Training", state.max_steps, args.disable_tqdm, initial=state.global_step)
        self.begun, self.first_step = time.perf_counter(), state.global_step
        self.logged, self.logged_tokens = self.begun, self.trainer.count_tokens()

    def on_step_end(self, args, state, control, **kwargs):
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs):
        if state.is_world_process_zero and has_length(eval_dataloader):
            if self.evaluation_bar is None:
                self.evaluation_bar = bar("Evaluating", len(eval_dataloader), args.disable_tqdm, leave=False)
            self.evaluation_bar.update()

    def on_evaluate(self, args, state, control, **kwargs):
        if self.evaluation_bar is not None:
            self.evaluation_bar.close()
        self.evaluation_bar = None

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero:
            return
        speed = left = None
        if self.bar is not None and state.global_step > self.first_step and "loss" in (logs or {}):
            now, tokens = time.perf_counter(), self.trainer.count_tokens()
            speed = (tokens - self.logged_tokens) / (now - self.logged)
            left = (now - self.begun) / (state.global_step - self.first_step) * (state.max_steps - state.global_step)
            self.logged, self.logged_tokens = now, tokens
        line = log_line(logs or {}, state.global_step, max(state.max_steps, state.global_step), speed, left)
        if line is not None:
            tqdm.write(line)

    def on_train_end(self, args, state, control, **kwargs):
        if self.bar is not None:
            self.bar.close()
        self.bar = None
