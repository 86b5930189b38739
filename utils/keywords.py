# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Functions whose keywords are the fields of a dataclass."""

from typing import Any, TypeVar


Fields = TypeVar("Fields")


def keywords_as(of_fields: type[Fields], function: str, keywords: dict[str, Any]) -> Fields:
    """The dataclass with these fields.

    Raises:
        TypeError: for one that it does not have, or one that is missing, as Python says it of the function.
    """
    try:
        return of_fields(**keywords)
    except TypeError as error:
        raise TypeError(str(error).replace(f"{of_fields.__name__}.__init__()", f"{function}()")) from None
