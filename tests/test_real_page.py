# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The page about a real model says what its JSON says."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from markdown_it import MarkdownIt

from studies.real_model.all_questions import differences
from studies.real_model.page import docs_page, render, write_page
from studies.real_model.prompts import in_order


ROOT = Path(__file__).parents[1]


@pytest.fixture
def results() -> dict:
    return json.loads((ROOT / "studies/real_model/real.json").read_text())


def test_the_page_of_the_docs_is_made_from_the_results(results):
    text = (ROOT / "docs/real_model.md").read_text()
    assert docs_page() == text
    for folder in ("/home/", "/root/", "/tmp/", "/usr/", "site-packages"):
        assert folder not in text and folder not in json.dumps(results)


def test_every_change_is_seen(results):
    """Of a figure of each part."""
    text = render(results)
    changes = [
        ("Convert", lambda step: step["report"]["verification"]["parities"][0].update(kl_divergence=0.5)),
        ("Revert", lambda step: step.update(different=3)),
        ("Answers", lambda step: step["modes"]["float32"].update(equal=0)),
        ("Evaluate", lambda step: step["rows"][0]["scores"][1].__setitem__(0, 0.99)),
        ("Fine-tune", lambda step: step["modes"]["lora"]["losses"].append(9.0)),
        ("Retention", lambda step: step["modes"]["full"][0]["comparisons"][0].update(difference=-0.9)),
        ("Inspect", lambda step: step["models"][1].update(relative_entropy=0.123)),
        ("Hub", lambda step: step.update(same_logits=False)),
        ("Speed", lambda step: step["dtypes"]["float32"]["time"][1].update(median_ratio=7.0)),
    ]
    for name, change in changes:
        changed = copy.deepcopy(results)
        change(changed["steps"][name])
        assert render(changed) != text, name


def test_what_was_asked_in_full(results):
    """Of the results that lie here and of others, as they might have been."""
    questions = json.loads((ROOT / "studies/real_model/questions.json").read_text())
    for row in questions["sets"]:
        assert row["num_documents"] > len(row["answered_otherwise"]) and row["choices"] >= 2 * row["num_documents"]
        # Of sums over an answer's tokens: logits of the two are off by 1e-4
        assert row["largest_difference"] < 1e-3
    text = render(results, in_full={"questions": questions})
    otherwise = copy.deepcopy(questions)
    otherwise["sets"][0]["answered_otherwise"] = [{"doc_id": 7, "log_likelihoods": [[-1.5, -1.25], [-1.25, -1.5]]}]
    name = questions["sets"][0]["name"]
    changed = render(results, in_full={"questions": otherwise})
    assert f"- {name} 7: log-likelihoods [-1.5, -1.25] and [-1.25, -1.5]." in changed and changed != text
    parting = {"place": 3, "margins": [0.01, -0.02], "largest_difference": 0.3}
    ending = {"place": 5, "margins": None}
    figures = {"compared": 9, "equal": 4, "partings": [parting] * 4 + [ending]}
    prompts = {"tokens": 128, "modes": {"float32": figures, "bfloat16": figures}}
    told = (
        "5 answers, where logits of the two tokens differ by at most 0.02, those of the models by up to 0.3; 1 of them"
    )
    assert told in render(results, in_full={"prompts": prompts})


def test_how_far_two_models_are_apart(tmp_path):
    """From what an evaluation of both leaves."""
    names = ("base", "attnres")
    (tmp_path / "results.json").write_text(json.dumps({"models": [{"name": name} for name in names]}))
    answers = {"base": [[-1.0, -2.0], [-3.0, -3.5]], "attnres": [[-1.25, -2.0], [-3.5, -3.0]]}
    for name in names:
        (tmp_path / "models" / f"{name}-0123").mkdir(parents=True)
        samples = [
            {"doc_id": number, "resps": [[[str(value), "False"]] for value in both], "score": float(both[0] > both[1])}
            for number, both in enumerate(answers[name])
        ]
        lines = "".join(json.dumps(sample) + "\n" for sample in samples)
        (tmp_path / "models" / f"{name}-0123" / "set.jsonl").write_text(lines)
    assert differences(tmp_path) == {
        "choices": 4,
        "largest_difference": 0.5,
        "answered_otherwise": [{"doc_id": 1, "log_likelihoods": [[-3.0, -3.5], [-3.5, -3.0]]}],
    }


def test_answers_of_generate_batch_are_those_of_their_prompts():
    outputs = {f"req_{number}": SimpleNamespace(generated_tokens=[number]) for number in (10, 2, 0, 11, 9)}
    assert in_order(outputs) == [[0], [2], [9], [10], [11]]


def test_of_an_unfinished_run(results, tmp_path):
    """The parts that are done, and tables that are tables."""
    names = list(results["steps"])
    for count in range(len(names) + 1):
        part = {**results, "steps": {name: results["steps"][name] for name in names[:count]}}
        (tmp_path / "real.json").write_text(json.dumps(part))
        markdown, page = write_page(tmp_path)
        assert "<table>" in page.read_text() and "|" not in MarkdownIt().enable("table").render(
            markdown.read_text().replace("||", "")
        )
    with pytest.raises(ValueError, match="holds no real.json"):
        write_page(tmp_path / "nowhere")


def test_answers_to_humaneval():
    """What is said of all 164 problems is of the answers that lie beside it."""
    first, *answers = map(json.loads, (ROOT / "studies/real_model/humaneval_base.jsonl").read_text().splitlines())
    assert len(answers) == first["documents"] == 164 and len({row["doc_id"] for row in answers}) == 164
    assert first["passed"] == sum(row["score"] for row in answers)
    assert all(row["answer"].strip() for row in answers)
    compared = json.loads((ROOT / "studies/real_model/humaneval.json").read_text())
    assert compared["problems"] == 164 and compared["passed_by_base"] == first["passed"]
    assert 0 < compared["written_by_base"] <= compared["tokens"]
