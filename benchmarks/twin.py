# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""`attnres bench`: AttnRes models against their PreNorm twin, in one process, alternating.

The twin and all AttnRes models share their weights, random ones in the shape of a known model or those of a
checkpoint, and their optimizer.
A figure is the ratio to the twin, pair by pair, as machines change their mood from minute to minute: median and
quartiles over the pairs, and the ratio of the fastest runs. Memory is the peak of a call above what is held before it,
and, for training, what autograd keeps for the backward pass of the decoder.
"""

import dataclasses
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib


matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import torch  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from rich.progress import track  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
    StaticCache,
)
from transformers.cache_utils import DynamicLayer  # noqa: E402

from ..base.library_lookups import is_depth_query  # noqa: E402
from ..configuration_attnres import AttnResConfig  # noqa: E402
from ..depth.queries import AttnResDepthQueries  # noqa: E402
from ..depth.reads import ReadConfig  # noqa: E402
from ..utils.devices import check_device, is_dtype  # noqa: E402
from ..utils.figures import write_figure  # noqa: E402
from ..utils.files import write_file  # noqa: E402
from ..utils.timing import (  # noqa: E402
    activation_bytes,
    alternate,
    give_freed_memory_back,
    keep_freed_memory,
    machine,
    peak_bytes,
)


SHAPES = {
    "qwen3-0.6b": Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    ),
    "llama-3.2-1b": LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
    ),
    "qwen3-8b": Qwen3Config(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
    ),
    # Of the study of two depths: many narrow layers, whose reads cost the most
    "narrow": Qwen3Config(
        vocab_size=2048,
        hidden_size=48,
        intermediate_size=144,
        num_hidden_layers=24,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=12,
        tie_word_embeddings=True,
    ),
    "tiny": Qwen3Config(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
    ),
}
VARIANTS = ("8", "4", "full")
TWIN = "PreNorm"
# The kind of work and its sizes: batch and KV length of a decoding step, tokens of a prefill or a training step
CASES = ("decode-1-64", "decode-1-2048", "decode-16-64", "decode-16-2048", "prefill-512", "prefill-4096", "train-512")
DEFAULT_CASES = ("decode-1-64", "prefill-512", "train-512")
DECODE_STEPS = 8
Models = dict[str, torch.nn.Module]


@dataclass(frozen=True)
class Case:
    """One kind of work, such as `decode-1-64`, `prefill-512` or `train-512`."""

    kind: str
    batch: int
    length: int

    @classmethod
    def parse(cls, text: str) -> "Case":
        kind, *sizes = text.split("-")
        are_sizes = all(size.isdecimal() and int(size) > 0 for size in sizes)
        if not are_sizes or len(sizes) != {"decode": 2, "prefill": 1, "train": 1}.get(kind):
            raise ValueError(f"`{text}` is no case: there are decode-BATCH-KVLENGTH, prefill-LENGTH and train-LENGTH.")
        numbers = [int(size) for size in sizes]
        return cls(kind, numbers[0], numbers[1]) if kind == "decode" else cls(kind, 1, numbers[0])

    @property
    def tokens(self) -> int:
        """Tokens of one call of `work`."""
        return self.batch * (DECODE_STEPS if self.kind == "decode" else self.length)


def with_layers(shape: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """A shape with another number of layers."""
    return type(shape)(**{**shape.to_dict(), "num_hidden_layers": layers, "layer_types": None})


def make_twin(shape: PreTrainedConfig, dtype: torch.dtype, device: str) -> torch.nn.Module:
    """The PreNorm model of a shape with random weights."""
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(shape, dtype=dtype).eval()


def load_twin(checkpoint: str, dtype: torch.dtype, device: str) -> torch.nn.Module:
    """A PreNorm checkpoint's model, or that of the base of an AttnRes one.

    Raises:
        ValueError, OSError: for what is no checkpoint of a language model.
    """
    from ..checkpoints.checkpoint import load_language_model, open_checkpoint

    opened = open_checkpoint(checkpoint, follow_links=True)
    if opened.is_multimodal or not opened.has_lm_head:
        raise ValueError(f"`model={checkpoint!r}` is not a causal language model.")
    model = load_language_model(opened.folder, dtype=dtype, device_map=device).eval()
    if not isinstance(model.config, AttnResConfig):
        return model
    weights = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if not is_depth_query(name)}
    twin = make_twin(model.config.to_base_config(), dtype, device)
    twin.load_state_dict(weights, assign=True)
    return twin


def make_models(twin: torch.nn.Module, variants: list[str], device: str) -> Models:
    """The twin and AttnRes models on the same weights, with small random queries."""
    torch.manual_seed(0)
    models, shape, dtype = {TWIN: twin}, twin.config, twin.dtype
    weights = twin.state_dict(keep_vars=True)
    for variant in variants:
        fields = parse_variant(variant)
        config = AttnResConfig.from_base_config(shape, attn_res_scale_norm_eps=True, **fields)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        with torch.device(device):
            queries = AttnResDepthQueries(config, config.num_sites)
        for tensor in queries.zero_initialized():
            torch.nn.init.normal_(tensor, std=0.02)
        prefix = f"{model.base_model_prefix}.depth_queries."
        own = {prefix + name: parameter for name, parameter in queries.named_parameters()}
        model.load_state_dict({**weights, **own}, assign=True)
        for name, buffer in twin.named_buffers():  # some are in no state dict
            module, _, last = name.rpartition(".")
            setattr(model.get_submodule(module), last, buffer)
        models[name_of_variant(variant)] = model.eval()
    return models


def parse_variant(variant: str) -> dict[str, Any]:
    """Arguments for a config: `full`, or a number of blocks, and fields of the read, `8:num_heads=4:weights=sigmoid`.

    Raises:
        ValueError: if it is neither.
    """
    blocks, *fields = variant.split(":")
    parsed = [field.partition("=") for field in fields]
    if not (blocks == "full" or blocks.isdecimal() and int(blocks)) or any(not value for _, _, value in parsed):
        raise ValueError(
            f"`{variant}` is neither a number of blocks nor full, with fields of the read such as `8:num_heads=4`."
        )
    known = {field.name for field in dataclasses.fields(ReadConfig)}
    for name, _, _ in parsed:
        if name not in known:
            raise ValueError(f"`{variant}` has `{name}`, which is not one of {', '.join(sorted(known))}.")
    values = {f"attn_res_{name}": int(value) if value.isdecimal() else value for name, _, value in parsed}
    return {**({"block_size": 1} if blocks == "full" else {"num_blocks": int(blocks)}), **values}


def name_of_variant(variant: str) -> str:
    blocks, *fields = variant.split(":")
    return ", ".join(["Full" if blocks == "full" else f"{blocks} blocks", *fields])


def work(
    case: Case, model: torch.nn.Module, shared: torch.optim.Optimizer, device: str, compiled: bool
) -> Callable[[], None]:
    """A call that does the case's work once; `shared` is the optimizer of the weights that all models have."""
    # The graph of a decoding step is launched as one where there is a GPU
    mode = "reduce-overhead" if case.kind == "decode" and device.startswith("cuda") else None
    forward = torch.compile(model.forward, fullgraph=True, mode=mode) if compiled else model
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (case.batch, case.length), generator=generator).to(device)
    if case.kind == "train":
        queries = [parameter for name, parameter in model.named_parameters() if is_depth_query(name)]
        optimizers = [shared, *([torch.optim.AdamW(queries, lr=1e-5)] if queries else [])]

        def step():
            model.train()
            forward(ids, labels=ids, use_cache=False).loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            model.eval()

        return step
    if case.kind == "prefill":

        @torch.no_grad()
        def prefill():
            forward(ids, logits_to_keep=1, use_cache=False)

        return prefill
    # Since transformers 5.24 the first one; before, the last one in models of the mamba family
    names = inspect.signature(model.forward).parameters
    name = next(name for name in ("cache", "past_key_values", "cache_params") if name in names)
    # As in `generate`: a graph needs a KV cache whose shape stays
    cache = DynamicCache(config=model.config)
    if compiled:
        cache = StaticCache(config=model.config, max_cache_len=case.length + DECODE_STEPS)
    # What grows with the tokens is undone. Recurrent states are not: a step takes as long with any
    growing = [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]
    for layer in growing:
        if hasattr(layer, "activate_past_recording"):  # so that what leaves a window comes back
            layer.activate_past_recording()
    with torch.no_grad():
        model(ids, **{name: cache}, logits_to_keep=1)

    @torch.no_grad()
    def decode():
        for _ in range(DECODE_STEPS):
            forward(ids[:, :1], **{name: cache})
        for layer in growing:
            layer.crop(-DECODE_STEPS)
        if compiled:
            for layer in cache.layers:
                layer.cumulative_length.sub_(DECODE_STEPS)

    return decode


