# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Other reads over depth than the paper's own: several heads, other weights, open blocks, queries that see the input.

With the sources `v_1 ... v_n` of a site, their keys `k_i = v_i / rms(v_i)`, and slices `[h]` of `hidden / heads`:

    scores    z_i^h = q[h] . k_i[h]                                  (the norm is over all of the hidden dimension)
    weights   softmax:   alpha_i^h = e^{z_i^h} / sum_j e^{z_j^h}
              softmax1:  alpha_i^h = e^{z_i^h} / (1 + sum_j e^{z_j^h})  (as if there were a source of zeros)
              sigmoid:   alpha_i^h = 1 / (1 + e^{-z_i^h})
    mix       h[h] = sum_i alpha_i^h v_i[h]
    query     learned: q = w * gamma;  input: q = W x * gamma;  hybrid: q = (w + W x) * gamma
              with the newest source x, and W of a rank as B^T A

and of an open block either the sum of its outputs is a source, or each output. At queries of zero the weights are all
1 / n, 1 / (n + 1) or 1 / 2. So a read times f = n, n + 1 or 2 is the residual stream, as the paper's is.

The mix is what a sublayer is given in place of the residual stream x = sum_i v_i, which it replaces. Where the stream
is kept (arXiv 2605.18855), it is added to it,

    h = x + sum_i alpha_i v_i = sum_i (1 + alpha_i) v_i

and a read multiplied by f / (f + 1) is the residual stream at queries of zero.

Here is what a read may be like. Its definition is in `definition.py`, and the streams that are read so are in
`other_reads.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from transformers.configuration_utils import PreTrainedConfig

from .choices import READS


@dataclass(frozen=True)
class ReadConfig:
    """How the sources of a site are read: the fields of `AttnResConfig` of these names."""

    num_heads: int = 1
    query: str = "learned"
    query_rank: int | None = None
    weights: str = "softmax"
    open_block: str = "sum"
    stream: str = "replaced"

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "ReadConfig":
        return cls(  # one by one, as a compiler goes through here
            config.attn_res_num_heads,
            config.attn_res_query,
            config.attn_res_query_rank,
            config.attn_res_weights,
            config.attn_res_open_block,
            config.attn_res_stream,
        )

    @property
    def keeps_stream(self) -> bool:
        return self.stream == "kept"

    def factor(self, num_sources: int) -> float:
        """By which a read is multiplied to be the residual stream at queries of zero."""
        inverse_weight = {"softmax": num_sources, "softmax1": num_sources + 1, "sigmoid": 2}[self.weights]
        return inverse_weight / (inverse_weight + 1) if self.keeps_stream else inverse_weight

    def __str__(self):
        return f"a read with {self.in_words()}" if self != ReadConfig() else "the paper's read"

    def in_words(self) -> str:
        """What is not the paper's own: `4 heads, weights sigmoid`."""
        words = [f"{self.num_heads} heads"] if self.num_heads > 1 else []
        words += [
            f"{field.name.replace('_', ' ')} {getattr(self, field.name)}"
            for field in fields(self)[1:]
            if getattr(self, field.name) != field.default
        ]
        return ", ".join(words)

    def numbers(self) -> list[int]:
        """The fields as an adapter's file keeps them: five numbers, or six if the stream is kept."""
        places = [choices.index(getattr(self, name.removeprefix("attn_res_"))) for name, choices in READS.items()]
        return [self.num_heads, self.query_rank or 0, *(places if self.keeps_stream else places[:-1])]

    @classmethod
    def of_numbers(cls, numbers: Sequence[int]) -> "ReadConfig | None":
        """The read that has these numbers; `None` if this version of the code knows none."""
        numbers = [*numbers, 0] if len(numbers) == 5 else numbers  # from before the stream could be kept
        if len(numbers) != 2 + len(READS):
            return None
        num_heads, rank, *places = numbers
        if num_heads < 1 or not all(0 <= place < len(choices) for choices, place in zip(READS.values(), places)):
            return None
        query, *others = (choices[place] for choices, place in zip(READS.values(), places))
        return cls(num_heads, query, rank or None, *others)

    def check_parts(
        self,
        site: int,
        block_size: int,
        blocks: Sequence[torch.Tensor],
        partial: torch.Tensor | None,
        outputs: Sequence[torch.Tensor],
    ):
        """Raise a `ValueError` unless a stream at the site is made of so many blocks and outputs of the open block."""

        def in_words(num_blocks: int, is_open: bool, num_outputs: int) -> str:
            return f"{num_blocks} `blocks`, {'a' if is_open else 'no'} `partial` and {num_outputs} `outputs`"

        num_closed, num_open = divmod(site, block_size)
        expected = in_words(1 + num_closed, num_open > 0, num_open if self.open_block == "each" else 0)
        given = in_words(len(blocks), partial is not None, len(outputs))
        if given != expected:
            raise ValueError(
                f"A stream at site {site} with `attn_res_block_size={block_size}` and"
                f" `attn_res_open_block={self.open_block!r}` has {expected}, not {given}."
            )


PAPERS_READ = ReadConfig()
