# SPDX-License-Identifier: Apache-2.0
"""What the tables of our studies say is computed again from the raw results, in another way."""

import importlib
import itertools
import json
import math
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import typer
from scipy.stats import ttest_1samp

from attnres.eval.statistics import holm
from attnres.training.scaling.fit import fit_ladder
from attnres.training.scaling.sweep import next_rate
from attnres.utils.files import append_json
from studies.common import arms as study_arms
from studies.common import paired
from studies.common.runs import TUNING_SEED, read_runs
from studies.kept_stream import study as kept_stream
from studies.long_retrofit import study as long_retrofit
from studies.reads import ablation_table
from studies.reads import study as read_study
from studies.retrofit import study as retrofit
from studies.two_depths import study as two_depths


ROOT = Path(__file__).parents[1]
STUDIES = ROOT / "studies"
QUANTILE = {2: 4.302653, 4: 2.776445}  # of Student's t, 0.975, by degrees of freedom
REPORTS = ("small_model", "reads", "weights", "retrofit", "long_retrofit", "recipe", "two_depths", "kept_stream")


def runs_of(study: str, name: str = "runs") -> list[dict]:
    return runs_of_file(STUDIES / study / f"{name}.jsonl")


def runs_of_file(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def rows_of(study: str, heading: str = "", name: str = "table.md") -> dict[str, list[str]]:
    """The rows of the first table behind a heading, by their first cell."""
    text = (STUDIES / study / name).read_text().split(f"\n## {heading}\n" if heading else "\n|", 1)[1]
    table = text[text.index("|") :].split("\n\n")[0].splitlines()
    return {line.split(" | ")[0].strip("| "): [c.strip("| *") for c in line.split(" | ")] for line in table}


def in_words(values, digits: int, sign: str = "+") -> str:
    """Mean and interval, as the tables of studies of reads and of retrofits have them."""
    mean, side = np.mean(values), QUANTILE[len(values) - 1] * np.std(values, ddof=1) / len(values) ** 0.5
    return f"{mean:{sign}.{digits}f} [{mean - side:{sign}.{digits}f}, {mean + side:{sign}.{digits}f}]"


def test_text(monkeypatch, tmp_path):
    """Windows that choose, that judge and that are learned from are different ones; another text is refused."""
    files = [(f"{i}.py", path) for i, path in enumerate(sorted(STUDIES.rglob("*.py")))]
    monkeypatch.setattr(study_arms, "sources", lambda: {"library": files, "packages": files})
    monkeypatch.setattr(study_arms, "HELD_OUT_WINDOWS", 10)
    manifest = study_arms.prepare(tmp_path / "work")
    windows = [
        {tuple(row["input_ids"].tolist()) for row in study_arms.rows_of(tmp_path / "work", "library", split)}
        for split in ("train", "tuning", "held_out")
    ]
    assert [len(of) for of in windows[1:]] == [10, 10] and len(windows[0]) > 100
    assert not any(a & b for a, b in itertools.combinations(windows, 2))
    earlier = tmp_path / "manifest.json"
    earlier.write_text(json.dumps(manifest))
    assert study_arms.prepare(tmp_path / "work", earlier) == manifest
    manifest["library"]["sha256"] = "0"
    earlier.write_text(json.dumps(manifest))
    with pytest.raises(typer.BadParameter, match="is not that of .*: use the versions of constraints.txt"):
        study_arms.prepare(tmp_path / "work", earlier)


@pytest.mark.parametrize(
    "study, run, other",
    [
        (read_study, read_study.Run("blocks", 1, 20, 4e-3), read_study.Run("prenorm", 1, 20, 4e-3)),
        (two_depths, two_depths.Run("wide", "full", 1, 20, 8e-3), two_depths.Run("wide", "prenorm", 1, 20, 8e-3)),
    ],
    ids=["reads", "two depths"],
)
def test_what_a_run_learns_from(study, run, other, monkeypatch):
    """Arms of a seed see the same windows; queries do not decay; and what chooses is not what judges."""
    calls = []

    def trained(model, rows, run, work, callbacks=(), **fields):
        calls.append((rows, fields))
        evaluate = lambda rows: {"eval_loss": {"tuning": 1.0, "held_out": 2.0}[rows[1]]}  # noqa: E731
        return SimpleNamespace(evaluate=evaluate, state=SimpleNamespace(log_history=[]))

    monkeypatch.setattr(study, "trained", trained)
    monkeypatch.setattr(study, "rows_of", lambda work, corpus, split, seed=None: (corpus, split, seed))
    results = [study.train(of, Path()) for of in (run, other)]
    assert [(r["tuning_loss"], r["judging_loss"]) for r in results] == [(1.0, 2.0)] * 2
    assert all(r["machine"]["processor"] and r["machine"]["versions"] for r in results)
    (rows, fields), (other_rows, other_fields) = calls
    assert rows == other_rows == ("library", "train", 1) and fields == other_fields
    assert fields["query_weight_decay"] == 0 and fields["query_learning_rate"] == run.learning_rate


def test_equal_time():
    """At a number that was run, half way between two in logarithms, below the least and beyond the most."""
    by_steps = {400: [2.0, 8.0], 100: [4.0, 8.0], 200: [3.0, 7.0]}
    expected = {100: [4, 8], 200: [3, 7], 400: [2, 8], 100 * 2**0.5: [3.5, 7.5], 200 * 2**0.5: [2.5, 7.5]}
    for steps, losses in {**expected, 50: [5, 9], 1000: [2, 8]}.items():
        assert paired.interpolated(by_steps, steps) == pytest.approx(losses)


@pytest.mark.slow
@pytest.mark.parametrize("study", REPORTS)
def test_tables_are_those_of_the_runs(study, tmp_path):
    shutil.copytree(STUDIES / study, tmp_path / study)
    (tmp_path / study / "table.md").unlink()
    command = [sys.executable, "-m", f"studies.{study}.study", "report", "--results", str(tmp_path / study)]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    assert (tmp_path / study / "table.md").read_text() == (STUDIES / study / "table.md").read_text()


def test_study_of_reads():
    losses = defaultdict(dict)
    for result in runs_of("reads"):
        if result["run"]["seed"] in range(3):
            losses[result["run"]["arm"]][result["run"]["seed"]] = result["judging_loss"]
    losses = {arm: np.array([of[seed] for seed in range(3)]) for arm, of in losses.items()}
    speeds = json.loads((STUDIES / "reads/speed.json").read_text())
    share = math.log(speeds["full"]["ratio_quartiles"][1], 2)
    at_equal_time = losses["prenorm"] + share * (losses["prenorm_double"] - losses["prenorm"])
    assert rows_of("reads")["Full"][3] == f"{losses['full'].mean():.4f} ({losses['full'].std(ddof=1):.3f})"
    for baseline, heading in (
        (losses["prenorm"], "Equal tokens, against PreNorm"),
        (losses["blocks"], "Equal tokens, against 8 blocks"),
        (at_equal_time, "Equal time, against PreNorm"),
    ):
        row = rows_of("reads", heading)["Full"]
        assert row[2] == in_words(losses["full"] - baseline, 4)
        assert row[1] == ", ".join(f"{d:+.3f}" for d in losses["full"] - baseline)
    further = rows_of("reads", "At a rate where the sweeps would have continued, equal tokens")
    for arm, label in (("blocks", "8 blocks"), ("full", "Full")):
        results = sorted(runs_of("reads", "further_rates"), key=lambda result: result["run"]["seed"])
        of_arm = np.array([result["judging_loss"] for result in results if result["run"]["arm"] == arm])
        assert further[label][2] == f"{of_arm.mean():.4f} ({of_arm.std(ddof=1):.3f})"
        assert further[label][3] == ", ".join(f"{d:+.3f}" for d in of_arm - losses[arm])
        assert further[label][4] == in_words(of_arm - losses[arm], 4)


def test_ablations():
    losses = defaultdict(lambda: defaultdict(dict))
    for result in runs_of("reads") + runs_of("reads", "other_rates"):
        run = result["run"]
        if run["seed"] < 3:
            losses[run["arm"]][run["learning_rate"]][run["seed"]] = result["tuning_loss"], result["judging_loss"]
    best = {}
    for arm, rates in losses.items():
        of = [np.array([seeds[s] for s in range(3)]).T for seeds in rates.values() if len(seeds) == 3]
        best[arm] = min(of, key=lambda pair: pair[0].mean())[1]
    table = rows_of("reads", name="ablations.md")
    for arm, label in {
        "blocks_of_2": "blocks of 2 sublayers",
        "static": "8 blocks, static weights",
        "full": "Full",
    }.items():
        row = table[label]
        assert row[3].startswith(in_words(best[arm] - best["prenorm"], 3))
        assert row[4] == ", ".join(f"{d:+.3f}" for d in best[arm] - best["prenorm"])
        assert row[5].startswith(in_words(best[arm] - best["blocks"], 3))


def test_the_table_of_ablations_is_that_of_the_runs(tmp_path):
    for name in ("runs.jsonl", "other_rates.jsonl"):
        shutil.copy(STUDIES / "reads" / name, tmp_path)
    ablation_table.main(tmp_path)
    assert (tmp_path / "ablations.md").read_text() == (STUDIES / "reads/ablations.md").read_text()
    others = (tmp_path / "other_rates.jsonl").read_text().splitlines()
    (removed,) = (line for line in others if '"prenorm", "seed": 2' in line and '"learning_rate": 0.004' in line)
    (tmp_path / "other_rates.jsonl").write_text("\n".join(line for line in others if line != removed))
    with pytest.raises(typer.BadParameter, match="Runs are missing, of prenorm at 0.004"):
        ablation_table.main(tmp_path)


def test_recipe():
    judging, tuning = {}, {}
    for result in runs_of("recipe"):
        key = tuple(result["run"].values())
        judging[key], tuning[key] = result["judging_loss"] - result["base_judging_loss"], result["tuning_loss"]

    def of(width, mode, *fields, found=judging):
        return np.array([found[(width, mode, seed, *fields)] for seed in range(3)])

    for width, layers, size in ((48, 16, 4), (96, 8, 2), (192, 4, 2)):
        rates = {run[4] for run in judging if run[0] == width and run[4] != "auto"}
        means = {rate: of(width, "queries", size, rate, 0.0, found=tuning).mean() for rate in rates}
        best = min(means, key=means.get)
        auto, zero = of(width, "queries", size, "auto", 0.0), of(width, "lora", size, "auto", 0.0)
        row = rows_of("recipe", "Rates of the queries alone")[f"{layers} layers of {width}"]
        assert row[4].removesuffix(" |") == in_words(auto - of(width, "queries", size, best, 0.0), 4)
        table = rows_of("recipe", f"Block sizes and starts: {layers} layers of {width}")
        for label, differences in {
            "queries alone, blocks of 1, less blocks of 8": of(width, "queries", 1, "auto", 0.0)
            - of(width, "queries", 8, "auto", 0.0),
            "queries from N(0, 0.2), less from zero": of(width, "lora", size, "auto", 0.2) - zero,
            "LoRA and queries, less LoRA on PreNorm": zero - of(width, "lora_prenorm", 0, "auto", 0.0),
        }.items():
            assert table[label][3] == in_words(differences, 4)


def test_two_depths():
    losses = defaultdict(dict)
    for result in runs_of("two_depths"):
        depth, arm, seed, steps, rate = result["run"].values()
        losses[depth, arm, steps, rate][seed] = result["tuning_loss"], result["judging_loss"]

    def at_best_rate(depth, arm, steps=600, swept=600):
        rates = [key[3] for key in losses if key[:3] == (depth, arm, swept)]
        rate = min(rates, key=lambda r: np.mean([losses[depth, arm, swept, r][seed][0] for seed in range(3)]))
        return np.array([losses[depth, arm, steps, rate][seed][1] for seed in range(5)])

    speeds = json.loads((STUDIES / "two_depths/speed.json").read_text())
    table = [line.split(" | ") for line in (STUDIES / "two_depths/table.md").read_text().splitlines()]
    means = {(row[0].strip("| "), *row[1:3]): row[4].strip("*") for row in table if len(row) == 6 and "[" in row[4]}
    gains = {}
    for depth, label in (("deep", "24 layers of 48"), ("wide", "6 layers of 96")):
        for arm, steps, of_arm in (("blocks", 600, "6 blocks"), ("prenorm", 1200, "PreNorm, twice the steps")):
            (row,) = (row for row in table if row[:2] == [f"| {label}", of_arm])
            for key in [key for key, of in losses.items() if key[:3] == (depth, arm, steps) and len(of) >= 3]:
                judging = [losses[key][seed][1] for seed in range(3)]
                assert f"{key[3]:g}: {np.mean(judging):.3f} ({np.std(judging, ddof=1):.3f})" in row[-2]
            final = at_best_rate(depth, arm, steps)
            assert row[-1].strip("| ") == f"{final.mean():.3f} ({final.std(ddof=1):.3f})"
        once, twice = at_best_rate(depth, "prenorm"), at_best_rate(depth, "prenorm", 1200)
        for arm, label in (("blocks", "6 blocks"), ("full", "Full")):
            gains[depth, arm] = at_best_rate(depth, arm) - once
            at_equal_time = once + math.log2(speeds[depth][arm]["ratio_quartiles"][1]) * (twice - once)
            assert means["equal tokens", depth, label] == in_words(gains[depth, arm], 3)
            assert means["equal time", depth, label] == in_words(at_best_rate(depth, arm) - at_equal_time, 3)
    rows = rows_of("two_depths", "Other baselines, added afterwards")
    baselines = {
        "PreNorm, scaled start": ("scaled", "prenorm", 600),
        "PreNorm, more rates": ("deep", "prenorm, more rates", 600),
        "PreNorm, 825 steps": ("deep", "prenorm", 825),
    }
    for result in runs_of("two_depths", "further_rates"):
        run = result["run"]
        further = losses["deep", "prenorm, more rates", 600, run["learning_rate"]]
        further[run["seed"]] = result["tuning_loss"], result["judging_loss"]
    changes = (line.split(" | ") for line in (STUDIES / "two_depths/table.md").read_text().splitlines()[-4:])
    changes = {row[0].strip("| "): row[2].strip("| ") for row in changes}
    for label, (depth, arm, steps) in baselines.items():
        baseline = at_best_rate(depth, arm, steps, swept=steps)
        assert rows[label][2] == f"{baseline.mean():.3f} ({baseline.std(ddof=1):.3f})"
        assert changes[f"6 blocks, less {label}"] == in_words(at_best_rate("deep", "blocks") - baseline, 3)
    assert means["deep less wide", "both", "6 blocks"] == in_words(
        gains["deep", "blocks"] - gains["wide", "blocks"], 3
    )


def test_which_sweeps_would_continue():
    """By the rule that takes the noise into account, as the page says."""

    def further_rate(losses):
        return next_rate(losses, tuple(losses), noise=0.05)

    runs = read_runs(STUDIES / "retrofit/runs.jsonl")
    for arm in {run.arm for run in runs if run.seed == TUNING_SEED}:
        losses = sorted(retrofit.tuning_losses(runs, arm).items())
        best = min(loss for _, loss in losses)
        assert all(loss - best > 0.0115 for _, loss in (losses[0], losses[-1])), arm
    runs = read_runs(STUDIES / "reads/runs.jsonl")
    swept = [arm for arm in read_study.ARMS if arm != "prenorm_double"]
    further = {arm: further_rate(read_study.tuning_losses(runs, arm)) for arm in swept}
    assert {arm: rate for arm, rate in further.items() if rate} == {"prenorm": 0.016, "blocks": 0.064, "full": 0.064}
    runs = two_depths.with_further_rates(STUDIES / "two_depths")
    further = {
        (depth, arm)
        for depth in two_depths.DEPTHS
        for arm in two_depths.ARMS
        if further_rate(two_depths.tuning_means(runs, depth, arm, 600))
    }
    assert further == {("deep", "prenorm"), ("deep", "full"), *(("wide", arm) for arm in two_depths.ARMS)}


def losses_of(*names: str, kept: Sequence[dict] = (), depth: str = "deep") -> dict:
    """By arm, steps and rate, of each seed the losses that choose and judge; `deep` is 24 layers of 48."""
    found = defaultdict(dict)
    for result in itertools.chain(*(runs_of("two_depths", name) for name in names), kept):
        run = result["run"]
        if run["depth"] == depth:
            losses = result["tuning_loss"], result["judging_loss"]
            found[run["arm"], run["steps"], run["learning_rate"]][run["seed"]] = losses
    return found


def best_of(found: dict, arm: str, steps: int) -> tuple[str, int, float]:
    rates = [key for key in found if key[:2] == (arm, steps) and found[key].keys() >= {0, 1, 2}]
    return min(rates, key=lambda key: np.mean([found[key][seed][0] for seed in range(3)]))


def at_best_rate(found: dict, arm: str, steps: int) -> np.ndarray:
    return np.array([found[best_of(found, arm, steps)][seed][1] for seed in range(5)])


def prenorm_after(found: dict, steps: float, lengths: tuple[int, ...] = (600, 695, 757, 825)) -> np.ndarray:
    """Losses of PreNorm between two lengths that were run, or after the longest; by default with 24 layers."""
    high = next((length for length in lengths if length > steps), lengths[-1])
    low = lengths[lengths.index(high) - 1]
    short, long = (at_best_rate(found, "prenorm", length) for length in (low, high))
    return short + math.log(min(steps, high) / low) / math.log(high / low) * (long - short)


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_equal_time_of_two_depths(mode):
    """PreNorm between the two numbers of steps around the time of 6 blocks, in the table and on the page."""
    found = losses_of("runs", "further_rates", "equal_time_runs")
    ratio = json.loads((STUDIES / "two_depths/equal_time_speed.json").read_text())[mode]["deep"]["blocks"]
    equal_time = prenorm_after(found, 600 * ratio["ratio_quartiles"][1])
    difference = at_best_rate(losses_of("runs"), "blocks", 600) - equal_time
    rows = [line.split(" | ") for line in (STUDIES / "two_depths/equal_time.md").read_text().splitlines()]
    (row,) = (row for row in rows if row[:3] == ["| 24 layers of 48", "6 blocks", mode])
    assert row[4] == ", ".join(f"{d:+.3f}" for d in difference)
    assert row[5].strip("*") == in_words(difference, 3)
    mean, interval = in_words(difference, 3).split(" ", 1)
    page = " ".join((ROOT / "docs/results.md").read_text().split())
    assert f"{mean} ({interval.strip('[]').replace(', ', ' to ')})" in page


@pytest.mark.parametrize("name", ["warmup_runs", "warmup_further"])
def test_longer_warmup_of_two_depths(name):
    """By the first protocol, and with PreNorm at its best rate beside 6 blocks on the same CPU."""
    found = losses_of(name)
    difference = at_best_rate(found, "blocks", 600) - at_best_rate(found, "prenorm", 600)
    p = ttest_1samp(difference, 0).pvalue
    text = " ".join((STUDIES / "two_depths/warmup.md").read_text().replace("*", "").split())
    assert f"{', '.join(f'{d:+.3f}' for d in difference)}, mean {in_words(difference, 3)}, p = {p:.3f}." in text
    mean, interval = in_words(difference, 3).split(" ", 1)
    page = " ".join((ROOT / "docs/results.md").read_text().replace("*", "").split())
    assert f"{mean} ({interval.strip('[]').replace(', ', ' to ')}, p = {p:.3f}" in page


def test_longer_warmup_at_equal_time():
    """6 blocks beside PreNorm with a short warmup, and beside PreNorm for 695 steps with each warmup."""
    blocks = at_best_rate(losses_of("warmup_further"), "blocks", 600)
    lines = (STUDIES / "two_depths/warmup.md").read_text().replace("*", "").splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if re.match(r"\| \d+ steps \|", line)]
    by_warmup = defaultdict(dict)
    for result in runs_of("two_depths", "warmup_further"):
        run = result["run"]
        if run["steps"] == 695:
            losses = result["tuning_loss"], result["judging_loss"]
            of_rate = by_warmup[run["warmup_steps"]].setdefault(("prenorm", 695, run["learning_rate"]), {})
            of_rate[run["seed"]] = losses
    others = {(600, 30): at_best_rate(losses_of(kept=runs_of("kept_stream")), "prenorm", 600)}
    others |= {(695, warmup): at_best_rate(found, "prenorm", 695) for warmup, found in by_warmup.items()}
    assert [(int(row[0].split()[0]), int(row[1])) for row in rows] == [*others] == [(600, 30), (695, 35), (695, 70)]
    page = " ".join((ROOT / "docs/results.md").read_text().replace("*", "").split())
    for row, of_prenorm in zip(rows, others.values()):
        difference = in_words(blocks - of_prenorm, 3)
        assert row[5:7] == [", ".join(f"{d:+.3f}" for d in blocks - of_prenorm), difference]
        mean, interval = difference.split(" ", 1)
        assert f"{mean} ({interval.strip('[]').replace(', ', ' to ')})" in page
    ratio = json.loads((STUDIES / "two_depths/equal_time_speed.json").read_text())["eager"]["deep"]["blocks"]
    found = losses_of("runs", "further_rates", "equal_time_runs")
    eager = blocks - prenorm_after(found, 600 * ratio["ratio_quartiles"][1])
    mean, interval = in_words(eager, 3).split(" ", 1)
    assert any(line.endswith(f"{mean} {interval}, p = {ttest_1samp(eager, 0).pvalue:.3f}.") for line in lines)
    assert f"{mean} ({interval.strip('[]').replace(', ', ' to ')}, p = 0.131)" in page


