# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The read over depth alone: against other ways to write it, and how its cost grows.

    python -m studies.costs.peers run       # one block of 8 sites behind an embedding and 4 closed blocks
    python -m studies.costs.peers growth    # with depth, with the number of blocks, with the number of tokens
    python -m studies.costs.peers report    # tables and plots anew, from the results alone

All candidates compute the same: the partial sums of a block and what its sites read, in inference. They are run in
turn in one process, on one thread, and compared with the definition first. Code of others is left out where it is not
installed (`pip install fla-core liger-kernel flash-attn-res`), and all but fla's naive one need a GPU; the rest is
written down here after descriptions.
"""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import matplotlib


matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import typer  # noqa: E402
from rich.console import Console  # noqa: E402

from attnres.depth.backends import set_backend  # noqa: E402
from attnres.depth.block_cache import BlockCache  # noqa: E402
from attnres.depth.definition import depth_attention_reference  # noqa: E402
from attnres.depth.stream import DepthStream  # noqa: E402
from attnres.utils.figures import write_figure  # noqa: E402
from attnres.utils.files import write_file  # noqa: E402
from attnres.utils.timing import alternate, keep_freed_memory, machine  # noqa: E402


RESULTS = Path(__file__).parent / "peers"
HIDDEN_SIZE, NUM_SITES, NUM_CLOSED, EPS = 1024, 8, 5, 1e-6
GROWTH = {
    "sublayers": (8, 16, 32, 64, 128, 256),
    "blocks": (1, 2, 4, 8, 16, 32, 64),
    "tokens": (128, 512, 2048, 8192, 32768),
}
GROWTH_HIDDEN_SIZE = 256
OURS = "attnres"
console = Console()
app = typer.Typer(add_completion=False, help=__doc__)

# A candidate is given queries and key norms, `[sites, hidden]` each, the closed sources, and the outputs of the
# block's sublayers, and gives back what every site reads
Candidate = Callable[
    [torch.Tensor, torch.Tensor, list[torch.Tensor], list[torch.Tensor]], Callable[[], list[torch.Tensor]]
]


def at_every_site(read: Callable[[int, list[torch.Tensor]], torch.Tensor], closed, outputs) -> list[torch.Tensor]:
    """What the sites of a block read, from a function of site and sources."""
    reads, partial = [read(0, closed)], outputs[0]
    for site, output in enumerate(outputs[1:], start=1):
        reads.append(read(site, [*closed, partial]))
        partial = partial + output
    return reads


def rms_norm(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(values, (values.shape[-1],), weight, EPS)


def two_phases(queries, key_norms, closed, outputs):
    """Ours. The last of the closed sources closes within the time that is taken; the others have before."""
    cache, folded = BlockCache(), queries * key_norms
    first_site = (NUM_CLOSED - 1) * NUM_SITES
    cache.start(folded.repeat(NUM_CLOSED, 1), closed[0], NUM_SITES, EPS)
    for source in closed[:-1]:
        cache.append(source)

    def run():
        # As in the round before: the last one is still to close
        cache.num_closed, cache.chunk = NUM_CLOSED - 1, (0, 0)
        if cache.one_token is not None:
            cache.one_token.open_block = None
            del cache.one_token.scores[NUM_CLOSED - 1 :]
        cache.append(closed[-1])
        reads, partial = [cache.read(first_site)], outputs[0]
        for site, output in enumerate(outputs[1:], start=1):
            reads.append(cache.read(first_site + site, (partial,)))
            partial = partial + output
        return reads

    return run


def pseudo_code(queries, key_norms, closed, outputs):
    """The paper's pseudo-code: stack, normalise and weigh all sources at every site."""

    def read(site, sources):
        values = torch.stack(sources)
        logits = torch.einsum("d, n b t d -> n b t", queries[site], rms_norm(values, key_norms[site]))
        return torch.einsum("n b t, n b t d -> b t d", logits.softmax(0), values)

    return lambda: at_every_site(read, closed, outputs)


def fla_naive(queries, key_norms, closed, outputs):
    from fla.ops.attnres.naive import naive_attnres

    def read(site, sources):
        return naive_attnres(queries[site], sources, key_norms[site], rms_eps=EPS)

    return lambda: at_every_site(read, closed, outputs)


