# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""`attnres inspect`: its figures against a direct computation, and the program on real files."""

import dataclasses
import gc
import json
import math
import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from datasets import Dataset
from rounding import all_in_fp64, wide
from tiny_models import (
    TINY,
    Reference,
    convert,
    mostly_slow,
    randomize_queries,
    reference_hidden_states,
    tiny_base_model,
)
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

import attnres
from attnres.checkpoints.fingerprint import checkpoint_fingerprint
from attnres.cli import app
from attnres.data.text import read_sample, train_tokenizer
from attnres.depth.definition import depth_attention_reference
from attnres.depth.stream import DepthStream
from attnres.inspection import DepthStatistics, Excerpt, SiteStatistics, ablate, gradient_rms, inspect, measure
from attnres.inspection.callback import DepthMapCallback
from attnres.inspection.figures import ablation_map, ablation_matrix, heat_map, profiles, weight_matrix
from attnres.inspection.run import model_names
from attnres.inspection.text import pieces, read_windows
from attnres.model_cards.card import write_model_card


PAGE = (Path(__file__).parent.parent / "docs/how_to/inspect.md").read_text(encoding="utf-8")


# Of figures computed in fp64, whose rounding is a million times smaller
TOLERANCE = 1e-9


@pytest.fixture
def in_fp64():
    # A stream is cast to fp32 by name as well, where a norm of a plain base is given one
    with all_in_fp64(), mock.patch.object(DepthStream, "float", DepthStream.double):
        yield


