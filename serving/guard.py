# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""A thin layer around transformers' server: what it refuses, how long it waits for clients, and how it ends."""

import asyncio
import contextlib
import functools
import logging
import os
import sys
import threading
import time

import jinja2
import uvicorn
from fastapi import HTTPException, Request
from fastapi.responses import JSONResponse
from transformers.cli.serving import server as transformers_server
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from .fields import Limits, problem_of
from .workers import CONTEXT, dead_worker, install


logger = logging.getLogger("uvicorn.error")

# Seconds for the headers of a request, or without a byte of an answer taken: once or twice as long, see `Protocol`
STALLED_SECONDS = 10
BODY_SECONDS = 30
# At SIGTERM: for the requests that it has, and until it ends in any case
LAST_REQUESTS_SECONDS = 2
LAST_SECONDS = 4
TEXT_BODY_BYTES, BODY_BYTES = 1 << 20, 1 << 25
# Raised while a request is made ready. What is raised later is a `GenerationError`, and the server's fault
FAULTS_OF_REQUESTS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, OSError)


class Guard:
    """The outermost layer: reads bodies, checks them, and gives up what nobody waits for. ASGI."""

    def __init__(self, app, model_manager, generation_state, limits: Limits):
        self.app = app
        self.state = generation_state
        self.limits = limits
        self.most_bytes = BODY_BYTES
        loaded = list(model_manager.loaded_models.values())
        if loaded and not getattr(loaded[0].model.config, "sub_configs", None):  # no images, so no long bodies
            text = loaded[0].model.config.get_text_config()
            tokens = limits.prompt_tokens or getattr(text, "max_position_embeddings", None) or CONTEXT
            self.most_bytes = min(BODY_BYTES, max(TEXT_BODY_BYTES, 16 * tokens))

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        refusal = body = None
        try:
            body = await asyncio.wait_for(self.body(receive), BODY_SECONDS)
        except asyncio.TimeoutError:
            refusal = 408, f"The body did not arrive within {BODY_SECONDS} seconds."
        except OverflowError:
            refusal = 413, f"The body is longer than {self.most_bytes} bytes."
        except ConnectionError:
            return
        if body:
            problem = problem_of(scope["path"], body, self.limits)
            refusal = None if problem is None else (400, problem)
        if refusal is not None:
            response = JSONResponse({"detail": refusal[1]}, refusal[0], headers={"connection": "close"})
            return await response(scope, receive, send)
        # Answers go by this name to those who wait, so that two clients with one name would be given one another's
        scope = {**scope, "headers": [(name, value) for name, value in scope["headers"] if name != b"x-request-id"]}
        await self.answer(scope, body, receive, send)

    async def body(self, receive) -> bytes:
        parts, length, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ConnectionError
            parts.append(message.get("body", b""))
            length += len(parts[-1])
            if length > self.most_bytes:
                raise OverflowError
            more = message.get("more_body", False)
        return b"".join(parts)

    async def answer(self, scope, body, receive, send):
        """Until it is given, the client hangs up, or the server ends."""
        begun = finished = False
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again():
            if messages:
                return messages.pop()
            await asyncio.shield(gone)
            return {"type": "http.disconnect"}

        async def watched_send(message):
            nonlocal begun, finished
            begun = True
            finished = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        async def hang_up():
            while (await receive())["type"] != "http.disconnect":
                pass

        gone = asyncio.ensure_future(hang_up())
        answer = asyncio.ensure_future(self.app(scope, receive_again, watched_send))
        try:
            await asyncio.wait((gone, answer), return_when=asyncio.FIRST_COMPLETED)
            if not finished:
                answer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await answer
        except asyncio.CancelledError:  # by uvicorn, when the time for the last requests is over
            answer.cancel()
            await asyncio.wait((answer,), timeout=1)
            if not begun:
                response = JSONResponse({"detail": "The server is ending."}, 503)
                await response(scope, receive_again, send)
        finally:
            gone.cancel()


