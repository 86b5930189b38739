# SPDX-License-Identifier: Apache-2.0
"""Encoder-decoders: two residual streams in one model, each with queries of its own, as transformers' users run them.

That every type computes what its base and the definition compute is tested with the encoders.
"""

import copy
import json
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from encoder_models import (
    check_converted_and_back,
    converted_encoder,
    encoder_config,
    inputs_of,
    literal_outputs,
    native_encoder,
    outputs_of,
    with_random_queries,
)
from literal_definition import relative
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    AutoModelForTokenClassification,
    BartConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5GemmaConfig,
    WhisperConfig,
)

from attnres import AttnResConfig, AttnResForCausalLM, AttnResForSeq2SeqLM, DepthRecorder, DepthStream
from attnres.base.config import check_base_model_type
from attnres.base.probe import probe_slices, run_probes
from attnres.conversion import convert, prune, select_layers, verify
from attnres.conversion.probe_report import describe_probe, probe_report
from attnres.serving.server import check_before_serving


T5 = ("t5", "AttnResForSeq2SeqLM")
WHISPER = ("whisper", "AttnResForSpeechSeq2Seq")
# Reads other than the paper's
READS = [
    {"attn_res_num_heads": 4},
    {"attn_res_weights": "sigmoid", "attn_res_open_block": "each"},
    {"attn_res_weights": "softmax1", "attn_res_query": "hybrid"},
    {"attn_res_stream": "kept"},
]


def random_model(name, head, dtype=torch.float64, **fields):
    """A model with random queries, its base's, and what they are given."""
    native = native_encoder(name, head, dtype)
    return with_random_queries(converted_encoder(native, head, 2, **fields)), native, inputs_of(native)


def by_itself(model, ids, num_tokens):
    """Greedy answers without any cache, by one forward pass for each token."""
    start = model.generation_config.decoder_start_token_id
    decoded = torch.full((len(ids), 1), model.config.decoder_start_token_id if start is None else start)
    for _ in range(num_tokens):
        logits = model(ids, decoder_input_ids=decoded, use_cache=False).logits
        decoded = torch.cat([decoded, logits[:, -1:].argmax(-1)], dim=1)
    return decoded


@pytest.mark.parametrize("read", READS, ids=str)
@pytest.mark.parametrize("name, head", [T5, WHISPER])
def test_other_reads(name, head, read):
    native = native_encoder(name, head)
    inputs = inputs_of(native)
    model = converted_encoder(native, head, 2, **read)
    with torch.no_grad():
        assert relative(outputs_of(model, inputs), outputs_of(native, inputs)) < 1e-12
        with_random_queries(model)
        assert relative(outputs_of(model, inputs), literal_outputs(native, model, inputs)) < 1e-12


@pytest.mark.parametrize("name, head", [T5, WHISPER])
def test_gradients(name, head):
    """Every parameter of the base has the base's gradient at queries of zero, with checkpointing too."""
    native = native_encoder(name, head)
    inputs = inputs_of(native)
    outputs_of(native, inputs).square().mean().backward()
    grads = {name: parameter.grad for name, parameter in native.named_parameters() if parameter.grad is not None}
    largest = max(grad.norm() for grad in grads.values())
    for reentrant in (None, False):
        model = converted_encoder(native, head, 2)
        for module in model.modules():  # no dropout, which some have as a number
            for rate in ("p", "dropout", "attention_dropout", "activation_dropout"):
                if isinstance(getattr(module, rate, None), float):
                    setattr(module, rate, 0.0)
        model.train()
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        outputs_of(model, inputs).square().mean().backward()
        for parameter_name, grad in grads.items():
            error = (model.get_parameter(parameter_name).grad - grad).norm()
            assert error < 1e-12 * largest, (reentrant, parameter_name)
        for stack in model.stacks:
            queries = stack.depth_queries.query
            assert queries.grad.abs().sum(-1).count_nonzero() >= len(queries) - 1


