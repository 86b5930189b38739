# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Running benchmarks of lm-eval on models, one at a time, with every finished one saved at once."""

import collections
import gc
import hashlib
import math
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import lm_eval
from accelerate import PartialState
from huggingface_hub.utils import tqdm
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM, hash_args
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from transformers import set_seed

from ..utils.devices import hardware
from .benchmarks import Benchmark, Unavailable, load_tasks, prepare_tasks
from .models import EvalModel, EvalOptions, load_model
from .sandbox import UNUSABLE
from .saved import CachedLM, Finished, ModelResults


VERSIONS = ("attnres", "lm_eval", "transformers", "torch", "datasets", "tokenizers")


@dataclass(frozen=True)
class EvalSettings:
    """How an evaluation is run: keywords of [`evaluate`].

    Attributes:
        device: by default a GPU if there is one.
        batch_size: a number, or `auto`.
        data_root: a folder with data sets in folders named like the Hub's; relative to it they are looked up first.
        include_path: a folder with further tasks of lm-eval.
        allow_code_execution: run benchmarks that execute generated code.
        keep_samples: keep what the models answered, not only the scores.
        command: what to record as the command of this run.
        make_model: what gives lm-eval a model, with the arguments of `load_model`.
    """

    device: str | None = None
    batch_size: int | str = 1
    data_root: str | Path | None = None
    include_path: str | Path | None = None
    allow_code_execution: bool = False
    keep_samples: bool = True
    command: str | None = None
    make_model: Callable[[EvalModel, EvalOptions, str, int | str], LM] = load_model


def versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in VERSIONS}


def in_chat(benchmark: Benchmark, options: EvalOptions) -> bool:
    """Whether prompts are turns of a conversation."""
    return options.apply_chat_template or benchmark.apply_chat_template


def check_room(tasks: list, lm: LM):
    """Raise `Unavailable` if a model takes fewer tokens than an answer may have."""
    longest = max((settings["max_gen_toks"] for settings in generation_settings(tasks, lm).values()), default=0)
    if longest >= getattr(lm, "max_length", math.inf):
        raise Unavailable(
            f"its answers may have {longest} tokens, and a model takes {lm.max_length} with the prompt;"
            " `--max-gen-toks` allows fewer"
        )


def generation_settings(tasks: list, lm: LM) -> dict[str, dict[str, Any]]:
    """How answers are written, by task: the limit of their length, where they stop, and how tokens are chosen."""
    default = getattr(lm, "max_gen_toks", 256)
    written = [task for task in tasks if task.OUTPUT_TYPE == "generate_until"]
    return {task.config.task: normalize_gen_kwargs(task.config.generation_kwargs, default) for task in written}


def run_benchmark(benchmark: Benchmark, tasks: list, lm: CachedLM, options: EvalOptions) -> Finished | None:
    """Evaluate one model on one benchmark. `None` in all processes but the first.

    Raises:
        ValueError: if the tasks do not give the metric.
    """
    set_seed(options.seed)
    UNUSABLE.clear()
    chat = in_chat(benchmark, options)
    results = lm_eval.evaluate(
        lm=lm,
        task_dict={"tasks": {task.config.task: task for task in tasks}, "groups": {}},
        limit=options.limit,
        bootstrap_iters=0,  # the errors come from the samples
        apply_chat_template=chat,
        fewshot_as_multiturn=chat,
        confirm_run_unsafe_code=benchmark.runs_code,
    )
    cut_off, unusable = cut_off_answers(tasks, lm), unusable_tests(lm)
    if results is None:
        return None
    metric, filter_name = benchmark.metric, benchmark.filter
    samples = []
    for task_name, task_samples in results["samples"].items():
        if not metric:  # a task that was asked for by its name
            metric, filter_name = task_samples[0]["metrics"][0], task_samples[0]["filter"]
        chosen = [sample for sample in task_samples if sample["filter"] == filter_name]
        if not chosen or metric not in chosen[0]:
            have = sorted({(name, sample["filter"]) for sample in task_samples for name in sample["metrics"]})
            raise ValueError(f"`{task_name}` gives no `{metric}` with filter `{filter_name}`; it gives {have}.")
        for sample in sorted(chosen, key=lambda sample: sample["doc_id"]):
            samples.append(sample_record(task_name, sample, metric, cut_off.get((task_name, sample["doc_id"]))))
    return Finished(
        samples=samples,
        metric=metric,
        filter=filter_name,
        num_fewshot=dict(results["n-shot"]),
        task_versions=dict(results["versions"]),
        generation=generation_settings(tasks, lm),
        runs=lm.dbdict.runs,
        unusable=unusable,
    )


