# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""What a model takes along when it is saved or pushed, and what adapters and weights have to fit."""

import re
from collections.abc import Iterable

from transformers.modeling_utils import PreTrainedModel

from .base.probe import decoder_layers
from .depth.queries import AttnResDepthQueries


# What a checkpoint that carries its code (`register_for_auto_class`) tells the Auto classes
REMOTE_CODE_AUTO_MAP = {
    "AutoConfig": "configuration_attnres.AttnResConfig",
    "AutoModel": "modeling_attnres.AttnResModel",
    "AutoModelForCausalLM": "modeling_attnres.AttnResForCausalLM",
    "AutoModelForQuestionAnswering": "modeling_attnres.AttnResForQuestionAnswering",
    "AutoModelForSequenceClassification": "modeling_attnres.AttnResForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_attnres.AttnResForTokenClassification",
}


class AttnResSavingMixin:
    """Saving and pushing with the code of the model, and adapters that are checked as they are loaded."""

    def save_pretrained(self, *args, **kwargs):
        """As in transformers. A model from a folder that carries its code is saved with the code.

        Raises:
            ValueError: for a stage of `DistributedConfig(pp_size=...)`, which has a part of the weights.
        """
        if hasattr(self, "_pp_stage"):
            raise ValueError(
                "A stage of `pp_size` processes has a part of the layers, and the files would hold no others. Load the"
                " model without `pp_size` to save it."
            )
        # A merged adapter leaves a buffer with its block size, which the config of a model states already
        self._keys_to_ignore_on_save |= {
            name for name, _ in self.named_buffers() if name.endswith("depth_queries.trained_block_size")
        }
        if not self.is_remote_code() and not getattr(self.config, "auto_map", None):
            return super().save_pretrained(*args, **kwargs)
        auto_classes = {reference.split(".")[-1]: name for name, reference in REMOTE_CODE_AUTO_MAP.items()}
        # transformers would list the class that is saved and no other
        self.config.auto_map = dict(REMOTE_CODE_AUTO_MAP)
        model_class = type(self)
        own = vars(model_class).get("_auto_class")
        model_class._auto_class = auto_classes.get(model_class.__name__, self._auto_class)
        try:
            return super().save_pretrained(*args, **kwargs)
        finally:
            if own is None:  # so that it has again what the public class has
                del model_class._auto_class
            else:
                model_class._auto_class = own

    @staticmethod
    def _finalize_model_loading(model, load_config, loading_info):
        # In front of the report of transformers, which says of which shapes tensors are, and not why
        reason = reason_against_weights(model, loading_info)
        if reason is not None and not load_config.ignore_mismatched_sizes:
            raise ValueError(f"`{load_config.pretrained_model_name_or_path}` {reason}")
        return PreTrainedModel._finalize_model_loading(model, load_config, loading_info)

    def push_to_hub(self, repo_id: str, **kwargs) -> str:
        """As in transformers. The code goes along, so that the model loads where `attnres` is not installed."""
        model_class = type(self)
        if model_class.is_remote_code():
            return super().push_to_hub(repo_id, **kwargs)
        try:
            from attnres.model_cards.card import push_card_if_missing
        except ImportError:  # this code has come with a checkpoint, and the package is not installed
            pass
        else:
            push_card_if_missing(self, repo_id, private=kwargs.get("private"), token=kwargs.get("token"))
        auto_map = self.config.auto_map
        self.config.auto_map = dict(REMOTE_CODE_AUTO_MAP)
        try:
            return super().push_to_hub(repo_id, **kwargs)
        finally:
            self.config.auto_map = auto_map or {}

    def load_adapter(self, *args, **kwargs):
        before = set(getattr(self, "peft_config", {}))
        loading_info = super().load_adapter(*args, **kwargs)
        try:  # here, as transformers sets tensors by itself
            for module in self.modules():
                if isinstance(module, AttnResDepthQueries):
                    module.check_trained_for(getattr(module, "trained_block_size", None))
        except ValueError:
            self.delete_adapter(list(set(self.peft_config) - before))
            raise
        return loading_info


def reason_against_weights(model, loading_info) -> str | None:
    """Why weights with depth queries are not those of a model, because of the number of layers; `None` if they may be.

    Args:
        loading_info: what transformers has found in the files.
    """
    num_layers = model.trunk.config.num_hidden_layers
    for name, found, expected in loading_info.mismatched_keys:
        if name.endswith("depth_queries.query") and found[:1] != expected[:1]:
            return (
                f"has {found[0]} reads over depth, and with `num_hidden_layers={num_layers}` there are {expected[0]}:"
                " layers cannot be left out or added while a model is loaded. Do that with its base (`attnres revert`)"
                " and convert the base, or start with queries of zero by `ignore_mismatched_sizes=True`."
            )
    if any(name.endswith("depth_queries.query") for name in loading_info.missing_keys):  # a base, which may be cut
        return None
    layers = decoder_layers(model.trunk)
    prefix = next(f"{name}." for name, module in model.named_modules() if module is layers)
    names = [*model.state_dict(), *loading_info.unexpected_keys]
    depth = depth_of_weights([name for name in names if name.startswith(prefix)], num_layers)
    if depth == num_layers:
        return None
    return (
        f"has {depth} layers, of which `num_hidden_layers={num_layers}` in its config.json would leave out the last."
        " Where layers of several models were put together, do that with their bases (`attnres revert`), give the"
        f" result `num_hidden_layers={depth}`, and convert it."
    )


def depth_of_weights(names: Iterable[str], num_layers: int) -> int:
    """How many layers there are names of tensors for, further ones that are of another kind left out.

    Those that predict further tokens, behind the last one, have tensors that no other layer has.

    Args:
        num_layers: of the model.
    """
    groups: dict[str, dict[int, set[str]]] = {}
    for name in names:
        match = re.match(r"(.*?\.)(\d+)\.(.*)", name)
        if match is not None:
            groups.setdefault(match[1], {}).setdefault(int(match[2]), set()).add(match[3])
    # Of several lists of layers that are long enough, those of an encoder of images lie deeper
    fitting = [prefix for prefix, parts in groups.items() if num_layers - 1 in parts]
    parts = groups[min(fitting, key=lambda prefix: prefix.count("."))] if fitting else {}
    known = set().union(*(found for number, found in parts.items() if number < num_layers))
    return max([num_layers, *(number + 1 for number, found in parts.items() if found <= known)])
