# SPDX-License-Identifier: Apache-2.0
"""Does the measured learning rate of the depth queries hold from one width to another?

    python -m studies.query_rate.study run [--model FOLDER]    # makes what has no result yet
    python -m studies.query_rate.study report                  # the tables, from studies/query_rate/results.json

Small models of several widths and depths are trained for a short while on the standard library's source and converted;
a `--model` is an AttnRes checkpoint of your own. Each is fine-tuned on the source of networkx for 50 steps as
`attnres finetune` does by default, in every mode, and by its queries alone at constant rates, to see which are best.
"""

import json
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen3Config,
    Trainer,
    TrainingArguments,
    set_seed,
)

from attnres.conversion import convert
from attnres.data.text import package_sources, standard_library, train_tokenizer, windows
from attnres.training import finetune
from attnres.utils.files import write_file


RESULTS = Path(__file__).parent
# Width: layers, and steps of training before the conversion
SHAPES = {64: (12, 150), 128: (4, 150), 256: (6, 100), 512: (3, 80)}
CONSTANT_RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
LEARNING_RATES = {"queries": None, "lora": 2e-4, "full": 2e-5}  # those of training/configs
STEPS = 50
console = Console()
app = typer.Typer(add_completion=False, help=__doc__)


def make_model(work: Path, width: int) -> Path:
    """A Qwen3 with 16 rows of 64 tokens a step behind it, converted."""
    layers, steps = SHAPES[width]
    folder = work / f"{width}x{layers}"
    converted = folder.with_name(f"{folder.name}-attn")
    if converted.exists():
        return converted
    texts, _ = standard_library()
    if not (work / "tok").exists():
        train_tokenizer(texts).save_pretrained(work / "tok")
    tokenizer = AutoTokenizer.from_pretrained(work / "tok")
    set_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=width * 5 // 2,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 4,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    arguments = TrainingArguments(
        output_dir=tempfile.gettempdir(),  # it saves nothing
        per_device_train_batch_size=16,
        max_steps=steps,
        learning_rate=1e-2 * (64 / width) ** 0.5,
        lr_scheduler_type="linear",
        warmup_steps=steps // 10,
        weight_decay=0.1,
        adam_beta2=0.95,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        seed=0,
    )
    rows = [{"input_ids": ids, "labels": ids} for ids in windows(tokenizer, texts[::3], 64)]
    Trainer(model=model, args=arguments, train_dataset=rows).train()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    convert(folder, converted, verify=False)
    return converted


