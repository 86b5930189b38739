# SPDX-License-Identifier: Apache-2.0
"""Reads over depth other than the paper's: the same promises, for every combination that makes sense."""

import copy
import itertools
import json
import pickle
import re
from typing import get_args, get_type_hints

import pytest
import torch
from literal_definition import literal_logits, mix_by_definition, relative
from rounding import UpToRounding
from tiny_models import mostly_slow, tiny_base_model
from transformers import AutoModelForCausalLM, DynamicCache
from typer.testing import CliRunner

from attnres import AttnResConfig, AttnResForCausalLM, DepthRecorder, set_backend
from attnres.base.slices import stack_sources
from attnres.cli import app
from attnres.cli.convert import convert as convert_command
from attnres.conversion import convert, revert
from attnres.depth.autograd import Scores, TokenScores, key_l2_norm
from attnres.depth.block_cache import BlockCache
from attnres.depth.choices import READS
from attnres.depth.definition import depth_attention_reference, read_by_definition
from attnres.depth.other_reads import start_stream
from attnres.depth.reads import ReadConfig


def read_fields(heads, query, rank, weights, open_block, stream="replaced") -> dict:
    return {
        "attn_res_num_heads": heads,
        "attn_res_query": query,
        "attn_res_query_rank": rank,
        "attn_res_weights": weights,
        "attn_res_open_block": open_block,
        "attn_res_stream": stream,
    }


QUERIES = [("learned", None), ("input", None), ("input", 5), ("hybrid", None), ("hybrid", 5)]
# All but the paper's own, which the other tests are about. What is fast of these is chosen by position: append only
ALL = [
    read_fields(heads, *query, weights, open_block)
    for heads, query, weights, open_block in itertools.product(
        (1, 4), QUERIES, ("softmax", "sigmoid", "softmax1"), ("sum", "each")
    )
][1:] + [
    read_fields(heads, *query, weights, open_block, "kept")
    for heads, query, weights, open_block in itertools.product(
        (1, 4), (QUERIES[0], QUERIES[-1]), ("softmax", "sigmoid", "softmax1"), ("sum", "each")
    )
]
# Each value of each field, and each with most others; `SOME[::2]` has each value as well
SOME = [
    read_fields(4, "learned", None, "softmax", "sum"),
    read_fields(1, "learned", None, "sigmoid", "sum"),
    read_fields(2, "learned", None, "softmax1", "each"),
    read_fields(1, "input", None, "softmax", "sum"),
    read_fields(4, "input", 5, "sigmoid", "each"),
    read_fields(2, "hybrid", None, "softmax1", "sum"),
    read_fields(1, "hybrid", 3, "softmax", "each"),
    read_fields(1, "learned", None, "softmax", "sum", "kept"),
    read_fields(4, "learned", None, "softmax1", "each", "kept"),
    read_fields(2, "input", None, "sigmoid", "sum", "kept"),
]


def name_of(fields) -> str:
    if not isinstance(fields, dict):
        return str(fields)
    return "-".join(str(value) for value in fields.values() if value not in (None, "softmax", "sum", "replaced"))


def converted(base_model, block_size: int, fields: dict, sums: bool = True, **kwargs) -> AttnResForCausalLM:
    """The AttnRes model of a base with its weights and queries of zero."""
    config = AttnResConfig.from_base_config(
        base_model.config, block_size=block_size, attn_res_scale_norm_eps=sums, **fields, **kwargs
    )
    torch.manual_seed(1)
    model = AttnResForCausalLM(config).to(base_model.dtype).eval()
    _, unexpected = model.load_state_dict(base_model.state_dict(), strict=False)
    assert not unexpected
    return model


def randomize(model, scale: float = 0.2):
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.base_model.depth_queries.parameters():
            parameter.add_(torch.randn_like(parameter) * scale)
    return model


def gradients(model, ids) -> dict[str, torch.Tensor]:
    names, parameters = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad))
    return dict(zip(names, torch.autograd.grad(model(ids, labels=ids).loss, parameters)))


@pytest.fixture
def reference_backend():
    set_backend("reference")
    yield
    set_backend("auto")


