# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Classes that are both a base's and ours, made when they are needed, and the base's checkpoint conversion."""

import functools
import threading
from typing import Any

from transformers import conversion_mapping

from ..depth.tensor_like import TensorLike
from .library_lookups import register_lookups


class ReadingNorm:
    """Makes a norm of the base read: given a stream, it norms what it has read. A mixin, see `combined_class`."""

    def forward(self, hidden_states, *args, **kwargs):
        if isinstance(hidden_states, TensorLike) and not args and not kwargs:
            return hidden_states.read(self)
        return super().forward(hidden_states, *args, **kwargs)


@functools.cache
def combined_class(ours: Any, base: type, base_model_type: str | None = None) -> Any:
    """The class of the objects that are of a class of ours and of one of the base, under the name of the former.

    A norm that reads has the module of the base's norm, by which `rms_norm_parameters` knows what it computes. Its
    name ends in another way: SGLang puts a norm of its own in the place of every "...RMSNorm", and that one cannot
    take a stream.
    """
    is_norm = ours is ReadingNorm
    name = f"{base.__name__}OverDepth" if is_norm else ours.__name__
    members: dict[str, Any] = {
        "__module__": (base if is_norm else ours).__module__,
        "__qualname__": f"{name}[{base.__name__ if is_norm else base_model_type}]",
    }
    if not is_norm:
        members |= {**ours.members_of_base(base), "base_model_type": base_model_type}
    members["__reduce_ex__"] = lambda self, protocol: (new_combined, (ours, base, base_model_type), self.__dict__)
    return type(name, (ours, *getattr(ours, "mixins", ()), base), members)


def new_combined(ours: Any, base: Any, base_model_type: str | None):
    # With the arguments of the first call, by which the class is remembered
    cls = combined_class(ours, base, *([] if base_model_type is None else [base_model_type]))
    return cls.__new__(cls)


def class_by_name(module: dict, name: str) -> type:
    """A class of both by its name, `AttnResForCausalLM[llama]`: so pickle finds it in another process."""
    ours, _, base_model_type = name.removesuffix("]").partition("[")
    if ours not in module["__all__"] or not base_model_type:
        raise AttributeError(f"module {module['__name__']!r} has no attribute {name!r}")
    return combined_class(module[ours], module[ours].class_of_base(base_model_type), base_model_type)


class BaseConversions(list):
    """The checkpoint conversion of the base, where transformers looks up that of "attnres".

    All AttnRes models share a model type but not a base. transformers asks a model whether it is custom code, and then
    copies what is registered for its model type, in the same thread: the question says which base is meant.
    """

    # One for all copies of this code in a process (checkpoints may bring some): the last to be imported answers
    asked = vars(conversion_mapping).setdefault("_attnres_asked", threading.local())

    def __deepcopy__(self, memo):
        for name in getattr(self.asked, "base_names", ()):  # as of a native model, that of the class comes first
            mapping = conversion_mapping.get_checkpoint_conversion_mapping(name)
            if mapping is not None:
                return mapping
        return None


for _model_type in ("attnres", "attnres_multimodal"):
    conversion_mapping.register_checkpoint_conversion_mapping(_model_type, BaseConversions(), overwrite=True)
register_lookups()
