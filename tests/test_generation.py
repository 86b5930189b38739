# SPDX-License-Identifier: Apache-2.0
"""Generation: every mode against plain greedy decoding of the same model, and proof that the two-phase path runs."""

import copy
import inspect
import os
import re
import sys
from pathlib import Path

import pytest
import torch
import transformers
from decoder_configs import decoder_config
from packaging import version
from rounding import UpToRounding
from test_loading import run_python
from tiny_models import convert, randomize_queries, tiny_base_config, tiny_base_model
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    LlamaForCausalLM,
    StaticCache,
    Trainer,
    TrainingArguments,
)

from attnres import AttnResConfig, AttnResForCausalLM, BlockCache, DepthRecorder
from attnres.depth import stream as depth_stream


CACHE_NAMES = ("cache", "past_key_values", "cache_params")
# The names that Llama takes; since 5.24 the last one is kept for those who are used to it
KV_CACHE_NAMES = [
    *(["cache"] if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else []),
    "past_key_values",
]
BEFORE_5_20 = version.parse(transformers.__version__) < version.parse("5.20")
# transformers offloads a KV cache on a CUDA stream of its own
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.fixture(params=[1, 3], ids=["full", "block3"])
def model(request):
    torch.manual_seed(0)
    return randomize_queries(convert(tiny_base_model("qwen3"), request.param))


def generate(model, input_ids, **kwargs):
    return model.generate(input_ids, max_new_tokens=8, do_sample=kwargs.pop("do_sample", False), **kwargs)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "kwargs",
    [
        {"use_cache": False},
        {"cache_implementation": "static"},
        pytest.param({"cache_implementation": "offloaded"}, marks=needs_cuda),
        pytest.param({"cache_implementation": "offloaded_static"}, marks=needs_cuda),
        {"prefill_chunk_size": 4},
        {"prompt_lookup_num_tokens": 3},
        {"assistant_early_exit": 2},
    ],
    ids=str,
)
def test_modes_agree_with_greedy(model, input_ids, kwargs):
    if "prompt_lookup_num_tokens" in kwargs or "assistant_early_exit" in kwargs:
        input_ids = input_ids[:1]
    assert torch.equal(generate(model, input_ids, **kwargs), generate(model, input_ids))


def test_assistant_model(model, input_ids):
    assistant = convert(tiny_base_model("qwen3", seed=1), 2)
    expected = generate(model, input_ids[:1])
    assert torch.equal(generate(model, input_ids[:1], assistant_model=assistant), expected)
    # and as the assistant of its base
    base_model = tiny_base_model("qwen3")
    expected = generate(base_model, input_ids[:1])
    assert torch.equal(generate(base_model, input_ids[:1], assistant_model=model), expected)


def test_beam_search_and_sampling_do_not_depend_on_the_cache(model, input_ids):
    for kwargs in ({"num_beams": 3}, {"do_sample": True, "top_k": 5}):
        results = []
        for use_cache in (True, False):
            torch.manual_seed(0)
            results.append(generate(model, input_ids, use_cache=use_cache, **kwargs))
        assert torch.equal(*results)


def test_left_padding(model, input_ids):
    expected = generate(model, input_ids[:1])
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), input_ids[:1]], dim=1)
    other = torch.randint(3, 97, padded.shape)
    mask = torch.ones(2, padded.shape[1], dtype=torch.long)
    mask[0, :5] = 0
    actual = generate(model, torch.cat([padded, other]), attention_mask=mask)
    assert torch.equal(actual[:1, 5:], expected)


def test_inputs_embeds(model, input_ids):
    embeds = model.get_input_embeddings()(input_ids)
    assert torch.equal(
        generate(model, None, inputs_embeds=embeds), generate(model, input_ids)[:, input_ids.shape[1] :]
    )


