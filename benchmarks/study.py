# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""What Attention Residuals bring to a small model: from scratch, in continued training, with adapters.

    python benchmarks/study.py run [--jobs 2]    # hours; finished runs are kept, and left out the next time
    python benchmarks/study.py speed             # seconds per training step, alternating, in one process
    python benchmarks/study.py report            # tables and figures from what lies in benchmarks/study

Models are trained on the sources of Python's standard library, and continued on those of four installed packages
(versions in constraints.txt): another domain, which the base has not seen. Every twentieth file of each is held out.
All arms of a seed see the same windows in the same order and start from the same weights, so their losses are paired.
"""

import hashlib
import json
import os
import platform
import statistics
import sys
import sysconfig
import time
import zlib
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields, replace
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import matplotlib.pyplot as plt
import torch
import typer
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.progress import Progress
from scipy import stats
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, set_seed

from attnres import AttnResConfig, AttnResForCausalLM
from attnres.benchmarks.twin import activation_bytes, alternate
from attnres.conversion import convert
from attnres.demo import train_tokenizer, windows
from attnres.depth_attention import depth_weights, mix_and_norm, norm_of, source_scores
from attnres.depth_stream import DepthStream
from attnres.outputs import write_figure, write_file
from attnres.training import AttnResTrainer, AttnResTrainingArguments
from attnres.training.adapters import lora_config, queries_config


RESULTS = Path(__file__).parent / "study"
PACKAGES = ("networkx", "numpy", "pandas", "sympy")
SKIPPED = {"site-packages", "test", "tests", "testing", "idlelib", "lib2to3", "ensurepip", "pydoc_data", "encodings"}
LENGTH, BATCH, HELD_OUT_WINDOWS = 128, 8, 192
SEEDS = (0, 1, 2)
SHAPE = Qwen3Config(
    vocab_size=2048,
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=12,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=0,
    pad_token_id=0,
)
NUM_BLOCKS = 8
TRAINING = {
    "per_device_train_batch_size": BATCH,
    "per_device_eval_batch_size": 2 * BATCH,
    "lr_scheduler_type": "cosine",
    "weight_decay": 0.1,
    "adam_beta2": 0.95,
    "eval_strategy": "steps",
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
}
# The best ones of the sweep: beside weights that train as well, and alone
QUERY_LEARNING_RATE, QUERIES_ALONE_LEARNING_RATE = 3e-3, 1e-2
SWEEP = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
LORA_RANK = 8
RECENCY_BIAS = 3.0
console = Console()
app = typer.Typer(add_completion=False, help=__doc__)


@dataclass(frozen=True)
class Run:
    """One training run. Its name is that of its result file."""

    stage: str  # pretrain or continue
    arm: str
    seed: int
    steps: int
    learning_rate: float
    query_learning_rate: float | None = None
    query_weight_decay: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.stage}-{self.arm}-seed{self.seed}"

    @property
    def needs(self) -> str | None:
        return None if self.stage == "pretrain" else f"pretrain-prenorm-seed{self.seed}"


def all_runs() -> list[Run]:
    """In an order in which what others need comes first."""
    pretrain = Run("pretrain", "prenorm", 0, steps=2400, learning_rate=3e-3)
    further = Run("continue", "prenorm", 0, steps=300, learning_rate=1e-3, query_learning_rate=QUERY_LEARNING_RATE)
    lora = replace(further, learning_rate=3e-3)
    runs = [replace(pretrain, seed=seed) for seed in SEEDS]
    for query_lr in SWEEP:
        for decay in (0.0, 0.1):
            arm = f"sweep_lr{query_lr:g}_decay{decay:g}"
            runs.append(replace(further, arm=arm, query_learning_rate=query_lr, query_weight_decay=decay))
    for query_lr in SWEEP[1:]:
        runs.append(replace(further, arm=f"sweep_queries_lr{query_lr:g}", query_learning_rate=query_lr))
    for seed in SEEDS:
        runs += [replace(further, arm=arm, seed=seed) for arm in ("prenorm", "block", "full")]
        runs.append(replace(further, arm="queries", seed=seed, query_learning_rate=QUERIES_ALONE_LEARNING_RATE))
        runs += [replace(lora, arm=arm, seed=seed) for arm in ("lora_prenorm", "lora_block")]
        runs += [replace(further, arm=arm, seed=seed) for arm in ("random_queries", "recency_bias")]
    for seed in SEEDS:
        runs += [replace(pretrain, arm=arm, seed=seed) for arm in ("block", "full")]
    return runs


# --- the text


def sources() -> dict[str, list[tuple[str, Path]]]:
    """Name and path of every file of the two corpora."""
    library = Path(sysconfig.get_paths()["stdlib"])
    found = {"library": [(path.relative_to(library).as_posix(), path) for path in library.rglob("*.py")]}
    found["packages"] = [
        (file.as_posix(), Path(file.locate())) for name in PACKAGES for file in metadata.files(name) or ()
    ]
    return {
        corpus: [
            (name, path)
            for name, path in sorted(files)
            if name.endswith(".py") and not SKIPPED & set(Path(name).parts) and path.is_file()
        ]
        for corpus, files in found.items()
    }


def prepare(work: Path) -> dict:
    """Tokenizer and windows of both corpora under `work`, and what they were made of."""
    if (work / "manifest.json").exists():
        return json.loads((work / "manifest.json").read_text())
    work.mkdir(parents=True, exist_ok=True)
    manifest, texts = {}, {}
    for corpus, files in sources().items():
        hashed = hashlib.sha256()
        for name, path in files:
            content = path.read_bytes()
            hashed.update(f"{name} {hashlib.sha256(content).hexdigest()}\n".encode())
            split = "held_out" if zlib.crc32(name.encode()) % 20 == 0 else "train"
            texts.setdefault((corpus, split), []).append(content.decode("utf-8", errors="replace"))
        manifest[corpus] = {"files": len(files), "sha256": hashed.hexdigest()}
    console.print("Training the tokenizer ...")
    tokenizer = train_tokenizer(texts["library", "train"], SHAPE.vocab_size)
    tokenizer.save_pretrained(work / "tokenizer")
    for (corpus, split), contents in texts.items():
        rows = windows(tokenizer, contents, LENGTH)
        manifest[corpus][f"{split}_tokens"] = rows.numel()
        generator = torch.Generator().manual_seed(0)
        if split == "held_out":
            rows = rows[torch.randperm(len(rows), generator=generator)[:HELD_OUT_WINDOWS]]
        torch.save(rows.to(torch.int16), work / f"{corpus}.{split}.pt")
    (work / "manifest.json").write_text(json.dumps(manifest, indent=2))
    return manifest


def rows_of(work: Path, corpus: str, split: str, seed: int | None = None) -> list[dict]:
    ids = torch.load(work / f"{corpus}.{split}.pt").long()
    if seed is not None:
        ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))]
    return [{"input_ids": row, "labels": row} for row in ids]


# --- the arms


def from_scratch(arm: str, seed: int):
    """The arms of a seed start from the same weights."""
    set_seed(seed)
    prenorm = AutoModelForCausalLM.from_config(SHAPE, dtype=torch.float32)
    if arm == "prenorm":
        return prenorm
    blocks = {"block_size": 1} if arm == "full" else {"num_blocks": NUM_BLOCKS}
    model = AttnResForCausalLM(AttnResConfig.from_base_config(SHAPE, attn_res_scale_norm_eps=False, **blocks))
    model.load_state_dict(prenorm.state_dict(), strict=False)
    return model


def continued(arm: str, base: Path, work: Path):
    """A model for continued training from the PreNorm checkpoint `base`."""
    if arm in ("prenorm", "lora_prenorm"):
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    else:
        converted = work / f"{base.name}-{'full' if arm == 'full' else 'block'}-{os.getpid()}"
        if arm == "full":
            convert(base, converted, full=True, verify=False)
        else:
            convert(base, converted, num_blocks=NUM_BLOCKS, verify=False)
        model = AttnResForCausalLM.from_pretrained(converted, dtype=torch.float32)
    if arm == "random_queries":
        set_seed(0)
        torch.nn.init.normal_(model.model.depth_queries.query, std=0.02)
    if arm == "recency_bias":
        add_recency_bias(model)
    if arm == "queries" or arm.startswith("sweep_queries"):
        model = get_peft_model(model, queries_config())
    if arm == "lora_block":
        # The queries' parameters are taken from the rank of one kind of layer, so that both arms train equally many
        shape = {"r": LORA_RANK, "lora_alpha": 2 * LORA_RANK, "rank_pattern": {"down_proj": LORA_RANK - 1}}
        model = get_peft_model(model, lora_config(**shape, alpha_pattern={"down_proj": 2 * LORA_RANK - 2}))
    if arm == "lora_prenorm":
        shape = {"r": LORA_RANK, "lora_alpha": 2 * LORA_RANK}
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", **shape))
    return model


class RecencyBiasedStream(DepthStream):
    """With a constant on the score of the newest source, as others start conversions. No part of the product."""

    def read(self, norm=None):
        query = self.queries[self.site : self.site + 1]
        scores = [source_scores(query, source, self.eps)[..., 0] for source in self.sources]
        scores[-1] = scores[-1] + RECENCY_BIAS
        weights = depth_weights(scores)
        if self.recorder is not None:
            self.recorder.weights[self.site] = weights
        mix = mix_and_norm(weights * len(scores) if self.sums else weights, self.sources, norm=None)
        if self.cast is not None:
            mix = mix.to(self.cast)
        return mix if norm is None else norm_of(norm, mix)


def add_recency_bias(model):
    start_stream = model.model.start_stream

    def start_biased_stream(*args, **kwargs):
        stream = start_stream(*args, **kwargs)
        return RecencyBiasedStream(**{field.name: getattr(stream, field.name) for field in fields(stream)})

    model.model.start_stream = start_biased_stream


def train(run: Run, work: Path) -> dict:
    """Train one run; its figures. Saves the checkpoint that others continue from."""
    torch.set_num_threads(1)
    start = time.time()
    pretrain = run.stage == "pretrain"
    corpus = "library" if pretrain else "packages"
    model = from_scratch(run.arm, run.seed) if pretrain else continued(run.arm, work / run.needs, work)
    arguments = AttnResTrainingArguments(
        **TRAINING,
        output_dir=str(work / "trainer"),
        max_steps=run.steps,
        learning_rate=run.learning_rate,
        query_learning_rate=run.query_learning_rate,
        query_weight_decay=run.query_weight_decay,
        warmup_steps=run.steps // 20,
        train_sampling_strategy="sequential",
        eval_steps=run.steps // 6,
        eval_on_start=True,
        logging_steps=run.steps // 12,
        disable_tqdm=True,
        seed=run.seed,
    )
    trainer = AttnResTrainer(
        model=model,
        args=arguments,
        train_dataset=rows_of(work, corpus, "train", run.seed)[: run.steps * BATCH],
        eval_dataset=rows_of(work, corpus, "held_out"),
    )
    trainer.train()
    if run.name == f"pretrain-prenorm-seed{run.seed}":
        AutoTokenizer.from_pretrained(work / "tokenizer").save_pretrained(work / run.name)
        model.save_pretrained(work / run.name)
    history = trainer.state.log_history
    result = {
        "run": asdict(run),
        "trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "held_out_loss": {entry["step"]: entry["eval_loss"] for entry in history if "eval_loss" in entry},
        "train_loss": {entry["step"]: entry["loss"] for entry in history if "loss" in entry},
        "depth_entropy": {entry["step"]: entry["depth_entropy"] for entry in history if "depth_entropy" in entry},
        "query_norm": {entry["step"]: entry["query_norm"] for entry in history if "query_norm" in entry},
        "site_entropy": {
            key.removeprefix("depth/entropy_"): value
            for key, value in next((e for e in reversed(history) if "depth_entropy" in e), {}).items()
            if key.startswith("depth/entropy_")
        },
        "seconds": time.time() - start,
        "versions": {name: metadata.version(name) for name in ("torch", "transformers", "peft", *PACKAGES)},
        "python": sys.version.split()[0],
    }
    return result


def save(result: dict, path: Path):
    write_file(path, json.dumps(result, indent=1) + "\n")


@app.callback()
def study():
    """What Attention Residuals bring to a small model."""


@app.command("run")
def run_all(
    work: Annotated[Path, typer.Option(help="Folder for windows and checkpoints.")] = Path("study-work"),
    results: Annotated[Path, typer.Option(help="Folder for the figures of every run.")] = RESULTS,
    jobs: Annotated[int, typer.Option(help="Runs at a time, each on one thread.")] = 2,
    only: Annotated[str, typer.Option(help="Only runs with this in their name.")] = "",
):
    """Train what has no result yet."""
    manifest = prepare(work)
    save(manifest, results / "manifest.json")
    todo = [run for run in all_runs() if only in run.name]
    made = {run.name for run in all_runs() if (work / run.name / "config.json").exists()}
    todo = [
        run
        for run in todo
        if not (results / "runs" / f"{run.name}.json").exists()
        or (run.arm == "prenorm" and run.stage == "pretrain" and run.name not in made)
    ]
    with (
        ProcessPoolExecutor(jobs, get_context("spawn"), max_tasks_per_child=1) as pool,
        Progress(console=console) as progress,
    ):
        bar = progress.add_task("Training", total=len(todo))
        running = {}
        while todo or running:
            for run in list(todo):
                if len(running) < jobs and run.needs in (None, *made):
                    todo.remove(run)
                    running[pool.submit(train, run, work)] = run
            if not running:
                raise ValueError(f"`{todo[0].name}` needs `{todo[0].needs}`, which is not there: run it first.")
            future = next(as_completed(running))
            run = running.pop(future)
            result = future.result()
            save(result, results / "runs" / f"{run.name}.json")
            if (work / run.name / "config.json").exists():
                made.add(run.name)
            last = list(result["held_out_loss"].values())[-1]
            progress.advance(bar)
            console.print(f"{run.name}: held-out loss {last:.4f}, {result['seconds']:.0f} s", highlight=False)
    console.print(f"Wrote {results}/runs/*.json; `python benchmarks/study.py report` makes the tables and figures.")


@app.command()
def speed(
    results: Annotated[Path, typer.Option(help="Folder for the figures.")] = RESULTS,
    pairs: Annotated[int, typer.Option(help="Alternating steps of each model.")] = 25,
):
    """Seconds and activation memory of a training step, the three models in turn in one process on one thread."""
    torch.set_num_threads(1)
    models = {arm: from_scratch(arm, 0).train() for arm in ("prenorm", "block", "full")}
    ids = torch.randint(0, SHAPE.vocab_size, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))

    def step_of(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def step():
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    seconds = alternate([step_of(model) for model in models.values()], pairs, "Training steps")
    sizes = {arm: activation_bytes(model, LENGTH, checkpointing=False) for arm, model in models.items()}
    figures = {}
    for i, arm in enumerate(models):
        ratios = seconds[:, i] / seconds[:, 0]
        figures[arm] = {
            "seconds": seconds[:, i].median().item(),
            "tokens_per_second": BATCH * LENGTH / seconds[:, i].median().item(),
            "ratio": ratios.median().item(),
            "ratio_quartiles": ratios.quantile(torch.tensor([0.25, 0.75], dtype=ratios.dtype)).tolist(),
            "activations": sizes[arm] / sizes["prenorm"],
        }
    save({"figures": figures, "machine": platform.processor() or platform.machine()}, results / "speed.json")
    console.print(figures)


# --- tables and figures


LABELS = {
    "prenorm": "PreNorm",
    "block": "8 blocks",
    "full": "Full",
    "queries": "8 blocks, queries alone",
    "random_queries": "8 blocks, queries from N(0, 0.02)",
    "recency_bias": f"8 blocks, recency bias of {RECENCY_BIAS:g}",
    "lora_prenorm": "LoRA on PreNorm",
    "lora_block": "LoRA and queries, 8 blocks",
}
COLOURS = dict(zip(LABELS, ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#000000", "#56B4E9")))


def read_runs(results: Path) -> dict[tuple[str, str], dict[int, dict]]:
    """By stage and arm, and then by seed."""
    found: dict[tuple[str, str], dict[int, dict]] = {}
    for run in all_runs():
        path = results / "runs" / f"{run.name}.json"
        if path.exists():
            found.setdefault((run.stage, run.arm), {})[run.seed] = json.loads(path.read_text())
    return found


def last_loss(result: dict) -> float:
    return list(result["held_out_loss"].values())[-1]


def table_of(found, stage: str, arms: list[str]) -> str:
    """Final held-out losses of the arms, and their differences from the first one, seed by seed."""
    header = (
        f"| | parameters | held-out loss (SD) | against {LABELS[arms[0]]}, by seed | mean [95 %] | depth entropy |"
    )
    lines = [header, "|---|---|---|---|---|---|"]
    baseline = found.get((stage, arms[0]), {})
    for arm in arms:
        runs = found.get((stage, arm), {})
        if not runs:
            continue
        losses = [last_loss(run) for run in runs.values()]
        spread = f" ({statistics.stdev(losses):.3f})" if len(losses) > 1 else ""
        differences = [last_loss(run) - last_loss(baseline[seed]) for seed, run in runs.items() if seed in baseline]
        cells = ["", ""]
        if arm != arms[0] and len(differences) > 1:
            interval = stats.ttest_1samp(differences, 0).confidence_interval()
            mean = statistics.mean(differences)
            cells = [
                ", ".join(f"{d:+.4f}" for d in differences),
                f"{mean:+.4f} [{interval[0]:+.4f}, {interval[1]:+.4f}]",
            ]
        entropies = [list(run["depth_entropy"].values())[-1] for run in runs.values() if run["depth_entropy"]]
        entropy = f"{statistics.mean(entropies):.3f}" if entropies else ""
        trained = next(iter(runs.values()))["trainable_parameters"]
        loss = f"{statistics.mean(losses):.4f}{spread}"
        lines.append(f"| {LABELS[arm]} | {trained:,} | {loss} | {cells[0]} | {cells[1]} | {entropy} |")
    return "\n".join(lines)


def sweep_table(found) -> str:
    lines = ["| query learning rate | decay 0 | decay 0.1 | queries alone |", "|---|---|---|---|"]
    for lr in SWEEP:
        names = (f"sweep_lr{lr:g}_decay0", f"sweep_lr{lr:g}_decay0.1", f"sweep_queries_lr{lr:g}")
        runs = [found.get(("continue", name), {}).get(0) for name in names]
        lines.append(
            f"| {lr:g} | " + " | ".join("" if run is None else f"{last_loss(run):.4f}" for run in runs) + " |"
        )
    return "\n".join(lines)


def plot_differences(found, stem: Path) -> list[Path]:
    """Held-out loss less that of PreNorm with the same seed, over the steps: every seed thin, their mean bold."""
    panels = (
        ("pretrain", ["prenorm", "block", "full"], "from scratch"),
        ("continue", ["prenorm", "block", "full", "queries", "random_queries", "recency_bias"], "continued"),
        ("continue", ["lora_prenorm", "lora_block"], "adapters"),
    )
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.8))
    for axis, (stage, arms, title) in zip(axes, panels):
        baseline = found.get((stage, arms[0]), {})
        for arm in arms[1:]:
            curves = {
                seed: {
                    int(step): loss - baseline[seed]["held_out_loss"][step]
                    for step, loss in run["held_out_loss"].items()
                }
                for seed, run in found.get((stage, arm), {}).items()
                if seed in baseline
            }
            for curve in curves.values():
                axis.plot(list(curve), list(curve.values()), color=COLOURS[arm], linewidth=0.7, alpha=0.5)
            if curves:
                steps = list(next(iter(curves.values())))
                mean = [statistics.mean(curve[step] for curve in curves.values()) for step in steps]
                axis.plot(steps, mean, color=COLOURS[arm], linewidth=2, label=LABELS[arm])
        axis.axhline(0, color=COLOURS["prenorm"], linewidth=1)
        axis.set(title=title, xlabel="step", ylabel=f"held-out loss less that of {LABELS[arms[0]]}")
        axis.set_yscale("symlog", linthresh=0.02)
        low, high = axis.get_ylim()
        ticks = [-0.2, -0.1, -0.05, -0.02, -0.01, 0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2]
        axis.set_yticks([tick for tick in ticks if low <= tick <= high])  # others would stretch the axis
        axis.yaxis.set_major_formatter(lambda tick, _: f"{tick:+g}" if tick else "0")
        axis.minorticks_off()
        axis.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncol=2)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    figure.suptitle(
        "Below the line is better than PreNorm (scale linear within 0.02, logarithmic outside)", fontsize=10
    )
    figure.tight_layout()
    paths = write_figure(figure, stem)
    plt.close(figure)
    return paths


@app.command()
def report(results: Annotated[Path, typer.Option(help="Folder with the figures of every run.")] = RESULTS):
    """Write table.md and the figures anew, from the results alone."""
    plt.rcParams["svg.hashsalt"] = "study"
    found = read_runs(results)
    manifest = json.loads((results / "manifest.json").read_text())
    any_run = next(iter(next(iter(found.values())).values()))
    steps = {run.stage: run.steps for run in all_runs()}
    per_step = BATCH * LENGTH
    sections = [
        "# What Attention Residuals bring to a small model",
        f"A Qwen3 of 12 layers, hidden size 64, 0.7M parameters. From scratch: {steps['pretrain']} steps of {per_step}"
        f" tokens of the standard library ({manifest['library']['files']} files). Continued: {steps['continue']} steps"
        f" on packages ({', '.join(PACKAGES)}; {manifest['packages']['files']} files) from the PreNorm checkpoint."
        f" Held-out loss over {HELD_OUT_WINDOWS * LENGTH} tokens of files left out. Python {any_run['python']}, torch"
        f" {any_run['versions']['torch']}, transformers {any_run['versions']['transformers']}, CPU, fp32.",
        "Depth entropy is that of the depth weights over its largest value: 1 reads all depths alike, as PreNorm.",
        "## From scratch",
        table_of(found, "pretrain", ["prenorm", "block", "full"]),
        "## Continued from the same PreNorm checkpoint",
        table_of(found, "continue", ["prenorm", "block", "full", "queries", "random_queries", "recency_bias"]),
        f"Peak learning rates: 1e-3 for weights, {QUERY_LEARNING_RATE:g} for queries beside them and"
        f" {QUERIES_ALONE_LEARNING_RATE:g} for queries alone; queries are not decayed.",
        "## Adapters, at equal steps and equal numbers of trained parameters",
        table_of(found, "continue", ["lora_prenorm", "lora_block"]),
        "## Learning rate and decay of the queries (seed 0; held-out loss at the end)",
        sweep_table(found),
    ]
    if (results / "speed.json").exists():
        lines = ["| | tokens/s | time of a step against PreNorm (quartiles) | activations |", "|---|---|---|---|"]
        for arm, figure in json.loads((results / "speed.json").read_text())["figures"].items():
            low, high = figure["ratio_quartiles"]
            ratio = f"{figure['ratio']:.2f} ({low:.2f} to {high:.2f})"
            lines.append(
                f"| {LABELS[arm]} | {figure['tokens_per_second']:.0f} | {ratio} | {figure['activations']:.2f} |"
            )
        sections += ["## What it costs here (one thread, 25 alternating steps)", "\n".join(lines)]
    sections.append("![differences](differences.png)")
    write_file(results / "table.md", "\n\n".join(sections) + "\n")
    paths = [results / "table.md", *plot_differences(found, results / "differences")]
    for path in paths:
        console.print(f"Wrote {path}", highlight=False)


if __name__ == "__main__":
    app()
