# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""How a residual stream answers where a layer takes it for a tensor: which operations keep it, and which read it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .norms import norm_of


class TensorLike:
    """What a layer may do with a stream as with a tensor of the shape of its newest source.

    Adding a tensor of this shape writes. What is linear and keeps the hidden dimension (a number as a factor, slices
    of tokens, another device) is done to every source. All else reads: it is done to the mix, a plain tensor.
    """

    pending_dtype: torch.dtype | None
    mix: torch.Tensor | None
    read: Callable[..., torch.Tensor]
    write: Callable[[torch.Tensor], Any]
    on_sources: Callable[[Callable[[torch.Tensor], torch.Tensor]], Any]
    on_device: Callable[..., Any]
    on_newest: Callable[[Callable[[torch.Tensor], torch.Tensor]], Any]

    @property
    def newest(self) -> torch.Tensor:
        """The newest source, `[batch, seq, hidden]`."""
        raise NotImplementedError

    def copy_with(self, **changes) -> Any:
        """The same with other values of attributes, and without what has been read of it."""
        new = object.__new__(type(self))  # a step of decoding makes one at every site
        new.__dict__.update(self.__dict__)
        for name, value in changes.items():
            setattr(new, name, value)
        new.mix = None
        return new

    def to(self, *args, **kwargs) -> Any:
        """As of a tensor. Neither is a read: a dtype is remembered for the next one, a device moves the sources."""
        device, dtype = kwargs.get("device"), kwargs.get("dtype")
        for arg in args:
            if isinstance(arg, torch.dtype):
                dtype = arg
            elif isinstance(arg, (torch.device, str, int)) and not isinstance(arg, bool):
                device = arg
            elif hasattr(arg, "dtype"):
                dtype, device = arg.dtype, arg.device
        stream = self
        if dtype is not None and dtype != self.dtype:
            stream = self.copy_with(pending_dtype=dtype)
        if device is not None and torch.device(device) != self.device:
            stream = stream.on_device(device, kwargs.get("non_blocking", False))
        return stream

    def reshape(self, *shape):
        shape = tuple(shape[0]) if isinstance(shape[0], (tuple, list)) else shape
        if shape[-1] == self.shape[-1]:
            return self.on_sources(lambda source: source.reshape(shape))
        return self.read().reshape(shape)

    view = reshape

    def contiguous(self):
        return self

    def clone(self, **kwargs):
        return self.copy_with()

    @property
    def shape(self) -> torch.Size:
        return self.newest.shape

    @property
    def ndim(self) -> int:
        return self.newest.ndim

    @property
    def device(self) -> torch.device:
        return self.newest.device

    @property
    def is_cuda(self) -> bool:
        return self.newest.is_cuda

    @property
    def dtype(self) -> torch.dtype:
        return self.newest.dtype if self.pending_dtype is None else self.pending_dtype

    @property
    def requires_grad(self) -> bool:
        return self.newest.requires_grad

    def size(self, *args):
        return self.newest.size(*args)

    def dim(self) -> int:
        return self.newest.dim()

    def is_floating_point(self) -> bool:
        return True

    def __add__(self, other):
        if isinstance(other, torch.Tensor) and other.shape == self.newest.shape:
            return self.write(other)
        return self.read() + _read_all(other)

    __radd__ = __add__
    __iadd__ = __add__

    def __mul__(self, other):
        if _is_factor(other):
            return self.on_sources(lambda source: source * other)
        return self.read() * _read_all(other)

    __rmul__ = __mul__
    __imul__ = __mul__

    def __truediv__(self, other):
        if _is_factor(other):
            return self.on_sources(lambda source: source / other)
        return self.read() / _read_all(other)

    def __sub__(self, other):
        return self.read() - other

    def __getitem__(self, index):
        slices = index if isinstance(index, tuple) else (index,)
        mask = slices[0]
        if isinstance(mask, torch.Tensor) and mask.dtype == torch.bool and mask.shape == self.shape[:-1]:
            if slices[1:] in ((), (slice(None),)):
                return SelectedTokens(self, mask)
        if all(isinstance(of_dim, slice) for of_dim in slices) and slices[self.ndim - 1 :] in ((), (slice(None),)):
            is_whole = all(of_dim.indices(size) == (0, size, 1) for of_dim, size in zip(slices, self.shape))
            return self if is_whole else self.on_sources(lambda source: source[index])  # some of the tokens
        return self.read()[index]

    def __setitem__(self, index, value):
        """`stream[mask] = stream[mask] + output`; see `SelectedTokens`. Of all methods the only one in place."""
        if not isinstance(value, SelectedTokens) or not value.is_of(self, self[index]):
            raise TypeError(
                "Of the residual stream of an AttnRes model, tokens can be replaced only by themselves with something"
                " added to them: `stream[mask] = stream[mask] + output`."
            )
        self.__dict__.update(value.put_back().__dict__)

    def masked_scatter(self, mask: torch.Tensor, source) -> Any:
        if isinstance(source, SelectedTokens) and source.is_of(self, self[mask.squeeze(-1)]):
            return source.put_back()
        return self.read().masked_scatter(mask, _read_all(source))

    def __len__(self) -> int:
        return len(self.newest)

    def against_overflow(self, function: Callable, *args, **kwargs) -> Any:
        """What encoder-decoders do to the stream in fp16 so that it stays finite, done to the newest source.

        Where it changes nothing in the base, it changes nothing here.
        """
        if function.__name__ == "clamp":
            return self.on_newest(lambda newest: function(newest, *args, **kwargs))
        return function(self.newest, *args, **kwargs)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in ("add", "__add__", "__radd__", "__iadd__") and len(args) == 2 and not kwargs:
            stream, output = args if isinstance(args[0], cls) else args[::-1]
            return stream.__add__(output)  # not `+`, which a compiler brings back here
        if name in ("mul", "__mul__", "__rmul__", "__imul__") and len(args) == 2 and not kwargs:
            stream, number = args if isinstance(args[0], cls) else args[::-1]
            if _is_factor(number):
                return stream.on_sources(lambda source: source * number)
        if name in _AGAINST_OVERFLOW and args and isinstance(args[0], cls) and args[0].newest.dtype == torch.float16:
            return args[0].against_overflow(function, *args[1:], **kwargs)
        if name == "dropout" and not (kwargs.get("training", True) and kwargs.get("p", 0.5)):
            return args[0] if args else kwargs["input"]
        if name in _IN_PLACE:
            raise TypeError(f"`{name}` works in place, and the residual stream of an AttnRes model is a value.")
        return function(*_read_all(args), **{name: _read_all(value) for name, value in kwargs.items()})


