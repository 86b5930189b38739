# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""What other libraries have to know of AttnRes: transformers' Auto classes, Liger, and those in `library_lookups`."""

import sys

from .base.library_lookups import after_import, register_lookups


def _register_config(auto_module):
    for model_type, class_name in {
        "attnres": "AttnResConfig",
        "attnres_multimodal": "AttnResMultimodalConfig",
    }.items():
        auto_module.CONFIG_MAPPING_NAMES[model_type] = class_name
        auto_module.CONFIG_MAPPING._modules.setdefault(model_type, sys.modules[__package__])


def _register_models(auto_module):
    for task, model_type, class_name in (
        ("", "attnres", "AttnResModel"),
        ("_FOR_AUDIO_CLASSIFICATION", "attnres", "AttnResForAudioClassification"),
        ("_FOR_CTC", "attnres", "AttnResForCTC"),
        ("_FOR_CAUSAL_LM", "attnres", "AttnResForCausalLM"),
        ("_FOR_CAUSAL_LM", "attnres_multimodal", "AttnResForConditionalGeneration"),
        ("_FOR_IMAGE_TEXT_TO_TEXT", "attnres_multimodal", "AttnResForConditionalGeneration"),
        ("_FOR_MULTIMODAL_LM", "attnres_multimodal", "AttnResForConditionalGeneration"),
        ("_FOR_IMAGE_CLASSIFICATION", "attnres", "AttnResForImageClassification"),
        ("_FOR_MASKED_LM", "attnres", "AttnResForMaskedLM"),
        ("_FOR_QUESTION_ANSWERING", "attnres", "AttnResForQuestionAnswering"),
        ("_FOR_SEQUENCE_CLASSIFICATION", "attnres", "AttnResForSequenceClassification"),
        ("_FOR_SEQ_TO_SEQ_CAUSAL_LM", "attnres", "AttnResForSeq2SeqLM"),
        ("_FOR_SPEECH_SEQ_2_SEQ", "attnres", "AttnResForSpeechSeq2Seq"),
        ("_FOR_TOKEN_CLASSIFICATION", "attnres", "AttnResForTokenClassification"),
    ):
        mapping = getattr(auto_module, f"MODEL{task}_MAPPING")
        if task == "_FOR_SEQ_TO_SEQ_CAUSAL_LM":
            # lm-eval takes each type in the list of names for an encoder-decoder, and most of ours are decoders.
            mapping._model_mapping = mapping._model_mapping.copy()
        mapping._model_mapping[model_type] = class_name
        mapping._reverse_config_mapping.update(AttnResConfig="attnres", AttnResMultimodalConfig="attnres_multimodal")
        mapping._modules.setdefault(model_type, sys.modules[__package__])


def _register_with_liger(monkey_patch):
    from .base.liger import apply_liger_kernel_to_attnres

    monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN.setdefault("attnres", apply_liger_kernel_to_attnres)


def register():
    """Tell each library as soon as it is imported, and import none.

    `AutoModel.register` takes classes, and importing what those need takes seconds. The mappings themselves go from
    name to class when one is looked up, which is all that is wanted here. The first registration stays: the folder of
    a checkout is a package too, under its own name, and pytest may import it.
    """
    after_import(
        {
            "transformers.models.auto.configuration_auto": _register_config,
            "transformers.models.auto.modeling_auto": _register_models,
            "liger_kernel.transformers.monkey_patch": _register_with_liger,
        }
    )
    register_lookups()