def bench(
    output: Path,
    *,
    shape: str | None = None,
    model: str | None = None,
    variants: tuple[str, ...] = VARIANTS,
    cases: tuple[str, ...] = DEFAULT_CASES,
    layers: int | None = None,
    pairs: int = 25,
    dtype: str = "float32",
    device: str = "cpu",
    compiled: bool = False,
) -> dict[str, Any]:
    """Measure, and write `bench.json`, `bench.md` and a plot into a folder.

    What is measured is kept case by case in `bench.partial.json`: interrupted, the same run goes on from there, with
    the same code on the same machine.

    Args:
        shape: one of `SHAPES`, by default the first.
        model: folder or Hub id of a checkpoint, in place of a shape. Of an AttnRes one the base is the twin.
        variants: numbers of blocks, or `full`, and fields of the read, see `parse_variant`.
        cases: see `Case`.
        layers: fewer layers than the shape has, where it does not fit.
        pairs: alternating runs of each case.
        compiled: with `torch.compile` as well as eager.

    Raises:
        ValueError: for what does not exist.
    """
    if model is None:
        shape = shape or next(iter(SHAPES))
    check_request(shape, model, layers, variants, dtype, device)
    parsed = {case: Case.parse(case) for case in cases}
    give_freed_memory_back()
    if model is not None:
        twin = load_twin(model, getattr(torch, dtype), device)
    else:
        config = SHAPES[shape] if layers is None else with_layers(SHAPES[shape], layers)
        twin = make_twin(config, getattr(torch, dtype), device)
    models = make_models(twin, list(variants), device)
    shared = torch.optim.AdamW(models[TWIN].parameters(), lr=1e-5)
    name = shape if model is None else Path(model).name
    settings = {"shape": name, "layers": twin.config.num_hidden_layers, "dtype": dtype, "pairs": pairs}
    modes = ("eager", "compiled") if compiled else ("eager",)
    longest = max((case.length for case in parsed.values() if case.kind == "train"), default=None)
    partial = Partial(output, {**settings, "variants": list(variants)}, machine(device))
    measure_peaks(partial, parsed, models, shared, device)
    keep_freed_memory()
    measure_times(partial, parsed, models, shared, device, modes, pairs)
    if longest is not None:
        measure_activations(partial, models, longest)
    results = {"settings": settings, "machine": partial.machine, **partial.chosen(list(parsed), modes, longest)}
    write_file(output / "bench.json", json.dumps(results, indent=1) + "\n")
    report(output)
    partial.path.unlink()
    return results


