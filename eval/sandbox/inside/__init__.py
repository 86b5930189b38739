# SPDX-License-Identifier: Apache-2.0
"""What runs inside a sandbox, in an interpreter that has the standard library alone: see `attnres.eval.sandbox`."""
