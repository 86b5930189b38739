# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""What `generate` of an AttnRes model does beyond transformers': weights over depth of every step, and checks."""

import contextvars
import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation import GenerateBeamDecoderOnlyOutput, GenerateDecoderOnlyOutput, GenerationMixin
from transformers.utils import logging

from .base.forward import depth_output_class


logger = logging.get_logger(__name__)

# The weights of each step of the generation that runs in this thread; `None` if they are not wanted
_DEPTH_ATTENTIONS_OF_STEPS = contextvars.ContextVar("depth_attentions_of_steps", default=None)


class AttnResGenerationMixin(GenerationMixin):
    """Generation with `output_depth_attentions`, and `generate_batch` that refuses what would stop all requests."""

    @functools.wraps(GenerationMixin.generate)
    def generate(self, *args, **kwargs):
        wanted = kwargs.pop("output_depth_attentions", getattr(self.config, "output_depth_attentions", False))
        if wanted:
            self.check_depth_attentions_of_generation(*args, **kwargs)
        # Set even if they are not wanted: this model may be the assistant of one whose weights are
        token = _DEPTH_ATTENTIONS_OF_STEPS.set([] if wanted else None)
        try:
            outputs = super().generate(*args, **kwargs)
            steps = _DEPTH_ATTENTIONS_OF_STEPS.get()
        finally:
            _DEPTH_ATTENTIONS_OF_STEPS.reset(token)
        if not isinstance(outputs, (GenerateDecoderOnlyOutput, GenerateBeamDecoderOnlyOutput)) or not wanted:
            return outputs
        return depth_output_class(type(outputs))(**outputs, depth_attentions=tuple(steps))

    @functools.wraps(GenerationMixin.generate_batch)
    def generate_batch(self, inputs, *args, **kwargs):
        return super().generate_batch(self.check_requests(inputs), *args, **kwargs)

    def check_requests(self, inputs: Sequence[Sequence[int]]) -> list[list[int]]:
        """The prompts as lists; a `ValueError` for one that would take down the thread that generates all of them."""
        if isinstance(inputs, str) or not isinstance(inputs, Sequence):
            raise ValueError(f"`inputs` must be a list of prompts, each a list of token ids, not {inputs!r}.")
        prompts = []
        for index, prompt in enumerate(inputs):
            prompt = prompt.tolist() if isinstance(prompt, torch.Tensor) else prompt
            if isinstance(prompt, str) or not isinstance(prompt, Sequence):
                raise ValueError(f"`inputs[{index}]={prompt!r}` must be a list of token ids.")
            if not prompt:
                raise ValueError(f"`inputs[{index}]` is empty: a prompt needs at least one token.")
            for token in prompt:
                if isinstance(token, bool) or not isinstance(token, int):
                    raise ValueError(f"`inputs[{index}]` has {token!r} among its token ids, which must be ints.")
                if not 0 <= token < self.config.vocab_size:
                    last = self.config.vocab_size - 1
                    raise ValueError(f"`inputs[{index}]` has the token id {token}; this model's go from 0 to {last}.")
            prompts.append(list(prompt))
        return prompts

    def check_depth_attentions_of_generation(self, inputs=None, generation_config=None, *args, **kwargs):
        """Raise a `ValueError` if a token would have no weights or several; warn if they would not be returned."""
        generation_config = generation_config or self.generation_config

        def option(name: str):
            value = kwargs.get(name)
            return getattr(generation_config, name, None) if value is None else value

        for name in ("assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens", "prefill_chunk_size"):
            if option(name) is not None:
                raise ValueError(
                    f"`output_depth_attentions=True` cannot be combined with `{name}`, which runs the model on several"
                    " tokens at a time: generate without one of them, or run the model on what was generated."
                )
        if not option("return_dict_in_generate"):
            logger.warning(
                "`output_depth_attentions=True` does nothing in `generate` without `return_dict_in_generate=True`."
            )

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, *args, **kwargs):
        steps = _DEPTH_ATTENTIONS_OF_STEPS.get()
        if steps is not None:
            steps.append(outputs.depth_attentions)
        return super()._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **kwargs)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        base: Any = getattr(cls, "base_class", super())
        return base._supports_default_dynamic_cache()  # which looks at the name

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        # transformers tells by the name of a class what its forward calls the cache
        names = inspect.signature(self.forward).parameters
        if "cache_params" in names and "past_key_values" not in names and "past_key_values" in model_kwargs:
            model_kwargs.setdefault("cache_params", model_kwargs.pop("past_key_values"))

    @functools.wraps(GenerationMixin.prepare_inputs_for_generation)  # `generate` looks at the names of the arguments
    def prepare_inputs_for_generation(self, *args, **kwargs):
        model_inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        if _DEPTH_ATTENTIONS_OF_STEPS.get() is not None:
            model_inputs["output_depth_attentions"] = True
        return model_inputs