def fla_fused(queries, key_norms, closed, outputs):
    from fla.ops.attnres import fused_attnres

    def read(site, sources):
        return fused_attnres(queries[site], sources, key_norms[site], rms_eps=EPS)

    return lambda: at_every_site(read, closed, outputs)


def liger(queries, key_norms, closed, outputs):
    from liger_kernel.transformers.functional import liger_attn_res

    def read(site, sources):
        return liger_attn_res(torch.stack(sources), queries[site], key_norms[site], EPS)

    return lambda: at_every_site(read, closed, outputs)


def flash_attn_res(queries, key_norms, closed, outputs):
    """Two phases as well; its first one is in bf16."""
    from flash_attn_res import phase_1_batched_attention_triton_op as phase_1
    from flash_attn_res import phase_2_online_softmax_merge_triton_op as phase_2

    blocks, folded = torch.stack(closed), queries * key_norms

    def run():
        blocks[-1] = closed[-1]  # as ours does, it copies the block that closes
        mixes, lse = phase_1(blocks, folded, EPS)
        reads, partial = [mixes[0]], outputs[0]
        for site, output in enumerate(outputs[1:], start=1):
            reads.append(phase_2(partial, folded[site], mixes[site], lse[site], EPS))
            partial = partial + output
        return reads

    return run


def concatenate_and_sdpa(queries, key_norms, closed, outputs):
    """As Inkling2 in transformers: sources are concatenated, tokens are the batch of a fused attention."""

    def read(site, sources):
        values = torch.stack(sources, dim=-2).flatten(0, 1)
        keys, query = rms_norm(values, key_norms[site]), queries[site].expand(len(values), 1, -1)
        mix = F.scaled_dot_product_attention(query[:, None], keys[:, None], values[:, None], scale=1.0)
        return mix.view(sources[0].shape)

    return lambda: at_every_site(read, closed, outputs)


def per_site_cache(queries, key_norms, closed, outputs):
    """Keys of closed sources normalised once, and every site reads them all."""
    ones = torch.ones_like(key_norms[0])
    keys = [rms_norm(source, ones) for source in closed[:-1]]
    folded = queries * key_norms

    def run():
        cached = [*keys, rms_norm(closed[-1], ones)]

        def read(site, sources):
            all_keys = cached if site == 0 else [*cached, rms_norm(sources[-1], ones)]
            weights = torch.stack([key @ folded[site] for key in all_keys], dim=-1).softmax(-1)
            return torch.einsum("b t n, b t n d -> b t d", weights, torch.stack(sources, dim=-2))

        return at_every_site(read, closed, outputs)

    return run


CANDIDATES: dict[str, Candidate] = {
    OURS: two_phases,
    "the paper's pseudo-code": pseudo_code,
    "fla, naive": fla_naive,
    "concatenate and SDPA": concatenate_and_sdpa,
    "keys cached, site by site": per_site_cache,
}
CUDA_CANDIDATES: dict[str, Candidate] = {
    "fla, fused": fla_fused,
    "Liger": liger,
    "flash-attn-res": flash_attn_res,
}
PACKAGES = {fla_naive: "fla", fla_fused: "fla", liger: "liger_kernel", flash_attn_res: "flash_attn_res"}


def candidates_here(device: str) -> dict[str, Candidate]:
    """Those whose package is installed."""
    candidates = {**CANDIDATES, **(CUDA_CANDIDATES if device.startswith("cuda") else {})}
    return {
        name: make
        for name, make in candidates.items()
        if make not in PACKAGES or importlib.util.find_spec(PACKAGES[make]) is not None
    }


