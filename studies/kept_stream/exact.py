# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""A real pretrained model converted with a kept stream: what it computes, and what it answers.

    python -m studies.kept_stream.exact    # writes exact.json and exact.md

With the models and the prompts of studies/retrofit and studies/real_model.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from attnres.conversion import VerificationReport, verify
from attnres.utils.files import write_file
from attnres.utils.timing import machine
from studies.kept_stream.retrofit import prepare_kept
from studies.real_model.prompts import compare_answers


RESULTS = Path(__file__).parent
NUM_PROMPTS, NUM_TOKENS = 20, 64
console = Console()
app = typer.Typer(add_completion=False, help=__doc__)


def page(report: VerificationReport, answers: dict[str, Any], on: dict[str, Any]) -> str:
    """exact.md: the two models on a text, and their answers."""
    lines = [
        "# A real model converted with a kept stream",
        "",
        "SmolLM2-135M-Instruct with 8 blocks and `attn_res_stream: kept`, compared with its base"
        " (`python -m studies.kept_stream.exact`).",
        "",
        report.to_markdown().strip(),
        "",
        f"Greedy answers of {answers['tokens']} tokens, compared with those of the base:",
        "",
        "| mode | equal |",
        "|---|---|",
        *(f"| {mode} | {found['equal']} of {found['compared']} |" for mode, found in answers["modes"].items()),
        "",
    ]
    for mode, found in answers["modes"].items():
        for parting in found["partings"]:
            if parting["margins"] is not None:
                base, converted = (f"{abs(margin):.1e}" for margin in parting["margins"])
                lines += [
                    f"In {mode}, the answers to prompt {parting['prompt']} differ from token {parting['place']} on."
                    f" The logits of the two candidates are {base} apart in one model and {converted} in the other,"
                    f" and the logits of the models differ by up to {parting['largest_difference']:.1e}.",
                    "",
                ]
    return "\n".join([*lines, f"{on['processor']}, {on['threads']} threads, commit {on['commit']}."]) + "\n"


@app.command()
def run(work: Annotated[Path, typer.Option(help="Folder for the models.")] = Path("retrofit-work")):
    """Compare the converted model with its base, and write the figures and the page."""
    prepare_kept(work)
    report = verify(work / "base", work / "kept")
    answers = compare_answers(work / "base", work / "kept", NUM_PROMPTS, NUM_TOKENS)
    found = {"machine": machine("cpu"), "verification": report.to_dict(), "answers": answers}
    write_file(RESULTS / "exact.json", json.dumps(found, indent=1) + "\n")
    write_file(RESULTS / "exact.md", page(report, answers, found["machine"]))
    console.print((RESULTS / "exact.md").read_text(encoding="utf-8"), markup=False, highlight=False)


if __name__ == "__main__":
    app()