class SelectedTokens(TensorLike):
    """`stream[mask]`: the tokens of a stream where a mask is true, `[tokens, hidden]`.

    Some models give features of an image to the tokens of that image between their layers (DeepStack, arXiv
    2406.04334). That is no output of a sublayer, and a text has none: it belongs to the newest source, the output that
    has been written last and is in the open block, or in the block that has just been closed.

    Args:
        stream: the tokens are of.
        mask: `[batch, seq]`, bool.
        added: what has been added to them, `[tokens, hidden]`.
    """

    def __init__(self, stream: Any, mask: torch.Tensor, added: torch.Tensor | None = None):
        self.stream, self.mask, self.added = stream, mask, added
        self.selected, self.pending_dtype = stream.newest[mask], stream.pending_dtype

    @property
    def newest(self) -> torch.Tensor:
        return self.selected

    def write(self, output: torch.Tensor) -> "SelectedTokens":
        return SelectedTokens(self.stream, self.mask, output if self.added is None else self.added + output)

    def read(self, norm: nn.Module | None = None) -> torch.Tensor:
        if self.added is not None:
            raise TypeError(
                "What was added to some tokens of the residual stream of an AttnRes model has to be put back,"
                " `stream[mask] = stream[mask] + output`, before it is read."
            )
        tokens = self.stream.read()[self.mask]
        return tokens if norm is None else norm_of(norm, tokens)

    def on_sources(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        return function(self.read())

    def reshape(self, *shape):
        return self if shape in ((-1,), ((-1,),)) and self.added is not None else self.read().reshape(*shape)

    view = reshape  # flat, as `masked_scatter` takes them

    def is_of(self, stream: Any, selected: Any) -> bool:
        """Whether they are tokens of this stream, those that are selected there."""
        if not isinstance(selected, SelectedTokens) or self.stream.site != stream.site:
            return False
        if not all(own is other for own, other in zip(self.stream.sources, stream.sources, strict=True)):
            return False
        return self.mask is selected.mask or torch.equal(self.mask, selected.mask)

    def put_back(self) -> Any:
        """The stream with what was added to its tokens."""
        added = self.added
        if added is None:
            return self.stream
        return self.stream.on_newest(lambda newest: newest.index_put((self.mask,), newest[self.mask] + added))


# Looked up, as a compiler cannot call methods of the name of a function
_IN_PLACE = frozenset(
    name for name in (*dir(torch.Tensor), *dir(torch), *dir(F)) if name.endswith("_") and not name.endswith("__")
)


_AGAINST_OVERFLOW = frozenset({"clamp", "isinf", "isfinite", "isnan"})


def _read_all(value: Any) -> Any:
    if isinstance(value, TensorLike):
        return value.read()
    return type(value)(_read_all(item) for item in value) if type(value) in (tuple, list) else value


def _is_factor(value: Any) -> bool:
    """Whether it is a number, which scales every source. Of a number, scores have no more than the sign."""
    if isinstance(value, torch.Tensor):  # of more dimensions it goes with the tokens, if there is one
        return value.ndim <= 1 and value.numel() == 1
    return not isinstance(value, TensorLike)


def _reading(name: str) -> Callable:
    def method(self: TensorLike, *args, **kwargs):
        return getattr(self.read(), name)(*args, **kwargs)

    return method


# By name, as a compiler recurses in `__getattr__`
for _name in (
    *(name for name in dir(torch.Tensor) if not name.startswith("_") and not name.endswith("_")),  # none in place
    *("__rtruediv__", "__pow__", "__matmul__", "__rmatmul__", "__rsub__", "__neg__"),
):
    if callable(getattr(torch.Tensor, _name)) and not hasattr(TensorLike, _name):
        setattr(TensorLike, _name, _reading(_name))
for _name, _dtype in (("float", "float32"), ("double", "float64"), ("half", "float16"), ("bfloat16", "bfloat16")):
    setattr(TensorLike, _name, lambda self, _dtype=_dtype: self.to(getattr(torch, _dtype)))