def check_request(
    shape: str | None, model: str | None, layers: int | None, variants: tuple[str, ...], dtype: str, device: str
):
    """Raise a `ValueError` for what does not exist or contradicts itself."""
    if model is not None and (shape, layers) != (None, None):
        given = "shape" if shape is not None else "layers"
        raise ValueError(f"`model={model!r}` has a shape of its own: leave `{given}` out.")
    if model is None and shape not in SHAPES:
        raise ValueError(f"`shape={shape!r}` is not one of {', '.join(SHAPES)}.")
    for variant in variants:
        parse_variant(variant)
    if not is_dtype(dtype):
        raise ValueError(f"`dtype={dtype!r}` is none of torch's.")
    check_device(device)


def measure_peaks(
    partial: "Partial", cases: dict[str, Case], models: Models, shared: torch.optim.Optimizer, device: str
):
    """The peak memory of every case and model."""
    for text, case in cases.items():
        if not partial.has("peaks", case=text):
            bar = track(models.items(), description=f"{text}, peak memory")
            peaks = {
                name: peak_bytes(work(case, model, shared, device, compiled=False), device) for name, model in bar
            }
            partial.add("peaks", [{"case": text, "model": name, "bytes": size} for name, size in peaks.items()])


def measure_times(
    partial: "Partial",
    cases: dict[str, Case],
    models: Models,
    shared: torch.optim.Optimizer,
    device: str,
    modes: tuple[str, ...],
    pairs: int,
):
    """The time of every case, mode and model, the models of a case in turn."""
    for text, case in cases.items():
        for mode in modes:
            if partial.has("time", case=text, mode=mode):
                continue
            torch._dynamo.reset()
            calls = [work(case, model, shared, device, mode == "compiled") for model in models.values()]
            seconds = alternate(calls, pairs, f"{text}, {mode}", device)
            records = [record_of(text, mode, name, seconds[:, i], seconds[:, 0]) for i, name in enumerate(models)]
            partial.add("time", [{**r, "tokens_per_second": case.tokens / r["fastest_seconds"]} for r in records])


