# SPDX-License-Identifier: Apache-2.0
"""One test over all supported families: the same model as its base, as the definition, with and without a cache."""

import json
import re

import pytest
import torch
from rounding import UpToRounding
from tiny_models import (
    EVERY_FAMILY,
    Reference,
    convert,
    mostly_slow,
    randomize_queries,
    relative_error,
    tiny_base_config,
    tiny_base_model,
)
from transformers import AutoConfig

from attnres import AttnResConfig, AttnResForCausalLM, BlockCache
from attnres.base import probe as depth_probe


# 4 layers are 8 sublayers: Full, one layer a block, a boundary inside a layer and a short end, one block, a short end
BLOCK_SIZES = [1, 2, 3, 8, 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_norm_behind_a_read(family, num_tokens, dtype):
    """Where it is not the module, the block cache has the same numbers from fewer operations."""
    norm = tiny_base_model(family).to(dtype).model.layers[0].input_layernorm
    embedding, output = torch.randn(2, 1, num_tokens, 32, dtype=dtype)
    cache = BlockCache()
    with torch.no_grad():
        cache.start(torch.randn(3, 32), embedding, 2, 1e-6)
        cache.append(embedding)
        for site, open_sources in ((0, ()), (1, (output,))):
            for factor in (1, site + 1):
                mix = cache.read(site, open_sources, factor=factor)
                fused = cache.read(site, open_sources, norm, factor)
                assert fused.dtype == dtype
                UpToRounding(norm, mix).check(fused)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("block_size", mostly_slow(BLOCK_SIZES, every=2))
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_family(family, block_size, input_ids, tmp_path):
    base_model = tiny_base_model(family)
    model = convert(base_model, block_size, attn_res_norm_eps=0.03)  # one that is seen

    # Zero queries: the base, up to rounding. Both the inference and the training path
    with torch.no_grad():
        of_base = UpToRounding(lambda: base_model(input_ids).logits, model=base_model)
        of_base.check(model(input_ids).logits)
    of_base.check(model(input_ids).logits)

    # Random queries: the definition
    randomize_queries(model)
    reference = Reference(model.model)
    with torch.no_grad():
        definition = UpToRounding(lambda: reference(input_ids), model=reference.native)
        outputs = model.model(input_ids, output_depth_attentions=True)
        definition.check((outputs.last_hidden_state, outputs.depth_attentions))
        definition.check((model.model(input_ids).last_hidden_state, outputs.depth_attentions))
    logits = model(input_ids).logits
    assert relative_error(logits, of_base.expected["result"]) > 1e-3, "the queries do nothing"
    assert len(outputs.depth_attentions) == model.config.num_sites
    for weights in outputs.depth_attentions:
        torch.testing.assert_close(weights.sum(-1), torch.ones(input_ids.shape))

    # Generation with a cache: what is computed without one
    kwargs = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    cached = model.generate(input_ids, **kwargs)
    with torch.no_grad():
        plain = UpToRounding(lambda: model(cached.sequences[:, :-1], use_cache=False).logits[:, -6:], model=model)
    plain.check(torch.stack(cached.logits, dim=1))

    # Gradients to every parameter that takes part
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model(input_ids, labels=input_ids).loss.backward()
    for name, parameter in model.named_parameters():
        if "correction_bias" not in name:  # chooses experts, is not trained by gradients
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name

    # Save and load, in the base's own format plus two tensors
    model.eval().save_pretrained(tmp_path)
    reloaded, info = AttnResForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    with torch.no_grad():
        assert torch.equal(reloaded(input_ids).logits, model(input_ids).logits)
    for (name, parameter), (_, saved) in zip(reloaded.named_parameters(), model.named_parameters()):
        assert torch.equal(parameter, saved), name


@pytest.mark.parametrize(
    "family, dropouts",
    [
        ("phi3", {"resid_pdrop": 1.0}),
        ("stablelm", {"hidden_dropout": 1.0}),
        ("starcoder2", {"residual_dropout": 1.0}),
        ("starcoder2", {"embedding_dropout": 1.0}),
        ("llama", {"attention_dropout": 1.0}),
    ],
)
def test_dropout_is_that_of_the_base(family, dropouts, input_ids):
    """With certainty for a probability, so that it can be compared."""
    base_model = tiny_base_model(family, **{"residual_dropout": 0.0, "embedding_dropout": 0.0, **dropouts}).train()
    model = convert(base_model, 3).train()
    UpToRounding(lambda: base_model(input_ids).logits, model=base_model).check(model(input_ids).logits)
    assert relative_error(model(input_ids).logits, model.eval()(input_ids).logits) > 1e-2


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_config_round_trip(family, tmp_path):
    base_config = tiny_base_config(family, architectures=None)
    config = AttnResConfig.from_base_config(base_config, num_blocks=3)
    assert config.attn_res_block_size == 3 and config.num_sites == 9
    assert config.to_base_config() == base_config
    again = AttnResConfig.from_base_config(config.to_base_config(), block_size=3)
    assert again == config

    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is AttnResConfig and loaded.to_dict() == {**config.to_dict(), "_name_or_path": str(tmp_path)}
    assert loaded.to_base_config().to_dict() == {**base_config.to_dict(), "_name_or_path": str(tmp_path)}


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"hiden_size": 3}, r"Unknown field `hiden_size=3`.*Did you mean hidden_size"),
        ({"num_blocks": 4}, r"Unknown field `num_blocks=4`"),
        ({"attn_res_block_size": 0}, r"`attn_res_block_size=0` must be a number of sublayers >= 1"),
        ({"attn_res_block_size": -2}, r"`attn_res_block_size=-2` must be"),
        ({"attn_res_norm_eps": -1.0}, r"`attn_res_norm_eps=-1.0` must be a float >= 0"),
        ({"model_type": "qwen3"}, r"`model_type='qwen3'` contradicts `base_model_type='llama'`"),
        ({"attn_res_sublayers": [2, 0]}, r"`attn_res_sublayers=\[2, 0\]` must be None, or a list of ints >= 1"),
        ({"attn_res_sublayers": 2}, r"`attn_res_sublayers=2` must be None, or a list of ints >= 1"),
    ],
)
def test_bad_fields_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        AttnResConfig(**kwargs)


