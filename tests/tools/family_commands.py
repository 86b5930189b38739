# SPDX-License-Identifier: Apache-2.0
"""Every supported type through the commands: `python tests/tools/family_commands.py RESULTS.json [model types]`.

A tiny base of each type with a tokenizer is converted, evaluated beside its base, fine-tuned for two steps with LoRA,
inspected, and exported and imported again. `tests/tools/families_page.py` makes columns of the results. A run that was
stopped goes on where it was.
"""

import contextlib
import functools
import json
import logging
import os
import re
import sys
import tempfile
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))


os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import yaml
from decoder_configs import decoder_config
from family_survey import native_model
from tiny_models import randomize_queries
from transformers import AutoModelForCausalLM, AutoTokenizer

from attnres.conversion import convert, export_checkpoint, import_checkpoint
from attnres.conversion.exchange import norm_eps
from attnres.data.text import read_sample, train_tokenizer
from attnres.eval import evaluate
from attnres.inspection import measure
from attnres.training import finetune


TASK = {
    "task": "family_choice",
    "dataset_path": "json",
    "output_type": "multiple_choice",
    "test_split": "test",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "answer",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}


def make_base(model_type: str, folder: Path):
    """Save a tiny base with random weights, and the tokenizer that its embedding fits."""
    tokenizer = train_tokenizer([read_sample()] * 3, vocab_size=400)
    config = decoder_config(model_type)
    vocabularies = {name: value for name, value in vars(config).items() if "vocab" in name and value == 99}
    config = decoder_config(model_type, **dict.fromkeys(vocabularies, len(tokenizer)))
    native_model(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@functools.cache
def tasks() -> str:
    """A folder with a task of three questions. lm-eval reads thousands of files for each folder: once is enough."""
    folder = Path(tempfile.mkdtemp())
    choices = [" return", " pass", " n"]
    rows = [{"question": f"def read(self, n{i}):", "choices": choices, "answer": i} for i in range(3)]
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {**TASK, "dataset_kwargs": {"data_files": {"test": str(folder / "test.jsonl")}}}
    (folder / "family_choice.yaml").write_text(yaml.safe_dump(task))
    module = sys.modules[evaluate.__module__]
    module.task_manager = functools.cache(module.task_manager)
    return str(folder)


def evaluated(folder: Path) -> str | None:
    """Whether answers and scores of conversion and base are the same."""
    models = [str(folder / "base"), str(folder / "attnres")]
    results = evaluate(
        models, folder / "eval", tasks=["family_choice"], include_path=tasks(), device="cpu", batch_size=2
    )
    (row,) = results["rows"]
    return None if row["scores"][0] == row["scores"][1] else f"scores {row['scores']}"


def finetuned(folder: Path) -> str | None:
    paragraphs = [text for text in read_sample().split("\n\n") if text.strip()]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in paragraphs * 10))
    result = finetune(
        {
            "model": str(folder / "attnres"),
            "dataset": str(folder / "text.jsonl"),
            "output_dir": str(folder / "lora"),
            "mode": "lora",
            "max_length": 16,
            "max_steps": 2,
            "per_device_train_batch_size": 2,
            "query_learning_rate": 1e-2,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "report_to": "none",
            "use_cpu": True,
        }
    )
    logged = [entry for entry in result.history if "query_norm" in entry and "loss" in entry]
    if not all(0 < entry["loss"] < 100 for entry in logged) or len(logged) != 2:
        return f"losses {[entry['loss'] for entry in logged]}"
    return None if logged[-1]["query_norm"] > 0 else "the queries did not move"


def inspected(folder: Path) -> str | None:
    """Without the pictures, which are the same for all."""
    model = AutoModelForCausalLM.from_pretrained(folder / "random").eval()
    windows = torch.randint(3, 90, (2, 16), generator=torch.Generator().manual_seed(0))
    sums = [sum(site.weights) for site in measure(model, windows, name="random", text="numbers").sites]
    return None if all(abs(total - 1) < 1e-3 for total in sums) else f"weights that sum up to {sums}"


def exchanged(folder: Path, naming: str) -> str | None:
    """There and back, with random queries: the same logits."""
    there, back = folder / f"{naming}-there", folder / f"{naming}-back"
    export_checkpoint(folder / "random", there, naming)
    import_checkpoint(there, back)
    ids = torch.arange(3, 14)[None]
    with torch.no_grad():
        ours, again = (
            AutoModelForCausalLM.from_pretrained(path).eval()(ids).logits for path in (folder / "random", back)
        )
    difference = ((ours - again).abs().max() / ours.abs().max()).item()
    return None if difference < 1e-4 else f"logits differ by {difference:.1e}"


def commands(model_type: str) -> dict[str, str | None]:
    """By command, `None` if it does what it should, or why not."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def attempt(command: str, run, *args):
            try:
                found[command] = run(folder, *args)
            except Exception as error:
                found[command] = f"{type(error).__name__}: {str(error)[:400]}".replace(name, "")

        make_base(model_type, folder / "base")
        convert(folder / "base", folder / "attnres", block_size=2, verify=False)
        model = AutoModelForCausalLM.from_pretrained(folder / "attnres")
        # The namings of others have no factor on a read and no epsilon of its own: so, there and back have to agree
        model.config.attn_res_scale_norm_eps = False
        with contextlib.suppress(ValueError):
            model.config.attn_res_norm_eps = norm_eps(model.config)
        torch.manual_seed(1)
        randomize_queries(model.base_model)
        model.save_pretrained(folder / "random")
        AutoTokenizer.from_pretrained(folder / "base").save_pretrained(folder / "random")
        attempt("evaluation", evaluated)
        attempt("fine-tuning", finetuned)
        attempt("inspection", inspected)
        for naming in ("kimi", "fla"):
            attempt(f"exchange, {naming}", exchanged, naming)
    return found


def main(path: str, *model_types: str):
    logging.disable(logging.WARNING)
    file = Path(path)
    results = json.loads(file.read_text()) if file.exists() else {}
    supported = json.loads((Path(__file__).parents[2] / "base/families.json").read_text())["supported"]
    for model_type in model_types or supported:
        if model_type in results and not model_types:
            continue
        with contextlib.redirect_stdout(None):
            try:
                results[model_type] = commands(model_type)
            except Exception as error:
                results[model_type] = {"made": f"{type(error).__name__}: {str(error)[:400]}"}
        file.write_text(json.dumps(results, indent=1))
        failed = {name: re.sub(r"\s+", " ", why)[:200] for name, why in results[model_type].items() if why}
        print(model_type, failed or "all", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
