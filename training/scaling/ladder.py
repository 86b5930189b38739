# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""A ladder of pretraining runs: sizes, ways to read over depth and seeds, each way with learning rates of its own.

One YAML file says all of it. Every run is one of `attnres pretrain`, of which a line of JSON stays; a ladder that
was interrupted goes on where it was.
"""

import dataclasses
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_origin

import torch
import yaml
from rich.console import Console
from transformers import AutoModelForCausalLM, PreTrainedConfig, __version__, set_seed

from ...utils.files import append_json, read_json_lines, write_file
from ...utils.timing import alternate
from ...utils.untrusted import read_json, read_yaml
from ..arguments import PretrainArguments
from ..config import KIND_NAMES
from ..pretrain import pretrain, read_model_config
from .sweep import next_rate


TUNING_SEED = 100  # the first one; those below are of what is compared
LADDER_FILE, RUNS_FILE, TIMES_FILE = "ladder.yaml", "runs.jsonl", "times.json"
# A step reads every parameter once forward and twice backward, each with a multiplication and an addition
FLOPS_PER_PARAMETER = 6
# Of a step, by default
STEP_SIZES = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "max_length": 1024}
# Numbers with an example, as YAML takes 2e1 for text
WANTED = KIND_NAMES | {float: "a number such as 20 or 2.0e+1", tuple: "a list of numbers such as [4.0e-3, 8.0e-3]"}
# What YAML makes of the types of fields, where that is another one
YAML_TYPES: dict[type, Any] = {float: (int, float), tuple: list}
console = Console()


@dataclass(frozen=True)
class Ladder:
    """What is trained, and how.

    Attributes:
        dataset: what all runs are trained on, as in `attnres pretrain`.
        tuning_dataset: what learning rates are chosen by.
        eval_dataset: what the models are judged on.
        tokenizer: folder or Hub id.
        model_config: fields that all models share, with a `base_model_type`.
        sizes: by name, from small to large, the fields of each.
        arms: by name, what makes an AttnRes model of a size (`num_blocks` or `attn_res_block_size`, and fields of the
            read); nothing for PreNorm, which comes first.
        seeds: how many models of each arm and size.
        tokens_per_parameter: of the PreNorm model, without embeddings. All arms of a size see the same tokens.
        rates: learning rates that every arm tries at the tuned sizes; at an end of the list, further ones by twos.
        tuned_sizes: so many of the smallest sizes are tuned.
        tuning_seeds: so many models of each rate are tried there; the lowest mean loss decides. One tells rates apart
            badly.
        rate_exponent: of the width, by which the mean of the tuned sizes' best rates is carried to all sizes.
        training: further fields of `attnres pretrain`, the same for all runs.
    """

    dataset: str
    tuning_dataset: str
    eval_dataset: str
    tokenizer: str
    model_config: dict[str, Any]
    sizes: dict[str, dict[str, Any]]
    arms: dict[str, dict[str, Any] | None]
    seeds: int = 3
    tokens_per_parameter: float = 20
    rates: tuple[float, ...] = (2e-3, 4e-3, 8e-3)
    tuned_sizes: int = 2
    tuning_seeds: int = 3
    rate_exponent: float = -0.5
    training: dict[str, Any] = field(default_factory=dict)

    @property
    def baseline(self) -> str:
        return next(iter(self.arms))

    def config_of(self, arm: str, size: str) -> dict[str, Any]:
        """The `model_config` of a run."""
        fields = {**self.model_config, **self.sizes[size]}
        if self.arms[arm]:
            return {**fields, **self.arms[arm]}
        return {"model_type": fields.pop("base_model_type"), **fields}

    def model_config_of(self, arm: str, size: str) -> PreTrainedConfig:
        return read_model_config(PretrainArguments("", "", model_config=self.config_of(arm, size)))

    def num_parameters(self, size: str) -> int:
        """Of the PreNorm model, without its embedding and its head."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self.model_config_of(self.baseline, size))
        outside = {
            id(module.weight)
            for module in (model.get_input_embeddings(), model.get_output_embeddings())
            if module is not None
        }
        return sum(p.numel() for p in model.parameters() if id(p) not in outside)

    @property
    def tokens_per_step(self) -> int:
        return math.prod(self.training.get(name, default) for name, default in STEP_SIZES.items())

    def steps_of(self, size: str) -> int:
        return math.ceil(self.tokens_per_parameter * self.num_parameters(size) / self.tokens_per_step)

    def compute_of(self, size: str) -> float:
        """FLOPs of a run by the parameters of the PreNorm model, the same for all arms."""
        return FLOPS_PER_PARAMETER * self.num_parameters(size) * self.steps_of(size) * self.tokens_per_step


