# SPDX-License-Identifier: Apache-2.0
"""Stands in for the metric `code_eval`, which lm-eval's HumanEval and MBPP load by this name, with our sandbox."""

import datasets
import evaluate

from attnres.eval.sandbox import pass_at_k


class CodeEval(evaluate.Metric):
    """pass@k of programs, each judged by its tests."""

    sandboxed = True  # unlike the one of this name that the Hub has

    def _info(self):
        features = {"predictions": datasets.Sequence(datasets.Value("string")), "references": datasets.Value("string")}
        return evaluate.MetricInfo(
            description="", citation="", inputs_description="", features=datasets.Features(features)
        )

    def _compute(self, predictions, references, k=(1,), **kwargs):
        """The scores, and the outcomes of all programs by test."""
        return pass_at_k(predictions, references, k)
