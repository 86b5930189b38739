# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""AttnRes models in vLLM: its Transformers backend runs our trunk, with vLLM's attention, experts and linear layers.

What the backend does not do by itself is here: what crosses between pipeline stages, what a base does to its logits,
and a refusal of what vLLM would compute otherwise than the base.
"""

import torch
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.models.transformers import TransformersForCausalLM, TransformersMoEForCausalLM
from vllm.model_executor.models.utils import PPMissingLayer, make_empty_intermediate_tensors_factory

import attnres  # noqa: F401  registers the config and the classes in transformers
from attnres.base.classes import ReadingNorm
from attnres.base.probe import decoder_layers, probe_slices
from attnres.base.slices import count_tensors, stack_sources, stream_of_sources
from attnres.serving.logits import HeadOfBase


class AttnResForCausalLM(TransformersForCausalLM):
    """What vLLM's registry has for the architecture of this name."""

    def __new__(cls, *, vllm_config, prefix: str = ""):
        return super().__new__(_SparseAttnRes if vllm_config.model_config.is_moe else cls)

    def __init__(self, *, vllm_config, prefix: str = ""):
        if vllm_config.model_config.is_moe:
            check_experts(vllm_config.model_config.hf_config)
        self.num_received = 0
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(
            ["hidden_states"], self.num_received * self.config.hidden_size
        )
        if self.pp_group.is_last_rank:
            self.logits_processor.scale, self.logits_processor.soft_cap = 1.0, None
            self.head_of_base = HeadOfBase(self.config, super().compute_logits)

    def _create_hf_to_vllm_mapper(self):
        # By the name of the architecture it finds how tensors of the base's files have been renamed since
        architectures = self.config.architectures
        self.config.architectures = self.config.to_base_config().architectures
        try:
            super()._create_hf_to_vllm_mapper()
        finally:
            self.config.architectures = architectures

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return self.head_of_base(hidden_states)

    def pipeline_parallel(self):
        """Leave the layers of this stage, between which all sources cross, `[tokens, sources * hidden]`."""
        if self.pp_group.world_size == 1:
            return
        trunk, config = self.model, self.config
        self._check_input_of_layers()
        start, _ = get_pp_indices(config.num_hidden_layers, self.pp_group.rank_in_group, self.pp_group.world_size)
        first_layer = decoder_layers(trunk)[start]
        norms = [name for name, module in trunk.named_children() if isinstance(module, ReadingNorm)]
        queries = trunk.depth_queries
        super().pipeline_parallel()
        trunk.depth_queries = queries  # of which every stage has all, also where the base has no plan that leaves them
        if not self.pp_group.is_last_rank:
            for name in norms:
                setattr(trunk, name, SendSources())
        if self.pp_group.is_first_rank:
            return
        entry_site = first_layer.depth_sites[0]
        self.num_received = num_received = sum(count_tensors(config, entry_site))

        def receive(layer, args, kwargs):
            received = args[0] if args else kwargs["hidden_states"]
            sources = received.unflatten(-1, (num_received, -1)).permute(2, 0, 1, 3)
            stream = stream_of_sources(trunk, sources, entry_site)
            return ((stream, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": stream})

        first_layer.register_forward_pre_hook(receive, with_kwargs=True, prepend=True)

    def _check_input_of_layers(self):
        """Raise a `ValueError` if a base does to embeddings what it would do to all that crosses as well, or if its
        layers need more of each other than what crosses."""
        probe_slices(self.config.to_base_config())
        reached = []

        def stop(layer, args, kwargs):
            reached.append(args[0] if args else kwargs["hidden_states"])
            raise _FirstLayerReached

        trunk = self.model.eval()
        given = torch.empty(1, 3, self.config.hidden_size, device="meta", dtype=trunk.dtype)
        hook = decoder_layers(trunk)[0].register_forward_pre_hook(stop, with_kwargs=True, prepend=True)
        try:
            positions = torch.arange(3, device="meta")[None]
            trunk.forward(inputs_embeds=given, position_ids=positions, use_cache=False)
        except _FirstLayerReached:
            pass
        finally:
            hook.remove()
        if reached[0] is not given:
            raise ValueError(
                f"Base `{self.config.base_model_type}` changes embeddings before its first layer, and would"
                " change what crosses between vLLM's pipeline stages. Use --tensor-parallel-size instead of"
                " --pipeline-parallel-size."
            )


class _SparseAttnRes(AttnResForCausalLM, TransformersMoEForCausalLM):
    """With vLLM's mixtures of experts."""


class _FirstLayerReached(Exception):
    pass


class SendSources(PPMissingLayer):
    """In the place of the final norm, in front of the last stage."""

    def forward(self, stream) -> torch.Tensor:
        return stack_sources(stream).permute(1, 2, 0, 3).flatten(2)


def check_experts(config):
    """Raise a `ValueError` if vLLM would run the experts of a base with another activation than theirs.

    Its Transformers backend takes `silu` for all but gpt_oss, which it knows by the name of the class.
    """
    activation = "a clamped GLU" if config.base_model_type == "gpt_oss" else getattr(config, "hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(
            f"The experts of base `{config.base_model_type}` have {activation} as their activation, and vLLM would run"
            " them with silu. Serve it with `attnres serve --continuous-batching`."
        )
