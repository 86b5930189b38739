# SPDX-License-Identifier: Apache-2.0
"""Programs out of what a chat model answers, for tasks whose answer is a program.

lm-eval's tasks expect the text of a program and nothing else, and its `..._instruct` tasks one that ends with the
first fence. In a conversation models write sentences, fences, the whole function again, or its body without the
indentation. As in lm-eval's instruct tasks, the first program of an answer counts.
"""

import ast
import functools
import itertools
import json
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.filters import build_filter_ensemble

from .sandbox.inside.names import bound_names, names_under_test


FENCE = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
FUTURE = re.compile(r"^from __future__ import .*\n?", re.MULTILINE)
DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
CONSTANTS = (ast.Assign, ast.AnnAssign)
RESULTS = (ast.Return, ast.Yield, ast.YieldFrom, ast.Raise)


class NotForChat(ValueError):
    """A task that cannot be answered in a conversation."""


def take_programs_from_chat(task: Any):
    """Let a task find the program in an answer, and let an answer go on to its end.

    The tasks of lm-eval and ours are meant. One that brings a filter of its own is left as it is, because its author
    knows what the answers look like.

    Raises:
        NotForChat: if an answer in a conversation cannot be what the task asks for.
    """
    if not getattr(task, "UNSAFE_CODE", False) or not _has_known_filter(task):
        return
    fields = set(getattr(task, "features", None) or ())
    if "suffix" in fields:
        raise NotForChat(
            f"`{task.config.task}` asks for the text between two parts of a program, and a chat model answers with a"
            " whole one; evaluate it without `--apply-chat-template`"
        )
    if {"prompt", "entry_point"} <= fields:
        find = _humaneval_program
    elif "test_list" in fields:
        find = _mbpp_program
    elif task.config.task.startswith("cruxeval"):
        find = functools.partial(_cruxeval_assertion, predicts_input="input" in task.config.task)
    else:
        return
    inside_fence = (task.config.gen_prefix or "").count("```") % 2 == 1
    programs = functools.partial(_programs, find=find, inside_fence=inside_fence)
    task._filters = [
        build_filter_ensemble(ensemble.name, [("custom", {"filter_fn": programs})]) for ensemble in task._filters
    ]
    # What ends a program that is continued (`\ndef`) would end a whole one, or one in a fence, before it begins
    settings = task.config.generation_kwargs
    until = [stop for stop in settings.get("until") or [] if not stop.startswith("\n")]
    task.set_config("generation_kwargs", {**settings, "until": until})


def _has_known_filter(task: Any) -> bool:
    """Whether answers are read as lm-eval or we do it, and not by somebody's own filter."""
    folders = (Path(lm_eval.__file__).parent, Path(__file__).parent)
    for ensemble in task._filters:
        for step in ensemble.filters:
            function = step.keywords.get("filter_fn")
            path = Path(function.__code__.co_filename) if hasattr(function, "__code__") else None
            if function is None and step.func.__name__ != "TakeFirstFilter":
                return False
            if path is not None and not any(path.is_relative_to(folder) for folder in folders):
                return False
    return True


def _programs(answers: list[list[str]], docs: list[dict], find: Callable, inside_fence: bool) -> list[list[str]]:
    """lm-eval's filter: for each document the programs in its answers."""
    return [
        [find(doc, without_thoughts(answer), inside_fence) for answer in of_doc] for of_doc, doc in zip(answers, docs)
    ]


def without_thoughts(answer: str) -> str:
    """An answer without the reasoning before it, and with line ends of one kind."""
    return answer.rpartition("</think>")[2].replace("\r\n", "\n")


# --- programs


def _humaneval_program(doc: dict, answer: str, inside_fence: bool) -> str:
    """The prompt, with the first answer to it that is one: the whole function, or its body.

    The prompt comes first in any case, because tests take their helpers from there.
    """
    prompt, name = doc["prompt"].rstrip() + "\n", doc["entry_point"]
    before, fenced = _fenced(answer, inside_fence)

    def candidates() -> Iterator[str | None]:
        yield from (_with_definitions([code], {name}, prompt) for code in _unfenced(before))
        yield _with_body(prompt, name, before)
        yield from (_with_definitions(blocks, {name}, prompt) for blocks in fenced)
        yield from (_with_body(prompt, name, code) for blocks in fenced for code in blocks)

    return next(filter(None, candidates()), prompt + before)


def _mbpp_program(doc: dict, answer: str, inside_fence: bool) -> str:
    """The first program of an answer that defines what the tests use."""
    try:
        names = names_under_test("\n".join(doc["test_list"]))
    except (SyntaxError, ValueError):
        names = set()  # tests that cannot be run: the sandbox says so
    before, fenced = _fenced(answer, inside_fence)
    candidates = itertools.chain(
        (_with_definitions([code], names) for code in _unfenced(before)),
        (_with_definitions(blocks, names) for blocks in fenced),
    )
    return next(filter(None, candidates), before)


