# SPDX-License-Identifier: Apache-2.0
"""The study of a real model that is trained further: its order of runs, and its report. Nothing is trained here."""

import json
import math
import random
from dataclasses import asdict

import pytest
import torch
import typer

from studies.common.runs import Run
from studies.kept_stream import retrofit as kept_retrofit
from studies.long_retrofit import study as long_retrofit
from studies.retrofit import study as retrofit_study
from studies.retrofit.study import ARMS, METRICS, SEEDS, TUNING_SEED, next_run, report


@pytest.fixture(scope="module")
def runs():
    """Results of all runs, made up: losses of a paired difference, and accuracies that do not change."""
    found, generator = {}, random.Random(0)
    while run := next_run(found):
        if run.seed == TUNING_SEED:
            found[run] = {"run": asdict(run), "tuning": abs(run.learning_rate - 3e-5) + abs(run.learning_rate - 3e-4)}
            continue
        better = 0.1 * (run.arm == "full") + 0.01 * generator.random()
        metrics = dict.fromkeys(METRICS, 3.0 + 0.1 * run.seed - better) | {"quartz": 50.0}
        found[run] = {"run": asdict(run), "tuning": 3.0, "trained_parameters": 1000, **metrics}
    return found


def test_every_arm_and_seed_has_its_runs(runs):
    finals = [run for run in runs if run.seed != TUNING_SEED]
    assert len(finals) == 1 + len(SEEDS) * (len(ARMS) - 1) and len(set(finals)) == len(finals)
    rates = {run.arm: run.learning_rate for run in finals}
    assert rates["full_prenorm"] == rates["full_prenorm_double"] == rates["full"] == 3e-5
    assert rates["lora"] == rates["lora_prenorm_double"] == rates["queries"] == 3e-4
    assert [run.arm for run in finals[:3]] == ["base", "full_prenorm", "full_prenorm_double"]


def test_report(runs, tmp_path):
    results = {run: json.dumps(of) + "\n" for run, of in runs.items() if run.seed in (0, 1, 2, TUNING_SEED)}
    (tmp_path / "runs.jsonl").write_text("".join(results.values()))
    speeds = {arm: {"ratio_quartiles": [1.2, 1.2, 1.2]} for arm in ("full", "lora")}
    (tmp_path / "speed.json").write_text(json.dumps(speeds))
    report(tmp_path)
    table = (tmp_path / "table.md").read_text()
    of_new_text = table.split("## loss, new text")[1].split("##")[0].splitlines()
    (row,) = (line for line in of_new_text if "equal time" in line and "all" in line)
    differences = []
    for seed in range(3):
        of = {run.arm: result["judging"] for run, result in runs.items() if run.seed == seed}
        share = 0.2630344058337938  # the logarithm of 1.2, to the base of 2
        differences.append(of["full"] - (1 - share) * of["full_prenorm"] - share * of["full_prenorm_double"])
    assert ", ".join(f"{d:+.4f}" for d in differences) in row
    assert "the same in every seed" in table.split("## QuaRTz, points")[1]
    others = (line for run, line in results.items() if run.arm != "full" or run.seed == TUNING_SEED)
    (tmp_path / "runs.jsonl").write_text("".join(others))
    with pytest.raises(typer.BadParameter, match="0 seeds have all arms, and three are needed"):
        report(tmp_path)


def test_text_is_held_out_by_file():
    parts = retrofit_study.new_text()
    assert all(parts.values()) and not set(parts["train"]) & {*parts["tuning"], *parts["judging"]}
    assert len(parts["train"]) > 5 * (len(parts["tuning"]) + len(parts["judging"]))


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(typer.BadParameter, match="holds something else: give a new folder"):
        retrofit_study.prepare(tmp_path, tmp_path)
    assert (tmp_path / "thesis.tex").exists()


def test_another_text_is_refused(tmp_path):
    work, results = tmp_path / "work", tmp_path / "results"
    for folder in (work, results):
        folder.mkdir()
    (work / "ready").touch()
    rows = {part: torch.arange(256).view(2, 128) for part in ("train", "tuning", "judging", "old_text")}
    torch.save(rows, work / "rows.pt")
    for _ in range(2):  # the second time it is compared
        retrofit_study.prepare(work, results)
    rows["judging"][1, 7] += 1
    torch.save(rows, work / "rows.pt")
    with pytest.raises(typer.BadParameter, match="is not that of .*: use the versions of constraints.txt"):
        retrofit_study.prepare(work, results)


def runs_in_order(next_run, best_rate: float) -> tuple[list[Run], list[Run]]:
    """Sweeps and then all other runs of a study in which one rate is the best."""
    found = {}
    while run := next_run(found):
        found[run] = {"tuning": abs(math.log(run.learning_rate / best_rate))}
    runs = list(found)
    sweeps = [run for run in runs if run.seed == TUNING_SEED]
    assert runs[: len(sweeps)] == sweeps
    return sweeps, runs[len(sweeps) :]


def test_the_longer_study_has_its_runs_in_order():
    sweeps, others = runs_in_order(long_retrofit.next_run, 9e-5)
    assert {run.arm for run in sweeps} == {"prenorm", "replaced", "kept"}
    of_a_seed = [("prenorm", 500), ("replaced", 500), ("kept", 500), ("prenorm_longer", 625)]
    assert [(run.arm, run.steps) for run in others] == of_a_seed * 3
    assert {run.learning_rate for run in others} == {9e-5}


def test_the_kept_stream_has_its_runs_in_order():
    sweeps, others = runs_in_order(kept_retrofit.next_run, 3e-4)
    assert {run.arm for run in sweeps} == {*kept_retrofit.ARMS}
    assert [run.arm for run in others] == [*kept_retrofit.ARMS] * 5
    # The grid of all weights ends below 3e-4
    assert {run.learning_rate for run in others if run.arm == "full_kept"} == {2.7e-4}


def test_the_report_of_the_kept_stream(tmp_path, monkeypatch):
    finals = {arm: i / 10 for i, arm in enumerate(kept_retrofit.ARMS)}
    runs = [
        {
            "run": asdict(Run(arm, seed, 40, 3e-4)),
            **dict.fromkeys(("tuning", *retrofit_study.METRICS), 2.5 + seed * (1 + finals[arm]) / 100),
            "trained_parameters": 7,
        }
        for arm in kept_retrofit.ARMS
        for seed in (TUNING_SEED, *range(5))
    ]
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(run) + "\n" for run in runs))
    monkeypatch.setattr(kept_retrofit, "RUNS", tmp_path / "runs.jsonl")
    monkeypatch.setattr(kept_retrofit, "SPEED", tmp_path / "speed.json")
    monkeypatch.setattr(kept_retrofit, "RESULTS", tmp_path)
    (tmp_path / "speed.json").write_text(json.dumps({"full_kept": {"ratio_quartiles": [1.0, 1.05, 1.1]}}))
    kept_retrofit.report()
    lines = (tmp_path / "retrofit.md").read_text().splitlines()
    assert sum(" | equal tokens | " in line for line in lines) == 6 * len(retrofit_study.METRICS)
    assert sum(" | equal time | " in line for line in lines) == len(retrofit_study.METRICS)
    assert any(line.startswith("| all weights, kept stream | all weights, AttnRes | equal tokens") for line in lines)
