# SPDX-License-Identifier: Apache-2.0
"""Gradients of tensor parallelism in pretraining, type by type: two processes against one, in fp64.

    python tests/tools/family_tensor_parallel.py D.json [TYPE ...]

`families_page.py --tensor-parallel D.json` records them. `attnres pretrain` refuses `tp_size` for a type of
which they are wrong or were not looked at. What is in the file already is not computed again.
"""

import json
import os
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
sys.path.insert(0, str(Path(__file__).parents[1]))


import torch.distributed as dist
from families_page import RECORD
from test_parallel import BATCH, in_processes, model_of, pipeline_of, worst_gradient
from torch.distributed.device_mesh import init_device_mesh

from attnres.training.stages import add_up_gradients, divide_matrices


def difference(rank: int, family: str, pp_size: int = 1) -> float:
    """The largest of all gradients after several microbatches, relative; see `worst_gradient`."""
    mesh = init_device_mesh("cpu", (pp_size, dist.get_world_size() // pp_size), mesh_dim_names=("pp", "tp"))
    model = model_of(family)  # in evaluation mode: what is drawn, as for dropout, would be other numbers
    model(BATCH, labels=BATCH, use_cache=False).loss.backward()
    of_own_heads = []
    pipeline = pipeline_of(
        model,
        schedule="1F1B",
        group=mesh["pp"].get_group(),
        parallelize=lambda stage: of_own_heads.extend(divide_matrices(stage.model, mesh["tp"])),
    )
    pipeline.step(BATCH, BATCH)
    add_up_gradients(of_own_heads, mesh["tp"])
    return worst_gradient(pipeline, model, of_all=True)


def _measure(rank, types, path):
    for name in types:
        try:
            found = difference(rank, name)
        except Exception as error:
            cause = error.__cause__ or error
            found = f"{type(cause).__name__}: {cause}".splitlines()[0]
        if rank == 0:
            print(name, found, flush=True)
            path.write_text(json.dumps(_read(path) | {name: found}, indent=1))


def _read(path) -> dict:
    return json.loads(path.read_text()) if path.exists() else {}


def main():
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    path, types = Path(sys.argv[1]), sys.argv[2:]
    supported = json.loads(RECORD.read_text())["supported"]
    types = types or [name for name in supported if supported[name]["tp"]]
    while left := [name for name in types if name not in _read(path)]:
        try:
            in_processes(_measure, 2, left, path)
        except Exception as error:
            died = next((name for name in left if name not in _read(path)), None)
            if died is not None:
                what = f"{type(error).__name__}: {error}".strip().splitlines()[-1]
                path.write_text(json.dumps(_read(path) | {died: what}, indent=1))


if __name__ == "__main__":
    main()
