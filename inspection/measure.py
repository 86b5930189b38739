# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Means of the depth weights over text, a batch at a time, so that memory does not grow with the text."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from rich.progress import track
from torch import nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ..base.probe import decoder_layers
from ..configuration_attnres import AttnResConfig
from ..depth.definition import mix_by_definition, num_sources
from ..depth.recorder import DepthRecorder
from ..depth.stream import DepthStream


SMALL = 0.01  # a weight below this is almost none


@dataclass
class SiteStatistics:
    """One read, averaged over tokens.

    Attributes:
        site: its number; even ones feed an attention, odd ones an MLP, the last one the final norm.
        kind: `attention`, `mlp` or `final`; `sublayer` where a layer has not just two of them.
        layer: number of the layer; that of the last one for the final read.
        sources: what is read: `embedding`, `block 1` ... and `partial`, the open block.
        weights: mean weight of each source, also over heads; they sum to 1 if they are those of a softmax.
        entropy, relative_entropy: mean entropy of the weights (divided by their sum), in nats, and as a fraction of
            its largest value; 1 with a single source.
        effective_sources: mean of exp(entropy), the number of sources over which the weights are spread.
        small_weights: fraction of the weights below 0.01.
        embedding_weight, predecessor_weight: mean weight of the first and of the newest source.
        distance: mean number of sources between the newest one and the one that is read.
        rms: root mean square of the result of the read, over tokens and hidden dimensions.
        stream_rms: of the residual stream of the PreNorm model at the same place, where there is one.
        gradient_rms: of the gradient of the loss with respect to the output of the sublayer that this read feeds, see
            `gradient_rms`; none for the final read, or if it was not asked for.
        base_gradient_rms: the same in the PreNorm model.
        ablation: by how much the loss rises if a source is masked out here, see `ablate`; none where it is the only
            source, or if it was not asked for.
        heads: by head, the mean weight of each source; none of a single head.
        head_agreement: overlap of two heads, the sum over sources of the smaller of their weights (divided by their
            sums): mean over tokens and pairs of heads. 1 if all heads read the same; none of a single head.
    """

    site: int
    kind: str
    layer: int
    sources: list[str]
    weights: list[float]
    entropy: float
    relative_entropy: float
    effective_sources: float
    small_weights: float
    embedding_weight: float
    predecessor_weight: float
    distance: float
    rms: float
    stream_rms: float | None = None
    gradient_rms: float | None = None
    base_gradient_rms: float | None = None
    ablation: list[float | None] | None = None
    heads: list[list[float]] | None = None
    head_agreement: float | None = None


@dataclass
class Excerpt:
    """The depth weights of single tokens.

    Attributes:
        tokens: their text.
        weights: for every site, for every token, of every source, in thousandths.
    """

    tokens: list[str]
    weights: list[list[list[int]]]


@dataclass
class DepthStatistics:
    """All reads of a model.

    Attributes:
        model: its name.
        base_model_type: of its base.
        block_size, num_blocks: sublayers per block, and how many blocks there are.
        text: what was read, in words.
        num_tokens: how much of it.
        sites: read by read, in the order of depth. A base whose attention and MLP share a read has none in between.
        excerpt: the beginning of the text, token by token; none if only means were taken.
        zero_queries: whether all queries are zero, and all sources of a read get the same weight.
        fingerprint, commit: of the checkpoint, a hash over a folder's files or the commit on the Hub, see
            `attnres.checkpoints.fingerprint`; none of a model in memory.
    """

    model: str
    base_model_type: str
    block_size: int
    num_blocks: int
    text: str
    num_tokens: int
    sites: list[SiteStatistics]
    excerpt: Excerpt | None = None
    zero_queries: bool = False
    fingerprint: str | None = None
    commit: str | None = None


