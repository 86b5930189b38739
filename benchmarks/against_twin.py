"""Time and activation memory of an AttnRes model against its PreNorm twin, in one process, alternating.

    python benchmarks/against_twin.py [--blocks 8] [--pairs 25] [--threads 2]

Both models have the shape of Qwen3-0.6B, fp32, random weights, eager. A ratio is AttnRes over twin: of the fastest
runs, and the median and quartiles over the pairs. Memory is what autograd keeps for the backward pass of the decoder,
weights not counted.
"""

import platform
import time
from collections.abc import Callable
from typing import Annotated

import torch
import transformers
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM, DynamicCache, Qwen3Config

import attnres


SHAPE = Qwen3Config(
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=True,
)


def alternate(candidates: list[Callable[[], None]], pairs: int, label: str) -> torch.Tensor:
    """Seconds per call, `[pairs, candidates]`; the order is turned round from pair to pair."""
    seconds = torch.empty(pairs, len(candidates), dtype=torch.float64)
    for candidate in candidates:
        candidate()
    for pair in track(range(pairs), description=label):
        for index in range(len(candidates))[:: 1 if pair % 2 == 0 else -1]:
            start = time.perf_counter()
            candidates[index]()
            seconds[pair, index] = time.perf_counter() - start
    return seconds


def prefill(model, length: int) -> Callable[[], None]:
    input_ids = torch.randint(0, SHAPE.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def run():
        model(input_ids, logits_to_keep=1)

    return run


def decode(model, length: int, steps: int = 8) -> Callable[[], None]:
    """Steps of one token behind a KV cache of `length` tokens."""
    cache = DynamicCache(config=model.config)
    token = torch.tensor([[5]])
    with torch.no_grad():
        model(torch.randint(0, SHAPE.vocab_size, (1, length)), past_key_values=cache, logits_to_keep=1)

    @torch.no_grad()
    def run():
        for _ in range(steps):
            model(token, past_key_values=cache)
        cache.crop(-steps)

    return run


def activation_bytes(model, length: int, checkpointing: bool) -> int:
    """Bytes of the distinct storages saved for backward by the decoder, the LM head and its loss left out."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden_states = model.model(torch.zeros(1, length, dtype=torch.long), use_cache=False).last_hidden_state
    size = sum(storages.values())
    del hidden_states
    model.gradient_checkpointing_disable()
    model.eval()
    return size


def main(
    blocks: Annotated[int, typer.Option(help="Number of blocks.")] = 8,
    pairs: Annotated[int, typer.Option(help="Alternating pairs per measurement.")] = 25,
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 2,
    prefill_length: Annotated[int, typer.Option()] = 512,
    decode_length: Annotated[int, typer.Option()] = 64,
):
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    config = attnres.AttnResConfig.from_base_config(SHAPE, num_blocks=blocks)
    models = [AutoModelForCausalLM.from_config(c, dtype=torch.float32).eval() for c in (config, SHAPE)]
    with torch.no_grad():
        models[0].model.depth_queries.query.normal_(std=0.02)

    table = Table("", "fastest", "median", "quartiles", "twin", title=f"AttnRes / PreNorm twin, {blocks} blocks")
    for label, make, unit in (
        (f"decode, KV length {decode_length}", lambda model: decode(model, decode_length), 8),
        (f"prefill, {prefill_length} tokens", lambda model: prefill(model, prefill_length), 1),
    ):
        seconds = alternate([make(model) for model in models], pairs, label)
        ratios = seconds[:, 0] / seconds[:, 1]
        low, median, high = (ratios.quantile(q).item() for q in (0.25, 0.5, 0.75))
        fastest = (seconds[:, 0].min() / seconds[:, 1].min()).item()
        twin = f"{seconds[:, 1].min().item() / unit * 1e3:.1f} ms"
        table.add_row(label, f"{fastest:.3f}", f"{median:.3f}", f"{low:.3f} to {high:.3f}", twin)
    for checkpointing in (False, True):
        sizes = [activation_bytes(model, 128, checkpointing) for model in models]
        label = "activations, 128 tokens" + (", checkpointing" if checkpointing else "")
        table.add_row(label, f"{sizes[0] / sizes[1]:.3f}", "", "", f"{sizes[1] / 2**20:.1f} MiB")
    console = Console()
    console.print(table)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, attnres {attnres.__version__}"
    console.print(f"{versions}, {threads} threads, {platform.machine()}")


if __name__ == "__main__":
    typer.run(main)
