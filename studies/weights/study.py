# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""What the weights over depth mean: do they tell what a source is worth, when do patterns show, how alike are outputs.

    python -m studies.weights.study run      # an hour on one thread; interrupted, it goes on
    python -m studies.weights.study rates    # each at the rate of the others, for the likeness of outputs
    python -m studies.weights.study several  # several sublayers left out at once, a minute or two
    python -m studies.weights.study report   # table.md and figures from what lies in studies/weights

What is measured, and how, was written down first: studies/weights/protocol.md.
"""

import random
import statistics
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
import typer
from rich.console import Console
from rich.progress import track
from scipy import stats
from transformers import AutoModelForCausalLM, TrainerCallback

from attnres.depth.definition import mix_by_definition
from attnres.depth.recorder import DepthRecorder
from attnres.inspection import ablate, measure
from attnres.inspection.effects import summed_loss
from attnres.inspection.measure import evaluation_mode, run_recorded
from attnres.utils.figures import COLOURS, finish_axis, write_figure
from attnres.utils.files import append_json, write_file
from studies.common.arms import Results, Work, prepare, rows_of
from studies.common.comparison_reads import with_read
from studies.common.paired import corrected_p, interval
from studies.common.runs import SEEDS, Run, read_runs
from studies.reads.study import RESULTS as READ_STUDY
from studies.reads.study import STEPS, train
from studies.weights.small_model import findings


RESULTS = Path(__file__).parent
RATES = {"prenorm": 4e-3, "blocks": 1.6e-2, "full": 1.6e-2}
OTHER_RATES, SEEDS_OF_OTHER_RATES = {"prenorm": 1.6e-2, "blocks": 4e-3}, range(3)
LABELS = {"prenorm": "PreNorm", "blocks": "8 blocks", "full": "Full"}
STYLES = {"prenorm": (COLOURS[6], ":"), "blocks": (COLOURS[0], "-"), "full": (COLOURS[1], "--")}
NUM_SITES = 25  # of 12 layers: two sublayers each, and the final norm
EARLY = (50, 100, 200, 500)
WINDOWS = 24
COUNTS = (1, 2, 3, 4, 6, 8, 12)  # of sublayers that are left out at once
ORDERS = {"read": "least read first", "cost": "cheapest first", "random": "at random"}
RANDOM_DRAWS = 10
PREDICTORS = {"weight": "weight", "contribution": "weight times size"}
PATTERNS = {  # each 1 for a uniform read
    "newest": "weight of the newest source",
    "embedding": "weight of the embedding",
    "relative_entropy": "entropy of the weights",
}
console = Console()
app = typer.Typer(add_completion=False, help=__doc__)


class PatternsInTraining(TrainerCallback):
    """Keeps the patterns of a model at some steps of its training."""

    def __init__(self, windows: torch.Tensor):
        self.windows = windows
        self.patterns: dict[int, dict[str, dict[str, float]]] = {}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step in EARLY:
            self.patterns[state.global_step] = patterns_of(model, self.windows)


def patterns_of(model, windows: torch.Tensor) -> dict[str, dict[str, float]]:
    return findings([asdict(site) for site in measure(model, windows, batch_size=len(windows), progress=False).sites])


def sources_and_reads(model, windows: torch.Tensor) -> tuple[list[list[torch.Tensor]], list[torch.Tensor], list]:
    """By site the sources and what is read, and by sublayer its output; tensors of `[tokens, hidden]`.

    PreNorm is the AttnRes model of one block and zero queries.
    """
    recorder = DepthRecorder()
    with evaluation_mode(model), torch.no_grad():
        run_recorded(model, windows, recorder, NUM_SITES)
        embedding = model.get_input_embeddings()(windows)
    block_size = model.config.attn_res_block_size if model.config.model_type == "attnres" else NUM_SITES
    outputs = [recorder.outputs[site] for site in range(NUM_SITES - 1)]  # type: ignore[index]
    sources, reads = [], []
    for site in range(NUM_SITES):
        blocks = [sum(outputs[i : min(i + block_size, site)]) for i in range(0, site, block_size)]
        sources.append([embedding, *blocks])
        reads.append(mix_by_definition(recorder.weights[site], sources[-1]).flatten(0, 1))
    return [[s.flatten(0, 1) for s in of_site] for of_site in sources], reads, [o.flatten(0, 1) for o in outputs]


def effective_rank(hidden: torch.Tensor) -> float:
    """`exp` of the entropy of the normalised eigenvalues of the covariance over tokens, of `[tokens, hidden]`."""
    spectrum = torch.linalg.eigvalsh(hidden.double().T.cov()).clamp_min(0)
    return torch.special.entr(spectrum / spectrum.sum()).sum().exp().item()


def likeness(outputs: list[torch.Tensor]) -> list[float]:
    """The mean cosine of each sublayer's output and that of the next sublayer of its kind, less their means."""
    centred = [output - output.mean(0) for output in outputs]
    return [torch.cosine_similarity(a, b, dim=-1).mean().item() for a, b in zip(centred, centred[2:])]


