# SPDX-License-Identifier: Apache-2.0
"""Models of images, sound and text: converted whole, with reads over depth in the language model."""

import contextlib
import copy
import json
import pickle

import multimodal_models
import pytest
import torch
from literal_definition import literal_logits
from peft import LoraConfig, PeftModel, get_peft_model
from PIL import Image
from rounding import all_in_fp64
from safetensors.torch import load_file, save_file
from tiny_models import TINY
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoProcessor,
    CLIPImageProcessor,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    pipeline,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

import attnres
from attnres.checkpoints.checkpoint import read_config
from attnres.conversion import convert, revert
from attnres.conversion.probe_report import describe_probe


IMAGE = 90  # the token that an image takes the place of
TEXT = {**TINY, "head_dim": 8}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "initializer_range": 0.1,
}
CONFIGS = {
    "gemma3": {"text_config": {**TEXT, "sliding_window": 4}, "vision_config": VISION, "mm_tokens_per_image": 4},
    "llava": {
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": {**VISION, "model_type": "clip_vision_model"},
        "image_seq_length": 16,
    },
    # Its language model is made by the name of its class
    "llama4": {
        "text_config": {**TEXT, "intermediate_size_mlp": 48, "num_local_experts": 4, "num_experts_per_tok": 1},
        "vision_config": {
            **VISION,
            **{"intermediate_size": 64, "pixel_shuffle_ratio": 0.5},
            **dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 32),
        },
    },
    "mistral3": {
        "text_config": {**TEXT, "model_type": "mistral"},
        "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 8},
        "spatial_merge_size": 2,
    },
    # Sound and video as well, a state in its layers, positions in three directions
    "qwen3_5": {
        "text_config": {
            **TEXT,
            **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8},
            "linear_value_head_dim": 8,
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 1e4},
        },
        "vision_config": {
            **{"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4},
            **{"spatial_merge_size": 2, "temporal_patch_size": 1, "out_hidden_size": 32},
            "num_position_embeddings": 16,
        },
        **{"image_token_id": IMAGE, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93},
    },
}
TOKENS_PER_IMAGE = {"llava": 16}


def make_base(model_type: str):
    if model_type not in CONFIGS:
        return multimodal_models.make_base(model_type)
    torch.manual_seed(0)
    tokens = {} if model_type == "qwen3_5" else {"image_token_index": IMAGE}
    if model_type in ("gemma3", "llama4"):
        tokens |= {"boi_token_index": 92, "eoi_token_index": 93}
    config = AutoConfig.for_model(model_type, **copy.deepcopy(CONFIGS[model_type]), **tokens)
    model = AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def make_inputs(model_type: str, dtype=torch.float32) -> dict[str, torch.Tensor]:
    """Two rows of text around an image, or sound, each."""
    if model_type not in CONFIGS:
        return multimodal_models.make_inputs(model_type, dtype)
    generator = torch.Generator().manual_seed(1)
    count = TOKENS_PER_IMAGE.get(model_type, 4)
    text = torch.randint(1, 80, (2, 9), generator=generator)
    image = torch.tensor([[92, *[IMAGE] * count, 93]] * 2)
    ids = torch.cat([text[:, :4], image, text[:, 4:]], dim=1)
    pixels = torch.randn(2, 3, 16, 16, generator=generator, dtype=dtype)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if model_type == "mistral3":
        inputs["image_sizes"] = torch.tensor([[16, 16]] * 2)
    if model_type == "qwen3_5":
        pixels = torch.randn(2 * 16, 3 * 4 * 4, generator=generator, dtype=dtype)
        inputs |= {"image_grid_thw": torch.tensor([[1, 4, 4]] * 2), "mm_token_type_ids": (ids == IMAGE).int()}
    if model_type == "gemma3":
        inputs["token_type_ids"] = (ids == IMAGE).long()
    return {**inputs, "pixel_values": pixels}


def randomize_queries(model):
    torch.manual_seed(3)
    with torch.no_grad():
        model.trunk.depth_queries.query.normal_(std=0.3)
        model.trunk.depth_queries.key_norm.add_(torch.randn_like(model.trunk.depth_queries.key_norm) * 0.3)


