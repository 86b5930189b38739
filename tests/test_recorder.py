# SPDX-License-Identifier: Apache-2.0
"""Steering and patching: what a `DepthRecorder` changes in a forward pass, and what it leaves as it is."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from decoder_configs import decoder_config
from literal_definition import literal_logits, relative
from test_reads import SOME, converted, name_of, randomize
from tiny_models import tiny_base_model
from transformers import AutoModelForCausalLM, GenerationConfig

from attnres import AttnResConfig, AttnResForSequenceClassification, DepthRecorder, DepthStream
from attnres.depth.other_reads import start_stream
from attnres.depth.reads import ReadConfig


PLACES = {5: 2.0, 0: -1.0, (6, 1): 3.0, (7, 3): -2.0}  # a site writes 2 more, a source of a read is 3 larger, ...


def tiny_model(family="qwen3", block_size=3, fields=None, dtype=torch.float32):
    return randomize(converted(tiny_base_model(family).to(dtype), block_size, fields or {}))


def adding(places) -> DepthRecorder:
    """A recorder that adds numbers at some places."""
    edits = {place: (lambda tensor, number=number: tensor + number) for place, number in places.items()}
    return DepthRecorder(
        edit_output={place: edit for place, edit in edits.items() if isinstance(place, int)},
        edit_source={place: edit for place, edit in edits.items() if isinstance(place, tuple)},
    )


def set_to(tensor: torch.Tensor):
    """As a function that edits."""
    return lambda given: tensor


@pytest.mark.parametrize("family", ["qwen3", "starcoder2", "gemma"])
@pytest.mark.parametrize("fields", [{}, *SOME], ids=name_of)
@pytest.mark.one_in(8)
def test_edits_are_those_of_the_definition(fields, family, input_ids):
    """In fp64: of outputs and of sources, one at a time and together."""
    base_model = tiny_base_model(family).double().eval()
    model = randomize(converted(base_model, 3, fields))
    unchanged = model(input_ids).logits
    for places in (*({place: number} for place, number in PLACES.items()), PLACES):
        recorder = adding(places)
        edits = {**recorder.edit_output, **recorder.edit_source}
        expected, weights = literal_logits(base_model, model, input_ids, edits)
        actual = model(input_ids, depth_recorder=recorder).logits
        assert relative(actual, expected) < 1e-12 < 1e-4 < relative(actual, unchanged)
        for site, of_site in recorder.weights.items():
            torch.testing.assert_close(of_site, weights[site], rtol=1e-10, atol=1e-12)


def test_what_is_patched_in_comes_out(input_ids):
    """A site that gets all sources of another run writes what it has written there, and so on to the end."""
    model, other_ids = tiny_model(), input_ids.flip(0, 1)
    clean = DepthRecorder(sources={})
    with torch.no_grad():
        expected = model(input_ids, depth_recorder=clean).logits
        for site in (1, 5, 8):
            edits = {(site, i): set_to(source) for i, source in enumerate(clean.sources[site])}
            patched = DepthRecorder(edit_source=edits)
            logits = model(other_ids, depth_recorder=patched).logits
            assert relative(logits, expected) > 1e-2 or site == 8
            if site == 8:
                torch.testing.assert_close(logits, expected, rtol=0, atol=0)
            else:
                torch.testing.assert_close(patched.outputs[site], clean.outputs[site], rtol=0, atol=0)
                assert relative(patched.outputs[site - 1], clean.outputs[site - 1]) > 1e-2, "only this read sees it"


@pytest.mark.parametrize("name, place", [("edit_output", 2), ("edit_source", (5, 1))])
def test_at_chosen_tokens(name, place, input_ids):
    """In place, as in other libraries. Earlier tokens are the same to the last bit, and the model is as before."""
    model = tiny_model()

    def edit(tensor):
        tensor[1, 6] = 5.0

    with torch.no_grad():
        before = model(input_ids, depth_recorder=DepthRecorder()).logits
        after = model(input_ids, depth_recorder=DepthRecorder(**{name: {place: edit}})).logits
        again = model(input_ids, depth_recorder=DepthRecorder()).logits
    changed = (before != after).any(-1)
    assert changed[1, 6].all() and not changed[1, :6].any() and not changed[[0, 2]].any()
    torch.testing.assert_close(again, before, rtol=0, atol=0)


def test_the_same_as_a_hook_on_the_sublayer(input_ids):
    """What people have so far, where what a module returns is what it writes."""
    model = tiny_model("llama")
    layer = model.model.layers[2]
    with torch.no_grad():
        steered = model(input_ids, depth_recorder=adding({4: 0.5, 5: -0.25})).logits
        layer.self_attn.register_forward_hook(lambda module, args, output: (output[0] + 0.5, *output[1:]))
        layer.mlp.register_forward_hook(lambda module, args, output: output - 0.25)
        torch.testing.assert_close(model(input_ids).logits, steered)


def test_in_place_or_not(input_ids):
    """The same: a block that one read changes in place is as before for all others."""
    model = tiny_model()
    for name, place in (("edit_source", (5, 1)), ("edit_source", (7, 3)), ("edit_output", 3)):
        with torch.no_grad():
            expected, logits = (
                model(input_ids, depth_recorder=DepthRecorder(**{name: {place: edit}})).logits
                for edit in (lambda tensor: tensor * 2, lambda tensor: tensor.mul_(2))
            )
        torch.testing.assert_close(logits, expected, rtol=0, atol=0)


@pytest.mark.parametrize("site", [0, 1, 3])
@pytest.mark.parametrize("use_reentrant", [None, True, False])
def test_gradients_reach_a_vector(use_reentrant, site, input_ids):
    """Also where layers are computed again in the backward pass, and in the first one, in which the stream begins."""
    base_model = tiny_base_model("starcoder2", residual_dropout=0.0, embedding_dropout=0.0).double()
    model = randomize(converted(base_model, 3, {}))
    if use_reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.train()
    vector = torch.randn(32, dtype=torch.float64, requires_grad=True)

    def loss(vector):
        recorder = DepthRecorder(edit_output={site: lambda output: output + vector}, outputs=None)
        return model(input_ids, depth_recorder=recorder).logits.log_softmax(-1)[..., 7].sum()

    loss(vector).backward()
    direction = torch.randn_like(vector)
    with torch.no_grad():
        numeric = (loss(vector + 1e-5 * direction) - loss(vector - 1e-5 * direction)) / 2e-5
    torch.testing.assert_close(vector.grad @ direction, numeric, rtol=1e-6, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_stays_in_its_dtype(dtype, input_ids):
    """Whatever the dtype of the vector: a sum would be float32, and so would all that follows."""
    model, vector = tiny_model(dtype=dtype), torch.randn(32, dtype=torch.float64)
    edits = {
        "edit_output": {2: lambda output: output + vector},
        "edit_source": {(5, 0): lambda source: vector + source},
    }
    recorder = DepthRecorder(**edits)
    logits = model(input_ids, depth_recorder=recorder).logits
    assert {logits.dtype, *(output.dtype for output in recorder.outputs.values())} == {dtype}


@pytest.mark.parametrize("each", [False, True])
def test_layers_that_flatten_tokens(each):
    """As those of OPT do: functions get `[batch, seq, hidden]` all the same."""
    queries, embedding, output = torch.randn(4, 8), torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    read_config = ReadConfig(open_block="each" if each else "sum")
    mixes = []
    for flat in (False, True):
        recorder = adding({0: 1.0, (1, 1): 2.0})
        recorder.sources, recorder.tokens = {}, torch.Size((2, 5))
        tensors = [tensor.flatten(0, 1) if flat else tensor for tensor in (embedding, output)]
        stream = start_stream(read_config, [queries], tensors[:1], block_size=2, recorder=recorder)
        assert isinstance(stream, DepthStream)
        mixes.append(stream.write(tensors[1]).read().view(2, 5, 8))
        torch.testing.assert_close(recorder.sources[1], (embedding, output + 3))
    torch.testing.assert_close(*mixes)


@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"num_beams": 2}, {"cache_implementation": "static"}])
def test_generation_is_steered_at_every_token(options, input_ids):
    """Token by token, as a forward pass over the whole would be."""
    model = tiny_model()
    steered = DepthRecorder(
        edit_output={5: lambda output: output + 2}, edit_source={(8, 1): lambda source: source - 1}
    )
    tokens = model.generate(input_ids, max_new_tokens=6, do_sample=False, depth_recorder=steered, **options)
    with torch.no_grad():
        logits = model(tokens, depth_recorder=steered).logits
        plain = model.generate(input_ids, max_new_tokens=6, do_sample=False, **options)
    assert not torch.equal(tokens, plain)
    if "num_beams" not in options:
        torch.testing.assert_close(logits[:, 10:-1].argmax(-1), tokens[:, 11:])


def test_where_generation_cannot_be_steered(input_ids):
    model, recorder = tiny_model(), DepthRecorder()
    for name, options in (
        ("assistant_model", {"assistant_model": tiny_model()}),
        ("prompt_lookup_num_tokens", {"prompt_lookup_num_tokens": 3}),
        ("prefill_chunk_size", {"generation_config": GenerationConfig(prefill_chunk_size=4)}),
    ):
        with pytest.raises(ValueError, match=f"`depth_recorder` cannot be combined with `{name}`"):
            model.generate(input_ids[:1], depth_recorder=recorder, **options)
    with pytest.raises(ValueError, match="are not used by the model: .'deph_recorder'."):
        model.generate(input_ids, deph_recorder=recorder)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"edit_output": {8: torch.abs}}, "`edit_output` has site 8, which does not exist: they go from 0 to 7."),
        ({"edit_output": {-1: torch.abs}}, "`edit_output` has site -1, which does not exist"),
        ({"edit_source": {(9, 0): torch.abs}}, "`edit_source` has site 9, which does not exist: they go from 0 to 8."),
        ({"masked_source": {9: 0}}, "`masked_source` has site 9, which does not exist"),
        (
            {"edit_source": {(8, 4): torch.abs}},
            "`edit_source` has source 4 of site 8, which has 4: they go from 0 to 3.",
        ),
        ({"edit_source": {(8, -1): torch.abs}}, "`edit_source` has source -1 of site 8"),
        ({"edit_output": {2: lambda output: output[:, -1]}}, "`edit_output[2]` has to return a tensor of the shape"),
        ({"edit_output": {2: lambda output: output.mean(-1, True)}}, "[3, 11, 32], and returned [3, 11, 1]."),
        ({"edit_source": {8: torch.abs}}, "`edit_source` has the key 8, which has to be `(site, source)`."),
        ({"edit_source": {(8, 1, 0): torch.abs}}, "`edit_source` has the key (8, 1, 0)"),
        ({"edit_source": {(8, 1): torch.ones(32)}}, "`edit_source[(8, 1)]` has to be a function, and is a Tensor."),
        ({"edit_output": {2: None}}, "`edit_output[2]` has to be a function, and is a NoneType."),
        ({"edit_output": {"mlp": torch.abs}}, "`edit_output` has site 'mlp', which does not exist"),
        ({"edit_output": {2.5: torch.abs}}, "`edit_output` has site 2.5, which does not exist"),
        ({"edit_source": {(8, 1): lambda source: 0}}, "`edit_source[8, 1]` has to return a tensor of the shape"),
    ],
)
def test_what_is_asked_for_in_error(fields, message, input_ids):
    model = tiny_model()
    with pytest.raises(ValueError) as error:
        model(input_ids, depth_recorder=DepthRecorder(**fields))
    assert message in str(error.value)
    model(input_ids)  # nothing is left behind


@pytest.mark.parametrize("fields", [{"edit_source": {(1, 0): torch.abs}}, {"masked_source": {1: 0}}])
def test_a_site_that_is_never_read(fields, input_ids):
    """Cohere adds two outputs one after the other, and reads nothing in between: that nothing happens is said."""
    base_model = AutoModelForCausalLM.from_config(decoder_config("cohere2"))
    model = converted(base_model, 3, {})
    name = next(iter(fields))
    with pytest.raises(ValueError, match=rf"`{name}` has site 1, which this base never reads. It reads \[0, 2, 4"):
        model(input_ids, depth_recorder=DepthRecorder(**fields))


def test_a_function_that_fails_leaves_nothing_behind(input_ids):
    model = tiny_model()
    with torch.no_grad():
        expected = model(input_ids).logits

        def fail(tensor):
            tensor.zero_()
            raise KeyError("mine")

        for name, place in (("edit_output", 2), ("edit_source", (5, 1))):
            with pytest.raises(KeyError, match="mine"):
                model(input_ids, depth_recorder=DepthRecorder(**{name: {place: fail}}))
            with pytest.raises(KeyError, match="mine"):
                model.generate(input_ids, max_new_tokens=2, depth_recorder=DepthRecorder(**{name: {place: fail}}))
        torch.testing.assert_close(model(input_ids).logits, expected, rtol=0, atol=0)


def test_what_is_patched_in_stays_as_it_was(input_ids):
    """A run's own records, given to another one as they are, or with a batch that is one row seen several times."""
    model = tiny_model()
    clean = DepthRecorder(sources={})
    with torch.no_grad():
        model(input_ids, depth_recorder=clean)
        before = {site: output.clone() for site, output in clean.outputs.items()}
        row = DepthRecorder()
        model(input_ids[:1], depth_recorder=row)
        for edits in (
            {"edit_output": {site: set_to(output) for site, output in clean.outputs.items()}},
            {"edit_output": {5: set_to(row.outputs[5].expand(3, -1, -1))}},
            {"edit_source": {(8, 0): set_to(clean.sources[8][0]), (8, 1): set_to(clean.sources[8][2])}},
        ):
            model(input_ids.flip(0), depth_recorder=DepthRecorder(**edits))
    for site, output in clean.outputs.items():
        torch.testing.assert_close(output, before[site], rtol=0, atol=0)


