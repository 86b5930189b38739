# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Models with other layers than they were loaded with: some left out, some repeated, each as it was.

A model of some layers of another is a model of its config, `config_with_layers`, with the layers' own tensors. Fields
of configs are cut by their names, and for whatever has another name there is no table of families: `check_same_layers`
compares the layers that transformers makes of both configs, and refuses what differs.
"""

import copy
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..base.config import copy_private, is_encoder_decoder, per_layer
from ..base.probe import decoder_layers, decoder_on_meta, probe_sublayers
from ..configuration_attnres import AttnResConfig
from ..depth.queries import AttnResDepthQueries
from ..modeling_attnres import AttnResModel
from ..utils.ranges import in_ranges
from ..utils.untrusted import in_one_line


# Fields of configs that go with the layers: an entry for each layer, if the list is as long as that
PER_LAYER = re.compile(r"layer|type|pattern|mode")
# Numbers of layers of a kind
LISTED = re.compile(r"^(mlp_only_layers|moe_layers|.*_layer_(indices|ids))$")
# How many of the first layers are of a kind, and how many of the last ones
OF_FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
OF_LAST = ("num_kv_shared_layers",)
# Attributes of modules that name a layer by its number
LAYER_NUMBER = re.compile(r"(^|_)layer_?(idx|index|id|number)$")
# Attributes that say nothing of what a module computes: those of every module, and where a layer is in its model
OF_PLACE = {*vars(nn.Module()), "depth_sites"}
PLAIN = (bool, int, float, str, type(None), torch.dtype)


def select_layers(model: PreTrainedModel, layers: Iterable[int]) -> PreTrainedModel:
    """A model with these layers of another one, which computes as if it had been made with them.

    Layers that are not listed are left out, and a layer that is listed twice is repeated. They run in the order of the
    list. In an AttnRes model the queries of a layer go with it, and the last read stays the last. Layers that are left
    out are no sources, blocks are counted again from the first layer, and where reads are multiplied by their number
    of sources (`attn_res_scale_norm_eps`), it is the new number. So with queries of zero, the model computes exactly
    what its base with the same layers computes.

    Args:
        model: an AttnRes model, or one of a supported base. It stays as it is, and shares its tensors with the new
            model, apart from the queries. The second and further copies of a layer have their own tensors. Hooks and
            gradient checkpointing stay with the old model.
        layers: numbers of the layers, from 0, such as `range(20)` or `[0, 1, 1, 2]`.

    Raises:
        ValueError: if there is no such layer, if the config of the model cannot express the result, or if the model
            has a part that transformers does not make from its config, such as an adapter or quantised weights.
        TypeError: if `model` is not a model of transformers, or a layer is not an int.
    """
    check_model(model)
    kept = check_layers(layers, model.config.num_hidden_layers)
    config = config_with_layers(model.config, kept)
    check_same_layers(model.config, config, kept)
    with torch.inference_mode(False), torch.no_grad(), torch.device("meta"):
        selected = type(model)(config)
    _give_tensors(model, selected, kept)
    selected.train(model.training)
    if getattr(model, "generation_config", None) is not None:
        selected.generation_config = copy.deepcopy(model.generation_config)
    return selected


def check_layers(layers: Iterable[int], num_layers: int) -> list[int]:
    """The numbers of layers as a list.

    Raises:
        ValueError: if there are none, or one that a model of `num_layers` does not have.
        TypeError: if they are not ints.
    """
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        raise TypeError(f"`layers={layers!r}` must be numbers of layers, such as `range(4)` or `[0, 1, 3]`.")
    kept = list(layers)
    for number in kept:
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"`layers` has {number!r}, which is not the number of a layer, an int.")
        if not 0 <= number < num_layers:
            raise ValueError(f"`layers` has {number}, and the layers of this model go from 0 to {num_layers - 1}.")
    if not kept:
        raise ValueError("`layers` is empty: a model needs at least one layer.")
    return kept


def check_model(model: Any):
    """Raise a `TypeError` or a `ValueError` for what has no layers to choose from, as far as that shows at once."""
    if hasattr(model, "merge_and_unload"):
        raise ValueError(
            "`model` has a PEFT adapter, whose tensors belong to layers by their numbers: take"
            " `model.merge_and_unload()`, or select layers first and then add an adapter."
        )
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"`model` must be a model of transformers, not a {type(model).__name__}.")
    if getattr(model.config, "quantization_config", None) is not None:
        raise ValueError("`model` is quantised: load its weights as plain numbers, select layers and quantise those.")
    devices = set((getattr(model, "hf_device_map", None) or {}).values())
    if len(devices) > 1:
        raise ValueError(
            f"`model` is on several devices ({', '.join(map(str, devices))}): load it on one of them, such as"
            " `device_map='cpu'`."
        )
    check_is_decoder(model.config)


def check_is_decoder(config: PreTrainedConfig):
    """Raise a `ValueError` for the config of a model whose layers are not one stack, on one residual stream."""
    model_type = getattr(config, "base_model_type", config.model_type)
    if is_encoder_decoder(model_type):
        raise ValueError(
            f"Layers of a `{model_type}` model cannot be selected: it has an encoder as well as a decoder, and"
            " a number does not say of which."
        )
    if config.get_text_config(decoder=True) is not config or not hasattr(config, "num_hidden_layers"):
        raise ValueError(
            f"Layers of a `{model_type}` model cannot be selected: it is made of several models, and other"
            " parts of it may refer to the layers of its language model."
        )
    if not isinstance(config, AttnResConfig):
        probe_sublayers(config)  # other layers may get more of earlier ones than the stream


def config_with_layers(config: PreTrainedConfig, layers: list[int]) -> PreTrainedConfig:
    """The config of a model with these layers, all that it has for single layers included.

    Raises:
        ValueError: if that is no valid config of this type.
    """
    num_layers, values = config.num_hidden_layers, config.to_dict()
    values[config.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = len(layers)
    for name, value in values.items():
        if isinstance(value, list) and LISTED.search(name):
            values[name] = [new for new, old in enumerate(layers) if old in value]
        elif isinstance(value, list) and len(value) == num_layers and PER_LAYER.search(name):
            values[name] = [value[old] for old in layers]
        elif isinstance(value, int) and name in OF_FIRST:
            values[name] = sum(old < value for old in layers)
        elif isinstance(value, int) and name in OF_LAST:
            values[name] = sum(old >= num_layers - value for old in layers)
    of_layers = {int(number): fields for number, fields in per_layer(config).get("per_layer_config", {}).items()}
    if of_layers:
        values["per_layer_config"] = {
            new: copy.deepcopy(of_layers[old]) for new, old in enumerate(layers) if old in of_layers
        }
    try:
        selected = type(config).from_dict(values)
    except Exception as error:  # of the base's own checks
        raise ValueError(
            f"A `{base_type_of(config)}` config cannot express the layers {in_ranges(layers)}: {in_one_line(error)}"
        ) from error
    copy_private(config, selected)
    return selected


def base_type_of(config: PreTrainedConfig) -> str:
    return getattr(config, "base_model_type", config.model_type)


def trunk_on_meta(config: PreTrainedConfig) -> nn.Module:
    """The model of a config without a head, and without tensors or initial values."""
    if not isinstance(config, AttnResConfig):
        return decoder_on_meta(config)
    with torch.inference_mode(False), torch.no_grad(), torch.device("meta"):
        return AttnResModel(config)


def check_same_layers(config: PreTrainedConfig, selected: PreTrainedConfig, layers: list[int]):
    """Raise a `ValueError` unless transformers makes the same layers of a config as of the one that they come from.

    The same are classes, names and shapes of tensors, and attributes that are numbers, strings or made of those. An
    attribute that is the number of a layer has to name the same layer.
    """
    old_trunk, new_trunk = trunk_on_meta(config), trunk_on_meta(selected)
    olds, news = decoder_layers(old_trunk), decoder_layers(new_trunk)
    difference = _difference_of_sources(getattr(config, "indexer_types", None) or [], layers)
    if len(news) != len(layers):
        difference = f"its config makes {len(news)} layers, not {len(layers)}"
    for new, old in enumerate(layers):
        if difference is None and (found := _difference(olds[old], news[new], layers, len(olds))):
            difference = f"layer {old} would be layer {new}, and another one: {found}"
    shapes = [{name: tensor.shape for name, tensor in _tensors_outside(trunk)} for trunk in (old_trunk, new_trunk)]
    if difference is None and shapes[0] != shapes[1]:
        name = next(name for name in {**shapes[0], **shapes[1]} if shapes[0].get(name) != shapes[1].get(name))
        difference = f"`{name}`, which belongs to no layer, depends on their number"
    if difference is not None:
        raise ValueError(f"A `{base_type_of(config)}` model cannot have the layers {in_ranges(layers)}: {difference}.")


def _difference_of_sources(indexer_types: list[str], layers: list[int]) -> str | None:
    """Which layer would attend to tokens that another layer has chosen; `None` if none would, or layers all choose.

    Args:
        indexer_types: "full" for layers that choose, "shared" for those that take the tokens of the last one before.
    """

    def choosing(numbers: list[int]) -> list[int | None]:
        chosen: list[int | None] = []
        for number in numbers:
            is_shared = indexer_types[number] == "shared"
            chosen.append((chosen[-1] if chosen else None) if is_shared else number)
        return chosen

    if not indexer_types:
        return None
    before, after = choosing(list(range(len(indexer_types)))), choosing(layers)
    for number, found in zip(layers, after):
        if found != before[number]:
            other = "none" if found is None else f"layer {found}"
            return f"layer {number} attends to tokens that layer {before[number]} chooses, and {other} would choose"
    return None


def _tensors_outside(trunk: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that belong to no layer, nor to the queries, which go with the layers."""
    prefix = f"{layers_name(trunk)}."
    for name, tensor in (*trunk.named_parameters(), *trunk.named_buffers()):
        if not name.startswith((prefix, "depth_queries.")):
            yield name, tensor