@pytest.mark.parametrize("block_size", [1, 3])
@pytest.mark.parametrize("fields", mostly_slow(ALL, every=11), ids=name_of)
def test_every_read(fields, block_size, input_ids):
    """In fp64, on a base that rounds to nothing less: the base at queries of zero, and then the definition."""
    base_model = tiny_base_model("starcoder2", residual_dropout=0.0, embedding_dropout=0.0).double()
    model = converted(base_model, block_size, fields, attn_res_norm_eps=0.03)
    with torch.no_grad():
        expected = base_model(input_ids).logits
        assert relative(model(input_ids).logits, expected) < 1e-14
    assert relative(model(input_ids).logits, expected) < 1e-14

    # From scratch there is no factor
    model.config.attn_res_scale_norm_eps = block_size == 1
    randomize(model)
    literal, weights = literal_logits(base_model, model, input_ids)
    with torch.no_grad():
        outputs = model(input_ids, output_depth_attentions=True)
        assert relative(model(input_ids).logits, literal) < 1e-13  # in two phases
    assert relative(outputs.logits, literal) < 1e-13
    assert relative(model(input_ids).logits, literal) < 1e-13  # in training
    assert relative(literal, expected) > 1e-3, "the queries do nothing"
    assert len(outputs.depth_attentions) == model.config.num_sites
    for site, of_site in enumerate(outputs.depth_attentions):
        torch.testing.assert_close(of_site, weights[site], rtol=1e-10, atol=1e-12)

    fast = gradients(model, input_ids)
    set_backend("reference")
    try:
        slow = gradients(model, input_ids)
    finally:
        set_backend("auto")
    for name, of_definition in slow.items():
        assert of_definition.any(), name
        assert relative(fast[name], of_definition) < 1e-12, name


@pytest.mark.parametrize("fields", SOME, ids=name_of)
def test_functions(fields):
    """Scores and mixes of odd sizes, and their gradients, against numerical ones."""
    heads = fields["attn_res_num_heads"]
    torch.manual_seed(0)
    source, query = (
        torch.randn(2, 3, 4 * heads, dtype=torch.float64),
        torch.randn(2, 3, 4 * heads, dtype=torch.float64),
    )
    queries = torch.randn(5, 4 * heads, dtype=torch.float64)
    inputs = (queries.requires_grad_(), source.requires_grad_())
    eps_norm = torch.tensor(4 * heads * 1e-2, dtype=torch.float64).sqrt()
    assert torch.autograd.gradcheck(lambda q, s: Scores.apply(q, s, eps_norm, heads), inputs)

    def of_tokens(query, source):
        with torch.no_grad():
            l2_norm = key_l2_norm(source.flatten(0, 1), eps_norm)
        scores = TokenScores.apply(query * (4 * heads) ** 0.5, source, l2_norm, heads)
        return scores.view(2, 3, heads)

    # The norm is a number to the function, and its derivative is in the function's
    query.requires_grad_()
    expected = torch.func.vjp(
        lambda q, s: (
            (q * s * torch.rsqrt(s.square().mean(-1, keepdim=True) + 1e-2)).unflatten(-1, (heads, -1)).sum(-1)
        ),
        query.detach(),
        source.detach(),
    )
    grad = torch.randn_like(expected[0])
    actual = of_tokens(query, source)
    torch.testing.assert_close(actual, expected[0])
    torch.testing.assert_close(torch.autograd.grad(actual, (query, source), grad), expected[1](grad))


def test_the_definition_is_the_papers():
    """One head and a softmax: what the operator's own reference says."""
    query, *sources = torch.randn(5, 2, 3, 8, dtype=torch.float64)
    mix, weights = read_by_definition(query[0, 0], sources, 1e-3)
    expected = depth_attention_reference(query[0, 0], sources, 1e-3)
    torch.testing.assert_close((mix, weights[..., 0, :]), expected)


@pytest.mark.parametrize("scale", [0.3, 12.0, 400.0])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("weights", READS["attn_res_weights"])
def test_the_definition_of_weights(weights, heads, scale):
    """The package's own and that of the tests, and the functions of the fast path, also where scores are large."""
    torch.manual_seed(0)
    query, *sources = scale * torch.randn(5, 2, 3, 8, dtype=torch.float64)
    mix, of_source = read_by_definition(query, sources, 1e-3, heads, weights)
    expected_mix, expected = mix_by_definition(query, torch.ones(8), sources, 1e-3, heads, weights)
    torch.testing.assert_close((mix, of_source), (expected_mix, expected.view_as(of_source)), rtol=1e-10, atol=1e-12)


def test_the_inverse_of_weights_at_queries_of_zero():
    sources = list(torch.randn(3, 2, 4, 8, dtype=torch.float64))
    for weights in READS["attn_res_weights"]:
        _, of_source = read_by_definition(torch.zeros(8, dtype=torch.float64), sources, 1e-3, 1, weights)
        torch.testing.assert_close(of_source, torch.full_like(of_source, 1 / ReadConfig(weights=weights).factor(3)))


def test_every_value_is_known_everywhere():
    """To the code that reads, to the command line, and to files of adapters, which hold the places of values."""
    options = get_type_hints(convert_command, include_extras=False)
    for name, values in READS.items():
        (choices,) = (kind for kind in get_args(options[name.removeprefix("attn_res_")]) if kind is not type(None))
        assert get_args(choices) == values
    places = {"learned": 0, "input": 1, "hybrid": 2, "softmax": 0, "sigmoid": 1, "softmax1": 2, "sum": 0, "each": 1}
    places |= {"replaced": 0, "kept": 1}
    assert ReadConfig(num_heads=4).numbers() == [4, 0, 0, 0, 0]  # as in files from before the stream could be kept
    assert ReadConfig(num_heads=4, stream="kept").numbers() == [4, 0, 0, 0, 0, 1]
    assert {value: values.index(value) for values in READS.values() for value in values} == places


