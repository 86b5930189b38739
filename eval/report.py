# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""What a comparison leaves: `results.json`, `table.md` and a forest plot, all made from the saved samples alone.

`results.json` (schema 2) holds

- `models`: name and identity of every model (fingerprint of the folder or commit on the Hub, options, versions); the
  first one is the baseline;
- `rows`: per benchmark its definition, its tasks' versions, numbers of examples and settings of generation, the number
  of documents; per model `scores` ([score, standard error]), `cut_off` (how many answers reached the limit of length),
  `empty` (how many have nothing in them), `unusable` (how many programs had tests that could not be run, by reason),
  `bits_per_byte` (null of other metrics) and `runs` (by which commands, on what device, in which dtype);
  `comparisons` of every other model with the baseline, with `p_holm` corrected over all rows;
- `skipped`: benchmarks that were not run, with the reason.
"""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib
from huggingface_hub import EvalResult
from rich.table import Table


matplotlib.use("Agg")

from matplotlib import pyplot as plt

from ..utils.figures import COLOURS, write_figure
from ..utils.files import write_file
from ..utils.markup import escaped, figure_text, sentence
from ..utils.untrusted import parse_json, read_inside
from .benchmarks import Benchmark
from .models import EvalModel, EvalOptions
from .saved import Finished, ModelResults, output_folder, set_aside
from .statistics import compare, holm, score


SCHEMA = 2
NAMES = ("results.json", "table.md", "differences.png", "differences.svg")

# Scores of these are not lm-eval's figure itself: a document counts by how likely one of its words or bytes is
LIKELIHOODS = {
    "bits_per_byte": "2^-bits_per_byte",
    "byte_perplexity": "1/byte_perplexity",
    "word_perplexity": "1/word_perplexity",
    "perplexity": "1/perplexity",
}


def summarize(
    saved: list[ModelResults],
    benchmarks: list[Benchmark],
    finished: dict[str, list[Finished]],
    skipped: dict[str, str],
    options: EvalOptions,
) -> dict[str, Any]:
    """The content of `results.json`."""
    rows: list[dict[str, Any]] = []
    for benchmark in benchmarks:
        if benchmark.name not in finished:
            continue
        results = finished[benchmark.name]
        scores = [result.scores() for result in results]
        comparisons = [asdict(compare(scores[0], other, options.seed)) for other in scores[1:]]
        rows.append(
            {
                "benchmark": asdict(benchmark),
                "metric": results[0].metric,
                "filter": results[0].filter,
                "num_fewshot": results[0].num_fewshot,
                "task_versions": results[0].task_versions,
                "generation": results[0].generation,
                "num_documents": len(results[0].samples),
                "scores": [list(score(by_task)) for by_task in scores],
                "cut_off": [result.num_cut_off for result in results],
                "empty": [result.num_empty for result in results],
                "unusable": [result.unusable for result in results],
                "bits_per_byte": [result.bits_per_byte for result in results],
                "runs": [result.runs for result in results],
                "comparisons": comparisons,
            }
        )
    for i in range(len(saved) - 1):
        corrected = holm([row["comparisons"][i]["p_value"] for row in rows])
        for row, p_value in zip(rows, corrected):
            row["comparisons"][i]["p_holm"] = p_value
    return {
        "schema": SCHEMA,
        "models": [
            {"name": name, "identity": result.identity}
            for name, result in zip(model_names([result.model for result in saved]), saved)
        ],
        "rows": rows,
        "skipped": skipped,
    }


def model_names(models: list[EvalModel]) -> list[str]:
    """Names to show; where two are called the same, with their number."""
    names = [model.name for model in models]
    return [name if names.count(name) == 1 else f"{name} ({i})" for i, name in enumerate(names, start=1)]


def table(results: dict[str, Any]) -> str:
    """`table.md`: scores and differences, the paper's if a benchmark has them, and the settings."""
    lines = _columns(results) if results["rows"] else ["No benchmark was run."]
    lines += ["", *settings(results), *legend(results)] if results["rows"] else [""]
    lines += [f"- {sentence(figures)}" for figures in bits_per_byte(results)]
    lines += [f"- {sentence(warning)}" for warning in answer_warnings(results)]
    licenses = {row["benchmark"]["name"]: row["benchmark"].get("license") for row in results["rows"]}
    licenses = {name: license for name, license in licenses.items() if license is not None}
    lines += [f"- Licence of {sentence(name)}: {sentence(license)}" for name, license in licenses.items()]
    lines += [f"- {sentence(name)} was skipped: {sentence(reason)}" for name, reason in results["skipped"].items()]
    return "\n".join(lines) + "\n"