WRONG_TYPES = [
    *(("attn_res_block_size", value) for value in ("8", True, 2.0, [8], None, float("nan"), {})),
    *(("attn_res_norm_eps", value) for value in ("x", float("nan"), float("inf"), True, None, 1, [1e-6])),
    *(("attn_res_scale_norm_eps", value) for value in (1, 0, "true", None)),
    *(("base_model_type", value) for value in (None, 3, True, ["llama"], {})),
]
ALLOWED = {
    "attn_res_block_size": "must be a number of sublayers >= 1 (1 is Full AttnRes), an int",
    "attn_res_norm_eps": "must be a float >= 0",
    "attn_res_scale_norm_eps": "must be True or False",
    "base_model_type": "must be the model type of a base, a string",
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name, value", WRONG_TYPES, ids=str)
def test_wrong_types_are_named_with_what_is_allowed(name, value, tmp_path):
    """Wherever a field comes from: the constructor, a base's config, a dict, a file, an assignment."""
    base_config = tiny_base_config("qwen3")
    config = AttnResConfig.from_base_config(base_config)
    config.save_pretrained(tmp_path)
    fields = {**json.loads((tmp_path / "config.json").read_text()), name: value}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    ways = [
        lambda: AttnResConfig(**{name: value}),
        lambda: AttnResConfig.from_dict(fields),
        lambda: AutoConfig.from_pretrained(tmp_path),
        lambda: AttnResForCausalLM.from_pretrained(tmp_path),
        lambda: setattr(config, name, value),
    ]
    if name == "attn_res_block_size" and value is not None:
        ways.append(lambda: AttnResConfig.from_base_config(base_config, block_size=value))
    elif name not in ("attn_res_block_size", "base_model_type"):
        ways.append(lambda: AttnResConfig.from_base_config(base_config, **{name: value}))
    before = getattr(config, name)
    for way in ways:
        with pytest.raises(ValueError, match=re.escape(f"`{name}={value!r}` {ALLOWED[name]}")):
            way()
    assert getattr(config, name) == before


@pytest.mark.parametrize("value", [0, -1])
def test_a_bad_block_size_cannot_be_assigned(value):
    config = AttnResConfig()
    with pytest.raises(ValueError, match=f"`attn_res_block_size={value}` must be a number of sublayers >= 1"):
        config.attn_res_block_size = value
    config.attn_res_block_size = 3
    assert config.attn_res_block_size == 3


@pytest.mark.parametrize("base_config", [None, "qwen3", {"model_type": "qwen3"}], ids=str)
def test_what_is_not_a_base_config_is_named(base_config):
    with pytest.raises(ValueError, match="`base_config` must be the configuration of.*, not (None|a str|a dict)"):
        AttnResConfig.from_base_config(base_config)


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"block_size": 2, "num_blocks": 4}, r"`block_size=2` and `num_blocks=4` contradict"),
        ({"num_blocks": 0}, r"`num_blocks=0` must be a number of blocks >= 1"),
        ({"num_blocks": "4"}, r"`num_blocks='4'` must be a number of blocks >= 1, an int"),
        ({"num_blocks": True}, r"`num_blocks=True` must be a number of blocks >= 1, an int"),
        ({"num_blocks": 2.0}, r"`num_blocks=2.0` must be a number of blocks >= 1, an int"),
        ({"num_blocks": [4]}, r"`num_blocks=\[4\]` must be a number of blocks >= 1, an int"),
        ({"block_size": 0}, r"`attn_res_block_size=0` must be"),
        ({"attn_res_block_size": 2}, r"Pass `block_size`"),
        ({"blok_size": 2}, r"Unknown field `blok_size=2`"),
    ],
)
def test_bad_block_partitions_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        AttnResConfig.from_base_config(tiny_base_config("qwen3"), **kwargs)