def root_mean_square(hidden: torch.Tensor) -> float:
    return hidden.double().square().mean().sqrt().item()


@torch.no_grad()
def left_out(model, windows: torch.Tensor) -> list[float]:
    """Of a Full model, by sublayer, the rise of the loss when no later site reads its output, in nats per token."""

    def mean_loss(masked: dict[int, int]) -> float:
        with evaluation_mode(model):
            total = summed_loss(model, windows, DepthRecorder(masked_source=masked), NUM_SITES).item()
        return total / windows[:, 1:].numel()

    unchanged = mean_loss({})
    sublayers = track(range(NUM_SITES - 1), description="Leaving sublayers out")
    # The first source is the embedding, so the output of sublayer i is source i + 1 of every later site
    return [mean_loss(dict.fromkeys(range(i + 1, NUM_SITES), i + 1)) - unchanged for i in sublayers]


@torch.no_grad()
def loss_without(model, windows: torch.Tensor, sublayers: list[int]) -> float:
    """The mean loss of a Full model of which no site reads these, or of a PreNorm one to which they add nothing."""
    with ExitStack() as undo, evaluation_mode(model):
        if model.config.model_type == "attnres":
            # The first source is the embedding
            with_read(model, "without", left_out=tuple(i + 1 for i in sublayers))
            undo.callback(delattr, model.base_model, "start_stream")
        else:
            modules = [part for layer in model.model.layers for part in (layer.self_attn, layer.mlp)]
            for i in sublayers:
                undo.enter_context(modules[i].register_forward_hook(write_nothing))
        return summed_loss(model, windows, DepthRecorder(), NUM_SITES).item() / windows[:, 1:].numel()


def write_nothing(module, args, output):
    """In place of what attention, with its weights beside it, or an MLP writes."""
    return (torch.zeros_like(output[0]), *output[1:]) if isinstance(output, tuple) else torch.zeros_like(output)


def left_out_at_once(model, windows: torch.Tensor, orders: dict[str, list[list[int]]]) -> dict[str, list[float]]:
    """By order, the rise of the loss without the first of its sublayers, by the entries of `COUNTS`.

    An order is a list of draws, over which the rise is averaged.
    """
    unchanged, rises = loss_without(model, windows, []), {}
    for name, draws in orders.items():
        counts = track(COUNTS, description=f"Leaving several out, {name}")
        losses = [statistics.mean(loss_without(model, windows, draw[:count]) for draw in draws) for count in counts]
        rises[name] = [loss - unchanged for loss in losses]
    return rises


def analyse(arm: str, model, windows: torch.Tensor) -> dict[str, Any]:
    """The measures of a trained model."""
    with torch.no_grad():
        sources, reads, outputs = sources_and_reads(model, windows)
        figures: dict[str, Any] = {
            "likeness": likeness(outputs),
            "effective_rank": [effective_rank(read) for read in reads],
        }
    if arm == "prenorm":
        return figures
    weights = [site.weights for site in measure(model, windows, batch_size=len(windows)).sites]
    sizes = [[root_mean_square(source) / root_mean_square(read) for source in of] for of, read in zip(sources, reads)]
    figures |= {
        "weight": weights,
        "contribution": [[w * size for w, size in zip(*of_site)] for of_site in zip(weights, sizes)],
        "masking_cost": ablate(model, windows, name=LABELS[arm], batch_size=len(windows)),
        "final_patterns": patterns_of(model, windows),
    }
    return figures | {"left_out": left_out(model, windows)} if arm == "full" else figures


def rounded(figures: Any) -> Any:
    if isinstance(figures, dict):
        return {key: rounded(value) for key, value in figures.items()}
    if isinstance(figures, (list, tuple)):
        return [rounded(value) for value in figures]
    return float(f"{figures:.6g}") if isinstance(figures, float) else figures


