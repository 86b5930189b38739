# SPDX-License-Identifier: Apache-2.0
"""transformers' own model tests, run on AttnRes models: `make test-transformers` and `make test-transformers-mixins`.

The tests are not ours and are not in this repository. TRANSFORMERS names the folder that they are in:

- a checkout of transformers: all of `CausalLMModelTest`, as for a model of transformers' own;
- its source distribution, which carries the mixins alone: those of modeling, training and two processes.

BASE (llama) and BLOCK_SIZE (2) choose the model, and READ the fields of its read: "num_heads=4 query=input".
"""

import inspect
import os
import sys
import unittest
from importlib import import_module
from importlib.util import find_spec


sys.path.insert(0, os.environ["TRANSFORMERS"])

import stand_ins  # noqa: F401 - before the tests that import what they stand in for
import tests.test_fsdp_mixin as fsdp_mixin
import tests.test_tensor_parallel_mixin as tensor_parallel_mixin
from tests.test_modeling_common import GenerationTesterMixin, ModelTesterMixin, ids_tensor
from tests.test_training_mixin import TrainingTesterMixin
from transformers import CONFIG_MAPPING, GenerationMixin
from transformers.models.auto import modeling_auto
from transformers.testing_utils import _TEXT_MODEL_TESTER_DEFAULTS, torch_device

import attnres
from attnres.base.classes import combined_class


BASE = os.environ.get("BASE", "llama")
BLOCK_SIZE = int(os.environ.get("BLOCK_SIZE", "2"))
READ = {
    f"attn_res_{name}": int(value) if value.isdigit() else value
    for name, value in (field.split("=") for field in os.environ.get("READ", "").split())
}
# Of the base, as an object is: the tests look at what a class says of itself
MODEL_CLASSES = {
    kind: combined_class(cls, cls.class_of_base(BASE), BASE)
    for kind, cls in {
        "base_model_class": attnres.AttnResModel,
        "causal_lm_class": attnres.AttnResForCausalLM,
        "question_answering_class": attnres.AttnResForQuestionAnswering,
        "sequence_classification_class": attnres.AttnResForSequenceClassification,
        "token_classification_class": attnres.AttnResForTokenClassification,
    }.items()
}

# The tests look up what a class is for by its name in these tables, which `AutoModel.register` does not touch
for tables, name in (
    (modeling_auto.MODEL_MAPPING_NAMES, "base_model_class"),
    (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "causal_lm_class"),
    (modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES, "question_answering_class"),
    (modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES, "sequence_classification_class"),
    (modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES, "token_classification_class"),
):
    tables[attnres.AttnResConfig.model_type] = MODEL_CLASSES[name].__name__

# What starts several processes runs for a list of models only: let it run for this one
fsdp_mixin.FSDP_DISTRIBUTED_TEST_MODEL_TYPES = None
tensor_parallel_mixin.TP_DISTRIBUTED_TEST_MODEL_TYPES = None


def attnres_config(base_config) -> attnres.AttnResConfig:
    # Some tests give fields that their config does not have. It keeps them; ours makes them an error, on purpose
    for name in vars(base_config).keys() - vars(type(base_config)()).keys():
        delattr(base_config, name)
    return attnres.AttnResConfig.from_base_config(base_config, block_size=BLOCK_SIZE, **READ)


def of_base(kind: type) -> type | None:
    """The class of this kind in the base's own tests, with its settings and what it leaves out, if it has any."""
    for folder in (BASE, BASE.removesuffix("_text")):
        name = f"tests.models.{folder}.test_modeling_{folder}"
        if find_spec(f"tests.models.{folder}") is not None and find_spec(name) is not None:
            classes = [c for c in vars(import_module(name)).values() if isinstance(c, type) and c is not kind]
            return next((c for c in classes if issubclass(c, kind) and c.__module__ == name), None)
    return None


if find_spec("tests.causal_lm_tester") is not None:
    from tests.causal_lm_tester import CausalLMModelTest, CausalLMModelTester

    tester_of_base, test_of_base = of_base(CausalLMModelTester), of_base(ModelTesterMixin)
    is_generic = test_of_base is None or issubclass(test_of_base, CausalLMModelTest)

    if is_generic:

        class AttnResModelTester(tester_of_base or CausalLMModelTester):
            config_class = attnres.AttnResConfig
            vars().update(MODEL_CLASSES)

            def get_config(self, *args, **kwargs):
                self.config_class = CONFIG_MAPPING[BASE]
                try:
                    return attnres_config(super().get_config(*args, **kwargs))
                finally:
                    del self.config_class

    class AttnResModelTest(test_of_base or CausalLMModelTest, unittest.TestCase):
        if is_generic:
            model_tester_class = AttnResModelTester
        else:  # older tests, each with a tester of its own
            all_model_classes = MODEL_CLASSES["base_model_class"], MODEL_CLASSES["causal_lm_class"]
            pipeline_model_mapping = {}

            def setUp(self):
                super().setUp()
                native = self.model_tester.get_config
                self.model_tester.get_config = lambda *args, **kwargs: attnres_config(native(*args, **kwargs))

        # Left out in silence for models whose files look older than 2023
        test_can_init_all_missing_weights_before_2023 = True

        def test_inherits_generation_mixin(self):
            """As in transformers, which looks for it among the direct bases of a class."""
            self.assertTrue(issubclass(MODEL_CLASSES["causal_lm_class"], GenerationMixin))

    del CausalLMModelTest  # or pytest would collect it as well
    if test_of_base is not None:
        del test_of_base
else:

    class AttnResMixinsTester:
        """What the mixins ask of a model tester."""

        config_class = attnres.AttnResConfig

        def __init__(self):
            self.__dict__.update(MODEL_CLASSES, **_TEXT_MODEL_TESTER_DEFAULTS)
            self.head_dim = self.hidden_size // self.num_attention_heads

        def get_config(self) -> attnres.AttnResConfig:
            """The tests' tiny settings, as far as the base has fields for them."""
            known = inspect.signature(CONFIG_MAPPING[BASE]).parameters
            return attnres_config(
                CONFIG_MAPPING[BASE](**{name: getattr(self, name) for name in known if hasattr(self, name)})
            )

        def prepare_config_and_inputs_for_common(self):
            input_ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
            attention_mask = input_ids.new_ones(input_ids.shape).tril()
            return self.get_config(), {
                "input_ids": input_ids.to(torch_device),
                "attention_mask": attention_mask.to(torch_device),
            }

    class AttnResMixinsTest(
        ModelTesterMixin,
        GenerationTesterMixin,
        TrainingTesterMixin,
        tensor_parallel_mixin.TensorParallelTesterMixin,
        fsdp_mixin.FSDPTesterMixin,
        unittest.TestCase,
    ):
        all_model_classes = tuple(MODEL_CLASSES.values())

        def setUp(self):
            self.model_tester = AttnResMixinsTester()
