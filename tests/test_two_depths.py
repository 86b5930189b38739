# SPDX-License-Identifier: Apache-2.0
"""The study of two depths: which run comes next, and what its table says. Nothing is trained here."""

import itertools
import json
import math
import random
import statistics
from collections import Counter, defaultdict
from dataclasses import asdict

import pytest
import torch
import typer

from attnres.utils.files import append_json
from studies.kept_stream import study as kept_stream
from studies.two_depths import equal_time, warmup
from studies.two_depths import study as two_depths
from studies.two_depths.study import (
    ARMS,
    DEPTHS,
    FURTHER,
    IN_TIME,
    RATES,
    SCALED,
    SEEDS,
    STEPS,
    TUNING_SEEDS,
    chosen_rate,
    make_model,
    next_run,
    report,
)


SHIFTS = {("deep", "blocks"): -0.2, ("wide", "blocks"): -0.02, ("deep", "full"): 0.1}


def made_up(run, noise):
    """On judging windows another rate looks best than on those for tuning."""
    loss = 4 + run.seed / 100 + SHIFTS.get((run.depth, run.arm), 0) + noise.gauss(0, 0.004) - 0.1 * (run.steps > STEPS)
    return {
        "run": asdict(run),
        "tuning_loss": loss + 10 * abs(run.learning_rate - (8e-3 if run.arm == "prenorm" else 1.6e-2)),
        "judging_loss": loss + 10 * abs(run.learning_rate - 4e-3),
        "parameters": 1000,
    }


@pytest.fixture(scope="module")
def runs():
    """Results of all runs of the protocol, made up."""
    found, noise = {}, random.Random(0)
    while run := next_run(found):
        found[run] = made_up(run, noise)
    return found


def test_rates_are_chosen_by_three_seeds(runs):
    for depth in DEPTHS:
        assert chosen_rate(runs, depth, "prenorm") == 8e-3  # on other windows than those that are reported
        for arm in ARMS:
            rates = RATES if arm == "prenorm" else (*RATES, 3.2e-2)  # further on, where the best is at the end
            of_arm = [r for r in runs if (r.depth, r.arm, r.steps) == (depth, arm, STEPS)]
            seeds = dict.fromkeys(rates, TUNING_SEEDS) | {chosen_rate(runs, depth, arm): SEEDS}
            assert sorted((r.learning_rate, r.seed) for r in of_arm) == [(r, s) for r in rates for s in seeds[r]]
        twice = [r for r in runs if r.depth == depth and r.steps == 2 * STEPS]
        assert [(r.arm, r.learning_rate, r.seed) for r in twice] == [("prenorm", 8e-3, s) for s in SEEDS]


def test_baselines_that_were_added_have_rates_of_their_own(runs):
    for depth, steps, rates in ((SCALED, STEPS, RATES), ("deep", IN_TIME, (8e-3, 1.6e-2, 3.2e-2, 4e-3))):
        of_baseline = [(r.arm, r.learning_rate, r.seed) for r in runs if (r.depth, r.steps) == (depth, steps)]
        seeds = dict.fromkeys(rates, TUNING_SEEDS) | {8e-3: SEEDS}
        assert sorted(of_baseline) == sorted(("prenorm", r, s) for r in rates for s in seeds[r])