def measure_activations(partial: "Partial", models: Models, length: int):
    """What autograd keeps for a training step of so many tokens, with and without gradient checkpointing."""
    for checkpointing in (False, True):
        if not partial.has("activations", checkpointing=checkpointing, length=length):
            sizes = {name: activation_bytes(model, length, checkpointing) for name, model in models.items()}
            kind = {"checkpointing": checkpointing, "length": length}
            rows = [{"model": k, **kind, "bytes": size, "ratio": size / sizes[TWIN]} for k, size in sizes.items()]
            partial.add("activations", rows)


class Partial:
    """What an unfinished run has measured, in a file that is written with every case."""

    def __init__(self, output: Path, settings: dict[str, Any], machine: dict[str, Any]):
        self.path = output / "bench.partial.json"
        self.settings, self.machine = settings, machine
        self.measured = {"peaks": [], "time": [], "activations": []}
        found = json.loads(self.path.read_text()) if self.path.exists() else {}
        # of another day is the same; of another commit or processor is not
        if found.get("settings") == settings and found["machine"] | {"date": None} == machine | {"date": None}:
            self.measured = found["measured"]

    def has(self, kind: str, **fields) -> bool:
        return any(fields.items() <= record.items() for record in self.measured[kind])

    def add(self, kind: str, records: list[dict[str, Any]]):
        self.measured[kind] += records
        content = {"settings": self.settings, "machine": self.machine, "measured": self.measured}
        write_file(self.path, json.dumps(content, indent=1) + "\n")

    def chosen(self, cases: list[str], modes: tuple[str, ...], longest: int | None) -> dict[str, list[dict[str, Any]]]:
        """The records of this run: the one before may have had other cases as well."""
        of_cases = {kind: [r for r in self.measured[kind] if r["case"] in cases] for kind in ("time", "peaks")}
        return {
            "time": [record for record in of_cases["time"] if record["mode"] in modes],
            "activations": [record for record in self.measured["activations"] if record["length"] == longest],
            "peaks": of_cases["peaks"],
        }


def record_of(case: str, mode: str, model: str, seconds: torch.Tensor, twin: torch.Tensor) -> dict[str, Any]:
    """What a model's seconds are to the twin's, pair by pair, each `[pairs]`."""
    ratios = seconds / twin
    low, median, high = (ratios.quantile(q).item() for q in (0.25, 0.5, 0.75))
    return {
        "case": case,
        "mode": mode,
        "model": model,
        "fastest_seconds": seconds.min().item(),
        "fastest_ratio": (seconds.min() / twin.min()).item(),
        "median_ratio": median,
        "quartiles": [low, high],
    }


def report(folder: Path) -> list[Path]:
    """Write `bench.md` and the plot of a `bench.json` anew.

    Raises:
        ValueError: if there is none.
    """
    if not (folder / "bench.json").is_file():
        raise ValueError(f"`{folder}` holds no bench.json; `attnres bench` writes one.")
    results = json.loads((folder / "bench.json").read_text())
    write_file(folder / "bench.md", table(results))
    figure = plot([record for record in results["time"] if record["model"] != TWIN])
    paths = write_figure(figure, folder / "bench")
    plt.close(figure)
    return [folder / "bench.md", *paths]