def test_heads_are_not_one_head_repeated(input_ids):
    """Scores of heads are sums over their slices: queries of one head are not those of several."""
    base_model = tiny_base_model("llama")
    one = randomize(converted(base_model, 2, {}))
    several = converted(base_model, 2, SOME[0])
    several.load_state_dict(one.state_dict())
    with torch.no_grad():
        assert relative(several(input_ids).logits, one(input_ids).logits) > 1e-3


@pytest.mark.one_in(3)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("fields", SOME, ids=name_of)
def test_generation(fields, cache, input_ids):
    model = randomize(converted(tiny_base_model("llama"), 3, fields))
    kwargs = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    kwargs |= {"cache_implementation": "static"} if cache == "static" else {}
    cached = model.generate(input_ids, disable_compile=True, **kwargs)
    with torch.no_grad():
        plain = UpToRounding(lambda: model(cached.sequences[:, :-1], use_cache=False).logits[:, -6:], model=model)
    plain.check(torch.stack(cached.logits, dim=1))
    if cache == "dynamic":  # padded to the left, one at a time
        padded = torch.cat([torch.zeros(3, 3, dtype=torch.long), input_ids], dim=1)
        mask = (torch.arange(padded.shape[1]) >= 3).long().expand(3, -1)
        again = model.generate(padded, attention_mask=mask, disable_compile=True, **kwargs)
        assert again.sequences[:, 3:].equal(cached.sequences)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("fields", SOME, ids=name_of)
def test_checkpointing(fields, use_reentrant, input_ids):
    model = randomize(converted(tiny_base_model("llama"), 3, fields)).train()
    expected = gradients(model, input_ids)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    model(input_ids, labels=input_ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert relative(parameter.grad, expected[name]) < 1e-5, name


@pytest.mark.one_in(3)
@pytest.mark.parametrize("fields", SOME, ids=name_of)
def test_half_precision(fields, input_ids):
    """The queries stay wide, and a read differs by the rounding of what it is made of."""
    model = randomize(converted(tiny_base_model("llama"), 3, fields), 0.1)
    with torch.no_grad():
        expected = model(input_ids).logits
        model.bfloat16()
        assert {parameter.dtype for parameter in model.model.depth_queries.parameters()} == {torch.float32}
        inference = model(input_ids).logits
    training = model(input_ids).logits
    rounded = relative(
        tiny_base_model("llama").bfloat16()(input_ids).logits, tiny_base_model("llama")(input_ids).logits
    )
    # The base's own error, of which there is some more with more operations
    assert relative(inference, expected) < 4 * rounded and relative(training, expected) < 4 * rounded
    with torch.autocast("cpu", torch.bfloat16):
        model.float()
        assert relative(model(input_ids).logits, expected) < 4 * rounded
        with torch.no_grad():
            assert relative(model(input_ids).logits, expected) < 4 * rounded


@pytest.mark.slow
@pytest.mark.parametrize("fields", SOME[::2], ids=name_of)
def test_compiled(fields, input_ids):
    # Two layers, a closed block and an open one: what is compiled grows with the layers
    model = randomize(converted(tiny_base_model("llama", num_hidden_layers=2), 3, fields))
    # What inductor makes of a graph is not ours, and takes a minute for gradients
    backend = "inductor" if fields == SOME[0] else "aot_eager"
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        expected = model(input_ids).logits
        torch.testing.assert_close(compiled(input_ids).logits, expected, rtol=1e-4, atol=1e-4)
    torch.compiler.reset()
    of_compiled = gradients(torch.compile(model, fullgraph=True, backend=backend), input_ids)
    torch.compiler.reset()
    for name, gradient in gradients(model, input_ids).items():
        assert relative(of_compiled[f"_orig_mod.{name}"], gradient) < 1e-4, name


@pytest.mark.one_in(3)
@pytest.mark.parametrize("fields", SOME, ids=name_of)
def test_slices(fields, input_ids):
    """A stream is handed from stage to stage, and pickled and copied on the way."""
    model = randomize(converted(tiny_base_model("llama"), 3, fields)).model
    with torch.no_grad():
        expected = model(input_ids).last_hidden_state
        first, last = copy.deepcopy(model), copy.deepcopy(model)
        first.keep_layers(0, 2)
        last.keep_layers(2, 4)
        stream = first(input_ids).last_hidden_state
        assert stream.site == 4 and stream.read_config == ReadConfig.of(model.config)
        parts = {"blocks": [b.clone() for b in stream.blocks], "partial": stream.partial.clone(), "site": stream.site}
        rebuilt = last.start_stream(**parts, outputs=[output.clone() for output in stream.outputs])
        for handed_on in (stream, copy.deepcopy(stream), rebuilt):
            actual = last(inputs_embeds=handed_on).last_hidden_state
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"attn_res_num_heads": 4}, {"attn_res_open_block": "each"}], ids=name_of)
def test_what_crosses_between_stages_is_compiled(fields, input_ids):
    """As vLLM's stages do, in one graph."""
    model = randomize(converted(tiny_base_model("llama"), 3, fields)).model
    model.keep_layers(0, 2)

    def sources(input_ids):
        return stack_sources(model(input_ids).last_hidden_state)

    with torch.no_grad():
        compiled = torch.compile(sources, fullgraph=True, backend="eager")(input_ids)
        # In a graph, reads are not computed in memory that is used again
        torch.testing.assert_close(compiled, sources(input_ids), rtol=1e-5, atol=1e-5)
    torch.compiler.reset()


