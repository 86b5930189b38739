# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Models of images and text, or sound and text, whose language model reads over depth.

The config is the base's with an `AttnResConfig` as `text_config`, of which the base's own code makes the language
model. What is not the language model is the base's, with its code and parameter names.
"""

import copy
import functools
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)

from .base.classes import class_by_name
from .base.probe import RefusedBase
from .configuration_attnres import AttnResConfig
from .modeling_attnres import AttnResGenerationMixin, AttnResModel, AttnResPreTrainedModel


class AttnResMultimodalConfig(PreTrainedConfig):
    """Configuration of a multimodal base of type `base_model_type`, with an `AttnResConfig` as `text_config`.

    It has every field of the base's own config. Make one with `from_base_config`.

    ```python
    >>> from attnres import AttnResMultimodalConfig
    >>> from transformers import Mistral3Config

    >>> config = AttnResMultimodalConfig.from_base_config(Mistral3Config(), block_size=8)
    >>> type(config.text_config).__name__
    'AttnResConfig'
    ```
    """

    model_type = "attnres_multimodal"

    base_model_type: str | None = None

    def __new__(cls, *args, base_model_type: str | None = None, **kwargs):
        return super().__new__(config_class_of(base_model_type) if cls is AttnResMultimodalConfig else cls)

    def __post_init__(self, **kwargs):
        if not isinstance(self.text_config, PreTrainedConfig):  # the base would make its own kind of it
            self.text_config = AttnResConfig.from_dict(self.text_config or {})
        super().__post_init__(**kwargs)

    def validate_architecture(self):
        """Part of `@strict`-powered validation: the base configuration's own checks, on its own text config."""
        # transformers 5.19 makes one without arguments to save another: its text config is of no base in particular
        if self.text_config.to_dict() != AttnResConfig().to_dict():
            self.to_base_config().validate_architecture()

    def __reduce_ex__(self, protocol):
        return _new_config, (self.base_model_type,), self.__dict__

    @classmethod
    def from_base_config(cls, base_config: PreTrainedConfig, **kwargs) -> "AttnResMultimodalConfig":
        """Make the configuration of an AttnRes model from that of its base. The inverse of `to_base_config`.

        Args:
            base_config (`PreTrainedConfig`):
                Configuration of a multimodal model whose language model is of a supported type.
            kwargs:
                `block_size`, `num_blocks` and other fields, as in [`AttnResConfig.from_base_config`].

        Raises:
            ValueError: if the base is not supported, and as in `AttnResConfig.from_base_config`.
        """
        config_class, config = config_class_of(base_config.model_type), copy.deepcopy(base_config)
        text_config = AttnResConfig.from_base_config(base_config.text_config, **kwargs)
        config.__class__ = config_class
        config.base_model_type, config.text_config = base_config.model_type, text_config
        config.architectures = [AttnResForConditionalGeneration.__name__]
        try:
            with torch.device("meta"):
                AttnResForConditionalGeneration(config)  # which says what stands against it
        except ValueError:
            raise
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            raise RefusedBase(base_config, f"no model can be made of its config ({text})") from error
        return config

    def to_base_config(self) -> PreTrainedConfig:
        """Make the configuration of the base. The inverse of `from_base_config`."""
        base_config, base_class = copy.deepcopy(self), CONFIG_MAPPING[self.base_model_type]
        base_config.__class__ = base_class
        del base_config.base_model_type
        base_config.text_config = self.text_config.to_base_config()
        base_config.architectures = [MODEL_FOR_MULTIMODAL_LM_MAPPING[base_class].__name__]
        return base_config


@functools.cache
def config_class_of(base_model_type: str) -> type[AttnResMultimodalConfig]:
    """The class of the configs on a multimodal base, which is also one of the base's.

    Raises:
        ValueError: if transformers has no multimodal model of this type that is made of a language model and others.
    """
    base_class: Any = CONFIG_MAPPING[base_model_type] if base_model_type in CONFIG_MAPPING else None
    reason = None
    if base_class is None or base_class not in MODEL_FOR_MULTIMODAL_LM_MAPPING:
        reason = "transformers has no multimodal language model of this type"
    elif "text_config" not in base_class.sub_configs:
        reason = "its config has no `text_config`, of which its language model would be made"
        parts = {
            name: part
            for name, part in base_class.sub_configs.items()
            if "text_config" in getattr(part, "sub_configs", ())
        }
        for name, part in parts.items():
            reason += f"; `{name}` has one, and a model of it, of type {part.model_type!r}, can be a base by itself"
    if reason is not None:
        raise ValueError(f"`base_model_type={base_model_type!r}` is not supported: {reason}.")
    members = {
        "__module__": __name__,
        # Some bases name the class of their own text config
        "__annotations__": {"base_model_type": str, "text_config": PreTrainedConfig | dict[str, Any] | None},
        "base_model_type": base_model_type,
        "text_config": None,
    }
    return strict(type(AttnResMultimodalConfig.__name__, (AttnResMultimodalConfig, base_class), members))


def is_multimodal(base_model_type: str) -> bool:
    """Whether models of a type are multimodal, not only causal language models."""
    if base_model_type not in CONFIG_MAPPING:
        return False
    base_class = CONFIG_MAPPING[base_model_type]
    is_causal = base_class in MODEL_FOR_CAUSAL_LM_MAPPING
    return "text_config" in base_class.sub_configs or base_class in MODEL_FOR_MULTIMODAL_LM_MAPPING and not is_causal


def _new_config(base_model_type: str) -> AttnResMultimodalConfig:
    config_class = config_class_of(base_model_type)
    return config_class.__new__(config_class)


class AttnResForConditionalGeneration(AttnResPreTrainedModel, AttnResGenerationMixin):
    """The multimodal model of the base, with reads over depth in its language model."""

    config: AttnResMultimodalConfig
    base_model = PreTrainedModel.base_model  # which encodes images as well
    push_to_hub = PreTrainedModel.push_to_hub  # without code, as there is none of the base's

    @classmethod
    def class_of_base(cls, base_model_type: str) -> type[PreTrainedModel]:
        config_class_of(base_model_type)  # which says so if there is none
        return MODEL_FOR_MULTIMODAL_LM_MAPPING[CONFIG_MAPPING[base_model_type]]

    def post_init(self):
        # Of some bases the code names the class of the language model, of most it is an `AttnResModel` already
        innermost = [module for module in self.get_decoder().modules() if isinstance(module, PreTrainedModel)][-1]
        decoder = next((module for module in self.modules() if isinstance(module, AttnResModel)), innermost)
        if not isinstance(decoder.config, AttnResConfig):
            raise self._unsupported(f"its {type(decoder).__name__} is not made of its `text_config`")
        self.trunk_name = next(name for name, module in self.named_modules() if module is decoder)
        try:
            super().post_init()
        except AttributeError as error:  # weights that it ties are not there
            name = decoder.config.base_model_type
            raise self._unsupported(f"its language model, {name!r}, is another than its own ({error})") from error

    def _unsupported(self, reason: str) -> ValueError:
        return ValueError(f"`base_model_type={self.config.base_model_type!r}` is not supported: {reason}.")

    @property
    def trunk(self) -> PreTrainedModel:
        return self.get_submodule(self.trunk_name)

    @property
    def stacks(self) -> list[PreTrainedModel]:
        return [self.trunk]


__getattr__ = functools.partial(class_by_name, globals())
__all__ = ["AttnResForConditionalGeneration", "AttnResMultimodalConfig"]