def windows():
    return torch.randint(3, 97, (5, 9), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family, block_size", [("qwen3", 1), ("llama", 3), ("mixtral", 2)])
def test_against_the_definition(family, block_size, in_fp64):
    model = wide(randomize_queries(convert(tiny_base_model(family), block_size)))
    statistics = measure(model, windows(), batch_size=2)
    with torch.no_grad():
        _, reads = reference_hidden_states(model.model, windows())
    assert len(statistics.sites) == len(reads) == model.config.num_sites
    for site, weights in zip(statistics.sites, reads):
        entropy = -(weights * weights.log()).sum(-1)
        assert site.weights == pytest.approx(weights.mean((0, 1)).tolist(), abs=TOLERANCE)
        assert sum(site.weights) == pytest.approx(1, abs=TOLERANCE)
        assert site.entropy == pytest.approx(entropy.mean().item(), abs=TOLERANCE)
        assert site.effective_sources == pytest.approx(entropy.exp().mean().item(), rel=TOLERANCE)
        assert site.small_weights == pytest.approx((weights < 0.01).float().mean().item(), abs=TOLERANCE)
        assert site.embedding_weight == site.weights[0] and site.predecessor_weight == site.weights[-1]
        back = torch.arange(weights.shape[-1]).flip(0)
        assert site.distance == pytest.approx((weights * back).sum(-1).mean().item(), abs=TOLERANCE)
        assert len(site.sources) == weights.shape[-1] and site.stream_rms is None
    kinds = [site.kind for site in statistics.sites]
    assert kinds == ["attention", "mlp"] * (len(kinds) // 2) + ["final"]
    assert weight_matrix(statistics).shape == (len(kinds), 1 + statistics.num_blocks)


@pytest.mark.parametrize("block_size", [1, 3])
def test_zero_queries_read_uniformly_and_give_the_stream(block_size, in_fp64):
    base = wide(tiny_base_model("qwen3"))
    model = wide(convert(base, block_size))
    of_itself, beside = measure(model, windows()), measure(model, windows(), base=base)
    for site, other in zip(of_itself.sites, beside.sites):
        assert site.weights == [pytest.approx(1 / len(site.weights), rel=TOLERANCE)] * len(site.weights)
        assert site.relative_entropy == pytest.approx(1, abs=TOLERANCE)
        assert site.distance == pytest.approx((len(site.weights) - 1) / 2, abs=TOLERANCE)
        assert site.rms * len(site.weights) == pytest.approx(other.stream_rms, rel=TOLERANCE)
        assert site.stream_rms == pytest.approx(other.stream_rms, rel=TOLERANCE)
    assert of_itself.sites[0].entropy == 0 and of_itself.sites[-1].entropy == pytest.approx(
        math.log(len(of_itself.sites[-1].weights)), abs=TOLERANCE
    )


def gradients_by_hooks(trunk, run):
    """The root mean square of the gradient that each sublayer of a plain base gets, by hooks on the sublayers.

    Args:
        run: makes the logits of `windows()`.
    """
    outputs, handles = [], []

    def kept(module, args, output):
        outputs.append(output[0] if isinstance(output, tuple) else output)

    for layer in trunk.layers:
        mixer = layer.linear_attn if hasattr(layer, "linear_attn") else layer.self_attn
        handles += [mixer.register_forward_hook(kept), layer.mlp.register_forward_hook(kept)]
    log_probabilities = run()[:, :-1].log_softmax(-1).gather(-1, windows()[:, 1:, None])
    gradients = torch.autograd.grad(-log_probabilities.sum(), outputs)
    for handle in handles:
        handle.remove()
    # What is added to the stream is an output times the multiplier
    multiplier = getattr(trunk.config, "residual_multiplier", 1.0)
    return [(gradient / multiplier).square().mean().sqrt().item() for gradient in gradients]


@pytest.mark.parametrize("family, block_size", [("qwen3", 1), ("granite", 3), ("mixtral", 2)])
def test_gradients_against_autograd(family, block_size, in_fp64):
    model = wide(randomize_queries(convert(tiny_base_model(family), block_size)))
    measured = gradient_rms(model, windows(), batch_size=2)
    reference = Reference(model.model)

    def run():
        return model.lm_head(reference(windows())[0]) / getattr(model.config, "logits_scaling", 1.0)

    assert measured == pytest.approx(gradients_by_hooks(reference.native, run), rel=TOLERANCE)


@pytest.mark.parametrize("family, block_size", [("qwen3", 1), ("granite", 3), ("qwen3_next", 3), ("deepseek_v3", 2)])
def test_gradients_at_zero_queries_are_those_of_the_base(family, block_size, in_fp64):
    base = wide(tiny_base_model(family))
    expected = pytest.approx(gradients_by_hooks(base.model, lambda: base(windows()).logits), rel=TOLERANCE)
    assert gradient_rms(base, windows(), batch_size=2) == expected
    converted = gradient_rms(wide(convert(base, block_size)), windows())
    assert len(converted) == 8 and converted == expected


# Cohere's attention and MLP share a read, and one write of Phi's layers adds both
@pytest.mark.parametrize(
    "family, reads, kind", [("cohere", range(0, 9, 2), "attention"), ("phi", range(5), "sublayer")]
)
def test_sites_are_those_that_are_read(family, reads, kind, in_fp64):
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**TINY, "eos_token_id": 2})).eval()
    model = randomize_queries(convert(base, 3))
    statistics = measure(model, windows(), base=base)
    assert [site.site for site in statistics.sites] == list(reads)
    assert [site.kind for site in statistics.sites] == [*[kind] * 4, "final"]
    assert [site.layer for site in statistics.sites] == [0, 1, 2, 3, 3]
    streams = base(windows(), output_hidden_states=True).hidden_states[:4]  # the last one is normed
    for site, stream in zip(statistics.sites, streams):
        assert site.stream_rms == pytest.approx(stream.square().mean().sqrt().item(), rel=TOLERANCE)
    of_sublayers, rises = gradient_rms(model, windows()), ablate(model, windows())
    assert len(of_sublayers) == reads[-1] and len(rises) == reads[-1] + 1
    for number, rise in enumerate(rises):
        assert (rise == [None] * len(rise)) == (number == 0 or number not in reads)
    matrix = weight_matrix(statistics)
    assert [number for number in range(len(matrix)) if not np.isnan(matrix[number]).all()] == list(reads)


