# SPDX-License-Identifier: Apache-2.0
"""Decoders of transformers as bases, each against itself and against a literal definition below its native code.

Which there are, and their configs, is in `decoder_configs.py`; what is measured is in `family_survey.py`.
"""

import json
from pathlib import Path

import pytest
import torch
import transformers
from decoder_configs import DECODERS, NOT_DECODERS, decoder_config
from families_page import ERRORS, FLAGS, record
from family_survey import Survey, survey
from huggingface_hub.errors import StrictDataclassError
from packaging import version
from tiny_models import FAMILIES, mostly_slow
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from attnres import AttnResConfig
from attnres.base import probe as depth_probe
from attnres.conversion import convert
from attnres.data.text import read_sample, train_tokenizer
from attnres.inspection import inspect
from attnres.training import finetune


# Of different kinds: what they add at once, norms behind sublayers, positions, names of things, caches, states
SPREAD = ("gpt_neox", "cohere2", "gemma3_text", "olmo2", "gpt2", "bloom", "opt", "phi", "mamba", "jamba", "glm4_moe")
# By their states, or because their code makes masks without the positions
SEE_OTHER_DOCUMENTS = ("bloom", "opt", "mamba", "jamba")
# Sums in fp64, in other orders: layers deep, and some of them long
ROUNDING = 1e-12


# Whose config class has no defaults of which transformers itself could make a model, or that it could run
NO_DEFAULTS = {
    *("cohere_compass_text", "dbrx", "deepseek_v2", "dots1", "hunyuan_v1_dense", "hunyuan_v1_moe", "lfm2_moe"),
    *("ministral", "nemotron"),
}
RECORDED = json.loads((Path(__file__).parents[1] / "base/families.json").read_text())["supported"]
SUPPORTED = {name: found for name, found in RECORDED.items() if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}

# In the record, which is of the newest version, and not so before
SINCE_5_24 = {"codegen": ("tp", "engines"), "falcon": ("packing",), "gptj": ("tp", "engines")}
BEFORE_5_24 = version.parse(transformers.__version__) < version.parse("5.24")


def test_every_type_is_known():
    """To the survey and to the page that is made of it, for a newer transformers as well."""
    assert {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} <= {*DECODERS, *NOT_DECODERS}
    page = (Path(__file__).parents[1] / "docs/families.md").read_text()
    assert [name for name in (*DECODERS, *NOT_DECODERS) if f"\n| {name} " not in page] == []


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted({*SUPPORTED} - NO_DEFAULTS))
def test_every_tensor_of_the_real_size(model_type, monkeypatch):
    """With the defaults of the config class, which are a released model's: names, shapes, ties and renamings.

    On the meta device: no weights.
    """
    base_config = AutoConfig.for_model(model_type)
    additions = SUPPORTED[model_type]["additions"]
    if len(additions) == 1 and base_config.num_hidden_layers > 16:  # all layers alike, and a probe of many takes long
        monkeypatch.setattr(depth_probe, "probe_sublayers", lambda config: additions * config.num_hidden_layers)
    config = AttnResConfig.from_base_config(base_config, num_blocks=4, attn_res_scale_norm_eps=True)
    with torch.device("meta"):
        base, model = (AutoModelForCausalLM.from_config(c) for c in (base_config, config))
    expected = {name: tensor.shape for name, tensor in base.state_dict().items()}
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    added = {name.rpartition(".depth_queries.")[2]: shapes.pop(name) for name in {*shapes} - {*expected}}
    assert shapes == expected
    assert added == dict.fromkeys(("query", "key_norm"), (config.num_sites, config.hidden_size))
    assert model.all_tied_weights_keys == base.all_tied_weights_keys
    conversions, of_base = (map(repr, get_model_conversion_mapping(m)) for m in (model, base))
    assert list(conversions) == list(of_base)
    back, fields = config.to_base_config().to_dict(), base_config.to_dict()
    # Moshi's config fills this in when it is made
    changed = {name for name in {*back, *fields} - {"audio_vocab_size"} if back.get(name) != fields.get(name)}
    assert not changed


