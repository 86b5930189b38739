# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Running benchmarks of lm-eval on models, one at a time, with every finished one saved at once."""

import collections
import functools
import gc
import hashlib
import math
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import lm_eval
import torch
import yaml
from accelerate import PartialState
from huggingface_hub import snapshot_download
from huggingface_hub.utils import tqdm
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM, hash_args
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from transformers import AutoTokenizer, set_seed

from ..fingerprint import checkpoint_fingerprint
from ..sources import hub_commit
from . import cruxeval
from .saved import CachedLM, Finished, ModelResults


SUITES = ("paper", "core", "chat", "quick")
VERSIONS = ("attnres", "lm_eval", "transformers", "torch", "datasets", "tokenizers")


@dataclass(frozen=True)
class Benchmark:
    """One row of a suite: tasks of lm-eval, and which of their figures is the score.

    `paper` holds the figures of the paper's PreNorm and AttnRes models, in percent; `filter` is lm-eval's name for a
    way to read an answer out of a response. `max_gen_toks` limits the length of an answer in tokens, in place of the
    task's own limit. `apply_chat_template` makes a conversation of the prompt, with each example a turn.
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


def load_suite(name: str | Path) -> list[Benchmark]:
    """A suite by its name, or from a YAML file of one's own.

    Raises:
        ValueError: if there is none, or a row is not one.
    """
    path = resources.files(__package__).joinpath(f"suites/{name}.yaml") if str(name) in SUITES else Path(name)
    if not path.is_file():
        raise ValueError(f"`suite={str(name)!r}` is neither one of {', '.join(SUITES)} nor a file.")
    rows = yaml.safe_load(path.read_text(encoding="utf-8"))
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
def task_manager(include_path: str | Path | None = None) -> TaskManager:
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


def marked(benchmark: Benchmark, manager: TaskManager) -> Benchmark:
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
    """Whether a task that runs generated code has it run by our metric, and not by means of its own."""
    functions = [*task._metric_fn_list.values(), task.config.process_results]
    functions = [getattr(function, "__self__", function) for function in functions]  # lm-eval keeps their `__call__`
    return any(
        getattr(value, "sandboxed", False)
        for function in functions
        for value in getattr(function, "__globals__", {}).values()
    )


@dataclass(frozen=True)
class EvalOptions:
    """What decides scores, beside the model. `evaluate` fills in the digests of the folders that it is given, and the
    number of processes: lm-eval draws examples from one stream in each.
    """

    limit: int | None = None
    apply_chat_template: bool = False
    max_gen_toks: int | None = None
    seed: int = 0
    dtype: str = "auto"
    backend: str = "hf"
    data_digest: str | None = None
    tasks_digest: str | None = None
    processes: int = 1


@dataclass(frozen=True)
class EvalModel:
    """A checkpoint to evaluate, a folder or a Hub id, with an adapter on it if `peft` names one."""

    path: str
    peft: str | None = None
    revision: str | None = None
    peft_revision: str | None = None

    @property
    def name(self) -> str:
        name = Path(self.path).absolute().name if Path(self.path).exists() else self.path
        return name if self.peft is None else f"{name}+{Path(self.peft).name}"

    def resolved(self) -> "EvalModel":
        """With folders that do not depend on where the process is, and with the commits of what is on the Hub.

        Raises:
            OSError: if there is neither such a folder nor such a repository.
        """
        commit = hub_commit(self.path, self.revision)
        resolved = replace(self, path=_absolute(self.path) if commit is None else self.path, revision=commit)
        if self.peft is None:
            return resolved
        commit = hub_commit(self.peft, self.peft_revision, file="adapter_config.json")
        return replace(resolved, peft=_absolute(self.peft) if commit is None else self.peft, peft_revision=commit)

    def fingerprint(self) -> dict[str, Any]:
        """What tells this model from another one: the fingerprint of a folder, the id and commit of a repository."""
        described = {"model": (self.path, self.revision), "peft": (self.peft, self.peft_revision)}
        return {kind: path and _fingerprint(path, commit) for kind, (path, commit) in described.items()}


def _absolute(folder: str) -> str:
    return str(Path(folder).expanduser().absolute())


def _fingerprint(path: str, commit: str | None) -> dict[str, str]:
    # The same files elsewhere are the same model
    return {"id": path, "commit": commit} if commit else {"fingerprint": checkpoint_fingerprint(path)}


def versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in VERSIONS}


def check_chat_template(model: EvalModel):
    """Raise a `ValueError` if a model has no chat template."""
    if not AutoTokenizer.from_pretrained(model.path, revision=model.revision or "main").chat_template:
        raise ValueError(
            f"`{model.path}` has no chat template, and the prompts are to be put into one. Evaluate it without"
            " `--apply-chat-template` and the suite `chat`, or add its chat_template.jinja."
        )


class TransformersLM(HFLM):
    """lm-eval's wrapper of transformers models, which tells as well which answers the limit of length has cut off."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # One for each answer, until it is reported to the cache hook
        self.cut_off: collections.deque[bool] = collections.deque()

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **kwargs) -> torch.Tensor:
        sequences = super()._model_generate(context, max_length, stop, **kwargs)
        end = self.model.generation_config.eos_token_id
        ends = set(end if isinstance(end, list) else [end])
        for answer in sequences[:, context.shape[1] :].tolist():
            text = self.tok_decode(answer, skip_special_tokens=False)
            has_ended = not ends.isdisjoint(answer) or any(word in text for word in stop)
            self.cut_off.append(sequences.shape[1] >= max_length and not has_ended)
        return sequences


