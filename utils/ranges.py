# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Lists of numbers as people write them: `0-5, 8-11`, whose ends are included."""

import re
from collections.abc import Iterable


def in_ranges(numbers: Iterable[int]) -> str:
    """Numbers in their order, those that follow each other as a range. The inverse of `read_ranges`."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    return ", ".join(f"{found[0]}-{found[-1]}" if len(found) > 1 else f"{found[0]}" for found in ranges)


def read_ranges(text: str) -> list[int]:
    """Numbers from a text such as `0-5,8-11`.

    Raises:
        ValueError: if the text is something else.
    """
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})(?:\s*-\s*(\d{1,6}))?\s*", part, re.ASCII)
        if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
            raise ValueError(f"`{text}` must be numbers and ranges of them, such as 0-5,8-11 or 0,1,2.")
        numbers += range(int(match[1]), int(match[2] or match[1]) + 1)
    return numbers
