# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Time and memory of an AttnRes model against its PreNorm baseline."""