def _fenced(answer: str, inside_fence: bool) -> tuple[str, list[list[str]]]:
    """The text of an answer up to its first fence, and the contents of its fences.

    Where the prompt has opened a fence (`inside_fence`), the first one of the answer may end it or be a new one: then
    there are two ways to read the rest.
    """
    ways = [answer, "```\n" + answer] if inside_fence else [answer]
    blocks = [[code.rstrip() for code in FENCE.findall(text) if code.strip()] for text in ways]
    return answer.split("```")[0].strip("\n"), blocks


def _unfenced(text: str) -> Iterator[str]:
    """Parts of a text that are programs, from a line that begins like one to the last line before other text."""
    position = 0
    for start in re.finditer(r"^(?:from |import |def |async def |class |@)", text, re.MULTILINE):
        if start.start() >= position and (code := _longest_program(text[start.start() :])):
            yield code
            position = start.start() + len(code)


def _longest_program(text: str, least: int = 0) -> str | None:
    """A text up to where it ceases to be Python, which is at a line that is not indented; at least so many lines."""
    lines = text.split("\n")
    end = len(lines)
    while end > least:
        code = "\n".join(lines[:end])
        error = _error(code)
        if error is None:
            return code
        end = min(end - 1, (error.lineno or end) - 1 if isinstance(error, SyntaxError) else 0)
        while end > least and not lines[end][:1].strip():
            end -= 1
    return None


def _with_definitions(blocks: list[str], names: set[str], prompt: str = "") -> str | None:
    """A program of the first block that defines one of these names, and of the definitions in the other ones.

    `None` if no block does.
    """
    codes = [textwrap.dedent(code) for code in blocks]
    bodies = [_parsed(code) for code in codes]
    bound = [{name for line in body for name in bound_names(line)} for body in bodies]
    main = next((number for number, found in enumerate(bound) if found & names), None)
    if main is None:
        return None
    chosen, known = [], set(bound[main])
    for number, (code, body) in enumerate(zip(codes, bodies)):
        # An example of its use, or another way to do it, is not a part of the program
        parts = DEFINITIONS + CONSTANTS if number < main else DEFINITIONS
        is_helper = body and all(isinstance(line, parts) for line in body) and not bound[number] & known
        if number == main or is_helper:
            chosen.append(code)
            known |= bound[number]
    program = "\n\n".join(chosen)
    return "".join(FUTURE.findall(program)) + prompt + "\n" * bool(prompt) + FUTURE.sub("", program) + "\n"


def _with_body(prompt: str, name: str, code: str) -> str | None:
    """The prompt and the body of its function, if that is what this is; some or all of its indentation may be gone."""
    code = code.strip("\n")
    unindented = _longest_program(textwrap.dedent(code)) or ""
    for body in (code, textwrap.indent(unindented, "    "), "    " + code.lstrip()):
        program = _longest_program(prompt + body, prompt.count("\n")) if body[:1].isspace() else None
        for line in _parsed(program or ""):
            is_function = isinstance(line, ast.FunctionDef | ast.AsyncFunctionDef) and line.name == name
            if is_function and any(isinstance(part, RESULTS) for part in ast.walk(line)):
                return f"{program}\n"
    return None


def _error(code: str) -> Exception | None:
    """Why a text is not Python. Nothing is run."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a model's `"\d"` is nobody's business
            ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return error
    return None


def _parsed(code: str) -> list[ast.stmt]:
    """The statements of a text; none if it is not Python."""
    return [] if _error(code) else ast.parse(code).body


# --- assertions


def _cruxeval_assertion(doc: dict, answer: str, inside_fence: bool, predicts_input: bool) -> str:
    """What a model predicts, as `cruxeval.judge` takes it: the assertion with the asked part taken from the answer."""
    if "[ANSWER]" in answer:
        answer = answer.rpartition("[ANSWER]")[2].partition("[/ANSWER]")[0]
    predicted = _prediction(answer, predicts_input)
    asked = (predicted, doc["output"]) if predicts_input else (doc["input"], predicted)
    question = {name: doc[name] for name in ("code", "input", "output")}
    return json.dumps({**question, "assertion": "assert f({}) == {}".format(*asked)})


def _prediction(answer: str, predicts_input: bool) -> str:
    """The arguments or the value of the last assertion of an answer, or else the answer itself or what it fences."""
    for start in reversed([match.start() for match in re.finditer(r"\bassert f\(", answer)]):
        statement = re.split(r"`|\nassert ", answer[start:])[0]
        for text in (_longest_program(statement), statement.split("\n")[0].rstrip(". ")):
            match _parsed(text or ""):
                case [ast.Assert(ast.Compare(ast.Call(ast.Name("f")) as call, [ast.Eq()], [value]))]:
                    asked = ast.get_source_segment(text, call if predicts_input else value) or ""
                    return asked.removeprefix("f(").removesuffix(")") if predicts_input else f"({asked})"
    fenced = FENCE.findall(answer) or re.findall(r"`([^`\n]+)`", answer)
    text = (fenced[0] if fenced else answer).strip()
    return text.removeprefix("f(").removesuffix(")") if predicts_input and text.startswith("f(") else text