@torch.no_grad()
@pytest.mark.parametrize("name", ["t5", "mbart"])
def test_generation_with_caches(name):
    """Steps of generation share the buffers of one stack, and the encoder runs in between."""
    model, _, inputs = random_model(name, "AttnResForSeq2SeqLM")
    ids = inputs["input_ids"]
    model.generation_config.eos_token_id = None
    model.generation_config.forced_eos_token_id = None
    expected = by_itself(model, ids, 8)
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), expected)
    static = model.generate(ids, max_new_tokens=8, cache_implementation="static", disable_compile=True)
    assert torch.equal(static, expected)
    assert torch.equal(model.generate(ids, max_new_tokens=8, use_cache=False), expected)
    beams = [model.generate(ids, max_new_tokens=8, num_beams=3, use_cache=use_cache) for use_cache in (True, False)]
    assert torch.equal(*beams)
    outputs = model.generate(ids, max_new_tokens=8, output_depth_attentions=True, return_dict_in_generate=True)
    assert torch.equal(outputs.sequences, expected) and len(outputs.decoder_depth_attentions) == 8
    with_weights = model(ids, decoder_input_ids=expected[:, :-1], output_depth_attentions=True)
    for site, weights in enumerate(with_weights.decoder_depth_attentions):
        steps = torch.cat([of_step[site] for of_step in outputs.decoder_depth_attentions], dim=1)
        assert relative(steps, weights) < 1e-12


@torch.no_grad()
def test_padding_and_embeddings_in_place_of_tokens():
    model, _, inputs = random_model(*T5)
    ids, decoder_ids = inputs["input_ids"], inputs["decoder_input_ids"]
    expected = model(**inputs).logits
    padded, mask = nn.functional.pad(ids, (0, 4)), nn.functional.pad(torch.ones_like(ids), (0, 4))
    assert relative(model(padded, attention_mask=mask, decoder_input_ids=decoder_ids).logits, expected) < 1e-12
    embedded = {"inputs_embeds": model.shared(ids), "decoder_inputs_embeds": model.shared(decoder_ids)}
    assert relative(model(**embedded).logits, expected) < 1e-12


@torch.no_grad()
def test_two_generations_in_turn():
    """Each has a block cache beside its KV cache; the encoder and the other model run in between."""
    models = [random_model(*T5)[0], random_model("t5", T5[1], attn_res_stream="kept")[0]]
    ids = inputs_of(native_encoder(*T5))["input_ids"]
    expected = [by_itself(model, ids, 5) for model in models]
    caches, decoded = [None, None], [wanted[:, :1] for wanted in expected]
    for _ in range(5):
        for i, model in enumerate(models):
            outputs = model(ids, decoder_input_ids=decoded[i][:, -1:], past_key_values=caches[i], use_cache=True)
            caches[i] = outputs.past_key_values
            decoded[i] = torch.cat([decoded[i], outputs.logits[:, -1:].argmax(-1)], dim=1)
    assert all(map(torch.equal, decoded, expected))


@torch.no_grad()
def test_another_model_within_the_forward_pass_keeps_its_recorders():
    """As where a teacher or a monitor runs in a hook: its weights are its own, and those of the outer model stay."""
    model, _, inputs = random_model(*T5)
    other, _, _ = random_model("t5", T5[1], attn_res_weights="sigmoid")
    expected = model(**inputs, output_depth_attentions=True)
    of_other = other(**inputs, output_depth_attentions=True)
    seen = []

    def run_other(*args):
        recorder = DepthRecorder()
        other.encoder(inputs["input_ids"], depth_recorder=recorder)
        seen.append((other(**inputs, output_depth_attentions=True), recorder))

    handle = model.decoder.register_forward_pre_hook(run_other)
    found = model(**inputs, output_depth_attentions=True)
    handle.remove()
    for name in ("encoder_depth_attentions", "decoder_depth_attentions"):
        assert all(map(torch.equal, found[name], expected[name]))
        assert all(map(torch.equal, seen[0][0][name], of_other[name]))
    assert len(seen[0][1].weights) == 7


@torch.no_grad()
def test_in_several_threads():
    model, _, inputs = random_model(*T5)
    rows = [{name: tensor[row : row + 1] for name, tensor in inputs.items()} for row in (0, 1)] * 4
    expected = [model(**row, output_depth_attentions=True) for row in rows]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda row: model(**row, output_depth_attentions=True), rows))
    for actual, wanted in zip(found, expected):
        assert relative(actual.logits, wanted.logits) < 1e-12
        for name in ("encoder_depth_attentions", "decoder_depth_attentions"):
            assert all(relative(a, b) < 1e-12 for a, b in zip(actual[name], wanted[name]))


