# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""vLLM's entry point: with `attnres` installed, `vllm serve FOLDER` knows AttnRes models.

vLLM calls `register` in its server, in its engine and in every worker.
"""

import logging
from importlib import metadata

from packaging.version import Version


# Of vLLM: what was tried, and the first version that was not
TRIED = ("0.32", "0.34")


def register():
    """Tell vLLM of our classes. May be called more than once."""
    import vllm

    if not Version(TRIED[0]) <= Version(vllm_version()) < Version(TRIED[1]):
        logging.getLogger(__name__).warning(
            "attnres has been tried with vLLM >=%s,<%s, and this is %s. If an AttnRes model fails to load or answers"
            " differently from transformers, install a version in that range.",
            *TRIED,
            vllm_version(),
        )
    import attnres  # noqa: F401  registers the config and the classes in transformers

    vllm.ModelRegistry.register_model("AttnResForCausalLM", "attnres.serving.vllm_model:AttnResForCausalLM")


def vllm_version() -> str:
    """Also of its builds for CPUs, which have another name."""
    (distribution, *_) = metadata.packages_distributions()["vllm"]
    return metadata.version(distribution)
