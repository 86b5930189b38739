# SPDX-License-Identifier: Apache-2.0
"""Block AttnRes by definition, on any native decoder: what the models are compared with.

The native model runs as it is, on tensors. Below its code, where PyTorch carries out one operation after the other,
this looks for the residual stream: the tensor that goes into the first layer, and every sum of it and a tensor of its
shape. Wherever another operation is given one of these, it is given the mix instead, by the paper's equations in
loops. None of the package's code is used. What it shares with the package is the idea: an addition is a write, a
number scales all sources, and anything else reads.
"""

import math

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map


aten = torch.ops.aten
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.alias.default)


def mix_by_definition(query, key_norm, sources, eps: float, num_heads: int = 1, kind: str = "softmax"):
    """Equations 2 to 4: the mix of the sources at one site, and its weights, `[batch, seq, sources]`.

    The query is that of the site, `[hidden]`, or of every token. Several heads have a slice each of query, keys and
    values, and weights `[batch, seq, heads, sources]`.
    """
    keys = [key_norm * source / torch.sqrt((source * source).mean(-1, keepdim=True) + eps) for source in sources]
    width, mixes, all_weights = sources[0].shape[-1] // num_heads, [], []
    for head in range(num_heads):
        part = slice(head * width, (head + 1) * width)
        scores = [(query[..., part] * key[..., part]).sum(-1) for key in keys]
        if kind == "sigmoid":
            weights = [1 / (1 + torch.exp(-score)) for score in scores]
        else:
            largest = torch.stack([*scores, torch.zeros_like(scores[0])]).max(0).values
            exponentials = [torch.exp(score - largest) for score in scores]
            nothing = torch.exp(-largest) if kind == "softmax1" else 0
            weights = [exponential / (sum(exponentials) + nothing) for exponential in exponentials]
        mixes.append(sum(weight.unsqueeze(-1) * source[..., part] for weight, source in zip(weights, sources)))
        all_weights.append(torch.stack(weights, -1))
    return torch.cat(mixes, -1), all_weights[0] if num_heads == 1 else torch.stack(all_weights, -2)