class _RunningSums:
    """Running sums of one site, in fp64."""

    def __init__(self, num_heads: int, num_sources: int):
        self.heads = torch.zeros(num_heads, num_sources, dtype=torch.float64)
        self.agreement = self.entropy = self.effective = self.small = self.square = self.stream_square = 0.0
        self.tokens = self.elements = 0

    def add(self, weights: torch.Tensor, square: float, elements: int, stream_square: float | None):
        """Weights of the tokens, `[tokens, heads, sources]`; sums of squares of what is read, of so many elements."""
        weights = weights.double().cpu()
        parts = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
        entropy = torch.special.entr(parts).sum(-1)
        self.heads += weights.sum(0)
        self.entropy += entropy.mean(-1).sum().item()
        self.effective += entropy.exp().mean(-1).sum().item()
        self.small += (weights < SMALL).double().mean((-1, -2)).sum().item()
        pairs = torch.combinations(torch.arange(len(self.heads)))
        if len(pairs):
            common = torch.minimum(parts[:, pairs[:, 0]], parts[:, pairs[:, 1]]).sum(-1)
            self.agreement += common.mean(-1).sum().item()
        self.tokens += len(weights)
        self.square += square
        self.elements += elements
        if stream_square is not None:
            self.stream_square += stream_square


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Without dropout, and then as before."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def run_recorded(model: nn.Module, ids: torch.Tensor, recorder: DepthRecorder, num_sites: int):
    """The outputs of an AttnRes model with a recorder, or those of a plain base of as many sites.

    A base is the AttnRes model of zero queries, and runs as such: its own layers are given a `DepthStream`.
    """
    if model.config.model_type == "attnres":
        return model(ids, use_cache=False, depth_recorder=recorder)

    def start(layer, args, kwargs):
        embedding = args[0] if args else kwargs["hidden_states"]
        queries = embedding.new_zeros(num_sites, embedding.shape[-1])
        # A single block, so that there are never more than two sources
        stream = DepthStream(queries, (embedding,), block_size=num_sites, scale_by_sources=True, recorder=recorder)
        return ((stream, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": stream})

    handle = decoder_layers(model.base_model)[0].register_forward_pre_hook(start, with_kwargs=True)
    try:
        return model(ids, use_cache=False)
    finally:
        handle.remove()


@contextlib.contextmanager
def _squares_of_reads(trunk: nn.Module, recorder: DepthRecorder) -> Iterator[dict[int, float]]:
    """By site, the sum of squares of what is read there, over all elements.

    Layer by layer, from what the recorder has of it, which keeps no outputs of sublayers after that.
    """
    found: dict[int, float] = {}
    reached: list[DepthStream] = []

    def read(stream: DepthStream):
        if stream.site in recorder.weights:
            mix = mix_by_definition(recorder.weights[stream.site], stream.sources)
            found[stream.site] = mix.double().square().sum().item()

    def leave(layer, args, kwargs, output):
        reached[:] = [output[0] if isinstance(output, tuple) else output]
        stream = replace(args[0] if args else kwargs["hidden_states"], recorder=None)
        while stream.site < reached[0].site:
            read(stream)
            stream = stream.write(recorder.by_token(recorder.outputs.pop(stream.site)))

    handles = [layer.register_forward_hook(leave, with_kwargs=True) for layer in decoder_layers(trunk)]
    try:
        yield found
        read(*reached)
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def measure(
    model: nn.Module,
    windows: torch.Tensor,
    *,
    name: str = "model",
    text: str = "text",
    base: nn.Module | None = None,
    batch_size: int = 4,
    progress: bool = True,
) -> DepthStatistics:
    """Run an AttnRes causal LM over text and take the means of its depth weights.

    Args:
        windows: token ids, `[windows, length]`.
        base: the PreNorm model to compare the size of hidden states with. Without one, and with zero queries, its
            stream is what is read times the number of sources.
        progress: show a bar.

    Raises:
        ValueError: if it is no AttnRes model.
    """
    config = model.config
    check_is_attnres(config, name)
    trunk, device = model.base_model, model.device
    zero_queries = trunk.depth_queries.are_zero()
    sums: dict[int, _RunningSums] = {}
    for ids in track(windows.split(batch_size), description=f"Reading {name}", disable=not progress):
        of_model, of_base = _run_and_square(trunk, ids.to(device), config.num_sites), None
        if base is not None:
            of_base = _run_and_square(base.base_model, ids.to(device), config.num_sites)
        elif zero_queries:
            of_base = of_model
        for site, (weights, square) in of_model.items():
            stream_square = None
            if of_base is not None:  # queries are zero: all weights are equal, and the stream is the sum of sources
                weights_of_base, square_of_base = of_base[site]
                stream_square = square_of_base / weights_of_base.flatten()[0].double().item() ** 2
            elements = ids.numel() * config.hidden_size
            weights = weights.flatten(0, 1) if weights.ndim == 4 else weights.flatten(0, 1).unsqueeze(1)
            of_site = sums.setdefault(site, _RunningSums(*weights.shape[1:]))
            of_site.add(weights, square, elements, stream_square)
    has_stream = base is not None or zero_queries
    return DepthStatistics(
        model=name,
        base_model_type=config.base_model_type,
        block_size=config.attn_res_block_size,
        num_blocks=num_sources(config.num_sites - 1, config.attn_res_block_size) - 1,
        text=text,
        num_tokens=windows.numel(),
        sites=[_site_statistics(site, of_site, config, has_stream) for site, of_site in sorted(sums.items())],
        zero_queries=zero_queries,
    )


def _run_and_square(trunk: nn.Module, ids: torch.Tensor, num_sites: int) -> dict[int, tuple[torch.Tensor, float]]:
    """By site, the weights, `[batch, seq, (heads,) sources]`, and the sum of squares of what is read."""
    recorder = DepthRecorder()
    with evaluation_mode(trunk), _squares_of_reads(trunk, recorder) as squares:
        run_recorded(trunk, ids, recorder, num_sites)
    return {site: (recorder.weights[site], square) for site, square in sorted(squares.items())}


def check_is_attnres(config: PreTrainedConfig, name: str):
    if config.model_type == "attnres_multimodal":
        raise ValueError(
            f"`{name}` is a multimodal model, which does not read text alone: call it with"
            " `output_depth_attentions=True` on your own inputs."
        )
    if config.model_type != "attnres":
        raise ValueError(
            f"`{name}` is a {config.model_type}, not an AttnRes model: `attnres convert` makes one of it."
        )


@torch.no_grad()
def read_excerpt(model: nn.Module, ids: torch.Tensor, tokenizer: PreTrainedTokenizerBase) -> Excerpt:
    """The weights of every single token of a text, `[tokens]`."""
    outputs = model.base_model(ids[None].to(model.device), output_depth_attentions=True, use_cache=False)
    return Excerpt(
        tokens=[tokenizer.decode([i]) for i in ids.tolist()],
        weights=[
            (mean_of_heads(weights[0]).float() * 1000).round().int().tolist() for weights in outputs.depth_attentions
        ],
    )


def mean_of_heads(weights: torch.Tensor) -> torch.Tensor:
    """`[tokens, sources]` of weights of all tokens, `[tokens, (heads,) sources]`."""
    return weights.mean(1) if weights.ndim == 3 else weights


def source_names(site: int, config: AttnResConfig) -> list[str]:
    """What a site can read, in the order of depth."""
    num_closed, num_open = divmod(site, config.attn_res_block_size)
    names = ["embedding", *(f"block {i + 1}" for i in range(num_closed))]
    if config.attn_res_open_block == "each":
        return [*names, *(f"output {i + 1}" for i in range(num_open))]
    return [*names, "partial"] if num_open else names


def _kinds_and_layers(config: AttnResConfig) -> list[tuple[str, int]]:
    """Kind and layer of every site."""
    places = []
    for layer, count in enumerate(config.sublayers_per_layer()):
        kinds = ("attention", "mlp") if count == 2 else ("sublayer",) * count
        places += [(kind, layer) for kind in kinds]
    return [*places, ("final", config.num_hidden_layers - 1)]


def _site_statistics(site: int, sums: _RunningSums, config: AttnResConfig, has_stream: bool) -> SiteStatistics:
    by_head = sums.heads / sums.tokens
    weights = by_head.mean(0).tolist()
    entropy = sums.entropy / sums.tokens
    largest = torch.tensor(float(len(weights))).log().item()
    kind, layer = _kinds_and_layers(config)[site]
    return SiteStatistics(
        site=site,
        kind=kind,
        layer=layer,
        sources=source_names(site, config),
        weights=weights,
        entropy=entropy,
        relative_entropy=entropy / largest if len(weights) > 1 else 1.0,
        effective_sources=sums.effective / sums.tokens,
        small_weights=sums.small / sums.tokens,
        embedding_weight=weights[0],
        predecessor_weight=weights[-1],
        distance=sum(weight * back for back, weight in enumerate(reversed(weights))) / sum(weights),
        rms=(sums.square / sums.elements) ** 0.5,
        stream_rms=(sums.stream_square / sums.elements) ** 0.5 if has_stream else None,
        heads=by_head.tolist() if len(by_head) > 1 else None,
        head_agreement=sums.agreement / sums.tokens if len(by_head) > 1 else None,
    )
