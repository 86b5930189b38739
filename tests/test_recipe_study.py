# SPDX-License-Identifier: Apache-2.0
"""The study of recipes: which run comes next, and what its table says. Nothing is trained here."""

import json
import math
import random
from dataclasses import asdict

import pytest
import torch
import typer
from tiny_models import tiny_base_model

from studies.recipe import study as recipe_study
from studies.recipe.study import AUTO, BASES, RATES, SEEDS, Run, block_sizes, make_model, next_run, report


@pytest.fixture(scope="module")
def runs():
    """Results of all runs, made up: 1e-2 is the best rate, and but for the width of 192 small blocks are better."""
    found, noise = {}, random.Random(0)
    while run := next_run(found):
        change = -0.1 + 0.05 * abs(math.log10(1e-2 if run.query_rate == AUTO else run.query_rate) + 2)
        change += 0.01 * run.block_size * (run.width < 192) + noise.gauss(0, 1e-4)
        losses = {"tuning_loss": 4 + change, "judging_loss": 5 + change, "base_tuning_loss": 4, "base_judging_loss": 5}
        found[run] = {"run": asdict(run), **losses, "measured_rate": 5e-3}
    return found


def test_every_run_is_there_once(runs):
    for width, (num_layers, size) in BASES.items():
        of_width = [run for run in runs if run.width == width]
        constant = [(run.query_rate, run.seed) for run in of_width if run.query_rate != AUTO]
        assert sorted(constant) == [(rate, seed) for rate in RATES for seed in SEEDS]
        sizes = {run.block_size for run in of_width if run.mode == "lora" and not run.start}
        assert sizes == {*block_sizes(width), size} and max(sizes) == 2 * num_layers
        assert len([run for run in of_width if run.mode == "lora_prenorm"]) == len(SEEDS)
    assert Run(96, "lora", 1, 2, AUTO, 0.2) in runs


def test_a_sweep_goes_on_beyond_its_end():
    found = {}
    while (run := next_run(found)) and run.query_rate != AUTO:
        loss = 4 - run.query_rate if run.query_rate <= 0.3 else 5
        found[run] = {"tuning_loss": loss, "base_tuning_loss": 4}
    assert [run.query_rate for run in found][-3:] == [0.9] * 3 and run.width == 48


def test_starts_differ_in_the_queries_alone(monkeypatch, tmp_path):
    """LoRA's matrices are those of the seed, whatever queries start from."""
    tiny_base_model("qwen3").save_pretrained(tmp_path / "base")
    monkeypatch.setattr(recipe_study, "make_base", lambda width, work: tmp_path / "base")

    def parameters(seed, start):
        model = make_model(Run(96, "lora", seed, 2, AUTO, start), tmp_path)
        queries, lora = {}, {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                (queries if "depth_queries" in name else lora)[name] = parameter
        return torch.cat([p.flatten() for n, p in queries.items() if n.endswith("query")]), lora

    (zero, lora), (small, same), (_, other) = parameters(1, 0.0), parameters(1, 0.2), parameters(2, 0.2)
    assert not zero.any() and small.std().item() == pytest.approx(0.2, rel=0.2)
    assert lora and all(lora[name].equal(same[name]) for name in lora)
    assert not all(lora[name].equal(other[name]) for name in lora)


@pytest.mark.slow
def test_report(runs, tmp_path):
    lines = [json.dumps(result) + "\n" for result in runs.values()]
    (tmp_path / "runs.jsonl").write_text("".join(lines))
    report(tmp_path)
    table = (tmp_path / "table.md").read_text()
    rates = [line for line in table.splitlines() if line.startswith("| 8 layers of 96 |")]
    assert "**0.01: -0.0" in rates[0] and "0.005, 0.005, 0.005" in rates[0]
    of_48, of_192 = (
        table.split(f"starts: {name}")[1].split("##")[0] for name in ("16 layers of 48", "4 layers of 192")
    )
    full = "| queries alone, blocks of 1, less blocks of 8 | "
    assert next(line for line in of_48.splitlines() if line.startswith(full)).split(" | ")[3].startswith("**-0.07")
    assert "**" not in next(line for line in of_192.splitlines() if line.startswith(full))
    assert "queries from N(0, 0.2), less from zero" in of_48 and (tmp_path / "rates.svg").exists()
    (tmp_path / "runs.jsonl").write_text("".join(lines[1:]))
    with pytest.raises(typer.BadParameter, match="more are needed: go on with `run`"):
        report(tmp_path)