@dataclass(frozen=True)
class Run:
    """One training run. Its name is that of its result file."""

    arm: str
    size: str
    seed: int
    learning_rate: float

    @property
    def is_tuning(self) -> bool:
        return self.seed >= TUNING_SEED

    @property
    def name(self) -> str:
        rate = [f"lr{self.learning_rate:g}"] if self.is_tuning else []
        seed = [] if self.seed == TUNING_SEED else [f"seed{self.seed}"]
        return "-".join([self.arm, self.size, *rate, *seed])


def read_ladder(path: str | Path) -> Ladder:
    """A ladder from its YAML file.

    Raises:
        ValueError: if a field is missing, unknown or does not fit, with its name.
    """
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise ValueError(f"`{path}` is not a list of `field: value`.")
    known = {f.name: f for f in dataclasses.fields(Ladder)}
    for name in values.keys() - known.keys():
        raise ValueError(f"`{path}`: `{name}` is not a field of a ladder. Those are {', '.join(known)}.")
    for name, of_ladder in known.items():
        has_default = {of_ladder.default, of_ladder.default_factory} != {dataclasses.MISSING}
        if name not in values and not has_default:
            raise ValueError(f"`{path}`: `{name}` is missing.")
        if name in values:
            _check_kind(values[name], get_origin(of_ladder.type) or of_ladder.type, name, str(path))
    ladder = Ladder(**{**values, "rates": tuple(map(float, values.get("rates", Ladder.rates)))})
    _check_fields(ladder, str(path))
    _check(ladder, str(path))
    return ladder


def _check_kind(value: Any, kind: type, name: str, path: str):
    fits = isinstance(value, YAML_TYPES.get(kind, kind)) and not isinstance(value, bool)
    if kind is tuple and fits:
        fits = all(map(_is_number, value))
    if not fits:
        raise ValueError(f"`{path}`: `{name}` has to be {WANTED[kind]}, and is {value!r}.")


def _is_number(value: Any) -> bool:
    """Also as text, for which YAML takes 2e-3."""
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _check_fields(ladder: Ladder, path: str):
    """What is inside of the fields."""
    for size, fields in ladder.sizes.items():
        if not isinstance(fields, dict) or not fields:
            raise ValueError(f"`{path}`: size `{size}` has to be {WANTED[dict]}, and is {fields!r}.")
    for arm, fields in ladder.arms.items():
        if fields is not None:
            _check_kind(fields, dict, f"arms: {arm}", path)
    if not isinstance(ladder.model_config.get("base_model_type"), str):
        raise ValueError(f"`{path}`: `model_config` has no `base_model_type`, such as llama.")
    for name in STEP_SIZES:
        _check_kind(ladder.training.get(name, 1), int, f"training: {name}", path)
    numbers = [("tokens_per_parameter", ladder.tokens_per_parameter), *(("rates", rate) for rate in ladder.rates)]
    for name, number in numbers:
        if not 0 < number < math.inf:
            raise ValueError(f"`{path}`: `{name}` has to be above 0, and is {number}.")


