# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Model cards of AttnRes checkpoints, and what is pushed to the Hub."""

from .card import push_card_if_missing  # by which the code in checkpoints of attnres 0.2 finds it


__all__ = ["push_card_if_missing"]