@torch.no_grad()
def test_whisper_transcribes_as_its_base():
    native = native_encoder(*WHISPER)
    model, inputs = converted_encoder(native, WHISPER[1], 2), inputs_of(native)["input_features"]
    for options in ({}, {"num_beams": 2}):
        answers = [network.generate(inputs, max_new_tokens=12, **options) for network in (model, native)]
        assert torch.equal(*answers)


@torch.no_grad()
@pytest.mark.parametrize("name, head", [T5, WHISPER])
def test_every_site_is_read_once_and_with_its_norm(name, head, monkeypatch):
    """T5 has its norms deeper than others: read without them, a site is read once for each operation of a norm."""
    model, _, inputs = random_model(name, head)
    read, norms = DepthStream.read, []
    monkeypatch.setattr(DepthStream, "read", lambda self, norm=None: norms.append(norm) or read(self, norm))
    model(**inputs)
    assert len(norms) == model.config.num_sites and None not in norms


def test_weights_and_recorders():
    model, native, inputs = random_model(*T5)
    with torch.no_grad():
        outputs = model(**inputs, output_depth_attentions=True)
        of_parts = outputs.encoder_depth_attentions, outputs.decoder_depth_attentions
        assert [len(weights) for weights in of_parts] == [7, 10] and model.config.num_sites == 17
        for weights in (weights for of_part in of_parts for weights in of_part):
            torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
        assert isinstance(model(**inputs, output_depth_attentions=True, return_dict=False), tuple)
        encoded = model.encoder(inputs["input_ids"], output_depth_attentions=True)
        assert all(map(torch.equal, encoded.depth_attentions, outputs.encoder_depth_attentions))
        again = model(**inputs, encoder_outputs=encoded, output_depth_attentions=True)
        assert again.encoder_depth_attentions is None and torch.equal(again.logits, outputs.logits)
        edit = {"edit_output": {3: torch.zeros_like}}
        for name, site in (("encoder_depth_recorder", 3), ("decoder_depth_recorder", 3)):
            recorder = DepthRecorder(**edit)
            assert relative(model(**inputs, **{name: recorder}).logits, outputs.logits) > 1e-3
            assert not recorder.outputs[site].any()
    for wrong, message in (
        ({"depth_recorder": DepthRecorder()}, "takes no `depth_recorder`"),
        ({"encoder_depth_recorder": DepthRecorder(**edit), "encoder_outputs": encoded}, "no encoder runs"),
        ({"encoder_depth_recorder": DepthRecorder(edit_output={6: torch.zeros_like})}, "they go from 0 to 5"),
    ):
        with pytest.raises(ValueError, match=message):
            model(**inputs, **wrong)
    assert relative(model(**inputs).logits, outputs.logits) < 1e-12, "an error has left something behind"


@pytest.mark.slow
@pytest.mark.parametrize("is_trained", [False, True], ids=["inference", "gradients"])
def test_compiled_as_one_graph(is_trained):
    model, _, inputs = random_model(*T5)
    with torch.set_grad_enabled(is_trained):
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert relative(compiled(**inputs).logits, model(**inputs).logits) < 1e-12


@torch.no_grad()
def test_hidden_states_and_attentions_are_those_of_the_base():
    native = native_encoder(*T5)
    model, inputs = converted_encoder(native, T5[1], 2), inputs_of(native)
    for network in (native, model):
        network.set_attn_implementation("eager")
    found, expected = (
        network(**inputs, output_hidden_states=True, output_attentions=True) for network in (model, native)
    )
    for name in ("encoder_hidden_states", "decoder_hidden_states", "encoder_attentions", "cross_attentions"):
        assert len(found[name]) == len(expected[name])  # transformers 5.19 gives no attentions of T5
        assert "attentions" in name or len(found[name]) > 2
        for actual, state in zip(found[name], expected[name]):
            assert type(actual) is torch.Tensor and relative(actual, state) < 1e-6  # its softmax is in fp32


@torch.no_grad()
def test_copies():
    model, _, inputs = random_model(*WHISPER)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(outputs_of(other, inputs), outputs_of(model, inputs))