def _difference(old: nn.Module, new: nn.Module, layers: list[int], num_layers: int) -> str | None:
    """What differs between two layers, in words; `None` if nothing does."""
    olds, news = dict(old.named_modules()), dict(new.named_modules())
    for name in olds.keys() | news.keys():
        if name not in olds or name not in news:
            return f"`{name}` is in one of them only"
        old, new = olds[name], news[name]
        if type(old) is not type(new):
            return f"{f'`{name}`' if name else 'it'} is a {type(old).__name__}, and would be a {type(new).__name__}"
        if _shapes(old) != _shapes(new):
            return f"the tensors of `{name}` have other shapes"
        for attribute in sorted((vars(old).keys() | vars(new).keys()) - OF_PLACE):
            before, after = (vars(module).get(attribute) for module in (old, new))
            if not _is_same(attribute, before, after, layers, num_layers):
                place = f"{name}.{attribute}".removeprefix(".")
                return f"`{place}` is {before!r}, and would be {after!r}"
    return None


def _is_same(attribute: str, old: Any, new: Any, layers: list[int], num_layers: int) -> bool:
    if not (_is_plain(old) and _is_plain(new)):
        return True
    if LAYER_NUMBER.search(attribute) and type(old) is type(new) is int and old >= 0:
        return 0 <= new < len(layers) and layers[new] == old
    if isinstance(old, list) and isinstance(new, list) and (len(old), len(new)) == (num_layers, len(layers)):
        return [old[number] for number in layers] == new
    return old == new


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return all(map(_is_plain, value)) if isinstance(value, (list, tuple, set)) else isinstance(value, PLAIN)