def load_model(model: EvalModel, options: EvalOptions, device: str, batch_size: int | str) -> LM:
    """lm-eval's own wrapper of a transformers model, or of one in vLLM."""
    peft = model.peft
    if model.peft_revision is not None:
        peft = snapshot_download(model.peft, revision=model.peft_revision)
    arguments = {"pretrained": model.path, "revision": model.revision or "main", "dtype": options.dtype}
    if options.backend == "vllm":
        if peft is not None:
            arguments["lora_local_path"] = peft
        return get_model("vllm").create_from_arg_obj(arguments, {"batch_size": batch_size, "device": device})
    lm = TransformersLM(**arguments, peft=peft, device=device, batch_size=batch_size, backend="causal")
    if hasattr(lm, "accelerator"):
        # lm-eval divides the documents among processes only where there are several GPUs in one machine; elsewhere
        # each process would do all of them and think itself the first
        lm._rank, lm._world_size = lm.accelerator.process_index, lm.accelerator.num_processes
    return lm


class Unavailable(Exception):
    """A benchmark whose data cannot be had, and what to do about it."""


def load_tasks(benchmark: Benchmark, manager: TaskManager) -> list:
    """The leaf tasks of a benchmark with their data.

    Raises:
        Unavailable: if a data set is gated, missing, made by a script or out of reach.
    """
    try:
        tasks = list(manager.load(list(benchmark.tasks))["tasks"].values())
    except Exception as error:  # what data sets raise is of many kinds, and none may stop the other benchmarks
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        kind = type(error).__name__
        if "gated" in text:
            way_out = "accept its terms on the Hub, then `hf auth login`"
        elif "script" in text:
            way_out = "put its data as Parquet into a folder of its name and pass `--data-root`"
        elif kind in ("ConnectionError", "OfflineModeIsEnabled", "LocalEntryNotFoundError", "ConnectError"):
            way_out = "fetch it where there is internet, or pass `--data-root`"
        else:
            way_out = "look at the data set, or pass `--data-root`"
        raise Unavailable(f"{text} To mend it: {way_out}.") from error
    for task in tasks:
        if task.config.task.startswith("cruxeval"):
            cruxeval.put_into_sandbox(task)
        if getattr(task, "UNSAFE_CODE", False) and not in_sandbox(task):
            raise Unavailable(f"`{task.config.task}` runs generated code by means of its own, outside of the sandbox.")
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
    chat = options.apply_chat_template or benchmark.apply_chat_template
    results = lm_eval.evaluate(
        lm=lm,
        task_dict={"tasks": {task.config.task: task for task in tasks}, "groups": {}},
        limit=options.limit,
        bootstrap_iters=0,  # the errors come from the samples
        apply_chat_template=chat,
        fewshot_as_multiturn=chat,
        confirm_run_unsafe_code=benchmark.runs_code,
    )
    cut_off = cut_off_answers(tasks, lm)
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
            samples.append(_sample(task_name, sample, metric, cut_off.get((task_name, sample["doc_id"]))))
    return Finished(
        samples=samples,
        metric=metric,
        filter=filter_name,
        num_fewshot=dict(results["n-shot"]),
        task_versions=dict(results["versions"]),
        generation=generation_settings(tasks, lm),
        runs=lm.dbdict.runs,
    )


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