@torch.no_grad()
@pytest.mark.parametrize("name, head", [T5, WHISPER])
def test_fp16_and_what_it_does_against_overflow(name, head):
    """In fp16 the code of both clamps the residual stream between sublayers. Below the limit, that does nothing."""
    model, native, inputs = random_model(name, head, torch.float32)
    half = copy.deepcopy(model).half()
    inputs_in_half = {k: v.half() if v.is_floating_point() else v for k, v in inputs.items()}
    assert relative(half(**inputs_in_half).logits, model(**inputs).logits) < 0.05
    layer = half.stacks[0].get_submodule("block.1" if name == "t5" else "layers.1")
    seen = []
    layer.register_forward_hook(lambda module, args, output: seen.append(output))
    weight = layer.layer[-1].DenseReluDense.wo.weight if name == "t5" else layer.fc2.weight
    weight.fill_(6e4)
    half(**inputs_in_half)
    stream = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
    assert stream.newest.abs().max() > 6e4 and stream.newest.isfinite().all()


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "name, head",
    [T5, ("t5", "AttnResForTokenClassification"), WHISPER, ("mbart", "AttnResForSequenceClassification")],
)
def test_converted_and_back(name, head, tmp_path):
    report = check_converted_and_back(name, head, tmp_path, num_blocks=3)
    assert not any("blocks were requested" in note for note in report.notes)
    assert "15 sublayers in an encoder and a decoder, in blocks of 3" in report.to_markdown()
    assert ("4 random recordings" in report.verification.to_markdown()) is (name == "whisper")
    with pytest.raises(ValueError, match="has trained queries"):
        convert(tmp_path / "trained", tmp_path / "blocks", num_blocks=2)


@pytest.mark.slow
def test_other_blocks_and_queries_that_see_the_input(tmp_path):
    native_encoder(*T5, dtype=torch.float32).save_pretrained(tmp_path / "base")
    convert(tmp_path / "base", tmp_path / "attnres", full=True)
    report = convert(tmp_path / "attnres", tmp_path / "input", num_blocks=3, query="input")
    assert report.verification.equal
    card = (tmp_path / "input/README.md").read_text()
    assert "The encoder has 6 sublayers" in card and "The decoder has 9 sublayers" in card and "ACM" in card
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "input")
    assert [tuple(stack.depth_queries.projection.shape) for stack in model.stacks] == [(7, 32, 32), (10, 32, 32)]


def test_a_lost_factor_or_swapped_queries_are_found(tmp_path):
    native_encoder(*T5, dtype=torch.float32).save_pretrained(tmp_path / "base")
    convert(tmp_path / "base", tmp_path / "attnres", num_blocks=3)
    config = json.loads((tmp_path / "attnres/config.json").read_text())
    (tmp_path / "attnres/config.json").write_text(json.dumps(config | {"attn_res_scale_norm_eps": False}))
    assert not verify(tmp_path / "base", tmp_path / "attnres").equal


@pytest.mark.slow
def test_another_number_of_layers(tmp_path):
    native_encoder(*T5, dtype=torch.float32).save_pretrained(tmp_path / "base")
    convert(tmp_path / "base", tmp_path / "attnres", num_blocks=3)
    for wrong in ({"num_layers": 2}, {"num_decoder_layers": 2}):
        message = "with `. and . layers` there are .*Load it with the numbers of layers in its config.json"
        with pytest.raises(ValueError, match=message):
            AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "attnres", **wrong)
    config = AttnResConfig.from_base_config(encoder_config("t5"), num_blocks=3)
    config.num_layers = 2
    assert [len(stack.depth_queries.query) for stack in AttnResForSeq2SeqLM(config).stacks] == [5, 10]
    edited = json.loads((tmp_path / "base/config.json").read_text()) | {"num_decoder_layers": 2}
    (tmp_path / "base/config.json").write_text(json.dumps(edited))
    with pytest.raises(ValueError, match="it has 2 layers for `decoder..`, and the weights have 3"):
        convert(tmp_path / "base", tmp_path / "out", num_blocks=3)