def test_report(runs, tmp_path):
    # At 3.2e-2, where its sweep did not come, PreNorm is better than at the rate that was chosen
    further, noise = {}, random.Random(1)
    while run := next_run(runs | further, "deep", FURTHER):
        result = made_up(run, noise)
        further[run] = result | {
            "tuning_loss": 3 + abs(run.learning_rate - 3.2e-2),
            "judging_loss": 3 + run.seed / 100,
        }
    assert sorted(r.learning_rate for r in further) == [3.2e-2] * 5 + [6.4e-2] * 3
    for name, results in (("runs", runs), ("further_rates", further)):
        for result in results.values():
            append_json(tmp_path / f"{name}.jsonl", result)
    with pytest.raises(typer.BadParameter, match="go on with `run`, and then `speed`"):
        report(tmp_path)
    speeds = {depth: {arm: {"ratio_quartiles": [1.4, 1.5, 1.6]} for arm in ARMS} for depth in DEPTHS}
    (tmp_path / "speed.json").write_text(json.dumps(speeds))
    report(tmp_path)
    rows = [line.split(" | ") for line in (tmp_path / "table.md").read_text().splitlines() if line.startswith("| ")]
    means = {
        (cells[0][2:], *cells[1:3]): cells[4]
        for cells in rows
        if cells[0][2:] in ("equal tokens", "equal time", "deep less wide")
    }

    def judging(depth, arm, steps=STEPS):
        rate = chosen_rate(runs, depth, arm)
        return [
            result["judging_loss"]
            for run, result in runs.items()
            if (run.depth, run.arm, run.steps, run.learning_rate) == (depth, arm, steps, rate)
        ]

    for depth in DEPTHS:
        blocks, once = (statistics.mean(judging(depth, arm)) for arm in ("blocks", "prenorm"))
        twice = statistics.mean(judging(depth, "prenorm", 2 * STEPS))
        equal_tokens = blocks - once
        equal_time = blocks - (once + math.log(1.5, 2) * (twice - once))
        assert f"{equal_tokens:+.3f} [" in means["equal tokens", depth, "6 blocks"]
        assert f"{equal_time:+.3f} [" in means["equal time", depth, "6 blocks"]
    assert means["deep less wide", "both", "6 blocks"].startswith("**-0.1")
    beside_added = {cells[0][2:]: cells[2] for cells in rows if len(cells) == 3}
    own, scaled = (statistics.mean(judging(depth, "prenorm")) for depth in ("deep", SCALED))
    in_time = statistics.mean(judging("deep", "prenorm", IN_TIME))
    assert beside_added["PreNorm, scaled start, less PreNorm"].startswith(f"{scaled - own:+.3f} [")
    blocks = statistics.mean(judging("deep", "blocks"))
    assert beside_added["6 blocks, less PreNorm, 825 steps"].startswith(f"{blocks - in_time:+.3f} [")
    assert beside_added["PreNorm, more rates"].startswith("3.020 (")
    assert "**0.008: " in next(
        cells[4] for cells in rows if cells[0][2:] == "24 layers of 48" and cells[1] == "PreNorm"
    )
    assert (tmp_path / "rates.png").exists() and (tmp_path / "rates.svg").exists()


def test_equal_time(runs, tmp_path, monkeypatch):
    """The sweep goes on while an end is as good as the best but for noise, and losses are those at the arm's time."""
    further, noise = {}, random.Random(1)
    while run := next_run(runs | further, "deep", FURTHER):
        further[run] = made_up(run, noise)
    own = {}
    while run := equal_time.next_run(runs | own):
        own[run] = made_up(run, noise)
        own[run] |= {"tuning_loss": 4 + abs(math.log2(run.learning_rate / 3.2e-2)) / 22}
    rates = 8e-3, 1.6e-2, 3.2e-2, 6.4e-2, 0.128
    of_length = [*itertools.product(rates, TUNING_SEEDS), (3.2e-2, 3), (3.2e-2, 4)]
    continued = [(IN_TIME, *rate_and_seed) for rate_and_seed in itertools.product((6.4e-2, 2e-3), TUNING_SEEDS)]
    assert [(r.steps, r.learning_rate, r.seed) for r in own] == [
        *((steps, *rate_and_seed) for steps in (757, 695) for rate_and_seed in of_length),
        *continued,
    ]
    assert {(r.depth, r.arm) for r in own} == {("deep", "prenorm")}
    for name, value in (("RESULTS", tmp_path), ("RUNS", tmp_path / "own.jsonl"), ("TABLE", tmp_path / "table.md")):
        monkeypatch.setattr(equal_time, name, value)
    monkeypatch.setattr(equal_time, "SPEED", tmp_path / "speed.json")
    for name, results in (("runs", runs), ("further_rates", further), ("own", own)):
        for result in results.values():
            append_json(tmp_path / f"{name}.jsonl", result)
    with pytest.raises(typer.BadParameter, match="continue with `run` and `speed`"):
        equal_time.report()
    ratios = {"prenorm": 1.0, "blocks": 700 / 600, "full": 1.5}
    speeds = {depth: {arm: {"ratio_quartiles": [ratio] * 3} for arm, ratio in ratios.items()} for depth in DEPTHS}
    (tmp_path / "speed.json").write_text(json.dumps({"eager": speeds, "compiled": speeds}))
    equal_time.report()
    rows = [line.split(" | ") for line in (tmp_path / "table.md").read_text().splitlines() if line.startswith("| ")]
    means = {(cells[0][2:], cells[1], cells[2]): cells[5] for cells in rows if len(cells) == 7}

    def judging(of, depth, arm, steps, rate):
        key = (depth, arm, steps, rate)
        losses = [
            result["judging_loss"] for r, result in of.items() if key == (r.depth, r.arm, r.steps, r.learning_rate)
        ]
        assert len(losses) == len(SEEDS)
        return statistics.mean(losses)

    blocks = judging(runs, "deep", "blocks", 600, 1.6e-2)
    short, long = (judging(own, "deep", "prenorm", steps, 3.2e-2) for steps in (695, 757))
    between = short + math.log(700 / 695) / math.log(757 / 695) * (long - short)
    for mode in ("eager", "compiled"):
        assert f"{blocks - between:+.3f} [" in means["24 layers of 48", "6 blocks", mode]
    longest = judging(runs, "deep", "prenorm", IN_TIME, chosen_rate(runs, "deep", "prenorm", IN_TIME))
    full = judging(runs, "deep", "full", 600, chosen_rate(runs, "deep", "full"))
    assert f"{full - longest:+.3f} [" in means["24 layers of 48", "Full", "eager"]
    once, twice = (judging(runs, "wide", "prenorm", steps, 8e-3) for steps in (600, 1200))
    full = judging(runs, "wide", "full", 600, chosen_rate(runs, "wide", "full"))
    wide = full - (once + math.log2(1.5) * (twice - once))
    assert f"{wide:+.3f} [" in means["6 layers of 96", "Full", "eager"]


