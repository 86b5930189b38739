# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Ways to lose or corrupt the residual stream: each is an error that says where, or computes what it should."""

import copy
import io
import pickle
import threading

import pytest
import torch
from decoder_configs import decoder_config
from rounding import UpToRounding
from tiny_models import (
    FAMILIES,
    convert,
    randomize_queries,
    reference_hidden_states,
    tiny_base_config,
    tiny_base_model,
)
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from attnres import AttnResConfig, AttnResForCausalLM
from attnres.base.probe import run_probes


pytestmark = pytest.mark.usefixtures("probed_anew")

LOST = "its LlamaDecoderLayer does more to the residual stream than to add outputs to it and to read it"


@pytest.fixture
def edited(monkeypatch):
    """Put another way to add a sublayer's output to the stream into Llama's layers."""

    def edit(add):
        def forward(self, hidden_states, **kwargs):
            output, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
            hidden_states = add(hidden_states, output)
            return add(hidden_states, self.mlp(self.post_attention_layernorm(hidden_states)))

        monkeypatch.setattr(LlamaDecoderLayer, "forward", forward)

    return edit


def in_place(stream, output):
    stream += output
    return stream


@pytest.mark.parametrize(
    "add",
    [
        lambda stream, output: stream * torch.ones(32) + output,
        lambda stream, output: stream.detach() + output,
        lambda stream, output: torch.nn.functional.layer_norm(stream + output, (32,)),
        lambda stream, output: 2 * output,
        lambda stream, output: torch.stack([stream, output]).sum(0),
        lambda stream, output: stream - (-output),
        lambda stream, output: torch.nn.functional.dropout(stream, 0.5) + output,
        lambda stream, output: stream + 1.0 + output,
    ],
    ids="gated detached normed dropped stacked subtracted dropout shifted".split(),
)
def test_what_loses_the_stream_is_an_error(edited, add, input_ids):
    """When a config is made, and when a model runs whose base was edited afterwards. At zero queries the numbers
    would be right, so nothing but the stream itself can tell."""
    model = convert(tiny_base_model("llama"), 3)
    edited(add)
    with pytest.raises(ValueError, match=f"`base_model_type='llama'` is not supported: {LOST}"):
        AttnResConfig.from_base_config(tiny_base_config("llama"))
    for grad in (True, False):
        with (
            torch.set_grad_enabled(grad),
            pytest.raises(ValueError, match="should have handed on the residual stream"),
        ):
            model(input_ids)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "add",
    [
        in_place,
        lambda stream, output: output + stream,
        lambda stream, output: torch.add(stream, output),
        lambda stream, output: 0.5 * stream + output,
        lambda stream, output: (stream.view(-1, 32) + output.view(-1, 32)).view(output.shape),
        lambda stream, output: stream.to(torch.float32).float().contiguous() + output,
        lambda stream, output: stream[:, :] + output,
        lambda stream, output: stream / 2 + output,
    ],
    ids="in_place reversed function scaled view cast sliced divided".split(),
)
@pytest.mark.parametrize("block_size", [1, 3])
def test_other_ways_to_add_are_right(edited, add, block_size, input_ids):
    edited(add)
    base_model = tiny_base_model("llama")
    model = convert(base_model, block_size)
    of_base = UpToRounding(lambda: base_model(input_ids).logits, model=base_model)
    of_base.check(model(input_ids).logits)
    with torch.no_grad():
        of_base.check(model(input_ids).logits)
        # both ways to read, where the queries count
        randomize_queries(model)
        plain = UpToRounding(lambda: model(input_ids, output_depth_attentions=True).logits, model=model)
        plain.check(model(input_ids).logits)
    # Activation checkpointing hands on what a layer does to the blocks in front of it
    plain.check(model(input_ids).logits)
    model.train().gradient_checkpointing_enable()
    plain.check(model(input_ids).logits)


def test_an_addition_in_place_of_a_tensor_is_an_error(edited, input_ids):
    """The tensor would stay as it is for those who hold it."""
    model = convert(tiny_base_model("llama"), 3)
    edited(lambda stream, output: output.add_(stream))
    with pytest.raises(
        TypeError, match="`add_` works in place, and the residual stream of an AttnRes model is a value"
    ):
        model(input_ids)


def test_layers_that_are_left_out_or_run_twice(input_ids):
    model = convert(tiny_base_model("llama"), 3)
    layers = list(model.model.layers)
    for order, sites in (
        ([0, 2, 3], "4, and was given the stream at site 2"),
        ([0, 1, 1, 2], "2, and was given the stream at site 4"),
    ):
        model.model.layers = torch.nn.ModuleList([layers[i] for i in order])
        with pytest.raises(ValueError, match=f"has to be given the residual stream at site {sites}"):
            model(input_ids)
    with pytest.raises(ValueError, match="at site 2, and was given a Tensor"):
        layers[1](torch.zeros(1, 2, 32))


def test_a_config_that_was_changed_behind_a_model(input_ids):
    model = convert(tiny_base_model("llama"), 3)
    model.config.attn_res_block_size = 2
    with pytest.raises(
        ValueError, match="`attn_res_block_size=2` was set in the config of a model that was made with 3"
    ):
        model(input_ids)


