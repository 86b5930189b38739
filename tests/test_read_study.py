# SPDX-License-Identifier: Apache-2.0
"""The study of reads: which run comes next, what its table says, and that every arm can be made."""

import json
import random
from dataclasses import asdict

import pytest
import torch
from typer.testing import CliRunner

from attnres.training.scaling.sweep import next_rate
from attnres.utils.files import append_json, read_json_lines
from studies.reads.study import (
    ARMS,
    GRID,
    LATER_ARMS,
    SEEDS,
    STEPS,
    TUNING_SEED,
    Run,
    app,
    make_model,
    next_run,
    steps_of,
    tuning_run,
)


def test_a_sweep_goes_on_until_the_best_rate_is_inside():
    losses = {}
    for rate in GRID:
        assert next_rate(losses, GRID) == rate
        losses[rate] = 4 - rate  # ever better
    assert next_rate(losses, GRID) == 2 * GRID[-1]
    assert next_rate({**losses, 2 * GRID[-1]: 5.0}, GRID) is None
    assert next_rate({rate: rate for rate in GRID}, GRID) == GRID[0] / 2


def test_runs_come_seed_by_seed_with_the_rates_that_were_chosen():
    found, order = {}, []
    while run := next_run(found):
        loss = 4 + abs(run.learning_rate - 4e-3) + SHIFTS.get(run.arm, 0)
        found[run] = {"tuning_loss": loss, "judging_loss": loss}
        order.append(run)
    tuned = [run for run in order if run.seed == TUNING_SEED]
    assert (
        order[: len(tuned)]
        == tuned
        == [tuning_run(arm, rate) for arm in ARMS if arm != "prenorm_double" for rate in GRID]
    )
    finals = order[len(tuned) :]
    assert [(run.seed, run.arm) for run in finals] == [(seed, arm) for seed in SEEDS for arm in ARMS]
    assert {run.learning_rate for run in finals} == {4e-3}


SHIFTS = {"blocks": -0.1, "full": 0.1, "prenorm_double": -0.05}


@pytest.mark.slow
def test_the_table(tmp_path):
    """Of losses that are known: what is better, what is not, and what equal time makes of it."""
    noise = random.Random(0)
    for seed in (*SEEDS, TUNING_SEED):
        for arm in ARMS:
            run = tuning_run(arm, 4e-3) if seed == TUNING_SEED else Run(arm, seed, steps_of(arm), 4e-3)
            loss = 4 + seed / 100 + SHIFTS.get(arm, 0) + noise.gauss(0, 0.004)
            result = {"run": asdict(run), "tuning_loss": loss, "judging_loss": loss, "parameters": 10}
            append_json(tmp_path / "runs.jsonl", result)
    (tmp_path / "speed.json").write_text(json.dumps({arm: {"ratio_quartiles": [2.0] * 3} for arm in ARMS}))
    assert CliRunner().invoke(app, ["report", "--results", str(tmp_path)]).exit_code == 0
    text = (tmp_path / "table.md").read_text()
    equal_tokens, equal_time = text.split("## Equal tokens, against 8 blocks")[0], text.split("## Equal time")[1]
    rows = {line.split(" | ")[0][2:]: line for line in equal_tokens.splitlines() if "[" in line}
    assert "**-" in rows["8 blocks"] and "**+" in rows["Full"] and "**" not in rows["8 blocks, sigmoid"]
    (blocks,) = (line for line in equal_time.splitlines() if line.startswith("| 8 blocks |") and "[" in line)
    assert "-0.05" in blocks or "-0.04" in blocks  # twice the time is twice the tokens
    assert "would have continued" not in text
    for seed, own in enumerate(
        [r for r in read_json_lines(tmp_path / "runs.jsonl") if r["run"]["arm"] == "blocks"][:5]
    ):
        run = Run("blocks", seed, STEPS, 3.2e-2)
        further = {
            "run": asdict(run),
            "tuning_loss": 0,
            "judging_loss": own["judging_loss"] + 0.25 + seed / 1000,
            "parameters": 10,
        }
        append_json(tmp_path / "further_rates.jsonl", further)
    assert CliRunner().invoke(app, ["report", "--results", str(tmp_path)]).exit_code == 0
    section = (tmp_path / "table.md").read_text().split("would have continued")[1].split("##")[0]
    assert "| 8 blocks | 0.032 | 4.1" in section and "+0.2520 [" in section
    # At another rate than the sweep's, a seed does not count
    for seed in (0, 1):
        results = read_json_lines(tmp_path / "runs.jsonl")
        (changed,) = (r["run"] for r in results if (r["run"]["arm"], r["run"]["seed"]) == ("blocks", seed))
        changed["learning_rate"] = 2e-3
        (tmp_path / "runs.jsonl").write_text("".join(f"{json.dumps(result)}\n" for result in results))
        assert CliRunner().invoke(app, ["report", "--results", str(tmp_path)]).exit_code == 0
        assert f"seeds {seed + 1} to {SEEDS[-1]}." in (tmp_path / "table.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("arm", [*ARMS, *LATER_ARMS])
def test_every_arm_starts_from_the_same_weights(arm):
    ids = torch.randint(3, 97, (1, 9))
    model, base = make_model(arm, 0), make_model("prenorm", 0)
    own, shared = model.state_dict(), base.state_dict()
    assert all(own[name].equal(shared[name]) for name in shared)
    assert model(ids, labels=ids).loss.isfinite()


def test_a_sweep_continues_while_an_end_is_within_the_noise():
    losses = {1: 3.0, 2: 2.0, 4: 2.004}
    assert next_rate(losses, (1, 2, 4)) is None and next_rate(losses, (1, 2, 4), noise=0.01) == 8
    assert next_rate(losses | {8: 2.02}, (1, 2, 4), noise=0.01) is None
    assert next_rate({1: 2.001, 2: 2.0, 4: 3.0}, (1, 2, 4), noise=0.01) == 0.5