def unusable_tests(lm: CachedLM) -> dict[str, int]:
    """Why tests of generated programs could not be run, and with how many programs, of all processes."""
    counts = UNUSABLE
    if lm.world_size > 1:
        counts = sum(lm.gather_object(counts, dst=0) or [], start=collections.Counter())
    return dict(counts.most_common())


def cut_off_answers(tasks: list, lm: CachedLM) -> dict[tuple[str, int], bool]:
    """Of written answers, by task and document, whether they ended only because of the limit of their length.

    Models of transformers tell; for others the tokens of the answer are counted, if there is a tokenizer.
    """
    found = {}
    for task in tasks:
        for instance in task.instances:
            if instance.request_type == "generate_until" and (known := _is_cut_off(instance, lm)) is not None:
                found[task.config.task, instance.doc_id] = known
    if lm.world_size > 1:
        found = {key: value for part in lm.gather_object(found, dst=0) or [] for key, value in part.items()}
    return found


def _is_cut_off(instance: Instance, lm: CachedLM) -> bool | None:
    known = lm.dbdict.cut_off.get(hash_args("generate_until", instance.args))
    if known is not None or not hasattr(lm.lm, "tok_encode"):
        return known
    limit = normalize_gen_kwargs(instance.args[1], lm.max_gen_toks)["max_gen_toks"]
    return any(len(lm.tok_encode(response)) >= limit for response in instance.resps)


def sample_record(task: str, sample: dict[str, Any], metric: str, cut_off: bool | None) -> dict[str, Any]:
    """What is kept of an answered document: a score, hashes that pair it with other models', and its texts."""
    score, units = sample[metric], None
    if isinstance(score, (tuple, list)):
        # A perplexity: log-likelihood of the document, and its words or bytes. Its inverse is a score like the others
        log_likelihood, units = score
        score = math.exp(log_likelihood / units)
    written = [answer for answers in sample["resps"] for answer in answers if isinstance(answer, str)]
    return {
        "task": task,
        "doc_id": sample["doc_id"],
        "doc_hash": sample["doc_hash"],
        "prompt_hash": sample["prompt_hash"],
        "target_hash": sample["target_hash"],
        "target": str(sample["target"]),
        "resps": sample["resps"],
        "filtered_resps": sample["filtered_resps"],
        "cut_off": cut_off,
        "empty": None if not written else not any(answer.strip() for answer in written),
        "score": float(score),
        "units": units,
    }


def without_texts(sample: dict[str, Any]) -> dict[str, Any]:
    """What scores are computed and paired from."""
    return {name: value for name, value in sample.items() if name not in ("target", "resps", "filtered_resps")}


def check_pairing(first: Finished, second: Finished, benchmark: Benchmark):
    """Raise a `ValueError` unless both models were asked the same."""
    keys = ("task", "doc_id", "doc_hash", "target_hash")
    for a, b in zip(first.samples, second.samples):
        if any(a[key] != b[key] for key in keys):
            raise ValueError(
                f"{benchmark.name} is not the same for both models: document {a['doc_id']} of `{a['task']}` differs."
                " Delete the output folder and run both again."
            )
    if len(first.samples) != len(second.samples):
        raise ValueError(
            f"{benchmark.name} has {len(first.samples)} documents for one model and {len(second.samples)} for another."
        )


