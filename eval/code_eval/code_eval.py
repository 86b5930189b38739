# Copyright 2026 The attnres authors.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Stands in for the metric `code_eval`, which lm-eval's HumanEval and MBPP load by this name, with our sandbox."""

import datasets
import evaluate

from attnres.eval.sandbox import run_program


class CodeEval(evaluate.Metric):
    """pass@1 of programs, each followed by its tests."""

    def _info(self):
        features = {"predictions": datasets.Sequence(datasets.Value("string")), "references": datasets.Value("string")}
        return evaluate.MetricInfo(
            description="", citation="", inputs_description="", features=datasets.Features(features)
        )

    def _compute(self, predictions, references, k=(1,), **kwargs):
        """Share of passing programs; with one program for each reference that is pass@1."""
        outcomes = [
            [run_program(f"{candidate}\n{reference}") for candidate in candidates]
            for candidates, reference in zip(predictions, references)
        ]
        passed = [sum(outcome == "passed" for outcome in row) / len(row) for row in outcomes]
        return {"pass@1": sum(passed) / len(passed)}, outcomes