def test_longer_warmup():
    """Rates are those of the lowest tuning losses, and each part is finished by the runs of the protocol."""
    first, found = {}, {}
    while run := warmup.next_run(first):
        first[run] = {"tuning_loss": 4 + abs(math.log2(run.learning_rate / 6.4e-2))}
    assert Counter((r.arm, r.learning_rate) for r in first) == {
        ("prenorm", 3.2e-2): 3,
        ("prenorm", 6.4e-2): 5,
        ("blocks", 6.4e-2): 5,
        ("blocks", 0.128): 3,
    }
    by_part = defaultdict(list)
    for part in warmup.PARTS:
        while run := warmup.next_further(first, found, part):
            found[run] = {"tuning_loss": 4 + abs(math.log2(run.learning_rate / 6.4e-2))}
            by_part[part].append((run.arm, run.steps, run.warmup_steps, run.learning_rate, run.seed))
    assert {part: len(runs) for part, runs in by_part.items()} == {
        "prenorm": 13,
        "blocks": 5,
        "in-time-35": 5,
        "in-time-70": 8,
        "new-prenorm": 5,
        "new-blocks": 5,
    }
    assert by_part["in-time-70"][-2:] == [("prenorm", 695, 70, 6.4e-2, seed) for seed in (3, 4)]
    assert by_part["new-prenorm"] == [("prenorm", 695, 35, 0.128, seed) for seed in range(5, 10)]
    assert by_part["new-blocks"] == [("blocks", 600, 60, 6.4e-2, seed) for seed in range(5, 10)]


@pytest.mark.slow
@pytest.mark.parametrize("depth", [*DEPTHS, SCALED])
def test_every_arm_starts_from_the_same_weights(depth):
    shared = make_model(depth, "prenorm", 0).state_dict()
    for arm in two_depths.FIELDS:
        own = make_model(depth, arm, 0)
        assert all(own.state_dict()[name].equal(shared[name]) for name in shared)
        assert own.config.num_sites == 2 * DEPTHS["deep" if depth == SCALED else depth]["num_hidden_layers"] + 1


@pytest.mark.slow
def test_a_scaled_start():
    """What writes to the stream is smaller, and nothing else is different."""
    plain, scaled = (make_model(depth, "prenorm", 0).state_dict() for depth in ("deep", SCALED))
    for name, tensor in plain.items():
        factor = 48**-0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
        torch.testing.assert_close(scaled[name], factor * tensor)


def test_sweeps_of_the_kept_stream():
    """They go on while an end is as good as the best but for noise, and so do those of the arms that had ended."""
    found, order = two_depths.with_further_rates(two_depths.RESULTS), []
    while run := kept_stream.next_run(found):
        found[run] = {"tuning_loss": 4 + abs(math.log2(run.learning_rate / 8e-3)) / 10}
        order.append((run.depth, run.arm))
    arms = list(dict.fromkeys(order))
    assert arms[:8] == [("deep", arm) for arm in kept_stream.FIELDS if arm != "blocks"] + [("deep", "prenorm")]
    assert arms[8:14] == [("wide", arm) for arm in [*kept_stream.FIELDS][:6]]
    assert {run.learning_rate for run in found if run.arm == "kept"} == {*RATES}
    assert {"blocks", "full", "prenorm"} >= {arm for depth, arm in arms[14:]}


def test_arms_of_the_kept_stream():
    for arm, fields in kept_stream.FIELDS.items():
        config = make_model("deep", arm, 0, kept_stream.FIELDS).config
        assert config.attn_res_stream == fields.get("attn_res_stream", "replaced")
        assert (config.attn_res_block_size, config.attn_res_scale_norm_eps) == (1 if "full" in arm else 8, False)