def test_longer_warmup_with_new_seeds():
    losses = defaultdict(list)
    for result in sorted(runs_of("two_depths", "warmup_further"), key=lambda result: result["run"]["seed"]):
        if result["run"]["seed"] >= 5:
            losses[result["run"]["arm"], result["run"]["steps"]].append(result["judging_loss"])
    difference = np.subtract(losses["blocks", 600], losses["prenorm", 695])
    mean, interval = in_words(difference, 3).split(" ", 1)
    p = ttest_1samp(difference, 0).pvalue
    by_seed = ", ".join(f"{d:+.3f}" for d in difference)
    table = (STUDIES / "two_depths/warmup.md").read_text().replace("*", "")
    assert len(difference) == 5 and table.endswith(f": {by_seed}, mean {mean} {interval}, p = {p:.3f}.\n")
    page = " ".join((ROOT / "docs/results.md").read_text().replace("*", "").split())
    assert f"{mean} ({interval.strip('[]').replace(', ', ' to ')}, p = {p:.3f}" in page


def test_kept_stream_over_sizes():
    """The mean over three sizes of each seed, PreNorm and 4 blocks each at its best rate of a size."""
    found = defaultdict(dict)
    runs = (
        runs_of("scaling/results") + runs_of("scaling/results", "other_rates") + runs_of("kept_stream", "ladder_runs")
    )
    for result in runs:
        run = result["run"]
        if run["seed"] < 3:
            found[run["arm"], run["size"]].setdefault(run["learning_rate"], {})[run["seed"]] = result["loss"]

    def best(arm):
        by_size = [found[arm, size].values() for size in ("62k", "116k", "223k")]
        of_sizes = [min(([of[seed] for seed in range(3)] for of in rates), key=np.mean) for rates in by_size]
        return np.mean(of_sizes, axis=0)

    rows = rows_of("kept_stream", name="ladder.md")
    table = (STUDIES / "kept_stream/ladder.md").read_text().replace("*", "")
    page = " ".join((ROOT / "docs/how_to/scaling.md").read_text().split())
    assert any("4 blocks, kept stream" in row for row in rows)
    for arm, label in (("prenorm", "PreNorm"), ("blocks", "4 blocks")):
        difference = in_words(best("kept") - best(arm), 3)
        assert re.search(rf"\| {label} \| [^|]+ \| {re.escape(difference)} \|", table)
        mean, interval = difference.split(" ", 1)
        assert f"{mean} ({interval.strip('[]').replace(', ', ' to ')})" in page