@app.command("run")
def run_all(work: Work = Path("study-work"), results: Results = RESULTS):
    """Train and measure what has no result yet, on one thread."""
    _run(work, results / "runs.jsonl", [Run(arm, seed, STEPS, rate) for seed in SEEDS for arm, rate in RATES.items()])
    console.print(f"All runs are in {results}/runs.jsonl; `python -m studies.weights.study report` makes the table.")


@app.command()
def rates(work: Work = Path("study-work"), results: Results = RESULTS):
    """Train and measure at other rates: is likeness a matter of these?"""
    runs = [Run(arm, seed, STEPS, rate) for seed in SEEDS_OF_OTHER_RATES for arm, rate in OTHER_RATES.items()]
    _run(work, results / "other_rates.jsonl", runs)


@app.command()
def several(work: Work = Path("study-work"), results: Results = RESULTS):
    """Leave out several sublayers of the Full and PreNorm models that `run` and `rates` have trained."""
    torch.set_num_threads(1)
    prepare(work, READ_STUDY / "manifest.json")
    ids = held_out_windows(work)
    path = results / "several.jsonl"
    finished = [(name, read_runs(results / f"{name}.jsonl")) for name in ("runs", "other_rates")]
    for name, run, result in ((name, *pair) for name, found in finished for pair in found.items()):
        if run.arm == "blocks" or run in read_runs(path):
            continue
        saved = work / "models" / name / run.name
        if not saved.exists():
            raise typer.BadParameter(
                f"The model of {run.name} in {results}/{name}.jsonl is not in {saved}: delete that line and train it"
                " again."
            )
        model = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
        draws, sublayers = random.Random(run.seed), list(range(NUM_SITES - 1))
        costs = [loss_without(model, ids, [i]) for i in sublayers]
        orders = {
            "cost": [sorted(sublayers, key=costs.__getitem__)],
            "random": [draws.sample(sublayers, len(sublayers)) for _ in range(RANDOM_DRAWS)],
        }
        if run.arm == "full":
            orders["read"] = [sorted(sublayers, key=read_weights(result).__getitem__)]
        rises = left_out_at_once(model, ids, orders)
        append_json(path, {"run": asdict(run), "orders": orders, "rises": rounded(rises)})
        console.print(f"{run.name}: {rounded(rises)}", highlight=False)


def held_out_windows(work: Path) -> torch.Tensor:
    return torch.stack([row["input_ids"] for row in rows_of(work, "library", "held_out", seed=0)[:WINDOWS]])


def _run(work: Path, path: Path, runs: list[Run]):
    torch.set_num_threads(1)
    prepare(work, READ_STUDY / "manifest.json")
    ids = held_out_windows(work)
    for run in runs:
        if run in read_runs(path):
            continue
        patterns = PatternsInTraining(ids)
        saved = work / "models" / path.stem / run.name
        result = train(run, work, [] if run.arm == "prenorm" else [patterns], save_to=saved)
        start = time.time()
        figures = analyse(run.arm, AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32), ids)
        result |= {"early_patterns": patterns.patterns, **figures, "seconds_of_analysis": time.time() - start}
        append_json(path, rounded(result))
        seconds = result["seconds"] + result["seconds_of_analysis"]
        console.print(f"{run.name}: judging {result['judging_loss']:.4f}, {seconds:.0f} s", highlight=False)


# The tables


def pairs_of(result: dict[str, Any], predictor: str) -> list[list[tuple[float, float]]]:
    """By site with more than one source, the predictor and the cost of masking of each."""
    return [
        list(zip(predicted, costs))
        for predicted, costs in zip(result[predictor], result["masking_cost"])
        if costs[0] is not None
    ]


def agreement(result: dict[str, Any], predictor: str) -> dict[str, float]:
    """Spearman's correlation of predictor and cost over all pairs of a model, and within sites of three or more."""
    sites = pairs_of(result, predictor)
    within = [stats.spearmanr(*zip(*site)).statistic for site in sites if len(site) >= 3]
    everything = [pair for site in sites for pair in site]
    return {"all": stats.spearmanr(*zip(*everything)).statistic, "within": statistics.mean(within)}


def half_of(values: list[float], half: int) -> float:
    """The mean likeness over the pairs of sublayers that lie in one half of the layers."""
    num_layers = len(values) // 2 + 1
    chosen = [
        v for i, v in enumerate(values) if i // 2 // (num_layers // 2) == (i // 2 + 1) // (num_layers // 2) == half
    ]
    return statistics.mean(chosen)


