# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""transformers' decoders, and what makes one read over depth."""
