# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Functions that take the fields of dataclasses as keywords."""

import functools
import inspect
from collections.abc import Callable, Collection
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar


Function = TypeVar("Function", bound=Callable[..., Any])


def with_keywords_of(*groups: type, but: Collection[str] = ()) -> Callable[[Function], Function]:
    """Of a function with `**options`: they are the fields of dataclasses, which `help()` and notebooks show.

    Others are refused, and one that is missing is asked for, as Python does it: with a `TypeError`.

    Args:
        groups: the dataclasses.
        but: fields that are not to be given by whoever calls the function.
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        named = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        options = [
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=_default(field), annotation=field.type
            )
            for group in groups
            for field in fields(group)
            if field.name not in but
        ]
        whole = signature.replace(parameters=[*named, *options])

        @functools.wraps(function)
        def checked(*args, **kwargs):
            try:
                for name in kwargs.keys() - whole.parameters.keys():  # before one is missed that was meant by it
                    raise TypeError(f"got an unexpected keyword argument {name!r}")
                whole.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{function.__qualname__.removesuffix('.__init__')}() {error}") from None
            return function(*args, **kwargs)

        checked.__signature__ = whole  # type: ignore[attr-defined]
        return checked  # type: ignore[return-value]

    return decorate


def _default(field: Field) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return inspect.Parameter.empty if field.default is MISSING else field.default
