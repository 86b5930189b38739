# SPDX-License-Identifier: Apache-2.0
"""Exported with dynamic shapes, as transformers' exporters and torch do it, a model computes the same."""

import pytest
import torch
from rounding import UpToRounding
from test_gradients import READS, make_model
from torch import nn
from torch.export import Dim
from transformers.exporters.exporter_dynamo import DynamoConfig, DynamoExporter
from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter


def inputs(batch_size, length):
    """With padding on the left."""
    input_ids = torch.randint(3, 97, (batch_size, length))
    attention_mask = torch.ones_like(input_ids)
    attention_mask[0, :2] = 0
    return {"input_ids": input_ids, "attention_mask": attention_mask}


EXAMPLE = inputs(2, 7)
DYNAMIC = {name: {0: Dim.DYNAMIC, 1: Dim.DYNAMIC} for name in EXAMPLE}


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        return self.model(input_ids, attention_mask=attention_mask, use_cache=False).logits


def check(exported, model):
    """On other shapes than that of the example. What stands at a place of padding is of no use to anybody."""
    for batch_size, length in ((3, 11), (2, 5)):
        given = inputs(batch_size, length)
        is_token = given["attention_mask"].bool()
        with torch.no_grad():
            expected = UpToRounding(lambda given=given, at=is_token: Logits(model)(**given)[at], model=model)
        expected.check(torch.as_tensor(exported(**given))[is_token])


def by_onnx_exporter(model):
    pytest.importorskip("onnxruntime")
    exported = OnnxExporter().export(model, EXAMPLE, config=OnnxConfig(dynamic_shapes=DYNAMIC))
    return lambda **given: exported(**given)["logits"]


def by_torch_onnx(model):
    onnxruntime = pytest.importorskip("onnxruntime")
    program = torch.onnx.export(Logits(model), kwargs=EXAMPLE, dynamo=True, dynamic_shapes=DYNAMIC, verbose=False)
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    names = [value.name for value in session.get_inputs()]
    return lambda **given: session.run(None, {name: given[name].numpy() for name in names})[0]


def by_torch_export(model):
    program = DynamoExporter().export(model, EXAMPLE, config=DynamoConfig(dynamic_shapes=DYNAMIC))
    return lambda **given: program(**given)["logits"]


# With every change the read of most operations, by the cheapest way out
EXPORTS = (by_onnx_exporter, by_torch_onnx, by_torch_export)
CASES = [(by_torch_export, "heads")]
CASES += [
    pytest.param(export, read, marks=pytest.mark.slow)
    for export in EXPORTS
    for read in READS
    if (export, read) not in CASES
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("export, read", CASES)
def test_dynamic_shapes(export, read):
    model = make_model(num_hidden_layers=1, block_size=2, **READS[read]).eval()
    check(export(model), model)
