# SPDX-License-Identifier: Apache-2.0
"""Has the loss risen above that of the start by more than noise?"""

import math
import statistics
from collections import deque


# Of a held-out loss, in nats per token: a smaller rise changes the perplexity by less than a thousandth
SMALLEST_RISE = 1e-3
# So many training steps are averaged and compared with the first one
WINDOW = 8


class LossGuard:
    """Compares losses with those of the start.

    Held-out losses are compared batch by batch, as the text is the same: a mean rise of more than two standard errors
    counts. Training losses are of different texts: the mean of the last steps has to be four standard deviations
    above the loss of the first step. The deviation comes from the differences of neighbours, whose median a steady
    rise hardly moves.
    """

    def __init__(self):
        self.first_batches: list[float] = []
        self.first_step: float | None = None
        self.last_steps: deque[float] = deque(maxlen=4 * WINDOW)

    def check_held_out(self, first: float, last: float, batches: list[float]) -> str | None:
        """What has happened between an evaluation with the loss `first` and one with `last`, if it is bad.

        Args:
            batches: losses of the batches behind `last`.
        """
        noise = 0.0
        if len(batches) == len(self.first_batches) > 1:
            rises = [after - before for before, after in zip(self.first_batches, batches)]
            if all(map(math.isfinite, rises)):  # `statistics` takes nothing else
                noise = 2 * statistics.stdev(rises) / math.sqrt(len(rises))
        if last - first <= max(noise, SMALLEST_RISE):
            return None
        return f"The held-out loss has risen from {first:.4f} at the start to {last:.4f}"

    def add_steps(self, losses: dict[int, float]):
        """Take in the losses of training steps by how many steps were taken before."""
        for step, loss in sorted(losses.items()):
            if step == 0:
                self.first_step = loss
            self.last_steps.append(loss)

    def check_training(self) -> str | None:
        """What has happened to the training loss, if it is bad."""
        losses = list(self.last_steps)
        if not all(math.isfinite(loss) for loss in losses):
            return "The training loss is not a finite number any more"
        if self.first_step is None or len(losses) < WINDOW:
            return None
        recent = statistics.mean(losses[-WINDOW:])
        changes = [abs(after - before) for before, after in zip(losses, losses[1:])]
        # The median size of a difference of two normal numbers is 0.6745 * sqrt(2) times their standard deviation
        deviation = statistics.median(changes) / (0.6745 * math.sqrt(2))
        if recent - self.first_step <= 4 * deviation * math.sqrt(1 + 1 / WINDOW):
            return None
        return f"The training loss has risen from {self.first_step:.4f} in the first step to {recent:.4f}"
