# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""What other libraries look up by `config.model_type`: of an AttnRes model they find what they have for its base.

All AttnRes models share a type, "attnres", and libraries have tables of types: which modules LoRA adapts, how experts
are merged, how tool calls are parsed. `docs/model_type.md` lists every use. The functions named here are wrapped as
soon as their module is imported, and given the type of the base while they run.
"""

import contextlib
import functools
import importlib.abc
import importlib.util
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from .weighted_adapters import with_queries


MODEL_TYPES = ("attnres", "attnres_multimodal")
# By module, the functions and methods that look up the `model_type` of a model among their arguments, or of `self`
LOOKUPS = {
    "peft.peft_model": ("PeftModel.get_prompt",),
    "peft.tuners.adaption_prompt.model": ("AdaptionPromptModel.add_adapter",),
    "peft.tuners.tuners_utils": ("_check_lora_target_modules_mamba",),
    "peft.utils.transformers_weight_conversion": ("convert_peft_config_for_transformers",),
    "lm_eval.models.hf_vlms": ("HFMultimodalLM.tok_batch_multimodal_encode",),
    "transformers.cli.serving.utils": ("get_response_template",),
    "transformers.modeling_gguf_pytorch_utils": ("get_gguf_hf_weights_map",),
    "transformers.quantizers.quantizer_awq": ("AwqQuantizer._process_model_before_weight_loading",),
    "trl.experimental.async_distillation.async_distillation_trainer": ("AsyncDistillationTrainer._compute_loss",),
    "trl.trainer.distillation_trainer": ("DistillationTrainer._compute_loss",),
    "trl.trainer.utils": ("add_fused_lm_head",),
}
_LOCK = threading.RLock()


class _OnImport(importlib.abc.MetaPathFinder):
    """Calls back when a module is imported, right after its code has run."""

    def __init__(self, callbacks: dict[str, Callable[[ModuleType], None]]):
        self.callbacks = callbacks

    def find_spec(self, name, path=None, target=None):
        if name not in self.callbacks:
            return None
        callback = self.callbacks.pop(name)
        spec = importlib.util.find_spec(name)
        if spec is None:
            return None
        exec_module = spec.loader.exec_module

        def exec_and_call(module):
            exec_module(module)
            callback(module)

        spec.loader.exec_module = exec_and_call
        return spec


def after_import(callbacks: dict[str, Callable[[ModuleType], None]]):
    """Call each function with the module of this name: now if it is imported already, or else as soon as it is."""
    callbacks = dict(callbacks)
    for name in list(callbacks):
        if name in sys.modules:
            callbacks.pop(name)(sys.modules[name])
    if callbacks:
        sys.meta_path.insert(0, _OnImport(callbacks))


def is_attnres(config: Any) -> bool:
    """Whether it is a config of ours: others may have taken the name of the type."""
    is_named = getattr(type(config), "model_type", None) in MODEL_TYPES
    return is_named and isinstance(getattr(config, "base_model_type", None), str)


def is_depth_query(name: str) -> bool:
    """Whether a parameter of this name, in a model or an adapter, is one of the depth queries or their key norms."""
    return ".depth_queries." in f".{name}"


@contextlib.contextmanager
def typed_as_base(*configs) -> Iterator[None]:
    """`config.model_type` is the base's meanwhile, and that of its `text_config`. Files keep the type of the class."""
    nested = [getattr(config, "text_config", None) for config in configs]
    ours = {id(config): config for config in (*configs, *nested) if is_attnres(config)}
    with _LOCK:  # or two threads would restore what the other has set
        before = {key: vars(config).get("model_type") for key, config in ours.items()}
        for config in ours.values():
            vars(config)["model_type"] = config.base_model_type  # not with `setattr`: it is a variable of the class
        try:
            yield
        finally:
            for key, config in ours.items():
                del vars(config)["model_type"]
                if before[key] is not None:
                    vars(config)["model_type"] = before[key]


def _for_base(function: Callable) -> Callable:
    @functools.wraps(function)
    def of_base(*args, **kwargs):
        given = [*args, *kwargs.values()]
        given += [model for value in given if (model := getattr(value, "teacher_model", None)) is not None]
        configs = [config for value in given if is_attnres(config := getattr(value, "config", None))]
        if not configs:
            return function(*args, **kwargs)
        with typed_as_base(*configs):
            return function(*args, **kwargs)

    return of_base