@pytest.mark.slow
def test_compiled(input_ids):
    model, recorder = tiny_model("llama"), adding(PLACES)
    with torch.no_grad():
        expected = model(input_ids, depth_recorder=adding(PLACES)).logits
        compiled = torch.compile(model, backend="eager")
        torch.testing.assert_close(compiled(input_ids, depth_recorder=recorder).logits, expected, rtol=1e-5, atol=1e-5)
    torch.compiler.reset()
    assert sorted(recorder.weights) == list(range(9))


def test_two_threads_with_a_recorder_each(input_ids):
    """One model, steered by one of them."""
    model = tiny_model()
    with torch.no_grad():
        expected = [model(input_ids, depth_recorder=adding(places)).logits for places in ({}, {5: 2.0})]

    def run(places):
        with torch.no_grad():
            return [model(input_ids, depth_recorder=adding(places)).logits for _ in range(5)]

    with ThreadPoolExecutor() as pool:
        for logits, found in zip(expected, pool.map(run, ({}, {5: 2.0}))):
            for of_thread in found:
                torch.testing.assert_close(of_thread, logits, rtol=0, atol=0)


def test_classification(input_ids):
    config = AttnResConfig.from_base_config(tiny_base_model("llama").config, block_size=3, pad_token_id=0)
    model = randomize(AttnResForSequenceClassification(config).eval())
    with torch.no_grad():
        logits = [model(input_ids, depth_recorder=adding(places)).logits for places in ({}, PLACES)]
        torch.testing.assert_close(model(input_ids).logits, logits[0])
    assert relative(logits[1], logits[0]) > 1e-3


