# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Liger's kernels in an AttnRes model: those of its base's sublayers, and the fused linear cross-entropy.

Liger looks models up by model type, so importing it registers the function below (see `attnres/__init__.py`), and
`use_liger_kernel=True` does what it does for a PreNorm model. Only RMSNorm stays: norms behind reads are computed with
the read.
"""

import inspect
from types import MethodType

from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging


logger = logging.get_logger(__name__)


def apply_liger_kernel_to_attnres(
    rope: bool | None = None,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool | None = None,
    rms_norm: bool = False,
    swiglu: bool | None = None,
    geglu: bool | None = None,
    relu_squared: bool | None = None,
    model: PreTrainedModel | None = None,
):
    """Put Liger's kernels into a model; what is `None` is as Liger has it for the base.

    As with Liger's own functions, rotary embeddings are replaced in all models of the base's architecture.

    Raises:
        ValueError: without a model, or if both kinds of cross-entropy are asked for.
    """
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    from .forward import with_depth_attentions

    if model is None:
        raise ValueError("Liger's kernels are put into an AttnRes model that is there: pass it as `model`.")
    if cross_entropy and fused_linear_cross_entropy:
        raise ValueError("`cross_entropy=True` and `fused_linear_cross_entropy=True` contradict: give one of them.")
    if rms_norm:
        logger.warning("Liger's `rms_norm` is not used: an AttnRes model computes norms with its reads over depth.")

    base_model_type = model.config.base_model_type
    apply_to_base = MODEL_TYPE_TO_APPLY_LIGER_FN.get(base_model_type)
    if apply_to_base is None:
        logger.warning(f"Liger has no kernels for `{base_model_type}`, so `use_liger_kernel` does nothing.")
        return
    chosen = {"rope": rope, "swiglu": swiglu, "geglu": geglu, "relu_squared": relu_squared}
    can_fuse = not cross_entropy and model.get_output_embeddings() is not None
    chosen["fused_linear_cross_entropy"] = fused_linear_cross_entropy if can_fuse else False
    kwargs = {name: value for name, value in chosen.items() if value is not None}
    kwargs |= {"cross_entropy": cross_entropy, "rms_norm": False}
    known = inspect.signature(apply_to_base).parameters
    # Of the base, whose class the model is of as well
    apply_to_base(model=model, **{name: value for name, value in kwargs.items() if name in known})
    if "forward" in vars(model):  # the base's with a fused loss
        model.forward = MethodType(with_depth_attentions(model.forward.__func__), model)