def table(results: dict[str, Any]) -> str:
    """The content of a `bench.json` as Markdown: a row for each case, a column for each model."""
    names = list(dict.fromkeys(record["model"] for record in results["time"] if record["model"] != TWIN))
    lines = [f"| | twin | {' | '.join(names)} |", f"|---|---|{'---|' * len(names)}"]
    keys = list(dict.fromkeys((record["case"], record["mode"]) for record in results["time"]))
    for key in keys:
        of_key = {record["model"]: record for record in results["time"] if (record["case"], record["mode"]) == key}
        steps = DECODE_STEPS if key[0].startswith("decode") else 1
        cells = [ratio_cell(of_key[name]) for name in names]
        seconds = of_key[TWIN]["fastest_seconds"]
        twin = f"{seconds / steps * 1e3:.1f} ms, {Case.parse(key[0]).tokens / seconds:,.1f} tokens/s"
        lines.append(f"| {key[0]}, {key[1]} | {twin} | {' | '.join(cells)} |")
    for case in dict.fromkeys(record["case"] for record in results.get("peaks", [])):
        of_case = {record["model"]: record["bytes"] for record in results["peaks"] if record["case"] == case}
        if (of_case[TWIN] or 0) < 2**20:  # not told here, or too little for the system to see
            continue
        cells = [f"**{of_case[name] / of_case[TWIN]:.2f}**" for name in names]
        lines.append(f"| {case}, peak memory | {of_case[TWIN] / 2**20:,.0f} MiB | {' | '.join(cells)} |")
    for checkpointing in dict.fromkeys(record["checkpointing"] for record in results["activations"]):
        of_kind = {r["model"]: r for r in results["activations"] if r["checkpointing"] == checkpointing}
        label = "activations" + (" with gradient checkpointing" if checkpointing else "")
        cells = [f"**{of_kind[name]['ratio']:.2f}**" for name in names]
        lines.append(f"| {label} | {of_kind[TWIN]['bytes'] / 2**20:.0f} MiB | {' | '.join(cells)} |")
    return "\n".join(lines) + f"\n\n{caption(results['settings'], results['machine'])}\n"


def ratio_cell(record: dict[str, Any]) -> str:
    """The ratio of the fastest runs, and median and quartiles over the pairs, of a record of `record_of`."""
    low, high = record["quartiles"]
    return f"**{record['fastest_ratio']:.3f}**; {record['median_ratio']:.3f} ({low:.3f} to {high:.3f})"


def caption(settings: dict[str, Any], measured_on: dict[str, Any]) -> str:
    """What was measured, and on which machine."""
    versions = ", ".join(f"{name} {version}" for name, version in measured_on["versions"].items())
    return (
        f"Shape of {settings['shape']}, {settings['layers']} layers, {settings['dtype']}, {measured_on['device']}"
        f" ({measured_on['processor']}, {measured_on['threads']} threads), {settings['pairs']} alternating pairs;"
        f" ratio of the fastest runs, then median and quartiles over the pairs. {versions}, commit"
        f" {measured_on['commit']}, {measured_on['date']}."
    )


def plot(records: list[dict[str, Any]]) -> Figure:
    """Ratios to the twin, case by case and model by model."""
    figure, axis = plt.subplots(figsize=(7, 0.5 + 0.32 * len(records)))
    labels = [f"{record['case']}, {record['mode']}: {record['model']}" for record in records]
    medians = [record["median_ratio"] for record in records]
    errors = [
        [record["median_ratio"] - record["quartiles"][0] for record in records],
        [record["quartiles"][1] - record["median_ratio"] for record in records],
    ]
    places = range(len(records))[::-1]
    axis.errorbar(medians, places, xerr=errors, fmt="o", color="#0072B2", capsize=3, label="median, quartiles")
    axis.plot([record["fastest_ratio"] for record in records], places, "x", color="#D55E00", label="fastest")
    axis.axvline(1, color="black", linewidth=1)
    axis.set(yticks=list(places), yticklabels=labels, xlabel="time / PreNorm twin")
    axis.legend(frameon=False, fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25, axis="x")
    figure.tight_layout()
    return figure