@pytest.mark.parametrize("family, block_size", [("qwen3", 1), ("llama", 3)])
def test_ablation_against_the_definition(family, block_size, monkeypatch, in_fp64):
    model = wide(randomize_queries(convert(tiny_base_model(family), block_size)))
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
        assert of_site == pytest.approx(expected, abs=TOLERANCE)
    assert max(map(max, rises[1:])) > 1e-3


def test_measuring_leaves_the_model_as_it_was():
    base = tiny_base_model("qwen3").train()
    model = randomize_queries(convert(base, 2)).train()

    def hooks():
        modules = [*model.modules(), *base.modules()]
        return [(dict(module._forward_hooks), dict(module._forward_pre_hooks)) for module in modules]

    hooks_before, before = hooks(), measure(model, windows(), base=base)
    for of_model in (model, base):
        gradient_rms(of_model, windows())
    ablate(model, windows())
    assert hooks() == hooks_before
    for of_model in (model, base):
        assert of_model.training and all(parameter.grad is None for parameter in of_model.parameters())
    assert measure(model, windows(), base=base) == before


@pytest.mark.parametrize("run", [measure, gradient_rms])
def test_memory_does_not_grow_with_the_text(run):
    model = randomize_queries(convert(tiny_base_model("qwen3"), 2))
    alive = []
    gc.collect()
    gc.freeze()  # what tests before this one left is not counted, as it could go while this one counts

    def count(module, args):
        # By `type`: `isinstance` would ask what a weak proxy stands for, and torch.compile leaves proxies of nothing.
        alive.append(sum(found.numel() for found in gc.get_objects() if type(found) is torch.Tensor))

    model.model.layers[0].mlp.register_forward_pre_hook(count)
    run(model, windows().repeat(4, 1), batch_size=2)
    assert len(alive) == 10 and alive[9] == alive[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inspect")
    tokenizer = train_tokenizer([read_sample()] * 3, vocab_size=400)
    base = tiny_base_model("qwen3", vocab_size=len(tokenizer))
    for name, model in (("base", base), ("a", convert(base, 2)), ("b", randomize_queries(convert(base, 2)))):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    tiny_base_model("qwen3", num_hidden_layers=2).save_pretrained(folder / "shallow")
    convert(base, 2).save_pretrained(folder / "silent")
    (folder / "columns.jsonl").write_text('{"wrong": 1}\n')
    (folder / "broken.jsonl").write_text('{"text": ')
    (folder / "streamed").mkdir()
    (folder / "streamed/README.md").write_text("---\nconfigs:\n- config_name: x\n  data_files: part.jsonl\n---\n")
    (folder / "streamed/part.jsonl").write_text('{"text": ')
    (folder / "empty.txt").write_text("")
    (folder / "latin.txt").write_bytes("é".encode("latin-1"))
    return folder


@pytest.mark.slow
def test_program(folder, tmp_path):
    arguments = ["inspect", str(folder / "a"), str(folder / "b"), "--base", str(folder / "base"), "-o", str(tmp_path)]
    result = CliRunner().invoke(app, [*arguments, "--max-tokens", "64", "--gradients", "--ablate"])
    assert result.exit_code == 0, result.output
    assert "a: 64 tokens; entropy 1.000 of its maximum" in result.output and "\nb: 64 tokens" in result.output
    assert result.output.count("All its queries are zero") == 1
    results = json.loads((tmp_path / "depth.json").read_text())
    assert results["schema"] == 2 and len(results["models"]) == 2
    for model in results["models"]:
        assert model["sites"][3]["stream_rms"] > 0 and model["sites"][8]["gradient_rms"] is None
        assert model["sites"][3]["base_gradient_rms"] == results["models"][0]["sites"][3]["base_gradient_rms"] > 0
        assert len(model["sites"][8]["ablation"]) == 5 and model["sites"][0]["ablation"] == [None]
        tokens, weights = model["excerpt"]["tokens"], model["excerpt"]["weights"]
        assert "".join(tokens) in read_sample() and len(tokens) == 64
        for site, of_site in zip(model["sites"], weights):
            assert len(of_site) == 64
            for source, mean in enumerate(site["weights"]):
                assert sum(token[source] for token in of_site) / 64_000 == pytest.approx(mean, abs=1e-3)
    for name in ("weights", "profiles", "ablation"):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000 and (tmp_path / f"{name}.svg").exists()
    assert [model["zero_queries"] for model in results["models"]] == [True, False]


def test_schema_is_documented(folder, tmp_path):
    """What `depth.json` holds is what the dataclasses tell of, field by field."""
    results = inspect([str(folder / "b")], tmp_path, max_tokens=32, device="cpu")
    assert results == json.loads((tmp_path / "depth.json").read_text())
    assert results["attnres_version"] == attnres.__version__
    (model,) = results["models"]
    assert model["fingerprint"] == checkpoint_fingerprint(folder / "b") != checkpoint_fingerprint(folder / "a")
    for part, kind in ((model, DepthStatistics), (model["sites"][0], SiteStatistics), (model["excerpt"], Excerpt)):
        assert list(part) == [field.name for field in dataclasses.fields(kind)]
        for name in part:
            assert name in kind.__doc__ and f"`{name}`" in PAGE


def test_card_names_what_was_measured(folder, tmp_path):
    """Its fingerprint does not change by what is written beside it, and what is no longer true is not said."""
    checkpoint = tmp_path / "b"
    shutil.copytree(folder / "b", checkpoint)
    before = checkpoint_fingerprint(checkpoint)
    inspect([str(checkpoint)], checkpoint / "depth", max_tokens=32, device="cpu")
    text = write_model_card(checkpoint).read_text()
    assert checkpoint_fingerprint(checkpoint) == before
    assert f"Measured with attnres {attnres.__version__} on b (`{before}`)." in text
    assert "changed since" not in text and before[:12] in (checkpoint / "depth/index.html").read_text()
    shutil.copyfile(folder / "a/model.safetensors", checkpoint / "model.safetensors")
    text = write_model_card(checkpoint).read_text()
    assert f"`{before}`). The checkpoint has changed since." in text
    (checkpoint / "depth/depth.json").write_text('{"models": [')
    with pytest.raises(ValueError, match="depth.json` is damaged: remove it, or run `attnres inspect` again"):
        write_model_card(checkpoint)


def test_pictures_show_the_numbers(folder):
    model = randomize_queries(convert(tiny_base_model("qwen3"), 3))
    statistics = measure(model, windows())
    for site, rises in zip(statistics.sites, ablate(model, windows())):
        site.ablation = rises
    for figure, matrix in (
        (heat_map([statistics]), weight_matrix(statistics)),
        (ablation_map([statistics]), ablation_matrix(statistics)),
    ):
        axis = figure.axes[0]
        drawn = axis.images[0].get_array()
        assert (drawn.filled(math.nan) == matrix)[~drawn.mask].all() and drawn.mask.tolist() == np.isnan(
            matrix
        ).tolist()
        # Sublayers 0 to 2 are a block, and 3 to 5
        assert sorted({line.get_ydata()[0] for line in axis.lines}) == [2.5, 5.5]
    weights = [weight for site in statistics.sites[1:] for weight in site.weights]
    norm = heat_map([statistics]).axes[0].images[0].norm
    assert (norm.vmin, norm.vmax) == (min(weights), max(weights))  # of reads that have a choice
    difference = heat_map([statistics, statistics]).axes[2].images[0]
    assert abs(difference.get_array()).max() == 0 and difference.norm.vmin == -difference.norm.vmax


@pytest.mark.parametrize("kind", mostly_slow(["jsonl", "chat", "parquet", "txt", "folder", "streamed"], every=6))
def test_data_sets(folder, tmp_path, kind):
    texts = [f"{i} and {i + 1} are {2 * i + 1}." for i in range(40)]
    rows = [{"text": text} for text in texts]
    path = tmp_path / f"data.{kind}"
    if kind == "parquet":
        Dataset.from_list(rows).to_parquet(path)
    elif kind == "txt":
        path.write_text("\n".join(texts))
    else:
        if kind in ("folder", "streamed"):
            path.mkdir()
            if kind == "streamed":  # a folder like a repository of the Hub
                (path / "README.md").write_text(
                    "---\nconfigs:\n- config_name: default\n  data_files: '*.jsonl'\n---\n"
                )
        if kind == "chat":
            rows = [{"prompt": text[:8], "completion": text[8:]} for text in texts]
        file = path / "part.jsonl" if path.is_dir() else tmp_path / "data.jsonl"
        path = path if path.is_dir() else file
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    results = inspect([str(folder / "b")], tmp_path / "out", dataset=str(path), max_tokens=40, device="cpu")
    (model,) = results["models"]
    assert model["num_tokens"] == 40 and model["text"] == f"`{path}`"
    assert "".join(model["excerpt"]["tokens"]).startswith("0 and 1 are 1.")


def test_no_more_of_a_text_is_read_than_needed(monkeypatch):
    taken = []

    def rows():
        for i in range(100):
            taken.append(i)
            yield [1] * 10

    assert read_windows(rows(), max_tokens=25, length=10, source="text").shape == (2, 10)
    assert len(taken) == 3
    assert read_windows(iter([[1, 2, 3]]), max_tokens=25, length=10, source="text").tolist() == [[1, 2, 3]]


def test_a_file_is_read_bit_by_bit(tmp_path, monkeypatch):
    monkeypatch.setattr("attnres.inspection.text.PIECE", 7)
    (tmp_path / "text.txt").write_text("äöü and so on " * 3, encoding="utf-8")
    found = list(pieces(tmp_path / "text.txt"))
    assert "".join(found) == "äöü and so on " * 3 and set(map(len, found)) == {7}


@pytest.mark.slow
def test_callback_logs_to_tensorboard(folder, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from transformers import Trainer, TrainingArguments

    model = convert(tiny_base_model("qwen3"), 2)
    rows = [{"input_ids": row, "labels": row} for row in windows()]
    arguments = TrainingArguments(
        tmp_path, max_steps=4, eval_strategy="steps", eval_steps=2, report_to=[], use_cpu=True, save_strategy="no"
    )
    Trainer(
        model, arguments, train_dataset=rows, eval_dataset=rows, callbacks=[DepthMapCallback(windows()[:2])]
    ).train()
    events = EventAccumulator(str(tmp_path / "runs/depth")).Reload()
    for name in ("depth/weights", "depth/profiles"):
        pictures = events.Images(name)
        assert [picture.step for picture in pictures] == [2, 4]
        assert pictures[0].encoded_image_string.startswith(b"\x89PNG") and pictures[0].height > 200
        assert pictures[0].encoded_image_string != pictures[1].encoded_image_string


@pytest.mark.parametrize(
    "folders, names",
    [
        (["full/final", "attnres"], ["full", "attnres"]),
        (["full/checkpoint-10", "full/final"], ["full/checkpoint-10", "full"]),
        (["one/model", "two/model"], ["one/model", "two/model"]),
        (["one/run/final", "two/run/final"], ["one/run", "two/run"]),
        (["user/name"], ["user/name"]),  # on the Hub
    ],
)
def test_models_have_names(tmp_path, monkeypatch, folders, names):
    monkeypatch.chdir(tmp_path)
    for folder in folders:
        if folder != "user/name":
            Path(folder).mkdir(parents=True, exist_ok=True)
    assert model_names(folders) == names


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["{}/base"], "is a qwen3, not an AttnRes model: `attnres convert` makes one of it"),
        (["./nowhere"], "There is no folder `./nowhere`"),
        (["{}/a", "--file", "{}/nothing.txt"], "There is no file"),
        (["{}/a", "--file", "{}/empty.txt"], "`empty.txt` has 0 tokens: there is nothing to read"),
        (["{}/a", "--file", "{}/latin.txt"], "is not UTF-8 text"),
        (["{}/a", "--text", "x", "--dataset", "{}/a"], "Give a text, a file or a data set, not text and dataset"),
        (["{}/a", "--dataset", "{}/nothing.jsonl"], "There is no file or folder"),
        (["{}/a", "--dataset", "{}/columns.jsonl"], "The data has the columns wrong"),
        (["{}/a", "--dataset", "{}/broken.jsonl"], "cannot be read as json"),
        (["{}/a", "--dataset", "{}/streamed"], "streamed` cannot be read: "),
        (["{}/a", "--dataset", "{}/empty.txt"], "there is nothing to read"),
        (["{}/a", "--device", "nowhere"], "`device='nowhere'` is not available: "),
        (["{}/a", "--dtype", "float17"], "`dtype='float17'` is not a dtype of torch"),
        (["{}/silent"], "silent` has no tokenizer that loads here: "),
        (["{}/a", "--split", "test"], "`split='test'` needs a data set: name one"),
        (["{}/a", "{}/base"], "is a qwen3, not an AttnRes model"),
        (["{}/a", "--base", "{}/b"], "is an AttnRes model; name the PreNorm model that it was made from"),
        (["{}/a", "--base", "{}/shallow"], "has num_hidden_layers 2 and"),
        (["{}/a", "--base", "./nowhere"], "There is no folder `./nowhere`"),
        (["{}/a", "--text", "x", "--file", "{}/empty.txt"], "Give a text, a file or a data set, not text and file"),
        (
            ["{}/a", "{}/b", "--name", "x"],
            "`names=['x']` should hold a name for each of the 2",
        ),
        (["{}/a", "{}/a", "{}/b"], "`attnres inspect` takes one checkpoint, or two to compare, not 3"),
    ],
)
def test_bad_input(folder, tmp_path, arguments, message):
    arguments = [argument.format(folder) for argument in arguments]
    result = CliRunner().invoke(app, ["inspect", *arguments, "-o", str(tmp_path / "out")])
    assert isinstance(result.exception, (ValueError, OSError)) and message in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_a_second_model_that_is_missing_is_told_before_the_first_is_read(folder, tmp_path):
    shutil.copytree(folder / "a", tmp_path / "damaged")
    (tmp_path / "damaged/model.safetensors").write_bytes(b"no weights")
    with pytest.raises(OSError, match="There is no folder `./nowhere`"):
        inspect([str(tmp_path / "damaged"), "./nowhere"], tmp_path / "out")