def test_masked_sources(input_ids):
    """What a recorder leaves out is as if it were not there; the others' weights are their own if none depends."""
    for fields in SOME:
        model = randomize(converted(tiny_base_model("llama"), 3, fields))
        with torch.no_grad():
            recorder = DepthRecorder(masked_source={5: 1})
            masked = model(input_ids, depth_recorder=recorder).logits
            assert not recorder.weights[5][..., 1].any() and recorder.weights[5][..., 0].all()
            assert relative(masked, model(input_ids).logits) > 1e-4


@pytest.mark.one_in(5)
@pytest.mark.parametrize("fields", SOME[::2], ids=name_of)
def test_files(fields, input_ids, tmp_path):
    """Saved and loaded, converted from the command line, reverted bit for bit."""
    base_model = tiny_base_model("llama")
    base_model.save_pretrained(tmp_path / "base")
    model = randomize(converted(base_model, 3, fields))
    model.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert ReadConfig.of(loaded.config) == ReadConfig.of(model.config)
    with torch.no_grad():
        assert loaded(input_ids).logits.equal(model(input_ids).logits)

    names = {name.removeprefix("attn_res_"): value for name, value in fields.items()}
    report = convert(tmp_path / "base", tmp_path / "converted", block_size=3, **names)
    assert report.verification.equal and ReadConfig.of(loaded.config).in_words() == report.read != ""
    again = convert(tmp_path / "base", tmp_path / "again", block_size=3, **names)
    weights = [
        {path.name: path.read_bytes() for path in (tmp_path / name).glob("*.safetensors")}
        for name in ("converted", "again")
    ]
    assert weights[0] == weights[1] and again.read == report.read  # also what is random in it
    assert report.read in (tmp_path / "converted/README.md").read_text()
    revert(tmp_path / "converted", tmp_path / "reverted")
    before, after = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("base", "reverted"))
    assert type(after) is type(before)
    assert all(tensor.equal(after.state_dict()[name]) for name, tensor in before.state_dict().items())
    with pytest.raises(ValueError, match="trained queries"):
        revert(tmp_path / "saved", tmp_path / "lost")


def test_what_is_random_in_a_conversion_is_the_same_each_time(tmp_path):
    tiny_base_model("llama").save_pretrained(tmp_path / "base")
    for name in ("one", "two"):
        convert(tmp_path / "base", tmp_path / name, query="input", query_rank=2, verify=False)
    files = [
        {path.name: path.read_bytes() for path in (tmp_path / name).glob("*.safetensors")} for name in ("one", "two")
    ]
    assert files[0] == files[1]


def test_files_of_the_papers_read_are_as_before(tmp_path):
    model = converted(tiny_base_model("llama"), 3, {})
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert {name for name in written if name.startswith("attn_res_")} == {
        *("attn_res_block_size", "attn_res_norm_eps", "attn_res_scale_norm_eps", "attn_res_sublayers")
    }
    assert {name.split(".")[-1] for name in model.state_dict() if "depth" in name} == {"query", "key_norm"}


