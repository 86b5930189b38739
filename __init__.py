# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Attention Residuals (arXiv 2603.15031) for transformers.

Importing this package registers AttnRes with the Auto classes. torch and the model code are imported when first used.
"""

import importlib
import os
import warnings

from .registration import register


__version__ = "0.2.0"

_PUBLIC_NAMES = {
    "AttnResConfig": ".configuration_attnres",
    "AttnResForAudioClassification": ".modeling_attnres",
    "AttnResForCTC": ".modeling_attnres",
    "AttnResForCausalLM": ".modeling_attnres",
    "AttnResForConditionalGeneration": ".multimodal_attnres",
    "AttnResForImageClassification": ".modeling_attnres",
    "AttnResForMaskedLM": ".modeling_attnres",
    "AttnResForQuestionAnswering": ".modeling_attnres",
    "AttnResForSeq2SeqLM": ".modeling_attnres",
    "AttnResForSequenceClassification": ".modeling_attnres",
    "AttnResForSpeechSeq2Seq": ".modeling_attnres",
    "AttnResForTokenClassification": ".modeling_attnres",
    "AttnResModel": ".modeling_attnres",
    "AttnResMultimodalConfig": ".multimodal_attnres",
    "AttnResPreTrainedModel": ".modeling_attnres",
    "BlockCache": ".depth.block_cache",
    "DepthRecorder": ".depth.recorder",
    "DepthStream": ".depth.stream",
    "get_backend": ".depth.backends",
    "set_backend": ".depth.backends",
}
__all__ = sorted(_PUBLIC_NAMES)


def __getattr__(name: str):
    if name not in _PUBLIC_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC_NAMES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC_NAMES])


def _warn_of_files_of_others():
    """Of what another distribution has put into the folder of the installed package, which then may not be ours alone.

    What is ours, pip keeps in a list beside the folder. In a clone there is none.
    """
    folder = os.path.dirname(os.path.abspath(__file__))
    record = os.path.join(os.path.dirname(folder), f"attnres-{__version__}.dist-info", "RECORD")
    try:
        with open(record, encoding="utf-8") as lines:
            ours = {line.split("/")[1].split(",")[0] for line in lines if line.startswith("attnres/")}
    except OSError:
        return
    others = sorted({*os.listdir(folder)} - ours - {"__pycache__"})
    if others:
        from .utils.installation import mixed_up

        found = f"`{'`, `'.join(others[:5])}`{' and others' if others[5:] else ''} came with something else"
        warnings.warn(mixed_up(folder, found), RuntimeWarning, stacklevel=3)


register()
_warn_of_files_of_others()
