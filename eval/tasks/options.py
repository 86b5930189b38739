# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Options of GPQA in an order that is a function of the question alone."""

import hashlib
import random

from datasets import Dataset


def in_fixed_order(dataset: Dataset) -> Dataset:
    """Adds `options`, the answers in an order that a hash of the question gives, and `answer`, where the right is."""

    def shuffle(doc):
        right = doc["Correct Answer"].strip()
        options = [right, *(doc[f"Incorrect Answer {i}"].strip() for i in (1, 2, 3))]
        seed = int.from_bytes(hashlib.sha256(doc["Question"].encode()).digest()[:8], "big")
        order = list(range(4))
        random.Random(seed).shuffle(order)
        return {"options": [options[i] for i in order], "answer": order.index(0)}

    return dataset.map(shuffle, load_from_cache_file=False)
