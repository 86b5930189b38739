# SPDX-License-Identifier: Apache-2.0
"""`attnres eval`: the real tasks of lm-eval on made-up data in their schemas, answered by who knows the answers."""

import collections
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import lm_eval
import numpy as np
import pytest
import torch
import yaml
from benchmark_data import Answerer, tasks_without_data, write_data_root
from datasets import Dataset
from huggingface_hub import ModelCard
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from loopback_hub import LoopbackHub
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_models import convert, mostly_slow, randomize_queries, tiny_base_model
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    T5Config,
    set_seed,
)

from attnres.checkpoints.fingerprint import checkpoint_fingerprint
from attnres.conversion import convert as convert_checkpoint
from attnres.data.text import read_sample, train_tokenizer
from attnres.eval import EvalModel, EvalOptions, evaluate, load_suite
from attnres.eval.benchmarks import Benchmark, Unavailable, in_sandbox, load_tasks, task_manager
from attnres.eval.evaluate import evaluation_environment
from attnres.eval.harness import sample_record
from attnres.eval.models import TransformersLM, load_model
from attnres.eval.report import answer_warnings, rebuild
from attnres.eval.sandbox import NoSandbox, Wall, reason_against
from attnres.eval.saved import Finished, ModelResults
from attnres.eval.statistics import bootstrap_interval, compare, holm, score


@pytest.fixture(scope="module")
def manager():
    return task_manager(None)


def data_and_tasks(manager, root, *suites):
    """The data of all rows of some suites as files, and the tasks that know their answers."""
    benchmarks = [benchmark for name in suites for benchmark in load_suite(name)]
    names = list(dict.fromkeys(task for benchmark in benchmarks for task in benchmark.tasks))
    with evaluation_environment(None, allow_code_execution=True):
        tasks = tasks_without_data(manager, names, 4, pytest.MonkeyPatch())
    write_data_root(root, tasks.values(), 4)
    return root, list(tasks.values())


@pytest.fixture(scope="module")
def paper(manager, tmp_path_factory):
    return data_and_tasks(manager, tmp_path_factory.mktemp("data"), "paper", "chat")


@pytest.fixture(scope="module")
def quick(manager, tmp_path_factory):
    """As `paper`, which takes half a minute."""
    return data_and_tasks(manager, tmp_path_factory.mktemp("quick"), "quick")


@pytest.fixture
def named_models(tmp_path):
    """Makes folders that a name alone tells from each other."""

    def make(*names):
        folders = [tmp_path / "named" / name for name in names]
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.json").write_text(json.dumps({"model_type": "llama", "name": folder.name}))
        return [str(folder) for folder in folders]

    return make


@pytest.fixture
def quick_eval(quick, named_models, tmp_path):
    """Evaluates named answerers on the rows of `quick`; the name says which documents one gets wrong."""
    root, tasks = quick
    answerers = {}

    def make_model(model, options, device, batch_size):
        name = model.name.removesuffix("-again")
        wrong = {"right": (), "wrong": range(1000), "some": (1, 4, 7), "other": (2, 4)}[name]
        answerers[name] = Answerer(tasks, lambda task, doc_id: doc_id in wrong)
        return answerers[name]

    def run(*names, output=tmp_path / "out", suite="quick", **kwargs):
        return evaluate(
            named_models(*names), output, suite=suite, **{"data_root": root, "make_model": make_model, **kwargs}
        )

    run.answerers = answerers
    return run


@pytest.mark.slow
def test_right_and_wrong_answers_on_every_row(paper, named_models, tmp_path):
    """Through every prompt, filter and metric of the paper's table, generated programs included."""
    root, tasks = paper
    models, output = named_models("right", "wrong"), tmp_path / "out"
    results = evaluate(
        models,
        output,
        suite="paper",
        data_root=root,
        allow_code_execution=True,
        make_model=lambda model, *args: Answerer(tasks, lambda task, doc_id: model.name == "wrong"),
    )
    assert [row["benchmark"]["name"] for row in results["rows"]] == [row.name for row in load_suite("paper")]
    assert not results["skipped"] and len(results["rows"]) == 15
    for row in results["rows"]:
        assert row["scores"][0] == [1.0, 0.0] and row["scores"][1] == [0.0, 0.0], row["benchmark"]["name"]
        assert row["comparisons"][0]["difference"] == -1.0
    # a rerun takes everything from the files, and the report from its own
    again = evaluate(models, output, suite="paper", data_root=root, allow_code_execution=True, make_model=None)
    assert again == results
    before = {path.name: path.read_bytes() for path in output.iterdir() if path.is_file()}
    assert before.keys() == {"results.json", "table.md", "differences.png", "differences.svg"}
    for path in rebuild(output):
        assert path.suffix == ".png" or path.read_bytes() == before[path.name]


