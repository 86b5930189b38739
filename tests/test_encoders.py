# SPDX-License-Identifier: Apache-2.0
"""Encoders of text and vision transformers: as their base, as the definition, converted, saved and trained.

Encoder-decoders are compared with both here, and have tests of their own in `test_encoder_decoders.py`.
"""

import copy
import json
import pickle
import subprocess
import sys

import pytest
import torch
from encoder_models import (
    check_converted_and_back,
    converted_encoder,
    encoder_config,
    heads_of,
    inputs_of,
    literal_outputs,
    native_encoder,
    outputs_of,
    with_random_queries,
)
from literal_definition import relative
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BartConfig,
    BertConfig,
    PreTrainedTokenizerFast,
    ResNetConfig,
    Swin2SRConfig,
    Trainer,
    TrainingArguments,
    ViTImageProcessor,
    YolosConfig,
    pipeline,
)

import attnres
from attnres import AttnResConfig, AttnResForCausalLM, AttnResForImageClassification, AttnResForMaskedLM, DepthRecorder
from attnres.base.families import ENCODERS, survey
from attnres.conversion import convert, prune, select_layers, verify
from attnres.conversion.probe_report import probe_report


SUPPORTED = json.loads(ENCODERS.read_text())["supported"]
FAST = ("clip_vision_model", "dinov2", "esm", "modernbert", "siglip_vision_model", "t5", "vit", "wav2vec2", "whisper")
EVERY_HEAD = [
    pytest.param(name, head, marks=() if name in FAST else pytest.mark.slow, id=f"{name}-{head}")
    for name, found in SUPPORTED.items()
    for head in found["heads"]
]
ONE_OF_EACH = [("vit", "AttnResForImageClassification"), ("modernbert", "AttnResForMaskedLM")]
# Reads other than the paper's
READS = [
    {"attn_res_num_heads": 4},
    {"attn_res_weights": "sigmoid", "attn_res_open_block": "each"},
    {"attn_res_weights": "softmax1", "attn_res_query": "hybrid"},
    {"attn_res_stream": "kept"},
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name, head", EVERY_HEAD)
def test_same_as_its_base_and_as_the_definition(name, head):
    head = f"AttnRes{head}"
    native = native_encoder(name, head)
    inputs = inputs_of(native)
    # Some bases compute their norms in fp32, whatever the dtype of the model
    tolerance = 1e-12 if SUPPORTED[name]["random_queries"] < 1e-12 else 1e-5
    with torch.no_grad():
        of_base = outputs_of(native, inputs)
    for block_size in (1, 3):
        model = converted_encoder(native, head, block_size)
        assert type(model).__name__ == head and isinstance(model, type(native))
        assert relative(outputs_of(model, inputs), of_base) < tolerance
        with torch.no_grad():
            assert relative(outputs_of(model, inputs), of_base) < tolerance
        with_random_queries(model)
        expected = literal_outputs(native, model, inputs)
        assert relative(expected, of_base) > 1e-3, "the queries do nothing"
        assert relative(outputs_of(model, inputs), expected) < tolerance
        with torch.no_grad():
            assert relative(outputs_of(model, inputs), expected) < tolerance


@pytest.mark.parametrize("read", READS, ids=str)
@pytest.mark.parametrize("name, head", ONE_OF_EACH)
def test_other_reads(name, head, read):
    native = native_encoder(name, head)
    inputs = inputs_of(native)
    model = converted_encoder(native, head, 3, **read)
    with torch.no_grad():
        assert relative(outputs_of(model, inputs), outputs_of(native, inputs)) < 1e-12
        with_random_queries(model)
        assert relative(outputs_of(model, inputs), literal_outputs(native, model, inputs)) < 1e-12


@pytest.mark.parametrize("name, head", ONE_OF_EACH)
def test_gradients(name, head):
    """Every parameter of the base has the base's gradient at queries of zero, with checkpointing too."""
    native = native_encoder(name, head)
    inputs = inputs_of(native)
    outputs_of(native, inputs).square().mean().backward()
    largest = max(parameter.grad.norm() for parameter in native.parameters() if parameter.grad is not None)
    for reentrant in (None, False, True):
        model = converted_encoder(native, head, 3).train()
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            if reentrant and name == "modernbert":
                model.enable_input_require_grads()
        outputs_of(model, inputs).square().mean().backward()
        for parameter_name, parameter in native.named_parameters():
            if parameter.grad is None or reentrant and name == "vit" and "embeddings" in parameter_name:
                continue
            error = (model.get_parameter(parameter_name).grad - parameter.grad).norm()
            assert error < 1e-12 * largest, (reentrant, parameter_name)
        assert model.trunk.depth_queries.query.grad.abs().sum(-1).count_nonzero() >= model.config.num_sites - 1


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    "name, head",
    [
        ("vit", "AttnResForImageClassification"),
        ("modernbert", "AttnResForMaskedLM"),
        ("modernbert", "AttnResForSequenceClassification"),
        ("modernbert", "AttnResForQuestionAnswering"),
        ("clip_vision_model", "AttnResModel"),
        ("esm", "AttnResForTokenClassification"),
        ("wav2vec2", "AttnResForCTC"),
        ("audio-spectrogram-transformer", "AttnResForAudioClassification"),
    ],
)
def test_converted_and_back(name, head, tmp_path):
    report = check_converted_and_back(name, head, tmp_path, num_blocks=4)
    text = report.verification.to_markdown()
    assert ("4 random images" in text) is (name in ("vit", "clip_vision_model"))
    assert ("4 random recordings" in text) is (name in ("wav2vec2", "audio-spectrogram-transformer"))


