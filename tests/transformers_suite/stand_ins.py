# SPDX-License-Identifier: Apache-2.0
"""Modules that transformers' test mixins import and that its source distribution, or an older checkout, lacks."""

import functools
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def install():
    """Put a module into the place of each one that is not there."""
    tests = Path(os.environ["TRANSFORMERS"], "tests")
    empty_mixins = {
        "exporters.test_export": {"ExportTesterMixin": type("ExportTesterMixin", (), {})},
        "generation.test_utils": {"GenerationTesterMixin": type("GenerationTesterMixin", (), {})},
    }
    distributed = {
        "run_distributed": run_distributed,
        "_start_rank_processes": start_rank_processes,
        "_get_distributed_device_type": lambda: "cpu",
        "_get_distributed_backend": lambda: "gloo",
        "_get_rank_device": lambda rank: torch.device("cpu"),
        "_set_rank_device": lambda rank: None,
    }
    for name, content in {**empty_mixins, "distributed_testing_utils": distributed}.items():
        if not Path(tests, *name.split(".")).with_suffix(".py").exists():
            module = sys.modules[f"tests.{name}"] = ModuleType(f"tests.{name}")
            vars(module).update(content)


def start_rank_processes(function, args: tuple = (), nprocs: int = 1):
    """Run `function(rank, *args)` in so many processes."""
    mp.spawn(call, args=(function, args), nprocs=nprocs)


def call(rank: int, function, args: tuple):
    """Pickled in front of `function`, so that a new process imports this module before those of the tests."""
    function(rank, *args)


def run_distributed(world_size: int):
    """`run_distributed(2)(function)(*args)` runs `function(rank, *args)` in two processes of one group."""

    def decorate(function):
        @functools.wraps(function)
        def run(*args, **kwargs):
            with tempfile.TemporaryDirectory() as folder:
                meeting_place = os.path.join(folder, "meeting-place")
                mp.spawn(run_rank, args=(function, world_size, meeting_place, args, kwargs), nprocs=world_size)

        return run

    return decorate


def run_rank(rank: int, function, world_size: int, meeting_place: str, args: tuple, kwargs: dict):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    dist.init_process_group("gloo", init_method=f"file://{meeting_place}", rank=rank, world_size=world_size)
    try:
        function(rank, *args, **kwargs)
        dist.barrier()
    finally:
        dist.destroy_process_group()


install()