def _sample(task: str, sample: dict[str, Any], metric: str, cut_off: bool | None) -> dict[str, Any]:
    score = sample[metric]
    if isinstance(score, (tuple, list)):
        # A perplexity: log-likelihood of the document, and its words or bytes. Its inverse is a score like the others
        log_likelihood, count = score
        score = math.exp(log_likelihood / count)
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
        "score": float(score),
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
    *,
    options: EvalOptions,
    manager: TaskManager,
    device: str = "cpu",
    batch_size: int | str = 1,
    command: str | None = None,
    keep_samples: bool = True,
    allow_code_execution: bool = False,
    make_model: Callable[[EvalModel, EvalOptions, str, int | str], LM] = load_model,
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
        if benchmark.runs_code and not allow_code_execution
    }
    wait_for_everyone(device)
    loaded: dict[str, list] = {}
    with tqdm(total=sum(map(len, missing)), unit="benchmark", desc="Evaluating") as progress:
        for result, todo in zip(results, missing):
            lm = None
            for benchmark in todo:
                progress.set_postfix_str(f"{result.model.name}: {benchmark.name}")
                if benchmark.name not in loaded and benchmark.name not in skipped:
                    try:
                        loaded[benchmark.name] = load_tasks(benchmark, manager)
                    except Unavailable as error:
                        skipped[benchmark.name] = str(error)
                if benchmark.name not in skipped:
                    if lm is None:
                        if result is not results[0]:
                            gc.collect()  # the one before, which refers to itself
                        lm = make_model(result.model, options, device, batch_size)
                        result.check_unchanged()
                    facts = {"command": command, **facts_of(lm, benchmark, options, device, batch_size)}
                    try:
                        run_and_save(benchmark, loaded[benchmark.name], lm, result, options, facts, keep_samples)
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
    facts: dict[str, Any],
    keep_samples: bool,
):
    """One model on one benchmark, up to its files."""
    prepare_tasks(benchmark, tasks, options)
    check_room(tasks, lm)
    with result.resumable(benchmark, lm, facts) as cached:
        finished = run_benchmark(benchmark, tasks, cached, options)
        if finished is None:
            return
        if not keep_samples:
            finished = replace(finished, samples=[without_texts(sample) for sample in finished.samples])
        result.save(benchmark, finished)


def facts_of(lm: LM, benchmark: Benchmark, options: EvalOptions, device: str, batch_size: int | str) -> dict[str, Any]:
    """What a benchmark is answered with, beside what decides the scores."""
    template = None
    if options.apply_chat_template or benchmark.apply_chat_template:
        template = hashlib.sha256((lm.chat_template(True) or "").encode()).hexdigest()
    return {
        "device": device,
        "dtype": str(getattr(getattr(lm, "model", None), "dtype", options.dtype)).removeprefix("torch."),
        "batch_size": batch_size,
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
