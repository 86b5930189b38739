# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Training over the stages of a pipeline, each block sent to a process once."""

from .pipeline import AttnResPipeline
from .plan import Layout, plan
from .prefill import divide_block_cache
from .routing import StageRoute, num_transfers, route_blocks
from .schedule import PipelineSettings, sites_of_stages


__all__ = [
    "AttnResPipeline",
    "Layout",
    "PipelineSettings",
    "StageRoute",
    "divide_block_cache",
    "num_transfers",
    "plan",
    "route_blocks",
    "sites_of_stages",
]