@pytest.mark.one_in(3)
@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 9}, {"num_return_sequences": 2}], ids=str)
def test_depth_attentions_of_generation(options, use_cache, model, input_ids):
    """Shaped as `attentions`, and those of a plain forward pass of what was generated, with padding on the left."""
    mask = torch.ones_like(input_ids)
    mask[1, :4] = 0
    options = {"do_sample": options.get("num_return_sequences", 1) > 1, **options, "use_cache": use_cache}
    model.set_attn_implementation("eager")
    outputs = model.generate(
        input_ids,
        attention_mask=mask,
        max_new_tokens=5,
        return_dict_in_generate=True,
        output_attentions=True,
        output_depth_attentions=True,
        **options,
    )
    assert len(outputs.depth_attentions) == len(outputs.attentions) == 5
    for depth, heads in zip(outputs.depth_attentions, outputs.attentions):
        assert len(depth) == model.config.num_sites
        for weights, first_layer in zip(depth, heads[:1] * len(depth)):
            assert weights.shape[:2] == (first_layer.shape[0], first_layer.shape[2])

    repeats = len(outputs.sequences) // len(input_ids)
    mask = torch.cat([mask.repeat_interleave(repeats, 0), torch.ones(len(outputs.sequences), 4, dtype=int)], dim=1)
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        plain = model(
            outputs.sequences[:, :-1], attention_mask=mask, position_ids=position_ids, output_depth_attentions=True
        )
    for site, expected in enumerate(plain.depth_attentions):
        steps = [step[site] for step in outputs.depth_attentions]
        actual = torch.cat(steps, dim=1) if use_cache else steps[-1]
        torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()])

    for before in ("depth_attentions", "sequences"):  # a result like any other
        assert before in outputs and outputs[before] is getattr(outputs, before)


def test_depth_attentions_of_beams(model, input_ids):
    model.set_attn_implementation("eager")
    outputs = generate(
        model,
        input_ids,
        num_beams=3,
        return_dict_in_generate=True,
        output_attentions=True,
        output_depth_attentions=True,
        output_scores=True,
    )
    for depth, heads in zip(outputs.depth_attentions, outputs.attentions, strict=True):
        assert {weights.shape[:2] for weights in depth} == {(heads[0].shape[0], heads[0].shape[2])}
    assert outputs.beam_indices is not None


def test_depth_attentions_of_generation_only_where_they_are_whole(model, input_ids):
    wanted = {"output_depth_attentions": True, "return_dict_in_generate": True}
    assistant = convert(tiny_base_model("qwen3", seed=1), 2)
    for options in (
        {"assistant_model": assistant},
        {"assistant_early_exit": 2},
        {"prompt_lookup_num_tokens": 3},
        {"prefill_chunk_size": 4},
        {"generation_config": GenerationConfig(prefill_chunk_size=4)},
    ):
        name = list(options.get("generation_config", options) and options)[0].replace(
            "generation_config", "prefill_chunk_size"
        )
        with pytest.raises(ValueError, match=f"`output_depth_attentions=True` cannot be combined with `{name}`"):
            model.generate(input_ids[:1], **options, **wanted)
    # an assistant's own steps are not taken for those of the model that it helps, and nothing is kept behind
    assert "depth_attentions" not in generate(model, input_ids[:1], return_dict_in_generate=True)
    assert isinstance(generate(model, input_ids, output_depth_attentions=True), torch.Tensor)


def test_packed_sequences(model):
    first, second = torch.randint(3, 97, (1, 6)), torch.randint(3, 97, (1, 4))
    position_ids = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3]])
    with torch.no_grad():
        packed = model(torch.cat([first, second], dim=1), position_ids=position_ids, use_cache=False).logits
        UpToRounding(lambda: model(first).logits, model=model).check(packed[:, :6])
        UpToRounding(lambda: model(second).logits, model=model).check(packed[:, 6:])


def test_continuous_batching(input_ids):
    torch.manual_seed(0)
    model = randomize_queries(convert(tiny_base_model("llama"), 3))
    expected = generate(model, input_ids)[:, input_ids.shape[1] :]
    outputs = model.generate_batch(
        inputs=[ids.tolist() for ids in input_ids],
        generation_config=GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(page_size=16, num_blocks=8, max_batch_tokens=32),
    )
    generated = {tuple(output.prompt_ids): output.generated_tokens for output in outputs.values()}
    assert [generated[tuple(ids)] for ids in input_ids.tolist()] == expected.tolist()


