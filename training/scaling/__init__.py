# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""A scaling law from small models: one ladder of sizes for PreNorm and AttnRes, and a line through their losses."""

from .fit import fit_ladder
from .ladder import Ladder, read_ladder, run_ladder
from .plot import plot_ladder


__all__ = ["Ladder", "fit_ladder", "plot_ladder", "read_ladder", "run_ladder"]
