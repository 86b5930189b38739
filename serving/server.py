# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""`attnres serve`: transformers' own OpenAI-compatible server, or vLLM's, on checkpoints of AttnRes models."""

import importlib.util
import os
import sys
from pathlib import Path
from typing import NoReturn

from ..base.library_lookups import MODEL_TYPES
from ..utils.untrusted import check_folder, read_json


def serve_with_transformers(
    model: str | None, options: list[str], max_prompt_tokens: int | None = None, max_new_tokens: int | None = None
):
    """Run the server of transformers until it is ended, with a layer of ours around it (`guard.py`).

    Args:
        model: a folder or Hub id to load now; without one, models are loaded as requests name them.
        options: of `transformers serve`.
        max_prompt_tokens: of one request; the context of the model if `None`.
        max_new_tokens: of one request; 4096 if `None`.

    Raises:
        ModuleNotFoundError: if the server's own requirements are not installed.
        FileNotFoundError: if the folder is not there.
    """
    for requirement in ("fastapi", "openai", "uvicorn"):
        if importlib.util.find_spec(requirement) is None:
            raise ModuleNotFoundError(f"{requirement} is not installed", name=requirement)
    check_before_serving(model)
    from huggingface_hub import constants
    from transformers.cli.transformers import app

    from .fields import Limits
    from .guard import put_around

    put_around(Limits(max_prompt_tokens, max_new_tokens or Limits.new_tokens))
    Path(constants.HF_HUB_CACHE).mkdir(parents=True, exist_ok=True)  # where it looks for models, and fails without
    make_classes_known()
    app(["serve", *([] if model is None else [model]), *options], prog_name="attnres")


def make_classes_known():
    """To transformers' server, which looks the class of a checkpoint up by its name."""
    import transformers

    from .. import AttnResForCausalLM, AttnResForConditionalGeneration

    transformers.AttnResForCausalLM = AttnResForCausalLM
    transformers.AttnResForConditionalGeneration = AttnResForConditionalGeneration


def serve_with_vllm(
    model: str | None, options: list[str], max_prompt_tokens: int | None = None, max_new_tokens: int | None = None
) -> NoReturn:
    """Become vLLM's server, which knows AttnRes models by its plugin (`vllm_plugin.py`).

    Args:
        model: a folder or Hub id.
        options: of `vllm serve`.
        max_prompt_tokens, max_new_tokens: must be `None`, as vLLM has limits of its own.

    Raises:
        ValueError: if there is no model, or a limit is given.
        ModuleNotFoundError: if vLLM is not installed.
        FileNotFoundError: if the folder is not there.
    """
    if model is None:
        raise ValueError("vLLM serves one model: name it, as in `attnres serve MODEL --engine vllm`.")
    if max_prompt_tokens is not None or max_new_tokens is not None:
        raise ValueError(
            "--max-prompt-tokens and --max-new-tokens are options of transformers' server. vLLM has --max-model-len"
            " and --override-generation-config '{\"max_new_tokens\": N}'."
        )
    if importlib.util.find_spec("vllm") is None:
        raise ModuleNotFoundError("vllm is not installed", name="vllm")
    check_before_serving(model)
    # Not `vllm serve`, which fails where the distribution has another name, as its builds for CPUs have
    program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *options]
    sys.stdout.flush()
    os.execv(sys.executable, program)


def check_before_serving(model: str | None):
    """Refuse, before anything slow starts, a path that is not there and a model that a server cannot run.

    Raises:
        FileNotFoundError: if a path is not there, which the servers would look for on the Hub.
        ValueError: if it is an adapter, an encoder or an encoder-decoder, or an AttnRes checkpoint that lacks tensors,
            which transformers' server would fill with random numbers.
    """
    if model is None or not (model.startswith((".", "/", "~")) or Path(model).is_dir()):
        return
    folder = Path(model).expanduser()
    if (folder / "config.json").exists():
        check_folder(folder, follow_links=True)
        from ..base.config import has_own_classes  # imports torch; a missing path is reported without it

        config_dict = read_json(folder / "config.json")
        base_model_type = config_dict.get("base_model_type")
        if isinstance(base_model_type, str) and has_own_classes(base_model_type):
            raise ValueError(
                f"`{model}` is of type `{base_model_type}`, and a server needs a decoder: load an encoder or an"
                " encoder-decoder with transformers' `pipeline`."
            )
        if config_dict.get("model_type") in MODEL_TYPES:
            from ..checkpoints.checkpoint import check_is_whole

            check_is_whole(folder)
        return
    if (folder / "adapter_config.json").exists():
        raise ValueError(
            f"`{model}` is an adapter, and a server needs a full model: load it with PEFT's"
            " `AutoPeftModelForCausalLM`, call `merge_and_unload()`, and save the result."
        )
    raise FileNotFoundError(f"`{model}` is not a checkpoint: there is no config.json in it.")
