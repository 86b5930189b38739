# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Time and memory: `attnres bench` against the PreNorm twin, and scripts with what else was measured."""
