# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""PreNorm checkpoint <-> AttnRes checkpoint, exchange with other implementations, and proof that nothing changed."""

from .checkpoint import Checkpoint, open_checkpoint
from .converter import ConversionReport, convert, revert
from .interchange import export_checkpoint, import_checkpoint
from .parity import Parity, VerificationReport, verify


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