def _shapes(module: nn.Module) -> dict[str, torch.Size | None]:
    tensors = {**module._parameters, **module._buffers}
    return {name: None if tensor is None else tensor.shape for name, tensor in tensors.items()}


def layers_name(model: nn.Module) -> str:
    """The name of the list of decoder layers in a model, such as `layers` or `model.layers`."""
    layers = decoder_layers(getattr(model, "base_model", model))
    return next(name for name, module in model.named_modules() if module is layers)


def rows_of_layers(config: AttnResConfig, layers: Iterable[int]) -> list[int]:
    """The sites of some layers, in their order, and the last site: rows of every tensor of the queries."""
    counts = config.sublayers_per_layer()
    first = [sum(counts[:number]) for number in range(len(counts))]
    rows = [site for number in layers for site in range(first[number], first[number] + counts[number])]
    return [*rows, config.num_sites - 1]


def _give_tensors(model: PreTrainedModel, selected: PreTrainedModel, layers: list[int]):
    """Give a new model without tensors those of another one, which it has from then on as well.

    Raises:
        ValueError: for modules that are not those that a config of this type makes.
    """
    trunk, name = model.base_model, layers_name(selected)
    modules = dict(model.named_modules())
    prefix = re.compile(rf"^({re.escape(name)})\.(\d+)")
    used: set[str] = set()
    copied: dict[int, dict[int, torch.Tensor]] = {}
    for path, new in selected.named_modules():
        match = prefix.match(path)
        number = None if match is None else int(match[2])
        source = path if number is None else f"{name}.{layers[number]}{path[match.end() :]}"
        old = modules.get(source)
        used.add(source)
        if type(old) is not type(new):
            raise _changed(source, f"is a {type(old).__name__}, and models of its config have a {type(new).__name__}")
        if old._parameters.keys() != new._parameters.keys() or new._buffers.keys() - old._buffers.keys():
            raise _changed(source, "has other tensors than in models of its config")
        if isinstance(new, AttnResDepthQueries):
            _give(old, new, _rows(rows_of_layers(trunk.config, layers)))
        elif number is not None and layers[number] in layers[:number]:
            _give(old, new, _copies(copied.setdefault(number, {})))
        else:
            _give(old, new, lambda tensor: tensor)
    for path in sorted(modules.keys() - used):
        if not prefix.match(path):
            raise _changed(path, "is not in models of its config")


