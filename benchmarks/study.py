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
import resource
import sys
import sysconfig
import time
import zlib
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import torch
import typer
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.progress import Progress
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, set_seed

from attnres import AttnResConfig, AttnResForCausalLM
from attnres.conversion import convert
from attnres.demo import train_tokenizer, windows
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
QUERY_LEARNING_RATE = 1e-2  # the best one of the sweep
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
    for query_lr in (1e-3, 3e-3, 1e-2, 3e-2, 1e-1):
        for decay in (0.0, 0.1):
            arm = f"sweep_lr{query_lr:g}_decay{decay:g}"
            runs.append(replace(further, arm=arm, query_learning_rate=query_lr, query_weight_decay=decay))
    for query_lr in (3e-3, 1e-2, 3e-2, 1e-1):
        runs.append(replace(further, arm=f"sweep_queries_lr{query_lr:g}", query_learning_rate=query_lr))
    for seed in SEEDS:
        runs += [replace(further, arm=arm, seed=seed) for arm in ("prenorm", "block", "full", "queries")]
        runs += [replace(lora, arm=arm, seed=seed) for arm in ("lora_prenorm", "lora_block")]
        runs += [replace(further, arm=arm, seed=seed) for arm in ("random_queries", "recency_bias")]
    for seed in SEEDS:
        runs += [replace(pretrain, arm=arm, seed=seed) for arm in ("block", "full", "random_queries")]
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
    if arm == "random_queries":
        torch.nn.init.normal_(model.model.depth_queries.query, std=0.02)
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
    if arm in ("queries", *(f"sweep_queries_lr{lr:g}" for lr in (3e-3, 1e-2, 3e-2, 1e-1))):
        model = get_peft_model(model, queries_config())
    if arm == "lora_block":
        # The queries' parameters are taken from the rank of one kind of layer, so that both arms train equally many
        shape = {"r": LORA_RANK, "lora_alpha": 2 * LORA_RANK, "rank_pattern": {"down_proj": LORA_RANK - 1}}
        model = get_peft_model(model, lora_config(**shape, alpha_pattern={"down_proj": 2 * LORA_RANK - 2}))
    if arm == "lora_prenorm":
        shape = {"r": LORA_RANK, "lora_alpha": 2 * LORA_RANK}
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", **shape))
    return model


def add_recency_bias(model):
    """A constant on the score of the newest source, as others start conversions. No part of the product."""

    def biased(read):
        def forward(queries, partial, *blocks, block_cache=None):
            sources = [*blocks, partial]
            values = torch.stack(sources, dim=-2)
            keys = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + read.eps)
            scores = (keys * queries[read.site]).sum(-1)
            scores = torch.cat([scores[..., :-1], scores[..., -1:] + RECENCY_BIAS], dim=-1)
            weights = torch.softmax(scores, dim=-1)
            return (weights.unsqueeze(-1) * values).sum(-2), weights

        return forward

    model.model.open_block_cache = lambda *args, **kwargs: None
    for module in model.modules():
        if type(module).__name__ == "AttnResDepthRead":
            module.forward = biased(module)


def train(run: Run, work: Path) -> dict:
    """Train one run; its figures. Saves the checkpoint that others continue from."""
    torch.set_num_threads(1)
    start = time.time()
    pretrain = run.stage == "pretrain"
    corpus = "library" if pretrain else "packages"
    model = from_scratch(run.arm, run.seed) if pretrain else continued(run.arm, work / run.needs, work)
    arguments = AttnResTrainingArguments(
        output_dir=str(work / "trainer"),
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=2 * BATCH,
        max_steps=run.steps,
        learning_rate=run.learning_rate,
        query_learning_rate=run.query_learning_rate,
        query_weight_decay=run.query_weight_decay,
        lr_scheduler_type="cosine",
        warmup_steps=run.steps // 20,
        weight_decay=0.1,
        adam_beta2=0.95,
        train_sampling_strategy="sequential",
        eval_strategy="steps",
        eval_steps=run.steps // 6,
        eval_on_start=True,
        logging_steps=run.steps // 12,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
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
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
        "versions": {name: metadata.version(name) for name in ("torch", "transformers", "peft", *PACKAGES)},
        "python": sys.version.split()[0],
    }
    return result


def save(result: dict, path: Path):
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(result, indent=1) + "\n")
    unfinished.replace(path)


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


if __name__ == "__main__":
    app()
