# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Files written whole, figures, devices, timing."""
