# SPDX-License-Identifier: Apache-2.0
"""Prints registers and spills of the Triton kernels, compiled for GPUs that need not be there.

python tests/tools/compile_kernels.py [--targets sm_90 ...] [--hidden 1024 ...] [--heads 1] [--dtype bf16]

A cell has the registers of a thread and the bytes that it spills. What is narrow are loads and stores of 8 or 16 bits,
of which there should be none, as rows are loaded 16 bytes at once.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path


os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from attnres.depth import triton_kernels as kernels


TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}
SOURCES, TOKENS = 9, 8192
OF_SOURCES = {"like", "norm_weight", "result", "grad_result"}
TABLES = {"table": "*i64"}
NUMBERS = dict.fromkeys(("eps", "norm_eps", "factor"), "fp32")
SIZES = {"num_tokens": TOKENS, "per_program": 8, "num_heads": 1, "num_sources": SOURCES}


def cases(hidden_sizes: list[int], num_heads: int, dtype: torch.dtype):
    """Kernel, hidden size, number of sites or local sources, and what it is launched with."""
    for hidden_size in hidden_sizes:
        for sites in (4, 8):
            forward = kernels.sites_shape(sites, hidden_size, num_heads, dtype, kernels.MOST_OF_FORWARD)
            scores = kernels.sites_shape(sites, hidden_size, num_heads, dtype, kernels.MOST_OF_SCORES)
            columns = kernels.columns_shape(sites, hidden_size, num_heads)
            yield kernels.read_closed_kernel, hidden_size, sites, forward
            yield kernels.closed_scores_backward_kernel, hidden_size, sites, scores | {"SOURCES": 16}
            yield kernels.read_closed_backward_kernel, hidden_size, sites, columns
        for local in (1, 7):
            options = kernels.row_shape(hidden_size, num_heads, dtype) | {"LOCAL": triton.next_power_of_2(local)}
            options |= {"HAS_MIX": True, "HAS_NORM": True}
            yield kernels.merge_kernel, hidden_size, local, options
            yield kernels.merge_backward_kernel, hidden_size, local, options | {"QUERY_OF_TOKEN": False}


def compiled(kernel, target: str, hidden_size: int, number: int, num_heads: int, dtype: str, options: dict):
    """As the JIT would compile it: it sees which sizes are 1, and which 16 divides."""
    options = dict(options)
    num_warps = options.pop("num_warps")
    sizes = SIZES | {"num_sites": number, "num_local": number, "num_heads": num_heads, "token_stride": hidden_size}
    sizes |= {"width": hidden_size // num_heads, "query_stride": 16 * (kernel is kernels.merge_kernel)}
    sizes["blocks"] = triton.cdiv(sizes["width"], options.get("BLOCK", 1))
    names = kernel.arg_names
    constexprs = {"WEIGHTS": "softmax"} | options | {name: 1 for name in names if sizes.get(name) == 1}
    signature, attributes = {}, {}
    for i, name in enumerate(names):
        if name in constexprs:
            signature[name] = "constexpr"
        elif name in sizes:
            signature[name] = "i32"
        else:
            signature[name] = (NUMBERS | TABLES).get(name, f"*{dtype}" if name in OF_SOURCES else "*fp32")
        if signature[name][0] == "*" or (signature[name] == "i32" and sizes[name] % 16 == 0):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    return triton.compile(source, target=GPUTarget(*TARGETS[target]), options={"num_warps": num_warps}), num_warps


def measured(binary, target: str) -> tuple[int, int, int]:
    """Registers of a thread, bytes that a thread spills, and narrow loads and stores."""
    if target.startswith("gfx"):
        text = binary.asm["amdgcn"]
        registers, spills = (
            int(re.search(rf"\.{name}:\s+(\d+)", text)[1]) for name in ("vgpr_count", "vgpr_spill_count")
        )
        return registers, 4 * spills, len(re.findall(r"global_(?:load|store)_(?:u?byte|u?short|sbyte|sshort)", text))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(binary.asm["ptx"])
        ptxas = get_ptxas(TARGETS[target][1]).path
        arch = re.search(r"\.target (\w+)", binary.asm["ptx"])[1]
        command = [ptxas, "-v", f"-arch={arch}", path, "-o", Path(folder, "kernel.cubin")]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    spills = sum(map(int, re.findall(r"(\d+) bytes spill", said)))
    narrow = re.findall(r"(?:ld|st)\.global[.\w]*b(?:8|16)\b", binary.asm["ptx"])
    return int(re.search(r"Used (\d+) registers", said)[1]), spills, len(narrow)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--hidden", nargs="+", type=int, default=[1024, 2048, 4096, 8192])
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--dtype", choices=["bf16", "fp16", "fp32"], default="bf16", help="of the sources")
    arguments = parser.parse_args()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[arguments.dtype]
    print("| kernel | hidden | sites or local | tile | warps | " + " | ".join(arguments.targets) + " |")
    print("|" + "---|" * (5 + len(arguments.targets)))
    for kernel, hidden_size, number, options in cases(arguments.hidden, arguments.heads, dtype):
        cells = []
        for target in arguments.targets:
            binary, num_warps = compiled(
                kernel, target, hidden_size, number, arguments.heads, arguments.dtype, options
            )
            registers, spills, narrow = measured(binary, target)
            shared = f", {binary.metadata.shared} B shared" if binary.metadata.shared > 16384 else ""
            cells.append(f"{registers}, {spills} B" + (f", {narrow} narrow" if narrow else "") + shared)
        tile = "x".join(str(options[name]) for name in ("SITES", "HEADS", "WIDTH", "BLOCK") if name in options)
        print(
            f"| {kernel.__name__} | {hidden_size} | {number} | {tile} | {num_warps} | {' | '.join(cells)} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
