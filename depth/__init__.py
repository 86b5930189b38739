# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Reads over depth on tensors: the operator, the block cache, the stream and the queries. Imports nothing of ours."""
