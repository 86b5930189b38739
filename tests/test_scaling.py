# SPDX-License-Identifier: Apache-2.0
"""`attnres scaling`: runs of a ladder in their order, a law that is found again, and errors before anything runs."""

import json
import math
import re
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import typer
import yaml

from attnres.data.text import read_sample, train_tokenizer
from attnres.training.scaling import ladder, plot
from attnres.training.scaling.fit import PFLOPS_DAY, advantage, fit_floor, fit_ladder, fit_law
from attnres.training.scaling.ladder import Run, read_ladder, results_of, run_ladder, runs_left
from attnres.training.scaling.sweep import next_rate
from attnres.utils.files import read_json_lines
from studies.scaling.text import PIECE_LENGTH, pieces


HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
FIELDS = {
    "dataset": "train.jsonl",
    "tuning_dataset": "tuning.jsonl",
    "eval_dataset": "eval.jsonl",
    "tokenizer": "tokenizer",
    "model_config": {"base_model_type": "llama", "vocab_size": 400, "max_position_embeddings": 64, **HEADS},
    "sizes": {
        "small": {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32},
        "large": {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 64},
    },
    "arms": {"prenorm": None, "blocks": {"num_blocks": 2}, "full": {"attn_res_block_size": 1}},
    "seeds": 2,
    "tokens_per_parameter": 0.2,
    "rates": [1e-2, 2e-2],
    "tuned_sizes": 1,
    "tuning_seeds": 2,
    "training": {"max_length": 32, "per_device_train_batch_size": 4, "use_cpu": True, "disable_tqdm": True},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A ladder, its texts and its tokenizer."""
    monkeypatch.chdir(tmp_path)
    train_tokenizer([read_sample()] * 3, vocab_size=400).save_pretrained("tokenizer")
    paragraphs = [text for text in read_sample().split("\n\n") if text.strip()]
    for i, name in enumerate(("train", "tuning", "eval")):
        rows = [json.dumps({"text": text}) for text in paragraphs[i::3] * 20]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    (tmp_path / "ladder.yaml").write_text(yaml.safe_dump(FIELDS, sort_keys=False))
    return tmp_path


def stand_in(monkeypatch, loss_of):
    """Runs that take no time, and have the losses of a function."""
    done = []

    def train(ladder, run, work):
        done.append(run)
        return {"run": vars(run), "loss": loss_of(ladder, run), "seconds": 0.0}

    monkeypatch.setattr(ladder, "train", train)
    monkeypatch.setattr(
        ladder, "measure_times", lambda ladder: {size: dict.fromkeys(ladder.arms, 1.25) for size in ladder.sizes}
    )
    return done


def test_a_law_is_found_again():
    compute = np.geomspace(1e-6, 1e-3, 5)
    assert fit_law(compute, 1.9 * compute**-0.06) == pytest.approx((1.9, 0.06))
    assert fit_floor(compute, 1.2 + 0.5 * compute**-0.1) == pytest.approx((0.5, 0.1, 1.2), rel=1e-2)
    assert fit_floor(compute, 1.9 * compute**-0.06)[2] == pytest.approx(0.0, abs=0.02)
    # By the paper's two laws, 1.25 times the compute at 5.6 PFLOP/s-days
    assert advantage((1.891, 0.057), (1.870, 0.058), 5.6) == pytest.approx(1.25, abs=0.01)
    assert advantage((1.891, 0.057), (1.870, 0.058), 5.6, time=1.1) == pytest.approx(1.25 / 1.1, abs=0.01)


def test_pieces_of_a_text():
    """Nothing is lost, and no file is longer in a row than a piece, but for a line that is."""
    lines = ["import os\n", "\n", "x" * (PIECE_LENGTH + 5) + "\n", *("    return 1\r\n",) * 300, "last"]
    found = pieces("".join(lines))
    assert "".join(found) == "".join(lines) and len(found) > 4
    assert [len(piece) for piece in found if len(piece) > PIECE_LENGTH] == [PIECE_LENGTH + 6]
    assert pieces("one line") == ["one line"]


def test_a_sweep_goes_on_beyond_its_ends():
    assert next_rate({}, (1, 2)) == 1 and next_rate({1: 3.0}, (1, 2)) == 2
    assert next_rate({1: 3.0, 2: 2.0}, (1, 2)) == 4 and next_rate({1: 2.0, 2: 3.0}, (1, 2)) == 0.5
    assert next_rate({1: 3.0, 2: 2.0, 4: 2.5}, (1, 2)) is None
    assert next_rate({1: math.inf, 2: math.inf}, (1, 2)) == 0.5  # all have diverged
    assert next_rate({1: math.nan, 2: 3.0, 4: 4.0}, (1, 2)) is None
    assert next_rate({1e-5: 3.0, 3e-5: 2.0}, (1e-5, 3e-5), factor=3.0) == 9e-5
    with pytest.raises(ValueError, match="finds no best one between others .*: begin with other `rates`"):
        next_rate({2.0**i: math.inf for i in range(-6, 2)}, (1, 2))


def test_every_run_once(folder, monkeypatch, run_attnres, capsys):
    """Sweeps of all arms first; then every seed, size and arm with the rate that was carried over; and the fit."""

    def loss(ladder, run):
        gain = {"prenorm": 1.0, "blocks": 0.98, "full": 0.97}[run.arm]
        best = 0.04 if run.arm == "full" else 0.02
        noise = 1 + 1e-3 * run.seed * (not run.is_tuning)
        return (
            gain * noise * (ladder.compute_of(run.size) / PFLOPS_DAY) ** -0.05
            + math.log(run.learning_rate / best) ** 2
        )

    done = stand_in(
        monkeypatch,
        lambda ladder, run: (
            # The mean decides: either seed alone would have 0.01 or 0.04 as the best rate of PreNorm
            loss(ladder, run) + {0.01: 0.5, 0.04: -0.5}.get(run.learning_rate, 0) * (1 if run.seed % 2 else -1)
            if run.is_tuning
            else loss(ladder, Run(run.arm, run.size, run.seed, 0.04 if run.arm == "full" else 0.02))
        ),
    )
    assert run_attnres("scaling", "run", "ladder.yaml", "-o", "out") == 0
    tuned = [(run.arm, run.learning_rate) for run in done if run.is_tuning]
    assert {rate for arm, rate in tuned if arm == "prenorm"} == {0.01, 0.02, 0.04}
    assert {rate for arm, rate in tuned if arm == "full"} == {0.01, 0.02, 0.04, 0.08}
    assert all(run.size == "small" for run in done if run.is_tuning)
    assert len({*done}) == len(done) and {run.seed for run in done if run.is_tuning} == {100, 101}
    finals = [run for run in done if not run.is_tuning]
    assert len(finals) == 2 * 2 * 3 == len(set(finals))
    rates = {(run.arm, run.size): run.learning_rate for run in finals}
    assert rates["full", "small"] == 0.04 and rates["full", "large"] == pytest.approx(0.04 / 2**0.5, rel=1e-2)
    # Nothing is left, and nothing is done twice
    assert [*runs_left(read_ladder("ladder.yaml"), results_of("out"))] == []
    # Nor of a ladder that attnres 0.2 has begun, which kept every run in a file of its own
    results = read_json_lines(Path("out/runs.jsonl"))
    (Path("before") / "runs").mkdir(parents=True)
    for number, result in enumerate(results[:-1]):
        Path(f"before/runs/{number}.json").write_text(json.dumps(result))
    assert [*runs_left(read_ladder("ladder.yaml"), results_of("before"))] == [Run(**results[-1]["run"])]
    run_ladder("ladder.yaml", "out")
    assert len(done) == len(tuned) + 12
    capsys.readouterr()
    assert run_attnres("scaling", "fit", "-o", "out", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["arms"]["prenorm"]["b"] == pytest.approx(0.05) and found["arms"]["prenorm"]["A"] == pytest.approx(
        1.0005
    )
    full = found["arms"]["full"]
    assert full["equal_compute"]["advantage"] == pytest.approx(0.97 ** (-1 / 0.05))
    assert full["equal_time"]["advantage"] == pytest.approx(0.97 ** (-1 / 0.05) / 1.25)
    low, high = full["interval_A"]
    assert 0.97 <= low + 1e-9 and high <= 0.97 * 1.001 + 1e-9 and np.abs(full["residuals"]).max() < 1e-9
    assert run_attnres("scaling", "plot", "-o", "out") == 0
    assert (folder / "out/scaling.png").stat().st_size > 10_000
    picture = (folder / "out/scaling.svg").read_bytes()
    assert run_attnres("scaling", "plot", "-o", "out") == 0
    assert (folder / "out/scaling.svg").read_bytes() == picture


@pytest.mark.parametrize(
    "change, message",
    [
        ({"size": {}}, "`size` is not a field of a ladder"),
        ({"dataset": None}, "`dataset` is missing"),
        ({"arms": {"blocks": {"num_blocks": 2}, "prenorm": None}}, "the first of `arms` has to be PreNorm"),
        ({"arms": {"prenorm": None, "other": None}}, "`arms` needs an AttnRes arm"),
        ({"arms": {"prenorm": None, "full": {"attn_res_block": 1}}}, "arm `full` at size `small`: "),
        ({"sizes": dict(reversed(FIELDS["sizes"].items()))}, "from small to large"),
        ({"tuned_sizes": 3}, "`tuned_sizes` of them"),
        ({"rates": [1e-3]}, "two `rates`"),
        ({"tuning_seeds": 0}, "one of `tuning_seeds` at least"),
        ({"seeds": 101}, "1 to 100 `seeds`"),
        (
            {"tokens_per_parameter": "2e1"},
            "`tokens_per_parameter` has to be a number such as 20 or 2.0e.1, and is '2e1'",
        ),
        ({"tokens_per_parameter": 0}, "`tokens_per_parameter` has to be above 0, and is 0"),
        ({"seeds": "3"}, "`seeds` has to be a whole number, and is '3'"),
        ({"seeds": True}, "`seeds` has to be a whole number, and is True"),
        ({"rates": 3e-3}, "`rates` has to be a list of numbers"),
        ({"rates": [3e-3, "high"]}, "`rates` has to be a list of numbers"),
        ({"rates": [3e-3, math.nan]}, "`rates` has to be above 0"),
        ({"rates": ["3e-3", -4e-3]}, "`rates` has to be above 0, and is -0.004"),
        ({"dataset": 3}, "`dataset` has to be text, and is 3"),
        ({"arms": ["prenorm", "full"]}, "`arms` has to be a list of `field: value`"),
        ({"arms": {"prenorm": None, "full": 3}}, "`arms: full` has to be a list of `field: value`, and is 3"),
        ({"sizes": {"small": None, "large": {"hidden_size": 8}}}, "size `small` has to be a list of `field: value`"),
        ({"model_config": {"vocab_size": 400}}, "`model_config` has no `base_model_type`"),
        ({"training": {"max_length": "32"}}, "`training: max_length` has to be a whole number, and is '32'"),
        ({"training": {"seed": 3}}, "`seed` in `training` is another one in each run"),
    ],
)
def test_bad_ladders(folder, change, message):
    fields = {name: value for name, value in {**FIELDS, **change}.items() if value is not None}
    (folder / "ladder.yaml").write_text(yaml.safe_dump(fields, sort_keys=False))
    with pytest.raises(ValueError, match=message):
        run_ladder("ladder.yaml", "out")
    assert not (folder / "out").exists()


def test_an_empty_field(folder):
    (folder / "ladder.yaml").write_text(yaml.safe_dump({**FIELDS, "training": None}))
    with pytest.raises(ValueError, match="`training` has to be a list of `field: value`, and is None"):
        read_ladder("ladder.yaml")


def test_what_is_missing(folder, monkeypatch, run_attnres, capsys):
    for step, said in (("fit", "has no runs of a ladder"), ("plot", "`attnres scaling fit -o out` makes it")):
        assert run_attnres("scaling", step, "-o", "out") == 1 and said in capsys.readouterr().err
    assert run_attnres("scaling", "run", "-o", "out") == 2 and run_attnres("scaling", "fit", "ladder.yaml") == 2
    done = stand_in(monkeypatch, lambda ladder, run: 3.0 if len(done) < 6 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_ladder("ladder.yaml", "out")
    with pytest.raises(ValueError, match="12 of 12 runs have no result"):
        fit_ladder("out")
    (folder / "ladder.yaml").write_text(yaml.safe_dump({**FIELDS, "seeds": 3}, sort_keys=False))
    with pytest.raises(ValueError, match="has runs of another ladder"):
        run_ladder("ladder.yaml", "out")


@pytest.mark.slow
@pytest.mark.parametrize("exponent", [0.0, 0.05])
def test_what_a_fit_does_not_know(exponent, folder, monkeypatch):
    """An advantage where losses do not fall or rise, and a floor by two sizes."""
    assert advantage((3.0, exponent), (3.0, -0.05), 1e-6) is advantage((3.0, 0.0), (3.0, exponent), 1e-6) is None
    stand_in(
        monkeypatch,
        lambda ladder, run: ladder.compute_of(run.size) ** exponent + abs(run.learning_rate - 0.01) * run.is_tuning,
    )
    run_ladder("ladder.yaml", "out")
    full = fit_ladder("out")["arms"]["full"]
    assert full["with_floor"] is None and full["equal_time"] == {"advantage": None, "interval": None}
    table = Path("out/fit.md").read_text()
    assert "| not known: two sizes |" in table and "| full | not known: losses do not fall with compute |" in table
    assert plot.plot_ladder("out")


def test_a_loss_that_is_no_number(folder, monkeypatch):
    def pretrain(fields):
        (Path(fields["output_dir"])).mkdir(parents=True)
        (Path(fields["output_dir"]) / "history.json").write_text("[]")
        return SimpleNamespace(losses=[3.0, math.nan], trainable_parameters=1)

    monkeypatch.setattr(ladder, "pretrain", pretrain)
    result = ladder.train(read_ladder("ladder.yaml"), Run("full", "small", 0, 1e-2), folder / "work")
    assert result["loss"] == math.inf


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_runs_that_diverge(loss, folder, monkeypatch):
    """In a sweep they count as the worst, and of the others their seed is left out of all arms."""
    diverged = [("full", "large", 1)]

    def loss_of(ladder, run):
        too_high = run.is_tuning and run.learning_rate > 0.015
        too_low = run.is_tuning and run.learning_rate < 0.008
        return loss if too_high or (run.arm, run.size, run.seed) in diverged else 3.0 - (run.size == "large") + too_low

    done = stand_in(monkeypatch, loss_of)
    run_ladder("ladder.yaml", "out")
    assert {run.learning_rate for run in done if run.is_tuning} == {0.005, 0.01, 0.02}
    found = fit_ladder("out")
    assert (found["seeds"], found["diverged"]) == (1, ["full-large-seed1"])
    assert found["arms"]["full"]["losses"] == [3.0, 2.0] == found["arms"]["prenorm"]["losses"]
    assert "the seeds of full-large-seed1, which diverged" in Path("out/fit.md").read_text()
    results = read_json_lines(Path("out/runs.jsonl"))
    (changed,) = (r for r in results if list(r["run"].values())[:3] == ["blocks", "small", 0])
    changed["loss"] = math.nan
    Path("out/runs.jsonl").write_text("".join(f"{json.dumps(result)}\n" for result in results))
    with pytest.raises(ValueError, match="blocks-small-seed0, full-large-seed1"):
        fit_ladder("out")


def test_every_arm_is_drawn(tmp_path, monkeypatch):
    """Also more of them than colours, none like another one."""
    compute, drawn = np.array([1e-6, 1e-4]), []
    arms = {f"arm{i}": {"A": 2.0 + i / 10, "b": 0.05} for i in range(10)}
    losses = {arm: np.array([found["A"] * compute ** -found["b"]]) for arm, found in arms.items()}
    (tmp_path / "fit.json").write_text(json.dumps({"arms": arms, "seeds": 1}))
    monkeypatch.setattr(plot, "read_ladder", lambda path: None)
    monkeypatch.setattr(plot, "read_losses", lambda ladder, output: (compute, losses))
    monkeypatch.setattr(plot, "write_figure", lambda figure, path: drawn.append(figure) or [])
    plot.plot_ladder(tmp_path)
    lines = [line for line in drawn[0].axes[0].get_lines() if line.get_label().startswith("arm")]
    assert [line.get_label().split(":")[0] for line in lines] == list(arms)
    assert len({(line.get_color(), line.get_marker(), str(line._dash_pattern)) for line in lines}) == len(arms)


@pytest.mark.slow
def test_ladders_that_are_shown(tmp_path):
    """That of the docs and our own, whose sizes are named by their parameters."""
    root = Path(__file__).parents[1]
    (shown,) = re.findall(r"```yaml\n(.*?)```", (root / "docs/how_to/scaling.md").read_text(), flags=re.DOTALL)
    (tmp_path / "ladder.yaml").write_text(shown)
    for path in (tmp_path / "ladder.yaml", root / "studies/scaling/ladder.yaml"):
        ladder = read_ladder(path)
        for size in ladder.sizes:
            assert ladder.num_parameters(size) == pytest.approx(1000 * int(size.removesuffix("k")), rel=0.05)


@pytest.mark.slow
def test_a_ladder(folder, run_attnres):
    """Really trained, and interrupted on the way."""
    train, count = ladder.train, []

    def interrupted(*arguments):
        count.append(1)
        if len(count) == 4:
            raise KeyboardInterrupt
        return train(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ladder, "train", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_ladder("ladder.yaml", "out")
    assert len(results_of("out")) == 3
    run_ladder("ladder.yaml", "out")
    results, read = results_of("out"), read_ladder("ladder.yaml")
    assert not (folder / "out/work").exists()
    for run, result in results.items():
        assert 2 < result["loss"] < math.log(400) + 3 and result["tokens"] == read.steps_of(run.size) * 128
        assert result["compute"] == 6 * result["parameters"] * result["tokens"]
    added = {run.arm: r["trainable_parameters"] for run, r in results.items() if run.size == "large"}
    assert added["full"] == added["blocks"] == added["prenorm"] + 2 * 7 * 32
    assert run_attnres("scaling", "fit", "-o", "out") == 0 and run_attnres("scaling", "plot", "-o", "out") == 0


def test_baseline_at_other_rates(folder, monkeypatch):
    """PreNorm is trained again at the rate of the blocks, once; a size that is none is named."""
    from studies.scaling import baseline_rates

    def loss(ladder, run):
        return 4 + abs(run.learning_rate - (0.04 if run.arm == "blocks" else 0.02)) * run.is_tuning

    done = stand_in(monkeypatch, loss)
    run_ladder("ladder.yaml", "out")
    seen = []

    def train(ladder, run, work):
        seen.append(run)
        return {"run": asdict(run), "loss": 3.5}

    monkeypatch.setattr(baseline_rates, "train", train)
    for _ in range(2):
        baseline_rates.main(folder / "out", ["small"])
    rate = next(run.learning_rate for run in done if (run.arm, run.size, run.seed) == ("blocks", "small", 0))
    assert seen == [Run("prenorm", "small", seed, rate) for seed in range(2)] and rate == 0.04
    assert len(read_json_lines(folder / "out/other_rates.jsonl")) == 2
    with pytest.raises(typer.BadParameter, match="has the sizes small, large and the arms .*; this needs tiny"):
        baseline_rates.main(folder / "out", ["tiny"])