BAD_REQUESTS = """
import json, sys, torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
import attnres

model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
good = [5, 6, 7]
bad = [[], "hello", None, 5, ["5"], [5.0], [True], [5, 97], [-1, 5], [[5]], torch.tensor([]), torch.tensor([[5]])]
requests = ["hello", 5, None, torch.tensor([good]), good]
requests += [[prompt] for prompt in bad] + [[good, prompt] for prompt in bad]
config = GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1, pad_token_id=0)
batching = ContinuousBatchingConfig(page_size=16, num_blocks=8, max_batch_tokens=32)
configs = {"generation_config": config, "continuous_batching_config": batching}
for inputs in requests:
    try:
        model.generate_batch(inputs, **configs)
    except ValueError as error:
        print(json.dumps(str(error)))
    else:
        print("taken:", inputs)
outputs = model.generate_batch([good, tuple(good), torch.tensor(good)], **configs)
print(sum(len(output.generated_tokens) for output in outputs.values()))
"""


@pytest.mark.slow
def test_bad_requests_of_continuous_batching(tmp_path):
    """In a process with a time limit, as what is wrong must not come to the thread that generates."""
    convert(tiny_base_model("llama"), 3).save_pretrained(tmp_path)
    *errors, tokens = run_python(BAD_REQUESTS, tmp_path).splitlines()
    assert tokens == "9" and len(errors) == 29
    for error in errors:
        assert re.search(r"`inputs(\[[01]\])?\b", error) and "taken" not in error, error


QUANTIZED_CACHE = """
import sys, torch
from transformers import AutoModelForCausalLM
import attnres
config = {"backend": "hqq", "nbits": 4, "q_group_size": 8, "residual_length": 4, "axis_key": 1, "axis_value": 1}
for path in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(path)
    ids = torch.randint(3, 97, (2, 7), generator=torch.Generator().manual_seed(0))
    settings = {"cache_implementation": "quantized", "cache_config": config} if "plain" not in path else {}
    print(model.generate(ids, max_new_tokens=16, do_sample=False, eos_token_id=None, **settings).tolist())
"""


@pytest.mark.slow
def test_quantized_cache(tmp_path):
    """Quantisation changes what is generated, and it does so as in the base."""
    beside = Path(sys.prefix, "beside")
    if not beside.is_dir():
        pytest.skip("hqq is not installed beside the environment")
    base_model = tiny_base_model("llama")
    folders = [tmp_path / name for name in ("base", "attnres", "plain")]
    for folder, model in zip(folders, (base_model, convert(base_model, 3), base_model)):
        model.save_pretrained(folder)
    path = os.pathsep.join([str(beside), *filter(None, [os.environ.get("PYTHONPATH")])])
    expected, actual, plain = run_python(QUANTIZED_CACHE, *folders, PYTHONPATH=path).splitlines()
    assert actual == expected != plain


def test_logits_to_keep(model, input_ids):
    mask = torch.rand(input_ids.shape) < 0.5
    positions = torch.tensor([[0, 2], [1, 3], [4, 10]])

    def parts():
        logits = model(input_ids).logits
        return logits[:, -3:], logits[:, [1, 4]], logits[mask], logits.take_along_dim(positions[..., None], dim=1)

    with torch.no_grad():
        keeps = [3, torch.tensor([1, 4]), mask, positions]
        if BEFORE_5_20:  # where bases take no more
            keeps = keeps[:2]
        kept = [model(input_ids, logits_to_keep=keep).logits for keep in keeps]
        UpToRounding(lambda: parts()[: len(keeps)], model=model).check(kept)


@pytest.mark.slow
def test_compiled_decoding(model, input_ids):
    """One graph for a decoding step, without breaks, and the same logits."""
    torch._dynamo.reset()
    compiled = torch.compile(model.forward, fullgraph=True, backend="aot_eager")

    def decode(forward):
        cache = StaticCache(config=model.config, max_cache_len=16)
        model(input_ids, past_key_values=cache)
        for step in range(3):
            position_ids = torch.full((3, 1), input_ids.shape[1] + step)
            outputs = forward(input_ids[:, step : step + 1], past_key_values=cache, position_ids=position_ids)
        return outputs.logits

    with torch.no_grad():
        UpToRounding(lambda: decode(model.forward), model=model).check(decode(compiled))