def test_loaded_for_another_task(tmp_path):
    """A base by itself, and the encoder of a model alone."""
    native = native_encoder(*T5, dtype=torch.float32)
    native.save_pretrained(tmp_path / "base")
    model, info = AttnResForSeq2SeqLM.from_pretrained(tmp_path / "base", output_loading_info=True)
    assert all("depth_queries" in name for name in info["missing_keys"])
    inputs = inputs_of(native)
    assert relative(outputs_of(model, inputs), outputs_of(native, inputs)) < 1e-5
    with_random_queries(model).save_pretrained(tmp_path / "trained")
    tagger = AutoModelForTokenClassification.from_pretrained(tmp_path / "trained")
    assert torch.equal(tagger.stacks[0].depth_queries.query, model.encoder.depth_queries.query)
    assert len(tagger.stacks) == 1
    trunk = AutoModel.from_pretrained(tmp_path / "trained")
    assert type(trunk).__name__ == "AttnResModel" and len(trunk.stacks) == 2


@pytest.mark.slow
def test_code_in_the_checkpoint(tmp_path):
    native_encoder(*WHISPER, dtype=torch.float32).save_pretrained(tmp_path / "base")
    convert(tmp_path / "base", tmp_path / "alone", num_blocks=3, self_contained=True)
    auto_map = json.loads((tmp_path / "alone" / "config.json").read_text())["auto_map"]
    assert set(auto_map) == {"AutoConfig", "AutoModel", "AutoModelForSpeechSeq2Seq"}
    program = (
        "import sys; sys.modules['attnres'] = None; from transformers import AutoModelForSpeechSeq2Seq as A;"
        f"print(type(A.from_pretrained({str(tmp_path / 'alone')!r}, trust_remote_code=True)))"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "transformers_modules" in printed and "AttnResForSpeechSeq2Seq[whisper]" in printed
    assert "AutoModelForSpeechSeq2Seq, AutoProcessor" in (tmp_path / "alone" / "README.md").read_text()


def test_trained_with_trainer_and_peft(tmp_path):
    config = AttnResConfig.from_base_config(encoder_config("t5"), block_size=2)
    model = get_peft_model(
        AttnResForSeq2SeqLM(config), LoraConfig(target_modules=["q", "v"], modules_to_save=["depth_queries"])
    )
    rows = [{"input_ids": row, "labels": row.flip(0)} for row in torch.randint(3, 99, (16, 7))]
    arguments = Seq2SeqTrainingArguments(
        tmp_path, max_steps=3, per_device_train_batch_size=8, learning_rate=1e-2, report_to=[], use_cpu=True
    )
    Seq2SeqTrainer(model, arguments, train_dataset=rows).train()
    trained = model.base_model.model.stacks
    assert all(stack.depth_queries.modules_to_save["default"].query.any() for stack in trained)
    model.save_pretrained(tmp_path / "adapter")
    base = AttnResForSeq2SeqLM(config)
    again = PeftModel.from_pretrained(base, tmp_path / "adapter")
    for stack, loaded in zip(trained, again.base_model.model.stacks):
        found, expected = (of.depth_queries.modules_to_save["default"].query for of in (loaded, stack))
        assert torch.equal(found, expected)


def test_adapters_combined_and_mixed_in_a_batch():
    """In both stacks: a weighted sum of two adapters, and rows of one batch that have one adapter each."""
    native = native_encoder(*T5)
    inputs = inputs_of(native)
    config = LoraConfig(target_modules=["q"], modules_to_save=["depth_queries"], init_lora_weights=False)
    model = get_peft_model(converted_encoder(native, T5[1], 2), config, adapter_name="first")
    model.add_adapter("second", config)
    stacks = model.base_model.model.stacks
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for stack in stacks:
            for name in ("first", "second"):
                query = stack.depth_queries.modules_to_save[name].query
                query.copy_(torch.randn(query.shape, generator=generator))
    model.eval().add_weighted_adapter(["first", "second"], [0.25, 0.5], "both", combination_type="linear")
    for stack in stacks:
        copies = stack.depth_queries.modules_to_save
        torch.testing.assert_close(copies["both"].query, 0.25 * copies["first"].query + 0.5 * copies["second"].query)
    with torch.no_grad():
        alone = []
        for row, name in enumerate(("first", "second")):
            model.set_adapter(name)
            alone.append(model(**{key: value[row : row + 1] for key, value in inputs.items()}).logits)
        mixed = model(**inputs, adapter_names=["first", "second"]).logits
    assert relative(mixed, torch.cat(alone)) < 1e-12


def test_layers_that_are_left_out_at_random():
    config = AttnResConfig.from_base_config(encoder_config("m2m_100", encoder_layerdrop=0.5), num_blocks=3)
    model = AttnResForSeq2SeqLM(config)
    inputs = {"input_ids": torch.tensor([[3, 4, 2]]), "decoder_input_ids": torch.tensor([[2, 5]])}
    with pytest.raises(ValueError, match="LayerDrop, rate 0.5"):
        model.train()(**inputs)
    model.eval()(**inputs)


def test_what_the_probe_sees():
    report = probe_report(encoder_config("t5"))
    assert [(run["part"], run["first"], run["last"]) for run in report["layers"]] == [
        ("encoder", 0, 2),
        ("decoder", 0, 2),
    ]
    assert (report["num_layers"], report["num_sites"]) == (6, 17)
    assert "decoder layers 0 to 2: T5Block" in describe_probe(encoder_config("t5"))
    assert [len(probe.probed) for probe in run_probes(WhisperConfig(encoder_layers=2, decoder_layers=3))] == [2, 3]


def test_refused(tmp_path):
    decoder_alone = encoder_config("mbart", is_decoder=True, is_encoder_decoder=False)
    for config, reason in (
        (BartConfig(), "BartEncoderLayer does more to the residual stream"),
        (T5GemmaConfig(), "its encoder has a config of its own"),
        (decoder_alone, "it is the decoder of an encoder-decoder, without the encoder"),
    ):
        with pytest.raises(ValueError, match=reason):
            AttnResConfig.from_base_config(config)
    config = AttnResConfig.from_base_config(encoder_config("whisper"), num_blocks=3)
    for cls in (AttnResForCausalLM, AutoModelForCausalLM):
        with pytest.raises(ValueError, match="it is an `AttnResForSeq2SeqLM` or an `AttnResForSpeechSeq2Seq`"):
            (cls if cls is AttnResForCausalLM else cls.from_config)(config)
    with pytest.raises(ValueError, match="transformers has no Seq2SeqLM for it"):
        AttnResForSeq2SeqLM(config)
    with pytest.raises(ValueError, match="`num_blocks=10` is more than the 9 sublayers"):
        AttnResConfig.from_base_config(encoder_config("t5"), num_blocks=10)
    with pytest.raises(ValueError, match="`attn_res_sublayers="):
        AttnResConfig.from_base_config(encoder_config("t5")).attn_res_sublayers = [[2, 2], [0]]
    with pytest.raises(ValueError, match="has no causal language model"):
        check_base_model_type("t5", has_lm_head=True)
    with pytest.raises(ValueError, match="cannot be divided into slices: it has an encoder as well as a decoder"):
        probe_slices(encoder_config("t5"))
    model, _, _ = random_model(*T5, dtype=torch.float32)
    model.save_pretrained(tmp_path / "attnres")
    for call in (lambda: select_layers(model, [0]), lambda: prune(tmp_path / "attnres", tmp_path / "out", [0])):
        with pytest.raises(ValueError, match="an encoder as well as a decoder, and a number does not say of which"):
            call()


@pytest.mark.parametrize("name, head", [T5, ("vit", "AttnResForImageClassification")])
def test_not_served(name, head, tmp_path):
    converted_encoder(native_encoder(name, head, dtype=torch.float32), head, 2).save_pretrained(tmp_path / "attnres")
    with pytest.raises(ValueError, match=f"is of type `{name}`, and a server needs a decoder"):
        check_before_serving(str(tmp_path / "attnres"))


@pytest.mark.parametrize("base_model_type", ["llama", "nope", "", "T5", None, 5, ["t5"], {"t5": 1}, "t5\x00", "../t5"])
def test_other_types_are_left_to_the_server(base_model_type, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"base_model_type": base_model_type}))
    check_before_serving(str(tmp_path))


@pytest.mark.parametrize(
    "content, message",
    [("", "is not JSON"), ("[]", "no JSON object"), ("{" * 9, "is not JSON"), ("[" * 99999, "nested")],
)
def test_a_config_that_is_none_is_not_served(content, message, tmp_path):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        check_before_serving(str(tmp_path))


def test_saved_for_speech_and_loaded_again(tmp_path):
    model, _, inputs = random_model(*WHISPER, dtype=torch.float32)
    model.save_pretrained(tmp_path / "whisper")
    again = AutoModelForSpeechSeq2Seq.from_pretrained(tmp_path / "whisper")
    with torch.no_grad():
        assert torch.equal(outputs_of(again, inputs), outputs_of(model, inputs))