@pytest.mark.parametrize("name", ["two_depths.equal_time", "two_depths.warmup", "kept_stream.ladder"])
def test_other_tables_are_those_of_the_runs(name, monkeypatch, tmp_path):
    module = importlib.import_module(f"studies.{name}")
    kept = module.TABLE.read_text()
    monkeypatch.setattr(module, "TABLE", tmp_path / "table.md")
    module.report()
    assert module.TABLE.read_text() == kept


def test_report_of_a_part(tmp_path):
    """Of the kept stream from scratch, with one arm of twelve: p is corrected for all that was planned."""
    generator = np.random.default_rng(0)
    for rate, seed in itertools.product((4e-3, 8e-3, 1.6e-2), range(5)):
        run = {"depth": "deep", "arm": "kept", "seed": seed, "steps": 600, "learning_rate": rate}
        loss = 4.5 + 0.2 * (rate != 8e-3) + 0.02 * generator.standard_normal()
        append_json(tmp_path / "runs.jsonl", {"run": run, "tuning_loss": loss, "judging_loss": loss})
    kept_stream.report(tmp_path)
    text = (tmp_path / "table.md").read_text()
    assert "2 of 24 comparisons can be made, and p is corrected for 24" in text
    of_kept = np.array([result["judging_loss"] for result in runs_of_file(tmp_path / "runs.jsonl")[5:10]])
    found = losses_of("runs", "further_rates")
    for label, other in (("PreNorm", "prenorm"), ("6 blocks", "blocks")):
        mean = in_words(of_kept - at_best_rate(found, other, 600), 3)
        row = rf"\| 6 blocks, kept \| {label} \| equal tokens \| .* \| {re.escape(mean)} \|"
        assert re.search(row, text.replace("*", ""))