@pytest.mark.slow
def test_another_read_of_a_checkpoint(tmp_path, input_ids):
    """With queries of zero, one read is as good as another."""
    tiny_base_model("llama").save_pretrained(tmp_path / "base")
    convert(tmp_path / "base", tmp_path / "one", block_size=3)
    convert(tmp_path / "one", tmp_path / "two", query="input", query_rank=2, num_heads=4)
    convert(tmp_path / "two", tmp_path / "kept", query="learned", stream="kept")
    report = convert(tmp_path / "kept", tmp_path / "three", weights="sigmoid", stream="replaced")
    assert report.operation == "Change of the read" and report.read == "4 heads, weights sigmoid"
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("base", "two", "kept", "three")]
    assert [model.config.attn_res_block_size for model in models[1:]] == [3, 3, 3]
    assert models[2].config.attn_res_stream == "kept"
    assert {name.split(".")[-1] for name in models[3].state_dict() if "depth" in name} == {"query", "key_norm"}
    with torch.no_grad():
        logits = [model(input_ids).logits for model in models]
    for of_attnres in logits[1:]:
        torch.testing.assert_close(of_attnres, logits[0], rtol=1e-4, atol=1e-4)
    randomize(models[1]).save_pretrained(tmp_path / "trained")
    with pytest.raises(ValueError, match="trained queries"):
        convert(tmp_path / "trained", tmp_path / "no", num_heads=2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attn_res_num_heads": 5}, "`attn_res_num_heads=5` must divide `hidden_size=32`"),
        ({"attn_res_num_heads": 0}, "`attn_res_num_heads=0` must be"),
        ({"attn_res_num_heads": True}, "`attn_res_num_heads=True` must be"),
        ({"attn_res_num_heads": 2.0}, "`attn_res_num_heads=2.0` must be"),
        ({"attn_res_query": "static"}, "`attn_res_query='static'` must be one of learned, input, hybrid"),
        ({"attn_res_query": None}, "`attn_res_query=None` must be one of"),
        ({"attn_res_weights": "relu"}, "must be one of softmax, sigmoid, softmax1"),
        ({"attn_res_open_block": ["sum"]}, "must be one of sum, each"),
        ({"attn_res_stream": "added"}, "`attn_res_stream='added'` must be one of replaced, kept"),
        ({"attn_res_stream": True}, "`attn_res_stream=True` must be one of replaced, kept"),
        ({"attn_res_query_rank": 4}, "`attn_res_query='learned'` has none"),
        ({"attn_res_query": "input", "attn_res_query_rank": 0}, "`attn_res_query_rank=0` must be None, or a rank"),
        ({"attn_res_query": "hybrid", "attn_res_query_rank": 33}, "must be at most `hidden_size=32`"),
    ],
)
def test_bad_fields(fields, message, tmp_path):
    base_model = tiny_base_model("llama")
    with pytest.raises(ValueError, match=re.escape(message)):
        AttnResConfig.from_base_config(base_model.config, **fields)
    base_model.save_pretrained(tmp_path / "base")
    names = {name.removeprefix("attn_res_"): value for name, value in fields.items() if value is not None}
    if names:
        with pytest.raises(ValueError, match=re.escape(message)):
            convert(tmp_path / "base", tmp_path / "out", **names)
        assert not (tmp_path / "out").exists()


def test_a_model_is_not_read_otherwise_than_it_was_made(input_ids):
    model = converted(tiny_base_model("llama"), 3, {})
    model.config.attn_res_num_heads = 4
    with pytest.raises(ValueError, match="was changed"):
        model(input_ids)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("fields", [SOME[0], SOME[4], SOME[7]], ids=name_of)