def write_texts(work: Path) -> dict[str, str]:
    """networkx to train on; every fourteenth file is held out, and an excerpt of it is evaluated on."""
    texts = list(package_sources("networkx").values())
    parts = {
        "dataset": [text for i, text in enumerate(texts) if i % 14],
        "eval_dataset": [text[len(text) // 3 :][:450] for text in texts[::14] if len(text) > 1500][:16],
    }
    files = {name: str(work / f"{name}.jsonl") for name in parts}
    for name, part in parts.items():
        write_file(Path(files[name]), "".join(json.dumps({"text": text}) + "\n" for text in part))
    return files


def runs() -> list[dict]:
    """What differs from run to run; the modes with the defaults first."""
    default = [{"mode": mode, "learning_rate": lr} for mode, lr in LEARNING_RATES.items()]
    other_seeds = [{"mode": "queries", "learning_rate": None, "seed": seed} for seed in (1, 2)]
    constant = [{"mode": "queries", "learning_rate": None, "query_learning_rate": rate} for rate in CONSTANT_RATES]
    return [{k: v for k, v in run.items() if v is not None} for run in default + constant + other_seeds]


def measured_in(entry: dict[str, float]) -> dict:
    line = {key.split("/")[1]: loss for key, loss in entry.items() if key.startswith("query_rate_loss/")}
    return {"measured": entry["query_learning_rate"], "line": line}


@app.command()
def run(
    model: Annotated[Path | None, typer.Option(help="An AttnRes checkpoint in place of the small models.")] = None,
    work: Annotated[Path, typer.Option(help="Folder for models and texts.")] = Path("query-rate-work"),
    results: Annotated[Path, typer.Option(help="Folder for the figures.")] = RESULTS,
    length: Annotated[int, typer.Option(help="Tokens of a row.")] = 64,
    batch_size: Annotated[int, typer.Option(help="Rows of a step.")] = 8,
    constant: Annotated[bool, typer.Option(help="Train at constant rates, too.")] = True,
):
    """Fine-tune what has no result yet."""
    torch.set_num_threads(1)
    work.mkdir(parents=True, exist_ok=True)
    texts = write_texts(work)
    path = results / "results.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    folders = [model] if model is not None else [make_model(work, width) for width in SHAPES]
    for changed in runs():
        for folder in folders:
            values = [value if key == "mode" else f"{key}={value:g}" for key, value in changed.items()]
            name = " ".join([folder.name, *values])
            if name in found or ("query_learning_rate" in changed and not constant):
                continue
            with tempfile.TemporaryDirectory() as output:
                fields = {**texts, **changed, "model": str(folder), "output_dir": output, "max_length": length}
                fields |= {"per_device_train_batch_size": batch_size, "max_steps": STEPS, "eval_steps": STEPS}
                fields |= {"logging_steps": STEPS, "save_strategy": "no", "report_to": "none", "use_cpu": True}
                result = finetune(fields)
            config = AutoConfig.from_pretrained(folder)
            found[name] = {
                "model": folder.name.removesuffix("-attn"),
                **{"width": config.hidden_size, "layers": config.num_hidden_layers, **changed},
                **{"tokens_per_step": length * batch_size, "losses": result.losses},
                **next((measured_in(entry) for entry in result.history if "query_learning_rate" in entry), {}),
            }
            write_file(path, json.dumps(found, indent=1) + "\n")
            console.print(f"{name}: {result.losses[0]:.4f} -> {result.losses[-1]:.4f}", highlight=False)


@app.command()
def report(results: Annotated[Path, typer.Option(help="Folder with the figures.")] = RESULTS):
    """Write table.md anew, from the results alone."""
    found = list(json.loads((results / "results.json").read_text()).values())
    models = {entry["model"]: entry for entry in sorted(found, key=lambda entry: entry["width"])}
    lines = [
        f"Held-out loss before and after {STEPS} steps with the default rates; the queries' rate as it was measured.",
        "",
        "| model | width | layers | tokens a step | measured rate | queries | lora | full |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for model, entry in models.items():
        default = [e for e in found if e["model"] == model and "query_learning_rate" not in e and "seed" not in e]
        losses = {e["mode"]: f"{e['losses'][0]:.4f} → {e['losses'][-1]:.4f}" for e in default}
        rates = sorted({e["measured"] for e in found if e["model"] == model and "measured" in e})
        cells = [model, entry["width"], entry["layers"], entry["tokens_per_step"], ", ".join(f"{r:g}" for r in rates)]
        cells += [losses.get(mode, "") for mode in LEARNING_RATES]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", "Queries alone, measured and at constant rates: change of the held-out loss.", ""]
    lines += [f"| model | measured | {' | '.join(f'{rate:g}' for rate in CONSTANT_RATES)} |", "|---" * 8 + "|"]
    for model in models:
        runs = [e for e in found if e["model"] == model and e["mode"] == "queries" and "seed" not in e]
        changes = {e.get("query_learning_rate"): f"{e['losses'][-1] - e['losses'][0]:+.4f}" for e in runs}
        lines.append(f"| {model} | {' | '.join(changes.get(rate, '') for rate in (None, *CONSTANT_RATES))} |")
    write_file(results / "table.md", "# The measured learning rate of the depth queries\n\n" + "\n".join(lines) + "\n")
    console.print("\n".join(lines), highlight=False)


if __name__ == "__main__":
    app()