@pytest.mark.parametrize("depth, label", [("deep", "24 layers of 48"), ("wide", "6 layers of 96")])
def test_page_of_the_kept_stream(depth, label):
    """From scratch: what the page prints is computed from the runs, at the best rate of each arm."""
    found = losses_of("runs", "further_rates", "equal_time_runs", kept=runs_of("kept_stream"), depth=depth)
    speeds = json.loads((STUDIES / "kept_stream/speed.json").read_text())[depth]
    table = (STUDIES / "kept_stream/table.md").read_text().replace("*", "")
    page = (ROOT / "docs/results.md").read_text()
    section = page.split("### With a stream that is kept, from scratch")[1].split("\n## ")[0].replace("**", "")
    for arm, paper in kept_stream.PAPERS_READ.items():
        losses, ratio = at_best_rate(found, arm, 600), speeds[arm]["ratio_quartiles"][1]
        after = prenorm_after(found, 600 * ratio, (600, 695, 757, 825) if depth == "deep" else (600, 1200))
        cells = []
        for other, kind, baseline in (
            ("prenorm", "equal tokens", at_best_rate(found, "prenorm", 600)),
            ("prenorm", "equal time", after),
            (paper, "equal tokens", at_best_rate(found, paper, 600)),
        ):
            mean = in_words(losses - baseline, 3)
            row = f"| {label} | {kept_stream.LABELS[arm]} | {kept_stream.LABELS[other]} | {kind} | "
            (line,) = (line for line in table.splitlines() if line.startswith(row))
            assert mean in line
            p = float(line.split(" | ")[-1].strip(" |"))
            assert p > 0.1 or f"p = {p:.3f}" in section or f", {p:.3f} with" in section
            assert kind == "equal time" or p >= 0.4  # as the page says
            cells.append(mean.replace("[", "(").replace(", ", " to ").replace("]", ")"))
        loss = f"{losses.mean():.3f} ({losses.std(ddof=1):.3f})"
        row = re.escape(" | ".join([f"{ratio:.2f}", loss, *cells]))
        (rate,) = re.findall(rf"\| {kept_stream.LABELS[arm]} \| (\S+) \| {row} \|", section)
        assert float(rate) == best_of(found, arm, 600)[2]
        if (depth, arm) == ("deep", "kept"):
            assert f"minus PreNorm {cells[0]}, minus the paper's read {cells[2]}, not significant |" in page
    assert "Runs are missing" not in table
    baseline = at_best_rate(found, "prenorm", 600)
    loss = f"{baseline.mean():.3f} ({baseline.std(ddof=1):.3f})"
    (rate,) = re.findall(rf"\| {label}, PreNorm \| (\S+) \| 1 \| {re.escape(loss)} \|", section)
    assert float(rate) == best_of(found, "prenorm", 600)[2]


