# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""`attnres demo`: a PreNorm checkpoint becomes an AttnRes one that computes the same, and is fine-tuned, on real text.

The text is the Python standard library's own source, which is on every machine, and for fine-tuning that of networkx,
which torch brings. Files are held out by their name, so that what the models are compared on was not trained on.
"""

import itertools
import json
import random
import shutil
import tempfile
import time
from pathlib import Path

import torch
import yaml
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import track
from rich.table import Table
from transformers import (
    AutoModelForCausalLM,
    Qwen3Config,
    TrainingArguments,
    set_seed,
)

from ..checkpoints.checkpoint import different_tensors, load_language_model, load_tokenizer, open_checkpoint
from ..conversion import convert, revert
from ..data.text import package_sources, standard_library, train_tokenizer, windows
from ..training import AttnResTrainer


PROMPTS = ["def main(", "import os\n", "class Error(Exception):\n    "]
CONTEXT = 64
HELD_OUT_WINDOWS = 128
console = Console()


def train_base_model(folder: Path, steps: int):
    """Train a small Qwen3 with its tokenizer on the standard library and save both as an ordinary checkpoint."""
    train, _ = standard_library()
    console.print(f"Training a tokenizer on {len(train)} files of the standard library ...")
    tokenizer = train_tokenizer(train)
    set_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    console.print(f"Training a Qwen3 of {model.num_parameters() / 1e6:.1f}M parameters for {steps} steps ...")
    arguments = TrainingArguments(
        output_dir=tempfile.gettempdir(),  # it saves nothing
        per_device_train_batch_size=16,
        max_steps=steps,
        learning_rate=1e-2,
        lr_scheduler_type="linear",
        warmup_steps=max(1, steps // 20),
        weight_decay=0.1,
        adam_beta2=0.95,
        logging_steps=max(1, steps // 8),
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        seed=0,
    )
    random.Random(0).shuffle(train)
    num_needed, texts = steps * 16 * CONTEXT, iter(train)
    ids = torch.empty(0, CONTEXT, dtype=torch.long)
    while ids.numel() < num_needed and (some := list(itertools.islice(texts, 50))):
        ids = torch.cat([ids, windows(tokenizer, some, CONTEXT)])
    rows = [{"input_ids": row, "labels": row} for row in ids]
    AttnResTrainer(model=model, args=arguments, train_dataset=rows).train()
    save(folder / "base", model, tokenizer)


def save(folder: Path, model, tokenizer):
    """Save beside, then rename: the folder is there with everything in it, or not at all."""
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


def write_benchmark(folder: Path, texts: list[str], questions: int = 200) -> Path:
    """Two tasks of lm-eval on held-out source, and a suite of them: which of four lines comes next, and perplexity.

    Returns:
        The path of the suite.
    """
    generator = random.Random(0)
    lines = [[line for line in text.splitlines() if line.strip()] for text in texts]
    lines = [file for file in lines if len(file) > 20]
    documents = []
    for _ in range(questions):
        file = generator.choice(lines)
        place = generator.randrange(4, len(file))
        options = [file[place], *(generator.choice(generator.choice(lines)) for _ in range(3))]
        order = generator.sample(range(4), 4)
        context, options = "\n".join(file[place - 4 : place]) + "\n", [options[i] for i in order]
        documents.append({"context": context, "options": options, "answer": order.index(0)})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "next_line.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    texts = [{"text": "\n".join(file[:20])} for file in lines]
    (folder / "text.jsonl").write_text("".join(json.dumps(document) + "\n" for document in texts))

    def write_task(name: str, **task):
        data_files = {"test": str((folder / f"{name}.jsonl").absolute())}
        shared = {"task": f"attnres_demo_{name}", "dataset_path": "json", "dataset_kwargs": {"data_files": data_files}}
        shared |= {"test_split": "test", "target_delimiter": "", "num_fewshot": 0}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({**shared, **task}))

    write_task(
        "next_line",
        output_type="multiple_choice",
        doc_to_text="{{context}}",
        doc_to_choice="{{options}}",
        doc_to_target="answer",
        metric_list=[{"metric": "acc_norm", "aggregation": "mean", "higher_is_better": True}],
    )
    write_task(
        "text",
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{text}}",
        metric_list=[{"metric": "byte_perplexity"}],
    )
    suite = [
        {"name": "next line", "tasks": ["attnres_demo_next_line"], "metric": "acc_norm"},
        {"name": "1 / byte perplexity", "tasks": ["attnres_demo_text"], "metric": "byte_perplexity"},
    ]
    (folder / "suite.yml").write_text(yaml.safe_dump(suite))
    return folder / "suite.yml"


def finetune_both(base: Path, converted: Path, folder: Path, steps: int) -> dict[str, list[float]]:
    """Train the PreNorm model and its conversion further on other text, at equal tokens, and draw both curves.

    Returns:
        Held-out losses of both, from before to after.
    """
    from ..training import finetune
    from ..training.curves import plot_curves

    texts = list(package_sources("networkx").values())[::8]  # more than these steps read
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    results = {}
    for name, model in (("PreNorm", base), ("AttnRes", converted)):
        fields = {
            "model": str(model),
            "dataset": str(folder / "text.jsonl"),
            "output_dir": str(folder / name.lower()),
            "mode": "full",
            "max_length": CONTEXT,
            "per_device_train_batch_size": 16,
            "max_steps": steps,
            "learning_rate": 1e-3,
            "weight_decay": 0.1,
            "lr_scheduler_type": "cosine",
            "logging_steps": max(1, steps // 10),
            "eval_steps": max(1, steps // 3),
            "save_strategy": "no",
            "report_to": "none",
            "use_cpu": True,
        }
        console.print(f"Fine-tuning the {name} model for {steps} steps on the source of networkx ...")
        results[name] = finetune(fields)
    plot_curves(
        {name: result.history for name, result in results.items()}, folder / "loss", "Fine-tuned on the same text"
    )
    return {name: result.losses for name, result in results.items()}


@torch.no_grad()
def held_out_loss(candidates: dict[str, torch.nn.Module], tokens: torch.Tensor) -> tuple[dict[str, float], float]:
    """Mean loss of each of two models over `tokens`, `[windows, length]`, and the largest difference of a logit."""
    losses, difference = dict.fromkeys(candidates, 0.0), 0.0
    for ids in track(tokens.split(16), description="Held-out loss", console=console):
        logits = []
        for name, model in candidates.items():
            output = model(ids, labels=ids)
            losses[name] += output.loss.item() * len(ids) / len(tokens)
            logits.append(output.logits)
        difference = max(difference, (logits[0] - logits[1]).abs().max().item())
    return losses, difference


def tokens_per_second(candidates: dict[str, torch.nn.Module], input_ids: torch.Tensor) -> dict[str, float]:
    """Greedy decoding speed, the fastest of 5 alternating runs of 64 tokens each."""
    fastest = dict.fromkeys(candidates, float("inf"))
    for _ in track(range(5), description="Decoding speed", console=console):
        for name, model in candidates.items():
            start = time.perf_counter()
            model.generate(input_ids, max_new_tokens=64, min_new_tokens=64, do_sample=False)
            fastest[name] = min(fastest[name], time.perf_counter() - start)
    return {name: 64 / seconds for name, seconds in fastest.items()}


def base_model(model: str | None, output: Path, steps: int) -> str | Path:
    """The checkpoint to convert: the one that is given, or that of the demo, which is trained if it is not there."""
    if model is not None:
        return model
    # Matrices are so small that a second thread is no faster, and on a busy machine the threads wait for each other:
    # with two of them a step of training then took ten times as long
    torch.set_num_threads(1)
    console.rule("A PreNorm model")
    if (output / "base").exists():
        console.print(f"Using the base model in {output / 'base'} (delete the folder to train it again).")
    else:
        train_base_model(output, steps)
    return output / "base"


def convert_and_revert(base: str | Path, output: Path, num_blocks: int):
    console.rule("Converted, and back")
    for name in ("attnres", "reverted"):
        if (output / name / "conversion_report.json").exists():  # of an earlier run
            shutil.rmtree(output / name)
    console.print(f"Converting {base} ...")
    report = convert(base, output / "attnres", num_blocks=num_blocks)
    console.print(Markdown(report.summary_in_markdown()))
    console.print(report.verdict)
    console.print("Reverting it ...")
    revert(output / "attnres", output / "reverted", verify=False)
    original, reverted = open_checkpoint(base), open_checkpoint(output / "reverted")
    if different_tensors(original, reverted):
        raise ValueError("The reverted checkpoint is not the one that was converted; please report this.")
    console.print(f"All {len(original.weight_map)} tensors of the base are back, bit for bit.")


def compare(base: str | Path, converted: Path, held_out: list[str]):
    """Print the loss, continuations and speed of both models.

    Raises:
        ValueError: if the AttnRes model computes something else.
    """
    console.rule("The same function")
    tokenizer = load_tokenizer(base)
    candidates = {
        "PreNorm": load_language_model(base, dtype=torch.float32),
        "AttnRes": load_language_model(converted, dtype=torch.float32),
    }
    losses, difference = held_out_loss(candidates, windows(tokenizer, held_out, CONTEXT)[:HELD_OUT_WINDOWS])
    console.print("Greedy continuations of the AttnRes model:")
    unchanged = 0
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        base_text, text = (
            tokenizer.decode(candidate.generate(**inputs, max_new_tokens=24, do_sample=False)[0])
            for candidate in candidates.values()
        )
        unchanged += text == base_text
        console.print(text, markup=False, style="cyan")
        console.print("---")
    speeds = tokens_per_second(candidates, inputs.input_ids)

    table = Table("", *candidates)
    table.add_row("held-out loss", *(f"{losses[name]:.6f}" for name in candidates))
    table.add_row("parameters", *(f"{candidate.num_parameters():,}" for candidate in candidates.values()))
    table.add_row("tokens/s, greedy", *(f"{speeds[name]:.1f}" for name in candidates))
    console.print(table)
    console.print("(A step of a small model is mostly Python; for a real shape see `attnres bench`.)")
    console.print(f"Largest difference of a logit: {difference:.1e} (fp32)")
    console.print(f"Greedy continuations unchanged: {unchanged} of {len(PROMPTS)}")
    if unchanged < len(PROMPTS) or abs(losses["PreNorm"] - losses["AttnRes"]) > 1e-4:
        raise ValueError("The AttnRes model does not compute what its base computes; please report this.")


def evaluate_both(base: str | Path, converted: Path, output: Path, held_out: list[str]):
    from ..eval import evaluate
    from ..eval.report import scores

    console.rule("The same scores, by `attnres eval` on held-out source")
    suite = write_benchmark(output / "benchmark", held_out)
    results = evaluate(
        [str(base), str(converted)],
        output / "eval",
        suite=suite,
        include_path=suite.parent,
        device="cpu",
        batch_size=16,
    )
    console.print(scores(results))


def shaded(weight: float) -> str:
    return f"[black on rgb({255 - int(200 * weight)},{255 - int(110 * weight)},255)] {weight:.2f} [/]"


def depth_weights(output: Path, held_out: list[str]):
    """Measure what the models read before and after fine-tuning, and print a heat map of the latter."""
    from ..inspection import inspect

    console.rule("What each read takes from where, after fine-tuning")
    inspect(
        [str(output / "attnres"), str(output / "finetuned/attnres/final")],
        output / "depth",
        text="\n".join(held_out),
        max_tokens=4096,
        length=CONTEXT,
        batch_size=16,
        device="cpu",
    )
    sites = json.loads((output / "depth/depth.json").read_text())["models"][-1]["sites"]
    sources = list(dict.fromkeys(source for site in sites for source in site["sources"] if source != "partial"))
    sources.append("partial")
    table = Table("read", *sources, box=None)
    for site in sites:
        name = site["kind"] if site["kind"] == "final" else f"{site['kind']} {site['layer']}"
        weights = dict(zip(site["sources"], site["weights"]))
        table.add_row(name, *(shaded(weights[source]) if source in weights else "" for source in sources))
    console.print(table)
    console.print(
        "Before fine-tuning, every read weighted its sources equally. Each row is one read, and adds up to 1."
    )


def run_demo(model: str | None, output: Path, num_blocks: int, steps: int) -> list[tuple[str, str | Path, str]]:
    """See `attnres demo --help`.

    Returns:
        What was written: its name, its path, and a remark or an empty string.
    """
    from .. import eval, inspection, training  # noqa: F401 parts with extras; a missing one shows before work starts

    if output.is_file():
        raise ValueError(f"`--output {output}` is a file; name a folder.")
    start = time.perf_counter()
    base, converted = base_model(model, output, steps), output / "attnres"
    convert_and_revert(base, output, num_blocks)
    _, held_out = standard_library()
    compare(base, converted, held_out)
    evaluate_both(base, converted, output, held_out)
    if model is None:
        shutil.rmtree(output / "finetuned", ignore_errors=True)
        console.rule("Both fine-tuned")
        finetuned = finetune_both(base, converted, output / "finetuned", steps=max(1, steps // 5))
        table = Table("held-out loss", *finetuned, title="Before and after fine-tuning")
        for i, label in ((0, "before"), (-1, "after")):
            table.add_row(label, *(f"{losses[i]:.4f}" for losses in finetuned.values()))
        console.print(table)
        console.print("(One short run of a tiny model. docs/results.md has a study with several seeds.)")
        depth_weights(output, held_out)

    console.rule(f"Done in {time.perf_counter() - start:.0f} s")
    written = [
        ("PreNorm checkpoint", base, ""),
        ("AttnRes checkpoint", converted, "with its report and model card"),
        ("Reverted checkpoint", output / "reverted", ""),
        ("Evaluation", output / "eval", "with its table and plot"),
    ]
    if model is None:
        written += [
            ("Fine-tuned checkpoints", output / "finetuned", "their curves are in loss.png"),
            ("Depth weights", output / "depth", "open index.html in a browser"),
        ]
    return written


def commands_to_try(output: Path) -> list[str]:
    converted = output / "attnres"
    return [
        f"attnres inspect {converted} --file your.txt -o {output / 'yours'}",
        f"attnres finetune laptop_cpu model={converted} dataset=your.jsonl",
        "attnres convert YOUR_MODEL your-attnres --num-blocks 8",
    ]
