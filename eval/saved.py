# SPDX-License-Identifier: Apache-2.0
"""What evaluations leave in their output folder: one writes there at a time, and nothing damaged is believed.

In `models/` there is a folder for every model, named after it and after a hash of all that its scores depend on: the
checkpoint's fingerprint or commit, adapter, options and the versions of the libraries. A finished benchmark is two
files there: its samples, and then its summary, by which a later run knows that it is done. What an unfinished one has
answered so far is a file beside them.
"""

import contextlib
import hashlib
import json
import logging
import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from lm_eval.api.model import LM, CacheHook, CachingLM, hash_args

from ..utils.devices import is_first_process
from ..utils.files import only_run_in, write_file


if TYPE_CHECKING:
    from .benchmarks import Benchmark
    from .models import EvalModel, EvalOptions


logger = logging.getLogger(__name__)


@contextlib.contextmanager
def output_folder(path: str | Path) -> Iterator[Path]:
    """The folder, made if it is not there, for this run alone; the processes of one run share it.

    Raises:
        ValueError: if it is a file.
        OSError: if another run is writing there.
    """
    path = Path(path).expanduser().absolute()
    for folder in (path, path / "models"):
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"`{folder}` is a file where `attnres eval` needs a folder; name another output folder.")
    if not is_first_process():
        yield path  # the first process has the lock, or ends the run
        return
    with only_run_in(path, "models/.lock"):
        yield path


def set_aside(path: Path, reason: str):
    """Rename a file that is not what it should be, and say so."""
    kept, number = path.with_name(f"{path.name}.kept"), 2
    while kept.exists():
        kept, number = path.with_name(f"{path.name}.kept{number}"), number + 1
    path.rename(kept)
    logger.warning(f"{reason} It is kept as `{kept}`.")


@dataclass(frozen=True)
class Finished:
    """One benchmark done by one model: samples in the order of tasks and documents.

    `num_fewshot`, `task_versions` and `generation` (of tasks with written answers) are by task. `runs` tells which
    commands it was answered by, on what: more than one if the first was interrupted. `unusable` counts the programs
    whose tests could not be run, by reason.
    """

    samples: list[dict[str, Any]]
    metric: str
    filter: str
    num_fewshot: dict[str, int]
    task_versions: dict[str, Any]
    generation: dict[str, dict[str, Any]]
    runs: list[dict[str, Any]]
    unusable: dict[str, int] = field(default_factory=dict)

    def scores(self) -> dict[str, np.ndarray]:
        """By subtask, `[documents]`."""
        by_task: dict[str, list[float]] = {}
        for sample in self.samples:
            by_task.setdefault(sample["task"], []).append(float(sample["score"]))
        return {task: np.array(values) for task, values in by_task.items()}

    @property
    def bits_per_byte(self) -> float | None:
        """Of all documents together; `None` of other metrics."""
        if self.metric != "bits_per_byte":
            return None
        bits = -sum(sample["units"] * math.log2(sample["score"]) for sample in self.samples)
        return bits / sum(sample["units"] for sample in self.samples)

    @property
    def num_cut_off(self) -> int | None:
        """How many answers ended only because of the limit of their length; `None` if that is not known."""
        return self._count("cut_off")

    @property
    def num_empty(self) -> int | None:
        """How many written answers have nothing in them; `None` if answers are not written."""
        return self._count("empty")

    def _count(self, name: str) -> int | None:
        known = [sample[name] for sample in self.samples if sample[name] is not None]
        return sum(known) if known else None


