# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Suites of benchmarks, and their tasks in lm-eval: found, loaded with their data, and set up for a run."""

import functools
import logging
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from ..utils.untrusted import parse_yaml
from .code_answers import NotForChat, take_programs_from_chat
from .models import EvalOptions
from .sandbox.cruxeval import put_into_sandbox


# It says of tasks that read their data with a function how that could be given arguments
logging.getLogger("lm_eval.api.task").addFilter(lambda record: "Custom kwargs can be passed" not in record.msg)
SUITES = ("paper", "core", "chat", "quick", "offline")


@dataclass(frozen=True)
class Benchmark:
    """One row of a suite: tasks of lm-eval, and which of their figures is the score.

    `paper` holds the figures of the paper's PreNorm and AttnRes models, in percent; `filter` is lm-eval's name for a
    way to read an answer out of a response. `max_gen_toks` limits the length of an answer in tokens, in place of the
    task's own limit. `apply_chat_template` makes a conversation of the prompt, with each example a turn. `license` is
    that of the data.
    """

    name: str
    tasks: tuple[str, ...]
    metric: str
    filter: str = "none"
    num_fewshot: int | None = None
    max_gen_toks: int | None = None
    apply_chat_template: bool = False
    runs_code: bool = False
    paper: tuple[float, float] | None = None
    license: str | None = None


def load_suite(name: str | Path) -> list[Benchmark]:
    """A suite by its name, or from a YAML file.

    Raises:
        ValueError: if there is none, or a row is not one.
    """
    path = resources.files(__package__).joinpath(f"suites/{name}.yaml") if str(name) in SUITES else Path(name)
    if not path.is_file():
        raise ValueError(f"`suite={str(name)!r}` is neither one of {', '.join(SUITES)} nor a file.")
    rows = parse_yaml(path.read_text(encoding="utf-8"), f"`{name}`")
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"`{name}` is not a list of benchmarks.")
    return [_benchmark(row, str(name)) for row in rows]


def _benchmark(row: Any, source: str) -> Benchmark:
    if not isinstance(row, dict) or not isinstance(row.get("tasks"), list):
        raise ValueError(f"`{row}` in `{source}` is not a benchmark: it needs name, tasks (a list) and metric.")
    paper = row.get("paper")
    try:
        return Benchmark(**{**row, "tasks": tuple(row["tasks"]), "paper": None if paper is None else tuple(paper)})
    except TypeError as error:
        raise ValueError(f"`{row}` in `{source}` is not a benchmark: {error}.") from None


@functools.lru_cache  # reading the index of all tasks takes seconds
def task_manager(include_path: str | Path | None) -> TaskManager:
    """lm-eval's tasks and ours, and those of a folder."""
    own = str(resources.files(__package__).joinpath("tasks"))
    return TaskManager(include_path=[own] if include_path is None else [own, str(include_path)])


def benchmarks_of_tasks(names: list[str], manager: TaskManager) -> list[Benchmark]:
    """Rows for any tasks of lm-eval: their first metric, with their own number of examples.

    Raises:
        ValueError: for a task that does not exist.
    """
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        raise ValueError(f"`{unknown[0]}` is not a task of lm-eval; `lm-eval ls tasks` lists them.")
    return [Benchmark(name=name, tasks=(name,), metric="", filter="") for name in names]


def with_code_execution_marked(benchmark: Benchmark, manager: TaskManager) -> Benchmark:
    """The benchmark, with `runs_code` if one of its tasks says so of itself (`unsafe_code`)."""
    return replace(
        benchmark, runs_code=benchmark.runs_code or any(_runs_code(name, manager) for name in benchmark.tasks)
    )


def _runs_code(name: str, manager: TaskManager) -> bool:
    entry = manager.task_index.get(name)
    if entry is None:
        return False
    # From the files: with its functions, a task that runs code would do so at once
    config = load_yaml(entry.yaml_path, resolve_func=False) if entry.yaml_path else entry.cfg or {}
    members = list(entry.tags) if entry.kind.name == "TAG" else []
    for member in config["task"] if isinstance(config.get("task"), list) else ():
        if isinstance(member, dict) and member.get("unsafe_code"):
            return True
        members.append(member.get("task", member.get("group")) if isinstance(member, dict) else member)
    return bool(config.get("unsafe_code")) or any(
        _runs_code(member, manager) for member in members if isinstance(member, str) and member != name
    )


def in_sandbox(task: Any) -> bool:
    """Whether a task that runs generated code has it run by our metric and by nothing else."""
    functions = [*task._metric_fn_list.values(), task.config.process_results]
    functions = [getattr(function, "__self__", function) for function in functions]  # lm-eval keeps their `__call__`
    return any(
        getattr(value, "sandboxed", False)
        for function in functions
        for value in getattr(function, "__globals__", {}).values()
    )


class Unavailable(Exception):
    """A benchmark whose data cannot be had, and what to do about it."""


def load_tasks(benchmark: Benchmark, manager: TaskManager, in_chat: bool = False) -> list:
    """The leaf tasks of a benchmark with their data, and where prompts are turns of a conversation, ready for that.

    Raises:
        Unavailable: if a data set is gated, missing, made by a script or out of reach, or if a task cannot be run so.
    """
    try:
        tasks = list(manager.load(list(benchmark.tasks))["tasks"].values())
    except Exception as error:  # what data sets raise is of many kinds, and none may stop the other benchmarks
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        kind = type(error).__name__
        if isinstance(error, ModuleNotFoundError):
            # Errors that tasks raise themselves name the command, and those of an import name the module
            needed = f"it needs {error.name}: `pip install {error.name}`"
            raise Unavailable(" ".join(str(error).split()) if error.name is None else needed) from error
        if "gated" in text:
            advice = "accept its terms on the Hub, then `hf auth login`"
        elif "script" in text:
            advice = "put its data as Parquet into a folder of its name and pass `--data-root`"
        elif kind in ("ConnectionError", "OfflineModeIsEnabled", "LocalEntryNotFoundError", "ConnectError"):
            advice = "fetch it where there is internet, or pass `--data-root`"
        else:
            advice = "look at the data set, or pass `--data-root`"
        raise Unavailable(f"{text} What to do: {advice}.") from error
    for task in tasks:
        if task.config.task.startswith("cruxeval"):
            put_into_sandbox(task)
        if getattr(task, "UNSAFE_CODE", False) and not in_sandbox(task):
            raise Unavailable(f"`{task.config.task}` runs generated code itself, outside of the sandbox.")
        if in_chat:
            try:
                take_programs_from_chat(task)
            except NotForChat as error:
                raise Unavailable(str(error)) from None
    return tasks


def prepare_tasks(benchmark: Benchmark, tasks: list, options: EvalOptions):
    """Set what a benchmark and the options ask for, and the examples to the same for every model."""
    max_gen_toks = options.max_gen_toks or benchmark.max_gen_toks
    for task in tasks:
        if max_gen_toks is not None and task.OUTPUT_TYPE == "generate_until":
            # A new dictionary, because tasks may share one
            task.set_config("generation_kwargs", {**task.config.generation_kwargs, "max_gen_toks": max_gen_toks})
        # As `simple_evaluate` does, which also collects facts about the machine, half a second each time
        if benchmark.num_fewshot is not None and task.get_config("num_fewshot") != 0:
            task.set_config(key="num_fewshot", value=benchmark.num_fewshot)
        elif task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=options.seed)
