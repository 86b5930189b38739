# SPDX-License-Identifier: Apache-2.0
"""Loading and saving: from a base checkpoint, in any dtype, offloaded, beside other bases, as remote code."""

import functools
import json
import subprocess
import sys

import pytest
import torch
from rounding import UpToRounding
from safetensors.torch import load_file
from tiny_models import (
    TINY,
    WITHOUT_PACKAGE,
    convert,
    mostly_slow,
    randomize_queries,
    tiny_base_config,
    tiny_base_model,
)
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

import attnres.model_cards.card
from attnres import AttnResConfig, AttnResForCausalLM


def run_python(code: str, *args: str, **env: str) -> str:
    """Run code in a fresh process and return what it prints."""
    import os

    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **env}
    command = [sys.executable, "-c", code, *map(str, args)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("family", mostly_slow(["qwen3", "gemma", "qwen3_moe", "gpt_oss", "kimi_linear"], every=5))
def test_base_checkpoint_loads_directly(family, input_ids, tmp_path):
    base_model = tiny_base_model(family)
    base_model.save_pretrained(tmp_path)
    config = AttnResConfig.from_base_config(base_model.config, block_size=3, attn_res_scale_norm_eps=True)
    with torch.no_grad():
        expected = UpToRounding(lambda: base_model(input_ids).logits, model=base_model)
        for kwargs in ({"config": config}, {}):
            model, info = AttnResForCausalLM.from_pretrained(tmp_path, output_loading_info=True, **kwargs)
            assert info["missing_keys"] == {"model.depth_queries.query", "model.depth_queries.key_norm"}
            assert not info["unexpected_keys"] and not info["mismatched_keys"]
            assert model.model.depth_queries.query.abs().max() == 0
            assert (model.model.depth_queries.key_norm == 1).all()
            expected.check(model(input_ids).logits)
        assert model.config.base_model_type == family and model.config.attn_res_block_size == 8
        assert model.config.attn_res_scale_norm_eps


def test_unsupported_base_checkpoint_is_refused(tmp_path):
    AutoModelForCausalLM.from_config(AutoConfig.for_model("bert", **TINY, is_decoder=True)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="bert.*is not supported: its BertLayer does more to the residual stream"):
        AttnResForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_queries_stay_in_fp32(dtype, input_ids, tmp_path):
    model = randomize_queries(convert(tiny_base_model("qwen3"), 3))
    exact = model.model.depth_queries.query.clone()
    model.save_pretrained(tmp_path)

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    made = AutoModelForCausalLM.from_config(model.config, dtype=dtype)
    cast = model.to(dtype)
    for other in (loaded, made, cast):
        assert other.lm_head.weight.dtype == other.dtype == dtype
        assert other.model.depth_queries.query.dtype == torch.float32
    for other in (loaded, cast):
        assert torch.equal(other.model.depth_queries.query, exact)
    loaded.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["model.depth_queries.query"].dtype == torch.float32
    assert tensors["lm_head.weight"].dtype == dtype
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == dtype
    with torch.no_grad():
        assert loaded(input_ids).logits.dtype == dtype


@pytest.mark.parametrize("queries", ["zero", "trained"])
@pytest.mark.parametrize("kind", ["cpu", "disk"])
def test_offload(kind, queries, input_ids, tmp_path):
    """On a machine without an accelerator everything may go to disk but what has to run first."""
    model = convert(tiny_base_model("qwen3"), 3)
    if queries == "trained":
        randomize_queries(model)
    model.save_pretrained(tmp_path / "model")
    device_map = {"model.embed_tokens": "cpu", "lm_head": "cpu", "model.rotary_emb": "cpu"}
    device_map |= {f"model.layers.{i}": kind if i else "cpu" for i in range(4)}
    device_map |= {"model.norm": kind, "model.depth_queries": kind, "model.final_depth_read": "cpu"}
    offloaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload"
    )
    with torch.no_grad():
        # Norms whose weight is fetched for them are called as modules, elsewhere they are part of the read
        UpToRounding(lambda: model(input_ids).logits, model=model).check(offloaded(input_ids).logits)
    assert torch.equal(
        offloaded.generate(input_ids, max_new_tokens=4, do_sample=False),
        model.generate(input_ids, max_new_tokens=4, do_sample=False),
    )