def test_papers_reads_at_prenorms_best_rate():
    """What is left of the gain of two depths, in the README, in the table and on the page."""
    names = ("runs", "further_rates", "equal_time_runs")
    found = {depth: losses_of(*names, kept=runs_of("kept_stream"), depth=depth) for depth in ("deep", "wide")}
    gains = {
        (depth, arm): at_best_rate(of, arm, 600) - at_best_rate(of, "prenorm", 600)
        for depth, of in found.items()
        for arm in kept_stream.PAPERS_READ.values()
    }
    p = dict(zip(gains, holm([ttest_1samp(values, 0).pvalue for values in gains.values()])))
    table = (STUDIES / "kept_stream/table.md").read_text().split("## Not in the protocol")[1]
    for (depth, arm), values in gains.items():
        label = f"{two_depths.label_of(depth)} | {kept_stream.LABELS[arm]}"
        line = next(line for line in table.splitlines() if line.startswith(f"| {label} |"))
        assert line.endswith(f"| {in_words(values, 3)} | {p[depth, arm]:.3f} |")
    assert f"{min(p.values()):.2f} {max(p.values()):.2f}" == "0.12 0.65"
    page = " ".join((ROOT / "docs/results.md").read_text().replace("**", "").split())
    for text in (
        "loss -0.197 (-0.329 to -0.064), trained again",
        "(p from 0.12 to 0.65)",
        "0.20 higher",
        "(p = 0.12,",
    ):
        assert text in page
    again = {result["run"]["seed"]: result["judging_loss"] for result in runs_of("kept_stream", "again")}
    once_more = np.array([again[seed] for seed in range(5)]) - at_best_rate(found["deep"], "prenorm", 600)
    replaced = gains | {("deep", "blocks"): once_more}
    p_again = holm([ttest_1samp(values, 0).pvalue for values in replaced.values()])[0]  # the first arm is that one
    assert table.strip().endswith(f"| **{in_words(once_more, 3)}** | {p_again:.3f} |")
    assert f"{in_words(once_more, 3)} {p_again:.3f}" == "-0.171 [-0.242, -0.099] 0.022"
    assert page.count("-0.171 (-0.242 to -0.099") == 2 and page.count("p = 0.022") == 2
    assert "24 layers end 0.20 lower (p = 0.12; 0.17 and p = 0.02 when" in (ROOT / "README.md").read_text()
    assert in_words(gains["deep", "full"], 3) == "+0.040 [-0.153, +0.234]" and "+0.040 (-0.153 to +0.234)" in page
    assert f"{(gains['wide', 'blocks'] - gains['deep', 'blocks']).mean():.3f}" == "0.035"
    best, longer = (at_best_rate(found["deep"], "prenorm", steps).mean() for steps in (600, 757))
    before = at_best_rate(losses_of("runs", "further_rates"), "prenorm", 600).mean()
    lower = f"{best - longer:.2f} lower after 757 steps than after 600, and {before - longer:.2f} lower"
    assert f"PreNorm ends {lower}" in page
    rates = {key: best_of(found[key[0]], key[1], 600)[2] for key in gains | {("deep", "prenorm"): 0}}
    assert (rates["deep", "prenorm"], rates["deep", "full"]) == (0.128, 0.032)
    of_protocol = losses_of("runs", depth="wide")
    assert all(best_of(found["wide"], a, 600) == best_of(of_protocol, a, 600) for a in ("prenorm", "blocks", "full"))
    assert f"it ends at {at_best_rate(found['deep'], 'full', 600).mean():.3f}" in page


