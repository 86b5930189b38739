# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""A page to try a model on: the depth weights of any text, and what the model predicts without a source."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gradio as gr
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..checkpoints.checkpoint import load_config, load_language_model, load_tokenizer
from ..checkpoints.location import hub_commit
from ..depth.recorder import DepthRecorder
from ..utils.devices import check_device, default_device, is_dtype
from ..utils.files import atomic_folder, check_destination
from ..utils.installation import ADDRESS
from .figures import heat_map
from .measure import (
    DepthStatistics,
    SiteStatistics,
    check_is_attnres,
    evaluation_mode,
    mean_of_heads,
    measure,
    run_recorded,
)
from .run import model_names


MAX_TOKENS = 256
NUM_PREDICTIONS = 6
TEXT = "The capital of France is"
HOW_TO = (
    "Every read of the model takes a weighted mix of its *sources*: the embedding, the blocks, and the sum of the"
    " block that is not complete yet. Click a token to see its weights. Choose a read and a source to see the weight"
    " of that source for every token, and what the model predicts if this read cannot use it."
)
ZERO = "**All queries of this model are zero**, so all sources of a read have equal weights, as in a PreNorm model."


@dataclass
class Reading:
    """What a model read in one text.

    Attributes:
        checkpoint: its folder or Hub id.
        ids: the tokens, `[1, tokens]`.
        tokens: their text.
        means: the weights, averaged over the tokens.
        weights: by site, those of each token, `[tokens, sources]`.
        predictions: the most probable next tokens, and their probabilities.
    """

    checkpoint: str
    ids: torch.Tensor
    tokens: list[str]
    means: DepthStatistics
    weights: dict[int, torch.Tensor]
    predictions: dict[str, float]

    def site(self, number: int) -> SiteStatistics:
        return next(site for site in self.means.sites if site.site == number)

    def choices(self) -> list[tuple[str, int]]:
        """Names and numbers of the reads that have a choice."""
        return [(site_name(site), site.site) for site in self.means.sites if len(site.sources) > 1]

    def of_token(self, index: int) -> DepthStatistics:
        """The weights of one token in place of the means."""
        sites = [replace(site, weights=self.weights[site.site][index].tolist()) for site in self.means.sites]
        return replace(self.means, model=f"token {index + 1}: {self.tokens[index]!r}", sites=sites)


def site_name(site: SiteStatistics) -> str:
    names = {"mlp": "MLP", "final": "final norm"}
    of_layer = "" if site.kind == "final" else f" of layer {site.layer}"
    return f"{names.get(site.kind, site.kind)}{of_layer} (site {site.site})"