def _check(ladder: Ladder, path: str):
    if not ladder.arms or ladder.arms[ladder.baseline]:
        raise ValueError(f"`{path}`: the first of `arms` has to be PreNorm, which has no fields.")
    if len(ladder.arms) < 2 or not all(fields for name, fields in ladder.arms.items() if name != ladder.baseline):
        raise ValueError(f"`{path}`: `arms` needs an AttnRes arm beside PreNorm, such as `blocks: {{num_blocks: 4}}`.")
    if len(ladder.sizes) < 2 or not 1 <= ladder.tuned_sizes <= len(ladder.sizes):
        raise ValueError(f"`{path}`: there have to be two `sizes` at least, and `tuned_sizes` of them.")
    if not 1 <= ladder.seeds <= TUNING_SEED or ladder.tuning_seeds < 1 or len(ladder.rates) < 2:
        raise ValueError(
            f"`{path}`: there have to be 1 to {TUNING_SEED} `seeds`, one of `tuning_seeds` at least, and two `rates`."
        )
    given = {"max_steps", "learning_rate", "seed", "output_dir", "warmup_steps"} & ladder.training.keys()
    if given:
        raise ValueError(f"`{path}`: `{sorted(given)[0]}` in `training` is another one in each run. Leave it out.")
    for arm in ladder.arms:
        for size in ladder.sizes:
            try:
                ladder.model_config_of(arm, size)
            except ValueError as error:
                raise ValueError(f"`{path}`: arm `{arm}` at size `{size}`: {error}") from error
    numbers = [ladder.num_parameters(size) for size in ladder.sizes]
    if numbers != sorted(set(numbers)):
        raise ValueError(f"`{path}`: `sizes` have to go from small to large, and have {numbers} parameters.")


def results_of(folder: str | Path) -> dict[Run, dict[str, Any]]:
    """By run, what has stayed of it."""
    before = sorted((Path(folder) / "runs").glob("*.json"))  # as attnres 0.2 kept them, in files of their own
    results = [read_json(path) for path in before] + read_json_lines(Path(folder) / RUNS_FILE)
    return {Run(**result["run"]): result for result in results}


def tuning_losses(ladder: Ladder, found: dict[Run, dict[str, Any]], arm: str, size: str) -> dict[float, float]:
    """Means over the tuning seeds by learning rate, of those that have all of them, in their order."""
    by_rate: dict[float, list[float]] = {}
    for run, result in found.items():
        if run.is_tuning and (run.arm, run.size) == (arm, size):
            loss = math.inf if math.isnan(result["loss"]) else result["loss"]
            by_rate.setdefault(run.learning_rate, []).append(loss)
    return {rate: sum(of) / len(of) for rate, of in sorted(by_rate.items()) if len(of) >= ladder.tuning_seeds}


def carried_rate(ladder: Ladder, found: dict[Run, dict[str, Any]], arm: str, size: str) -> float:
    """The geometric mean of the best rates of the tuned sizes, each carried over by its width."""
    rates = []
    for tuned in list(ladder.sizes)[: ladder.tuned_sizes]:
        losses = tuning_losses(ladder, found, arm, tuned)
        ratio = ladder.model_config_of(arm, size).hidden_size / ladder.model_config_of(arm, tuned).hidden_size
        rates.append(math.log(min(losses, key=losses.__getitem__)) + ladder.rate_exponent * math.log(ratio))
    return float(f"{math.exp(sum(rates) / len(rates)):.3g}")


def runs_left(ladder: Ladder, found: dict[Run, dict[str, Any]]) -> Iterator[Run]:
    """What has no result yet, as far as it can be told: all sweeps, and then seed by seed, from small to large."""
    tuned = [(arm, size) for size in list(ladder.sizes)[: ladder.tuned_sizes] for arm in ladder.arms]
    rates = {of: next_rate(tuning_losses(ladder, found, *of), ladder.rates) for of in tuned}
    for of, rate in rates.items():
        if rate is not None:
            sweep = [Run(*of, TUNING_SEED + i, rate) for i in range(ladder.tuning_seeds)]
            yield from (run for run in sweep if run not in found)
    if any(rate is not None for rate in rates.values()):
        return
    for seed in range(ladder.seeds):
        for size in ladder.sizes:
            for arm in ladder.arms:
                run = Run(arm, size, seed, carried_rate(ladder, found, arm, size))
                if run not in found:
                    yield run