def test_adapters(fields, input_ids, tmp_path):
    """An adapter has its queries with it, and is not put on a model that would read them otherwise."""
    from peft import LoraConfig, PeftModel, get_peft_model

    base_model = tiny_base_model("llama")
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", modules_to_save=["depth_queries"])
    model = get_peft_model(converted(base_model, 3, fields), lora)
    randomize(model.base_model.model)
    model.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(converted(base_model, 3, fields), tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids).logits, model(input_ids).logits)
    # Of the same tensors, in another read
    other = {**fields, "attn_res_weights": "softmax1"}
    for load in (
        lambda model: PeftModel.from_pretrained(model, tmp_path / "adapter"),
        lambda model: model.load_adapter(str(tmp_path / "adapter")),
    ):
        with pytest.raises((ValueError, RuntimeError), match="would read something else"):
            load(converted(base_model, 3, other))
    if fields == SOME[0]:
        with pytest.raises((ValueError, RuntimeError), match="would read something else"):
            PeftModel.from_pretrained(converted(base_model, 3, {}), tmp_path / "adapter")
    merged = loaded.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    with torch.no_grad():
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        torch.testing.assert_close(again(input_ids).logits, loaded(input_ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_command_line(tmp_path, monkeypatch):
    """`attnres convert` with every option, and what it refuses before it works."""
    tiny_base_model("llama").save_pretrained(tmp_path / "base")

    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        return CliRunner().invoke(app, [*map(str, arguments)])

    options = (
        "--num-heads",
        4,
        "--query",
        "hybrid",
        "--query-rank",
        3,
        "--weights",
        "softmax1",
        "--open-block",
        "each",
        "--stream",
        "kept",
    )
    done = run("convert", "base", "out", "--block-size", 3, *options, "--json")
    assert done.exit_code == 0, done.output
    printed = json.loads(done.stdout)
    assert printed["verification"]["equal"]
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert {name: config[name] for name in read_fields(*range(6))} == read_fields(
        4, "hybrid", 3, "softmax1", "each", "kept"
    )
    refused = run("convert", "base", "no", "--query", "gated")
    assert refused.exit_code == 2 and "gated" in refused.output and not (tmp_path / "no").exists()
    exported = run("export", "out", "kimi", "--to", "kimi")
    assert (
        exported.exit_code
        and "does not know" in str(exported.exception or exported.output)
        and not (tmp_path / "kimi").exists()
    )


@pytest.mark.slow
def test_inspection_of_heads(tmp_path):
    from attnres.inspection.figures import draw
    from attnres.inspection.measure import measure, read_excerpt

    model = randomize(converted(tiny_base_model("llama"), 3, SOME[2]))
    windows = torch.randint(1, 97, (3, 6))
    statistics = measure(model, windows, progress=False)
    with torch.no_grad():
        outputs = model.model(windows, output_depth_attentions=True, use_cache=False)
    for site, weights in zip(statistics.sites, outputs.depth_attentions):
        by_head = weights.double().mean((0, 1))
        assert len(site.sources) == by_head.shape[-1]
        torch.testing.assert_close(torch.tensor(site.heads, dtype=torch.float64), by_head, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            torch.tensor(site.weights, dtype=torch.float64), by_head.mean(0), rtol=1e-5, atol=1e-6
        )
        parts = weights / weights.sum(-1, keepdim=True)
        common = torch.minimum(parts[..., 0, :], parts[..., 1, :]).sum(-1).mean().item()
        assert site.head_agreement == pytest.approx(common, rel=1e-5)
    assert {path.stem for path in draw([statistics], tmp_path)} == {"weights", "profiles", "heads"}
    assert statistics.sites[5].sources == ["embedding", "block 1", "output 1", "output 2"]

    class Tokenizer:
        def decode(self, ids):
            return str(ids)

    excerpt = read_excerpt(model, windows[0], Tokenizer())
    assert len(excerpt.weights[5][0]) == 4


ABLATIONS = ["static", "raw_keys", "plain_final", "window", "without", "normed_values", "cumulative"]


@pytest.mark.parametrize("name", ABLATIONS)
def test_ablations(name, input_ids):
    """The reads that are there to be compared with, against loops over the sources of the paper's own."""
    from studies.common.comparison_reads import READS, with_read

    assert name in READS
    base_model = tiny_base_model("starcoder2", residual_dropout=0.0, embedding_dropout=0.0).double()
    model = converted(base_model, 2, {}, attn_res_norm_eps=0.03)
    with_read(model, name, **{"window": {"size": 2}, "without": {"left_out": (1,)}}.get(name, {}))
    with torch.no_grad():
        is_exact = relative(model(input_ids).logits, base_model(input_ids).logits) < 1e-14
    assert is_exact == (name in ("static", "raw_keys", "plain_final"))

    randomize(model)
    model.config.attn_res_scale_norm_eps = False
    recorder = DepthRecorder()
    logits = model(input_ids, labels=input_ids, depth_recorder=recorder).logits
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids).logits, logits)
    outputs = [recorder.outputs[site] for site in sorted(recorder.outputs)]
    embedding = model.get_input_embeddings()(input_ids)
    query, key_norm = model.model.depth_queries.query[5], model.model.depth_queries.key_norm[5]
    sources = [embedding, outputs[0] + outputs[1], outputs[2] + outputs[3], outputs[4]]
    normed = [source / (source.square().mean(-1, keepdim=True) + 0.03).sqrt() for source in sources]
    if name in ("window", "without"):
        sources, normed = [sources[0], *sources[2:]], [normed[0], *normed[2:]]
    if name == "normed_values":  # keys are these, normed once more
        normed = [source / (source.square().mean(-1, keepdim=True) + 0.03).sqrt() for source in normed]
    if name == "cumulative":
        sources = [sum(sources[: i + 1]) for i in range(4)]
        normed = [source / (source.square().mean(-1, keepdim=True) + 0.03).sqrt() for source in sources]
    scores = [(query * key_norm * key).sum(-1) for key in (sources if name == "raw_keys" else normed)]
    if name == "static":
        scores = [(query * key_norm)[i].expand(embedding.shape[:-1]) for i in range(4)]
    expected = torch.softmax(torch.stack(scores, -1), -1)
    torch.testing.assert_close(recorder.weights[5], expected)
    last = recorder.weights[model.config.num_sites - 1]
    assert (name == "plain_final") == last.allclose(torch.full_like(last, 1 / last.shape[-1]))
    if name == "without":
        return  # what nobody reads gets no gradient
    model.gradient_checkpointing_enable()
    model.train()
    before = gradients(model.eval(), input_ids)
    after = gradients(model.train(), input_ids)
    assert all(relative(after[name], before[name]) < 1e-12 for name in before)


def test_an_ablation_that_is_none():
    from studies.common.comparison_reads import with_read

    with pytest.raises(ValueError, match="`gated` is not a read to be compared with; there are static"):
        with_read(converted(tiny_base_model("llama"), 2, {}), "gated")


