# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The generation of transformers' server, with limits, and given up when nobody waits for it any more."""

import asyncio
import threading
import time

import torch
from fastapi import HTTPException
from transformers.cli.serving import utils

from .fields import Limits


# Of models that name no context
CONTEXT = 8192


class GenerationError(RuntimeError):
    """What goes wrong once a request is accepted is the server's fault: status 500, where a `ValueError` is 400."""


class Limited:
    """The checks that need the model and the tokens of the prompt."""

    limits = Limits()

    def check(self, model, inputs, config, capacity: int | None = None):
        """Refuse a prompt that is too long, and shorten an answer to the room that is left.

        Args:
            capacity: tokens that the KV cache of continuous batching holds. One request beyond it ends the worker.

        Raises:
            HTTPException: with status 400.
        """
        ids = inputs["input_ids"]
        number = len(ids) if isinstance(ids, list) else ids.shape[-1]
        text = model.config.get_text_config()
        room = getattr(text, "max_position_embeddings", None) or max(CONTEXT, self.limits.prompt_tokens or 0)
        room = min(room, capacity or room)
        most = min(room - 1, self.limits.prompt_tokens or room)
        if number == 0:
            raise HTTPException(400, "The prompt is empty.")
        if number > most:
            raise HTTPException(400, f"The prompt has {number} tokens, and this server takes at most {most}.")
        # Where the request names no number, transformers takes 1024
        config.max_new_tokens = min(config.max_new_tokens or room, self.limits.new_tokens, room - number)
        if (config.min_new_tokens or 0) > config.max_new_tokens:
            raise HTTPException(400, f"`min_new_tokens` is above the room for {config.max_new_tokens} tokens.")
        for (token,) in config.sequence_bias or {}:
            if token >= text.vocab_size:
                raise HTTPException(400, f"`logit_bias`: token {token} is not one of the {text.vocab_size}.")


class GenerateManager(Limited, utils.GenerateManager):
    """One request after another."""

    def generate_streaming(self, model, processor, inputs, gen_config, *args, **kwargs):
        self.check(model, inputs, gen_config)
        return super().generate_streaming(model, processor, inputs, gen_config, *args, **kwargs)

    async def generate_non_streaming(self, model, processor, inputs, gen_config, *args, **kwargs):
        self.check(model, inputs, gen_config)
        return await super().generate_non_streaming(model, processor, inputs, gen_config, *args, **kwargs)

    async def async_submit(self, function, *args, **kwargs):
        """As transformers', but the computation stops when the request is cancelled, and does not start after that."""
        cancelled = threading.Event()
        if function.__name__ == "generate":
            kwargs["stopping_criteria"] = [
                lambda ids, scores, **_: torch.full((ids.shape[0],), cancelled.is_set(), device=ids.device)
            ]

        def compute():
            return None if cancelled.is_set() else function(*args, **kwargs)

        computed = asyncio.wrap_future(self.submit(compute))
        try:
            # Shielded: the thread ends when it is to set the result of a future that was cancelled
            return await asyncio.shield(computed)
        except asyncio.CancelledError:
            cancelled.set()
            computed.add_done_callback(lambda future: future.exception())
            raise
        except HTTPException:
            raise
        except Exception as error:
            if function.__name__ != "generate":  # System One's own, whose ValueErrors are about the request
                raise
            raise GenerationError(str(error)) from error

    def is_alive(self) -> bool:
        return self._thread._thread.is_alive()


class CBGenerateManager(Limited, utils.CBGenerateManager):
    """Continuous batching."""

    def init_cb(self, model, gen_config):
        if self._cb is not None:
            return
        try:
            super().init_cb(model, gen_config)
        except ValueError:  # of what the first request asks for
            raise
        except Exception as error:
            raise GenerationError(str(error)) from error
        while self._cb.batch_processor is None and self.is_alive():  # made by the worker, with the cache
            time.sleep(0.01)

    def capacity(self) -> int | None:
        processor = self._cb.batch_processor
        if processor is None:
            return None
        cache = processor.cache
        if hasattr(cache, "cache_allocators"):
            return cache.num_blocks * min(allocator.tokens_per_page for allocator in cache.cache_allocators.values())
        return cache.num_blocks * cache.block_size  # until transformers 5.17

    def generate_streaming(self, model, processor, inputs, gen_config, *args, **kwargs):
        self.check(model, inputs, gen_config, self.capacity())
        return super().generate_streaming(model, processor, inputs, gen_config, *args, **kwargs)

    async def generate_non_streaming(self, model, processor, inputs, gen_config, request_id):
        self.check(model, inputs, gen_config, self.capacity())
        try:
            return await super().generate_non_streaming(model, processor, inputs, gen_config, request_id=request_id)
        except asyncio.CancelledError:
            self._cb.cancel_request(request_id)
            raise


def dead_worker(state: utils.GenerationState) -> str | None:
    """Which worker has ended, so that no request will be answered any more."""
    if not state.is_cb_alive():
        return "the worker of continuous batching"
    if not all(manager.is_alive() for manager in state._generate_managers.values()):
        return "the thread that generates"
    return None


def install(limits: Limits):
    """From here on, transformers' server makes these."""
    Limited.limits = limits
    utils.GenerateManager = GenerateManager
    utils.CBGenerateManager = CBGenerateManager
