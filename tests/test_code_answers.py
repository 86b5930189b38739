# SPDX-License-Identifier: Apache-2.0
"""Answers of chat models whose answer is a program: right ones count in every form, and wrong ones in none."""

import json
import re
import sys
import time
from pathlib import Path

import lm_eval
import pytest
from benchmark_data import SCHEMAS, Answerer, tasks_without_data, write_data_root
from lm_eval.tasks import TaskManager

import attnres.eval
from attnres.eval import EvalOptions, evaluate
from attnres.eval.benchmarks import Benchmark, Unavailable, load_tasks
from attnres.eval.code_answers import take_programs_from_chat
from attnres.eval.evaluate import evaluation_environment
from attnres.eval.sandbox.cruxeval import program_and_tests


PROMPT = '''from typing import List


def scale(x):
    return 2 * x


def total(numbers: List[int], start: int = 0) -> int:
    """Twice the sum of numbers.

    >>> total([1, 2])
    6
    """
'''
BODY = """    result = start
    for number in numbers:
        result += {expression}
    return result"""
HELPED = """import math

def doubled(number):
    return scale_of(number)

def scale_of(number):
    return {expression}

def total(numbers: list[int], start: int = 0) -> int:
    # math.fsum is not for integers
    return start + sum(doubled(number) for number in numbers)"""
WHOLE = "def total(numbers, start=0):\n" + BODY
TESTS = "assert total([1, 2]) == 6\nassert total([]) == 0\nassert total([5], 1) == 11"
EXPRESSION = {"right": "2 * number", "wrong": "3 * number"}


def dedented(text):
    return re.sub("^    ", "", text, flags=re.MULTILINE)