@pytest.mark.slow
@pytest.mark.parametrize("model_type", SPREAD)
def test_decoder(model_type):
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        pytest.skip("not in this version of transformers")
    found = survey(model_type)
    assert "error" not in found and "refused" not in found, found
    problems = {name: value for name, value in found.items() if isinstance(value, dict) and "error" in value}
    assert not problems
    assert found["flags"]["dtype"] == "torch.float64"
    for name in ("zero_queries", "random_queries", "training_mode", "depth_attentions"):
        assert found[name] < ROUNDING, (name, found[name])
    assert found["moved"] > 1e-2, "the queries do nothing"
    assert found["generation"]["to_base"] < ROUNDING
    assert found["generation"]["attnres"] < max(ROUNDING, 4 * found["generation"]["base"])
    # Up to rounding: where weights lie in memory decides how a product is summed up on some CPUs
    assert found["save_and_load"].keys() == {"difference"} and found["save_and_load"]["difference"] < ROUNDING
    if isinstance(found["compile"]["base"], float):
        assert found["compile"]["attnres"] < ROUNDING
    # The first site has one source. Cohere adds two branches one after the other, and reads nothing in between
    unused = [0, 1, 3, 5, 7] if model_type == "cohere2" else [0]
    assert found["gradients"] == {"lost": [], "queries_without": unused}
    assert all(found["checkpointing"][name] < ROUNDING for name in ("not reentrant", "reentrant"))
    assert found["padding"]["attnres"] < max(ROUNDING, 4 * found["padding"]["base"])
    is_kept_apart = found["packing"]["difference"] < ROUNDING
    assert (found["packing"]["reason"] is None) == is_kept_apart == (model_type not in SEE_OTHER_DOCUMENTS)
    per_layer = {"gpt_neox": 1, "phi": 1, "mamba": 1}.get(model_type, 2)
    assert found["sublayers"] == [per_layer] * 4
    of_conversion = {"equal": True, "sublayers": 4 * per_layer, "same_weights": True, "changed_fields": []}
    assert found["conversion"] == of_conversion


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted({*SUPPORTED} - {*SPREAD, *FAMILIES}))
def test_every_decoder(model_type):
    """What is measured now is what the page says, and rounding is no more than rounding."""
    found = survey(model_type, leave_out=["compile", "conversion"])  # which take most of the time
    assert "error" not in found and "refused" not in found, found
    actual, recorded = record({model_type: found})["supported"][model_type], SUPPORTED[model_type]
    changed = SINCE_5_24.get(model_type, ()) if BEFORE_5_24 else ()
    for name in {"additions", "saved", "kv_cache", "packing", "fp64", *FLAGS} - {*changed}:
        assert actual[name] == recorded[name], name
    rounding = ROUNDING if actual["fp64"] else 1e-4  # of a tiny model with large weights
    assert all(actual[name] is None or actual[name] < rounding for name in ERRORS)
    assert found["moved"] > 1e-2 and found["gradients"]["lost"] == []
    if actual["kv_cache"] not in (None, "xLSTMCache"):  # these are no `Cache` of transformers
        assert found["block_caches"] == 1
    for of_model, of_base in (actual["cached"], actual["padded"]):  # where those of the base are the same
        assert of_model is None or of_base > rounding or of_model < rounding


# A property of its config is asked for in the forward pass; it scales the stream, and reads without the block cache
@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["bamba", "beam"])
def test_compile(model_type):
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        pytest.skip("not in this version of transformers")
    found = Survey(model_type).measure_compile()
    assert found["base"] < 1e-5 and found["attnres"] < 1e-5, found


def test_layer_types_that_only_the_base_knows():
    config = decoder_config("nemotron_h")
    assert "mlp" in config.layer_types
    assert AttnResConfig.from_base_config(config).to_base_config().layer_types == config.layer_types
    with pytest.raises(StrictDataclassError, match="contains invalid types: {'nothing'}"):
        AttnResConfig(base_model_type="nemotron_h", layers_block_type=["nothing"])


# The layers of the first flatten the tokens, those of the second have one sublayer
@pytest.mark.slow
@pytest.mark.parametrize("model_type", mostly_slow(["opt", "mamba"], every=2))
def test_what_is_done_with_models(model_type, tmp_path):
    """Converted, fine-tuned and inspected, with figures of every token."""
    tokenizer = train_tokenizer([read_sample()] * 3, vocab_size=400)
    config = decoder_config(model_type, vocab_size=len(tokenizer))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    convert(tmp_path / "base", tmp_path / "attnres", block_size=3)
    texts = 3 * read_sample().split("\n\n")
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    fields = {"dataset": str(tmp_path / "text.jsonl"), "output_dir": str(tmp_path / "out"), "mode": "full"}
    fields |= {"max_length": 32, "max_steps": 1, "query_learning_rate": 1e-3, "use_cpu": True, "report_to": "none"}
    result = finetune({"model": str(tmp_path / "attnres"), **fields})
    assert result.losses[-1] < result.losses[0] and result.history[0]["depth_entropy"] == pytest.approx(1)
    (model,) = inspect([str(result.folder)], tmp_path / "page", max_tokens=100, gradients=True, ablation=True)[
        "models"
    ]
    num_sites = sum(AttnResConfig.from_pretrained(result.folder).sublayers_per_layer()) + 1
    assert len(model["sites"]) == num_sites and model["num_tokens"] == 100
    weights = [site["weights"] for site in model["sites"]]
    assert all(sum(of_site) == pytest.approx(1) for of_site in weights)
