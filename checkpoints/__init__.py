# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Checkpoint folders and where they come from. Knows files and the Hub, and nothing of AttnRes models."""