@pytest.mark.slow
def test_chat_suite(paper, checkpoints, tmp_path):
    """Right and wrong answers through every prompt, filter and metric, in conversations with an example a turn."""
    root, tasks = paper
    models, answerers = [], {}
    for name in ("right", "wrong"):
        shutil.copytree(checkpoints / "base", tmp_path / name)
        models.append(str(tmp_path / name))

    def make_model(model, *args):
        answerers[model.name] = Answerer(tasks, lambda task, doc_id: model.name == "wrong")
        return answerers[model.name]

    arguments = {"suite": "chat", "data_root": root, "allow_code_execution": True, "make_model": make_model}
    with pytest.raises(ValueError, match="right` has no chat template, and the prompts are to be put into one"):
        evaluate(models, tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()
    for model in models:
        Path(model, "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    results = evaluate(models, tmp_path / "out", **arguments)
    assert [row["benchmark"]["name"] for row in results["rows"]] == [row.name for row in load_suite("chat")]
    for row in results["rows"]:
        assert row["scores"] == [[1.0, 0.0], [0.0, 0.0]], row["benchmark"]["name"]
        assert all(run["chat_template_sha256"] for (run,) in row["runs"])
        for task in row["generation"]:
            prompt, examples = answerers["right"].prompts[task], row["num_fewshot"][task]
            assert prompt.count("<user>") == prompt.count("<assistant>") == examples + 1, task


@pytest.mark.slow
def test_tasks_that_run_code_by_their_names(paper, checkpoints, tmp_path):
    """They say so themselves, also from within a group, and go the way of the rows of a suite."""
    root, tasks = paper
    own = tmp_path / "own"
    own.mkdir()
    (own / "group.yaml").write_text("group: some_code\ntask: [humaneval]\n")
    arguments = {"tasks": ["some_code", "mbpp", "arc_challenge"], "data_root": root, "include_path": own}
    for name in ("right", "wrong"):
        shutil.copytree(checkpoints / "base", tmp_path / name)
    asked = Answerer(tasks)
    results = evaluate(
        [str(tmp_path / "right")], tmp_path / "not allowed", **arguments, make_model=lambda *args: asked
    )
    line = "it runs generated code; `--allow-code-execution` allows that"
    assert results["skipped"] == {"some_code": line, "mbpp": line}
    assert {task for task, _ in asked.asked} == {"arc_challenge"}
    results = evaluate(
        [str(tmp_path / name) for name in ("right", "wrong")],
        tmp_path / "allowed",
        **arguments,
        allow_code_execution=True,
        make_model=lambda model, *args: Answerer(tasks, lambda task, doc_id: model.name == "wrong"),
    )
    scores = {row["benchmark"]["name"]: [score for score, _ in row["scores"]] for row in results["rows"]}
    assert not results["skipped"] and scores == dict.fromkeys(("some_code", "mbpp", "arc_challenge"), [1.0, 0.0])


@pytest.mark.slow
def test_code_is_not_run_without_walls(paper, tmp_path, monkeypatch):
    """Refused before a model is loaded or a folder is made."""
    monkeypatch.setattr(Wall, "command", lambda self: ["/nowhere/" + self.name])
    reason_against.cache_clear()
    try:
        with pytest.raises(NoSandbox, match="bubblewrap: not installed.*Install bubblewrap"):
            evaluate(
                ["model"],
                tmp_path / "out",
                tasks=["humaneval"],
                data_root=paper[0],
                allow_code_execution=True,
                make_model=None,
            )
    finally:
        reason_against.cache_clear()
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_task_that_runs_code_by_itself(manager, paper, monkeypatch):
    """Not even where code may be run: it would run outside of the sandbox."""
    with evaluation_environment(paper[0], allow_code_execution=True):
        (task,) = tasks_without_data(manager, ["humaneval"], 4, monkeypatch).values()
        assert in_sandbox(task)
        monkeypatch.setitem(task._metric_fn_list["pass_at_k"].__self__.__globals__, "compute_", None)
        assert not in_sandbox(task)
        with pytest.raises(Unavailable, match="`humaneval` runs generated code itself"):
            load_tasks(Benchmark("HumanEval", ("humaneval",), ""), manager)


@pytest.mark.slow
def test_cruxeval(manager, tmp_path):
    """lm-eval executes predictions by means of its own; in the sandbox there is nothing but the prediction."""
    doc = {"code": "def f(a, b=1):\n    return {a: [b, 'x']}", "input": "'q', b=2", "output": "{'q': [2, 'x']}"}
    folder = tmp_path / "cruxeval-org/cruxeval"
    folder.mkdir(parents=True)
    Dataset.from_list([{**doc, "id": "made"}]).to_parquet(folder / "test.parquet")
    answers = {
        "cruxeval_output": {
            "assert f('q', b=2) == {'q': [2, 'x']}": 1.0,
            "assert f('q', b=2) == {'q': [2, 'y']}": 0.0,
            "assert f('q', b=2) == 1 or True": 0.0,  # from here on what would pass as a part of the assertion
            "assert f('q', b=2) == f('q', b=2)": 0.0,
            "assert f('q', b=2) == type('E', (), {'__eq__': lambda a, b: True})()": 0.0,
            "assert f('q', b=2) == __import__('os')._exit(0)": 0.0,
            "assert f('q', b=2) == (": 0.0,
        },
        "cruxeval_input_cot": {
            "assert f('q', 2) == {'q': [2, 'x']}": 1.0,
            "assert f(*['q'], **{'b': 2}) == {'q': [2, 'x']}": 1.0,
            "assert f('q') == {'q': [2, 'x']}": 0.0,
            "assert f('q') == 1 or f('q', 2) == {'q': [2, 'x']}": 0.0,
            "assert f(__import__('os')._exit(0)) == {'q': [2, 'x']}": 0.0,
        },
    }
    with evaluation_environment(tmp_path, allow_code_execution=True):
        for name, scores in answers.items():
            (task,) = load_tasks(Benchmark(name, (name,), ""), manager)
            assert {answer: score_alone(task, answer) for answer in scores} == scores


def score_alone(task, answer):
    """Of one answer to the first question of a task."""
    (doc,) = task.test_docs()
    filtered = [[answer]]
    for step in task._filters[0].filters:
        filtered = step().apply(filtered, [doc])
    return task.process_results(doc, filtered)["pass@1"]


def test_planted_errors(quick_eval):
    results = quick_eval("right", "some")
    arc, hellaswag = results["rows"]
    assert arc["num_documents"] == 4 and arc["comparisons"][0]["difference"] == -1 / 4  # document 1
    row = hellaswag["comparisons"][0]
    assert hellaswag["num_documents"] == 30 and row["difference"] == pytest.approx(-3 / 30)
    assert hellaswag["scores"][1][1] == pytest.approx(np.std([1] * 27 + [0] * 3, ddof=1) / 30**0.5)
    assert row["p_value"] == pytest.approx(2 * 0.5**3)  # three documents, all to one side
    assert row["p_holm"] == pytest.approx(2 * row["p_value"])  # the smaller one of two
    assert row["interval"][0] == pytest.approx(-0.2, abs=0.04) and -0.04 < row["interval"][1] <= 0


@pytest.mark.slow
def test_identical_models(quick_eval):
    for row in quick_eval("some", "some-again")["rows"]:
        comparison = row["comparisons"][0]
        assert comparison["difference"] == 0 and comparison["interval"] == (0, 0)
        assert comparison["p_value"] == comparison["p_holm"] == 1


@pytest.mark.slow
def test_swapping_the_models_swaps_the_signs(quick_eval, tmp_path):
    there = quick_eval("some", "other", "right")
    back = quick_eval("other", "some", output=tmp_path / "back")
    shared = quick_eval("other", "some")  # from the files of the first
    assert shared == back
    for a, b in zip(there["rows"], back["rows"]):
        assert a["scores"][:2] == b["scores"][::-1]
        assert a["comparisons"][0]["difference"] == -b["comparisons"][0]["difference"]
        assert a["comparisons"][0]["p_value"] == b["comparisons"][0]["p_value"]
        assert len(a["comparisons"]) == 2


@pytest.mark.slow
def test_interrupted(quick_eval, tmp_path, monkeypatch):
    """Killed between two benchmarks: what was finished is not run again, and the result is the same."""
    whole = quick_eval("right", "some", output=tmp_path / "whole")
    save = ModelResults.save

    def save_and_die(self, benchmark, finished):
        if "some" in str(self.folder) and benchmark.name == "HellaSwag":
            raise KeyboardInterrupt
        save(self, benchmark, finished)

    monkeypatch.setattr(ModelResults, "save", save_and_die)
    with pytest.raises(KeyboardInterrupt):
        quick_eval("right", "some")
    assert not (tmp_path / "out/results.json").exists()
    monkeypatch.setattr(ModelResults, "save", save)
    quick_eval.answerers.clear()
    assert quick_eval("right", "some") == whole
    assert quick_eval.answerers.keys() == {"some"}
    assert not quick_eval.answerers["some"].asked  # what it had answered is kept, though not finished
    for name in ("results.json", "table.md"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


DAMAGE = {
    "a score": ("ARC*.jsonl", lambda text: text.replace('"score": 1.0', '"score": 0.0', 1)),
    "samples that end early": ("ARC*.jsonl", lambda text: text[:-100]),
    "no samples": ("ARC*.jsonl", None),
    "a summary that ends early": ("ARC*.json", lambda text: text[: len(text) // 2]),
    "an empty summary": ("ARC*.json", lambda text: ""),
    "a summary of somebody else": ("ARC*.json", lambda text: "[1, 2, 3]"),
    "a number of examples": ("ARC*.json", lambda text: text.replace('"arc_challenge": 25', '"arc_challenge": "x"')),
}


@pytest.mark.parametrize("kind", mostly_slow(DAMAGE, every=4))
def test_what_is_damaged_is_run_again(quick_eval, tmp_path, caplog, kind):
    """And kept under another name, with a word."""
    whole = quick_eval("right")
    pattern, damage = DAMAGE[kind]
    path = next((tmp_path / "out/models").glob(f"right-*/{pattern}"))
    before = path.read_text()
    path.unlink() if damage is None else path.write_text(damage(before))
    quick_eval.answerers.clear()
    assert quick_eval("right") == whole
    assert {task for task, _ in quick_eval.answerers["right"].asked} == {"arc_challenge"}
    assert path.read_text() == before and "is damaged" in caplog.text and "ARC-Challenge is run again" in caplog.text
    if damage is not None:
        assert path.with_name(path.name + ".kept").read_text() == damage(before)
        assert f"kept as `{path}.kept`" in caplog.text


def test_damaged_answers_are_not_used(quick_eval, tmp_path, caplog, monkeypatch):
    """Those of an unfinished benchmark: not one of a file in which one was changed."""
    whole = quick_eval("right", output=tmp_path / "whole")
    save = ModelResults.save
    monkeypatch.setattr(ModelResults, "save", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        quick_eval("right")
    monkeypatch.setattr(ModelResults, "save", save)
    path = next((tmp_path / "out/models").glob("right-*/.*.answers"))
    content = path.read_bytes()
    assert b'"answer": [0.0, true]' in content
    path.write_bytes(content.replace(b'"answer": [0.0, true]', b'"answer": [-9.0, true]', 1))
    quick_eval.answerers.clear()
    assert quick_eval("right") == whole
    assert len(quick_eval.answerers["right"].asked) == 16 + 120  # four options of 4 and of 30 documents
    assert "answers` is damaged: its answers are not used" in caplog.text


FOREIGN = {
    "results.json": [
        '{"schema": 2, "models": [',
        "[]",
        '{"accuracy": 0.5}',
        '{"schema": 1}',
        '{"schema": 2, "rows": 5}',
    ],
    "table.md": ["my own table"],
    "differences.png": ["my own picture"],
}


@pytest.mark.one_in(7)
@pytest.mark.parametrize("name, content", [(name, content) for name in FOREIGN for content in FOREIGN[name]])
def test_foreign_files_are_kept(quick_eval, tmp_path, caplog, capsys, run_attnres, name, content):
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_text(content)
    (out / "notes.txt").write_text("mine")
    if name == "results.json":
        assert run_attnres("report", out) == 1
        error = " ".join(capsys.readouterr().err.split())
        assert "results.json` " in error and "Traceback" not in error
    quick_eval("right", "some")
    assert (out / f"{name}.kept").read_text() == content and (out / "notes.txt").read_text() == "mine"
    assert f"It is kept as `{out / name}.kept`" in caplog.text
    quick_eval("right", "some")
    assert not list(out.glob("*.kept2"))  # its own files are written over


def test_one_run_at_a_time(quick_eval, named_models, quick, tmp_path, capsys, run_attnres):
    """A second run on the folder is told so at once and writes nothing; a killed one leaves nothing that blocks."""
    out = tmp_path / "out"
    quick_eval("right")
    (model,) = named_models("right")
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    code = "import sys, filelock; (lock := filelock.FileLock(sys.argv[1])).acquire(); print('held', flush=1); input()"
    command = [sys.executable, "-c", code, str(out / "models/.lock")]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"held\n"
        for arguments in (["eval", model, "-o", out, "--suite", "quick", "--data-root", quick[0]], ["report", out]):
            assert run_attnres(*arguments) == 1
            error = " ".join(capsys.readouterr().err.split())
            assert f"Another run is writing `{out}`. Wait until it is done, or name another folder." in error
        assert before == {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    finally:
        holder.kill()
        holder.wait()
    quick_eval("right")


def test_a_checkpoint_that_changes_before_it_is_loaded(quick_eval, tmp_path):
    def make_model(model, *args):
        (Path(model.path) / "config.json").write_text('{"name": "another"}')

    with pytest.raises(OSError, match="right` changed while it was loaded"):
        quick_eval("right", make_model=make_model)
    assert not list((tmp_path / "out/models").glob("*/*"))


def test_options_are_part_of_what_is_remembered(quick_eval):
    assert quick_eval("right")["rows"][1]["num_documents"] == 30
    assert quick_eval("right", options=EvalOptions(limit=2))["rows"][1]["num_documents"] == 2


def test_other_data_is_not_taken_for_the_same(quick_eval, quick, tmp_path):
    """Nor does an answer get lost that holds a line separator and half a surrogate pair."""
    quick_eval("right")
    quick_eval.answerers.clear()
    changed = tmp_path / "changed"
    shutil.copytree(quick[0], changed)
    (changed / "note.txt").write_text("another")
    answerer = Answerer(quick[1])
    quick_eval("right", data_root=changed, make_model=lambda *args: answerer)
    assert {task for task, _ in answerer.asked} == {"arc_challenge", "hellaswag"}
    model = ModelResults(tmp_path / "odd", EvalModel(str(tmp_path / "named/right")), EvalOptions(), {})
    benchmark = load_suite("quick")[0]
    finished = Finished([{"resps": [["a\u2028b\x85c\ud800"]]}], "acc", "none", {}, {}, {}, [])
    model.save(benchmark, finished)
    assert model.load(benchmark) == finished


def test_missing_data_skips_a_row(quick_eval, quick, tmp_path):
    root = tmp_path / "part"
    shutil.copytree(quick[0] / "Rowan", root / "Rowan")
    results = quick_eval("right", data_root=root)
    assert [row["benchmark"]["name"] for row in results["rows"]] == ["HellaSwag"]
    assert "What to do: " in results["skipped"]["ARC-Challenge"]
    assert "ARC-Challenge was skipped" in (tmp_path / "out/table.md").read_text()


@pytest.mark.slow
def test_gpqa_options_do_not_depend_on_the_process(paper, manager):
    """The same order each time, and the right answer at every place."""
    orders = []
    for _ in range(2):
        np.random.seed(len(orders))
        tasks = tasks_without_data(manager, ["attnres_gpqa_diamond"], 4, pytest.MonkeyPatch())
        orders.append([(doc["options"], doc["answer"]) for doc in tasks["attnres_gpqa_diamond"].validation_docs()])
    assert orders[0] == orders[1] and {answer for _, answer in orders[0]} == {0, 1, 2, 3}


LM_EVAL = "import attnres; from lm_eval.__main__ import cli_evaluate; cli_evaluate()"


@pytest.mark.slow
def test_lm_eval_runs_our_suites(checkpoints, paper, manager, tmp_path):
    """Through its own program, with the numbers of examples that the suites ask for."""
    import attnres.eval

    for name in ("paper", "core", "chat", "quick"):
        config = yaml.safe_load((Path(attnres.eval.__file__).parent / f"tasks/attnres_{name}.yaml").read_text())
        shots = {entry.get("group") or entry["task"]: entry["num_fewshot"] for entry in config["task"]}
        assert shots == {task: row.num_fewshot for row in load_suite(name) for task in row.tasks}
        assert f"attnres_{name}" in manager.all_groups
    include_path = Path(attnres.eval.__file__).parent / "tasks"
    arguments = ["--model", "hf", "--model_args", f"pretrained={checkpoints / 'trained'}", "--device", "cpu"]
    arguments += [
        "--include_path",
        include_path,
        "--tasks",
        "attnres_quick",
        "--limit",
        "2",
        "--output_path",
        tmp_path,
    ]
    environment = {**os.environ, "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", LM_EVAL, "run", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=paper[0], env=environment, timeout=300)
    assert result.returncode == 0, result.stderr
    results = json.loads(next(tmp_path.rglob("results_*.json")).read_text())
    assert results["n-shot"] == {"arc_challenge": 25, "hellaswag": 10}


# --- the program


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tokenizer = train_tokenizer([read_sample()] * 3, vocab_size=400)
    base_model = tiny_base_model("llama", vocab_size=len(tokenizer))
    for name, model in (("base", base_model), ("trained", randomize_queries(convert(base_model, 3), 2.0))):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


def test_command_line(checkpoints, quick, tmp_path, monkeypatch, capsys, run_attnres):
    monkeypatch.chdir(tmp_path)
    models = [checkpoints / "base", checkpoints / "trained"]
    arguments = ["eval", *models, "-o", "out", "--suite", "quick", "--data-root", quick[0], "--limit", 4]
    assert run_attnres(*arguments) == 0
    printed = capsys.readouterr().out
    assert "HellaSwag" in printed and "trained" in printed
    results = json.loads((tmp_path / "out/results.json").read_text())
    assert [model["name"] for model in results["models"]] == ["base", "trained"]
    assert str(checkpoints) not in json.dumps(results["models"])  # what is the same elsewhere is named the same
    table = (tmp_path / "out/table.md").read_text()
    assert "| 83.2 | 83.4 |" in table
    (tmp_path / "out/table.md").unlink()
    assert run_attnres("report", "out") == 0
    assert (tmp_path / "out/table.md").read_text() == table
    # the model card shows it
    trained = tmp_path / "trained"
    shutil.copytree(checkpoints / "trained", trained)
    for _ in range(2):
        assert run_attnres("card", trained, "--evaluation", "out") == 0
    card = ModelCard.load(trained / "README.md")
    scores = {result.dataset_type: result.metric_value for result in card.data.eval_results}
    assert scores == {row["benchmark"]["tasks"][0]: round(100 * row["scores"][1][0], 2) for row in results["rows"]}
    assert table in card.text and "![differences to the baseline](evaluation/differences.png)" in card.text
    shutil.copytree(trained, tmp_path / "unknown")
    assert run_attnres("card", tmp_path / "unknown", "--evaluation", "out") == 1
    assert "holds no evaluation of `unknown`, only of base, trained" in " ".join(capsys.readouterr().err.split())
    shutil.copyfile(checkpoints / "base/model.safetensors", trained / "model.safetensors")
    assert run_attnres("card", trained, "--evaluation", "out") == 1
    assert "an evaluation of another `trained`: its files have changed" in " ".join(capsys.readouterr().err.split())
    # a row that is skipped shows in the exit code
    assert run_attnres(*arguments[:3], "-o", "out2", "--suite", "core", "--data-root", quick[0] / "Rowan") == 3
    assert "HumanEval: it runs generated code; `--allow-code-execution` allows that" in capsys.readouterr().out


@pytest.fixture(scope="module")
def encoder_decoders(tmp_path_factory):
    """A T5 and its conversion."""
    folder = tmp_path_factory.mktemp("encoder_decoders")
    tokenizer = train_tokenizer([read_sample()] * 3, vocab_size=400)
    shape = {
        "d_model": 32,
        "d_ff": 64,
        "d_kv": 8,
        "num_heads": 4,
        "num_layers": 3,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = T5Config(
        vocab_size=len(tokenizer), decoder_start_token_id=0, eos_token_id=tokenizer.eos_token_id, **shape
    )
    set_seed(0)
    AutoModelForSeq2SeqLM.from_config(config).save_pretrained(folder / "t5")
    tokenizer.save_pretrained(folder / "t5")
    convert_checkpoint(folder / "t5", folder / "t5-attnres", num_blocks=2)
    return [str(folder / "t5"), str(folder / "t5-attnres")]


def samples_of(output):
    """By model, the answers to all requests of an evaluation."""
    found = {}
    for path in sorted((output / "models").glob("*/*.jsonl")):
        found.setdefault(path.parent.name.rsplit("-", 1)[0], []).extend(
            json.loads(line)["resps"] for line in path.open()
        )
    return found


@pytest.mark.slow
def test_encoder_decoders(encoder_decoders, quick, tmp_path):
    """Both are asked as lm-eval asks a T5, and answer the same."""
    results = evaluate(encoder_decoders, tmp_path / "out", suite="quick", data_root=quick[0], device="cpu")
    assert len(results["rows"]) == 2 and not results["skipped"]
    of_t5, of_attnres = samples_of(tmp_path / "out").values()
    assert len(of_t5) == 34
    likelihoods = [
        np.array([float(answer[0][0]) for answers in of for answer in answers]) for of in (of_t5, of_attnres)
    ]
    np.testing.assert_allclose(*likelihoods, rtol=1e-5)
    lm = HFLM(pretrained=encoder_decoders[0], device="cpu")
    context, ending = "The dog", " barks"
    request = Instance("loglikelihood", {}, (context, ending), 0)
    ids = [lm.tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids for text in (context, ending)]
    with torch.no_grad():
        logits = lm.model(input_ids=ids[0], labels=ids[1]).logits.log_softmax(-1)
    assert lm.loglikelihood([request])[0][0] == pytest.approx(logits.gather(-1, ids[1][..., None]).sum().item(), 1e-5)
    with pytest.raises(ValueError, match="is an encoder-decoder, which vLLM does not run: use `--backend hf`"):
        evaluate(encoder_decoders, tmp_path / "vllm", suite="quick", options=EvalOptions(backend="vllm"))
    assert not (tmp_path / "vllm").exists()


def test_lm_evals_own_choice(encoder_decoders, checkpoints):
    """It takes a type that it finds among encoder-decoders for one of them, and most of ours are decoders."""
    assert HFLM(pretrained=str(checkpoints / "trained"), device="cpu").backend == "causal"
    with pytest.raises(ValueError, match="It is an encoder-decoder, and this is for decoders"):
        HFLM(pretrained=encoder_decoders[1], device="cpu")
    lms = [HFLM(pretrained=path, device="cpu", backend="seq2seq") for path in encoder_decoders]
    of_t5, of_attnres = (
        lm.loglikelihood([Instance("loglikelihood", {}, ("The dog", " barks"), 0)])[0][0] for lm in lms
    )
    assert of_attnres == pytest.approx(of_t5, 1e-5)


@pytest.mark.parametrize(
    "backend, limit, answers, expected",
    [
        ("causal", 7, [[0, 5, 2, 4, 6, 7, 2], [0, 5, 2, 4, 6, 7, 8]], [False, True]),
        ("seq2seq", 4, [[0, 5, 2, 1], [0, 5, 6, 7]], [False, True]),
    ],
)
def test_where_an_answer_begins(backend, limit, answers, expected, monkeypatch):
    """A decoder repeats its prompt, of four tokens here, and one behind an encoder has a first token of its own."""
    limits = []
    monkeypatch.setattr(
        HFLM,
        "_model_generate",
        lambda self, context, max_length, stop: limits.append(max_length) or torch.tensor(answers),
    )
    lm = TransformersLM.__new__(TransformersLM)
    lm.backend, lm.cut_off, lm.tok_decode = backend, collections.deque(), lambda ids, **kwargs: str(ids)
    lm._model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=2))
    lm._model_generate(torch.zeros(2, 4), max_length=4 + 3, stop=[])
    assert limits == [limit] and list(lm.cut_off) == expected


@pytest.mark.slow
def test_encoder_decoders_write(encoder_decoders, paper, tmp_path):
    """Answers of the decoder alone, no longer than the limit, and the same in a batch with longer prompts."""
    options = EvalOptions(max_gen_toks=8, limit=2)
    results = evaluate(
        encoder_decoders, tmp_path / "out", tasks=["gsm8k_cot"], options=options, data_root=paper[0], device="cpu"
    )
    assert not results["skipped"]
    of_t5, of_attnres = samples_of(tmp_path / "out").values()
    assert of_t5 == of_attnres and len(of_t5) == 2
    prompts = ("The dog", "A much longer prompt than the first one, with more words", "z")
    requests = [
        Instance("generate_until", {}, (prompt, {"until": ["\0"], "max_gen_toks": 5}), i)
        for i, prompt in enumerate(prompts)
    ]
    for batch_size in (1, 3):
        lm = load_model(EvalModel(encoder_decoders[1]), options, "cpu", batch_size)
        expected = []
        for prompt in prompts:
            ids = lm.tokenizer(prompt, return_tensors="pt").input_ids
            expected.append(lm.model.generate(ids, max_new_tokens=5, do_sample=False)[0])
        assert lm.generate_until(requests) == [lm.tokenizer.decode(of, skip_special_tokens=True) for of in expected]
        assert sum(lm.cut_off) == sum(len(of) == 6 and lm.tokenizer.eos_token_id not in of for of in expected)


def test_what_would_be_random_is_not_evaluated(encoder_decoders, checkpoints, tmp_path):
    """Checkpoints without some of their tensors, which transformers fills with random numbers."""
    tensors = load_file(Path(encoder_decoders[0], "model.safetensors"))
    shutil.copytree(encoder_decoders[0], tmp_path / "half")
    save_file(
        {name: tensor for name, tensor in tensors.items() if not name.startswith("decoder.block.2")},
        tmp_path / "half/model.safetensors",
        metadata={"format": "pt"},
    )
    shutil.copytree(checkpoints / "base", tmp_path / "headless")
    config = AutoConfig.from_pretrained(tmp_path / "headless", tie_word_embeddings=False)
    AutoModel.from_config(config).save_pretrained(tmp_path / "headless")
    for name, missing in (
        ("half", r"13 of its tensors \(decoder.block.2"),
        ("headless", r"1 of its tensors \(lm_head"),
    ):
        with pytest.raises(ValueError, match=f"{missing}.*, which would be random"):
            load_model(EvalModel(str(tmp_path / name)), EvalOptions(), "cpu", 1)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"d_ff": 128}, "does not load"),
        ({"is_encoder_decoder": "yes"}, "expected bool, got str"),
        ({"is_encoder_decoder": None}, "does not load"),
        ({"is_encoder_decoder": False}, "It is an encoder-decoder, and this is for decoders"),
        ({"base_model_type": "modernbert"}, "does not load"),
        ({"base_model_type": "whisper"}, "does not load"),
        ({"attn_res_sublayers": [[2, 2, 2], [2, 2, 2]]}, "does not load"),
        ({"attn_res_block_size": 0}, "does not load"),
        ({"num_decoder_layers": 4}, "does not load"),
        ({"vocab_size": 10**9}, "does not load"),
    ],
    ids=str,
)
def test_broken_encoder_decoders(encoder_decoders, changed, message, tmp_path):
    shutil.copytree(encoder_decoders[1], tmp_path / "broken")
    path = tmp_path / "broken/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(ValueError, match=message):
        load_model(EvalModel(str(tmp_path / "broken")), EvalOptions(), "cpu", 1)


DIES = """
import os, signal, sys
from lm_eval.models.huggingface import HFLM
from attnres.cli import main

calls, limit, call = [], int(sys.argv.pop(1)), HFLM._model_call

def call_or_die(*args, **kwargs):
    calls.append(None)
    if len(calls) > limit:
        os.kill(os.getpid(), signal.SIGKILL)
    return call(*args, **kwargs)

HFLM._model_call = call_or_die
main()
"""


def killed_after(num_calls, command):
    """SIGKILL after so many calls of a model, however fast the machine is: the command is one of `attnres`."""
    dying = [sys.executable, "-c", DIES, str(num_calls), *map(str, command)]
    result = subprocess.run(dying, capture_output=True, text=True)
    assert result.returncode == -signal.SIGKILL, result.stderr


@pytest.mark.slow
def test_killed(checkpoints, paper, tmp_path):
    """SIGKILL after the first benchmark is done; the rerun ends as an uninterrupted run does."""
    models = [checkpoints / "base", checkpoints / "trained"]
    arguments = ["eval", *models, "--suite", "quick", "--data-root", paper[0], "--device", "cpu", "-o"]
    command = [sys.executable, "-m", "attnres", *map(str, arguments)]
    subprocess.run([*command, str(tmp_path / "whole")], check=True, capture_output=True)
    killed_after(60, [*arguments, tmp_path / "out"])  # the first benchmark has up to 20 requests, the second one 120
    done = {path: path.stat().st_mtime_ns for path in tmp_path.glob("out/models/*/*.json")}
    assert done and not (tmp_path / "out/results.json").exists()
    subprocess.run([*command, str(tmp_path / "out")], check=True, capture_output=True)
    assert all(path.stat().st_mtime_ns == before for path, before in done.items())
    assert rows_without_runs(tmp_path / "out") == rows_without_runs(tmp_path / "whole")
    assert (tmp_path / "out/table.md").read_bytes() == (tmp_path / "whole/table.md").read_bytes()


def rows_without_runs(folder):
    """The rows of a `results.json` but for the commands, which name the folder."""
    rows = json.loads((folder / "results.json").read_text())["rows"]
    assert all(row.pop("runs") for row in rows)
    return rows


@pytest.mark.slow
def test_adapters_templates_and_batches(checkpoints, paper, tmp_path):
    """What goes through to lm-eval's wrapper of transformers models."""
    base = tmp_path / "base"
    shutil.copytree(checkpoints / "base", base)
    (base / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    model = AutoModelForCausalLM.from_pretrained(base)
    config = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", init_lora_weights=False)
    get_peft_model(model, config).save_pretrained(tmp_path / "adapter")

    def run(output, *models, **kwargs):
        return evaluate(list(models), tmp_path / output, suite="quick", data_root=paper[0], device="cpu", **kwargs)

    def samples(pattern, key):
        return [json.loads(line)[key] for path in sorted(tmp_path.glob(pattern)) for line in path.open()]

    results = run("plain", str(base), EvalModel(str(base), peft=str(tmp_path / "adapter")))
    assert [model["name"] for model in results["models"]] == ["base", "base+adapter"]
    plain = samples("plain/models/base-*/*.jsonl", "resps")
    assert len(plain) == 34 and plain != samples("plain/models/base+adapter-*/*.jsonl", "resps")
    for output, batch_size in (("batched", 8), ("automatic", "auto")):
        run(output, str(base), batch_size=batch_size)
        assert samples(f"{output}/models/base-*/*.jsonl", "score") == samples("plain/models/base-*/*.jsonl", "score")
    run("chat", str(base), options=EvalOptions(apply_chat_template=True))
    hashes = [set(samples(f"{name}/models/base-*/*.jsonl", "prompt_hash")) for name in ("plain", "chat")]
    assert not hashes[0] & hashes[1]


@pytest.mark.slow
def test_killed_inside_a_benchmark(checkpoints, paper, tmp_path):
    """SIGKILL among the requests: those that were answered are not asked again."""
    arguments = ["eval", checkpoints / "trained", "--tasks", "hellaswag", "--data-root", paper[0], "-o"]
    command = [sys.executable, "-m", "attnres", *arguments]
    killed_after(25, [*arguments, tmp_path / "killed"])
    assert not (tmp_path / "killed/results.json").exists()
    asked = {}
    for name in ("killed", "whole"):
        result = subprocess.run([*map(str, command), str(tmp_path / name)], capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        asked[name] = int(re.findall(r"Running loglikelihood requests: 100%.* (\d+)/\1 ", result.stderr)[-1])
    assert asked["whole"] == 120 and asked["killed"] <= 100  # 25 calls, of which some may have been trials
    assert rows_without_runs(tmp_path / "killed") == rows_without_runs(tmp_path / "whole")
    assert (tmp_path / "killed/table.md").read_bytes() == (tmp_path / "whole/table.md").read_bytes()
    assert not list((tmp_path / "killed").rglob("*.answers"))


@pytest.mark.slow
def test_interrupted_by_the_user(checkpoints, paper, tmp_path):
    """SIGINT among the requests of a real process: no traceback, nothing half-written, nothing asked again."""
    arguments = ["--tasks", "hellaswag", "--data-root", paper[0], "--device", "cpu", "-o", tmp_path / "out"]
    command = [sys.executable, "-m", "attnres", "eval", checkpoints / "trained", *arguments]
    process = subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    answered = 0
    while answered < 20:
        assert process.poll() is None
        time.sleep(0.001)
        for path in (tmp_path / "out").glob("models/*/.*.answers"):
            answered = path.read_bytes().count(b"\n")
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=300)[1]
    assert process.returncode == 130 and "Traceback" not in errors
    names = {path.name for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert all(name == ".lock" or name.endswith(".answers") for name in names) and len(names) == 2
    asked = {}

    def run(name):
        def make_model(*args):
            lm = load_model(*args)
            answer = lm.loglikelihood
            lm.loglikelihood = lambda requests: asked.update({name: len(requests)}) or answer(requests)
            return lm

        return evaluate(
            [str(checkpoints / "trained")],
            tmp_path / name,
            tasks=["hellaswag"],
            data_root=paper[0],
            device="cpu",
            make_model=make_model,
        )

    (row,), (whole,) = run("out")["rows"], run("whole")["rows"]
    assert asked["whole"] == 120 and asked["out"] <= 101  # one line of the file is not an answer
    first, second = row.pop("runs")[0]
    assert "--tasks hellaswag" in first["command"] and second["command"] is None
    whole.pop("runs")
    assert row == whole


@pytest.mark.slow
def test_what_produced_a_row(checkpoints, paper, tmp_path, capsys, run_attnres):
    """Fingerprint, versions, options, command, settings of generation, raw responses, and what was cut off."""
    base = tmp_path / "base"
    shutil.copytree(checkpoints / "base", base)
    arguments = ["eval", base, "--tasks", "gsm8k_cot", "--limit", 2, "--data-root", paper[0], "--device", "cpu"]
    assert run_attnres(*arguments, "--max-gen-toks", 8, "--seed", 3, "-o", tmp_path / "out") == 0
    printed = " ".join(capsys.readouterr().out.split())
    results = json.loads((tmp_path / "out/results.json").read_text())
    identity, (row,) = results["models"][0]["identity"], results["rows"]
    assert identity["model"] == {"fingerprint": checkpoint_fingerprint(base)} and identity["peft"] is None
    assert identity["versions"]["lm_eval"] == lm_eval.__version__ and identity["versions"]["attnres"]
    assert identity["options"]["seed"] == 3 and identity["options"]["limit"] == 2
    settings = row["generation"]["gsm8k_cot"]
    assert settings["max_gen_toks"] == 8 and settings["do_sample"] is False and "Q:" in settings["until"]
    assert row["num_fewshot"] == {"gsm8k_cot": 8} and row["task_versions"]["gsm8k_cot"]
    ((run,),) = row["runs"]
    assert run["command"].startswith("attnres eval ") and "--max-gen-toks 8" in run["command"]
    assert (run["device"], run["dtype"], run["batch_size"]) == ("cpu", "float32", 1) and run["python"]
    assert run["chat_template_sha256"] is None
    # random weights do not come to an end
    warning = "gsm8k_cot: answers were cut off at 8 tokens, 2 of base (of 2 each); `--max-gen-toks` allows longer ones"
    assert row["cut_off"] == [2] and warning in printed and warning in (tmp_path / "out/table.md").read_text()
    samples = [json.loads(line) for path in tmp_path.glob("out/models/*/*.jsonl") for line in path.open()]
    assert (
        all(sample["cut_off"] and isinstance(sample["resps"][0][0], str) for sample in samples) and len(samples) == 2
    )
    assert len(samples[0]["filtered_resps"]) == 1 and samples[0]["target"]
    # without the answers the scores are the same
    assert run_attnres(*arguments, "--max-gen-toks", 8, "--seed", 3, "-o", tmp_path / "bare", "--no-samples") == 0
    bare = [json.loads(line) for path in tmp_path.glob("bare/models/*/*.jsonl") for line in path.open()]
    assert [sample.keys() & {"resps", "filtered_resps", "target"} for sample in bare] == [set(), set()]
    assert [sample["score"] for sample in bare] == [sample["score"] for sample in samples]
    # an answer that ends by itself is not cut off, even at its last token
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(400))}))
    assert run_attnres(*arguments, "--max-gen-toks", 1, "-o", tmp_path / "ends") == 0
    assert json.loads((tmp_path / "ends/results.json").read_text())["rows"][0]["cut_off"] == [0]
    # and one that cannot fit is not begun
    assert run_attnres(*arguments, "--max-gen-toks", 10**6, "-o", tmp_path / "large") == 3
    printed = " ".join(capsys.readouterr().out.split())
    assert "Skipped gsm8k_cot: its answers may have 1000000 tokens, and a model takes" in printed