def run(
    results: list[ModelResults],
    benchmarks: list[Benchmark],
    manager: TaskManager,
    options: EvalOptions,
    settings: EvalSettings,
) -> tuple[dict[str, list[Finished]], dict[str, str]]:
    """Evaluate models on benchmarks, but for what is finished already.

    Every task is loaded once, for all models; one model is in memory at a time.

    Returns:
        What every benchmark gave for the models, by its name, and the reasons why others were skipped.
    """
    # Settled before anything is written: with several processes all have to do the same
    missing = [[benchmark for benchmark in benchmarks if result.load(benchmark) is None] for result in results]
    skipped = {
        benchmark.name: "it runs generated code; `--allow-code-execution` allows that"
        for todo in missing
        for benchmark in todo
        if benchmark.runs_code and not settings.allow_code_execution
    }
    device = str(settings.device)
    wait_for_everyone(device)
    loaded: dict[str, list] = {}
    with tqdm(total=sum(map(len, missing)), unit="benchmark", desc="Evaluating") as progress:
        for result, todo in zip(results, missing):
            lm = None
            for benchmark in todo:
                progress.set_postfix_str(f"{result.model.name}: {benchmark.name}")
                if benchmark.name not in loaded and benchmark.name not in skipped:
                    try:
                        loaded[benchmark.name] = load_tasks(benchmark, manager, in_chat(benchmark, options))
                    except Unavailable as error:
                        skipped[benchmark.name] = str(error)
                if benchmark.name not in skipped:
                    if lm is None:
                        if result is not results[0]:
                            gc.collect()  # the one before, which refers to itself
                        lm = settings.make_model(result.model, options, device, settings.batch_size)
                        result.check_unchanged()
                    try:
                        run_and_save(benchmark, loaded[benchmark.name], lm, result, options, settings)
                    except Unavailable as error:
                        skipped[benchmark.name] = str(error)
                progress.update()
    wait_for_everyone(device)
    return dict(_collect(results, benchmarks, skipped)), skipped


def run_and_save(
    benchmark: Benchmark,
    tasks: list,
    lm: LM,
    result: ModelResults,
    options: EvalOptions,
    settings: EvalSettings,
):
    """One model on one benchmark, up to its files."""
    facts = facts_of(lm, benchmark, options, settings)
    prepare_tasks(benchmark, tasks, options)
    check_room(tasks, lm)
    with result.resumable(benchmark, lm, facts) as cached:
        finished = run_benchmark(benchmark, tasks, cached, options)
        if finished is None:
            return
        if not settings.keep_samples:
            finished = replace(finished, samples=[without_texts(sample) for sample in finished.samples])
        result.save(benchmark, finished)


def facts_of(lm: LM, benchmark: Benchmark, options: EvalOptions, settings: EvalSettings) -> dict[str, Any]:
    """What a report says of a run besides its options: command, hardware, dtype and so on."""
    template = None
    if in_chat(benchmark, options):
        template = hashlib.sha256((lm.chat_template(True) or "").encode()).hexdigest()
    return {
        "command": settings.command,
        "device": settings.device,
        "hardware": hardware(str(settings.device)),
        "dtype": str(getattr(getattr(lm, "model", None), "dtype", options.dtype)).removeprefix("torch."),
        "batch_size": settings.batch_size,
        "python": platform.python_version(),
        "chat_template_sha256": template,
    }


def wait_for_everyone(device: str):
    """Where `accelerate launch` or torchrun has started several processes."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # Without `cpu`, processes on a machine without GPUs would not know of each other
        PartialState(cpu=device == "cpu").wait_for_everyone()


def _collect(
    results: list[ModelResults], benchmarks: list[Benchmark], skipped: dict[str, str]
) -> Iterator[tuple[str, list[Finished]]]:
    for benchmark in benchmarks:
        if benchmark.name not in skipped:
            finished = [result.load(benchmark) for result in results]
            for other in finished[1:]:
                check_pairing(finished[0], other, benchmark)
            yield benchmark.name, finished
