# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""What a base does to its logits, for an engine that has computed them itself."""

from collections.abc import Callable

import torch
from torch import nn
from transformers import AutoModelForCausalLM


class HeadOfBase:
    """The code of the base's `ForCausalLM` around an engine's own trunk and head.

    Some bases scale their logits, cap them, or scale what the head is given. vLLM's Transformers backend knows two of
    their ways by the name of a field. This knows all.

    Args:
        config: of the AttnRes model.
        lm_head: logits of hidden states, `[tokens, hidden]` to `[tokens, vocabulary]`; `None` if another process has
            them.

    Raises:
        ValueError: if the code of the head needs more than hidden states and the engine's head.
    """

    def __init__(self, config, lm_head: Callable[[torch.Tensor], torch.Tensor | None]):
        base_config = config.to_base_config()
        if getattr(base_config, "output_router_logits", False):
            base_config.output_router_logits = False
        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(base_config).eval()
        self.trunk = _Trunk()
        setattr(self.model, self.model.base_model_prefix, self.trunk)
        self._try(config)
        self.model.set_output_embeddings(_Head(lm_head))

    def _try(self, config):
        """Run on one token, as a head that fails should fail while a server loads and not when it is asked."""
        logits = torch.randn(1, config.vocab_size, device="cpu")
        try:
            self.model.set_output_embeddings(_Head(lambda hidden_states: logits))
            found = self(torch.zeros(1, config.hidden_size, device="cpu"))
            if found is None or found.shape != logits.shape:
                raise RuntimeError("its logits have another shape")
        except Exception as error:
            raise ValueError(
                f"The head of base `{config.base_model_type}` needs more than hidden states and the engine's own head"
                f" ({' '.join(str(error).split())[:200]}). Serve it with `attnres serve --continuous-batching`."
            ) from error

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        self.trunk.hidden_states = hidden_states[None]
        try:
            return self.model(input_ids=None, use_cache=False).logits[0]
        except _LogitsElsewhere:
            return None


class _LogitsElsewhere(Exception):
    pass


class _Outputs:
    """Of a trunk: hidden states, and nothing else that the code of a head may ask for."""

    def __init__(self, hidden_states: torch.Tensor):
        self.last_hidden_state = hidden_states

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, place):
        return (self.last_hidden_state,)[place]


class _Trunk(nn.Module):
    @property
    def decoder(self):  # some heads call this part of their trunk
        return self

    def forward(self, *args, **kwargs):
        return _Outputs(self.hidden_states)


class _Head(nn.Module):
    def __init__(self, lm_head: Callable):
        super().__init__()
        self.lm_head = [lm_head]  # not a module of this one

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits = self.lm_head[0](hidden_states[0])
        if logits is None:
            raise _LogitsElsewhere
        return logits[None]
