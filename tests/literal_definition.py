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


def mix_by_definition(query, key_norm, sources, eps: float):
    """Equations 2 to 4: the mix of the sources at one site, and its weights, `[batch, seq, sources]`."""
    scores = []
    for source in sources:
        key = key_norm * source / torch.sqrt((source * source).mean(-1, keepdim=True) + eps)
        scores.append((query * key).sum(-1))
    exponentials = [torch.exp(score - torch.stack(scores).max(0).values) for score in scores]
    weights = [exponential / sum(exponentials) for exponential in exponentials]
    return sum(weight.unsqueeze(-1) * source for weight, source in zip(weights, sources)), torch.stack(weights, -1)


class LiteralDefinition(TorchDispatchMode):
    """While it is on, a native model computes what its AttnRes model should.

    Args:
        first_layer: of the native model.
        query, key_norm: `[sites, hidden]`.
        block_size: outputs per block.
        eps: of the norm on the keys.
        sums: whether a mix is multiplied by its number of sources.
    """

    def __init__(self, first_layer, query, key_norm, block_size: int, eps: float, sums: bool):
        super().__init__()
        self.first_layer = first_layer
        self.query, self.key_norm, self.block_size, self.eps, self.sums = query, key_norm, block_size, eps, sums

    def __enter__(self):
        # By the id of a stream's tensor: that tensor (so that nobody else gets the id), and what has been added to it
        self.streams: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
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
        outputs = self.outputs_of(value)
        if outputs is None:
            return value
        site, added = len(outputs) - 1, outputs[1:]
        sources = [outputs[0], *(sum(added[i : i + self.block_size]) for i in range(0, site, self.block_size))]
        mix, self.weights[site] = mix_by_definition(self.query[site], self.key_norm[site], sources, self.eps)
        return (mix * (len(sources) if self.sums else 1)).to(value.dtype).view(value.shape)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [self.outputs_of(arg) for arg in args[:2]]
        if function in (aten.add.Tensor, aten.add_.Tensor) and not kwargs and (given[0] is None) != (given[1] is None):
            (outputs,), (output,) = [o for o in given if o], [a for a, o in zip(args, given) if o is None]
            if isinstance(output, torch.Tensor) and output.shape == args[0].shape == args[1].shape:
                output = output.clone()  # before it is added to in place
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
        if function is aten.detach.default and given[0]:  # of a hook, or of the native code's own `no_grad`
            return self.keep(function(*args, **kwargs), given[0])
        return function(*tree_map(self.read, args), **tree_map(self.read, kwargs))


def literal_logits(native, model, input_ids, **kwargs):
    """What an AttnRes model should compute, with its base's native model of the same weights: logits and weights."""
    queries, config = model.trunk.depth_queries, model.trunk.config
    layers = next(
        module
        for module in native.modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == len(layers_of(model))
    )
    definition = LiteralDefinition(
        layers[0],
        queries.query.detach(),
        queries.key_norm.detach(),
        config.attn_res_block_size,
        config.attn_res_norm_eps,
        config.attn_res_scale_norm_eps,
    )
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
