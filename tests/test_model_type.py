# SPDX-License-Identifier: Apache-2.0
"""What libraries look up by the type of a model is what they have for its base; `docs/model_type.md` lists it."""

import ast
import copy
import importlib
import re
import sys
import threading
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from decoder_configs import decoder_config
from family_survey import converted, native_model
from peft import AdaptionPromptConfig, LoraConfig, PrefixTuningConfig, get_peft_model
from tiny_models import convert, tiny_base_model
from transformers import AutoModelForCausalLM, LlavaConfig, conversion_mapping, fusion_mapping, monkey_patching
from transformers.core_model_loading import WeightRenaming

from attnres import AttnResMultimodalConfig
from attnres.base.library_lookups import LOOKUPS, OTHER_LOOKUPS, typed_as_base
from attnres.data.text import train_tokenizer


ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/model_type.md").read_text(encoding="utf-8")
LIBRARIES = ("accelerate", "lm_eval", "peft", "transformers", "trl")
INPUT_IDS = torch.tensor([[3, 4, 5, 6, 7, 8], [9, 3, 4, 8, 3, 5]])


def is_use(node: ast.AST) -> bool:
    """Whether the type of a config is read here, in any of the spellings that occur."""
    if isinstance(node, ast.Attribute):
        return node.attr == "model_type" and isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Constant) and node.slice.value == "model_type"
    if isinstance(node, ast.Compare):
        return isinstance(node.left, ast.Constant) and node.left.value == "model_type"
    name = getattr(node.func, "id", getattr(node.func, "attr", "")) if isinstance(node, ast.Call) else ""
    is_lookup = name in ("getattr", "hasattr", "get", "pop")
    return is_lookup and any(isinstance(arg, ast.Constant) and arg.value == "model_type" for arg in node.args)


def functions_with_uses(tree: ast.AST, scope: tuple[str, ...] = ()) -> set[str]:
    """Names of the functions in a file, such as `PeftModel.get_prompt`."""
    if isinstance(tree, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        scope = (*scope, tree.name)
    found = {".".join(scope) or "module"} if is_use(tree) else set()
    return found.union(*(functions_with_uses(child, scope) for child in ast.iter_child_nodes(tree)))


def installed_uses(library: str) -> set[tuple[str, str]]:
    """Files and functions. Of transformers' models only the Auto classes and the modeling files can see another's."""
    folder = Path(find_spec(library).submodule_search_locations[0])
    found = set()
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder).parts
        if library == "transformers" and parts[0] == "models" and parts[1] != "auto" and "modeling_" not in path.name:
            continue
        source = path.read_text(encoding="utf-8")
        if "model_type" in source:
            name = "/".join((library, *parts))
            found |= {(name, function) for function in functions_with_uses(ast.parse(source))}
    return found


def rows_of_page() -> dict[tuple[str, str], str]:
    """By file and function, how the page says that it answers."""
    rows = re.findall(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|[^|]*\|[^|]*\| ([^|]*?) \|", PAGE, re.MULTILINE)
    return {(file, function): answer for file, function, answer in rows}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("library", LIBRARIES)
def test_every_use_is_on_the_page(library):
    version = re.search(rf"\({library.replace('_', '-')} ([\d.]+)\)", PAGE)[1]
    if metadata.version(library.replace("_", "-")) != version:
        pytest.skip(f"the page is for {library} {version}")
    listed = {use for use in rows_of_page() if use[0].startswith(f"{library}/")}
    assert installed_uses(library) == listed


def test_what_is_on_the_page_is_done():
    """Each function that is given the base's type is marked as such, is there, and tests that are named exist."""
    rows = rows_of_page()
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert named and all(f"def {name}(" in tests for name in named)
    given = {
        (f"{module.replace('.', '/')}.py", name)
        for lookups in (LOOKUPS, OTHER_LOOKUPS)
        for module in lookups
        for name in lookups[module]
    }
    for file, name in given:
        module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
        function = module
        for part in name.split("."):
            function = getattr(function, part)
        assert function.__wrapped__
    assert {use for use, answer in rows.items() if answer == "base"} == given & rows.keys()
    through_others = set(re.findall(r"through `([\w.]+)`", PAGE))
    of_adapters = {"PeftModel.load_adapter", "IA3Model.add_weighted_adapter", "LoraModel.add_weighted_adapter"}
    assert {name for _, name in given - rows.keys()} <= through_others | of_adapters


@pytest.mark.parametrize(
    "source, found",
    [
        ("def f(model):\n    return model.config.model_type", {"f"}),
        ("class A:\n    def f(self):\n        return getattr(self.config, 'model_type', None)", {"A.f"}),
        ("x = {'a': config_dict['model_type']}", {"module"}),
        ("def f(c):\n    if 'model_type' in c:\n        return c.get('model_type')", {"f"}),
        ("class A:\n    model_type = 'llama'\n    def f(self, model_type=None):\n        self.x = model_type", set()),
    ],
)
def test_that_the_test_sees_uses(source, found):
    assert functions_with_uses(ast.parse(source)) == found


def both(model_type: str, **fields):
    """A base and its conversion."""
    base = native_model(decoder_config(model_type, **fields))
    return base, converted(base, 3)


def adapted(model, config):
    """With adapter weights that do something, the same for every model; or how PEFT refuses."""
    torch.manual_seed(0)
    try:
        model = get_peft_model(model, config).eval()
    except ValueError as error:
        return str(error)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3)
        return model(INPUT_IDS).logits