def random_encoder(name, head):
    """A model with random queries, and what it reads."""
    native = native_encoder(name, head)
    return with_random_queries(converted_encoder(native, head, 3)), inputs_of(native)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("is_trained", [False, True], ids=["inference", "gradients"])
@pytest.mark.parametrize("name, head", ONE_OF_EACH)
def test_compiled_as_one_graph(name, head, is_trained):
    model, inputs = random_encoder(name, head)
    with torch.set_grad_enabled(is_trained):
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert relative(compiled(**inputs).logits, model(**inputs).logits) < 1e-12


def test_padding_and_other_attention():
    model, inputs = random_encoder("modernbert", "AttnResForMaskedLM")
    ids = inputs["input_ids"][:1]
    padded, mask = nn.functional.pad(ids, (0, 4)), nn.functional.pad(torch.ones_like(ids), (0, 4))
    with torch.no_grad():
        expected = model(ids).logits
        assert relative(model(padded, attention_mask=mask).logits[:, : ids.shape[1]], expected) < 1e-12
        model.set_attn_implementation("eager")
        assert relative(model(ids).logits, expected) < 1e-6  # its softmax is in fp32


def test_images_of_another_size_and_masked_patches():
    native = native_encoder("dinov2", "AttnResModel")
    model = with_random_queries(converted_encoder(native, "AttnResModel", 3))
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, 3, 24, 32, generator=generator, dtype=torch.float64)
    masked = torch.rand(2, 16, generator=generator) < 0.5
    with torch.no_grad():
        for inputs in ({"pixel_values": images}, {**inputs_of(native), "bool_masked_pos": masked}):
            assert relative(outputs_of(model, inputs), literal_outputs(native, model, inputs)) < 1e-12


def test_drop_path_is_that_of_the_base():
    native = native_encoder("dinov2", "AttnResModel", drop_path_rate=0.5).train()
    model = converted_encoder(native, "AttnResModel", 3).train()
    inputs = inputs_of(native)
    assert relative(outputs_of(model, inputs), outputs_of(native, inputs)) < 1e-12
    assert relative(outputs_of(model, inputs), outputs_of(model.eval(), inputs)) > 1e-2


def test_copies_and_hidden_states():
    native = native_encoder("vit", "AttnResModel")
    model = converted_encoder(native, "AttnResModel", 3)
    inputs = inputs_of(native)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(outputs_of(other, inputs), outputs_of(model, inputs))
    for network in (native, model):
        network.set_attn_implementation("eager")
    with torch.no_grad():
        found, expected = (
            network(**inputs, output_hidden_states=True, output_attentions=True) for network in (model, native)
        )
    assert len(found.hidden_states) == len(expected.hidden_states) == 5
    assert len(found.attentions) == len(expected.attentions) == 4
    for actual, state in zip(found.hidden_states, expected.hidden_states):
        assert type(actual) is torch.Tensor and relative(actual, state) < 1e-12


def test_loaded_for_another_task(tmp_path):
    """A base by itself, a masked language model as a classifier, and other labels."""
    native = native_encoder("modernbert", "AttnResForMaskedLM", dtype=torch.float32)
    native.save_pretrained(tmp_path / "base")
    model, info = AttnResForMaskedLM.from_pretrained(tmp_path / "base", output_loading_info=True)
    assert all("depth_queries" in name for name in info["missing_keys"])
    assert relative(outputs_of(model, inputs_of(native)), outputs_of(native, inputs_of(native))) < 1e-5
    with_random_queries(model).save_pretrained(tmp_path / "trained")
    classifier, info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "trained", num_labels=3, output_loading_info=True
    )
    assert set(info["missing_keys"]) == {"classifier.weight", "classifier.bias"}
    assert torch.equal(classifier.trunk.depth_queries.query, model.trunk.depth_queries.query)