def _model_config(get_model_config: staticmethod) -> staticmethod:
    """What `to_dict` gives has the type of the class. PEFT looks up in it which modules it adapts by default."""
    of_class = get_model_config.__func__

    @functools.wraps(of_class)
    def of_base(model):
        config = of_class(model)
        if isinstance(config, dict) and config.get("model_type") in MODEL_TYPES and "base_model_type" in config:
            config = {**config, "model_type": config["base_model_type"]}
        return config

    return staticmethod(of_base)


def _convert_tensors(convert: Callable) -> Callable:
    """PEFT asks first whether the type has a conversion of its checkpoints, which depends on the base."""

    @functools.wraps(convert)
    def of_base(model, *args, **kwargs):
        if is_attnres(getattr(model, "config", None)):
            model.is_custom_code()  # which `BaseConversions` listens to
        return convert(model, *args, **kwargs)

    return of_base


def _load_adapter(load_adapter: Callable) -> Callable:
    """PEFT says nothing of tensors for which the model has no place. With ours, here or on a base, it does."""

    @functools.wraps(load_adapter)
    def load_and_warn(self, model_id, adapter_name, *args, **kwargs):
        result = load_adapter(self, model_id, adapter_name, *args, **kwargs)
        left_out = sorted(result.unexpected_keys)
        is_ours = is_attnres(getattr(self, "config", None))
        if not is_ours:
            left_out = [name for name in left_out if is_depth_query(name)]
        elif self.peft_config[adapter_name].is_prompt_learning:
            left_out = []  # what belongs to no module is loaded in another way
        if left_out:
            reason = "it has no such modules" if is_ours else "it does not read over depth"
            warnings.warn(
                f"Tensors of the adapter `{model_id}` are left out, as this model has no place for them ({reason}):"
                f" {', '.join(left_out)}",
                stacklevel=2,
            )
        return result

    return load_and_warn


def _register_for_class(register: Callable) -> Callable:
    """Fused modules and their tensors are registered for the type of a class, before a model is made of it."""

    @functools.wraps(register)
    def of_base(cls, config, *args, **kwargs):
        if is_attnres(config):
            import torch
            from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

            cls, config = cls.class_of_base(config.base_model_type), config.to_base_config()
            if cls.forward is torch.nn.Module.forward:  # the heads that are ours stand where the base's own does
                cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        return register(cls, config, *args, **kwargs)

    return of_base


# What is looked up in other ways: by module and name, what takes the place of a function. `add_weighted_adapter` looks
# up nothing; it leaves out depth queries
OTHER_LOOKUPS: dict[str, dict[str, Callable]] = {
    "peft.peft_model": {"PeftModel.load_adapter": _load_adapter},
    "peft.tuners.ia3.model": {"IA3Model.add_weighted_adapter": with_queries},
    "peft.tuners.lora.model": {"LoraModel.add_weighted_adapter": with_queries},
    "peft.tuners.tuners_utils": {"BaseTuner.get_model_config": _model_config},
    "peft.utils.transformers_weight_conversion": {
        "convert_peft_adapter_state_dict_for_transformers": _convert_tensors,
    },
    "transformers.fusion_mapping": {"register_fusion_patches": _register_for_class},
    "transformers.integrations.hub_kernels": {"register_kernel_replacements_and_fusions": _register_for_class},
}


def _replace(module: ModuleType, name: str, wrap: Callable):
    """Replace a function of a module, also where its library has imported it by name, or a method of a class in it.

    A version of the library that does not have it stays as it is.
    """
    class_name, _, function_name = name.rpartition(".")
    owner = vars(module).get(class_name) if class_name else module
    found = None if owner is None else vars(owner).get(function_name)
    if found is None:
        return
    replacement = wrap(found)
    setattr(owner, function_name, replacement)
    library = module.__name__.partition(".")[0]
    for other_name, other in list(sys.modules.items()) if owner is module else ():
        if other_name.partition(".")[0] == library and vars(other).get(function_name) is found:
            setattr(other, function_name, replacement)


def _register(module: ModuleType):
    # Once in a process: checkpoints may bring copies of this code
    if hasattr(module, "_attnres_is_registered"):
        return
    module._attnres_is_registered = True  # type: ignore[attr-defined]
    lookups = dict.fromkeys(LOOKUPS.get(module.__name__, ()), _for_base)
    for name, wrap in {**lookups, **OTHER_LOOKUPS.get(module.__name__, {})}.items():
        _replace(module, name, wrap)


def register_lookups():
    """See to it that the functions above find what their libraries have for the base of an AttnRes model."""
    after_import(dict.fromkeys([*LOOKUPS, *OTHER_LOOKUPS], _register))