# What a chat model may write where a function is asked for
WHOLES = {
    "whole function": WHOLE,
    "whole function, then an explanation": WHOLE + "\n\nThis adds twice every number. It takes O(n).",
    "an introduction, then the whole function": "Sure! Here is the function:\n\n" + WHOLE,
    "fenced function": f"```python\n{WHOLE}\n```",
    "fenced function of no language": f"```\n{WHOLE}\n```",
    "fence that ends with the last line": f"```py\n{WHOLE}```",
    "fence that does not end": f"```python\n{WHOLE}",
    "text, fence, text": f"Sure! Here's the function:\n\n```python\n{WHOLE}\n```\n\nIt adds up:\n- numbers\n- twice",
    "fence in a list": "1. Write it:\n\n   ```python\n"
    + WHOLE.replace("def", "   def", 1).replace("\n", "\n   ")
    + "\n   ```",
    "Windows' line ends": f"```python\r\n{WHOLE}\r\n```\r\n".replace("\n", "\r\n").replace("\r\r", "\r"),
    "imports, helpers and the function": f"```python\n{HELPED}\n```",
    "imports, helpers and the function, not fenced": HELPED,
    "function, then an example of its use": (
        f"```python\n{WHOLE}\n```\nExample:\n```python\nprint(total([1, 2]))\nassert total([1]) == 5\n```\n"
        "It prints:\n```\n6\n```"
    ),
    "example of its use, then the function": (
        f"```\n>>> total([1, 2])\n```\n```bash\npip install x\n```\n```python\n{WHOLE}\n```"
    ),
    "a fence for each part": (
        "First:\n```python\nimport math\nFACTOR = 1\n```\nThen a helper:\n```python\n" + "def scale_of(number):\n"
        "    return {expression} * FACTOR\n```\nThe function:\n```python\ndef total(numbers, start=0):\n"
        "    return start + sum(map(other, numbers))\n```\nand at last:\n```python\ndef other(number):\n"
        "    return scale_of(number)\n```"
    ),
    "two ways to do it": (
        f"```python\n{WHOLE}\n```\nOr shorter:\n```python\ndef total(numbers, start=0):\n    return nothing\n```"
    ),
    "import of the future": f"```python\nfrom __future__ import annotations\n\n{WHOLE}\n```",
    "program with a main block": f"```python\n{WHOLE}\n\nif __name__ == '__main__':\n    print(total(input()))\n```",
    "thoughts before it": f"<think>\n```python\ndef total(x): return 0\n```\n</think>\n\n```python\n{WHOLE}\n```",
    "one line": "```python\ndef total(numbers, start=0): return start + sum({expression} for number in numbers)\n```",
    "lambda": "```python\ntotal = lambda numbers, start=0: start + sum({expression} for number in numbers)\n```",
}
BODIES = {
    "continuation": "\n" + BODY,
    "continuation, then an explanation": BODY + "\n\nThis adds up.",
    "continuation without its first blanks": BODY.strip(),
    "continuation that is not indented": dedented(BODY),
    "fenced body": f"```python\n{BODY}\n```",
    "fenced body without its first blanks": f"```python\n{BODY.strip()}\n```",
    "fenced body that is not indented": f"Here is the body:\n```python\n{dedented(BODY)}\n```\nDone.",
    "body of one-line statements that is not indented": (
        "if not numbers: return start\nreturn start + sum({expression} for number in numbers)"
    ),
    "body, then the end of a fence": BODY + "\n```",
    "body, end of a fence, explanation": BODY + "\n```\nThis adds up:\n```python\nprint(total([1]))\n```",
    "body, then a fence": BODY + "\n\nFor example:\n\n```python\nprint(total([1, 2]))\n```",
    "body with a helper": (
        "    return start + sum(map(other, numbers))\n\n\ndef other(number):\n    return {expression}\n"
    ),
}
FUNCTIONS = {**WHOLES, **BODIES}
VALUES = {
    "continuation": "\n[ANSWER]\nassert f('q', b=2) == {expression}\n[/ANSWER]",
    "assertion": "assert f('q', b=2) == {expression}",
    "fenced": "```python\nassert f('q', b=2) == {expression}\n```",
    "fenced answer": "[ANSWER]\n```python\nassert f('q', b=2) == {expression}\n```\n[/ANSWER]",
    "text, fence, text": "Sure, it is:\n```python\nassert f('q', b=2) == {expression}\n```\nbecause `f` joins them.",
    "several fences": (
        "The function is\n```python\ndef f(a, b=1):\n    return a + '==' + str(b)\nassert f('q', b=2) == ??\n```\nso\n"
        "```python\nassert f('q', b=2) == {expression}\n```"
    ),
    "within a line": "The answer is `assert f('q', b=2) == {expression}`.",
    "sentence": "The answer is assert f('q', b=2) == {expression}.",
    "over several lines": "assert f('q', b=2) == (\n    {expression}\n    # as a text\n)",
    "value": "{expression}",
    "fenced value": "The value is\n```\n{expression}\n```",
    "value within a line": "It returns `{expression}`.",
}
VALUE = {"right": "'q==2'", "wrong": "'q==3'"}
ARGUMENTS = {
    name: form.replace("f('q', b=2) == {expression}", "f({expression}) == 'q==2'") for name, form in VALUES.items()
} | {"over several lines": "assert f(\n    {expression},  # a text\n) == 'q==2'"}
ARGUMENT = {"right": "'q', 2", "wrong": "'q', 3"}


def human_eval(i, config):
    tests = "\n".join(f"    {line.replace('total', 'candidate')}" for line in TESTS.split("\n"))
    row = {
        "task_id": f"made/{i}",
        "prompt": PROMPT,
        "entry_point": "total",
        "test": f"def check(candidate):\n{tests}\n",
    }
    return {**row, "canonical_solution": BODY.format(expression=EXPRESSION["right"])}


def mbpp(i, config):
    row = {"task_id": i, "text": "Write it.", "prompt": "Write it.", "test_list": TESTS.split("\n")}
    return {**row, "code": WHOLE.format(expression=EXPRESSION["right"])}


def cruxeval(i, config):
    code = "def f(a, b=1):\n    return a + '==' + str(b)"
    return {"code": code, "input": "'q', b=2", "output": "'q==2'", "id": str(i)}


