# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The study: its table and figures come from its committed results, and its variant of the model is what it says."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rounding import all_in_fp64, wide
from tiny_models import convert, randomize_queries, reference_hidden_states, tiny_base_model

from studies.common.arms import RECENCY_BIAS, add_recency_bias


ROOT = Path(__file__).parents[1]
STUDY = ROOT / "studies/small_model"


@pytest.mark.slow
def test_report_rebuilds(tmp_path):
    shutil.copytree(STUDY, tmp_path / "study")
    for name in ("table.md", "differences.png"):
        (tmp_path / "study" / name).unlink()
    command = [sys.executable, "-m", "studies.small_model.study", "report", "--results", str(tmp_path / "study")]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    assert (tmp_path / "study/table.md").read_text() == (STUDY / "table.md").read_text()
    assert (tmp_path / "study/differences.png").exists() and (tmp_path / "study/differences.svg").exists()


@pytest.mark.parametrize("block_size, exact", [(1, False), (3, True)])
def test_recency_bias(block_size, exact, monkeypatch, input_ids):
    """In training, in inference and in generation, against the definition with one score changed."""

    def biased(query, sources, eps):
        values = torch.stack(sources, dim=-2)
        scores = (values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps) * query).sum(-1)
        scores = torch.cat([scores[..., :-1], scores[..., -1:] + RECENCY_BIAS], dim=-1)
        weights = scores.softmax(-1)
        return (weights[..., None] * values).sum(-2), weights

    monkeypatch.setattr("tiny_models.depth_attention_reference", biased)
    with all_in_fp64():
        model = wide(randomize_queries(convert(tiny_base_model("qwen3"), block_size, exact=exact)))
        unbiased = model(input_ids).logits
        add_recency_bias(model)
        hidden_states, weights = reference_hidden_states(model.model, input_ids)
        expected = model.lm_head(hidden_states)
        outputs = model(input_ids, output_depth_attentions=True)
        torch.testing.assert_close(outputs.logits, expected)
        torch.testing.assert_close(outputs.depth_attentions, tuple(weights))
        assert (unbiased - expected).abs().max() > 1e-3
        with torch.no_grad():
            torch.testing.assert_close(model(input_ids).logits, expected)
        queries = model.model.depth_queries.query
        gradients = [torch.autograd.grad(logits.square().sum(), queries)[0] for logits in (outputs.logits, expected)]
        torch.testing.assert_close(*gradients)
        generated = model.generate(
            input_ids, max_new_tokens=3, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        logits = model.lm_head(reference_hidden_states(model.model, generated.sequences[:, :-1])[0])
        torch.testing.assert_close(torch.stack(generated.logits, dim=1), logits[:, -3:])