MOVING = """
import sys
import torch
from huggingface_hub import HfApi
from safetensors.torch import load_file
from attnres.eval.harness import EvalModel, EvalOptions, load_model

folders = {"model": sys.argv[1:3], "adapter": sys.argv[3:5]}
api, commits = HfApi(), {}
for name, (first, _) in folders.items():
    api.create_repo(f"tester/{name}")
    commits[name] = api.upload_folder(repo_id=f"tester/{name}", folder_path=first).oid
model = EvalModel("tester/model", peft="tester/adapter").resolved()
for name, (_, second) in folders.items():  # the branches move on
    api.upload_folder(repo_id=f"tester/{name}", folder_path=second)
assert model.fingerprint() == {kind: {"id": f"tester/{name}", "commit": commits[name]}
    for kind, name in (("model", "model"), ("peft", "adapter"))}
assert EvalModel("tester/model").resolved().revision != commits["model"]
loaded = load_model(model, EvalOptions(), "cpu", 1).model.state_dict()
for weights in (load_file(f"{sys.argv[1]}/model.safetensors"), load_file(f"{sys.argv[3]}/adapter_model.safetensors")):
    for name, value in weights.items():
        ours = [other for other in loaded if other.replace(".default", "").replace(".base_layer", "").endswith(name)]
        assert any(torch.equal(loaded[other], value) for other in ours), (name, ours)
for wrong, kwargs in (("tester/nowhere", {}), ("tester/model", {"peft": "tester/model"})):
    try:
        EvalModel(wrong, **kwargs).resolved()
    except OSError as error:
        print(error)
"""


