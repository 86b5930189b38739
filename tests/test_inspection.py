"""`attnres inspect`: its figures against a direct computation, and the program on real files."""

import json
import math

import pytest
import torch
from tiny_models import convert, randomize_queries, reference_hidden_states, tiny_base_model
from typer.testing import CliRunner

from attnres.cli import app
from attnres.conversion.parity import read_sample
from attnres.demo import train_tokenizer
from attnres.inspection import measure
from attnres.inspection.figures import weight_matrix


def windows():
    return torch.randint(3, 97, (5, 9), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family, block_size", [("qwen3", 1), ("llama", 3), ("mixtral", 2)])
def test_against_the_definition(family, block_size):
    torch.manual_seed(0)
    model = randomize_queries(convert(tiny_base_model(family), block_size)).eval()
    statistics = measure(model, windows(), batch_size=2)
    with torch.no_grad():
        _, reads = reference_hidden_states(model.model, windows())
    assert len(statistics.sites) == len(reads) == model.config.num_sites
    for site, weights in zip(statistics.sites, reads):
        entropy = -(weights * weights.log()).sum(-1)
        assert site.weights == pytest.approx(weights.mean((0, 1)).tolist(), abs=1e-5)
        assert sum(site.weights) == pytest.approx(1, abs=1e-6)
        assert site.entropy == pytest.approx(entropy.mean().item(), abs=1e-5)
        assert site.effective_sources == pytest.approx(entropy.exp().mean().item(), rel=1e-4)
        assert site.small_weights == pytest.approx((weights < 0.01).float().mean().item(), abs=1e-6)
        assert site.embedding_weight == site.weights[0] and site.predecessor_weight == site.weights[-1]
        back = torch.arange(weights.shape[-1]).flip(0)
        assert site.distance == pytest.approx((weights * back).sum(-1).mean().item(), abs=1e-5)
        assert len(site.sources) == weights.shape[-1] and site.stream_rms is None
    kinds = [site.kind for site in statistics.sites]
    assert kinds == ["attention", "mlp"] * (len(kinds) // 2) + ["final"]
    assert weight_matrix(statistics).shape == (len(kinds), 1 + statistics.num_blocks)


@pytest.mark.parametrize("block_size", [1, 3])
def test_zero_queries_read_uniformly_and_give_the_stream(block_size):
    base = tiny_base_model("qwen3").eval()
    model = convert(base, block_size)
    of_itself, beside = measure(model, windows()), measure(model, windows(), base=base)
    for site, other in zip(of_itself.sites, beside.sites):
        assert site.weights == [pytest.approx(1 / len(site.weights))] * len(site.weights)
        assert site.relative_entropy == pytest.approx(1, abs=1e-6)
        assert site.distance == pytest.approx((len(site.weights) - 1) / 2, abs=1e-6)
        assert site.rms * len(site.weights) == pytest.approx(other.stream_rms, rel=1e-5)
        assert site.stream_rms == pytest.approx(other.stream_rms, rel=1e-5)
    assert of_itself.sites[0].entropy == 0 and of_itself.sites[-1].entropy == pytest.approx(
        math.log(len(of_itself.sites[-1].weights)), abs=1e-6
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inspect")
    tokenizer = train_tokenizer([read_sample()] * 3, vocab_size=400)
    base = tiny_base_model("qwen3", vocab_size=len(tokenizer))
    for name, model in (("base", base), ("a", convert(base, 2)), ("b", randomize_queries(convert(base, 2)))):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "empty.txt").write_text("")
    (folder / "latin.txt").write_bytes("é".encode("latin-1"))
    return folder


def test_program(folder, tmp_path):
    arguments = ["inspect", str(folder / "a"), str(folder / "b"), "--base", str(folder / "base"), "-o", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert f"{folder.name}/b: " in result.output and "of its maximum" in result.output
    results = json.loads((tmp_path / "depth.json").read_text())
    assert results["schema"] == 1 and len(results["models"]) == 2
    assert results["models"][1]["sites"][3]["stream_rms"] > 0
    for name in ("weights", "profiles"):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000 and (tmp_path / f"{name}.svg").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["{}/base"], "is a qwen3, no AttnRes model: `attnres convert` makes one of it"),
        (["./nowhere"], "There is no folder `./nowhere`"),
        (["{}/a", "--file", "{}/nothing.txt"], "There is no file"),
        (["{}/a", "--file", "{}/empty.txt"], "`empty.txt` has 0 tokens: there is nothing to read"),
        (["{}/a", "--file", "{}/latin.txt"], "is not UTF-8 text"),
        (["{}/a", "--text", "x", "--file", "{}/empty.txt"], "Give a text or a file, not both"),
        (["{}/a", "{}/a", "{}/b"], "One checkpoint can be inspected, or two compared; these are 3"),
    ],
)
def test_bad_input(folder, tmp_path, arguments, message):
    arguments = [argument.format(folder) for argument in arguments]
    result = CliRunner().invoke(app, ["inspect", *arguments, "-o", str(tmp_path / "out")])
    assert isinstance(result.exception, ValueError) and message in str(result.exception)
    assert not (tmp_path / "out").exists()