def read_weights(result: dict[str, Any]) -> list[float]:
    """Of a Full model, by sublayer, the sum of the weights that its output has over all later sites."""
    return [sum(of_site[i + 1] for of_site in result["weight"][i + 1 :]) for i in range(NUM_SITES - 1)]


def in_words(values: list[float], digits: int = 2) -> str:
    mean, low, high = interval(values)
    return f"{mean:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def agreement_table(by_arm: dict[str, list[dict]]) -> list[str]:
    lines = ["| | predictor | over all pairs | within sites | by seed, within sites |", "|---|---|---|---|---|"]
    for arm in ("blocks", "full"):
        for predictor, label in PREDICTORS.items():
            found = [agreement(result, predictor) for result in by_arm[arm]]
            everything, within = ([of[kind] for of in found] for kind in ("all", "within"))
            by_seed = ", ".join(f"{value:.2f}" for value in within)
            lines.append(f"| {LABELS[arm]} | {label} | {in_words(everything)} | {in_words(within)} | {by_seed} |")
    return lines


def patterns_table(by_arm: dict[str, list[dict]]) -> list[str]:
    lines = [
        f"| | | reads of | {' | '.join(f'{step}' for step in (*EARLY, STEPS))} |",
        "|---" * (4 + len(EARLY)) + "|",
    ]
    for arm in ("blocks", "full"):
        for pattern, label in PATTERNS.items():
            for kind in ("attention", "mlp"):
                cells = [
                    in_words([patterns_at(result, step)[kind][pattern] for result in by_arm[arm]])
                    for step in (*EARLY, STEPS)
                ]
                lines.append(f"| {LABELS[arm]} | {label} | {kind} | {' | '.join(cells)} |")
    return lines


def patterns_at(result: dict[str, Any], step: int) -> dict[str, dict[str, float]]:
    return result["final_patterns"] if step == STEPS else result["early_patterns"][str(step)]


