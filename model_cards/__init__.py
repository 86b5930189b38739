# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Model cards of AttnRes checkpoints, and what is pushed to the Hub."""
