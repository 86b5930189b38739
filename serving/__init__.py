# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""AttnRes models behind the servers that people use: transformers' own, and vLLM."""
