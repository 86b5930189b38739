# SPDX-License-Identifier: Apache-2.0
"""How far two correct programs for one function may be apart, measured in the test that compares them.

A program rounds every value x_i that it computes, by d_i, a part of a unit in the last place. If J_i is the derivative
of the result f by x_i, its result is f + sum_i J_i d_i, and another program (another order of summation, other
kernels, another CPU) has the same sum with other d_i. How large that is depends on the function and on the numbers: a
network that amplifies small changes amplifies rounding, and a sum that nearly cancels is mostly rounding. So no fixed
figure holds everywhere, but the sum can be drawn: the computation is repeated with the values in it moved by one unit
in the last place, each up or down at random, and what that does to the result is what rounding does to it.

In a model the values that go into its innermost modules are moved (there are ten and more of them in a layer), and
with them the gradients that come back out of these modules; of a function of tensors, its arguments are.
`FACTOR` times the largest of `REPETITIONS` such draws is allowed: two programs have two such errors, a draw can come
out small, and in between the moved values there are operations whose rounding is not drawn. The allowed error is
itself limited, so that a tolerance can never grow to hide a fault.
"""

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from tiny_models import relative_error
from torch import nn


REPETITIONS = 4
FACTOR = 4
# Of the allowed error, relative to the result. What is tested in half precision is tested in fp32 as well
LARGEST = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}


def one_unit_away(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Every value one unit in the last place up or down, or two where the mantissa is large; and its gradient too."""
    up = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor.device, tensor.dtype) * 2 - 1
    return tensor * (1 + up * torch.finfo(tensor.dtype).eps)


def is_rounded(value) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


@contextlib.contextmanager
def moved(model: nn.Module, generator: torch.Generator) -> Iterator[None]:
    """While it is on, all that goes into a module without submodules is moved."""

    def move(module, args):
        return tuple(one_unit_away(arg, generator) if is_rounded(arg) else arg for arg in args)

    modules = [module for module in model.modules() if not list(module.children())]
    handles = [module.register_forward_pre_hook(move) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def all_in_fp64() -> Iterator[None]:
    """While it is on, everything is computed in fp64, where nothing hides behind rounding.

    Also what the base models compute in fp32 in every dtype: norms, softmaxes, recurrences. They do so by name.
    """
    default = torch.get_default_dtype()
    with contextlib.ExitStack() as stack:
        for name in ("float32", "float"):
            stack.enter_context(mock.patch.object(torch, name, torch.float64))
        stack.enter_context(mock.patch.object(torch.Tensor, "float", torch.Tensor.double))
        stack.callback(torch.set_default_dtype, default)
        torch.set_default_dtype(torch.float64)
        yield


def wide(model: nn.Module) -> nn.Module:
    """In fp64, with experts one by one, as products in groups are not there in fp64."""
    if getattr(model.config, "num_experts_per_tok", None) is not None:
        model.set_experts_implementation("eager")
    return model.double()


def named(results, path: str = "result") -> dict[str, torch.Tensor]:
    """All tensors of floating-point numbers in nested tuples, lists and dictionaries, detached."""
    if isinstance(results, torch.Tensor):
        return {path: results.detach()} if is_rounded(results) else {}
    items = results.items() if isinstance(results, dict) else enumerate(results)
    return {name: tensor for key, value in items for name, tensor in named(value, f"{path}[{key!r}]").items()}


def check_beside(actual, other, exact):
    """In half precision, results may be as far from the exact ones as those of another program, but for chance.

    Through some layers gradients in bf16 are off by a tenth, so this alone shows no more than gross faults. It is for
    tensors, not for single numbers, which may be right by chance.
    """
    actual, other = named(actual), named(other)
    for name, expected in named(exact).items():
        error = relative_error(other[name], expected)
        assert error < 0.3, f"{name} is too badly conditioned to be compared"
        assert relative_error(actual[name], expected) <= 3 * error, name


class UpToRounding:
    """The results of a computation, and how far those of another program for the same function may be from them."""

    def __init__(self, compute: Callable, *inputs, model: nn.Module | None = None):
        """
        Args:
            compute: a function of `inputs`, whose results are tensors, alone or in tuples, lists or dictionaries.
            inputs: of these the tensors are moved.
            model: what `compute` runs, if it does.
        """
        self.expected = named(compute(*inputs))
        generator = torch.Generator().manual_seed(0)
        largest = dict.fromkeys(self.expected, 0.0)
        for _ in range(REPETITIONS):
            others = [self._moved(value, generator) for value in inputs]
            with moved(model, generator) if model is not None else contextlib.nullcontext():
                results = named(compute(*others))
            for name, expected in self.expected.items():
                largest[name] = max(largest[name], relative_error(results[name], expected))
        parameters = [] if model is None else model.parameters()
        narrowest = max(
            LARGEST[value.dtype] for value in (*inputs, *parameters, *self.expected.values()) if is_rounded(value)
        )
        self.allowed = {}
        for name, expected in self.expected.items():
            # At last the result is rounded, by either program, and perhaps in two parts that are added
            self.allowed[name] = FACTOR * largest[name] + 2 * torch.finfo(expected.dtype).eps
            assert self.allowed[name] < narrowest, (
                f"{name} is too badly conditioned to be compared: {self.allowed[name]}"
            )

    @staticmethod
    def _moved(value, generator: torch.Generator):
        if not is_rounded(value):
            return value
        return one_unit_away(value.detach(), generator).requires_grad_(value.requires_grad)

    def ratios(self, actual) -> dict[str, float]:
        """Errors of other results over what is allowed, of each tensor: up to 1 it is rounding."""
        actual = named(actual)
        assert actual.keys() == self.expected.keys()
        ratios = {}
        for name, expected in self.expected.items():
            assert actual[name].shape == expected.shape and actual[name].dtype == expected.dtype, name
            ratios[name] = relative_error(actual[name], expected) / self.allowed[name]
        return ratios

    def check(self, actual):
        for name, ratio in self.ratios(actual).items():
            assert ratio <= 1, f"{name} is off by {ratio:.3g} times what rounding may do, {self.allowed[name]:.1e}"