def test_report_of_the_long_retrofit(tmp_path):
    """With made-up runs. PreNorm at equal time is between its two lengths."""
    generator = np.random.default_rng(0)
    (of_prenorm,) = (r for r in runs_of("long_retrofit") if (r["run"]["arm"], r["run"]["seed"]) == ("prenorm", 0))
    losses = {}
    for seed, arm in itertools.product(range(2), long_retrofit.ARMS):
        steps = 625 if arm == "prenorm_longer" else 500
        losses[arm, seed] = 2.2 + 0.01 * generator.standard_normal()
        run = of_prenorm["run"] | {"arm": arm, "seed": seed, "steps": steps}
        append_json(tmp_path / "runs.jsonl", of_prenorm | {"run": run, "judging": losses[arm, seed]})
    speeds = {arm: {"ratio_quartiles": [1.0, 1.1, 1.2]} for arm in ("prenorm", "replaced", "kept")}
    (tmp_path / "speed.json").write_text(json.dumps(speeds))
    long_retrofit.report(tmp_path)
    share = math.log(1.1) / math.log(625 / 500)
    table = rows_with(tmp_path / "table.md", "loss, new text")
    for arm, label in (("replaced", "the paper's read"), ("kept", "kept stream")):
        of = [(losses["prenorm", seed], losses["prenorm_longer", seed]) for seed in range(2)]
        expected = [losses[arm, seed] - (1 - share) * once - share * longer for seed, (once, longer) in enumerate(of)]
        assert table[label, "equal time"][0] == ", ".join(f"{d:+.4f}" for d in expected)
    assert (tmp_path / "curves.png").exists()


