# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""What a model reads from where: depth weights over real text, as numbers, as pictures and as a page.

- `run.py`: an inspection, from checks to files; `text.py`: what is read
- `measure.py`: means of the depth weights; `effects.py`: gradients and masking
- `figures.py`, `page.py`: pictures and the page; `callback.py`: the same in training
- `explorer.py`: a page to try a model on, with gradio
"""

from .effects import ablate, gradient_rms
from .measure import DepthStatistics, Excerpt, SiteStatistics, measure
from .run import inspect
from .text import TextToRead


__all__ = [
    "DepthStatistics",
    "Excerpt",
    "SiteStatistics",
    "TextToRead",
    "ablate",
    "gradient_rms",
    "inspect",
    "measure",
]