def _columns(results: dict[str, Any]) -> list[str]:
    """The table itself, line by line; a column in which nothing would be is left out."""
    names, rows = [model["name"] for model in results["models"]], results["rows"]
    shots = ["/".join(sorted({str(number) for number in row["num_fewshot"].values()})) for row in rows]
    columns: list[tuple[str, list]] = [
        ("benchmark", [row["benchmark"]["name"] for row in rows]),
        ("metric", [metric_name(row) for row in rows]),
        ("examples", shots if len(set(shots)) > 1 else []),
        ("documents", [row["num_documents"] for row in rows]),
    ]
    columns += [(name, [in_percent(*row["scores"][i]) for row in rows]) for i, name in enumerate(names)]
    for i, name in enumerate(names[1:]):
        comparisons = [row["comparisons"][i] for row in rows]
        columns.append((f"{name} - {names[0]}", [with_interval(comparison) for comparison in comparisons]))
        stars = [" *" if comparison["p_holm"] < 0.05 else "" for comparison in comparisons]
        p_values = [f"{comparison['p_value']:.2g}{star}" for comparison, star in zip(comparisons, stars)]
        columns.append(("p" if len(names) == 2 else f"p, {name}", p_values))
    papers = [row["benchmark"]["paper"] for row in rows]
    for i, kind in enumerate(("PreNorm", "AttnRes")):
        figures = ["" if paper is None else f"{paper[i]:.1f}" for paper in papers]
        columns.append((f"paper: {kind}", figures if any(figures) else []))
    columns = [(header, column) for header, column in columns if column]
    lines = [[header for header, _ in columns], *zip(*(column for _, column in columns))]
    lines = ["| " + " | ".join(map(escaped, cells)) + " |" for cells in lines]
    return [lines[0], "|---" * len(columns) + "|", *lines[1:]]


def metric_name(row: dict[str, Any]) -> str:
    """What the score of a row is: lm-eval's name, with its filter if the row has one."""
    metric, chosen = LIKELIHOODS.get(row["metric"], row["metric"]), row["filter"]
    return metric if chosen == "none" else f"{metric}, {chosen}"


def in_percent(score: float, error: float) -> str:
    """A score with its standard error, which a single document does not have."""
    return f"{100 * score:.1f}" + ("" if math.isnan(error) else f" ± {100 * error:.1f}")


def with_interval(comparison: dict[str, Any]) -> str:
    """A difference in percentage points, with its interval, which a single document does not have."""
    difference = f"{100 * comparison['difference']:+.1f}"
    low, high = comparison["interval"]
    return difference if math.isnan(low) else f"{difference} ({100 * low:+.1f} to {100 * high:+.1f})"


def settings(results: dict[str, Any]) -> list[str]:
    """How the scores came about, in a line."""
    identity = results["models"][0]["identity"]
    options, runs = identity["options"], [run for row in results["rows"] for of in row["runs"] for run in of]
    shots = {number for row in results["rows"] for number in row["num_fewshot"].values()}

    def each(name: str) -> str:
        return "/".join(dict.fromkeys(str(run[name]) for run in runs if run.get(name) is not None))

    limit, tokens = options["limit"], options["max_gen_toks"]
    parts = [
        "all documents" if limit is None else f"at most {limit} documents of a task",
        f"{shots.pop()} examples in the prompt" if len(shots) == 1 else "examples in the prompt as in the table",
        "prompts as conversations" if options["apply_chat_template"] else "",
        f"answers of at most {tokens} tokens" if tokens else "",
        f"{each('dtype')} on {each('hardware') or each('device')}" if runs else "",
        f"{options['processes']} processes" if options["processes"] > 1 else "",
        f"batch size {each('batch_size')}" if runs else "",
        f"seed {options['seed']}",
        *(f"{name} {version}" for name, version in identity["versions"].items()),
        f"Python {each('python')}" if runs else "",
    ]
    return [f"- Settings: {sentence(', '.join(filter(None, parts)))}"]


