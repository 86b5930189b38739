# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""One page of what `real.py` has measured, as Markdown and HTML, from its JSON alone."""

import json
from pathlib import Path
from typing import Any

import jinja2
from markdown_it import MarkdownIt

from attnres.utils.files import write_file


HERE = Path(__file__).parent
RESULTS = HERE
STYLE = """
body{font:16px/1.5 sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;display:block;overflow-x:auto}
td,th{border-bottom:1px solid #ccc;padding:.2rem .8rem;text-align:left}
img{max-width:100%}pre{overflow:auto;background:#f5f5f5;padding:.5rem}
@media(prefers-color-scheme:dark){body{background:#111;color:#ddd}pre{background:#222}}
"""


def write_page(folder: Path) -> list[Path]:
    """Write `real.md` and `real.html` from `real.json`, which may be of an unfinished run.

    Raises:
        ValueError: if there is none.
    """
    if not (folder / "real.json").exists():
        raise ValueError(f"`{folder}` holds no real.json.")
    text = render(json.loads((folder / "real.json").read_text()))
    write_file(folder / "real.md", text)
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    head = "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
    head += f"<title>A real model</title><style>{STYLE}</style>"
    write_file(folder / "real.html", f"{head}<body>\n{body}</body></html>\n")
    return [folder / "real.md", folder / "real.html"]


def docs_page() -> str:
    """The page of the docs: of the run that was published, and of what was asked in full so far."""
    found = {
        name: json.loads((RESULTS / f"{name}.json").read_text())
        for name in ("real", "humaneval", "questions", "prompts")
        if (RESULTS / f"{name}.json").exists()
    }
    return render(found.pop("real"), "../studies/real_model/weights.png", "results.md", found)


def render(
    results: dict[str, Any],
    picture: str = "inspection/weights.png",
    results_page: str = "docs/results.md",
    in_full: dict[str, dict[str, Any]] | None = None,
) -> str:
    """The page as Markdown, with the paths of a picture and of another page in it.

    Args:
        in_full: `humaneval`, `questions` and `prompts`, as `real_humaneval.py` and `real_full.py` have written them.
    """
    steps = results["steps"]
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=False)
    environment.globals |= {
        "commands": lambda name: "```text\n" + "\n".join(steps[name]["commands"]) + "\n```",
        "interval": _interval,
        "losses": lambda figures: [f"{figures['losses'][place]:.4f}" for place in (0, -1)],
        "partings": _partings,
        "scores": lambda row: [f"{100 * score:.1f} ± {100 * error:.1f}" for score, error in row["scores"]],
    }
    modes = steps["Retention"]["modes"] if "Retention" in steps else {}
    variants, speed = _speed(steps["Speed"]["dtypes"]) if "Speed" in steps else ([], [])
    text = environment.from_string((HERE / "page.md.jinja").read_text(encoding="utf-8")).render(
        title=results["settings"]["model"],
        settings=results["settings"],
        machine=results["machine"],
        steps=steps,
        total=sum(step["seconds"] for step in steps.values()),
        retained=[row["name"] for row in next(iter(modes.values()), [])],
        variants=variants,
        speed=speed,
        picture=picture,
        results_page=results_page,
        in_full=in_full or {},
    )
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def _partings(partings: list[dict[str, Any]]) -> str:
    """Where, by how much the two tokens differ in each model, and how far the models' logits lie apart there."""
    if not partings:
        return "nowhere"
    if len(partings) > 3:
        close = [parting for parting in partings if parting["margins"]]
        text = f"{len(partings)} answers"
        if close:
            margin = max(max(map(abs, parting["margins"])) for parting in close)
            text += f", where logits of the two tokens differ by at most {margin:.2g}, those of the models by up to"
            text += f" {max(parting['largest_difference'] for parting in close):.2g}"
        ending = len(partings) - len(close)
        return text + (f"; {ending} of them end in one model alone" if ending else "")
    return "; ".join(
        f"token {parting['place']}: logits of the two tokens differ by {abs(parting['margins'][0]):.1g} and"
        f" {abs(parting['margins'][1]):.1g}, those of the models by up to {parting['largest_difference']:.1g}"
        if parting["margins"]
        else f"token {parting['place']}: one of them ends"
        for parting in partings
    )


def _interval(comparison: dict[str, Any]) -> str:
    low, high = comparison["interval"]
    return f"{100 * comparison['difference']:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"


def _speed(dtypes: dict[str, Any]) -> tuple[list[str], list[dict[str, Any]]]:
    """Names of the variants, and rows of the table: times by dtype and case, and peak memory."""
    rows, variants = [], []
    for dtype, results in dtypes.items():
        for case in dict.fromkeys(record["case"] for record in results["time"]):
            of_case = {record["model"]: record for record in results["time"] if record["case"] == case}
            twin = of_case.pop("PreNorm")
            variants = list(of_case)
            cells = [
                "**{fastest_ratio:.3f}**; {median_ratio:.3f} ({low:.3f} to {high:.3f})".format(
                    **record, low=record["quartiles"][0], high=record["quartiles"][1]
                )
                for record in of_case.values()
            ]
            speed = f"{twin['tokens_per_second']:,.1f} tokens/s"
            rows.append({"label": f"{case}, {dtype}", "twin": speed, "cells": cells})
        for case in dict.fromkeys(record["case"] for record in results["peaks"]):
            of_case = {record["model"]: record["bytes"] for record in results["peaks"] if record["case"] == case}
            twin_bytes = of_case.pop("PreNorm")
            if twin_bytes and twin_bytes > 2**20:
                cells = [f"**{size / twin_bytes:.2f}**; {size / 2**20:,.0f} MiB" for size in of_case.values()]
                label = f"{case}, {dtype}, peak memory"
                rows.append({"label": label, "twin": f"{twin_bytes / 2**20:,.0f} MiB", "cells": cells})
    return variants, rows
