# SPDX-License-Identifier: Apache-2.0
"""Multimodal models against their bases: `TRANSFORMERS=DIR python tests/transformers_suite/multimodal.py [types]`.

DIR is a checkout of transformers, whose tests bring a tiny model of each type and its inputs: images, videos, sound.
Prints how far the logits are from the base's, relative to the largest one, with queries of zero and with random ones
(which have to do something), or why the type is refused or cannot be tried.
"""

import copy
import logging
import os
import sys
import unittest
import warnings
from importlib import import_module


os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, os.environ["TRANSFORMERS"])

import torch
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from attnres import AttnResForConditionalGeneration, AttnResMultimodalConfig


def config_and_inputs(model_type: str):
    """Those of the first test of the type that has some of a multimodal model."""
    name = model_type.replace("-", "_")
    module = import_module(f"tests.models.{name}.test_modeling_{name}")
    for kind in vars(module).values():
        if not (isinstance(kind, type) and issubclass(kind, unittest.TestCase) and kind.__module__ == module.__name__):
            continue
        test = kind(next(method for method in dir(kind) if method.startswith("test")))
        try:
            test.setUp()
            config, inputs = test.model_tester.prepare_config_and_inputs_for_common()
        except Exception:  # such as a test that loads a model from the Hub
            continue
        if type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING:
            return config, inputs
    raise LookupError("its tests have no tiny model")


@torch.no_grad()
def compare(model_type: str) -> str:
    base_config, inputs = config_and_inputs(model_type)
    base_config._attn_implementation = "eager"
    config = AttnResMultimodalConfig.from_base_config(base_config, block_size=2, attn_res_scale_norm_eps=True)
    torch.manual_seed(0)
    base = MODEL_FOR_MULTIMODAL_LM_MAPPING[type(base_config)](base_config).eval()
    model = AttnResForConditionalGeneration(config).eval()
    missing, unexpected = model.load_state_dict(base.state_dict(), strict=False)
    assert not unexpected and len(missing) == 2, (missing, unexpected)
    expected = base(**copy.deepcopy(inputs)).logits
    differences = []
    for scale in (0, 1):
        model.trunk.depth_queries.query.normal_().mul_(scale)
        logits = model(**copy.deepcopy(inputs)).logits
        differences.append((logits - expected).abs().max() / expected.abs().max())
    others = ", ".join(name for name in inputs if name not in ("input_ids", "attention_mask")) or "text alone"
    return f"{differences[0]:.1e} {differences[1]:.1e} ({config.text_config.base_model_type}; {others})"


def main(*model_types: str):
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for model_type in model_types or MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES:
        if model_type == "attnres_multimodal":
            continue
        try:
            result = compare(model_type)
        except Exception as error:
            result = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        print(f"{model_type}: {result}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
