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
from attnres.depth_attention import depth_attention_reference
from attnres.inspection import ablate, gradient_rms, measure
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


@pytest.mark.parametrize("family, block_size", [("qwen3", 1), ("granite", 3), ("mixtral", 2)])
def test_gradients_against_autograd(family, block_size):
    torch.manual_seed(0)
    model = randomize_queries(convert(tiny_base_model(family), block_size))
    measured = gradient_rms(model, windows(), batch_size=2)
    outputs = []

    def kept(module, args, output):
        outputs.append(output[0] if isinstance(output, tuple) else output)

    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(kept)
        layer.mlp.register_forward_hook(kept)
    hidden_states, _ = reference_hidden_states(model.model, windows())
    logits = model.lm_head(hidden_states) / getattr(model.config, "logits_scaling", 1.0)
    log_probabilities = logits[:, :-1].log_softmax(-1).gather(-1, windows()[:, 1:, None])
    gradients = torch.autograd.grad(-log_probabilities.sum(), outputs)
    assert measured == pytest.approx([gradient.square().mean().sqrt().item() for gradient in gradients], rel=1e-4)


@pytest.mark.parametrize("block_size", [1, 3])
def test_gradients_at_zero_queries_are_those_of_the_base(block_size):
    base = tiny_base_model("qwen3")
    converted = gradient_rms(convert(base, block_size), windows())
    assert len(converted) == 8 and converted == pytest.approx(gradient_rms(base, windows()), rel=1e-4)


@pytest.mark.parametrize("family, block_size", [("qwen3", 1), ("llama", 3)])
def test_ablation_against_the_definition(family, block_size, monkeypatch):
    torch.manual_seed(0)
    model = randomize_queries(convert(tiny_base_model(family), block_size))
    rises = ablate(model, windows(), batch_size=2)
    masked, read = None, [0]

    def masking(query, sources, eps):
        mix, weights = depth_attention_reference(query, sources, eps)
        if masked is not None and read[0] == masked[0]:
            others = [source for i, source in enumerate(sources) if i != masked[1]]
            mix, _ = depth_attention_reference(query, others, eps)
        read[0] += 1
        return mix, weights

    monkeypatch.setattr("tiny_models.depth_attention_reference", masking)

    @torch.no_grad()
    def loss():
        read[0] = 0
        logits = model.lm_head(reference_hidden_states(model.model, windows())[0])
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), windows()[:, 1:].flatten()).item()

    unchanged = loss()
    assert len(rises) == model.config.num_sites and rises[0] == [None]
    for site, of_site in enumerate(rises[1:], start=1):
        expected = []
        for source in range(len(of_site)):
            masked = (site, source)
            expected.append(loss() - unchanged)
        assert of_site == pytest.approx(expected, abs=2e-5)
    assert max(map(max, rises[1:])) > 1e-3
    assert "forward" not in vars(model.model.final_depth_read)


def test_measuring_leaves_the_model_as_it_was():
    model = randomize_queries(convert(tiny_base_model("qwen3"), 2)).train()
    before = measure(model, windows())
    gradient_rms(model, windows())
    ablate(model, windows())
    assert model.training and all(parameter.grad is None for parameter in model.parameters())
    assert measure(model, windows()) == before


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
    assert results["schema"] == 2 and len(results["models"]) == 2
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
        (["{}/a", "--text", "x", "--file", "{}/empty.txt"], "Give a text, a file or a data set, not text and file"),
        (["{}/a", "{}/a", "{}/b"], "One checkpoint can be inspected, or two compared; these are 3"),
    ],
)
def test_bad_input(folder, tmp_path, arguments, message):
    arguments = [argument.format(folder) for argument in arguments]
    result = CliRunner().invoke(app, ["inspect", *arguments, "-o", str(tmp_path / "out")])
    assert isinstance(result.exception, ValueError) and message in str(result.exception)
    assert not (tmp_path / "out").exists()
