# SPDX-License-Identifier: Apache-2.0
"""The measure of rounding that other tests rely on: it lets rounding pass, and no fault."""

import pytest
import torch
from rounding import UpToRounding, all_in_fp64
from tiny_models import tiny_base_model


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_another_order_of_summation(dtype):
    values = torch.randn(64, 100).to(dtype)
    expected = UpToRounding(lambda values: values.double().sum(-1).to(dtype), values)
    in_steps = values[:, 0]
    for column in values.flip(-1).unbind(-1)[:-1]:
        in_steps = (in_steps.double() + column.double()).to(torch.promote_types(dtype, torch.float32))
    expected.check(in_steps.to(dtype))
    with pytest.raises(AssertionError, match="is off by"):
        expected.check(values[:, 1:].double().sum(-1).to(dtype))


def test_faults_of_a_model(input_ids):
    model = tiny_base_model("llama")
    with torch.no_grad():
        expected = UpToRounding(lambda: model(input_ids).logits, model=model)
        expected.check(model(input_ids).logits)
        model.model.layers[0].input_layernorm.variance_epsilon *= 10
        with pytest.raises(AssertionError, match="is off by"):
            expected.check(model(input_ids).logits)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_what_is_all_rounding_is_refused():
    with pytest.raises(AssertionError, match="too badly conditioned"):
        UpToRounding(lambda values: (1e5 * values).sin(), torch.randn(64))


def test_zeros_are_exact():
    expected = UpToRounding(lambda values: 0 * values, torch.ones(3))
    expected.check(torch.zeros(3))
    for wrong in (torch.full((3,), 1e-30), torch.full((3,), torch.nan)):
        with pytest.raises(AssertionError, match="is off by"):
            expected.check(wrong)


def test_all_in_fp64(input_ids):
    """Nothing in between is in fp32, and afterwards all is as before."""
    with all_in_fp64():
        model, seen = tiny_base_model("qwen3_next").double(), set()
        model.set_experts_implementation("eager")
        for module in model.modules():
            module.register_forward_hook(lambda module, args, output: seen.add(getattr(output, "dtype", None)))
        model(input_ids)
    assert torch.float64 in seen and not seen & {torch.float32, torch.bfloat16}
    assert torch.get_default_dtype() == torch.ones(1).float().dtype == torch.float32 != torch.float64
