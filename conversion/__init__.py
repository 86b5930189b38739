# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""PreNorm checkpoint <-> AttnRes checkpoint, exchange with other implementations, and proof that nothing changed.

- `converter.py`: `convert` and `revert`; `exchange.py`: to and from Kimi's naming and fla; `gguf.py`: GGUF files
- `options.py`: what can be chosen; `checks.py`: what is looked at first
- `writing.py`: the checkpoint that all of them write, with report and card; `weights.py`: its weights, byte for byte
- `parity.py`: `verify`, the same function or not; `running.py`: the models run for it
- `layers.py`: `select_layers`, a model with some layers of another; `pruning.py`: what layers are worth, and `prune`
- `probe_report.py`: what can be a base, and why
"""

from ..checkpoints.checkpoint import Checkpoint, open_checkpoint
from ..checkpoints.reports import ConversionReport, Parity, VerificationReport
from .converter import convert, revert
from .exchange import export_checkpoint, import_checkpoint
from .layers import select_layers
from .parity import verify
from .pruning import LayerCosts, layer_costs, prune


__all__ = [
    "Checkpoint",
    "ConversionReport",
    "LayerCosts",
    "Parity",
    "VerificationReport",
    "convert",
    "export_checkpoint",
    "import_checkpoint",
    "layer_costs",
    "open_checkpoint",
    "prune",
    "revert",
    "select_layers",
    "verify",
]