def test_number_of_layers_is_probed_again(input_ids):
    """Also where a config was read from a file of other layers."""
    config = AttnResConfig.from_base_config(tiny_base_config("llama"), block_size=3)
    config.num_hidden_layers = 2
    assert config.num_sites == 5 and AttnResForCausalLM(config)(input_ids).logits.shape == (3, 11, 97)
    config = AttnResConfig.from_dict({**config.to_dict(), "attn_res_sublayers": [2, 1]})
    with pytest.raises(
        ValueError, match="should have handed on the residual stream at site 3, but handed on the stream at site 4"
    ):
        AttnResForCausalLM(config)(input_ids)


def test_an_exception_in_the_middle(input_ids):
    """What comes after it computes what it should, with the same KV cache and without one."""
    model = randomize_queries(convert(tiny_base_model("qwen3"), 3))
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        expected = UpToRounding(lambda: model(input_ids).logits, model=model)
        model(input_ids[:, :-1], past_key_values=cache)
        handle = model.model.layers[2].mlp.register_forward_hook(lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(input_ids[:, -1:], past_key_values=DynamicCache(config=model.config))
        with pytest.raises(ZeroDivisionError):
            model(input_ids)
        handle.remove()
        last = model(input_ids[:, -1:], past_key_values=cache).logits
        expected.check(model(input_ids).logits)
        UpToRounding(lambda: model(input_ids).logits[:, -1:], model=model).check(last)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_are_models_of_their_own(how, input_ids):
    model = randomize_queries(convert(tiny_base_model("qwen3_moe"), 3))
    if how == "deepcopy":  # what transformers hangs on a model for this cannot be pickled
        model.gradient_checkpointing_enable()
        copied = copy.deepcopy(model)
    elif how == "pickle":
        # The class as well: what starts processes may be given it by itself
        assert pickle.loads(pickle.dumps(type(model))) is type(model)
        copied = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    assert type(copied) is type(model) and type(copied.model) is type(model.model)
    with torch.no_grad():
        before = model(input_ids).logits
        assert torch.equal(copied(input_ids).logits, before)
        copied.model.depth_queries.query.add_(1.0)
        assert torch.equal(model(input_ids).logits, before) and not torch.equal(copied(input_ids).logits, before)
        definition = UpToRounding(lambda: reference_hidden_states(copied.model, input_ids)[0], model=copied)
        assert definition.ratios(copied.model(input_ids).last_hidden_state)["result"] < 100


@pytest.mark.slow
def test_several_bases_in_threads(input_ids):
    """Forward passes and generations at the same time. Loads: `test_concurrent_loads`, in a process of its own."""
    families = ["llama", "qwen3_moe", "mixtral", "granite"]
    models = {family: randomize_queries(convert(tiny_base_model(family), 3)) for family in families}
    actual = {}

    def results(model):
        with torch.no_grad():
            return model(input_ids).logits, model.generate(input_ids, max_new_tokens=4, do_sample=False)

    def work(family, name):
        for _ in range(3):
            actual[family, name] = results(models[family])

    expected = {family: results(model) for family, model in models.items()}
    threads = [threading.Thread(target=work, args=(family, name)) for family in families for name in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(actual) == 8
    for (family, _), found in actual.items():
        assert all(map(torch.equal, found, expected[family])), family


def test_a_model_made_while_another_thread_makes_a_config():
    """The run without weights is of its own thread: what another one makes has its initial values and ties."""
    of_torch = torch.nn.init.normal_
    config = tiny_base_config("llama", tie_word_embeddings=True, initializer_range=0.02)
    done = threading.Event()

    def make_configs():
        while not done.is_set():
            AttnResConfig.from_base_config(config, block_size=3)

    thread = threading.Thread(target=make_configs)
    thread.start()
    try:
        for _ in range(60):
            model = LlamaForCausalLM(config)
            assert model.lm_head.weight is model.model.embed_tokens.weight
            assert all(0.015 < layer.mlp.up_proj.weight.std() < 0.025 for layer in model.model.layers)
    finally:
        done.set()
        thread.join()
    assert torch.nn.init.normal_ is of_torch


@pytest.mark.one_in(7)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_is_made_without_initial_values(family, monkeypatch):
    """transformers replaces `torch.nn.init` while it gives them, and two threads that do so leave it replaced.

    From then on `torch.nn.init.normal_` of a loaded parameter would do nothing.
    """
    replaced = []
    monkeypatch.setattr(PreTrainedModel, "initialize_weights", lambda self: replaced.append(type(self)))
    run_probes(tiny_base_config(family))
    assert not replaced


def test_one_model_in_several_threads(input_ids):
    model = randomize_queries(convert(tiny_base_model("qwen3"), 3))
    prompts = [input_ids[:, i : i + 5] for i in range(4)]
    with torch.no_grad():
        expected = [model.generate(prompt, max_new_tokens=6, do_sample=False) for prompt in prompts]
    actual = [None] * 4

    def work(i):
        for _ in range(4):
            actual[i] = model.generate(prompts[i], max_new_tokens=6, do_sample=False)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("model_type", ["biogpt", "opt", "xglm"])
def test_layers_that_are_left_out_at_random(model_type, input_ids):
    """Are refused in training alone: the reads behind them would be of other sources."""
    config = AttnResConfig.from_base_config(decoder_config(model_type, layerdrop=0.5), block_size=2)
    model = AttnResForCausalLM(config)
    assert model.eval()(input_ids).logits.isfinite().all()
    with pytest.raises(ValueError, match="LayerDrop, rate 0.5.*set `layerdrop` in the config to 0"):
        model.train()(input_ids)
    config.layerdrop = 0.0
    assert AttnResForCausalLM(config).train()(input_ids).logits.isfinite().all()
