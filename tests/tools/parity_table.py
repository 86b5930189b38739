# SPDX-License-Identifier: Apache-2.0
"""Prints the table of docs/parity.md: how far a converted model is from its base.

python tests/tools/parity_table.py
"""

import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import torch
from tiny_models import FAMILIES, convert, relative_error, tiny_base_model
from transformers.utils import logging


def main():
    logging.set_verbosity_error()
    input_ids = torch.randint(3, 97, (3, 11), generator=torch.Generator().manual_seed(0))
    print("| base | Full | blocks of 2 | blocks of 3 | not multiplied |\n|---|---|---|---|---|")
    for family in FAMILIES:
        errors = []
        base_model = tiny_base_model(family)
        with torch.no_grad():
            expected = base_model(input_ids).logits
            for block_size, exact in ((1, True), (2, True), (3, True), (3, False)):
                model = convert(base_model, block_size, exact=exact)
                errors.append(relative_error(model(input_ids).logits, expected))
        print(f"| {family} | " + " | ".join(f"{error:.0e}" for error in errors) + " |")


if __name__ == "__main__":
    main()
