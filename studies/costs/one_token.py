# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The block cache of a single token on a CPU: reads with numbers beside reads with tensors, alternating.

python -m studies.costs.one_token    # a table, in half a minute; microseconds per site, fastest of nine
"""

import time
from unittest import mock

import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from attnres.depth import block_cache
from attnres.depth.block_cache import BlockCache
from attnres.depth.reads import ReadConfig


SHAPES = ((576, 61), (1024, 57), (64, 9))  # hidden size, sites
READS = (
    *(ReadConfig(num_heads=heads) for heads in (1, 2, 4, 8, 16, 32)),
    *(ReadConfig(stream="kept"), ReadConfig(weights="softmax1"), ReadConfig(weights="sigmoid")),
)


def read_a_token(cache: BlockCache, read: ReadConfig, queries, outputs, block_size: int, norm):
    cache.start(queries, outputs[0], block_size, 1e-6, read)
    cache.append(outputs[0])
    partial = None
    for site in range(len(queries)):
        cache.read(site, () if partial is None else (partial,), norm, 5.0)
        if site + 1 < len(queries):
            partial = outputs[site + 1] if partial is None else partial + outputs[site + 1]
            if (site + 1) % block_size == 0:
                cache.append(partial)
                partial = None


@torch.no_grad()
def main():
    torch.set_num_threads(1)
    print("| width | sites per block | read | numbers | tensors | ratio |\n|---|---|---|---|---|---|")
    for hidden_size, num_sites in SHAPES:
        queries, norm = torch.randn(num_sites, hidden_size) * 0.02, LlamaRMSNorm(hidden_size)
        outputs = list(torch.randn(num_sites, 1, 1, hidden_size))
        for block_size in (8, 2, 1):
            for read in READS:
                arguments = read, queries, outputs, block_size, norm
                caches, fastest = {}, {}
                for by_numbers in (True, False):
                    with mock.patch.object(block_cache, "reads_by_numbers", lambda *_, of=by_numbers: of):
                        caches[by_numbers] = BlockCache()
                        read_a_token(caches[by_numbers], *arguments)
                for _ in range(9):
                    for by_numbers, cache in caches.items():
                        start = time.perf_counter()
                        read_a_token(cache, *arguments)
                        seconds = time.perf_counter() - start
                        fastest[by_numbers] = min(seconds, fastest.get(by_numbers, seconds))
                numbers, tensors = (1e6 * fastest[kind] / num_sites for kind in (True, False))
                cells = hidden_size, block_size, read, f"{numbers:.0f}", f"{tensors:.0f}", f"{numbers / tensors:.2f}"
                print(f"| {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    main()
