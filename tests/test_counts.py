# SPDX-License-Identifier: Apache-2.0
"""Operations and traffic of reads, counted: as the page says."""

import re
from pathlib import Path

import pytest
import torch

from attnres.benchmarks.counts import ROWS, Counter, counts


PAGE = (Path(__file__).parents[1] / "docs/costs.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("row", ROWS)
def test_the_page_is_true(row):
    """To a tenth: other versions of torch and transformers may take an operation more or less."""
    cells, _before = re.findall(rf"^\| {row} \| (.*) \|$", PAGE, re.MULTILINE)
    found = [number for cell in counts(*ROWS[row]).values() for number in cell]
    assert found == pytest.approx([float(number) for number in re.findall(r"[\d.]+", cells)], rel=0.1, abs=0.3)


def test_what_is_counted():
    """An operation is what computes, and its traffic what is in memory: no views, and an expanded tensor once."""
    numbers, ones = torch.zeros(3, 4), torch.ones(1, 4).expand(3, 4)
    with Counter() as counter:
        (numbers.view(4, 3).T[1:].detach() + 1).sum()
        numbers.copy_(ones)
        torch.empty(5).mul_(2)
    assert counter.operations == 4
    # In fp32: 8 numbers read and written, 8 read and 1 written, 4 read and 12 written, 5 read and written
    assert counter.bytes == 4 * (8 + 8 + 8 + 1 + 4 + 12 + 5 + 5)