@pytest.mark.slow
@pytest.mark.parametrize("fields", SOME, ids=name_of)
def test_kernels(fields):
    """With Triton the sums over sources are kernels, and what there is no kernel for is plain."""
    pytest.importorskip("triton")
    model = randomize(converted(tiny_base_model("llama"), 3, fields))
    ids = torch.randint(3, 97, (2, 5))
    expected = gradients(model, ids)
    with torch.no_grad():
        logits = model(ids).logits
    set_backend("triton")
    try:
        actual = gradients(model, ids)
        with torch.no_grad():
            torch.testing.assert_close(model(ids).logits, logits, rtol=1e-4, atol=1e-4)
    finally:
        set_backend("auto")
    for name, gradient in expected.items():
        assert relative(actual[name], gradient) < 1e-4, name


def test_the_table_of_the_page_is_made_from_the_results():
    from studies.reads.every_read import PAGE, READS, RESULTS, table

    results = json.loads(RESULTS.read_text())
    assert table(results) in PAGE.read_text(encoding="utf-8")
    results["reads"][READS[2]]["kl"] *= 2
    assert table(results) not in PAGE.read_text(encoding="utf-8")


# Attacks: what could go wrong in silence


@pytest.mark.parametrize("given", [0, 1, 3])
def test_outputs_that_are_missing_or_too_many(given, input_ids):
    """A stage that is handed on blocks and partial sum alone would read other sources."""
    model = randomize(converted(tiny_base_model("llama"), 3, SOME[2])).model
    tensor = torch.randn(3, 11, 32)
    with pytest.raises(ValueError, match=f"a `partial` and 2 `outputs`, not .* a `partial` and {given} `outputs`"):
        model.start_stream([tensor, tensor], tensor, 5, outputs=[tensor] * given)
    plain = converted(tiny_base_model("llama"), 3, {}).model
    with pytest.raises(ValueError, match="a `partial` and 0 `outputs`, not .* a `partial` and 2 `outputs`"):
        plain.start_stream([tensor, tensor], tensor, 5, outputs=[tensor] * 2)


def test_one_kv_cache_for_models_that_read_otherwise(input_ids):
    """The block cache beside it is of the kind that the model needs, whoever came first."""
    base_model = tiny_base_model("llama")
    models = [randomize(converted(base_model, 3, fields)) for fields in ({}, SOME[0], SOME[3], SOME[7])]
    with torch.no_grad():
        for order in itertools.permutations(models):
            cache = DynamicCache(config=models[0].config)
            for model in (*order, *order):
                expected = model(input_ids[:1, :1], past_key_values=copy.deepcopy(cache)).logits
                assert model(input_ids[:1, :1], past_key_values=cache).logits.equal(expected)


@pytest.mark.parametrize(
    "numbers",
    [
        [3, 4, 0, 0, 0, 9],
        [3, 4, 0, 0, 0, -1],
        [3, 4, 0, 0, 0],
        [3, 0, 0, 0, 0, 0],
        [3, 4, 0, 0, 0, 0, 2],
        [3, 4, 0, 0, 0, 0, 1, 0],
    ],
)
def test_an_adapter_of_a_read_that_is_not_known(numbers):
    """A later version's, or one that somebody has made up."""
    queries = converted(tiny_base_model("llama"), 3, SOME[0]).model.depth_queries
    with pytest.raises(
        ValueError, match="trained for a read that is not known here, and this model has a read with 4"
    ):
        queries.check_trained_for(torch.tensor(numbers))
    queries.check_trained_for(queries.trained_for)


@pytest.mark.parametrize("weights", ["softmax", "sigmoid", "softmax1"])
@pytest.mark.parametrize("stream", ["replaced", "kept"])
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e4, 1e30])
def test_sources_and_queries_of_any_size(weights, scale, stream, input_ids):
    """Scores in the thousands, and sources of zeros or of huge numbers: finite, and the same in two phases."""
    fields = read_fields(4, "learned", None, weights, "each", stream)
    config = converted(tiny_base_model("llama"), 3, fields).config
    torch.manual_seed(0)
    queries = torch.randn(config.num_sites, 32) * 1e3
    for tokens in (1, 5):
        embedding, *outputs = torch.randn(6, 1, tokens, 32) * scale
        results = []
        for cached in (False, True):
            stream = start_stream(
                ReadConfig.of(config), [queries], (embedding,), block_size=3, eps=1e-6, scale_by_sources=True
            )
            with torch.no_grad():
                stream = stream.keep_in(BlockCache()) if cached else stream
                for output in outputs:
                    stream = stream.write(output)
                results.append(stream.read())
        assert all(result.isfinite().all() for result in results)
        torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3 * scale)