def test_meta_device_and_device_map_auto(input_ids, tmp_path):
    model = randomize_queries(convert(tiny_base_model("qwen3"), 3))
    model.save_pretrained(tmp_path)
    with torch.device("meta"):
        empty = AttnResForCausalLM(model.config)
    assert all(parameter.is_meta for parameter in empty.parameters())
    empty.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(empty.model.depth_queries.query, model.model.depth_queries.query)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="auto")
    assert torch.equal(loaded.model.depth_queries.query, model.model.depth_queries.query)


def test_fresh_models_start_with_zero_queries():
    config = AttnResConfig.from_base_config(tiny_base_config("qwen3"), block_size=3)
    for model in (AttnResForCausalLM(config), AutoModelForCausalLM.from_config(config)):
        model.init_weights()
        assert model.model.depth_queries.query.abs().max() == 0
        assert (model.model.depth_queries.key_norm == 1).all()
        assert 0.08 < model.model.layers[0].mlp.up_proj.weight.std() < 0.12


def test_another_name_of_scaling():
    """By what is done. Files have the one that they always had."""
    for config in (
        AttnResConfig(attn_res_scale_reads=True),
        AttnResConfig.from_base_config(tiny_base_config("llama"), attn_res_scale_reads=True),
    ):
        assert config.attn_res_scale_norm_eps and config.attn_res_scale_reads
        assert "attn_res_scale_reads" not in config.to_json_string()
        config.attn_res_scale_reads = False
        assert not config.attn_res_scale_norm_eps
    with pytest.raises(ValueError, match="`attn_res_scale_norm_eps=3` must be True or False"):
        AttnResConfig(attn_res_scale_reads=3)


def test_bases_do_not_touch_each_other(input_ids, tmp_path):
    """Built, loaded, run with captured outputs and saved, in any order."""
    families = ["qwen3_moe", "llama", "mixtral", "deepseek_v3", "gpt_oss"]
    base_models = {family: tiny_base_model(family, attn_implementation="eager") for family in families}
    models = {family: convert(base_models[family], 3) for family in families}
    for family in reversed(families):
        models[family].save_pretrained(tmp_path / family)
        base_models[family].save_pretrained(tmp_path / f"{family}-base")
    loaded = {family: AutoModelForCausalLM.from_pretrained(tmp_path / family) for family in families}
    for family in ["mixtral", "llama", "gpt_oss", "qwen3_moe", "deepseek_v3"]:
        # the files hold the base's own names plus two
        saved, base_saved = (
            set(load_file(tmp_path / name / "model.safetensors")) for name in (family, f"{family}-base")
        )
        assert saved - base_saved == {"model.depth_queries.query", "model.depth_queries.key_norm"}
        assert not base_saved - saved
        kwargs = {"output_attentions": True, "output_hidden_states": True, "output_router_logits": family != "llama"}
        loaded[family].set_attn_implementation("eager")

        def captured(model, kwargs=kwargs):
            outputs = model(input_ids, **kwargs)
            assert len(outputs.attentions) == 4 and len(outputs.hidden_states) == 5
            assert not kwargs["output_router_logits"] or len(outputs.router_logits) > 0
            return outputs.logits, outputs.attentions, getattr(outputs, "router_logits", None) or ()

        with torch.no_grad():
            expected = UpToRounding(functools.partial(captured, base_models[family]), model=base_models[family])
            expected.check(captured(loaded[family]))


CONCURRENT_LOADS = """
import sys, threading
import torch
from transformers import AutoModelForCausalLM
import attnres

input_ids = torch.arange(2, 26).reshape(2, 12)

@torch.no_grad()
def results(model):
    return model(input_ids).logits, model.generate(input_ids, max_new_tokens=4, do_sample=False)

def load(folder):
    for _ in range(3):
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"], info
        loaded.append((folder, model, results(model)))

loaded = []
threads = [threading.Thread(target=load, args=(folder,)) for folder in sys.argv[1:]]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
for folder, model, found in loaded:
    expected = AutoModelForCausalLM.from_pretrained(folder)
    of_expected = expected.state_dict()
    assert all(tensor.equal(of_expected[name]) for name, tensor in model.state_dict().items())
    assert all(map(torch.equal, found, results(expected)))
print(len(loaded))
"""


@pytest.mark.slow
def test_concurrent_loads(tmp_path):
    """In a process of its own: loads in threads may leave `PreTrainedModel.tie_weights` of transformers patched."""
    folders = [tmp_path / family for family in ("qwen3_moe", "mixtral", "qwen3")]
    for folder in folders:
        randomize_queries(convert(tiny_base_model(folder.name), 3)).save_pretrained(folder)
    assert run_python(CONCURRENT_LOADS, *folders).strip() == "9"


