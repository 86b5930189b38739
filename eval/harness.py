# Copyright 2026 The attnres authors.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Running benchmarks of lm-eval on models, one at a time, with every finished one saved at once.

In the output folder every model has a folder of its own, named after it and after a fingerprint of all that decides
its scores: the checkpoint's files, dtype, adapter, chat template, limit, seed and the versions of the libraries. A
finished benchmark is two files there: its samples, and then its summary, by which a later run knows that it is done.
What an unfinished one has answered so far is a file beside them.
"""

import contextlib
import functools
import gc
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import lm_eval
import numpy as np
import yaml
from accelerate import PartialState
from huggingface_hub.utils import tqdm
from lm_eval.api.model import LM, CacheHook, CachingLM
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from transformers import set_seed

from ..outputs import write_file


SUITES = ("paper", "core", "quick")
CHECKPOINT_FILES = (".json", ".safetensors", ".jinja", ".model", ".txt", ".py")
VERSIONS = ("attnres", "lm_eval", "transformers", "torch", "datasets", "tokenizers")


@dataclass(frozen=True)
class Benchmark:
    """One row of a suite: tasks of lm-eval, and which of their figures is the score.

    `paper` holds the figures of the paper's PreNorm and AttnRes models, in percent; `filter` is lm-eval's name for a
    way to read an answer out of a response.
    """

    name: str
    tasks: tuple[str, ...]
    metric: str
    filter: str = "none"
    num_fewshot: int | None = None
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

    @property
    def name(self) -> str:
        name = Path(self.path).absolute().name if Path(self.path).exists() else self.path
        return name if self.peft is None else f"{name}+{Path(self.peft).name}"

    def fingerprint(self) -> dict[str, Any]:
        """What tells this checkpoint from another one."""
        # The same files elsewhere are the same model
        described = {
            kind: digest(Path(path), CHECKPOINT_FILES) if Path(path).is_dir() else path
            for kind, path in (("model", self.path), ("peft", self.peft))
            if path is not None
        }
        return {**described, "revision": self.revision}


def digest(folder: Path, suffixes: tuple[str, ...] = ("",)) -> str:
    """A hash over the files in a folder: small ones by content, large ones by size and their first and last bytes."""
    hashed = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.name.endswith(suffixes) and path.is_file() and not path.name.startswith("conversion_report"):
            size = path.stat().st_size
            hashed.update(f"{path.relative_to(folder).as_posix()} {size}\n".encode())
            with path.open("rb") as file:
                hashed.update(file.read(1 << 20))
                if size > 1 << 20:
                    file.seek(-(1 << 20), os.SEEK_END)
                    hashed.update(file.read())
    return hashed.hexdigest()


def versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in VERSIONS}


def load_model(model: EvalModel, options: EvalOptions, device: str, batch_size: int | str) -> LM:
    """lm-eval's own wrapper of a transformers model, or of one in vLLM."""
    arguments = {"pretrained": model.path, "revision": model.revision or "main", "dtype": options.dtype}
    if options.backend == "vllm":
        if model.peft is not None:
            arguments["lora_local_path"] = model.peft
        return get_model("vllm").create_from_arg_obj(arguments, {"batch_size": batch_size, "device": device})
    lm = HFLM(**arguments, peft=model.peft, device=device, batch_size=batch_size, backend="causal")
    if hasattr(lm, "accelerator"):
        # lm-eval divides the documents among processes only where there are several GPUs in one machine; elsewhere
        # each process would do all of them and think itself the first
        lm._rank, lm._world_size = lm.accelerator.process_index, lm.accelerator.num_processes
    return lm


@dataclass(frozen=True)
class Finished:
    """One benchmark done by one model: samples in the order of tasks and documents."""

    samples: list[dict[str, Any]]
    metric: str
    filter: str
    num_fewshot: dict[str, int]
    task_versions: dict[str, Any]

    def scores(self) -> dict[str, np.ndarray]:
        """By subtask, `[documents]`."""
        by_task: dict[str, list[float]] = {}
        for sample in self.samples:
            by_task.setdefault(sample["task"], []).append(float(sample["score"]))
        return {task: np.array(values) for task, values in by_task.items()}