class ModelResults:
    """The folder of one model: what it has finished, and where more goes."""

    def __init__(self, output: Path, model: "EvalModel", options: "EvalOptions", versions: dict[str, str]):
        self.model = model
        self.identity = {**model.fingerprint(), "options": asdict(options), "versions": versions}
        slug = re.sub(r"[^\w.+-]", "_", model.name)
        self.folder = output / "models" / f"{slug}-{_sha256(self.identity)[:12]}"

    def check_unchanged(self):
        """Raise an `OSError` if the checkpoint is not the one any more that was fingerprinted."""
        now = self.model.fingerprint()
        if any(self.identity[name] != value for name, value in now.items()):
            raise OSError(f"`{self.model.path}` changed while it was loaded. Run again when nothing writes to it.")

    def _paths(self, benchmark: "Benchmark") -> tuple[Path, Path]:
        stem = re.sub(r"[^\w.+-]", "_", benchmark.name) + "-" + _sha256(asdict(benchmark))[:8]
        return self.folder / f"{stem}.jsonl", self.folder / f"{stem}.json"

    def load(self, benchmark: "Benchmark") -> Finished | None:
        """What was saved of a benchmark; `None` if it was not finished. What is damaged is set aside."""
        samples_path, summary_path = self._paths(benchmark)
        if not summary_path.exists():
            return None
        try:
            summary = json.loads(summary_path.read_bytes())
            described = {name: value for name, value in summary.items() if name != "sha256"}
            if summary["sha256"] != _sha256(described):
                raise ValueError("it was changed")
            content = samples_path.read_bytes()
            if summary["samples_sha256"] != hashlib.sha256(content).hexdigest():
                raise ValueError(f"`{samples_path.name}` was changed")
        except (ValueError, KeyError, TypeError, AttributeError, FileNotFoundError) as error:
            if is_first_process():
                for path in filter(Path.exists, (summary_path, samples_path)):
                    set_aside(path, f"`{path}` is damaged ({error!r}): {benchmark.name} is run again.")
            return None
        samples = [json.loads(line) for line in content.splitlines()]
        return Finished(samples=samples, **summary["finished"])

    def save(self, benchmark: "Benchmark", finished: Finished):
        """Samples first, the summary that says they are whole last; each is written beside and renamed."""
        samples_path, summary_path = self._paths(benchmark)
        # ASCII: a response may hold what ends a line for Python, or half a surrogate pair
        content = "".join(json.dumps(sample, default=str) + "\n" for sample in finished.samples).encode()
        described = {name: value for name, value in asdict(finished).items() if name != "samples"}
        summary = {
            "benchmark": asdict(benchmark),
            "identity": self.identity,
            "samples_sha256": hashlib.sha256(content).hexdigest(),
            "finished": described,
        }
        summary = json.loads(json.dumps(summary, default=str))  # as it will be read
        write_file(samples_path, content)
        write_file(summary_path, json.dumps({**summary, "sha256": _sha256(summary)}, indent=2) + "\n")

    @contextlib.contextmanager
    def resumable(self, benchmark: "Benchmark", lm: LM, run: dict[str, Any]) -> Iterator["CachedLM"]:
        """The model, with every answer of its own kept until the benchmark is saved."""
        samples_path, _ = self._paths(benchmark)
        path = samples_path.with_name(f".{samples_path.stem}.{lm.rank}-of-{lm.world_size}.answers")
        with Answers(path, run) as answers:
            yield CachedLM(lm, answers)
            if lm.world_size > 1:
                lm.barrier()  # the first process has saved them all
            path.unlink()  # and not after an error: the next run goes on from there
        lm.set_cache_hook(CacheHook(None))


def _sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=list).encode()).hexdigest()


class Answers(dict):
    """What was answered, by the hash of the request; what is added goes to a file at once.

    `cut_off` tells of written answers whether they ended only because of the limit of their length, `runs` which
    commands have added to the file. Every line begins with a hash of the rest.
    """

    def __init__(self, path: Path, run: dict[str, Any]):
        super().__init__()
        self.path, self.run, self.runs = path, run, []
        self.cut_off: dict[str, bool] = {}

    def __enter__(self) -> "Answers":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole = b""
        if self.path.exists():
            whole = self.path.read_bytes()
            whole = whole[: whole.rfind(b"\n") + 1]  # a kill may have cut the last line
            if not all(map(self._read, whole.splitlines())):
                set_aside(self.path, f"`{self.path}` is damaged: its answers are not used.")
                whole = b""
                self.clear()
                self.cut_off.clear()
                self.runs.clear()
        self._file = self.path.open("ab", buffering=0)
        self._file.truncate(len(whole))
        if self.run not in self.runs:
            self.runs.append(self.run)
            self._write({"run": self.run})
        return self

    def __exit__(self, *exception):
        self._file.close()

    def __setitem__(self, key: str, value: Any):
        self.add(key, value, None)

    def add(self, key: str, value: Any, cut_off: bool | None):
        if cut_off is not None:
            self.cut_off[key] = self.cut_off.get(key, False) or cut_off
        if key not in self:
            super().__setitem__(key, value)
            self._write({"request": key, "answer": value, "cut_off": cut_off})

    def _write(self, entry: dict[str, Any]):
        content = json.dumps(entry).encode()
        self._file.write(xxhash.xxh3_64_hexdigest(content).encode() + b" " + content + b"\n")

    def _read(self, line: bytes) -> bool:
        """Take over a line of the file, if it is as it was written."""
        checksum, _, content = line.partition(b" ")
        if checksum.decode(errors="replace") != xxhash.xxh3_64_hexdigest(content):
            return False
        entry = json.loads(content)
        if "run" in entry:
            self.runs.append(entry["run"])
        else:
            super().__setitem__(entry["request"], entry["answer"])
            if entry["cut_off"] is not None:
                self.cut_off[entry["request"]] = entry["cut_off"]
        return True

    def commit(self):
        """Every line is written already."""


class CachedLM(CachingLM):
    """lm-eval's cache of responses, on a file of lines. It is keyed by requests alone, so each model has its own.

    lm-eval's own database costs a fifth of the time of a small model, and runs what somebody else may have pickled
    into it.
    """

    def __init__(self, lm: LM, answers: Answers):
        self.lm, self.cache_db, self.dbdict = lm, str(answers.path), answers
        lm.set_cache_hook(self.get_cache_hook())

    def get_cache_hook(self) -> "AnswerHook":
        return AnswerHook(self)


class AnswerHook(CacheHook):
    """Where lm-eval's models report every answer as soon as they have it."""

    def __init__(self, cached: CachedLM):
        super().__init__(cached)
        self.lm = cached.lm

    def add_partial(self, attr: str, req: tuple, res: Any):
        cut_off = self.lm.cut_off.popleft() if getattr(self.lm, "cut_off", None) else None
        self.dbdict.add(hash_args(attr, req), res, cut_off)
