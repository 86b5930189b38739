# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Reads over depth side by side: how exact each is on a small model and on a real one, and what each costs.

    python -m studies.reads.every_read run --model MODEL    # a GGUF file, a folder or a Hub id; minutes for each read
    python -m studies.reads.every_read report               # the table in docs/how_to/reads.md

What is measured lies in `studies/reads`, read by read; interrupted, it goes on from there.
"""

import json
import re
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM

from attnres import AttnResConfig, AttnResForCausalLM, set_backend
from attnres.benchmarks.twin import bench, name_of_variant, parse_variant
from attnres.conversion import convert, revert
from attnres.utils.files import write_file
from attnres.utils.timing import machine
from studies.common.pages import put_into_page


RESULTS = Path(__file__).with_name("reads.json")
PAGE = Path(__file__).parents[2] / "docs/how_to/reads.md"
# The first is the paper's own, and so is the second: how far it is from the first is the noise
READS = (
    *("8", "8:open_block=sum", "8:num_heads=4", "8:num_heads=8", "8:weights=sigmoid", "8:weights=softmax1"),
    *("8:open_block=each", "8:query=input:query_rank=16", "8:query=hybrid:query_rank=16", "8:query=input"),
    *("8:stream=kept", "8:stream=kept:num_heads=4"),
)
CASES = ("decode-1-64", "prefill-512", "train-256")
app = typer.Typer(add_completion=False, help=__doc__)
console = Console()


def fields_of(variant: str) -> dict[str, Any]:
    return {name: value for name, value in parse_variant(variant).items() if name.startswith("attn_res_")}


def exactness(variant: str) -> dict[str, float]:
    """Relative differences of a small model in fp64, whose base rounds to nothing less.

    Returns:
        `zero_query`: of the logits from those of the base, at queries of zero; `outputs`, `gradients`: of the logits
        in two phases and of the worst gradient from the plain definition, at random queries.
    """
    torch.manual_seed(0)
    base_config = AutoConfig.for_model(
        "starcoder2",
        vocab_size=97,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        residual_dropout=0.0,
        embedding_dropout=0.0,
    )
    base = AutoModelForCausalLM.from_config(base_config).double().eval()
    # 16 sublayers in blocks of 3, the last of which is short
    config = AttnResConfig.from_base_config(
        base_config, block_size=3, attn_res_scale_norm_eps=True, **fields_of(variant)
    )
    model = AttnResForCausalLM(config).double().eval()
    model.load_state_dict(base.state_dict(), strict=False)
    ids = torch.randint(0, 97, (2, 19))
    with torch.no_grad():
        zero_query = _relative(model(ids).logits, base(ids).logits)
        for parameter in model.model.depth_queries.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
        fast = model(ids).logits
    gradients = torch.autograd.grad(model(ids, labels=ids).loss, list(model.parameters()))
    set_backend("reference")
    try:
        definition = model(ids, labels=ids)
        expected = torch.autograd.grad(definition.loss, list(model.parameters()))
    finally:
        set_backend("auto")
    return {
        "zero_query": zero_query,
        "outputs": _relative(fast, definition.logits),
        "gradients": max(map(_relative, gradients, expected)),
    }


def _relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


def conversion(model: str, variant: str) -> dict[str, float]:
    """KL divergence in nats and perplexities of a converted checkpoint against its source."""
    fields = {name.removeprefix("attn_res_"): value for name, value in fields_of(variant).items()}
    with tempfile.TemporaryDirectory() as folder:
        report = convert(model, Path(folder) / "out", **fields)
    parity = report.verification.parities[0]
    return {
        "kl": parity.kl_divergence,
        "perplexity_before": parity.perplexities[0],
        "perplexity_after": parity.perplexities[1],
    }


@app.command()
def run(
    model: Annotated[str, typer.Option(help="A GGUF file, a folder or a Hub id.")],
    pairs: Annotated[int, typer.Option(min=1, help="Alternating runs of each timing.")] = 7,
):
    """Measure."""
    of_machine = machine("cpu")  # before results are written, which would make the commit a dirty one
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"reads": {}}
    for variant in READS:
        of_read = results["reads"].setdefault(variant, {})
        if not of_read:
            console.rule(name_of_variant(variant))
            of_read |= exactness(variant) | conversion(model, variant)
            write_file(RESULTS, json.dumps(results, indent=1) + "\n")
    timed = {row["model"] for row in results.get("times", ())}
    if not {name_of_variant(variant) for variant in READS} <= timed:  # side by side, so again all of them
        results |= {"machine": of_machine, "model": Path(model).name, "pairs": pairs}
        with tempfile.TemporaryDirectory() as folder:
            if Path(model).suffix == ".gguf":
                convert(model, Path(folder) / "attnres", verify=False)
                revert(Path(folder) / "attnres", Path(folder) / "base", verify=False)
                model = str(Path(folder) / "base")
            measured = bench(Path(folder) / "bench", model=model, variants=READS, cases=CASES, pairs=pairs)
        results["times"] = measured["time"]
        write_file(RESULTS, json.dumps(results, indent=1) + "\n")
    report()


@app.command()
def report():
    """Put the table into the page."""
    results = json.loads(RESULTS.read_text())
    put_into_page(PAGE, "reads", table(results))


def table(results: dict[str, Any]) -> str:
    lines = [
        "| read | zero queries | definition | gradients | KL | perplexity | decode | prefill | step |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    first = name_of_variant(READS[0])
    for variant in READS:
        of_read, name = results["reads"][variant], name_of_variant(variant)
        cells = [f"{of_read[field]:.0e}" for field in ("zero_query", "outputs", "gradients")]
        cells += [f"{of_read['kl']:.1e}", f"{of_read['perplexity_after']:.4f}"]
        for case in CASES:
            times = {row["model"]: row for row in results["times"] if row["case"] == case}
            cells.append(
                "; ".join(f"{times[name][of] / times[first][of]:.2f}" for of in ("fastest_ratio", "median_ratio"))
            )
        words = re.sub("^8 blocks,? ?", "", name) or "the paper's"
        if variant == READS[1]:
            words = "the paper's, again"
        lines.append(f"| {words} | {' | '.join(cells)} |")
    of_machine = results["machine"]
    of_first = {row["case"]: row for row in results["times"] if row["model"] == first}
    decode, prefill, step = (
        f"{of_first[case]['fastest_ratio']:.2f}; {of_first[case]['median_ratio']:.2f}" for case in CASES
    )
    lines += [
        "",
        f"Measured with `python -m studies.reads.every_read run --model {results['model']} --pairs {results['pairs']}`"
        f" ({of_machine['processor']}, {of_machine['threads']} threads, commit {of_machine['commit']},"
        f" {of_machine['date']}). The perplexity of the base is"
        f" {results['reads'][READS[0]]['perplexity_before']:.4f}. The first row takes {decode} times as long as the"
        f" PreNorm twin in decoding, {prefill} in prefill and {step} in a step.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    app()
