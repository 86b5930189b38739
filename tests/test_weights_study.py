# SPDX-License-Identifier: Apache-2.0
"""The study of weights: what it measures on a model, and what its table says of made-up runs."""

import json
import random
from dataclasses import asdict

import pytest
import torch
import typer

from attnres.depth.recorder import DepthRecorder
from attnres.utils.files import append_json, read_json_lines
from studies.reads.study import STEPS, Run, make_model
from studies.weights import study as weights_study
from studies.weights.study import COUNTS, EARLY, NUM_SITES, RATES, agreement, half_of, left_out, likeness, report


def with_queries(arm: str, std: float = 0.3):
    model = make_model(arm, 0).eval()
    if arm != "prenorm":
        with torch.no_grad():
            model.model.depth_queries.query.normal_(std=std, generator=torch.Generator().manual_seed(0))
    return model


IDS = torch.randint(0, 2048, (2, 16), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("arm", RATES)
def test_sources_and_reads(arm):
    """What a sublayer reads leads to what it writes, and the last read to the logits."""
    model = with_queries(arm)
    with torch.no_grad():
        sources, reads, outputs = weights_study.sources_and_reads(model, IDS)
        norm = model.model.norm
        logits = model.lm_head(norm(reads[-1])).view(*IDS.shape, -1)
        # The read of PreNorm is the mean of the stream's two parts, so that the norm's epsilon counts for more
        torch.testing.assert_close(logits, model(IDS).logits, atol=2e-3 if arm == "prenorm" else 1e-4, rtol=1e-3)
        mlp = model.model.layers[2]
        written = mlp.mlp(mlp.post_attention_layernorm(reads[5]))
        torch.testing.assert_close(written, outputs[5], atol=2e-3 if arm == "prenorm" else 1e-5, rtol=1e-2)
    assert [len(of_site) for of_site in sources[:5]] == {"prenorm": [1, 2, 2, 2, 2], "full": [1, 2, 3, 4, 5]}.get(
        arm, [1, 2, 2, 2, 3]
    )


def test_a_sublayer_is_left_out_everywhere():
    """Its output does not count any more: the loss is that of a model in which it writes something else."""
    model = with_queries("full")
    index = 4  # the attention of layer 2
    rise = left_out(model, IDS)[index]

    def loss():
        recorder = DepthRecorder(masked_source=dict.fromkeys(range(index + 1, NUM_SITES), index + 1))
        with torch.no_grad():
            logits = model(IDS, use_cache=False, depth_recorder=recorder).logits[:, :-1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), IDS[:, 1:].flatten()).item()

    with torch.no_grad():
        unchanged = model(IDS, labels=IDS).loss.item()
    without = loss()
    assert rise == pytest.approx(without - unchanged, abs=1e-5)
    model.model.layers[2].self_attn.o_proj.weight.data.mul_(-3)
    assert loss() == pytest.approx(without, abs=1e-5)
    with torch.no_grad():
        assert abs(model(IDS, labels=IDS).loss.item() - unchanged) > 1e-4


@pytest.mark.parametrize("arm", ["prenorm", "full"])
def test_several_sublayers_are_left_out(arm):
    """They do not count any more, whatever they write; and one by itself costs what it costs elsewhere."""
    model, several = with_queries(arm), [0, 3, 22]
    unchanged, without = (weights_study.loss_without(model, IDS, of) for of in ([], several))
    with torch.no_grad():
        assert unchanged == pytest.approx(model(IDS, labels=IDS).loss.item(), abs=1e-5)
    if arm == "full":
        alone = weights_study.loss_without(model, IDS, [4]) - unchanged
        assert alone == pytest.approx(left_out(model, IDS)[4], abs=1e-5)
    for layer, part in ((0, "self_attn.o_proj"), (1, "mlp.down_proj"), (11, "self_attn.o_proj")):
        model.model.layers[layer].get_submodule(part).weight.data.mul_(-3)
    assert weights_study.loss_without(model, IDS, several) == pytest.approx(without, abs=1e-5)
    assert abs(weights_study.loss_without(model, IDS, []) - unchanged) > 1e-4