def likeness_table(by_arm: dict[str, list[dict]], at_other_rates: dict[str, list[dict]]) -> list[str]:
    halves = {arm: [half_of(result["likeness"], 1) for result in found] for arm, found in by_arm.items()}
    less = {arm: [a - b for a, b in zip(of, halves["prenorm"])] for arm, of in halves.items() if arm != "prenorm"}
    corrected = corrected_p(less)
    lines = [
        "| | cosine, first half | cosine, second half | less PreNorm, second half | p (Holm) |"
        " effective rank of reads, first half | second half |",
        "|---" * 7 + "|",
    ]
    for name, found in {**by_arm, **at_other_rates}.items():
        cosines = [in_words([half_of(result["likeness"], half) for result in found]) for half in (0, 1)]
        ranks = [
            in_words([statistics.mean(result["effective_rank"][part]) for result in found], 1)
            for part in (slice(NUM_SITES // 2), slice(NUM_SITES // 2, NUM_SITES))
        ]
        beside = [in_words(less[name]), f"{corrected[name]:.4f}"] if name in less else ["", ""]
        lines.append(f"| {' | '.join([LABELS.get(name, name), *cosines, *beside, *ranks])} |")
    return lines


def read_other_rates(results: Path) -> dict[str, list[dict]]:
    """The results of arms at other rates, by what they are called in a table."""
    found: dict[str, list[dict]] = {}
    for result in read_runs(results / "other_rates.jsonl").values():
        found.setdefault("{arm} at {learning_rate:g}".format(**result["run"]), []).append(result)
    labels = {f"{arm} at {rate:g}": f"{LABELS[arm]} at {rate:g}, three seeds" for arm, rate in OTHER_RATES.items()}
    return {labels[name]: of for name, of in found.items() if len(of) == len(SEEDS_OF_OTHER_RATES)}


def left_out_table(found: list[dict]) -> list[str]:
    rises, weights = [r["left_out"] for r in found], [read_weights(r) for r in found]
    correlations = [stats.spearmanr(*pair).statistic for pair in zip(weights, rises)]
    least, most = ([rise[of.index(pick(of))] for rise, of in zip(rises, weights)] for pick in (min, max))
    cheapest = [min(rise) for rise in rises]
    rows = {
        "Spearman's correlation of sum of weights and rise": correlations,
        "rise for the sublayer that is read least": least,
        "rise for the one that is read most": most,
        "rise for the one that costs least": cheapest,
        "median rise": [statistics.median(rise) for rise in rises],
    }
    lines = ["| | by seed | mean (95 %) |", "|---|---|---|"]
    for label, values in rows.items():
        lines.append(f"| {label} | {', '.join(f'{v:.3f}' for v in values)} | {in_words(values, 3)} |")
    return lines


def read_several(results: Path) -> dict[str, list[dict]]:
    """What was left out at once, by what a table calls the arm, and seed."""
    found: dict[str, list[dict]] = {}
    for run, result in read_runs(results / "several.jsonl").items():
        label = LABELS[run.arm]
        if run.learning_rate != RATES[run.arm]:
            label += f" at {run.learning_rate:g}"
        found.setdefault(label, []).append(result)
    return found


def several_table(found: list[dict], at_once: dict[str, list[dict]]) -> list[str]:
    """Rises without several sublayers, and the sum of what each costs by itself in the order of the weights."""
    costs = {r["run"]["seed"]: r["left_out"] for r in found}
    columns = [
        (label, order) for label, results in at_once.items() for order in ORDERS if order in results[0]["rises"]
    ]
    names = [f"{label}, {ORDERS[order]}" for label, order in columns]
    lines = [f"| left out of {NUM_SITES - 1} | {' | '.join(names)} | Full, least read, the sum of each by itself |"]
    lines += ["|---" * (2 + len(columns)) + "|"]
    for i, count in enumerate(COUNTS):
        cells = [in_words([r["rises"][order][i] for r in at_once[label]], 3) for label, order in columns]
        sums = [sum(costs[r["run"]["seed"]][j] for j in r["orders"]["read"][0][:count]) for r in at_once["Full"]]
        lines.append(f"| {count} | {' | '.join([*cells, in_words(sums, 3)])} |")
    return lines


# The figures


def draw_band(axis, positions: list[float], rows: list[list[float]], style: tuple[str, str], label: str):
    """Means over seeds, and their intervals as a band."""
    colour, line = style
    means, lows, highs = zip(*(interval(list(values)) for values in zip(*rows)))
    axis.plot(positions, means, line, color=colour, label=label)
    axis.fill_between(positions, lows, highs, color=colour, alpha=0.15, linewidth=0)


def plot_agreement(by_arm: dict[str, list[dict]], stem: Path) -> list[Path]:
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2))
    for axis, predictor in zip(axes, PREDICTORS):
        for arm, marker in (("full", "x"), ("blocks", "o")):
            points = [pair for site in pairs_of(by_arm[arm][0], predictor) for pair in site]
            filled = {"facecolors": "none"} if marker == "o" else {}
            colour = STYLES[arm][0]
            axis.scatter(*zip(*points), marker=marker, s=18, color=colour, label=LABELS[arm], linewidths=0.8, **filled)
        axis.set(xlabel=PREDICTORS[predictor], ylabel="rise of the loss when masked, nats", xscale="log")
        axis.set_yscale("symlog", linthresh=1e-3)
        axis.set(xlim=(1e-4, 1.5), ylim=(-1e-2, 5))  # a few sources are read less than that
        axis.legend(frameon=False)
    figure.suptitle("Every source at every site, seed 0", fontsize=10)
    return finish(figure, axes, stem)


def plot_likeness(by_arm: dict[str, list[dict]], stem: Path) -> list[Path]:
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.2))
    for arm, found in by_arm.items():
        for axis, kind, title in zip(axes, (0, 1), ("attention", "MLP")):
            rows = [result["likeness"][kind::2] for result in found]
            draw_band(axis, [i + 1.5 for i in range(len(rows[0]))], rows, STYLES[arm], LABELS[arm])
            axis.set(title=f"outputs of {title} in neighbouring layers", xlabel="between layers", ylabel="cosine")
        draw_band(axes[2], list(range(NUM_SITES)), [r["effective_rank"] for r in found], STYLES[arm], LABELS[arm])
    axes[2].set(title="what sublayers read", xlabel="site", ylabel="effective rank, of 64")
    axes[0].legend(frameon=False)
    return finish(figure, axes, stem)


def plot_patterns(by_arm: dict[str, list[dict]], stem: Path) -> list[Path]:
    figure, axes = plt.subplots(2, 3, figsize=(13, 7))
    steps = [*EARLY, STEPS]
    for row, kind in zip(axes, ("attention", "mlp")):
        for axis, (pattern, label) in zip(row, PATTERNS.items()):
            for arm in ("blocks", "full"):
                rows = [[patterns_at(r, step)[kind][pattern] for step in steps] for r in by_arm[arm]]
                draw_band(axis, steps, rows, STYLES[arm], LABELS[arm])
            axis.axhline(1, color=COLOURS[6], linewidth=0.7)
            of = "attention" if kind == "attention" else "MLPs"
            axis.set(title=f"{label}, reads of {of}", xlabel="step", xscale="log", xticks=steps)
            axis.xaxis.set_major_formatter("{x:.0f}")
            axis.minorticks_off()
    for axis in axes[:, 0]:
        axis.set_ylabel("a uniform read has 1")
    axes[0, 0].legend(frameon=False)
    return finish(figure, axes.flat, stem)