class Protocol(AutoHTTPProtocol):
    """Ends connections on which nothing moves: headers that do not come to an end, answers that nobody reads."""

    def connection_made(self, transport):
        super().connection_made(transport)
        self.loop.call_later(STALLED_SECONDS, self._look_after, None)

    def _look_after(self, before):
        if self.transport.is_closing() and not self.transport.get_write_buffer_size():
            return
        unread = self.transport.get_write_buffer_size()
        idle = self.cycle is None or self.cycle.response_complete
        now = (id(self.cycle), idle, unread)
        if now == before and (unread or idle):
            self.transport.abort()
        else:
            self.loop.call_later(STALLED_SECONDS, self._look_after, now)


class Server(uvicorn.Server):
    """Ends when a worker is dead, so that whoever watches over it starts it again, and in time when it is told to."""

    dead: str | None = None

    async def on_tick(self, counter: int) -> bool:
        self.dead = dead_worker(self.config.app.state)
        if self.dead is not None:
            logger.error("The server ends, as %s has ended with an error.", self.dead)
        return await super().on_tick(counter) or self.dead is not None

    def handle_exit(self, sig, frame):
        timer = threading.Timer(LAST_SECONDS, os._exit, (128 + sig,))
        timer.daemon = True
        timer.start()
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets=None):
        await super().shutdown(sockets)
        if self.server_state.tasks:  # cancelled, but not yet told their clients
            await asyncio.wait(list(self.server_state.tasks), timeout=1)

    def run(self, sockets=None):
        with contextlib.suppress(KeyboardInterrupt):
            super().run(sockets)
        if not self.started:
            return
        # Nothing is left to be saved, and the threads that compute would be waited for
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0 if self.dead is None else 1)


def add_routes_of_pinned(app, model_manager):
    """What clients may not change where one model is served, and its name."""
    pinned, since = model_manager.force_model, int(time.time())
    load, loaded = model_manager.load_model_and_processor, tuple(model_manager.loaded_models)

    def load_pinned(name, *args, **kwargs):
        if not any(key == name or key.startswith(f"{name}:") for key in loaded):
            raise HTTPException(400, f"This server serves `{pinned}` only.")
        return load(name, *args, **kwargs)

    def refuse():
        raise HTTPException(403, f"This server serves `{pinned}` only: models are neither loaded nor dropped.")

    def models():
        return {
            "object": "list",
            "data": [{"id": pinned, "object": "model", "created": since, "owned_by": "attnres serve"}],
        }

    model_manager.load_model_and_processor = load_pinned
    for path, function, method in (
        ("/load_model", refuse, "POST"),
        ("/reset", refuse, "POST"),
        ("/v1/models", models, "GET"),
    ):
        app.add_api_route(path, function, methods=[method])
        app.router.routes.insert(0, app.router.routes.pop())  # the first that fits is taken


def add_handlers(app):
    """Status 400 for what cannot be made ready, such as messages that the template refuses."""

    async def refuse(request: Request, error: Exception):
        logger.warning("Refused: %r", error)
        lines = str(error).strip().splitlines() or [""]
        text = lines[0] if isinstance(error, (ValueError, OSError, jinja2.TemplateError)) else f"{error!r}"
        return JSONResponse({"detail": f"The request cannot be prepared: {text[:500]}"}, 400)

    for kind in (*FAULTS_OF_REQUESTS, jinja2.TemplateError):
        app.add_exception_handler(kind, refuse)


def put_around(limits: Limits):
    """From here on, transformers' server is built with this layer, and run by uvicorn with our limits of time."""
    install(limits)
    build_server = transformers_server.build_server

    def build_guarded(model_manager, *args, generation_state, **kwargs):
        app = build_server(model_manager, *args, generation_state=generation_state, **kwargs)
        add_handlers(app)
        if model_manager.force_model is not None:
            add_routes_of_pinned(app, model_manager)
        return Guard(app, model_manager, generation_state, limits)

    transformers_server.build_server = build_guarded
    uvicorn.Config = functools.partial(uvicorn.Config, http=Protocol, timeout_graceful_shutdown=LAST_REQUESTS_SECONDS)
    uvicorn.Server = Server