class Explorer:
    """The checkpoints that a page offers, of which it keeps the one in memory that was used last.

    Args:
        checkpoints: folders or Hub ids of AttnRes models with a tokenizer.
        dtype: in which they compute; `auto` is that of the checkpoint.
        device: by default a GPU if there is one.

    Raises:
        ValueError, OSError: if one is not there, is not an AttnRes model or has no tokenizer, before any is loaded.
    """

    def __init__(self, checkpoints: Sequence[str], *, dtype: str = "auto", device: str | None = None):
        if not checkpoints:
            raise ValueError("`checkpoints` is empty: name at least one.")
        self.dtype, self.device = dtype, device or default_device()
        check_device(self.device, "is not available")
        if dtype != "auto" and not is_dtype(dtype):
            raise ValueError(f"`dtype={dtype!r}` is not a dtype of torch. Use float32, bfloat16, float16 or auto.")
        self.commits = {checkpoint: hub_commit(checkpoint) for checkpoint in checkpoints}
        for checkpoint, commit in self.commits.items():
            check_is_attnres(load_config(checkpoint, commit), checkpoint)
        self.tokenizers = {
            checkpoint: load_tokenizer(checkpoint, commit) for checkpoint, commit in self.commits.items()
        }
        self.names = dict(zip(self.commits, model_names(list(self.commits))))
        self.load = functools.lru_cache(maxsize=1)(self._load)

    def _load(self, checkpoint: str) -> tuple[nn.Module, PreTrainedTokenizerBase]:
        commit = self.commits[checkpoint]
        model = load_language_model(checkpoint, revision=commit or "main", dtype=self.dtype)
        return model.to(self.device).eval(), self.tokenizers[checkpoint]

    def read(self, checkpoint: str, text: str) -> Reading:
        """Run a model on a text, of which the first 256 tokens are read.

        Raises:
            ValueError: if the text has no tokens.
        """
        model, tokenizer = self.load(checkpoint)
        longest = min(MAX_TOKENS, getattr(model.config, "max_position_embeddings", None) or MAX_TOKENS)
        ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=longest).input_ids
        if not ids.numel():
            raise ValueError("Type a text first.")
        recorder = DepthRecorder(outputs=None)
        predictions = self._predictions(model, tokenizer, ids, recorder)
        by_token = {site: mean_of_heads(weights[0]).float().cpu() for site, weights in recorder.weights.items()}
        return Reading(
            checkpoint=checkpoint,
            ids=ids,
            tokens=[tokenizer.decode([i]) for i in ids[0].tolist()],
            means=measure(model, ids, name=self.names[checkpoint], text=text, progress=False),
            weights=by_token,
            predictions=predictions,
        )

    def without(self, reading: Reading, site: int, source: int) -> dict[str, float]:
        """The most probable next tokens if a source is left out of the softmax of one read."""
        model, tokenizer = self.load(reading.checkpoint)
        recorder = DepthRecorder(masked_source={site: source}, outputs=None)
        return self._predictions(model, tokenizer, reading.ids, recorder)

    @torch.no_grad()
    def _predictions(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, ids: torch.Tensor, recorder: DepthRecorder
    ) -> dict[str, float]:
        with evaluation_mode(model):
            outputs = run_recorded(model, ids.to(model.device), recorder, model.config.num_sites)
        probabilities, tokens = outputs.logits[0, -1].float().softmax(-1).topk(NUM_PREDICTIONS)
        found: dict[str, float] = {}
        for token, probability in zip(tokens.tolist(), probabilities.tolist()):
            text = tokenizer.decode([token])
            name = repr(text)  # with its quotes, as tokens begin with spaces
            if "\ufffd" in text or name in found:  # a part of a character has no text
                name = f"token {token}"
            found[name] = probability
        return found


def draw(statistics: DepthStatistics) -> Figure:
    figure = heat_map([statistics])
    plt.close(figure)  # gradio draws it, and pyplot would keep it
    return figure


def sources_of(reading: Reading, site: int) -> list[tuple[str, int]]:
    return [(name, number) for number, name in enumerate(reading.site(site).sources)]


def coloured(reading: Reading, site: int, source: int) -> dict[str, Any]:
    """The tokens, in the colours of the weights of a source."""
    weights = reading.weights[site][:, source]
    largest = weights.max().item()
    label = f"Weight of {reading.site(site).sources[source]} by token: from 0 to {largest:.2f} (full colour)"
    return gr.update(value=list(zip(reading.tokens, (weights / max(largest, 1e-9)).tolist())), label=label)