class LiteralDefinition(TorchDispatchMode):
    """While it is on, a native model computes what its AttnRes model should.

    Args:
        first_layer: of the native model.
        tensors: those of the depth queries by name, `[sites, ...]`.
        block_size: outputs per block.
        eps: of the norm on the keys.
        sums: whether a mix is multiplied by what makes it the residual stream at queries of zero.
        heads, kind, each: heads and weights of a read, and whether each output of the open block is a source.
        kept: whether the residual stream is added to what is read.
        edits: functions by site, of what is written after it, or by site and source, of what this site reads.
    """

    def __init__(
        self, first_layer, tensors, block_size, eps, sums, heads=1, kind="softmax", each=False, kept=False, edits=()
    ):
        super().__init__()
        self.first_layer, self.tensors = first_layer, tensors
        self.block_size, self.eps, self.sums = block_size, eps, sums
        self.num_heads, self.kind, self.each, self.kept = heads, kind, each, kept
        self.edits = dict(edits)

    @classmethod
    def of_model(cls, model, native, rows=slice(None), edits=()):
        """What an AttnRes model should compute, by its base's native model of the same weights.

        Args:
            rows: sites of the model whose queries the native model's have, if it has other layers.
        """
        config, queries = model.trunk.config, model.trunk.depth_queries
        lists = [module for module in native.modules() if isinstance(module, torch.nn.ModuleList)]
        return cls(
            next(found for found in lists if len(found) == len(layers_of(model)))[0],
            {name: tensor.detach()[rows] for name, tensor in queries.named_parameters()},
            config.attn_res_block_size,
            config.attn_res_norm_eps,
            config.attn_res_scale_norm_eps,
            config.attn_res_num_heads,
            config.attn_res_weights,
            config.attn_res_open_block == "each",
            config.attn_res_stream == "kept",
            edits,
        )

    def __enter__(self):
        # By the id of a stream's tensor: that tensor (so that nobody else gets the id), and what has been added to it
        self.streams: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        # By the id of a tensor of some tokens of a stream: that tensor, which tokens, and what has been added to them
        self.selected: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor | int]] = {}
        self.weights: dict[int, torch.Tensor] = {}
        self.num_outputs = 0
        self.hook = self.first_layer.register_forward_pre_hook(self.start, with_kwargs=True)
        return super().__enter__()

    def __exit__(self, *error):
        self.hook.remove()
        super().__exit__(*error)

    def start(self, layer, args, kwargs):
        # A copy, as others than the layers may go on with the embedding
        stream = (args[0] if args else kwargs["hidden_states"]).clone()
        self.keep(stream, [stream.clone()])
        return ((stream, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": stream})

    def keep(self, tensor, outputs):
        self.streams[id(tensor)] = tensor, outputs
        self.num_outputs = len(outputs) - 1
        return tensor

    def outputs_of(self, value) -> list[torch.Tensor] | None:
        return self.streams[id(value)][1] if isinstance(value, torch.Tensor) and id(value) in self.streams else None

    def read(self, value):
        assert id(value) not in self.selected, "what was added to some tokens is read before it is put back"
        outputs = self.outputs_of(value)
        if outputs is None:
            return value
        site, added = len(outputs) - 1, outputs[1:]
        blocks = [added[i : i + self.block_size] for i in range(0, site, self.block_size)]
        sources = [outputs[0]]
        for block in blocks:
            is_open = len(block) < self.block_size
            sources += block if self.each and is_open else [sum(block)]
        sources = [self.edited((site, i), source) for i, source in enumerate(sources)]
        query, key_norm = self.query_of(site, sources[-1]), self.tensors["key_norm"][site]
        mix, self.weights[site] = mix_by_definition(query, key_norm, sources, self.eps, self.num_heads, self.kind)
        factor = {"softmax": len(sources), "softmax1": len(sources) + 1, "sigmoid": 2}[self.kind]
        if self.kept:
            mix, factor = sum(sources) + mix, factor / (1 + factor)
        return (mix * (factor if self.sums else 1)).to(value.dtype).view(value.shape)

    def edited(self, place, tensor):
        return self.edits[place](tensor) if place in self.edits else tensor

    def query_of(self, site, newest):
        """`w`, `W x`, or their sum, with the newest source x."""
        found = {name: tensor[site] for name, tensor in self.tensors.items()}
        query = found.get("query", 0)
        if "projection" in found:
            query = query + torch.einsum("ij,...j->...i", found["projection"], newest)
        if "projection_down" in found:
            matrix = found["projection_up"] @ found["projection_down"]
            query = query + torch.einsum("ij,...j->...i", matrix, newest)
        return query

    def added_to_some_tokens(self, function, args, given):
        """`stream[mask] = stream[mask] + features`: the features are added to the newest output."""
        if function is aten.index.Tensor and given[0] and len(args[1]) == 1:
            result = function(*args)
            self.selected[id(result)] = result, *args[1], 0
            return result
        tokens = next((self.selected[id(arg)] for arg in args if id(arg) in self.selected), None)
        if tokens is None:
            return None
        _, mask, added = tokens
        result = function(*args)
        if function is aten.add.Tensor:
            (features,) = [arg for arg in args if id(arg) not in self.selected]
            self.selected[id(result)] = result, mask, added + features
        elif function in VIEWS:
            self.selected[id(result)] = result, mask, added
        else:
            assert function in (aten.index_put_.default, aten.masked_scatter.default), function
            *earlier, newest = given[0]
            newest = newest.clone()
            newest[mask] = newest[mask] + added
            return self.keep(result, [*earlier, newest])
        return result

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [self.outputs_of(arg) for arg in args[:2]]
        if (result := self.added_to_some_tokens(function, args, given)) is not None:
            return result
        if function in (aten.add.Tensor, aten.add_.Tensor) and not kwargs and (given[0] is None) != (given[1] is None):
            (outputs,), (output,) = [o for o in given if o], [a for a, o in zip(args, given) if o is None]
            if isinstance(output, torch.Tensor) and output.shape == args[0].shape == args[1].shape:
                output = self.edited(len(outputs) - 1, output.clone())  # before it is added to in place
                return self.keep(function(*args), [*outputs, output])
        if function in (aten.mul.Tensor, aten.mul_.Tensor, aten.mul.Scalar) and any(given):
            (factor,) = [a for a, o in zip(args, given) if o is None] or [None]
            if factor is not None and (
                not isinstance(factor, torch.Tensor) or (factor.ndim <= 1 and factor.numel() == 1)
            ):
                scaled = [output * factor for output in given[0] or given[1]]
                return self.keep(function(*args), scaled)
        if function in VIEWS and given[0]:
            result = function(*args, **kwargs)
            if result.shape[-1] == args[0].shape[-1]:
                return self.keep(result, [output.view(result.shape) for output in given[0]])
        if function is aten.slice.Tensor and given[0] and args[1] % args[0].ndim != args[0].ndim - 1:  # of the tokens
            return self.keep(function(*args), [function(output, *args[1:]) for output in given[0]])
        if function is aten._to_copy.default and given[0]:
            return self.keep(function(*args, **kwargs), given[0])
        if function is aten.clone.default and given[0]:
            return self.keep(function(*args, **kwargs), [output.clone() for output in given[0]])
        if function is aten.detach.default and given[0]:  # of a hook, or of the native code's own `no_grad`
            return self.keep(function(*args, **kwargs), given[0])
        return function(*tree_map(self.read, args), **tree_map(self.read, kwargs))


def literal_logits(native, model, input_ids, edits=(), **kwargs):
    """What an AttnRes model should compute, with its base's native model of the same weights: logits and weights."""
    config, definition = model.trunk.config, LiteralDefinition.of_model(model, native, edits=edits)
    with torch.no_grad(), definition:
        logits = native(input_ids, use_cache=False, **kwargs).logits
    assert definition.num_outputs == config.num_sites - 1, (definition.num_outputs, config.num_sites)
    return logits, definition.weights


def layers_of(model):
    return [module for module in model.modules() if hasattr(module, "depth_sites")]


def relative(actual, expected) -> float:
    size = expected.double().norm().item()
    error = (actual.double() - expected.double()).norm().item()
    return 0.0 if error == 0 else error / size if size else math.inf
