# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The study's runs, the text that they read and the models that they train; `study.py` is its program."""

import hashlib
import json
import os
import sysconfig
import zlib
from dataclasses import dataclass, fields, replace
from importlib import metadata
from pathlib import Path
from typing import Annotated

import torch
import typer
from peft import LoraConfig, get_peft_model
from rich.console import Console
from transformers import AutoModelForCausalLM, Qwen3Config, set_seed

from attnres import AttnResConfig, AttnResForCausalLM
from attnres.conversion import convert
from attnres.data.text import train_tokenizer, windows
from attnres.depth.definition import mix_by_definition
from attnres.depth.norms import norm_of
from attnres.depth.stream import DepthStream
from attnres.training.adapters import lora_config, queries_config


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
# Options of the studies' commands
Work = Annotated[Path, typer.Option(help="Folder for windows and models.")]
Results = Annotated[Path, typer.Option(help="Folder with the figures of every run.")]
console = Console()


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


def prepare(work: Path, manifest: Path | None = None) -> dict:
    """Tokenizer and windows of both corpora under `work`, and what they were made of.

    Args:
        manifest: what earlier results were made of, if there are any.

    Raises:
        typer.BadParameter: if that is another text.
    """
    made_of = _make_windows(work)
    if manifest is not None:
        check_text(made_of, manifest, work)
    return made_of


def check_text(made_of: dict, manifest: Path, work: Path):
    """Refuse the text in `work` if earlier results, whose `manifest` there may be, were made of another."""
    if manifest.exists() and json.loads(manifest.read_text()) != made_of:
        raise typer.BadParameter(f"The text in {work} is not that of {manifest}: use the versions of constraints.txt.")


def _make_windows(work: Path) -> dict:
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
            order = torch.randperm(len(rows), generator=generator)
            # To choose by, where nothing is chosen by what it is judged on
            torch.save(
                rows[order[HELD_OUT_WINDOWS : 2 * HELD_OUT_WINDOWS]].to(torch.int16), work / f"{corpus}.tuning.pt"
            )
            rows = rows[order[:HELD_OUT_WINDOWS]]
        torch.save(rows.to(torch.int16), work / f"{corpus}.{split}.pt")
    (work / "manifest.json").write_text(json.dumps(manifest, indent=2))
    return manifest


def rows_of(work: Path, corpus: str, split: str, seed: int | None = None) -> list[dict]:
    ids = torch.load(work / f"{corpus}.{split}.pt").long()
    if seed is not None:
        ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))]
    return [{"input_ids": row, "labels": row} for row in ids]


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
        scores = self._scores()
        scores[-1] = scores[-1] + RECENCY_BIAS
        weights = torch.softmax(torch.stack(scores, dim=-1), dim=-1)
        if self.recorder is not None:
            self.recorder.weights[self.site] = weights
        mix = mix_by_definition(weights * len(scores) if self.scale_by_sources else weights, self.sources)
        if self.pending_dtype is not None:
            mix = mix.to(self.pending_dtype)
        return mix if norm is None else norm_of(norm, mix)


def add_recency_bias(model):
    start_stream = model.model.start_stream

    def start_biased_stream(*args, **kwargs):
        stream = start_stream(*args, **kwargs)
        return RecencyBiasedStream(**{field.name: getattr(stream, field.name) for field in fields(stream)})

    model.model.start_stream = start_biased_stream