ROWS = {"functions": human_eval, "programs": mbpp, "values": cruxeval, "arguments": cruxeval}
DATA = {
    "openai/openai_humaneval": human_eval,
    "evalplus/humanevalplus": human_eval,
    "google-research-datasets/mbpp": mbpp,
    "evalplus/mbppplus": mbpp,
    "cruxeval-org/cruxeval": cruxeval,
    "loubnabnl/humaneval_infilling": lambda i, config: {**human_eval(i, config), "suffix": "\n"},
}
TASKS = {
    **dict.fromkeys(("humaneval", "humaneval_plus", "humaneval_instruct", "humaneval_64_instruct"), "functions"),
    "attnres_offline_humaneval": "functions",
    **dict.fromkeys(("mbpp", "mbpp_plus", "mbpp_instruct", "mbpp_plus_instruct"), "programs"),
    **dict.fromkeys(("cruxeval_output", "cruxeval_output_cot"), "values"),
    **dict.fromkeys(("cruxeval_input", "cruxeval_input_cot"), "arguments"),
}
SIX = {
    *("continuation", "whole function", "fenced function", "fenced body", "text, fence, text"),
    "imports, helpers and the function",
}
FORMS = {
    "functions": (FUNCTIONS, EXPRESSION),
    "programs": (WHOLES, EXPRESSION),
    "values": (VALUES, VALUE),
    "arguments": (ARGUMENTS, ARGUMENT),
}


@pytest.fixture(scope="module")
def manager():
    """lm-eval's tasks whose answers are programs, and ours: the index of all others takes seconds."""
    folders = [Path(lm_eval.__file__).parent / "tasks" / name for name in ("humaneval", "mbpp", "cruxeval")]
    folders += [folders[0].with_name("humaneval_infilling"), Path(attnres.eval.__file__).parent / "tasks"]
    return TaskManager(include_path=[*map(str, folders)], include_defaults=False)


@pytest.fixture(scope="module")
def tasks(manager):
    """Loads tasks on made-up data."""
    with pytest.MonkeyPatch.context() as patched, evaluation_environment(None, allow_code_execution=True):
        for name, row in DATA.items():
            patched.setitem(SCHEMAS, name, row)
        yield lambda names, count=1: tasks_without_data(manager, names, count, patched)


@pytest.fixture(scope="module")
def chat_tasks(tasks):
    """All of them, as they are where prompts are turns of a conversation."""
    loaded = tasks([*TASKS])
    for task in loaded.values():
        take_programs_from_chat(task)
    return loaded


def programs_in(task, answers, doc):
    (programs,) = task._filters[0].filters[0]().apply([answers], [doc])
    return programs


def passes(task, doc, program):
    """Here, in this interpreter: the programs are those above."""
    try:
        tests = task.doc_to_target(doc)
        if task.config.task.startswith("cruxeval"):
            program, tests = program_and_tests(**json.loads(program))
        exec(compile(f"{program}\n{tests}", "<program>", "exec", dont_inherit=True), {"__name__": "program"})
    except (Exception, MemoryError):
        return False
    return True


@pytest.mark.parametrize("name", TASKS)
def test_forms(chat_tasks, name):
    forms, expressions = FORMS[TASKS[name]]
    doc = ROWS[TASKS[name]](0, None)
    for kind, expression in expressions.items():
        answers = [form.replace("{expression}", expression) for form in forms.values()]
        programs = programs_in(chat_tasks[name], answers, doc)
        passed = {form for form, program in zip(forms, programs) if passes(chat_tasks[name], doc, program)}
        assert passed == (set(forms) if kind == "right" else set()), kind


class Speaker(Answerer):
    """Answers each document in another form, and ends where it is told to; the last answer is wrong."""

    def generate_until(self, requests):
        answers = []
        for request in requests:
            forms, expressions = FORMS[TASKS[request.task_name]]
            six = [form for name, form in forms.items() if name in SIX]  # or four, where the prompt has no function
            form = six[request.doc_id % len(six)]
            answer = form.replace("{expression}", expressions["right" if request.doc_id < 6 else "wrong"])
            for stop in request.args[1]["until"]:
                answer = answer.split(stop)[0]
            answers.append(answer)
        return answers