@pytest.mark.parametrize(
    "base_model_type, reason",
    [
        ("attnres", "it is an attention-residual architecture already"),
        ("inkling2_text", "it is an attention-residual architecture already"),
        ("bert", "its BertLayer does more to the residual stream than to add outputs to it and to read it"),
        ("openai-gpt", "its Block does more to the residual stream"),
        ("gemma3n_text", "its Gemma3nTextDecoderLayer does more to the residual stream"),
        ("hrm_text", "its HrmTextDecoderLayer runs more than once, or not in the order of the layers"),
        ("blt", "its layers are not one stack whose length its config names"),
        ("bart", "its BartEncoderLayer does more to the residual stream"),
        ("t5gemma", "its encoder has a config of its own"),
        ("gemma3", "it is made of several models. The language model in it is of type 'gemma3_text'; its config"),
        ("trocr", "transformers has no model of it without a head"),
        ("xlm", "its MultiHeadAttention does more to the residual stream"),
        ("clip", "transformers .* has no causal language model and no encoder of this type"),
        ("lama", "transformers .* has no causal language model and no encoder of this type.* Did you mean llama"),
    ],
)
def test_refused_bases_say_why(base_model_type, reason):
    with pytest.raises(ValueError, match=f"`base_model_type='{base_model_type}'` is not supported: {reason}"):
        AttnResConfig(base_model_type=base_model_type).sublayers_per_layer()


@pytest.mark.parametrize(
    "fields",
    [{"num_blocks": 0}, {"block_size": 2, "num_blocks": 2}, {"attn_res_block_size": 2}, {"hiden_size": 3}],
    ids=str,
)
def test_fields_are_checked_before_the_base_is_run(fields, monkeypatch):
    """Which takes seconds for a large one."""
    monkeypatch.setattr(depth_probe, "probe_sublayers", lambda config: pytest.fail("The base has been run."))
    with pytest.raises(ValueError, match="|".join(fields)):
        AttnResConfig.from_base_config(tiny_base_config("llama"), **fields)


def test_a_base_is_not_asked_for_depth_attentions():
    config = AttnResConfig.from_base_config(tiny_base_config("llama"), output_depth_attentions=True)
    assert config.output_depth_attentions and "output_depth_attentions" not in config.to_base_config().to_dict()
