# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Benchmarks of lm-eval on one or more models, paired, with the paper's scores for comparison.

- `evaluate.py`: an evaluation from its arguments to its report
- `benchmarks.py`: suites and tasks; `models.py`: what is evaluated; `harness.py`: one on the other
- `saved.py`: what that leaves, and whether it can be believed; `statistics.py`, `report.py`: tables and plots of it
- `code_answers.py`: programs out of what chat models answer; `sandbox/`: where they run, and what judges them
"""

from .benchmarks import Benchmark, load_suite
from .evaluate import evaluate, prefetch
from .harness import EvalSettings
from .models import EvalModel, EvalOptions


__all__ = ["Benchmark", "EvalModel", "EvalOptions", "EvalSettings", "evaluate", "load_suite", "prefetch"]
