# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Text and rows of data sets."""
