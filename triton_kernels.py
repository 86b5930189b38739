# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""`attnres.depth.triton_kernels` under the name by which code in checkpoints of attnres 0.1 and 0.2 asks for it."""

from .depth.triton_kernels import *  # noqa: F403
