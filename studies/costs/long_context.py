# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Memory of a long prompt, in one piece and in chunks. `python -m studies.costs.long_context`

While a prompt is read the block cache holds every closed block of all its tokens. They are of no use to the tokens
behind them, so with `prefill_chunk_size` no more than the blocks of one chunk are ever there:

    tokens * hidden * (blocks * bytes + sites that share phase 1 * 4) + tokens * sites * blocks * 4

Each figure is from a process of its own: how far its peak lies above what it needed with the model loaded.
"""

import itertools
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from transformers import AutoModelForCausalLM

from attnres import AttnResConfig
from attnres.depth.two_phases import end_of_chunk
from attnres.utils.files import write_file
from attnres.utils.timing import machine


RESULTS = Path(__file__).parent / "long_context"
SHAPE = {
    "base_model_type": "qwen3",
    "vocab_size": 1000,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 131072,
    "attn_res_block_size": 2,
    "eos_token_id": None,
}
# Qwen3-8B in bf16 with 8 blocks: what the formula says where nothing here could run it
LARGE = {"hidden_size": 4096, "num_layers": 36, "num_blocks": 8, "itemsize": 2, "tokens": 131072}
console = Console()


def block_cache_bytes(tokens: int, hidden_size: int, num_layers: int, num_blocks: int, itemsize: int) -> int:
    """Values, mixes of the sites that share phase 1 in fp32, and scores in fp32."""
    sublayers = 2 * num_layers
    block_size = -(-sublayers // num_blocks)
    sources = 1 + sublayers // block_size  # the embedding and what closes: a last, shorter block stays open
    chunk = end_of_chunk(0, block_size, sublayers + 1)
    return tokens * (hidden_size * (sources * itemsize + chunk * 4) + sources * (sublayers + 1) * 4)


def megabytes_of_peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(tokens: int, chunk: int | None, twin: bool):
    """One cell, printed as JSON."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = AttnResConfig(**SHAPE)
    model = AutoModelForCausalLM.from_config(config.to_base_config() if twin else config).eval()
    model.generate(torch.ones(1, 8, dtype=torch.long), max_new_tokens=2, do_sample=False)
    before = megabytes_of_peak()
    ids = torch.randint(0, 1000, (1, tokens))
    model.generate(ids, max_new_tokens=1, do_sample=False, prefill_chunk_size=chunk, pad_token_id=0)
    print(json.dumps({"chunk": chunk, "twin": twin, "peak_mib": megabytes_of_peak() - before}))


def main(
    tokens: Annotated[int, typer.Option(help="Length of the prompt.")] = 32768,
    chunk: Annotated[int | None, typer.Option(help="One size alone: 0 for the prompt in one piece.")] = None,
    twin: Annotated[bool, typer.Option("--twin", help="With --chunk: the PreNorm twin.")] = False,
    results: Annotated[Path, typer.Option(help="Folder for the figures.")] = RESULTS,
):
    """Peak memory of a long prompt by the size of its chunks."""
    if chunk is not None:
        return measure(tokens, chunk or None, twin)
    # What is freed goes back to the system at once: otherwise pieces of glibc's heap that no tensor fits count as well
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    peaks: dict[int, list[float]] = {}
    for size, options in itertools.product((0, 4096, 512), (["--twin"], [])):
        command = [sys.executable, __file__, "--tokens", str(tokens), "--chunk", str(size), *options]
        printed = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
        console.print(printed.splitlines()[-1])
        peaks.setdefault(size, []).append(json.loads(printed.splitlines()[-1])["peak_mib"])
    layers, hidden_size = SHAPE["num_hidden_layers"], SHAPE["hidden_size"]
    shape = {"hidden_size": hidden_size, "num_layers": layers, "num_blocks": 8, "itemsize": 4}
    lines = ["| chunk | PreNorm twin | AttnRes | block cache, by the formula |", "|---|---|---|---|"]
    for chunk_size, (of_twin, of_attnres) in peaks.items():
        size = block_cache_bytes(min(chunk_size or tokens, tokens), **shape) / 2**20
        name = f"{chunk_size:,} tokens" if chunk_size else "whole prompt"
        lines.append(f"| {name} | {of_twin:,.0f} MiB | {of_attnres:,.0f} MiB | {size:,.0f} MiB |")
    whole = block_cache_bytes(**LARGE) / 2**30
    chunked = block_cache_bytes(**{**LARGE, "tokens": 2048}) / 2**30
    lines += [
        "",
        f"Peak above the loaded model, {tokens:,} tokens, {layers} layers, hidden size {hidden_size}, 8 blocks, fp32."
        f" By the same formula Qwen3-8B with 8 blocks in bf16 would hold {whole:.1f} GiB for a prompt of"
        f" {LARGE['tokens']:,} tokens, and {chunked:.2f} GiB in chunks of 2,048.",
    ]
    found = {"machine": machine("cpu"), "tokens": tokens, "mib_of_twin_and_attnres": peaks}
    write_file(results / "long_context.json", json.dumps(found, indent=1) + "\n")
    write_file(results / "long_context.md", "\n".join(lines) + "\n")
    console.print("\n".join(lines))


if __name__ == "__main__":
    typer.run(main)
