# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""All questions of three benchmarks and a hundred prompts, of which `run.py` asks a part: a model and its conversion.

    python -m studies.real_model.all_questions questions BASE CONVERTED WORK    # hours of one core
    python -m studies.real_model.all_questions prompts BASE CONVERTED           # 40 minutes

Both write to `studies/real_model`, and `studies.real_model.run publish` puts what is there on the page of the docs.
`questions` goes on from where it was interrupted, as `attnres eval` does.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from attnres.utils.files import write_file
from attnres.utils.timing import machine
from studies.real_model.prompts import compare_answers


RESULTS = Path(__file__).parent
SETS = ("quartz", "medmcqa", "logiqa")
app = typer.Typer(add_completion=False, help=__doc__)


def differences(folder: Path) -> dict[str, Any]:
    """How far apart the two models' log-likelihoods of a choice are, and each question that they answer differently.

    Args:
        folder: of an evaluation of two models on one benchmark.
    """
    names = [model["name"] for model in json.loads((folder / "results.json").read_text())["models"]]
    samples = []
    for name in names:
        (path,) = (folder / "models").glob(f"{name}-*/*.jsonl")
        samples.append([json.loads(line) for line in path.read_text().splitlines()])
    largest, choices, otherwise = 0.0, 0, []
    for pair in zip(*samples, strict=True):
        both = [[float(answer[0][0]) for answer in sample["resps"]] for sample in pair]
        choices += len(both[0])
        largest = max(largest, *(abs(first - second) for first, second in zip(*both, strict=True)))
        if pair[0]["score"] != pair[1]["score"]:
            otherwise.append({"doc_id": pair[0]["doc_id"], "log_likelihoods": both})
    return {"choices": choices, "largest_difference": largest, "answered_otherwise": otherwise}


def figures(folder: Path) -> dict[str, Any]:
    """Of one set: scores, their difference with its interval, and how far the two models are apart."""
    (row,) = json.loads((folder / "results.json").read_text())["rows"]
    (comparison,) = row["comparisons"]
    return {
        **{field: row[field] for field in ("metric", "num_documents", "scores")},
        **{field: comparison[field] for field in ("difference", "interval")},
        **differences(folder),
    }


@app.command()
def questions(
    base: Path,
    converted: Path,
    work: Path,
    sets: Annotated[
        list[str] | None, typer.Option("--set", help="Of this one, and others keep their figures. [default: all]")
    ] = None,
    batch_size: int = 8,
):
    """Evaluate both on every question, one set after the other."""
    path = RESULTS / "questions.json"
    found = {row["name"]: row for row in json.loads(path.read_text())["sets"]} if path.exists() else {}
    for name in sets or ():
        if name not in SETS:
            raise typer.BadParameter(f"--set is {name!r}, and the sets are {', '.join(SETS)}.")
    for name in sets or SETS:
        folder = work / name
        options = ["--tasks", f"attnres_offline_{name}", "--batch-size", str(batch_size), "--dtype", "float32"]
        command = [str(Path(sys.executable).with_name("attnres")), "eval", str(base), str(converted), *options]
        subprocess.run([*command, "-o", str(folder)], check=True)
        found[name] = {
            "name": name,
            "command": f"python -m studies.real_model.all_questions questions BASE CONVERTED WORK --set {name}",
            "machine": machine("cpu"),
            **figures(folder),
        }
        write_file(path, json.dumps({"sets": [found[name] for name in SETS if name in found]}, indent=1) + "\n")
    print(f"Wrote {path}")


@app.command()
def prompts(
    base: Path,
    converted: Path,
    number: Annotated[int, typer.Option(min=1)] = 100,
    tokens: Annotated[int, typer.Option(min=1, help="Of each answer.")] = 128,
):
    """Compare the answers of both to questions and problems, token by token."""
    results = {
        "command": "python -m studies.real_model.all_questions prompts BASE CONVERTED"
        f" --number {number} --tokens {tokens}",
        "machine": machine("cpu"),
        **compare_answers(base, converted, number, tokens),
    }
    write_file(RESULTS / "prompts.json", json.dumps(results, indent=1) + "\n")
    print(f"Wrote {RESULTS / 'prompts.json'}")


if __name__ == "__main__":
    app()
