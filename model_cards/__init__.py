# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Model cards of AttnRes checkpoints, and what is pushed to the Hub."""

# The latter is what the code in checkpoints of attnres 0.2 asks for
from .card import model_card, push_card_if_missing, write_model_card


__all__ = ["model_card", "push_card_if_missing", "write_model_card"]
