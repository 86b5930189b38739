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
1 / n, 1 / (n + 1) or 1 / 2. So a read that is multiplied by n, n + 1 or 2 is the residual stream, as the paper's is.

Here are what a read may be like and its weights; the streams that are read so are in `other_reads.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.nn import functional as F
from transformers.configuration_utils import PreTrainedConfig

from .choices import READS


class Softmax:
    """The paper's weights, which sum to 1."""

    @staticmethod
    def of_scores(scores: torch.Tensor) -> torch.Tensor:
        """The weights `[..., sources]` of scores."""
        return torch.softmax(scores, dim=-1)

    @staticmethod
    def factor(num_sources: int) -> int:
        """The inverse of every weight at queries of zero."""
        return num_sources

    @staticmethod
    def of_closed(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Phase 1: the weights of the closed sources alone, and what phase 2 has to know: here `-logsumexp`."""
        log_weights = torch.log_softmax(scores, dim=-1)
        return log_weights.exp(), log_weights[..., :1] - scores[..., :1]

    @staticmethod
    def weight(product: torch.Tensor, key_l2_norm: torch.Tensor, negative_lse: Any) -> torch.Tensor:
        """Phase 2: the weight of one source more by the online-softmax rule; its score is `product / key_l2_norm`."""
        return torch.addcdiv(negative_lse, product, key_l2_norm).sigmoid_()

    # `(mix, value, weight)`
    merge = staticmethod(torch.lerp)

    @staticmethod
    def next_state(product: torch.Tensor, key_l2_norm: torch.Tensor, negative_lse: Any) -> torch.Tensor | None:
        """What the weight of a further source has to know after that of this one."""
        # Beyond the threshold torch leaves out e^-x, and with its own of 20 that is 2e-9
        return negative_lse - F.softplus(torch.addcdiv(negative_lse, product, key_l2_norm), threshold=40)


class SoftmaxWithNull(Softmax):
    """A softmax that may also choose nothing (`softmax1`, arXiv 2605.17887): one score more, which is zero."""

    @staticmethod
    def of_scores(scores: torch.Tensor) -> torch.Tensor:
        return torch.softmax(F.pad(scores, (1, 0)), dim=-1)[..., 1:]

    @staticmethod
    def factor(num_sources: int) -> int:
        return num_sources + 1

    @staticmethod
    def of_closed(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        log_weights = torch.log_softmax(F.pad(scores, (1, 0)), dim=-1)
        return log_weights[..., 1:].exp(), log_weights[..., :1]


class Sigmoid:
    """Weights that are independent of each other."""

    @staticmethod
    def of_scores(scores: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(scores)

    @staticmethod
    def factor(num_sources: int) -> int:
        return 2

    @staticmethod
    def of_closed(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return torch.sigmoid(scores), None

    @staticmethod
    def weight(product: torch.Tensor, key_l2_norm: torch.Tensor, _) -> torch.Tensor:
        return (product / key_l2_norm).sigmoid_()

    merge = staticmethod(torch.addcmul)

    @staticmethod
    def next_state(product: torch.Tensor, key_l2_norm: torch.Tensor, _) -> torch.Tensor | None:
        return None


WEIGHTS: dict[str, Any] = {"softmax": Softmax, "sigmoid": Sigmoid, "softmax1": SoftmaxWithNull}


@dataclass(frozen=True)
class ReadConfig:
    """How the sources of a site are read: the fields of `AttnResConfig` of these names."""

    num_heads: int = 1
    query: str = "learned"
    query_rank: int | None = None
    weights: str = "softmax"
    open_block: str = "sum"

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "ReadConfig":
        return cls(  # one by one, as a compiler goes through here
            config.attn_res_num_heads,
            config.attn_res_query,
            config.attn_res_query_rank,
            config.attn_res_weights,
            config.attn_res_open_block,
        )

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
        """The fields as an adapter's file keeps them."""
        places = [READS[f"attn_res_{name}"].index(getattr(self, name)) for name in ("query", "weights", "open_block")]
        return [self.num_heads, self.query_rank or 0, *places]

    @classmethod
    def of_numbers(cls, numbers: Sequence[int]) -> "ReadConfig | None":
        """The read that has these numbers; `None` if this version of the code knows none."""
        num_heads, rank, *places = numbers if len(numbers) == 5 else (0,) * 5
        if num_heads < 1 or not all(0 <= place < len(choices) for choices, place in zip(READS.values(), places)):
            return None
        query, weights, open_block = (choices[place] for choices, place in zip(READS.values(), places))
        return cls(num_heads, query, rank or None, weights, open_block)

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