def legend(results: dict[str, Any]) -> list[str]:
    """What the columns mean that are there."""
    lines = ["- Scores are percentages, with standard errors"]
    if len(results["models"]) > 1:
        lines += [
            "- Differences are percentage points, with 95 % intervals of a paired bootstrap",
            "- p is that of McNemar's exact test if all scores are 0 or 1, otherwise of a paired permutation test",
            "- \\* marks p below 0.05 after Holm's correction over the rows",
        ]
    if any(row["benchmark"]["paper"] for row in results["rows"]):
        lines.append("- The paper's models have 48B parameters, and their numbers of examples are not known")
    if any(row["metric"] in LIKELIHOODS for row in results["rows"]):
        lines.append("- Likelihoods of text are means over documents, per word or byte, as the metric says")
    return lines


def answer_warnings(results: dict[str, Any]) -> list[str]:
    """Sentences about rows in which answers have reached the limit of their length, are empty, or are not judged."""
    names = [model["name"] for model in results["models"]]
    warnings = []
    for row in results["rows"]:
        of_each = f"(of {row['num_documents']} each)"
        counts = {
            kind: " and ".join(f"{count} of {name}" for count, name in zip(row.get(kind, []), names) if count)
            for kind in ("cut_off", "empty")
        }
        if counts["cut_off"]:
            limits = sorted({settings["max_gen_toks"] for settings in row["generation"].values()})
            warnings.append(
                f"{row['benchmark']['name']}: answers were cut off at {'/'.join(map(str, limits))} tokens,"
                f" {counts['cut_off']} {of_each}; `--max-gen-toks` allows longer ones"
            )
        if counts["empty"]:
            warnings.append(
                f"{row['benchmark']['name']}: answers are empty, {counts['empty']} {of_each}; a chat model may need"
                " `--apply-chat-template`"
            )
        for name, reasons in zip(names, row.get("unusable", [])):
            if reasons:
                warnings.append(
                    f"{row['benchmark']['name']}: tests could not be run for {sum(reasons.values())} programs of"
                    f" {name}, which count as wrong: {' '.join(list(reasons)[:3])}{' ...' * (len(reasons) > 3)}"
                )
    return warnings


def bits_per_byte(results: dict[str, Any]) -> list[str]:
    """Sentences about rows of texts, whose score is how likely a byte is: in bits, of all documents together."""
    names = [model["name"] for model in results["models"]]
    sentences = []
    for row in results["rows"]:
        figures = row.get("bits_per_byte") or [None]
        if None not in figures:
            listed = ", ".join(f"{figure:.4f} of {name}" for figure, name in zip(figures, names))
            sentences.append(f"{row['benchmark']['name']}, in bits per byte: {listed}")
    return sentences


def scores(results: dict[str, Any]) -> Table:
    """What fits a terminal of an evaluation; `table.md` has the rest."""
    names = [model["name"] for model in results["models"]]
    table = Table("", "metric", *names, *(f"{name} - {names[0]}" for name in names[1:]), title="Scores in percent")
    for row in results["rows"]:
        cells = [in_percent(*of_model) for of_model in row["scores"]]
        table.add_row(
            row["benchmark"]["name"], metric_name(row), *cells, *(with_interval(found) for found in row["comparisons"])
        )
    return table


def forest_plot(results: dict[str, Any], output: Path) -> list[Path]:
    """Differences to the baseline with their intervals, as PNG and SVG; nothing for one model alone."""
    names = [model["name"] for model in results["models"]]
    rows = results["rows"]
    if len(names) < 2 or not rows:
        return []
    figure, axes = plt.subplots(figsize=(7, 1.4 + 0.42 * len(rows)), layout="constrained")
    for i, name in enumerate(names[1:]):
        shift = 0.25 * (i - (len(names) - 2) / 2)
        for y, row in enumerate(rows):
            comparison = row["comparisons"][i]
            low, high = (100 * bound for bound in comparison["interval"])
            difference = 100 * comparison["difference"]
            colour = COLOURS[i % len(COLOURS)]
            axes.plot([low, high], [y + shift] * 2, color=colour, linewidth=1.8, solid_capstyle="butt")
            filled = colour if comparison["p_holm"] < 0.05 else "white"
            axes.plot(difference, y + shift, "o", color=colour, markerfacecolor=filled, markersize=6)
        axes.plot([], [], "o-", color=COLOURS[i % len(COLOURS)], linewidth=1.8, label=figure_text(name))
    papers = [(y, row["benchmark"]["paper"]) for y, row in enumerate(rows) if row["benchmark"]["paper"]]
    if papers:
        ys, differences = zip(*((y, after - before) for y, (before, after) in papers))
        axes.plot(differences, ys, "|", color="#555555", markersize=12, markeredgewidth=1.6, label="paper (48B)")
    axes.axvline(0, color="#999999", linewidth=1)
    # Zero in the middle, and differences of rounding look like none
    widest = max(1, *map(abs, axes.get_xlim()))
    axes.set_xlim(-widest, widest)
    labels = [figure_text(f"{row['benchmark']['name']} (n={row['num_documents']})") for row in rows]
    axes.set_yticks(range(len(rows)), labels)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(f"score minus that of {figure_text(names[0]).strip()}, percentage points, 95 % intervals")
    axes.grid(axis="x", alpha=0.25)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, title="filled: p < 0.05 after Holm's correction")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    paths = write_figure(figure, output / "differences")
    plt.close(figure)
    return paths