@pytest.mark.slow
def test_auxiliary_loss_is_that_of_the_base(input_ids):
    for family in ("qwen3_moe", "mixtral", "gpt_oss", "qwen3_next", "minimax_m2", "qwen2_moe", "olmoe"):
        base_model = tiny_base_model(family, router_aux_loss_coef=0.5)
        kwargs = {"labels": input_ids, "output_router_logits": True, "attention_mask": torch.ones_like(input_ids)}

        def losses(model, kwargs=kwargs):
            outputs = model(input_ids, **kwargs)
            return outputs.aux_loss, outputs.loss

        UpToRounding(functools.partial(losses, base_model), model=base_model).check(losses(convert(base_model, 3)))


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    "auto_class, labels",
    [
        (AutoModelForSequenceClassification, {"labels": torch.tensor([0, 1, 2])}),
        (AutoModelForTokenClassification, {"labels": torch.ones(3, 11, dtype=torch.long)}),
        (
            AutoModelForQuestionAnswering,
            {"start_positions": torch.tensor([0, 1, 2]), "end_positions": torch.tensor([3, 4, 5])},
        ),
        (AutoModel, {}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("family", ["qwen3", "kimi_linear"])
def test_heads(auto_class, labels, family, input_ids, tmp_path):
    config = AttnResConfig.from_base_config(tiny_base_config(family, num_labels=3), block_size=3)
    model = auto_class.from_config(config)
    assert type(model).__name__ == f"AttnRes{auto_class.__name__.removeprefix('AutoModel') or 'Model'}"
    outputs = model(input_ids, output_depth_attentions=True, **labels)
    assert [weights.shape[:2] for weights in outputs.depth_attentions] == [input_ids.shape] * config.num_sites
    as_tuple = model(input_ids, output_depth_attentions=True, return_dict=False, **labels)
    assert len(as_tuple[-1]) == config.num_sites and "depth_attentions" not in model(input_ids)
    if labels:
        outputs.loss.backward()
        assert model.model.depth_queries.query.grad.abs().max() > 0
    model.save_pretrained(tmp_path)
    loaded = auto_class.from_pretrained(tmp_path)
    with torch.no_grad():
        for a, b in zip(loaded.eval()(input_ids).to_tuple(), model.eval()(input_ids).to_tuple()):
            if isinstance(a, torch.Tensor):
                assert torch.equal(a, b)
    # the trunk of a head is a causal LM's, and the other way round
    causal_lm = AutoModelForCausalLM.from_pretrained(tmp_path)
    trunk = getattr(loaded, "model", loaded)
    assert torch.equal(causal_lm.model.layers[0].mlp.up_proj.weight, trunk.layers[0].mlp.up_proj.weight)


REMOTE_CODE = """
import torch, transformers
source, target = sys.argv[1:]
input_ids = torch.tensor([[3, 4, 5, 6, 7]])
config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=True)
for name in ("AutoModel", "AutoModelForCausalLM", "AutoModelForSequenceClassification"):
    model = getattr(transformers, name).from_pretrained(source, trust_remote_code=True).eval()
    if name == "AutoModelForCausalLM":
        with torch.no_grad():
            logits = model(input_ids).logits
        print(model.generate(input_ids, max_new_tokens=5, do_sample=False).tolist())
        model.save_pretrained(target)
again = transformers.AutoModelForCausalLM.from_pretrained(target, trust_remote_code=True).eval()
with torch.no_grad():
    assert torch.equal(again(input_ids).logits, logits)
torch.save(logits, target + "/logits.pt")
assert not any(name.split(".")[0] == "attnres" for name in sys.modules)
"""


def test_code_is_registered_after_a_model_was_saved_with_its_code(tmp_path, monkeypatch):
    """What one model was saved with is not what the next one is saved with."""
    model = convert(tiny_base_model("llama"), 3)
    model.config.auto_map = {"AutoConfig": "configuration_attnres.AttnResConfig"}
    model.save_pretrained(tmp_path / "first")
    assert model._auto_class is None and (tmp_path / "first/modeling_attnres.py").exists()
    monkeypatch.setattr(AttnResForCausalLM, "_auto_class", None)
    AttnResForCausalLM.register_for_auto_class("AutoModelForCausalLM")
    convert(tiny_base_model("llama"), 3).save_pretrained(tmp_path / "second")
    assert "auto_map" in json.loads((tmp_path / "second/config.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_remote_code(family, tmp_path, monkeypatch):
    """A process without the package loads a checkpoint that carries its code, generates and saves it again."""
    model = randomize_queries(convert(tiny_base_model(family), 3))
    monkeypatch.setattr(AttnResForCausalLM, "_auto_class", None)
    AttnResForCausalLM.register_for_auto_class("AutoModelForCausalLM")
    source, target = tmp_path / "my-model", tmp_path / "again"
    model.save_pretrained(source)
    assert set(json.loads((source / "config.json").read_text())["auto_map"]) == {
        *("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoModelForQuestionAnswering"),
        *("AutoModelForSequenceClassification", "AutoModelForTokenClassification"),
    }
    printed = run_python(WITHOUT_PACKAGE + REMOTE_CODE, source, target, HF_MODULES_CACHE=str(tmp_path / "modules"))
    input_ids = torch.tensor([[3, 4, 5, 6, 7]])
    assert printed.strip().endswith(str(model.generate(input_ids, max_new_tokens=5, do_sample=False).tolist()))
    with torch.no_grad():
        assert torch.equal(torch.load(target / "logits.pt"), model(input_ids).logits)
    # the installed package takes precedence over the code in the checkpoint
    assert isinstance(AutoModelForCausalLM.from_pretrained(target), AttnResForCausalLM)


def test_a_card_that_cannot_be_made_is_told(monkeypatch):
    """Only that the package is missing is passed over: this is of what a card is made with."""

    def fail(*args, **kwargs):
        raise ImportError("jinja2 is required to render a card")

    monkeypatch.setattr(attnres.model_cards.card, "push_card_if_missing", fail)
    with pytest.raises(ImportError, match="jinja2 is required"):
        convert(tiny_base_model("llama"), 3).push_to_hub("somebody/model")


@pytest.mark.slow
def test_two_copies_of_the_code_in_one_process(tmp_path, monkeypatch):
    """A checkpoint that carries its code brings a second copy: conversions of checkpoints are asked for by both."""
    model = randomize_queries(convert(tiny_base_model("qwen3_moe"), 3))
    model.save_pretrained(tmp_path / "plain")
    monkeypatch.setattr(AttnResForCausalLM, "_auto_class", None)
    AttnResForCausalLM.register_for_auto_class("AutoModelForCausalLM")
    convert(tiny_base_model("llama"), 3).save_pretrained(tmp_path / "with-code")
    printed = run_python(
        """
import sys
import torch
from transformers.dynamic_module_utils import get_class_from_dynamic_module
import attnres

plain, with_code, again = sys.argv[1:]
first = attnres.AttnResForCausalLM.from_pretrained(plain).state_dict()
assert first["model.layers.0.mlp.experts.gate_up_proj"].abs().max() > 0
other_class = get_class_from_dynamic_module("modeling_attnres.AttnResForCausalLM", with_code)
assert other_class is not attnres.AttnResForCausalLM
other_class.from_pretrained(with_code)
model = attnres.AttnResForCausalLM.from_pretrained(plain)
state = model.state_dict()
assert all(torch.equal(tensor, state[name]) for name, tensor in first.items())
model.save_pretrained(again)
print("done")
""",
        *(tmp_path / name for name in ("plain", "with-code", "again")),
        HF_MODULES_CACHE=str(tmp_path / "modules"),
    )
    assert printed.strip().endswith("done")
    written, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("again", "plain"))
    assert written.keys() == expected.keys() and any(".experts.0." in name for name in written)


def test_import_is_light():
    printed = run_python(
        "import sys, attnres; print(sorted({'torch', 'transformers', 'typer', 'peft', 'datasets'} & set(sys.modules)))"
    )
    assert printed.strip() == "[]"


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    mostly_slow(
        [
            "import attnres; from transformers import AutoConfig, AutoModelForCausalLM",
            "from transformers import AutoConfig, AutoModelForCausalLM; import attnres",
            "from transformers import AutoConfig; import attnres; from transformers import AutoModelForCausalLM",
            "import attnres.modeling_attnres; from transformers import AutoConfig, AutoModelForCausalLM",
        ],
        every=4,
    ),
)
def test_registered_in_any_order_of_imports(code, tmp_path):
    convert(tiny_base_model("llama"), 3).save_pretrained(tmp_path)
    code += "; import sys; print(type(AutoConfig.from_pretrained(sys.argv[1])).__name__)"
    code += "; print(type(AutoModelForCausalLM.from_pretrained(sys.argv[1])).__name__)"
    assert run_python(code, tmp_path).split() == ["AttnResConfig", "AttnResForCausalLM"]