@pytest.mark.parametrize("model_type", ["qwen3", "gpt2", "gpt_neox", "mamba"])
def test_steps_of_a_generation_share_their_block_cache(model_type, input_ids, monkeypatch):
    """Whatever the KV cache is called: in models by version and base, in layers by base, of gpt2 without a name."""
    base_model = AutoModelForCausalLM.from_config(decoder_config(model_type))
    model = AttnResForCausalLM(AttnResConfig.from_base_config(base_model.config, block_size=3)).eval()
    made, start, passes = [], BlockCache.start, []
    make = BlockCache.__init__
    monkeypatch.setattr(BlockCache, "__init__", lambda cache: made.append(cache) or make(cache))
    monkeypatch.setattr(BlockCache, "start", lambda cache, *args: passes.append(cache) or start(cache, *args))
    expected = generate(model, input_ids)
    assert expected.shape[1] == input_ids.shape[1] + 8
    assert len(made) == 1 and passes == made * 8


def test_trainer_predicts_logits_and_no_cache(input_ids, tmp_path):
    model = convert(tiny_base_model("qwen3"), 3)
    arguments = TrainingArguments(tmp_path, report_to="none", use_cpu=True, use_cache=True)
    rows = [{"input_ids": row, "labels": row} for row in input_ids]
    assert Trainer(model, arguments).predict(rows).predictions.shape == (*input_ids.shape, 97)


@pytest.mark.parametrize("name", KV_CACHE_NAMES)
def test_buffers_are_reused_from_step_to_step(name, model, input_ids):
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids, **{name: cache})
        pointers = set()
        for _ in range(4):
            model(input_ids[:, :1], **{name: cache})
            block_cache = BlockCache.beside(cache)
            pointers.add((block_cache.values.data_ptr(), block_cache.scores.data_ptr(), block_cache.mixes.data_ptr()))
    assert len(pointers) == 1
    assert len(block_cache) == 1 + 8 // model.config.attn_res_block_size


def test_prefill_under_inference_mode_then_decoding_without(model, input_ids):
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids, past_key_values=cache)
        model(input_ids[:, :1], past_key_values=cache)
    with torch.no_grad():
        BlockCache.beside(cache).start(
            model.model.depth_queries()[0], torch.zeros(3, 1, 32), model.config.attn_res_block_size, 1e-6
        )
        BlockCache.beside(cache).append(torch.ones(3, 1, 32))