def load(folder, **kwargs):
    model = AutoModelForMultimodalLM.from_pretrained(folder, **kwargs).eval()
    if kwargs.get("dtype") is torch.float64 and "num_experts" in str(model.config):
        model.set_experts_implementation("eager")  # products in groups are not there in fp64
    return model


# One with every change: of each kind of language model, with a causal language model of its own and without
FAST = ("gemma3", "qwen3_vl")
ALL = [*CONFIGS, *multimodal_models.CONFIGS]
EVERY = sorted({*MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES} - {"attnres_multimodal"})


def of_which_fast(names, fast):
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture(scope="module", params=of_which_fast(ALL, FAST))
def model_type(request):
    return request.param


@pytest.fixture(scope="module")
def converted(model_type, tmp_path_factory):
    """The folder of a base and of its conversion."""
    root = tmp_path_factory.mktemp(model_type)
    make_base(model_type).save_pretrained(root / "base")
    convert(root / "base", root / "attnres", num_blocks=3)
    return root / "base", root / "attnres"


def test_images_go_through_unchanged(model_type, converted):
    """The base and the conversion on images and text, and at random queries the definition on the base's own code."""
    base, model = (load(path, dtype=torch.float64) for path in converted)
    with all_in_fp64(), torch.no_grad():
        assert type(model).__name__ == "AttnResForConditionalGeneration"
        inputs = make_inputs(model_type, torch.float64)
        expected = base(**inputs).logits
        for name in (name for name, value in inputs.items() if value.is_floating_point()):
            moved = base(**{**inputs, name: inputs[name].flip(0)}).logits
            assert (expected - moved).abs().max() > 1e-3  # images have an effect
        assert (model(**inputs).logits - expected).abs().max() < 1e-12 * expected.abs().max()

        randomize_queries(model)
        without, (expected, weights) = expected, literal_logits(base, model, **inputs)
        outputs = model(**inputs, output_depth_attentions=True, output_hidden_states=True)
        assert (outputs.logits - without).abs().max() > 1e-2
        assert (outputs.logits - expected).abs().max() < 1e-12 * expected.abs().max()
        assert (model(**inputs).logits - expected).abs().max() < 1e-12 * expected.abs().max()
    # Layers that add twice without a read in between leave a site unread
    assert len(outputs.depth_attentions) == len(weights) <= model.config.text_config.num_sites
    assert outputs.depth_attentions[-1].shape == (*inputs["input_ids"].shape, 4)
    assert all(type(state) is torch.Tensor for state in outputs.hidden_states)


GREEDY = {
    "max_new_tokens": 6,
    "do_sample": False,
    "eos_token_id": None,
    "suppress_tokens": [*range(multimodal_models.IMAGE - 1, 97)],
}


# Their bases themselves generate other tokens without a cache
OTHER_WITHOUT_CACHE = ("mistral_large4", "qwen3_omni_moe_thinker")


def test_generation(model_type, converted):
    """With the caches of tokens and of blocks, and without either."""
    model = load(converted[1])
    randomize_queries(model)
    inputs = make_inputs(model_type)
    cached = model.generate(**inputs, **GREEDY)
    if model_type not in OTHER_WITHOUT_CACHE:
        assert torch.equal(cached, model.generate(**inputs, **GREEDY, use_cache=False))
    attnres.set_backend("reference")
    try:
        assert torch.equal(cached, model.generate(**inputs, **GREEDY))
    finally:
        attnres.set_backend("auto")
    assert cached.shape[1] == inputs["input_ids"].shape[1] + 6