def seconds_of_copy(num_bytes: int, device: str) -> float:
    """Fastest of 10 copies on the device that read and write so many bytes together."""
    source = torch.empty(num_bytes // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return alternate([lambda: target.copy_(source)], 10, "copy", device).min().item()


def save(results: dict[str, Any], path: Path):
    write_file(path, json.dumps(results, indent=1) + "\n")
    console.print(f"Wrote {path}", highlight=False)


@app.command()
def run(
    results: Annotated[Path, typer.Option(help="Folder for the figures.")] = RESULTS,
    tokens: Annotated[str, typer.Option(help="Numbers of tokens, with commas.")] = "1,16,512",
    pairs: Annotated[int, typer.Option(help="Rounds in which all candidates take their turn.")] = 50,
    device: Annotated[str, typer.Option(help="cpu, or cuda, where ours are the Triton kernels.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, or bfloat16.")] = "float32",
):
    """One block of sites against the other ways to write it."""
    torch.set_num_threads(1)
    keep_freed_memory()
    if device.startswith("cuda"):
        set_backend("triton")
    torch_dtype, generator = getattr(torch, dtype), torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(device, torch_dtype)

    queries, key_norms = random(NUM_SITES, HIDDEN_SIZE) * 0.05, 1 + 0.1 * random(NUM_SITES, HIDDEN_SIZE)
    tolerance = 1e-4 if torch_dtype == torch.float32 else 3e-2
    candidates = candidates_here(device)
    records, failed = [], {}
    for count in map(int, tokens.split(",")):
        shape = (1, count, HIDDEN_SIZE)
        closed = [random(*shape) for _ in range(NUM_CLOSED)]
        outputs = [random(*shape) for _ in range(NUM_SITES)]
        expected = at_every_site(
            lambda site, sources: depth_attention_reference(queries[site] * key_norms[site], sources, EPS)[0],
            closed,
            outputs,
        )
        calls = {}
        for name, make in candidates.items():
            try:
                call = make(queries, key_norms, closed, outputs)
                reads = call()
            except Exception as error:
                if make not in PACKAGES:
                    raise
                failed[name] = f"{type(error).__name__}: {error}"
                console.print(f"`{name}` does not run here: {failed[name]}", highlight=False)
                continue
            for actual, exact in zip(reads, expected):
                if (actual - exact).abs().max() > tolerance * exact.abs().max():
                    raise ArithmeticError(f"`{name}` computes something else.")
            calls[name] = call
        with torch.no_grad():
            seconds = alternate(list(calls.values()), pairs, f"{count} tokens", device)
            # What has to be moved: every source and output read once, every read written
            num_bytes = (NUM_CLOSED + 2 * NUM_SITES - 1) * outputs[0].nbytes
            copy = seconds_of_copy(num_bytes, device)
        for i, name in enumerate(calls):
            ratios = seconds[:, i] / seconds[:, 0]
            low, median, high = (ratios.quantile(q).item() for q in (0.25, 0.5, 0.75))
            records.append(
                {
                    "tokens": count,
                    "candidate": name,
                    "median_seconds": seconds[:, i].median().item(),
                    "fastest_seconds": seconds[:, i].min().item(),
                    "median_ratio": median,
                    "quartiles": [low, high],
                    "share_of_copy_bandwidth": copy / seconds[:, i].min().item(),
                }
            )
    found = {"machine": machine(device), "pairs": pairs, "dtype": dtype, "time": records, "failed": failed}
    save(found, results / "peers.json")
    report(results)


@torch.no_grad()
def seconds_of_reads(num_sublayers: int, num_blocks: int, tokens: int, repeats: int) -> float:
    """Fastest seconds of all reads of a stack whose sublayers cost nothing."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(num_sublayers + 1, GROWTH_HIDDEN_SIZE, generator=generator) * 0.05
    outputs = [torch.randn(1, tokens, GROWTH_HIDDEN_SIZE, generator=generator) for _ in range(2)]
    block_size, cache = -(-num_sublayers // num_blocks), BlockCache()

    def reads():
        stream = DepthStream(queries, (outputs[0],), block_size=block_size, eps=EPS).keep_in(cache)
        for _ in range(num_sublayers):
            stream.read()
            stream = stream + outputs[1]
        stream.read()

    return alternate([reads], repeats, f"{num_sublayers} sublayers, {num_blocks} blocks, {tokens} tokens").min().item()


@app.command()
def growth(
    results: Annotated[Path, typer.Option(help="Folder for the figures.")] = RESULTS,
    repeats: Annotated[int, typer.Option(help="Runs of each size; the fastest counts.")] = 7,
):
    """How the time of all reads grows with one size at a time, hidden size 256."""
    torch.set_num_threads(1)
    keep_freed_memory()
    curves: dict[str, list[dict[str, Any]]] = {}
    for name, sizes in GROWTH.items():
        for size in sizes:
            shape = {"num_sublayers": 128 if name == "blocks" else 56, "num_blocks": 8, "tokens": 128}
            shape["num_sublayers" if name == "sublayers" else "num_blocks" if name == "blocks" else "tokens"] = size
            seconds = seconds_of_reads(**shape, repeats=repeats)
            curves.setdefault(name, []).append({**shape, "seconds": seconds})
    save({"machine": machine("cpu"), "hidden_size": GROWTH_HIDDEN_SIZE, "curves": curves}, results / "growth.json")
    report(results)


def table(found: dict[str, Any]) -> str:
    names = list(dict.fromkeys(record["candidate"] for record in found["time"]))
    by_key = {(record["candidate"], record["tokens"]): record for record in found["time"]}
    counts = list(dict.fromkeys(record["tokens"] for record in found["time"]))
    header = " | ".join(f"{count} token{'s' if count > 1 else ''}" for count in counts)
    lines = [f"| | {header} |", f"|---|{'---|' * len(counts)}"]
    for name in names:
        cells = []
        for count in counts:
            record = by_key.get((name, count))
            if record is None:
                cells.append("does not run")
            elif name == OURS:
                cells.append(f"{record['median_seconds'] * 1e3:.2f} ms")
            else:
                low, high = record["quartiles"]
                cells.append(f"x {record['median_ratio']:.1f} ({low:.1f} to {high:.1f})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    shares = (by_key[OURS, count]["share_of_copy_bandwidth"] for count in counts)
    lines.append(f"| share of a copy's bandwidth, {OURS} | {' | '.join(f'{share:.0%}' for share in shares)} |")
    of = found["machine"]
    caption = (
        f"One block of {NUM_SITES} sites behind {NUM_CLOSED} closed sources, hidden size {HIDDEN_SIZE},"
        f" {found['dtype']}, {of['device']} ({of['processor']}, {of['threads']} thread), {found['pairs']} rounds in"
        " turn: our median, and times as much as it (median and quartiles over the rounds)."
        f" torch {of['versions']['torch']}, commit {of['commit']}."
    )
    return "\n".join(lines) + f"\n\n{caption}\n"


def plot_growth(found: dict[str, Any], stem: Path) -> list[Path]:
    """Time per token and sublayer: flat is a cost that does not grow."""
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.2), sharey=True)
    keys = {"sublayers": "num_sublayers", "blocks": "num_blocks", "tokens": "tokens"}

    def cost(point: dict[str, Any]) -> float:
        return point["seconds"] / point["tokens"] / point["num_sublayers"] * 1e6

    highest = max(cost(point) for points in found["curves"].values() for point in points)
    for axis, (name, points) in zip(axes, found["curves"].items()):
        sizes = [point[keys[name]] for point in points]
        axis.plot(sizes, [cost(point) for point in points], "o-", color="#0072B2")
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, [f"{size:,}" for size in sizes])
        rest = {
            "sublayers": "8 blocks, 128 tokens",
            "blocks": "128 sublayers, 128 tokens",
            "tokens": "56 sublayers, 8 blocks",
        }
        axis.set(xlabel=name, title=rest[name], ylim=(0, 1.05 * highest))
        axis.title.set_fontsize(10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("µs per token and sublayer")
    figure.tight_layout()
    paths = write_figure(figure, stem)
    plt.close(figure)
    return paths


@app.command()
def report(results: Annotated[Path, typer.Option(help="Folder with the figures.")] = RESULTS):
    """Write the table and the plots anew."""
    if (results / "peers.json").exists():
        write_file(results / "peers.md", table(json.loads((results / "peers.json").read_text())))
        console.print(f"Wrote {results / 'peers.md'}", highlight=False)
    if (results / "growth.json").exists():
        for path in plot_growth(json.loads((results / "growth.json").read_text()), results / "growth"):
            console.print(f"Wrote {path}", highlight=False)


if __name__ == "__main__":
    app()