def write(results: dict[str, Any], output: Path) -> list[Path]:
    """Write all of it into a folder and return the paths."""
    write_file(output / "results.json", json.dumps(results, indent=2, default=list) + "\n")
    write_file(output / "table.md", table(results))
    return [output / "results.json", output / "table.md", *forest_plot(results, output)]


def model_index(folder: Path, name: str, fingerprint: str) -> list[EvalResult]:
    """What the Hub shows of an evaluation on the page of a model: an entry for each benchmark.

    Args:
        folder: of `attnres eval`.
        name: of the model there.
        fingerprint: of its folder.

    Raises:
        ValueError: if that model was not evaluated, or another one of its name.
    """
    results = read(folder)
    names = [model["name"] for model in results["models"]]
    if name not in names:
        raise ValueError(f"`{folder}` holds no evaluation of `{name}`, only of {', '.join(names)}.")
    index = names.index(name)
    if results["models"][index]["identity"]["model"].get("fingerprint") != fingerprint:
        raise ValueError(
            f"`{folder}` holds an evaluation of another `{name}`: its files have changed. Evaluate it again."
        )
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=row["benchmark"]["tasks"][0],
            dataset_name=f"{row['benchmark']['name']} ({max(row['num_fewshot'].values())}-shot)",
            metric_type=row["metric"],
            metric_value=_published(row, index),
        )
        for row in results["rows"]
        if _published(row, index) is not None
    ]


def _published(row: dict[str, Any], index: int) -> float | None:
    """The figure that the metric of a row names: a percentage, bits, or nothing of a perplexity, which is not kept."""
    if row["metric"] == "bits_per_byte":
        return round(row["bits_per_byte"][index], 4)
    return None if row["metric"] in LIKELIHOODS else round(100 * row["scores"][index][0], 2)


def read(folder: Path) -> dict[str, Any]:
    """The `results.json` in a folder.

    Raises:
        ValueError: if there is none, or it is damaged, of another schema or somebody else's.
    """
    path = folder / "results.json"
    content = read_inside(folder, path.name)
    if content is None:
        raise ValueError(f"`{folder}` holds no results.json; `attnres eval` writes one.")
    try:
        results = parse_json(content, f"`{path}`")
        schema = results.get("schema")
        if schema == SCHEMA:
            table(results)  # which needs most of it
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"`{path}` is damaged ({reason}); `attnres eval` writes it again from the samples.") from None
    if schema is None:
        raise ValueError(f"`{path}` is not from `attnres eval`.")
    if schema != SCHEMA:
        raise ValueError(f"`{path}` has schema {schema!r}, this version reads {SCHEMA}: run `attnres eval` again.")
    return results


def keep_what_is_not_ours(folder: Path):
    """Rename what has the name of a file that is written here, and is damaged, of another version or not ours."""
    try:
        read(folder)
    except ValueError as error:
        if (folder / "results.json").exists():
            set_aside(folder / "results.json", str(error))
        if not any(path.is_dir() for path in (folder / "models").iterdir()):
            for path in filter(Path.exists, (folder / name for name in NAMES)):
                set_aside(path, f"`{path}` is not from `attnres eval`.")


def rebuild(folder: Path) -> list[Path]:
    """Write tables and plots again from the `results.json` in a folder; errors as for `read`."""
    results = read(folder)
    with output_folder(folder):
        return write(results, folder)