def plot_left_out(found: list[dict], at_once: dict[str, list[dict]], stem: Path) -> list[Path]:
    figure, axes = plt.subplots(1, 2 if at_once else 1, figsize=(11 if at_once else 6, 4.2), squeeze=False)
    axis = axes[0, 0]
    for kind, marker, label in ((0, "o", "attention"), (1, "x", "MLP")):
        points = [pair for r in found for pair in list(zip(read_weights(r), r["left_out"]))[kind::2]]
        filled = {"facecolors": "none"} if marker == "o" else {}
        axis.scatter(*zip(*points), marker=marker, s=22, color=COLOURS[kind], label=label, linewidths=0.9, **filled)
    axis.set(xlabel="sum of its weights over all later sites", ylabel="rise of the loss without it, nats")
    if at_once:
        # Not those at random, which cost ten times as much
        for label, order, style in (
            ("Full", "read", (COLOURS[1], "-")),
            ("Full", "cost", (COLOURS[1], "--")),
            ("PreNorm", "cost", (COLOURS[6], ":")),
        ):
            rows = [r["rises"][order] for r in at_once[label]]
            draw_band(axes[0, 1], list(COUNTS), rows, style, f"{label}, {ORDERS[order]}")
        axes[0, 1].set(xlabel=f"sublayers left out, of {NUM_SITES - 1}", ylabel="rise of the loss without them, nats")
        axes[0, 1].set_ylim(bottom=0)
        axes[0, 1].legend(frameon=False)
    axis.set_yscale("symlog", linthresh=1e-2)
    axis.legend(frameon=False)
    return finish(figure, axes.flat, stem)


def finish(figure, axes, stem: Path) -> list[Path]:
    for axis in axes:
        finish_axis(axis)
    figure.tight_layout()
    paths = write_figure(figure, stem)
    plt.close(figure)
    return paths


@app.command()
def report(results: Results = RESULTS):
    """Write table.md and the figures anew, from the results alone."""
    found = {(run.arm, run.seed): result for run, result in read_runs(results / "runs.jsonl").items()}
    seeds = [seed for seed in SEEDS if all((arm, seed) in found for arm in RATES)]
    if len(seeds) < 3:
        raise typer.BadParameter(f"{len(seeds)} seeds have all arms, and three are needed: go on with `run`.")
    by_arm = {arm: [found[arm, seed] for seed in seeds] for arm in RATES}
    sections = {
        "Does a large weight mean that a source matters?": agreement_table(by_arm),
        "When the paper's patterns show": patterns_table(by_arm),
        "Are outputs more alike with depth?": likeness_table(by_arm, read_other_rates(results)),
        "Sublayers left out of Full": left_out_table(by_arm["full"]),
    }
    if at_once := read_several(results):
        sections["Several left out at once"] = several_table(by_arm["full"], at_once)
    lines = ["# What the weights over depth mean", ""]
    lines += [f"By the [protocol](protocol.md), seeds {seeds[0]} to {seeds[-1]}; in brackets 95 % intervals.", ""]
    lines += ["| | held-out loss |", "|---|---|"]
    for arm, results_of_arm in by_arm.items():
        lines.append(f"| {LABELS[arm]} | {in_words([r['judging_loss'] for r in results_of_arm], 3)} |")
    for title, table in sections.items():
        lines += ["", f"## {title}", "", *table]
        if title == "When the paper's patterns show":
            lines += ["", "By the step of training, of 1000. Each figure is 1 for a uniform read."]
    write_file(results / "table.md", "\n".join(lines) + "\n")
    paths = [
        results / "table.md",
        *plot_agreement(by_arm, results / "agreement"),
        *plot_patterns(by_arm, results / "patterns"),
        *plot_likeness(by_arm, results / "likeness"),
        *plot_left_out(by_arm["full"], at_once, results / "left_out"),
    ]
    console.print(*(f"Wrote {path}" for path in paths), sep="\n", highlight=False)


if __name__ == "__main__":
    app()
