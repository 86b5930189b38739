# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""`attnres chat`: transformers' chat in the terminal, and in a thread transformers' server, which the chat asks."""

import logging
import time

from huggingface_hub import constants
from transformers import AutoProcessor, GenerationConfig
from transformers.cli.chat import Chat, parse_generate_flags
from transformers.cli.serve import Serve

from .server import check_before_serving, make_classes_known


def chat(model: str, settings: list[str], system_prompt: str | None = None, device: str = "auto", dtype: str = "auto"):
    """Talk to a model until the user ends it.

    Args:
        model: a folder or Hub id.
        settings: of generation, such as `max_new_tokens=100`.
        system_prompt: the first message of every conversation.
        device: where the model runs, such as `cuda:0`.
        dtype: of the model, such as `bfloat16`; `auto` is that of the checkpoint.

    Raises:
        ValueError: for a setting that transformers does not have, and a checkpoint without a chat template or some of
            its tensors.
        OSError: if the server refuses a message.
    """
    unknown = GenerationConfig().update(**parse_generate_flags(settings))
    if unknown:
        raise ValueError(f"`{next(iter(unknown))}` is not a field of transformers' `GenerationConfig`.")
    if getattr(AutoProcessor.from_pretrained(model, trust_remote_code=False), "chat_template", None) is None:
        raise ValueError(
            f"`{model}` has no chat template, so it was not trained on conversations: take a checkpoint that was,"
            " or `attnres finetune` this one on some."
        )
    check_before_serving(model)
    logging.disable(logging.WARNING)  # what the server says of every request would be in the middle of the answers
    make_classes_known()
    server = Serve(model, device=device, dtype=dtype, host="127.0.0.1", port=0, non_blocking=True)
    try:
        while not server.server.started:
            time.sleep(0.01)
        constants.HF_HUB_OFFLINE = False  # all is loaded, and the chat's client would refuse this machine as well
        port = server.server.servers[0].sockets[0].getsockname()[1]
        Chat(model, f"http://127.0.0.1:{port}", settings, system_prompt=system_prompt)
    except EOFError:  # Ctrl+D, or the end of a file
        print()
    finally:
        server.kill_server()