def test_padding(model_type, converted):
    """Rows with padding on their left go on as they do without."""
    if model_type == "mistral_large4":
        pytest.skip("padding changes what the base itself computes, by more than its largest logit")
    model = load(converted[1], dtype=torch.float64)
    randomize_queries(model)
    inputs = make_inputs(model_type, torch.float64)
    length = inputs["input_ids"].shape[1]
    padded = {
        name: torch.nn.functional.pad(value, (3, 0)) if value.shape == (2, length) else value
        for name, value in inputs.items()
    }
    options = {**GREEDY, "return_dict_in_generate": True, "output_logits": True}
    expected, actual = (torch.stack(model.generate(**given, **options).logits) for given in (inputs, padded))
    # Masks and rotary embeddings are computed in fp32
    assert (actual - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.one_in(2)
def test_save_and_load_and_back(model_type, converted, tmp_path):
    base, folder = converted
    model = load(folder)
    randomize_queries(model)
    model.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")  # as for a base of a causal LM
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert loaded.config.to_dict() == AutoConfig.from_pretrained(tmp_path / "saved").to_dict()
    assert loaded.config.text_config.attn_res_block_size == model.config.text_config.attn_res_block_size

    with pytest.raises(ValueError, match="trained queries"):
        revert(tmp_path / "saved", tmp_path / "back")
    revert(folder, tmp_path / "back")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (base / name).read_bytes()

    report = convert(folder, tmp_path / "full", full=True)
    assert report.operation == "Change of blocks" and report.block_size == 1
    assert AutoConfig.from_pretrained(tmp_path / "full").text_config.attn_res_block_size == 1


def test_gradients_and_checkpointing(model_type, converted):
    """Of every parameter, among them those of the parts that see and hear."""
    model = load(converted[1], dtype=torch.float64).train()
    randomize_queries(model)
    inputs = make_inputs(model_type, torch.float64)

    def gradients():
        model.zero_grad()
        model(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected = gradients()
    assert expected[f"{model.trunk_name}.depth_queries.query"].any()
    outside = [name for name in expected if not name.startswith((model.trunk_name, "lm_head"))]
    assert any(expected[name].any() for name in outside)
    if not model.supports_gradient_checkpointing:  # nor does its base
        return
    model.gradient_checkpointing_enable()
    actual = gradients()
    assert actual.keys() == expected.keys()
    largest = max(gradient.abs().max() for gradient in expected.values())  # some are zero but for rounding
    for name, gradient in actual.items():
        assert (gradient - expected[name]).abs().max() <= 1e-13 * largest, name


def test_steered(model_type, converted):
    """As a decoder is: nothing changes by an edit that changes nothing, and tokens are those of forward passes."""
    model = load(converted[1])
    randomize_queries(model)
    inputs = make_inputs(model_type)
    with torch.no_grad():
        plain, same, steered = (
            model(**inputs, depth_recorder=attnres.DepthRecorder(edit_output={1: edit, 2: edit})).logits
            for edit in (lambda output: None, lambda output: output * 1, lambda output: output + 2)
        )
    torch.testing.assert_close(same, plain, rtol=0, atol=0)
    assert (steered - plain).abs().max() > 1e-3
    recorder = attnres.DepthRecorder(edit_output={1: lambda output: output + 2, 2: lambda output: output + 2})
    tokens = model.generate(**inputs, max_new_tokens=2, do_sample=False, depth_recorder=recorder)
    assert tokens[:, inputs["input_ids"].shape[1]].equal(steered[:, -1].argmax(-1))


def test_config(model_type, converted):
    base, config = (AutoConfig.from_pretrained(path) for path in converted)
    assert isinstance(config, (attnres.AttnResMultimodalConfig, type(base))) and isinstance(config, type(base))
    assert config.to_base_config().to_dict() | {"_name_or_path": None} == base.to_dict() | {"_name_or_path": None}
    for copied in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert type(copied) is type(config) and copied.to_dict() == config.to_dict()
    model_class = type(load(converted[1]))
    assert pickle.loads(pickle.dumps(model_class)) is model_class
    made = attnres.AttnResMultimodalConfig(**json.loads((converted[1] / "config.json").read_text()))
    assert made.to_dict() | {"_name_or_path": None} == config.to_dict() | {"_name_or_path": None}


@pytest.mark.slow
def test_what_is_another_base_s_default_is_written(tmp_path):
    """transformers leaves out of a file what a new config of the same class has: that of a Llama."""
    llama = AutoConfig.for_model("llama").to_dict()
    text = {name: llama[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    base = AutoConfig.for_model("gemma3", text_config=text)
    attnres.AttnResMultimodalConfig.from_base_config(base, block_size=8).save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path).text_config
    assert {name: getattr(loaded, name) for name in text} == text and loaded.attn_res_block_size == 8


def test_processor_and_pipeline(tmp_path):
    """Files that do not name their processor's class, which is then found by the type of the model."""
    words = {word: index for index, word in enumerate(["<pad>", "<unk>", *"abcdefghijklmnop"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    image_processor = CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    processor = LlavaProcessor(
        image_processor,
        tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    base = make_base("llava")
    base.config.image_token_index = tokenizer.convert_tokens_to_ids("<image>")
    base.generation_config.max_new_tokens = 4
    base.save_pretrained(tmp_path / "base")
    processor.save_pretrained(tmp_path / "base")
    for path in (tmp_path / "base").glob("*r_config.json"):
        content = json.loads(path.read_text())
        content.pop("processor_class", None)
        path.write_text(json.dumps(content))

    report = convert(tmp_path / "base", tmp_path / "attnres")
    assert any(note.startswith("processor saved again as `LlavaProcessor`") for note in report.notes)
    assert type(AutoProcessor.from_pretrained(tmp_path / "attnres")) is LlavaProcessor
    image = Image.effect_mandelbrot((20, 16), (-3, -2.5, 2, 2.5), 50).convert("RGB")
    texts = []
    for path in (tmp_path / "base", tmp_path / "attnres"):
        generate = pipeline("image-text-to-text", model=str(path), processor=AutoProcessor.from_pretrained(path))
        texts.append(generate(images=image, text="<image> a b c", max_new_tokens=4, do_sample=False))
    assert texts[0] == texts[1]
    card = (tmp_path / "attnres" / "README.md").read_text()
    assert "pipeline_tag: image-text-to-text" in card and "AutoModelForImageTextToText" in card
    assert "trust_remote_code" not in card


def test_trainer_and_adapter(tmp_path):
    """LoRA beside the queries, with PEFT's own choice of modules: those of the base's type."""
    make_base("llava").save_pretrained(tmp_path / "base")
    convert(tmp_path / "base", tmp_path / "attnres", verify=False)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "attnres")
    adapter = LoraConfig(r=4, target_modules="all-linear", modules_to_save=["depth_queries"])
    inputs = make_inputs("llava")
    rows = [{name: value[i] for name, value in inputs.items()} | {"labels": inputs["input_ids"][i]} for i in (0, 1)]
    arguments = TrainingArguments(
        tmp_path / "run", max_steps=2, learning_rate=0.01, report_to="none", save_strategy="no", use_cpu=True
    )
    trainer = Trainer(get_peft_model(model, adapter), arguments, train_dataset=rows)
    trainer.train()
    trainer.model.eval()
    assert model.trunk.depth_queries.modules_to_save.default.query.any()
    expected = trainer.model(**inputs).logits
    trainer.model.save_pretrained(tmp_path / "adapter")
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "attnres")
    loaded = PeftModel.from_pretrained(loaded, tmp_path / "adapter").eval()
    assert torch.equal(loaded(**inputs).logits, expected)
    merged = loaded.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged").eval()
    assert torch.equal(whole(**inputs).logits, merged(**inputs).logits)


def refusal(run, *args, **kwargs) -> str | None:
    try:
        run(*args, **kwargs)
    except ValueError as error:
        return str(error)
    return None


def save_dummy(config, folder):
    """A checkpoint whose names and files are those of a model with this config, and whose tensors are not."""
    config.save_pretrained(folder)
    names = ["model.weight"]
    text_config = getattr(config, "text_config", None)
    with contextlib.suppress(Exception), torch.device("meta"):
        decoder = attnres.base.config.decoder_class(type(text_config))(text_config)
        names = [f"model.language_model.{name}" for name, _ in decoder.named_parameters()]
    save_file({name: torch.zeros(1) for name in names}, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    "model_type",
    [name if name in ("qwen2_audio", "pi0") else pytest.param(name, marks=pytest.mark.slow) for name in EVERY],
)
def test_probe_and_convert_say_the_same(model_type, tmp_path):
    """Of every multimodal type of transformers; where one refuses, with the same words."""
    folder, has_weights = tmp_path / "base", True
    try:
        make_base(model_type).save_pretrained(folder)
    except Exception:  # no tiny one can be made here
        has_weights = False
        save_dummy(AutoConfig.for_model(model_type), folder)
    reason = refusal(lambda: describe_probe(read_config(str(folder))))
    of_convert = refusal(convert, folder, tmp_path / "attnres", verify=False)
    # Checkpoints of shieldgemma2 are those of a classifier around the language model
    if reason is None and (not has_weights or model_type == "shieldgemma2"):
        assert "is not a complete" in of_convert
    else:
        assert of_convert == reason


REFUSED = {
    "qwen2_5_omni": (
        {},
        "no `text_config`.*; `thinker_config` has one, .* type 'qwen2_5_omni_thinker'",
    ),
    "chameleon": ({}, "its config has no `text_config`"),
    "gemma3n": ({}, "line .* of modeling_gemma3n.py"),
    "whisper": ({}, "transformers has no multimodal language model of this type"),
}


def test_a_config_of_another_kind():
    with pytest.raises(ValueError, match="`base_model_type='llama'` is not supported: transformers has no multimodal"):
        attnres.AttnResForConditionalGeneration(attnres.AttnResConfig(base_model_type="llama"))
    with pytest.raises(ValueError, match="`base_model_type=None` is not supported"):
        attnres.AttnResMultimodalConfig()


def test_a_decoder_from_inside_has_no_head():
    """It is in a multimodal model or without a head."""
    assert attnres.AttnResModel.class_of_base("qwen2_vl_text").__name__ == "Qwen2VLTextModel"
    with pytest.raises(ValueError, match="'qwen2_vl_text'` is not supported: .* which are converted whole"):
        attnres.AttnResForCausalLM.class_of_base("qwen2_vl_text")


@pytest.mark.parametrize("model_type", REFUSED)
def test_refused(model_type):
    fields, reason = REFUSED[model_type]
    with pytest.raises(ValueError, match=reason):
        attnres.AttnResMultimodalConfig.from_base_config(AutoConfig.for_model(model_type, **fields))


def edit_config(folder, *path, value=None):
    config = json.loads((folder / "config.json").read_text())
    *parents, last = path
    part = config
    for name in parents:
        part = part[name]
    part[last] = value
    (folder / "config.json").write_text(json.dumps(config))


def without_tensor(folder, ending):
    path = folder / "model.safetensors"
    save_file({name: t for name, t in load_file(path).items() if not name.endswith(ending)}, path, {"format": "pt"})


# What is done to a base or to its conversion, and what has to be said of it
DAMAGED_BASES = {
    "no layers": (("text_config", "num_hidden_layers", 0), r"`num_hidden_layers` \(0\) must be equal to"),
    "too many layers": (("text_config", "num_hidden_layers", 10**12), "`num_hidden_layers=.* must be at most 10,000"),
    "activation": (("text_config", "hidden_activation", "nothing"), "`hidden_activation='nothing'` must be one of"),
    "epsilon": (("text_config", "rms_norm_eps", -1.0), "`rms_norm_eps=-1.0` must be a number >= 0 and below 1"),
    "wider": (("text_config", "hidden_size", 64), "tensors are missing or have another shape"),
    "wider vision": (("vision_config", "hidden_size", 32), "tensors are missing or have another shape"),
    "text_config is a word": (("text_config", "x"), "no causal language model|is not valid|is not supported"),
    "other language model": (("text_config", "model_type", "gpt2"), "is not|tensors are missing"),
    "other class": (("architectures", ["LlamaForCausalLM"]), "must be one of Gemma3ForConditionalGeneration"),
    "dtype": (("dtype", 3), "dtype"),
    "no embedding": ("embed_tokens.weight", "is not a complete gemma3 checkpoint: 2 tensors are missing"),
    "no vision norm": ("vision_tower.post_layernorm.weight", "tensors are missing"),
}
DAMAGED_CONVERSIONS = {
    "no base": (("base_model_type", None), "`base_model_type=None` is not supported"),
    "base of text": (("base_model_type", "llama"), "transformers has no multimodal language model of this type"),
    "base is ours": (("base_model_type", "attnres_multimodal"), "is not supported"),
    "base is a number": (("base_model_type", 3), "`base_model_type=3` is not supported"),
    "fewer sublayers": (("text_config", "attn_res_block_size", 0), "`attn_res_block_size=0` must be"),
    "text_config without reads": (
        ("text_config", "num_hidden_layers", 2),
        "`num_hidden_layers` .* must be equal to",
    ),
}


@pytest.mark.parametrize("kind", DAMAGED_BASES)
def test_damaged_bases(kind, tmp_path):
    damage, message = DAMAGED_BASES[kind]
    make_base("gemma3").save_pretrained(tmp_path / "base")
    if isinstance(damage, str):
        without_tensor(tmp_path / "base", damage)
    else:
        edit_config(tmp_path / "base", *damage[:-1], value=damage[-1])
    with pytest.raises(ValueError, match=message) as error:
        convert(tmp_path / "base", tmp_path / "attnres")
    assert "\n" not in str(error.value) and [path.name for path in tmp_path.iterdir()] == ["base"]


@pytest.mark.parametrize("kind", DAMAGED_CONVERSIONS)
def test_damaged_conversions(kind, tmp_path):
    damage, message = DAMAGED_CONVERSIONS[kind]
    make_base("gemma3").save_pretrained(tmp_path / "base")
    convert(tmp_path / "base", tmp_path / "attnres", verify=False)
    edit_config(tmp_path / "attnres", *damage[:-1], value=damage[-1])
    with pytest.raises(ValueError, match=message) as error:
        revert(tmp_path / "attnres", tmp_path / "back")
    assert "\n" not in str(error.value) and not (tmp_path / "back").exists()


def test_the_class_of_the_base_loses_no_queries_in_silence(converted):
    """It makes the language model of `text_config`, with reads; or it names the class of it, and says what is left."""
    base_class = type(load(converted[1])).base_class
    model, info = base_class.from_pretrained(converted[1], output_loading_info=True)
    reads = any(isinstance(module, attnres.AttnResModel) for module in model.modules())
    left = {name.rpartition(".")[2] for name in info["unexpected_keys"]} & {"query", "key_norm"}
    assert left == (set() if reads else {"query", "key_norm"})


def test_what_is_done_with_models(tmp_path, run_attnres, capsys):
    """What is for models of text alone says so, in one line."""
    make_base("gemma3").save_pretrained(tmp_path / "base")
    convert(tmp_path / "base", tmp_path / "attnres", verify=False)
    (tmp_path / "run.yaml").write_text(
        f"model: {tmp_path}/attnres\ndataset: {tmp_path}/run.yaml\noutput_dir: {tmp_path}/out\n"
    )
    for arguments, message in {
        ("finetune", str(tmp_path / "run.yaml")): "a multimodal model, whose data is more than text",
        ("inspect", str(tmp_path / "attnres"), "-o", str(tmp_path / "out")): "is a multimodal model",
        ("export", "--to", "kimi", str(tmp_path / "attnres"), str(tmp_path / "out")): "is a multimodal checkpoint",
        ("convert", "--self-contained", str(tmp_path / "base"), str(tmp_path / "out")): "cannot be self-contained",
        ("import", str(tmp_path / "attnres"), str(tmp_path / "out")): "attnres_multimodal",
    }.items():
        assert run_attnres(*arguments) == 1
        assert message in " ".join(capsys.readouterr().err.split())
        assert not (tmp_path / "out").exists()
    assert run_attnres("push", tmp_path / "attnres", "tester/model", "--dry-run") == 0
    pushed = capsys.readouterr().out
    assert "config.json" in pushed and "modeling_attnres.py" not in pushed
