# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""PreNorm checkpoint <-> AttnRes checkpoint, exchange with other implementations, and proof that nothing changed.

- `converter.py`: `convert` and `revert`; `interchange.py`: to and from Kimi's naming and fla
- `checks.py`: what is looked at first; `writing.py`: the checkpoint that all of them write, with report and card
- `files.py`: folders that are written whole, and weights byte for byte
- `parity.py`: `verify`, the same function or not; `running.py`: the models run for it
"""

from ..checkpoints.checkpoint import Checkpoint, open_checkpoint
from ..checkpoints.reports import ConversionReport, Parity, VerificationReport
from .converter import convert, revert
from .exchange import export_checkpoint, import_checkpoint
from .parity import verify


__all__ = [
    "Checkpoint",
    "ConversionReport",
    "Parity",
    "VerificationReport",
    "convert",
    "export_checkpoint",
    "import_checkpoint",
    "open_checkpoint",
    "revert",
    "verify",
]