# At an fp32 rounding of 1.2e-7 and logits of up to 5, some 100 roundings; an adapter that does nothing differs by 0.1
CLOSE = {"rtol": 0, "atol": 5e-5}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("model_type", ["gemma4_text", "gemma2", "bloom", "gpt_bigcode", "gemma3_text", "llama"])
def test_prefixes(model_type):
    """They go into the cache, in the layout that PEFT has for the base."""
    base, model = both(model_type)
    logits = [adapted(m, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)) for m in (base, model)]
    torch.testing.assert_close(*logits, **CLOSE)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("model_type", ["llama", "mistral", "gpt2", "qwen3"])
def test_adaption_prompt(model_type):
    base, model = both(model_type)
    config = {"task_type": "CAUSAL_LM", "adapter_len": 2, "adapter_layers": 2}
    expected, actual = (adapted(m, AdaptionPromptConfig(**config)) for m in (base, model))
    if isinstance(expected, str):  # which names the type
        assert actual == expected and f"'{model_type}'" in expected
    else:
        torch.testing.assert_close(actual, expected, **CLOSE)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("model_type", ["mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h"])
def test_modules_that_lora_cannot_adapt(model_type):
    """Whose weights the kernels of a Mamba take by themselves, so that an adapter would do nothing."""
    expected, actual = (
        adapted(m, LoraConfig(task_type="CAUSAL_LM", target_modules=["in_proj", "out_proj"])) for m in both(model_type)
    )
    assert "'out_proj' is incompatible with Mamba-based models" in expected and actual == expected


def test_the_loss_of_trl_scales_logits():
    """HyperCLOVA X multiplies by what Granite divides by."""
    from trl.trainer.utils import add_fused_lm_head

    log_probs = []
    for model in both("hyperclovax", logits_scaling=3.0):
        expected = model(INPUT_IDS).logits[:, :-1].log_softmax(-1).gather(-1, INPUT_IDS[:, 1:, None])[..., 0]
        add_fused_lm_head(model)
        log_probs.append(model(input_ids=INPUT_IDS, labels=INPUT_IDS, fused_lm_head=True).log_probs)
        torch.testing.assert_close(log_probs[-1].reshape(-1)[-5:], expected.reshape(-1)[-5:], **CLOSE)
    torch.testing.assert_close(*log_probs, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("is_teacher", [False, True])
def test_the_loss_of_distillation(is_teacher, tmp_path):
    """With an AttnRes model as student or as teacher: that of its base."""
    from datasets import Dataset
    from trl import DistillationConfig, DistillationTrainer

    tokenizer = train_tokenizer(["a b c d e"] * 20, vocab_size=280)
    special = {"vocab_size": len(tokenizer), "logits_scaling": 3.0, "pad_token_id": tokenizer.pad_token_id}
    base, model = both("hyperclovax", eos_token_id=tokenizer.eos_token_id, **special)
    other = native_model(decoder_config("hyperclovax", **special), seed=1)
    rows = Dataset.from_dict({"prompt": ["a b"] * 8})
    losses = []
    for one in (base, model):
        student, teacher = (other, one) if is_teacher else (one, other)
        arguments = DistillationConfig(
            output_dir=str(tmp_path),
            max_steps=1,
            max_completion_length=6,
            top_k=1,
            logging_steps=1,
            report_to=[],
            bf16=False,
        )
        trainer = DistillationTrainer(
            copy.deepcopy(student),
            copy.deepcopy(teacher),
            args=arguments,
            train_dataset=rows,
            processing_class=tokenizer,
        )
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[0] > 0


def test_what_is_not_compiled():
    base, model = both("llama4_text")
    assert base.get_compiled_call(None) == base.__call__
    assert model.get_compiled_call(None) == model.__call__


def test_answers_of_a_server_are_parsed():
    from transformers.cli.serving.utils import get_response_template

    expected, actual = (get_response_template(SimpleNamespace(), model) for model in both("qwen3"))
    assert "tool_calls" in expected["fields"] and actual == expected


@pytest.mark.one_in(4)
@pytest.mark.parametrize("model_type", ["qwen3_moe", "llama", "gpt_oss", "gemma3_text"])
def test_names_in_gguf_files(model_type):
    from transformers.modeling_gguf_pytorch_utils import TensorProcessor, get_gguf_hf_weights_map

    expected, actual = (get_gguf_hf_weights_map(model, TensorProcessor()) for model in both(model_type))
    assert expected and actual == expected


def test_activations_that_awq_scales(monkeypatch):
    from transformers.quantizers.quantizer_awq import AwqQuantizer

    class ScaledActivation(torch.nn.Module):
        def __init__(self, module, scales):
            super().__init__()

    parts = "gptqmodel.quantization.awq.modules.act".split(".")
    for count in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:count]), ModuleType(parts[count - 1]))
    sys.modules[".".join(parts)].ScaledActivation = ScaledActivation
    monkeypatch.setattr("transformers.integrations.replace_with_awq_linear", lambda model, **kwargs: model)
    quantizer = object.__new__(AwqQuantizer)
    quantizer.quantization_config = SimpleNamespace(modules_to_not_convert=None)
    scaled = []
    for model in both("starcoder2"):
        quantizer._process_model_before_weight_loading(model)
        scaled.append([name for name, module in model.named_modules() if isinstance(module, ScaledActivation)])
    assert scaled[0] and scaled[1] == scaled[0]