class ModelResults:
    """The folder of one model: what it has finished, and where more goes."""

    def __init__(self, output: Path, model: EvalModel, options: EvalOptions):
        self.identity = {"model": model.fingerprint(), "options": asdict(options), "versions": versions()}
        digest = hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()[:12]
        slug = re.sub(r"[^\w.+-]", "_", model.name)
        self.folder = output / "models" / f"{slug}-{digest}"

    def _paths(self, benchmark: Benchmark) -> tuple[Path, Path]:
        definition = json.dumps(asdict(benchmark), sort_keys=True, default=list)
        digest = hashlib.sha256(definition.encode()).hexdigest()[:8]
        slug = re.sub(r"[^\w.+-]", "_", benchmark.name)
        return self.folder / f"{slug}-{digest}.jsonl", self.folder / f"{slug}-{digest}.json"

    def load(self, benchmark: Benchmark) -> Finished | None:
        """What was saved of a benchmark; `None` if it was not finished."""
        samples_path, summary_path = self._paths(benchmark)
        if not summary_path.exists():
            return None
        summary = json.loads(summary_path.read_text(encoding="utf-8"))
        content = samples_path.read_bytes()
        if hashlib.sha256(content).hexdigest() != summary["samples_sha256"]:
            return None  # somebody has changed it: it is run again
        samples = [json.loads(line) for line in content.decode("utf-8").splitlines()]
        return Finished(samples=samples, **summary["finished"])

    def save(self, benchmark: Benchmark, finished: Finished):
        """Samples first, the summary that says they are whole last; each is written beside and renamed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        samples_path, summary_path = self._paths(benchmark)
        # ASCII: a response may hold what ends a line for Python, or half a surrogate pair
        content = "".join(json.dumps(sample) + "\n" for sample in finished.samples).encode()
        described = {name: value for name, value in asdict(finished).items() if name != "samples"}
        summary = {
            "benchmark": asdict(benchmark),
            "identity": self.identity,
            "samples_sha256": hashlib.sha256(content).hexdigest(),
            "finished": described,
        }
        write_file(samples_path, content)
        write_file(summary_path, json.dumps(summary, indent=2) + "\n")

    @contextlib.contextmanager
    def resumable(self, benchmark: Benchmark, lm: LM) -> Iterator[LM]:
        """The model, with every answer of its own kept until the benchmark is saved."""
        samples_path, _ = self._paths(benchmark)
        path = samples_path.with_name(f".{samples_path.stem}.{lm.rank}-of-{lm.world_size}.answers")
        with _Answers(path) as answers:
            yield _Remembering(lm, answers)
            path.unlink()  # and not after an error: the next run goes on from there
        lm.set_cache_hook(CacheHook(None))


class _Remembering(CachingLM):
    """lm-eval's cache of responses, on a file of lines. It is keyed by requests alone, so each model has its own.

    Its own database costs a fifth of the time of a small model, and runs what somebody else may have pickled into it.
    """

    def __init__(self, lm: LM, answers: "_Answers"):
        self.lm, self.cache_db, self.dbdict = lm, str(answers.path), answers
        lm.set_cache_hook(self.get_cache_hook())


class _Answers(dict):
    """What was answered, by the hash of the request; what is added goes to a file at once."""

    def __init__(self, path: Path):
        super().__init__()
        self.path = path

    def __enter__(self) -> "_Answers":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole = b""
        if self.path.exists():
            whole = self.path.read_bytes()
            whole = whole[: whole.rfind(b"\n") + 1]  # a kill may have cut the last line
            self.update(json.loads(line) for line in whole.splitlines())
        self._file = self.path.open("ab", buffering=0)
        self._file.truncate(len(whole))
        return self

    def __exit__(self, *exception):
        self._file.close()

    def __setitem__(self, key: str, value: Any):
        if key not in self:
            super().__setitem__(key, value)
            self._file.write(json.dumps([key, value]).encode() + b"\n")

    def commit(self):
        """Every line is written already."""


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
        if getattr(task, "UNSAFE_CODE", False) and not in_sandbox(task):
            raise Unavailable(f"`{task.config.task}` runs generated code by means of its own, outside of the sandbox.")
    return tasks


def run_benchmark(benchmark: Benchmark, tasks: list, lm: LM, options: EvalOptions) -> Finished | None:
    """Evaluate one model on one benchmark. `None` in all processes but the first.

    Raises:
        ValueError: if the tasks do not give the metric.
    """
    set_seed(options.seed)
    for task in tasks:
        # As `simple_evaluate` does, which also collects facts about the machine, half a second each time
        if benchmark.num_fewshot is not None and task.get_config("num_fewshot") != 0:
            task.set_config(key="num_fewshot", value=benchmark.num_fewshot)
        elif task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=options.seed)
    results = lm_eval.evaluate(
        lm=lm,
        task_dict={"tasks": {task.config.task: task for task in tasks}, "groups": {}},
        limit=options.limit,
        bootstrap_iters=0,  # the errors come from the samples
        apply_chat_template=options.apply_chat_template,
        fewshot_as_multiturn=options.apply_chat_template,
        confirm_run_unsafe_code=benchmark.runs_code,
    )
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
        samples += [_sample(task_name, sample, metric) for sample in sorted(chosen, key=lambda s: s["doc_id"])]
    return Finished(
        samples=samples,
        metric=metric,
        filter=filter_name,
        num_fewshot=dict(results["n-shot"]),
        task_versions=dict(results["versions"]),
    )


def _sample(task: str, sample: dict[str, Any], metric: str) -> dict[str, Any]:
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
        "response": str(sample["filtered_resps"]),
        "score": float(score),
    }


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
    models: list[EvalModel],
    benchmarks: list[Benchmark],
    output: Path,
    *,
    options: EvalOptions,
    manager: TaskManager,
    device: str = "cpu",
    batch_size: int | str = 1,
    allow_code_execution: bool = False,
    make_model: Callable[[EvalModel, EvalOptions, str, int | str], LM] = load_model,
) -> tuple[dict[str, list[Finished]], dict[str, str]]:
    """Evaluate models on benchmarks, but for what is finished already.

    Every task is loaded once, for all models; one model is in memory at a time.

    Returns:
        What every benchmark gave for the models, by its name, and the reasons why others were skipped.
    """
    results = [ModelResults(output, model, options) for model in models]
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
        for model, result, todo in zip(models, results, missing):
            lm = remembering = None
            for benchmark in todo:
                progress.set_postfix_str(f"{model.name}: {benchmark.name}")
                if benchmark.name not in loaded and benchmark.name not in skipped:
                    try:
                        loaded[benchmark.name] = load_tasks(benchmark, manager)
                    except Unavailable as error:
                        skipped[benchmark.name] = str(error)
                if benchmark.name not in skipped:
                    if lm is None:
                        if model is not models[0]:
                            gc.collect()  # the one before, which refers to itself
                        lm = make_model(model, options, device, batch_size)
                    with result.resumable(benchmark, lm) as remembering:
                        finished = run_benchmark(benchmark, loaded[benchmark.name], remembering, options)
                        if finished is not None:
                            result.save(benchmark, finished)
                progress.update()
    wait_for_everyone(device)
    return dict(_collect(models, benchmarks, output, options, skipped)), skipped


def wait_for_everyone(device: str):
    """Where `accelerate launch` or torchrun has started several processes."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # Without `cpu`, processes on a machine without GPUs would not know of each other
        PartialState(cpu=device == "cpu").wait_for_everyone()


def _collect(
    models: list[EvalModel], benchmarks: list[Benchmark], output: Path, options: EvalOptions, skipped: dict[str, str]
) -> Iterator[tuple[str, list[Finished]]]:
    for benchmark in benchmarks:
        if benchmark.name not in skipped:
            finished = [ModelResults(output, model, options).load(benchmark) for model in models]
            for other in finished[1:]:
                check_pairing(finished[0], other, benchmark)
            yield benchmark.name, finished