def test_page_of_the_long_retrofit():
    """The table is that of the runs, and every difference that the page prints is one of it."""
    runs = {(r["run"]["arm"], r["run"]["seed"]): r for r in runs_of("long_retrofit")}
    speeds = json.loads((STUDIES / "long_retrofit/speed.json").read_text())
    table = (STUDIES / "long_retrofit/table.md").read_text()
    for metric, heading in retrofit.METRICS.items():
        of = {arm: np.array([runs[arm, seed][metric] for seed in range(3)]) for arm in long_retrofit.ARMS}
        of_metric = table.split(f"\n## {heading}\n")[1].split("\n## ")[0]
        for arm, other in long_retrofit.COMPARED:
            share = math.log(speeds[arm]["ratio_quartiles"][1]) / math.log(625 / 500)
            at_equal_time = of["prenorm"] + share * (of["prenorm_longer"] - of["prenorm"])
            baselines = {"equal tokens": of[other]} | ({"equal time": at_equal_time} if other == "prenorm" else {})
            for kind, baseline in baselines.items():
                mean = in_words(of[arm] - baseline, 4)
                row = f"| {long_retrofit.LABELS[arm]} | {long_retrofit.LABELS[other]} | {kind} | "
                (found,) = (line for line in of_metric.splitlines() if line.startswith(row))
                assert mean in found or not np.ptp(of[arm] - baseline)
    page = (ROOT / "docs/results.md").read_text()
    section = page.split("### Trained for 25 times as long")[1].split("\n## ")[0]
    printed = re.findall(
        r"([+-]\d\.\d{4})\** \(([+-]\d\.\d{4}) to ([+-]\d\.\d{4})\)(?:, worse)? \| (\d\.\d{3}) \|", section
    )
    assert len(printed) == 12
    for mean, low, high, p in printed:
        assert re.search(re.escape(f"{mean} [{low}, {high}]") + rf"\** \| {p} \|", table)


def test_page_of_two_depths():
    """Every difference that the page prints is one of a table."""
    table = (STUDIES / "two_depths/table.md").read_text()
    section = (ROOT / "docs/results.md").read_text().split("## Deep and wide")[1].split("\n- **Deep is not")[0]
    printed = re.findall(r"([+-]\d\.\d{3})\**\)? \(([+-]\d\.\d{3}) to ([+-]\d\.\d{3})\)", " ".join(section.split()))
    assert len(printed) == 14
    table += (STUDIES / "kept_stream/table.md").read_text()
    for mean, low, high in printed:
        assert f"{mean} [{low}, {high}]" in table


def test_ladder():
    runs = defaultdict(list)
    for result in runs_of("scaling/results"):
        run = result["run"]
        if run["seed"] < 3:  # the sweeps have another one
            runs[run["arm"], run["size"]].append((result["compute"] / 8.64e19, result["loss"]))
    points = defaultdict(list)
    for (arm, _), of in runs.items():
        assert len(of) == 3
        points[arm].append(np.mean(of, axis=0))
    laws = {arm: np.polyfit(*np.log(np.array(sorted(map(tuple, of)))).T, 1) for arm, of in points.items()}
    largest = math.log(max(compute for compute, _ in points["prenorm"]))
    table = rows_of("scaling/results", name="fit.md")
    for arm, (slope, intercept) in laws.items():
        assert table[arm][1] == f"{math.exp(intercept):.3f}" and table[arm][2].startswith(f"{-slope:.4f} ")
        if arm != "prenorm":
            needed = (np.polyval(laws[arm], largest) - laws["prenorm"][1]) / laws["prenorm"][0]
            text = (STUDIES / "scaling/results/fit.md").read_text()
            assert f"| {arm} | {math.exp(needed - largest):.3f} [" in text


