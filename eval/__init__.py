# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Benchmarks of lm-eval on one or more models, paired, with the paper's table beside them."""

from .benchmarks import Benchmark, load_suite
from .evaluate import evaluate, prefetch
from .models import EvalModel, EvalOptions


__all__ = ["Benchmark", "EvalModel", "EvalOptions", "evaluate", "load_suite", "prefetch"]