def make_app(explorer: Explorer) -> gr.Blocks:
    """The page, which `launch` serves."""

    def read(checkpoint: str, text: str):
        try:
            reading = explorer.read(checkpoint, text)
        except ValueError as error:
            raise gr.Error(str(error), print_exception=False) from error
        sites = reading.choices()
        site = sites[-1][1]
        return (
            reading,
            gr.update(choices=sites, value=site),
            gr.update(choices=sources_of(reading, site), value=0),
            coloured(reading, site, 0),
            draw(reading.means),
            reading.predictions,
            explorer.without(reading, site, 0),
            ZERO if reading.means.zero_queries else "",
        )

    def choose_site(reading: Reading | None, site: int):
        if reading is None:
            raise gr.Error("Read a text first.", print_exception=False)
        sources = sources_of(reading, site)
        return gr.update(choices=sources, value=0), coloured(reading, site, 0), explorer.without(reading, site, 0)

    def choose_source(reading: Reading | None, site: int, source: int):
        if reading is None:
            raise gr.Error("Read a text first.", print_exception=False)
        return coloured(reading, site, source), explorer.without(reading, site, source)

    def choose_token(reading: Reading, event: gr.SelectData):
        return draw(reading.of_token(event.index))

    checkpoints = [(name, checkpoint) for checkpoint, name in explorer.names.items()]
    with gr.Blocks(title="What the model reads", analytics_enabled=False) as app:
        gr.Markdown(f"# What the model reads\n{HOW_TO}")
        reading = gr.State(None)
        with gr.Row():
            checkpoint = gr.Dropdown(checkpoints, value=checkpoints[0][1], label="Checkpoint", elem_id="checkpoint")
            text = gr.Textbox(TEXT, label=f"Text (up to {MAX_TOKENS} tokens)", lines=2, scale=3, elem_id="text")
            button = gr.Button("Read", variant="primary", scale=0, elem_id="read")
        zero = gr.Markdown("", elem_id="zero")
        with gr.Row():
            with gr.Column():
                tokens = gr.HighlightedText(label="Weight by token", elem_id="tokens")
                with gr.Row():
                    site = gr.Dropdown([], label="Read", elem_id="site", type="value")
                    source = gr.Dropdown([], label="Source", elem_id="source")
                with gr.Row():
                    before = gr.Label(label="Next token", show_heading=False, elem_id="before")
                    after = gr.Label(label="Next token without the source", show_heading=False, elem_id="after")
            picture = gr.Plot(label="Weights of all reads", elem_id="weights")
        read_outputs = [reading, site, source, tokens, picture, before, after, zero]
        gr.on([button.click, text.submit, checkpoint.input, app.load], read, [checkpoint, text], read_outputs)
        site.input(choose_site, [reading, site], [source, tokens, after])
        source.input(choose_source, [reading, site, source], [tokens, after])
        tokens.select(choose_token, reading, picture)
    return app


def launch(explorer: Explorer, *, host: str = "127.0.0.1", port: int | None = None, block: bool = True) -> gr.Blocks:
    """Load the first checkpoint and serve the page, until it is interrupted or, with `block=False`, closed.

    Args:
        port: by default the first free one from 7860 on.

    Raises:
        OSError: if the port is in use.
    """
    explorer.load(next(iter(explorer.commits)))
    app = make_app(explorer)
    # Fonts that every system has: others would be fetched
    theme = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    app.launch(
        server_name=host,
        server_port=port,
        theme=theme,
        footer_links=[],
        quiet=True,
        prevent_thread_lock=True,
        share=False,
    )
    print(f"The page is at {app.local_url} until you press Ctrl+C.", flush=True)
    if block:
        app.block_thread()
    return app


SPACE = {
    "app.py": """\
import attnres
from attnres.inspection.explorer import Explorer, launch

launch(Explorer({checkpoints!r}), host="0.0.0.0")
""",
    "requirements.txt": "attnres[demo] @ git+{address}\n",
    "README.md": """\
---
title: What the model reads
sdk: gradio
sdk_version: {version}
python_version: "3.11"
app_file: app.py
models:
{models}
tags:
- attnres
---
The depth weights of {names} on a text of yours, token by token, and what it predicts without a source.
""",
}


def write_space(explorer: Explorer, folder: str | Path) -> list[Path]:
    """Write the files of a Space on the Hub that serves the page.

    Raises:
        ValueError: if a checkpoint is not on the Hub, which a Space cannot read, or the folder exists.
    """
    for checkpoint, commit in explorer.commits.items():
        if commit is None:
            raise ValueError(f"`{checkpoint}` is a folder, which a Space cannot read: `attnres push` it first.")
    path = check_destination(folder, next(iter(explorer.commits)))
    fields = {
        "checkpoints": list(explorer.commits),
        "address": ADDRESS or "ADDRESS",
        "version": gr.__version__,
        "models": "\n".join(f"- {checkpoint}" for checkpoint in explorer.commits),
        "names": ", ".join(explorer.commits),
    }
    with atomic_folder(path) as unfinished:
        for name, content in SPACE.items():
            (unfinished / name).write_text(content.format(**fields), encoding="utf-8")
    return [path / name for name in SPACE]