class DownOfItsOwn(fusion_mapping.ModuleFusionSpec):
    """A fusion that renames a weight, which transformers registers for the type as it does with its own."""

    target_modules_patterns = (r"\.mlp$",)

    def is_fusable(self, module):
        return hasattr(module, "down_proj")

    def make_fused_class(self, original_cls):
        class Fused(original_cls):
            def __init__(self, *args):
                super().__init__(*args)
                self.down = self.down_proj
                del self.down_proj

            def forward(self, x):
                return self.down(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

        return Fused

    def make_transforms(self, config):
        return [WeightRenaming(r"mlp\.down_proj\.weight", r"mlp.down.weight")]


def test_fused_modules_are_those_of_the_base(monkeypatch, tmp_path):
    """And models on other bases stay as they are, whichever model was loaded before."""
    monkeypatch.setitem(fusion_mapping._FUSION_REGISTRY, "down", DownOfItsOwn())
    conversion_mapping.get_checkpoint_conversion_mapping("llama")
    registered = dict(conversion_mapping._checkpoint_conversion_mapping_cache)
    monkeypatch.setattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", registered)
    models = {family: convert(tiny_base_model(family), 3) for family in ("mixtral", "llama")}
    for family, model in models.items():
        model.save_pretrained(tmp_path / family)
    AutoModelForCausalLM.from_pretrained(tmp_path / "llama")
    try:
        fused = AutoModelForCausalLM.from_pretrained(tmp_path / "llama", fusion_config={"down": True})
        others = AutoModelForCausalLM.from_pretrained(tmp_path / "mixtral")
    finally:
        monkey_patching.clear_patch_mapping()
    assert type(fused.model.layers[0].mlp).__name__ == "Fused"
    with torch.no_grad():
        assert torch.equal(fused(INPUT_IDS).logits, models["llama"](INPUT_IDS).logits)
        assert torch.equal(others(INPUT_IDS).logits, models["mixtral"](INPUT_IDS).logits)


def test_images_of_lm_eval():
    """LLaVA's processor wants them in one list."""
    from lm_eval.models.hf_vlms import HFMultimodalLM

    base = LlavaConfig(text_config=tiny_base_model("llama").config)
    given = []

    def processor(images, **kwargs):
        given.append(images)
        return SimpleNamespace(to=lambda *args: None)

    for config in (base, AttnResMultimodalConfig.from_base_config(base, block_size=3)):
        lm = object.__new__(HFMultimodalLM)
        lm.__dict__.update(chat_applied=True, tokenizer=SimpleNamespace(padding_side="left"), max_images=2, rgb=False)
        lm.__dict__.update(_config=config, processor=processor, _model=torch.nn.Linear(1, 1), _device="cpu")
        lm._model.dtype = torch.float32
        lm.tok_batch_multimodal_encode(["a", "b"], [["first"], ["second"]])
    assert given == [["first", "second"]] * 2


def test_the_type_is_the_bases_for_the_while_only(tmp_path):
    """Also with threads and errors; files that are written meanwhile have the type of the model."""
    config = convert(tiny_base_model("llama"), 3).config
    with pytest.raises(KeyError), typed_as_base(config, None, config):
        with typed_as_base(config):
            assert config.model_type == "llama"
        assert config.model_type == "llama" and config.to_dict()["model_type"] == "attnres"
        assert config.to_base_config().model_type == "llama"
        config.save_pretrained(tmp_path)
        raise KeyError
    assert config.model_type == "attnres" and '"model_type": "attnres"' in (tmp_path / "config.json").read_text()

    seen = set()

    def use():
        for _ in range(200):
            with typed_as_base(config):
                seen.add(config.model_type)

    threads = [threading.Thread(target=use) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert seen == {"llama"} and config.model_type == "attnres" and "model_type" not in vars(config)