def test_ladder_with_the_rates_of_blocks(tmp_path):
    """What the page says of it: PreNorm's other runs in place of its own at three sizes, by the program itself."""
    others = {(r["run"]["size"], r["run"]["seed"]): r["loss"] for r in runs_of("scaling/results", "other_rates")}
    assert {size for size, _ in others} == {"62k", "116k", "223k"} and len(others) == 9
    for name in ("ladder.yaml", "times.json"):
        shutil.copy(STUDIES / "scaling/results" / name, tmp_path)
    for result in runs_of("scaling/results"):
        if result["run"]["arm"] == "prenorm":
            result["loss"] = others.get((result["run"]["size"], result["run"]["seed"]), result["loss"])
        append_json(tmp_path / "runs.jsonl", result)
    page = " ".join((ROOT / "docs/how_to/scaling.md").read_text().split())
    own = json.loads((STUDIES / "scaling/results/fit.json").read_text())["arms"]

    def found(arms, arm, kind):
        of, (low, high) = arms[arm][kind]["advantage"], arms[arm][kind]["interval"]
        return f"{of:.2f}", f"({low:.2f} to {high:.2f})"

    arms = fit_ladder(tmp_path)["arms"]
    blocks, full = (" ".join(found(arms, arm, "equal_compute")) for arm in ("blocks", "full"))
    assert f"the figure is {blocks} for 4 blocks and {full} for Full" in page
    for start, of in (("PreNorm needs", own), ("it needs", arms)):
        (blocks, around_blocks), (full, around_full) = (found(of, arm, "equal_time") for arm in ("blocks", "full"))
        sentence = (
            f"{start} {blocks} times the time of 4 blocks {around_blocks}, and {full} times that of Full {around_full}"
        )
        assert sentence in page


def ranks(values) -> np.ndarray:
    return np.argsort(np.argsort(values)).astype(float)


def test_study_of_weights():
    of = {arm: [r for r in runs_of("weights") if r["run"]["arm"] == arm] for arm in ("prenorm", "blocks", "full")}

    def in_words(values, digits=2):
        mean, side = np.mean(values), QUANTILE[4] * np.std(values, ddof=1) / 5**0.5
        return f"{mean:.{digits}f} ({mean - side:.{digits}f} to {mean + side:.{digits}f})"

    within, over_all = [], []
    for result in of["full"]:
        sites = [np.array(pair) for pair in zip(result["weight"][1:], result["masking_cost"][1:])]
        over_all.append(np.corrcoef(*map(ranks, np.concatenate(sites, axis=1)))[0, 1])
        within.append(np.mean([np.corrcoef(*map(ranks, site))[0, 1] for site in sites[1:]]))
    table = (STUDIES / "weights/table.md").read_text()
    assert f"| Full | weight | {in_words(over_all)} | {in_words(within)} |" in table
    second_half = {arm: np.array([np.mean(r["likeness"][12:]) for r in results]) for arm, results in of.items()}
    rank = [np.mean(r["effective_rank"][12:]) for r in of["full"]]
    row = rows_of("weights", "Are outputs more alike with depth?")["Full"]
    assert row[2] == in_words(second_half["full"]) and row[6].removesuffix(" |") == in_words(rank, 1)
    assert row[3] == in_words(second_half["full"] - second_half["prenorm"])
    least = [
        r["left_out"][np.argmin([sum(w[i + 1] for w in r["weight"][i + 1 :]) for i in range(24)])] for r in of["full"]
    ]
    assert f"is read least | {', '.join(f'{rise:.3f}' for rise in least)} | {in_words(least, 3)} |" in table
    entropies = [r["early_patterns"]["200"]["mlp"]["relative_entropy"] for r in of["blocks"]]
    assert "| 8 blocks | entropy of the weights | mlp |" in table and in_words(entropies) in table


def test_retrofit():
    runs = {(r["run"]["arm"], r["run"]["seed"]): r for r in runs_of("retrofit")}
    speeds = json.loads((STUDIES / "retrofit/speed.json").read_text())
    for metric, heading in (("judging", "loss, new text"), ("chat", "loss, the base's own answers")):
        table = rows_with(STUDIES / "retrofit/table.md", heading)
        of = {arm: np.array([runs[arm, s][metric] for s in range(5)]) for arm, s in runs if s == 4}
        share = math.log2(speeds["full"]["ratio_quartiles"][1])
        at_equal_time = of["full_prenorm"] + share * (of["full_prenorm_double"] - of["full_prenorm"])
        base = runs["base", 0][metric]
        for cells, differences in (
            (("all weights, AttnRes", "equal tokens"), of["full"] - of["full_prenorm"]),
            (("all weights, AttnRes", "equal time"), of["full"] - at_equal_time),
            (("LoRA and queries", "equal tokens"), of["lora"] - of["lora_prenorm"]),
            (("queries alone", "equal tokens"), of["queries"] - base),
            (("queries alone, 4 heads", "equal tokens"), of["heads"] - of["queries"]),
        ):
            by_seed, mean = table[cells]
            assert by_seed == ", ".join(f"{d:+.4f}" for d in differences)
            assert mean == in_words(differences, 4)


def rows_with(path: Path, heading: str) -> dict[tuple[str, str], tuple[str, str]]:
    """Of the retrofit's table of a metric, differences by seed and mean, by arm and kind of comparison."""
    lines = path.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0].splitlines()
    cells = [[cell.strip("| *") for cell in line.split(" | ")] for line in lines if "[" in line and "%" not in line]
    return {(arm, kind): (by_seed, mean) for arm, _, kind, by_seed, mean, _ in cells}
