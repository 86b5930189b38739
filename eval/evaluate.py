# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""An evaluation from its arguments to its report: everything is checked, run or taken from before, and compared."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from lm_eval.tasks import TaskManager

from ..checkpoints.fingerprint import folder_fingerprint
from ..utils.devices import check_device, default_device, is_dtype, is_first_process
from ..utils.keywords import with_keywords_of
from .benchmarks import (
    Benchmark,
    Unavailable,
    benchmarks_of_tasks,
    load_suite,
    load_tasks,
    task_manager,
    with_code_execution_marked,
)
from .harness import EvalSettings, run, versions
from .models import EvalModel, EvalOptions, check_chat_template, has_encoder
from .report import keep_what_is_not_ours, summarize, write
from .sandbox import available
from .saved import ModelResults, output_folder


@with_keywords_of(EvalSettings)
def evaluate(
    models: list[str | EvalModel],
    output: str | Path,
    *,
    suite: str | Path | None = None,
    tasks: list[str] | None = None,
    options: EvalOptions | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Evaluate models on a suite or on tasks of lm-eval, and compare all of them with the first one.

    Every finished benchmark is saved at once, and a later call with the same output folder resumes after it.

    Args:
        models: folders or Hub ids.
        output: folder for samples, `results.json`, `table.md` and the plots.
        suite: `paper`, `core`, `chat`, `quick`, `offline` or a YAML file with rows like theirs.
        tasks: names of tasks of lm-eval, in place of a suite or in addition to it.
        options: what scores depend on, besides the models.
        settings: the fields of [`EvalSettings`], such as `device` and `batch_size`.

    Returns:
        The content of `results.json`.

    Raises:
        ValueError, OSError: if something does not exist or contradicts itself, before any model is loaded.
        TypeError: for an unknown setting.
    """
    run_with = EvalSettings(**settings)
    models, options = described_models(models), options or EvalOptions()
    if suite is not None:
        load_suite(suite)  # to report its mistakes before lm-eval's thousands of files are read
    manager = task_manager(None if run_with.include_path is None else Path(run_with.include_path).absolute())
    benchmarks = benchmarks_to_run(suite, tasks, manager)
    run_with = replace(run_with, device=run_with.device or default_device())
    check_options(options, run_with)
    if run_with.allow_code_execution and any(benchmark.runs_code for benchmark in benchmarks):
        available()
    models = [model.resolved() for model in models]
    check_models(models, options, benchmarks)
    options = with_digests(options, run_with)
    with output_folder(output) as output:
        if is_first_process():
            keep_what_is_not_ours(output)
        saved = [ModelResults(output, model, options, versions()) for model in models]
        with evaluation_environment(run_with.data_root, run_with.allow_code_execution):
            finished, skipped = run(saved, benchmarks, manager, options, run_with)
        results = summarize(saved, benchmarks, finished, skipped, options)
        if is_first_process():
            write(results, output)
    return results


def described_models(models: list[str | EvalModel]) -> list[EvalModel]:
    if not models:
        raise ValueError("There is no model to evaluate.")
    return [EvalModel(model) if isinstance(model, str) else model for model in models]


def named_benchmarks(suite: str | Path | None, tasks: list[str] | None, manager: TaskManager) -> list[Benchmark]:
    """Those of a suite and of tasks by name; errors as for `load_suite` and `benchmarks_of_tasks`."""
    return (load_suite(suite) if suite is not None else []) + benchmarks_of_tasks(tasks or [], manager)


def benchmarks_to_run(suite: str | Path | None, tasks: list[str] | None, manager: TaskManager) -> list[Benchmark]:
    """The same, marked where they run generated code.

    Raises:
        ValueError: if there is none, or one is there twice.
    """
    benchmarks = named_benchmarks(suite, tasks, manager)
    if not benchmarks:
        raise ValueError("There is nothing to evaluate on: give a suite or tasks.")
    names = [benchmark.name for benchmark in benchmarks]
    if len(set(names)) < len(names):
        raise ValueError(f"`{next(name for name in names if names.count(name) > 1)}` is named twice.")
    return [with_code_execution_marked(benchmark, manager) for benchmark in benchmarks]


def check_options(options: EvalOptions, settings: EvalSettings):
    """Raise a `ValueError` for a folder, backend, dtype or device that does not exist."""
    if settings.data_root is not None and not Path(settings.data_root).is_dir():
        raise ValueError(f"`data_root={str(settings.data_root)!r}` is no folder.")
    if options.backend not in ("hf", "vllm"):
        raise ValueError(f"`backend={options.backend!r}` should be hf or vllm.")
    if options.dtype != "auto" and not is_dtype(options.dtype):
        raise ValueError(
            f"`dtype={options.dtype!r}` is not a dtype of torch. Use auto, float32, bfloat16 or another one."
        )
    check_device(str(settings.device), "is not available")


def check_models(models: list[EvalModel], options: EvalOptions, benchmarks: list[Benchmark]):
    """Raise a `ValueError` if vLLM is to run an encoder-decoder, or a prompt is to be a conversation, and a model has
    no chat template.
    """
    for model in models:
        if options.backend == "vllm" and has_encoder(model):
            raise ValueError(f"`{model.path}` is an encoder-decoder, which vLLM does not run: use `--backend hf`.")
    if options.apply_chat_template or any(benchmark.apply_chat_template for benchmark in benchmarks):
        for model in models:
            check_chat_template(model)


def with_digests(options: EvalOptions, settings: EvalSettings) -> EvalOptions:
    """The options with what else decides scores: the bytes of the folders, and the number of processes."""
    return replace(
        options,
        data_digest=None if settings.data_root is None else folder_fingerprint(settings.data_root),
        tasks_digest=None if settings.include_path is None else folder_fingerprint(settings.include_path),
        processes=int(os.environ.get("WORLD_SIZE", "1")),
    )


def prefetch(
    models: list[str], *, suite: str | Path | None = None, tasks: list[str] | None = None
) -> tuple[list[str], dict[str, str]]:
    """Download models and the data of benchmarks into their caches, for a machine without internet.

    Returns:
        Names of what is there now, and the reasons why other benchmarks are not.
    """
    manager = task_manager(None)
    benchmarks = named_benchmarks(suite, tasks, manager)
    there, skipped = [], {}
    for model in models:
        if not Path(model).is_dir():
            snapshot_download(model)
        there.append(model)
    with evaluation_environment(None, allow_code_execution=True):
        for benchmark in benchmarks:
            try:
                load_tasks(benchmark, manager)
                there.append(benchmark.name)
            except Unavailable as error:
                skipped[benchmark.name] = str(error)
    return there, skipped


@contextlib.contextmanager
def evaluation_environment(data_root: str | Path | None, allow_code_execution: bool) -> Iterator[None]:
    """A working directory in which data sets are found in `data_root`, and the metric of generated code is ours.

    `load_dataset("a/b")` takes a folder `a/b` of the working directory first, and so does `evaluate.load`. `datasets`
    caches what it reads from a folder by its base name, so another root could give its rows: the cache is a new one.
    """
    if data_root is None and not allow_code_execution:
        yield
        return
    import datasets

    previous, cache = Path.cwd(), datasets.config.HF_DATASETS_CACHE
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for path in Path(data_root).absolute().iterdir() if data_root is not None else ():
            Path(folder, path.name).symlink_to(path)
        if allow_code_execution:
            code_eval = resources.files(__package__).joinpath("sandbox/code_eval")
            Path(folder, "code_eval").symlink_to(Path(str(code_eval)))
        os.chdir(folder)
        if data_root is not None:
            datasets.config.HF_DATASETS_CACHE = str(Path(folder, ".cache"))
        try:
            yield
        finally:
            datasets.config.HF_DATASETS_CACHE = cache
            os.chdir(previous)
