# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The same figures while a model trains, for TensorBoard."""

from pathlib import Path

import matplotlib.pyplot as plt
import torch
from transformers import TrainerCallback

from .figures import heat_map, profiles
from .measure import measure


class DepthMapCallback(TrainerCallback):
    """Logs heat map and profiles at every evaluation, always of the same few windows.

    They go to `output_dir/runs/depth`, which TensorBoard shows as a separate run. For a model that is not an AttnRes
    one, the first evaluation raises an error.

    Args:
        windows: token ids, `[windows, length]`.
    """

    def __init__(self, windows: torch.Tensor):
        self.windows = windows
        self.writer = None

    def on_evaluate(self, args, state, control, model=None, **kwargs):
        model = model.get_base_model() if hasattr(model, "get_base_model") else model  # within an adapter
        statistics = measure(model, self.windows, name=f"step {state.global_step}", progress=False)
        if not state.is_world_process_zero:
            return
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(Path(args.output_dir) / "runs" / "depth")
        for name, figure in (("depth/weights", heat_map([statistics])), ("depth/profiles", profiles([statistics]))):
            self.writer.add_figure(name, figure, state.global_step)
            plt.close(figure)
        self.writer.flush()

    def on_train_end(self, args, state, control, **kwargs):
        if self.writer is not None:
            self.writer.close()
