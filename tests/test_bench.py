"""`attnres bench` on a tiny shape."""

import json

import pytest
import torch
from typer.testing import CliRunner

from attnres.benchmarks.twin import SHAPES, TWIN, make_models, report
from attnres.cli import app


def test_bench(tmp_path):
    arguments = ["bench", "--shape", "tiny", "--pairs", "3", "--cases", "decode-2-8,prefill-16,train-16"]
    result = CliRunner().invoke(app, [*arguments, "--variants", "3,full", "-o", str(tmp_path)])
    assert result.exit_code == 0, result.output
    results = json.loads((tmp_path / "bench.json").read_text())
    assert [record["model"] for record in results["time"]] == [TWIN, "3 blocks", "Full"] * 3
    for record in results["time"]:
        assert (record["model"] == TWIN) <= (record["median_ratio"] == record["fastest_ratio"] == 1)
        assert record["quartiles"][0] <= record["median_ratio"] <= record["quartiles"][1]
    assert {record["checkpointing"] for record in results["activations"]} == {False, True}
    before = (tmp_path / "bench.md").read_text()
    assert "| decode-2-8, eager |" in before and "Shape of tiny, 4 layers" in before
    report(tmp_path)
    assert (tmp_path / "bench.md").read_text() == before and (tmp_path / "bench.png").exists()


def test_models_share_the_weights_of_the_twin():
    models = make_models(SHAPES["tiny"], ["full", "2"], torch.float32, "cpu")
    twin = dict(models[TWIN].named_parameters())
    for model in (models["Full"], models["2 blocks"]):
        own = {name for name, parameter in model.named_parameters() if parameter is not twin.get(name)}
        assert own == {"model.depth_queries.query", "model.depth_queries.key_norm"}
        ids = torch.arange(12)[None]
        with torch.no_grad():
            before = models[TWIN](ids).logits
            model.model.depth_queries.query.zero_()
            # so it is the same function, which says that nothing was left uninitialised
            torch.testing.assert_close(model(ids).logits, before, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--shape", "gpt-9"], "`shape='gpt-9'` is none of"),
        (["--cases", "decode-1"], "`decode-1` is no case"),
        (["--variants", "many"], "`many` is neither a number of blocks nor full"),
        (["--dtype", "float33"], "`dtype='float33'` is none of torch's"),
    ],
)
def test_bad_arguments(arguments, message, tmp_path):
    result = CliRunner().invoke(app, ["bench", *arguments, "-o", str(tmp_path / "out")])
    assert message in str(result.exception) and not (tmp_path / "out").exists()