def run_ladder(path: str | Path, output: str | Path) -> list[Path]:
    """Train all runs of a ladder that have no result in `output` yet, and measure the time of a step of each model.

    Returns:
        The files that were written.

    Raises:
        ValueError: if the ladder does not fit, or `output` has results of another one.
    """
    ladder, output = read_ladder(path), Path(output)
    text = yaml.safe_dump(_as_yaml(ladder), sort_keys=False)  # the order of sizes and arms counts
    kept = output / LADDER_FILE
    if kept.exists() and kept.read_text(encoding="utf-8") != text:
        raise ValueError(f"`{output}` has runs of another ladder, see {kept}. Choose another folder.")
    output.mkdir(parents=True, exist_ok=True)
    write_file(kept, text)
    for size in ladder.sizes:
        console.print(
            f"{size}: {ladder.num_parameters(size):,} parameters, {ladder.steps_of(size):,} steps,"
            f" {ladder.compute_of(size):.1e} FLOPs a run",
            highlight=False,
        )
    while run := next(runs_left(ladder, results_of(output)), None):
        result = train(ladder, run, output / "work")
        append_json(output / RUNS_FILE, result)
        console.print(f"{run.name}: {result['loss']:.4f}, {result['seconds']:.0f} s", highlight=False)
    shutil.rmtree(output / "work", ignore_errors=True)
    if not (output / TIMES_FILE).exists():
        write_file(output / TIMES_FILE, json.dumps(measure_times(ladder), indent=1) + "\n")
    return [kept, output / RUNS_FILE, output / TIMES_FILE]


def _as_yaml(ladder: Ladder) -> dict[str, Any]:
    return {**asdict(ladder), "rates": list(ladder.rates)}


def train(ladder: Ladder, run: Run, work: Path) -> dict[str, Any]:
    """Train one run; its figures."""
    steps, folder = ladder.steps_of(run.size), work / run.name
    defaults = {"save_steps": max(1, steps // 4), "save_total_limit": 1, "logging_steps": max(1, steps // 10)}
    result = pretrain(
        {
            **{**defaults, "report_to": "none", "eval_on_start": False, "eval_steps": steps},
            **ladder.training,
            "dataset": ladder.dataset,
            "eval_dataset": ladder.tuning_dataset if run.is_tuning else ladder.eval_dataset,
            "tokenizer": ladder.tokenizer,
            "model_config": ladder.config_of(run.arm, run.size),
            "output_dir": str(folder),
            "max_steps": steps,
            "learning_rate": run.learning_rate,
            "warmup_steps": max(1, steps // 20),
            "seed": run.seed,
        }
    )
    history = json.loads((folder / "history.json").read_text(encoding="utf-8"))
    shutil.rmtree(folder)
    loss = result.losses[-1]
    return {
        "run": asdict(run),
        "loss": loss if math.isfinite(loss) else math.inf,  # of a run that has diverged
        "parameters": ladder.num_parameters(run.size),
        "trainable_parameters": result.trainable_parameters,
        "tokens": steps * ladder.tokens_per_step,
        "compute": ladder.compute_of(run.size),
        "train_loss": {entry["step"]: entry["loss"] for entry in history if "loss" in entry},
        "seconds": sum(entry.get("train_runtime", 0.0) for entry in history),
        "transformers": __version__,
        "torch": torch.__version__,
    }


def measure_times(ladder: Ladder, pairs: int = 15) -> dict[str, dict[str, float]]:
    """By size and arm, the time of a training step relative to PreNorm's, in one process by turns: medians."""
    times = {}
    length = ladder.training.get("max_length", 1024)
    for size in ladder.sizes:
        set_seed(0)
        rows = torch.randint(ladder.model_config_of(ladder.baseline, size).vocab_size, (8, length))
        models = [AutoModelForCausalLM.from_config(ladder.model_config_of(arm, size)).train() for arm in ladder.arms]

        def step(model, rows=rows):
            model(rows, labels=rows, use_cache=False).loss.backward()

        seconds = alternate([lambda model=model: step(model) for model in models], pairs, f"Steps of {size}")
        ratios = (seconds / seconds[:, :1]).median(dim=0).values
        times[size] = dict(zip(ladder.arms, ratios.tolist()))
    return times
