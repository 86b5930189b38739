# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""What reads over depth may be like: the values of the fields of a config, without torch."""

# What reads over depth may be like; the first is the paper's own. New ones go to the end, and none is taken out: files
# of adapters hold the places
READS = {
    "attn_res_query": ("learned", "input", "hybrid"),
    "attn_res_weights": ("softmax", "sigmoid", "softmax1"),
    "attn_res_open_block": ("sum", "each"),
    "attn_res_stream": ("replaced", "kept"),
}