def _changed(name: str, how: str) -> ValueError:
    return ValueError(
        f"`{name}` of the model {how}: select layers of a model as it is loaded, before adapters, quantisation or"
        " other changes to its modules."
    )


def _give(old: nn.Module, new: nn.Module, of_tensor: Callable[[torch.Tensor], torch.Tensor]):
    """Give a module the tensors of another one of its class; of the queries, the buffer of an adapter stays away."""
    for tensors, found in ((new._parameters, old._parameters), (new._buffers, old._buffers)):
        for name in tensors:
            tensor = found[name]
            tensors[name] = None if tensor is None else of_tensor(tensor)
    for name, value in vars(old).items():
        if isinstance(value, torch.Tensor):  # such as another name of a buffer
            vars(new)[name] = of_tensor(value)
    if any(tensor.is_meta for tensor in (*new.parameters(recurse=False), *new.buffers(recurse=False))):
        raise ValueError("`model` has tensors that are not in memory: load it without offloading.")


def _rows(rows: list[int]) -> Callable[[torch.Tensor], torch.Tensor]:
    def of_tensor(tensor: torch.Tensor) -> torch.Tensor:
        chosen = tensor.detach()[rows]
        return nn.Parameter(chosen, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else chosen

    return of_tensor


def _copies(known: dict[int, torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that copies a tensor, the same one once, as modules of a layer may share it."""

    def of_tensor(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in known:
            copied = tensor.detach().clone()
            parameter = isinstance(tensor, nn.Parameter)
            known[id(tensor)] = nn.Parameter(copied, tensor.requires_grad) if parameter else copied
        return known[id(tensor)]

    return of_tensor