def test_in_a_slice_of_the_layers(input_ids):
    """A pipeline stage runs some sites: a recorder of the whole model goes from one to the next."""
    model = tiny_model().model
    expected = model(input_ids, depth_recorder=adding(PLACES)).last_hidden_state
    first, last = tiny_model().model, tiny_model().model
    first.keep_layers(0, 2)
    last.keep_layers(2, 4)
    recorder = adding(PLACES)
    stream = first(input_ids, depth_recorder=recorder).last_hidden_state
    torch.testing.assert_close(last(inputs_embeds=stream, depth_recorder=recorder).last_hidden_state, expected)
    with pytest.raises(ValueError, match="`edit_output` has site 8, which does not exist"):
        last(inputs_embeds=stream, depth_recorder=DepthRecorder(edit_output={8: torch.abs}))


def test_after_saving_and_with_adapters(input_ids, tmp_path):
    from peft import LoraConfig, get_peft_model

    model = tiny_model()
    expected = model(input_ids, depth_recorder=adding(PLACES)).logits
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(input_ids, depth_recorder=adding(PLACES)).logits, expected)
    adapted = get_peft_model(loaded, LoraConfig(target_modules=["q_proj"]))
    torch.testing.assert_close(adapted(input_ids, depth_recorder=adding(PLACES)).logits, expected)
    tokens = adapted.generate(input_ids=input_ids, max_new_tokens=2, depth_recorder=adding(PLACES))
    assert tokens.shape[1] == 13
