# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""PEFT's `add_weighted_adapter`, for adapters that have depth queries.

PEFT combines low-rank updates, and refuses modules that two adapters store as a whole (`modules_to_save`). If only one
of the adapters stores them, the new adapter silently gets those of the model. Depth queries, key norms and projections
are combined here, as low-rank updates are: by what each adapter has changed,

    combined = model + sum_i weight_i * (adapter_i - model)

An adapter without queries has changed nothing. `library_lookups.py` puts this around PEFT's methods.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any


QUERIES = "depth_queries"
# By `combination_type`, without the suffix `_svd`: the function of `peft.utils.merge_utils` that combines changes
COMBINED_BY = {
    **dict.fromkeys(("cat", "linear", "svd"), "task_arithmetic"),
    **{name: name for name in ("ties", "dare_linear", "dare_ties", "magnitude_prune")},
}


def with_queries(add_weighted_adapter: Callable) -> Callable:
    """`add_weighted_adapter` of one of PEFT's models, which then combines the depth queries of adapters as well."""
    signature = inspect.signature(add_weighted_adapter)

    @functools.wraps(add_weighted_adapter)
    def add(self, adapters: Sequence[str], weights: Sequence[float], adapter_name: str, *args, **kwargs):
        # Those of a decoder, or of the encoder and the decoder
        wrappers: dict[Any, Any] = {
            stack: stack.depth_queries
            for stack in self.model.modules()
            if hasattr(getattr(stack, QUERIES, None), "modules_to_save")
        }
        have_queries = any(name in wrapper.modules_to_save for wrapper in wrappers.values() for name in adapters)
        if adapter_name in self.peft_config or not have_queries:  # a name that is taken changes nothing, as in PEFT
            return add_weighted_adapter(self, adapters, weights, adapter_name, *args, **kwargs)
        if len(adapters) != len(weights):
            raise ValueError(f"`weights` has {len(weights)} numbers for {len(adapters)} `adapters`: each needs one.")
        given = signature.bind(self, adapters, weights, adapter_name, *args, **kwargs)
        given.apply_defaults()
        combine = combination(given.arguments) if len(adapters) > 1 else combination({})
        try:
            for stack, wrapper in wrappers.items():
                stack.depth_queries = wrapper.original_module  # in which PEFT finds nothing to refuse
            try:
                _add_updates(add_weighted_adapter, self, adapters, weights, adapter_name, *args, **kwargs)
            finally:
                for stack, wrapper in wrappers.items():
                    stack.depth_queries = wrapper
            config = self.peft_config[adapter_name]
            others = [name for name in config.modules_to_save or () if not name.endswith(QUERIES)]
            config.modules_to_save = [*others, QUERIES]
            for wrapper in wrappers.values():
                wrapper.update(adapter_name)
                combine_queries(wrapper, adapters, weights, adapter_name, combine)
        except BaseException:  # an interrupt as well
            if adapter_name in self.peft_config:  # half an adapter, for which a second try would do nothing
                self.delete_adapter(adapter_name)
            raise

    return add


def combination(options: dict[str, Any]) -> Callable:
    """PEFT's function of changes and their weights that belongs to the arguments of `add_weighted_adapter`.

    Raises:
        ValueError: if PEFT has no such `combination_type`, or it needs a `density` and there is none.
    """
    from peft.utils import merge_utils

    kind = options.get("combination_type", "linear")
    if kind.removesuffix("_svd") not in COMBINED_BY:
        raise ValueError(f"Invalid combination_type: {kind}")
    combine = getattr(merge_utils, COMBINED_BY[kind.removesuffix("_svd")])
    parameters = inspect.signature(combine).parameters
    used = {name: options[name] for name in ("density", "majority_sign_method") if name in parameters}
    if "density" in used and used["density"] is None:
        raise ValueError(f"`combination_type={kind!r}` needs a `density` between 0 and 1.")
    return functools.partial(combine, **used)


def _add_updates(add_weighted_adapter: Callable, tuner, adapters, weights, adapter_name: str, *args, **kwargs):
    """Add an adapter as PEFT does, of those that adapt more than queries: of others it cannot name the modules."""
    from peft.utils.constants import DUMMY_TARGET_MODULES

    configs = [tuner.peft_config.get(name) for name in adapters]  # an unknown name is left to PEFT, which refuses it
    is_more = [config is None or config.target_modules != DUMMY_TARGET_MODULES for config in configs]
    if any(is_more):
        chosen, of_chosen = zip(*(pair for pair, wanted in zip(zip(adapters, weights), is_more) if wanted))
        add_weighted_adapter(tuner, list(chosen), list(of_chosen), adapter_name, *args, **kwargs)
    else:
        tuner.peft_config[adapter_name] = replace(configs[0])
        tuner.inject_adapter(tuner.model, adapter_name)


def combine_queries(
    wrapper: Any, adapters: Sequence[str], weights: Sequence[float], adapter_name: str, combine: Callable
):
    """Set the queries of a new adapter.

    Args:
        wrapper: PEFT's `ModulesToSaveWrapper` of a model's depth queries. It has a copy for the new adapter.
        combine: a function of changes, a list of tensors, and of their weights, `[changes]`.
    """
    import torch

    copies = wrapper.modules_to_save
    changed = [(copies[name], float(weight)) for name, weight in zip(adapters, weights) if name in copies]
    of_changes = torch.tensor([weight for _, weight in changed], dtype=torch.float64)

    def wide(tensor: torch.Tensor) -> torch.Tensor:  # so that one change by a weight of 1 is found again exactly
        return tensor.detach().to("cpu", torch.float64)

    with torch.no_grad():
        for name, tensor in copies[adapter_name].named_parameters():
            of_model = wide(wrapper.original_module.get_parameter(name))
            changes = [wide(queries.get_parameter(name)) - of_model for queries, _ in changed]
            tensor.copy_(of_model + combine(changes, of_changes))