@pytest.mark.slow
def test_a_prenorm_decoder_with_the_head_of_an_encoder(tmp_path):
    """RoBERTa-PreLayerNorm is a causal language model for transformers, and its checkpoints are masked ones."""
    shape = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = AutoConfig.for_model("roberta-prelayernorm", intermediate_size=48, max_position_embeddings=130, **shape)
    AutoModelForMaskedLM.from_config(config).save_pretrained(tmp_path / "base")
    assert convert(tmp_path / "base", tmp_path / "attnres", num_blocks=2).verification.equal
    assert type(AutoModelForMaskedLM.from_pretrained(tmp_path / "attnres")).__name__ == "AttnResForMaskedLM"


def test_layers_left_out_at_random():
    """By default wav2vec2 does so in training, and where it is the last layer nothing else would notice."""
    native = native_encoder("wav2vec2", "AttnResForCTC", layerdrop=0.1)
    model = converted_encoder(native, "AttnResForCTC", 3)
    outputs_of(model, inputs_of(native))
    with pytest.raises(ValueError, match="LayerDrop, rate 0.1.*set `layerdrop` in the config to 0"):
        outputs_of(model.train(), inputs_of(native))


@pytest.mark.slow
def test_a_lost_factor_is_found(tmp_path):
    native_encoder("modernbert", "AttnResForMaskedLM", dtype=torch.float32).save_pretrained(tmp_path / "base")
    convert(tmp_path / "base", tmp_path / "attnres", num_blocks=2)
    config = json.loads((tmp_path / "attnres/config.json").read_text())
    (tmp_path / "attnres/config.json").write_text(json.dumps(config | {"attn_res_scale_norm_eps": False}))
    assert not verify(tmp_path / "base", tmp_path / "attnres").equal


def test_layers_selected_and_divided(tmp_path):
    native = native_encoder("vit", "AttnResForImageClassification")
    model = with_random_queries(converted_encoder(native, "AttnResForImageClassification", 3))
    inputs, kept = inputs_of(native), [0, 2, 3]
    selected = select_layers(model, kept)
    expected = literal_outputs(select_layers(native, kept), selected, inputs)
    with torch.no_grad():
        assert relative(outputs_of(selected, inputs), expected) < 1e-12
    with pytest.raises(ValueError, match="cannot be divided into slices.*`pixel_values`"):
        model.trunk.keep_layers(0, 2)
    native.float().save_pretrained(tmp_path / "vit")  # under the names of its published files
    with pytest.raises(ValueError, match="no tensors named `vit.layers...`.*select_layers"):
        prune(tmp_path / "vit", tmp_path / "out", kept)


@pytest.mark.slow
def test_pipelines(tmp_path):
    """As users call them: an image processor or a tokenizer beside the weights."""
    native = native_encoder("vit", "AttnResForImageClassification", dtype=torch.float32)
    native.save_pretrained(tmp_path / "vit")
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(tmp_path / "vit")
    convert(tmp_path / "vit", tmp_path / "vit-attnres", num_blocks=4)
    assert "AutoImageProcessor, AutoModelForImageClassification" in (tmp_path / "vit-attnres/README.md").read_text()
    from PIL import Image

    image = Image.effect_noise((40, 30), 90).convert("RGB")
    answers = [pipeline("image-classification", str(tmp_path / name))(image) for name in ("vit", "vit-attnres")]
    assert [found["label"] for found in answers[0]] == [found["label"] for found in answers[1]]
    assert answers[0][0]["score"] == pytest.approx(answers[1][0]["score"], abs=1e-5)

    native_encoder("modernbert", "AttnResForMaskedLM", dtype=torch.float32).save_pretrained(tmp_path / "bert")
    tokenizer_of_words(tmp_path / "bert")
    convert(tmp_path / "bert", tmp_path / "bert-attnres", full=True)
    answers = [pipeline("fill-mask", str(tmp_path / name))("w5 [MASK] w7 w9") for name in ("bert", "bert-attnres")]
    assert [found["token"] for found in answers[0]] == [found["token"] for found in answers[1]]


def tokenizer_of_words(folder):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["[PAD]", "[UNK]", "[MASK]", *(f"w{i}" for i in range(3, 99))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", mask_token="[MASK]"
    ).save_pretrained(folder)


def test_trained_with_trainer_and_peft(tmp_path):
    config = AttnResConfig.from_base_config(encoder_config("vit", num_labels=5), block_size=2)
    model = get_peft_model(
        AttnResForImageClassification(config),
        LoraConfig(target_modules=["q_proj", "v_proj"], modules_to_save=["depth_queries", "classifier"]),
    )
    images = torch.randn(16, 3, 16, 16)
    data = [{"pixel_values": image, "labels": i % 5} for i, image in enumerate(images)]
    arguments = TrainingArguments(
        tmp_path, max_steps=3, per_device_train_batch_size=8, learning_rate=1e-2, report_to=[], use_cpu=True
    )
    Trainer(model, arguments, train_dataset=data).train()
    assert model.base_model.model.trunk.depth_queries.modules_to_save["default"].query.any()
    model.save_pretrained(tmp_path / "adapter")