def test_likeness_and_rank():
    hidden = torch.randn(500, 8, generator=torch.Generator().manual_seed(0))
    other = torch.randn(500, 8, generator=torch.Generator().manual_seed(1))
    same, opposite = likeness([hidden, other, 2 * hidden + 5, -other])  # the mean does not count
    assert (same, opposite) == (pytest.approx(1, abs=1e-5), pytest.approx(-1, abs=1e-5))
    assert weights_study.effective_rank(hidden) == pytest.approx(8, rel=0.02)
    assert weights_study.effective_rank(hidden[:, :1] * torch.ones(8)) == pytest.approx(1, abs=1e-4)
    assert [half_of(list(range(22)), half) for half in (0, 1)] == [4.5, 16.5]  # 0 to 9 and 12 to 21


def test_agreement():
    """Within sites the order is that of the predictor; over all pairs it is the other way round."""
    costs = [[None], [1.0, 2.0], [-9.0, -8.0, -7.0], [-99.0, -98.0, -97.0, -96.0]]
    weights = [[1.0], [1.0, 2.0], [10.0, 11.0, 12.0], [20.0, 21.0, 22.0, 23.0]]
    found = agreement({"weight": weights, "masking_cost": costs}, "weight")
    assert found["within"] == pytest.approx(1) and found["all"] < 0


@pytest.mark.slow
def test_report(tmp_path):
    noise, patterns = random.Random(0), ("newest", "embedding", "relative_entropy")
    for seed in range(3):
        for arm, rate in RATES.items():
            run = Run(arm, seed, STEPS, rate)
            like = 0.2 if arm == "full" else 0.5
            result = {
                "run": asdict(run),
                "judging_loss": 4 + noise.random(),
                "likeness": [like + noise.gauss(0, 0.01) for _ in range(NUM_SITES - 3)],
                "effective_rank": [10 + noise.random() for _ in range(NUM_SITES)],
            }
            if arm != "prenorm":
                weights = [[noise.random() for _ in range(site + 1)] for site in range(NUM_SITES)]
                kinds = {kind: {name: noise.random() for name in patterns} for kind in ("attention", "mlp")}
                costs = [[w + noise.gauss(0, 0.01) for w in of] if len(of) > 1 else [None] for of in weights]
                result |= {"weight": weights, "contribution": weights[:], "masking_cost": costs}
                result |= {"final_patterns": kinds, "early_patterns": {str(step): kinds for step in EARLY}}
            if arm == "full":
                result["left_out"] = [noise.random() for _ in range(NUM_SITES - 1)]
            append_json(tmp_path / "runs.jsonl", result)
    for arm, orders in (("full", ("read", "cost", "random")), ("prenorm", ("cost", "random"))):
        for seed in range(3):
            rises = {order: [count / 10 + seed / 100 for count in COUNTS] for order in orders}
            order = [[*reversed(range(NUM_SITES - 1))]]
            result = {"run": asdict(Run(arm, seed, STEPS, RATES[arm])), "orders": {"read": order}, "rises": rises}
            append_json(tmp_path / "several.jsonl", result)
    report(tmp_path)
    table = (tmp_path / "table.md").read_text()
    of_four = next(line for line in table.split("## Several")[1].splitlines() if line.startswith("| 4 |"))
    results = read_json_lines(tmp_path / "runs.jsonl")
    of_full = [result for result in results if result["run"]["arm"] == "full"]
    sums = [sum(result["left_out"][-4:]) for result in of_full]
    assert of_four.split(" | ")[1].startswith("0.410 (") and of_four.split(" | ")[6].startswith(
        f"{sum(sums) / 3:.3f} ("
    )
    of_weight = next(line for line in table.splitlines() if line.startswith("| Full | weight |"))
    assert of_weight.split(" | ")[2].startswith(("0.98", "0.99", "1.00"))
    alike = next(line for line in table.split("## Are outputs")[1].splitlines() if line.startswith("| Full |"))
    assert alike.split(" | ")[3].startswith("-0.30") and float(alike.split(" | ")[4]) < 0.05
    assert {path.stem for path in tmp_path.glob("*.svg")} == {"agreement", "patterns", "likeness", "left_out"}
    results.remove(of_full[0])
    (tmp_path / "runs.jsonl").write_text("".join(f"{json.dumps(result)}\n" for result in results))
    with pytest.raises(typer.BadParameter, match="2 seeds have all arms, and three are needed"):
        report(tmp_path)