@pytest.mark.slow
def test_what_is_recorded_of_the_hub_is_what_is_loaded(checkpoints, tmp_path):
    """Though the branches of model and adapter move between that and the loading."""
    for i in range(2):
        model = tiny_base_model("llama", vocab_size=400, seed=i)
        model.save_pretrained(tmp_path / f"model{i}")
        config = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", init_lora_weights=False)
        get_peft_model(model, config).save_pretrained(tmp_path / f"adapter{i}")
        for path in checkpoints.glob("base/tokenizer*"):
            shutil.copy(path, tmp_path / f"model{i}")
    folders = [tmp_path / f"{kind}{i}" for kind in ("model", "adapter") for i in range(2)]
    with LoopbackHub(tmp_path / "hub") as hub:
        command = [sys.executable, "-c", MOVING, *map(str, folders)]
        result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **hub.env()})
    assert result.returncode == 0, result.stderr
    assert "There is no folder and no Hub repository `tester/nowhere`" in result.stdout
    assert "`tester/model` holds no adapter_config.json" in result.stdout


@pytest.mark.slow
def test_two_processes(checkpoints, paper, tmp_path):
    """As `accelerate launch` and torchrun start them, on a CPU: the same scores as in one."""
    arguments = [
        checkpoints / "base",
        checkpoints / "trained",
        "--tasks",
        "arc_challenge,hellaswag",  # with no examples: those are drawn in each process
        "--limit",
        "7",
        "--data-root",
        paper[0],
        "--device",
        "cpu",
    ]
    launchers = {
        "one": [sys.executable, "-m"],
        "two": [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone", "-m"],
    }
    for name, launcher in launchers.items():
        command = [*launcher, "attnres", "eval", *map(str, arguments), "-o", str(tmp_path / name)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr[-3000:]
        assert ("| 28/28 [" in result.stderr) == (name == "one")  # requests of 7 documents, and of the half of them
    one, two = (rows_without_runs(tmp_path / name) for name in launchers)
    assert one == two and one[1]["num_documents"] == 7


def test_prefetch_without_internet(checkpoints, tmp_path, monkeypatch, capsys, run_attnres):
    """It tells what is missing and why, and which command would mend it."""
    monkeypatch.chdir(tmp_path)
    assert run_attnres("eval", checkpoints / "base", "--suite", "quick", "--prefetch") == 3
    printed = " ".join(capsys.readouterr().out.split())
    assert "Downloaded:" in printed and "Skipped HellaSwag: " in printed and "What to do: " in printed


@pytest.mark.parametrize(
    "error, way_out",
    [
        ("DatasetNotFoundError: Dataset 'x' is a gated dataset on the Hub.", "accept its terms on the Hub"),
        (
            "RuntimeError: Dataset scripts are no longer supported, but found x.py",
            "as Parquet into a folder of its name",
        ),
        ("ConnectionError: Couldn't reach 'x' on the Hub", "fetch it where there is internet"),
        ("ValueError: something else", "look at the data set"),
    ],
)
def test_reasons(error, way_out):
    kind, text = error.split(": ", 1)

    class Manager:
        def load(self, names):
            raise type(kind, (Exception,), {})(text)

    with pytest.raises(Unavailable, match=f"{way_out}"):
        load_tasks(load_suite("quick")[0], Manager())


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["eval", "./nowhere", "--suite", "quick"], "There is no folder `./nowhere`"),
        (["eval", "model"], "There is nothing to evaluate on: give a suite or tasks"),
        (
            ["eval", "model", "--suite", "best"],
            "`suite='best'` is neither one of paper, core, chat, quick, offline nor a file",
        ),
        (["eval", "model", "--tasks", "arc_chalenge"], "`arc_chalenge` is not a task of lm-eval"),
        (["eval", "model", "--suite", "quick", "--device", "cuda:99"], "`device='cuda:99'` is not available"),
        (["eval", "model", "--suite", "quick", "--device", "abacus"], "`device='abacus'` is not available"),
        (["eval", "model", "--suite", "quick", "--dtype", "fp23"], "`dtype='fp23'` is not a dtype of torch"),
        (["eval", "model", "--suite", "quick", "--data-root", "nowhere"], "There is no folder `nowhere`"),
        (["eval", "model", "--suite", "quick", "--backend", "x"], "`backend='x'` should be hf or vllm"),
        (["eval", "model", "--suite", "bad.yaml"], "is not a benchmark: it needs name, tasks (a list) and metric"),
        (["eval", "model", "--suite", "odd.yaml"], "unexpected keyword argument 'shots'"),
        (["report", "nowhere"], "There is no folder `nowhere`"),
        (["report", "model"], "`model` holds no results.json; `attnres eval` writes one"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input(arguments, message, tmp_path, monkeypatch, capsys, run_attnres):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "bad.yaml").write_text("- mmlu\n")
    (tmp_path / "odd.yaml").write_text("- {name: x, tasks: [mmlu], metric: acc, shots: 5}\n")
    before = sorted(os.listdir())
    assert run_attnres(*arguments) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert message in error and "Traceback" not in error
    assert sorted(os.listdir()) == before


# --- statistics


def test_comparison_by_hand():
    first = {"a": np.array([1, 1, 0, 0, 1.0]), "b": np.array([0, 0, 1.0])}
    second = {"a": np.array([1, 0, 1, 1, 1.0]), "b": np.array([1, 1, 1.0])}
    result = compare(first, second)
    assert result.difference == pytest.approx(3 / 8) and result.test == "McNemar, exact"
    assert result.p_value == pytest.approx(2 * (1 + 5) / 2**5)  # 4 of 5 to one side
    assert score(first)[0] == 0.5
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    with pytest.raises(ValueError, match="not paired"):
        compare(first, {"a": first["a"]})


def test_perplexities_become_scores():
    """The inverse, by document: lm-eval gives the log-likelihood and the number of bytes."""
    hashes = dict.fromkeys(("doc_hash", "prompt_hash", "target_hash"), "")
    sample = {"doc_id": 0, "target": "x", "resps": [], "filtered_resps": [], "byte_perplexity": (-20.0, 10), **hashes}
    assert sample_record("task", sample, "byte_perplexity", None)["score"] == pytest.approx(np.exp(-2))


def test_empty_answers_are_told():
    """Those of which nothing but blanks is there; nothing is said of rows in which answers are chosen."""
    hashes = dict.fromkeys(("doc_hash", "prompt_hash", "target_hash"), "")
    texts = ("", " \n\t", "a", " b")
    samples = [{"doc_id": 0, "target": "x", "resps": [[t]], "filtered_resps": [t], "m": 0.0, **hashes} for t in texts]
    assert [sample_record("task", sample, "m", False)["empty"] for sample in samples] == [True, True, False, False]
    chosen = {**samples[0], "resps": [[(-1.0, True)], [(-2.0, False)]]}
    assert sample_record("task", chosen, "m", None)["empty"] is None
    row = {"benchmark": {"name": "T"}, "num_documents": 4, "cut_off": [0, 0], "empty": [2, 0], "generation": {}}
    results = {"models": [{"name": "a"}, {"name": "b"}], "rows": [row, {**row, "empty": [None, None]}]}
    assert answer_warnings(results) == [
        "T: answers are empty, 2 of a (of 4 each); a chat model may need `--apply-chat-template`"
    ]


def test_tests_that_cannot_be_run_are_told():
    row = {"benchmark": {"name": "T"}, "num_documents": 4, "cut_off": [0, 0], "empty": [0, 0], "generation": {}}
    reasons = {f"Reason {i}.": 5 - i for i in range(4)}
    results = {"models": [{"name": "a"}, {"name": "b"}], "rows": [row, {**row, "unusable": [{}, reasons]}]}
    assert answer_warnings(results) == [
        "T: tests could not be run for 14 programs of b, which count as wrong: Reason 0. Reason 1. Reason 2. ..."
    ]


def test_scores_that_are_not_zero_or_one():
    a = np.linspace(0.1, 0.5, 12)
    assert compare({"x": a}, {"x": a}).p_value == 1
    better = compare({"x": a}, {"x": a + 0.1})
    assert better.test == "paired permutation" and better.p_value == pytest.approx(2 / 2**12, abs=1e-3)


def test_interval_covers():
    """In 95 of 100 experiments, with strata of unequal size and difficulty."""
    generator = np.random.default_rng(0)
    probabilities, sizes = [(0.1, 0.05), (0.3, 0.1), (0.05, 0.2)], [40, 80, 120]
    truth = sum(size * (up - down) for size, (up, down) in zip(sizes, probabilities)) / sum(sizes)
    covered = 0
    for i in range(300):
        strata = [
            generator.choice([1.0, -1.0, 0.0], size=size, p=[up, down, 1 - up - down])
            for size, (up, down) in zip(sizes, probabilities)
        ]
        low, high = bootstrap_interval(strata, seed=i, resamples=500)
        covered += low <= truth <= high
    assert 0.92 <= covered / 300 <= 0.98  # 95 %, and two standard errors of 300 experiments