@pytest.mark.parametrize(
    "fields",
    [
        read_fields(32, "learned", None, "softmax", "sum"),  # a head for every number
        read_fields(1, "input", 32, "softmax", "sum"),
        read_fields(16, "hybrid", 1, "sigmoid", "each"),
    ],
    ids=name_of,
)
def test_extreme_sizes(fields, input_ids):
    base_model = tiny_base_model("starcoder2", residual_dropout=0.0, embedding_dropout=0.0).double()
    model = randomize(converted(base_model, 3, fields, attn_res_norm_eps=0.03))
    literal, _ = literal_logits(base_model, model, input_ids)
    with torch.no_grad():
        assert relative(model(input_ids).logits, literal) < 1e-13
        one_by_one = DynamicCache(config=model.config)
        steps = [model(input_ids[:1, i : i + 1], past_key_values=one_by_one).logits for i in range(input_ids.shape[1])]
        assert relative(torch.cat(steps, dim=1), literal[:1]) < 1e-13
    assert relative(model(input_ids).logits, literal) < 1e-13


@pytest.mark.parametrize("fields", [SOME[2], SOME[4], SOME[8]], ids=name_of)
def test_pickled_models(fields, input_ids):
    model = randomize(converted(tiny_base_model("llama"), 3, fields))
    with torch.no_grad():
        expected = model(input_ids).logits
        assert pickle.loads(pickle.dumps(model))(input_ids).logits.equal(expected)
        assert copy.deepcopy(model)(input_ids).logits.equal(expected)


@pytest.mark.parametrize("fields", [SOME[2], SOME[8]], ids=name_of)
def test_a_read_that_writes_nothing_new_of_scaled_streams(fields, input_ids):
    """A base that scales its stream (granite) and one that flattens its tokens (gpt_oss), against the definition."""
    for family in ("granite", "gpt_oss"):
        base_model = tiny_base_model(family)
        model = randomize(converted(base_model, 3, fields), 0.1)
        literal, weights = literal_logits(base_model, model, input_ids)
        with torch.no_grad():
            outputs = model(input_ids, output_depth_attentions=True)
        assert relative(outputs.logits, literal) < 1e-5
        assert [of_site.shape for of_site in outputs.depth_attentions] == [weights[i].shape for i in sorted(weights)]


@pytest.mark.parametrize("num_sets", [0, 1, 2])
def test_depth_metrics_of_several_data_sets(num_sets, tmp_path):
    """As a `Trainer` takes them: by name."""
    from attnres.training import AttnResTrainer, AttnResTrainingArguments

    rows = [{"input_ids": row, "labels": row} for row in torch.randint(3, 97, (4, 12)).tolist()]
    arguments = AttnResTrainingArguments(
        output_dir=str(tmp_path), max_steps=1, logging_steps=1, eval_strategy="steps", report_to="none", use_cpu=True
    )
    trainer = AttnResTrainer(
        model=converted(tiny_base_model("llama"), 3, SOME[0]),
        args=arguments,
        train_dataset=rows,
        eval_dataset={f"set{i}": rows[i:] for i in range(num_sets)} if num_sets != 1 else rows,
    )
    trainer.train()
    logged = {name for entry in trainer.state.log_history for name in entry}
    assert {"query_norm", "depth_entropy"} <= logged
    assert {"eval_loss"} <= logged if num_sets == 1 else {f"eval_set{i}_loss" for i in range(num_sets)} <= logged


@pytest.mark.one_in(3)
@pytest.mark.parametrize("fields", [SOME[0], SOME[1], SOME[4], SOME[5], SOME[7]], ids=name_of)
def test_training(fields, tmp_path):
    """Through the Trainer, with what it measures, logs and warns of: each kind of query and of weights."""
    from attnres.training import AttnResTrainer, AttnResTrainingArguments

    model = converted(tiny_base_model("llama"), 3, fields)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(3, 97, (8, 12)).tolist()]
    arguments = AttnResTrainingArguments(
        output_dir=str(tmp_path),
        max_steps=2,
        logging_steps=1,
        query_learning_rate="auto",
        query_weight_decay=0.1,
        report_to="none",
        use_cpu=True,
    )
    trainer = AttnResTrainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    assert all(tensor.any() for tensor in model.model.depth_queries.zero_initialized())
    logged = trainer.depth_metrics()
    assert logged["query_norm"] > 0 and 0.5 < logged["depth_entropy"] <= 1 + 1e-6
    trainer.explain_queries()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decays = {
        names[id(p)].split(".")[-1]: group["weight_decay"]
        for group in trainer.optimizer.param_groups
        for p in group["params"]
        if "depth_queries" in names[id(p)]
    }
    assert decays == {name: 0.0 if name == "key_norm" else 0.1 for name in decays} and len(decays) > 1


@pytest.mark.slow
def test_multimodal(tmp_path):
    """The language model in a multimodal checkpoint gets the read."""
    from test_multimodal import CONFIGS, make_base

    make_base(next(iter(CONFIGS))).save_pretrained(tmp_path / "base")
    report = convert(tmp_path / "base", tmp_path / "out", num_heads=2, weights="softmax1", stream="kept", block_size=3)
    assert report.verification.equal and report.read == "2 heads, weights softmax1, stream kept"