def test_nothing_is_cut_off_in_pictures():
    """Points of one model that are larger than the other's, and a long name."""
    base = tiny_base_model("qwen3")
    models = [convert(base, 3), randomize_queries(convert(base, 3))]
    statistics = [measure(model, windows(), name=f"{number}-{'name-' * 20}") for number, model in enumerate(models)]
    figure = profiles(statistics)
    figure.canvas.draw()
    for axis in figure.axes:
        low, high = axis.get_ylim()
        assert all(
            low <= value <= high for line in axis.lines for value in line.get_ydata() if line.get_marker() == "o"
        )
    figure = heat_map(statistics)
    figure.canvas.draw()
    edges = [axis.title.get_window_extent() for axis in figure.axes[:3]]
    assert all(left.x1 < right.x0 for left, right in zip(edges, edges[1:]))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("num_layers", [1, 48])
def test_axes_of_profiles(num_layers):
    """Whole sites on every axis, the same in every panel, and a legend of what is drawn."""
    model = convert(tiny_base_model("llama", num_hidden_layers=num_layers, hidden_size=16, intermediate_size=16), 1)
    figure = profiles([measure(model, torch.arange(8).view(1, 8))])
    figure.canvas.draw()
    for axis in figure.axes:
        low, high = axis.get_xlim()
        ticks = [tick for tick in axis.get_xticks() if low <= tick <= high]
        assert (low, high) == (-0.5, 2 * num_layers + 0.5) and 3 <= len(ticks) <= 10
        assert all(tick == round(tick) for tick in ticks)
        assert axis.get_legend() is None or len(axis.get_legend().get_texts()) == len(axis.lines)
        assert all(len(line.get_xdata()) for line in axis.lines)