@pytest.mark.skipif(BEFORE_5_20, reason="the base itself loses the prompt at the switch")
def test_phi3_drops_the_cache_where_longrope_switches():
    """As in the base: behind the original length other frequencies hold, so the keys cached before are void."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [9.0] * 4}
    kwargs = {"original_max_position_embeddings": 12, "max_position_embeddings": 64, "rope_parameters": rope}
    base_model = tiny_base_model("phi3", **kwargs)
    model = convert(base_model, 3)
    input_ids = torch.randint(3, 97, (1, 10))
    assert torch.equal(generate(model, input_ids), generate(base_model, input_ids, use_cache=False))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", ["qwen3", "kimi_linear", "granite"])
def test_pipeline_stages(family, input_ids):
    """Each stage has some of the layers, and hands on a partial sum and the closed blocks."""
    model = randomize_queries(convert(tiny_base_model(family), 3)).model
    expected = UpToRounding(lambda: model(input_ids).last_hidden_state, model=model)
    stages = [copy.deepcopy(model) for _ in range(3)]
    ranges = [(0, 1), (1, 3), (3, 4)]
    for stage, (start, end) in zip(stages, ranges):
        stage.keep_layers(start, end)
    # the last case: a stage that trains behind one that does not
    for grads in ([True] * 3, [False] * 3, [False, True, True]):
        with torch.set_grad_enabled(grads[0]):
            stream = stages[0](input_ids).last_hidden_state
        for stage, (start, _), grad in zip(stages[1:], ranges[1:], grads[1:]):
            assert stream.site == 2 * start and len(stream.blocks) == 1 + 2 * start // 3
            sent = [block.clone() for block in stream.blocks], stream.partial, stream.site
            with torch.set_grad_enabled(grad):
                stream = stage(inputs_embeds=stage.start_stream(*sent)).last_hidden_state
        expected.check(stream)
        if grad:
            stream.sum().backward()
            assert all(stage.depth_queries.query.grad.any() for stage in stages[1:])
    assert stages[0].depth_queries.query.grad.any(), "no gradient has come back over the stages"
    with pytest.raises(ValueError, match="the residual stream at site 2, and was given the stream at site 0"):
        stages[1](inputs_embeds=stages[1].start_stream([torch.zeros(1, 2, 32)]))
    with pytest.raises(ValueError, match="has to be given the residual stream at site 2, and was given a Tensor"):
        stages[1](input_ids)


@pytest.mark.parametrize("name", KV_CACHE_NAMES)
def test_caches_of_a_slice(name, input_ids):
    """Right as `generate` uses them, and refused where positions or masks would be those of an empty cache."""
    model = randomize_queries(convert(tiny_base_model("llama"), 3)).model
    slices = [copy.deepcopy(model) for _ in range(2)]
    slices[0].keep_layers(0, 2)
    slices[1].keep_layers(2, 4)
    length = input_ids.shape[1]

    def run(caches, start, end, **kwargs):
        kwargs |= {"attention_mask": torch.ones(len(input_ids), end)}
        ids, given = input_ids[:, start:end], [{name: cache, **kwargs} for cache in caches]
        stream = slices[0](ids, **given[0]).last_hidden_state
        sent = slices[1].start_stream(stream.blocks, stream.partial, stream.site)
        return slices[1](inputs_embeds=sent, **given[1]).last_hidden_state

    def positions(start, end):
        return torch.arange(start, end)[None]

    with torch.no_grad():
        expected = UpToRounding(lambda: model(input_ids).last_hidden_state[:, -1:], model=model)
        caches = DynamicCache(), DynamicCache()
        run(caches, 0, length - 1)
        expected.check(run(caches, length - 1, length, position_ids=positions(length - 1, length)))
        for message, cached, kwargs in (
            ("a filled cache with 2 tokens at once", length - 2, {"position_ids": positions(length - 2, length)}),
            ("a filled cache without `position_ids`", length - 1, {}),
        ):
            caches = DynamicCache(), DynamicCache()
            run(caches, 0, cached)
            with pytest.raises(ValueError, match=message):
                run(caches, cached, length, **kwargs)
        static = StaticCache(config=model.config, max_cache_len=length)
        for cache, mask, message in (
            (static, torch.ones_like(input_ids), "a static cache"),
            (DynamicCache(), torch.ones_like(input_ids).index_fill(1, torch.tensor([0]), 0), "a cache with padding"),
            (DynamicCache(), torch.zeros(1, 1, length, length), "a mask of your own"),
        ):
            stream = slices[0](input_ids).last_hidden_state
            sent = slices[1].start_stream(stream.blocks, stream.partial, stream.site)
            with pytest.raises(ValueError, match=message):
                slices[1](inputs_embeds=sent, attention_mask=mask, **{name: cache})
            with pytest.raises(ValueError, match=message):  # all by their places
                slices[1](None, mask, None, cache, sent)


@pytest.mark.parametrize("model_type", ["mamba", "mamba2"])
def test_states_of_a_slice(model_type, input_ids):
    """What is carried from token to token is of each layer by itself, and no mask or position is made from it."""
    base_model = AutoModelForCausalLM.from_config(decoder_config(model_type))
    model = AttnResForCausalLM(AttnResConfig.from_base_config(base_model.config, block_size=3)).eval().base_model
    slices = [copy.deepcopy(model) for _ in range(2)]
    slices[0].keep_layers(0, 2)
    slices[1].keep_layers(2, 4)
    mask = torch.ones_like(input_ids)
    mask[0, :3] = 0

    def run(model, cache, start, end, **inputs):
        name = next(name for name in CACHE_NAMES if name in inspect.signature(model.forward).parameters)
        kwargs = {"attention_mask": mask[:, :end], name: cache}
        return model(**(inputs or {"input_ids": input_ids[:, start:end]}), **kwargs).last_hidden_state

    length = input_ids.shape[1]
    whole, *parts = (DynamicCache(config=model.config) for _ in range(3))
    with torch.no_grad():
        for start, end in ((0, length - 1), (length - 1, length)):
            expected = run(model, whole, start, end)
            stream = run(slices[0], parts[0], start, end)
            sent = slices[1].start_stream(stream.blocks, stream.partial, stream.site)
            assert run(slices[1], parts[1], start, end, inputs_embeds=sent).equal(expected)


def test_parts_that_do_not_fit_the_site(input_ids):
    """Memory of a block that is missing would be read as if it were there."""
    model = randomize_queries(convert(tiny_base_model("llama"), 3)).model
    one = torch.randn(1, 2, 32)
    for site, blocks, partial in ((3, [one], None), (4, [one, one], None), (3, [one, one], one), (2, [one, one], one)):
        for grad in (True, False):
            with (
                torch.set_grad_enabled(grad),
                pytest.raises(ValueError, match=f"A stream at site {site} with .* `outputs`, not "),
            ):
                model.start_stream(blocks, partial, site)


@pytest.mark.parametrize("start, end", [(0, -1), (3, 3), (2, 1), (-1, 2), (2, 99)])
def test_slices_that_are_none(start, end):
    model = convert(tiny_base_model("llama"), 3).model
    with pytest.raises(
        ValueError, match=rf"`start={start}` and `end={end}` must enclose at least one of the 4 layers"
    ):
        model.keep_layers(start, end)


def test_a_slice_is_seen_and_scores_once(input_ids, monkeypatch):
    """Depth attentions of all slices are those of the model; a closed block is scored once in each slice."""
    model = randomize_queries(convert(tiny_base_model("llama"), 3)).model
    expected = model(input_ids, output_depth_attentions=True).depth_attentions
    first, last = copy.deepcopy(model), copy.deepcopy(model)
    first.keep_layers(0, 2)
    last.keep_layers(2, 4)
    outputs = first(input_ids, output_depth_attentions=True)
    stream = outputs.last_hidden_state
    behind = last(inputs_embeds=stream, output_depth_attentions=True)
    actual = *outputs.depth_attentions, *behind.depth_attentions
    assert len(actual) == len(expected) == 9
    for of_slice, of_model in zip(actual, expected):
        torch.testing.assert_close(of_slice, of_model)
    # A source that is left out in a later slice is left out as in the model, and the recorder goes on with the stream
    in_model, in_slice = (DepthRecorder(masked_source={5: 1}) for _ in range(2))
    masked = model(input_ids, depth_recorder=in_model).last_hidden_state
    stream_of_ids = first(input_ids).last_hidden_state
    torch.testing.assert_close(last(inputs_embeds=stream_of_ids, depth_recorder=in_slice).last_hidden_state, masked)
    assert sorted(in_slice.weights) == [4, 5, 6, 7, 8] and not in_slice.weights[5][..., 1].any()
    chunks, start = [], depth_stream.start_chunk
    monkeypatch.setattr(depth_stream, "start_chunk", lambda *args: chunks.append(start(*args)) or chunks[-1])
    rebuilt = last.start_stream(stream.blocks, stream.partial, stream.site)
    last(inputs_embeds=rebuilt).last_hidden_state.sum().backward()
    # Block by block, and not layer by layer
    assert [(chunk.first, chunk.end, chunk.num_closed) for chunk in chunks] == [(4, 6, 2), (6, 9, 3)]


def test_a_base_without_a_final_norm(input_ids):
    """It hands out its last hidden state as it is: what the site behind the last sublayer reads."""
    config = decoder_config("opt", _remove_final_layer_norm=True, word_embed_proj_dim=32)
    model = randomize_queries(convert(AutoModelForCausalLM.from_config(config), 3)).model
    model = model.decoder if hasattr(model, "decoder") and not hasattr(model, "depth_queries") else model
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            recorder = DepthRecorder()
            state = model(input_ids, depth_recorder=recorder).last_hidden_state
            as_tuple = model(input_ids, return_dict=False)[0]
        assert isinstance(state, torch.Tensor) and isinstance(as_tuple, torch.Tensor) and 8 in recorder.weights
        torch.testing.assert_close(state, as_tuple)


def test_two_models_of_one_kv_cache_class_do_not_mix():
    """Steps of two generations may alternate: each has its own block cache."""
    first = randomize_queries(convert(tiny_base_model("llama"), 3))
    second = randomize_queries(convert(tiny_base_model("mistral", seed=1, sliding_window=None), 1))
    input_ids = torch.randint(3, 97, (2, 9))
    caches = [DynamicCache(config=tiny_base_config("llama")) for _ in range(2)]
    with torch.no_grad():
        for position in range(input_ids.shape[1]):
            logits = [
                model(input_ids[:, position : position + 1], past_key_values=cache).logits
                for model, cache in zip((first, second), caches)
            ]
        for model, last in zip((first, second), logits):
            UpToRounding(lambda model=model: model(input_ids).logits[:, -1:], model=model).check(last)