def test_recorder_and_weights():
    model, inputs = random_encoder("dinov2", "AttnResModel")
    with torch.no_grad():
        outputs = model(**inputs, output_depth_attentions=True)
        assert len(outputs.depth_attentions) == model.config.num_sites
        for weights in outputs.depth_attentions:
            torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
        recorder = DepthRecorder(edit_output={3: torch.zeros_like})
        edited = model(**inputs, depth_recorder=recorder).last_hidden_state
    assert relative(edited, outputs.last_hidden_state) > 1e-3


@pytest.mark.slow
def test_from_scratch_and_remote_code(tmp_path):
    """A self-contained folder loads without the package; a config alone makes a model that starts as means."""
    native_encoder("modernbert", "AttnResForMaskedLM", dtype=torch.float32).save_pretrained(tmp_path / "base")
    convert(tmp_path / "base", tmp_path / "alone", num_blocks=2, self_contained=True)
    auto_map = json.loads((tmp_path / "alone" / "config.json").read_text())["auto_map"]
    assert auto_map["AutoModelForMaskedLM"] == "modeling_attnres.AttnResForMaskedLM"
    assert not {"AutoModelForCausalLM", "AutoModelForImageClassification"} & auto_map.keys()
    program = (
        "import sys; sys.modules['attnres'] = None; from transformers import AutoModelForMaskedLM as A;"
        f"print(type(A.from_pretrained({str(tmp_path / 'alone')!r}, trust_remote_code=True)))"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "transformers_modules" in printed and "AttnResForMaskedLM[modernbert]" in printed
    assert "AutoModelForMaskedLM, AutoTokenizer" in (tmp_path / "alone" / "README.md").read_text()
    config = AttnResConfig.from_base_config(encoder_config("modernbert"), block_size=3)
    assert type(AutoModelForMaskedLM.from_config(config)) is type(AttnResForMaskedLM(config))
    assert type(AutoModel.from_config(config)).__name__ == "AttnResModel"


@pytest.mark.parametrize(
    "config, reason",
    [
        (BertConfig(), "BertLayer does more to the residual stream"),
        (ResNetConfig(), "its layers are not one stack"),
        (BartConfig(), "BartEncoderLayer does more to the residual stream"),
        # The same position embeddings are added for all images, in front of each layer
        (YolosConfig(num_hidden_layers=3), "in front of layer 1, a YolosLayer"),
        # A stage adds its outputs to its input, and within it layers do so with other streams
        (Swin2SRConfig(), "its Swin2SRStage has a longer residual stream inside"),
    ],
    ids=["after", "convolutions", "encoder-decoder", "positions", "inside"],
)
def test_refused(config, reason):
    with pytest.raises(ValueError, match=reason):
        AttnResConfig.from_base_config(config)


def test_wrong_tasks(tmp_path):
    vit = AttnResConfig.from_base_config(encoder_config("vit"))
    with pytest.raises(ValueError, match="no causal language model"):
        AttnResForCausalLM(vit)
    with pytest.raises(ValueError, match="no causal language model"):
        AutoModelForCausalLM.from_config(vit)
    with pytest.raises(ValueError, match="no MaskedLM"):
        AttnResForMaskedLM(vit)
    with pytest.raises(ValueError, match="no ImageClassification"):
        AutoModelForImageClassification.from_config(AttnResConfig())
    native_encoder("vit", "AttnResModel", dtype=torch.float32).save_pretrained(tmp_path / "vit")
    (tmp_path / "text.txt").write_text("some text")
    with pytest.raises(ValueError, match="reads images"):
        convert(tmp_path / "vit", tmp_path / "out", verify_text=tmp_path / "text.txt")
    assert not (tmp_path / "out").exists()
    config = json.loads((tmp_path / "vit" / "config.json").read_text())
    config["architectures"] = ["ViTForMaskedImageModeling"]
    (tmp_path / "vit" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="ViTForMaskedImageModeling.*one of ViTForImageClassification, ViTModel"):
        convert(tmp_path / "vit", tmp_path / "out")


def test_families():
    found = survey(["modernbert", "vit", "distilbert"])
    assert {*found["supported"]} == {"modernbert", "vit"} and "distilbert" in found["refused"]
    assert set(SUPPORTED["vit"]["heads"]) == {name.removeprefix("AttnRes") for name in heads_of("vit")}
    report = probe_report(encoder_config("vit"))
    assert report["num_sites"] == 9 and report["layers"][0]["name"] == "ViTLayer"
    assert attnres.AttnResConfig.from_base_config(AutoConfig.for_model("vit")).num_sites == 25