def test_scores(tasks, manager, tmp_path, monkeypatch):
    """Through prompts, stop sequences, filters, metrics and the sandbox."""
    names = ["humaneval", "mbpp"]
    loaded = [*tasks(names, 7).values()]
    write_data_root(tmp_path / "data", loaded, 7)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.setattr(sys.modules[evaluate.__module__], "task_manager", lambda include_path: manager)
    monkeypatch.setattr(sys.modules[evaluate.__module__], "check_chat_template", lambda model: None)
    arguments = {"tasks": names, "data_root": tmp_path / "data", "allow_code_execution": True}
    arguments |= {"make_model": lambda *_: Speaker(loaded), "options": EvalOptions(apply_chat_template=True)}
    results = evaluate([str(model)], tmp_path / "out", **arguments)
    assert not results["skipped"]
    assert [row["scores"][0][0] for row in results["rows"]] == pytest.approx([6 / 7] * 2)
    assert [row["generation"][row["benchmark"]["name"]]["until"] for row in results["rows"]] == [[], ["[DONE]"]]


def test_without_a_conversation_nothing_changes(tasks):
    """Answers are continued prompts, byte for byte."""
    loaded = tasks(["humaneval", "humaneval_instruct", "mbpp", "attnres_offline_humaneval"])
    answers = [form for forms, _ in FORMS.values() for form in forms.values()]
    doc = human_eval(0, None)
    assert programs_in(loaded["humaneval"], answers, doc) == [PROMPT + answer for answer in answers]
    expected = [PROMPT.rstrip() + answer for answer in answers]
    assert programs_in(loaded["attnres_offline_humaneval"], answers, doc) == expected
    assert programs_in(loaded["humaneval_instruct"], answers, doc) == [PROMPT + a.split("```")[0] for a in answers]
    assert programs_in(loaded["mbpp"], answers, doc) == answers[0]
    until = ["\nclass", "\ndef", "\n#", "\nif", "\nprint"]
    for name in ("humaneval", "humaneval_instruct", "attnres_offline_humaneval"):
        assert loaded[name].config.generation_kwargs["until"] == until


def test_what_cannot_be_answered_in_a_conversation(tasks, manager, monkeypatch):
    """Is refused before anything is asked."""
    (task,) = tasks(["humaneval_single_line_infilling"]).values()
    monkeypatch.setattr(manager, "load", lambda names: {"tasks": dict.fromkeys(names, task)})
    benchmark = Benchmark("Infilling", ("humaneval_single_line_infilling",), "")
    assert load_tasks(benchmark, manager) == [task]
    with pytest.raises(Unavailable, match="evaluate it without `--apply-chat-template`"):
        load_tasks(benchmark, manager, in_chat=True)


def test_filters_of_ones_own(tasks):
    """Are their author's, who knows what answers look like."""
    (task,) = tasks(["humaneval"]).values()
    step = task._filters[0].filters[0]
    step.keywords["filter_fn"] = lambda answers, docs: answers
    before = dict(task.config.generation_kwargs)
    take_programs_from_chat(task)
    assert task._filters[0].filters == [step] and task.config.generation_kwargs == before


@pytest.mark.parametrize(
    "answer",
    [
        *("", "```", "```\n```", "\0", "def total(", "(" * 5000, "-" * 50_000 + "1", "x = 'a'\n" + "\n" * 5000),
        *("import math\n" * 1000 + "(", "def f(x):\n" * 500, "```\n" * 5000, 'class A:\n  x = """' * 500),
        *("assert f(" + "-" * 2000 + "1) == " + "-" * 2000 + "1", "assert f(" * 500),
        *("[ANSWER]" * 2000, "\ud800", "total = total = total", "    return (\n" * 1000),
    ],
    ids=lambda answer: f"{len(answer)} {answer[:8]!r}",
)
def test_answers_that_are_no_programs(chat_tasks, answer):
    """Are wrong, and that is soon known."""
    started = time.monotonic()
    for name in ("humaneval_instruct", "mbpp", "cruxeval_input", "cruxeval_output"):
        doc = ROWS[TASKS[name]](0, None)
        (program,) = programs_in(chat_tasks[name], [answer], doc)
        assert not passes(chat_tasks[name], doc, program)
    assert time.monotonic() - started < 30
