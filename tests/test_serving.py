# SPDX-License-Identifier: Apache-2.0
"""`attnres serve`: real server processes, asked over loopback, and how they end."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import openai
import psutil
import pytest
import torch
from decoder_configs import decoder_config
from family_survey import converted, native_model
from tiny_models import convert, randomize_queries, tiny_base_model
from transformers import AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from typer.testing import CliRunner

from attnres.base.families import survey
from attnres.cli import app
from attnres.data.text import read_sample, train_tokenizer
from studies.costs.serving import Request, Server, compare, make_requests, send_all, table_of


TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'nobody' %}{{ raise_exception('No such role') }}{% endif %}"
    "{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"
)
BATCHED = ["--continuous-batching", "--device", "cpu", "--cb-num-blocks", "64", "--cb-max-batch-tokens", "128"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serving")
    tokenizer = train_tokenizer([read_sample()] * 3, vocab_size=400)
    tokenizer.chat_template = TEMPLATE
    # Not a type for which transformers parses tool calls, as the template is not that of such a model
    base = tiny_base_model("phi3", vocab_size=len(tokenizer), max_position_embeddings=8192)
    for name, model in (("base", base), ("attnres", randomize_queries(convert(base, 3)))):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


def serve(folder, options):
    return Server(str(folder / "attnres"), "transformers", options, folder / "log")


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--device", "cpu"], BATCHED], ids=["by request", "batched"])
def test_answers_are_those_of_generate(folder, options):
    """Of many clients at once, some of which go away, and of OpenAI's own client."""
    model = str(folder / "attnres")
    with serve(folder, options) as server:
        requests = make_requests(22, too_long="the " * 600)
        asyncio.run(send_all(server.url, model, requests))
        assert all(request.status == 422 for request in requests if request.kind == "no_json")
        finished = [request for request in requests if request.kind in ("answer", "stream")]
        assert [request.status for request in finished] == [200] * len(finished)
        compared = compare(model, finished)
        assert all(parting["margin"] < 1e-4 for parting in compared["partings"]) and compared["equal"] > 10

        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        messages = [{"role": "user", "content": "What is gravity?"}]
        asked = {"model": model, "messages": messages, "max_tokens": 12, "temperature": 0}
        text = client.chat.completions.create(**asked).choices[0].message.content
        parts = client.chat.completions.create(**asked, stream=True)
        assert "".join(part.choices[0].delta.content or "" for part in parts) == text
        prompt = AutoTokenizer.from_pretrained(model).apply_chat_template(messages, tokenize=False)
        as_prompt = Request(0, "answer", prompt, 12, text=text)
        compared = compare(model, [as_prompt])
        assert compared["equal"] or compared["partings"][0]["margin"] < 1e-4
        assert client.models.list().object == "list"
        assert server.end(signal.SIGTERM) < 30
    assert "Traceback" not in (folder / "log").read_text()


HELLO = [{"role": "user", "content": "Hello"}]
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


def chat(messages=HELLO, **fields):
    return CHAT, {"messages": messages, "max_tokens": 4, **fields}


def complete(prompt="Hello", **fields):
    return COMPLETIONS, {"prompt": prompt, "max_tokens": 4, **fields}


def respond(input="Hello", **fields):
    return RESPONSES, {"input": input, "max_output_tokens": 4, "stream": False, **fields}


def nested(levels):
    value = "x"
    for _ in range(levels):
        value = [value]
    return value


LOOPING = "{% for i in range(9) %}{% for j in range(9) %}x{% endfor %}{% endfor %}"
# What is asked for, the status without our layer (500 is `Internal Server Error`), with it, and a word of the sentence
REQUESTS = {
    "template of the client": (*chat(chat_template_kwargs={"chat_template": LOOPING}), 200, 400, "checkpoint's"),
    "template in the body": (*chat(chat_template=LOOPING), 422, 400, "checkpoint's"),
    "template in a response": (*respond(chat_template_kwargs={"chat_template": LOOPING}), 422, 400, "checkpoint's"),
    "padding": (*chat(chat_template_kwargs={"padding": "max_length", "max_length": 10**5}), 503, 400, "padding"),
    "object for the template": (*chat(chat_template_kwargs={"x": {"y": 1}}), 200, 400, "only texts"),
    "template options that are null": (*chat(chat_template_kwargs=None), 500, 400, "chat_template_kwargs"),
    "prompt beyond the context": (*complete("the " * 9000), 503, 400, "at most"),
    "prompt beyond the cache": (*complete("the " * 6000), 503, 400, "at most"),
    "answer that is too long": (*complete(max_tokens=100_000), 0, 400, "at most 4096"),
    "chat that is too long": (*chat(max_completion_tokens=100_000), 0, 400, "max_completion_tokens"),
    "response that is too long": (*respond(max_output_tokens=100_000), 0, 400, "max_output_tokens"),
    "too long by its config": (*complete(generation_config='{"max_new_tokens": 100000}'), 200, 400, "max_new_tokens"),
    "many beams": (*complete(generation_config='{"num_beams": 4000}'), 200, 400, "num_beams"),
    "config that is no JSON": (*complete(generation_config="{"), 500, 400, "JSON"),
    "many": (*chat(max_tokens="many"), 500, 400, "max_tokens"),
    "list of tokens": (*complete(max_tokens=[1]), 500, 400, "max_tokens"),
    "fewer than none": (*complete(max_tokens=-5), 200, 400, "max_tokens"),
    "no messages": (*chat([]), 500, 400, "messages"),
    "messages left out": (CHAT, {"max_tokens": 4}, 500, 400, "messages"),
    "message that is text": (*chat(["Hello"]), 500, 400, "messages.0"),
    "message without a role": (*chat([{"content": "Hello"}]), 500, 400, "role"),
    "content that is a number": (*chat([{"role": "user", "content": 5}]), 500, 400, "content"),
    "part without a text": (*chat([{"role": "user", "content": [{"type": "text"}]}]), 500, 400, "text"),
    "part without a type": (*chat([{"role": "user", "content": [{"text": "Hello"}]}]), 500, 400, "type"),
    "image in a file": (
        *chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "/etc/passwd"}}]}]),
        *(200, 400, "not a file"),
    ),
    "tool call without arguments": (
        *chat([{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]),
        *(500, 400, "arguments"),
    ),
    "arguments that are no JSON": (
        *chat([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]),
        *(500, 400, "prepared"),
    ),
    "refused by the template": (*chat([{"role": "nobody", "content": "x"}]), 500, 400, "No such role"),
    "hot": (*complete(temperature="hot"), 500, 400, "temperature"),
    "below zero": (*complete(temperature=-1), 200, 400, "temperature"),
    "not a number": (COMPLETIONS, b'{"prompt": "x", "max_tokens": 4, "temperature": NaN}', 200, 400, "temperature"),
    "top_p": (*complete(top_p=7), 200, 400, "top_p"),
    "penalty": (*complete(frequency_penalty=-1), 200, 400, "frequency_penalty"),
    "seed": (*complete(seed=2**70), 500, 400, "seed"),
    "seed that is text": (*complete(seed="x"), 500, 400, "seed"),
    "bias": (*chat(logit_bias={"x": 1}), 500, 400, "logit_bias"),
    "bias of no token": (*chat(logit_bias={"99999999": 1}), 200, 400, "99999999"),
    "stop": (*complete(stop=5), 200, 400, "stop"),
    "stream": (*complete(stream="no"), 200, 400, "stream"),
    "model": (*complete(model=5), 400, 400, "model"),
    "empty prompt": (*complete(""), 503, 400, "empty"),
    "input of a number": (*respond(5), 422, 400, "input"),
    "no input": (*respond([]), 500, 400, "input"),
    "input of texts": (*respond(["Hello"]), 500, 400, "input"),
    "deep": (*chat(tools=[{"x": nested(900)}]), 500, 400, "deeper than 64"),
    "deeper": (CHAT, b'{"messages": ' + b"[" * 100_000, 400, 400, "deeper than 64"),
    "large": (*complete("x" * (1 << 21)), 503, 413, "longer than"),
    "load another model": ("/load_model", {"model": "base"}, 200, 403, "only"),
    "drop the model": ("/reset", {}, 200, 403, "only"),
    "no JSON": (COMPLETIONS, b'{"prompt": "The', 422, 422, "JSON"),
    "list": (COMPLETIONS, b"[]", 422, 422, "dict"),
    "another model": (*complete(model="base"), 400, 400, "pinned"),
    # Right ones
    "prompt that fills the cache": (*complete("the " * 4090, max_tokens=100), 200, 200, '"length"'),
    "chat": (*chat(), 200, 200, "assistant"),
    "completion": (*complete(), 200, 200, "text_completion"),
    "response": (*respond(), 200, 200, "output_text"),
    "parts": (*chat([{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]), 200, 200, "assistant"),
    "nothing said": (*chat([{"role": "user", "content": None}]), 200, 200, "assistant"),
    "options of the template": (*chat(chat_template_kwargs={"enable_thinking": False}), 200, 200, "assistant"),
    "config": (*complete(generation_config='{"do_sample": false, "max_new_tokens": 4}'), 200, 200, "text_completion"),
    "sampling": (*chat(temperature=1, top_p=0.5, seed=1, stop=["x"], frequency_penalty=0.5), 200, 200, "assistant"),
}


@pytest.fixture(scope="module")
def guarded(folder):
    """One server for all of these, whose cache holds half of the model's context."""
    options = ["--continuous-batching", "--device", "cpu", "--cb-num-blocks", "16", "--cb-max-batch-tokens", "128"]
    with Server(str(folder / "attnres"), "transformers", options, folder / "guarded") as server:
        yield server


@pytest.mark.parametrize("name", REQUESTS)
def test_requests(name, guarded):
    """What is refused is so with one sentence, and the server goes on."""
    path, body, _, status, word = REQUESTS[name]
    as_it_is = {"content": body, "headers": {"content-type": "application/json"}}
    fields = as_it_is if isinstance(body, bytes) else {"json": body}
    response = httpx.post(guarded.url + path, timeout=120, **fields)
    assert response.status_code == status and word in response.text, response.text
    if status in (400, 403, 413):
        detail = response.json()["detail"]
        assert "\n" not in detail and len(detail) < 600
    assert httpx.get(f"{guarded.url}/health").status_code == 200


def test_the_pinned_model_is_listed(guarded):
    (model,) = httpx.get(f"{guarded.url}/v1/models").json()["data"]
    assert model["id"] == guarded.model


def test_two_clients_with_one_name(guarded):
    """Each has its own answer."""

    async def ask():
        async with httpx.AsyncClient(timeout=120, headers={"x-request-id": "one"}) as client:
            asked = [client.post(guarded.url + path, json=body) for path, body in (complete("A"), complete("B" * 50))]
            return await asyncio.gather(*asked)

    numbers = [response.json()["usage"]["prompt_tokens"] for response in asyncio.run(ask())]
    assert numbers[0] < numbers[1]


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--continuous-batching", "--cb-num-blocks", "64"]], ids=["alone", "batched"])
def test_hung_up_and_ended(folder, options):
    """Nobody's answer is computed on, a stalled connection is ended, and SIGTERM does not wait for long answers."""
    long = {"prompt": "Once", "max_tokens": 8000, "temperature": 0, "generation_config": '{"min_new_tokens": 7000}'}
    limits = ["--device", "cpu", "--max-new-tokens", "8000"]
    with Server(str(folder / "attnres"), "transformers", [*limits, *options], folder / "hung_up") as server:
        stalled = socket.create_connection(("127.0.0.1", server.port))
        stalled.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
        httpx.post(server.url + COMPLETIONS, json=complete()[1], timeout=120)
        for stream in (False, True):
            with suppress(httpx.TimeoutException):
                httpx.post(
                    server.url + COMPLETIONS, json={**long, "stream": stream}, timeout=httpx.Timeout(1, connect=60)
                )
        assert httpx.post(server.url + COMPLETIONS, json=complete()[1], timeout=20).status_code == 200
        time.sleep(1)
        idle = cpu_seconds(server)
        time.sleep(1)
        assert cpu_seconds(server) - idle < 0.5
        stalled.settimeout(60)
        assert stalled.recv(1) == b""
        with ThreadPoolExecutor() as pool:
            last = pool.submit(httpx.post, server.url + COMPLETIONS, json=long, timeout=60)
            time.sleep(1)
            assert server.end(signal.SIGTERM) < 6
            assert last.result().status_code == 503


def cpu_seconds(server):
    times = psutil.Process(server.process.pid).cpu_times()
    return times.user + times.system


@pytest.mark.slow
def test_ends_when_its_worker_is_dead(folder):
    """Here for want of memory for its cache, which is what kills it most easily."""
    options = ["--continuous-batching", "--device", "cpu", "--cb-max-memory-percent", "0.0000001"]
    with Server(str(folder / "attnres"), "transformers", options, folder / "dead") as server:
        with suppress(httpx.HTTPError):
            assert httpx.post(server.url + COMPLETIONS, json=complete()[1], timeout=60).status_code == 503
        assert server.process.wait(60) == 1
    assert "The server ends, as the worker of continuous batching has ended" in (folder / "dead").read_text()


@pytest.mark.slow
def test_several_models(folder):
    """Without a model, the server loads what a request names."""
    with Server(
        str(folder / "attnres"), "transformers", ["--device", "cpu"], folder / "several", preload=False
    ) as server:
        for name in ("base", "attnres", "base"):
            (request,) = make_requests(1)
            asyncio.run(send_all(server.url, str(folder / name), [request]))
            assert compare(str(folder / name), [request])["equal"] == 1


def test_what_cannot_be_served(folder, tmp_path, run_attnres, capsys):
    def error_of(*arguments):
        assert run_attnres("serve", *arguments) in (1, 2)
        printed = " ".join(capsys.readouterr().err.split())
        assert "Traceback" not in printed
        return printed

    (tmp_path / "empty").mkdir()
    assert "`/nowhere` is not a checkpoint" in error_of("/nowhere")
    assert "/empty` is not a checkpoint" in error_of(tmp_path / "empty")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    assert "is an adapter" in error_of(tmp_path / "adapter")
    assert "vllm is not installed: pip install '.[vllm]' in" in error_of(folder / "attnres", "--engine", "vllm")
    assert "name it" in error_of("--engine", "vllm")
    assert "--engine" in error_of(folder / "attnres", "--engine", "sglang")
    assert "--max-model-len" in error_of(folder / "attnres", "--engine", "vllm", "--max-new-tokens", "5")
    assert "--max-new-tokens" in error_of(folder / "attnres", "--max-new-tokens", "0")


@pytest.mark.slow
def test_an_option_of_neither_program(folder):
    """transformers' own command line, in the process that it is, refuses it."""
    command = [sys.executable, "-m", "attnres", "serve", str(folder / "attnres"), "--no-such-option"]
    environment = {**os.environ, "COLUMNS": "200", "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert run.returncode == 2 and "No such option" in run.stderr and "Traceback" not in run.stderr


def test_an_option_before_the_model(monkeypatch):
    """Whose parser is asked decides what is a model."""
    seen = []
    monkeypatch.setattr("attnres.serving.server.serve_with_transformers", lambda *args: seen.append(args))
    for line in (["model", "--port", "1"], ["--port", "1", "model"], ["--port", "1"], []):
        assert CliRunner().invoke(app, ["serve", *line]).exit_code == 0
    given = [("model", ["--port", "1"]), (None, ["--port", "1", "model"]), (None, ["--port", "1"]), (None, [])]
    assert seen == [(*arguments, None, None) for arguments in given]


def test_vllm_is_given_what_follows(monkeypatch, tmp_path):
    """The process becomes vLLM's own server."""
    from attnres.serving import server

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(server.importlib.util, "find_spec", lambda name: name)
    seen = []
    monkeypatch.setattr(os, "execv", lambda path, arguments: seen.append(arguments[1:]))
    arguments = ["serve", str(tmp_path), "--engine", "vllm", "--tensor-parallel-size", "2"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    module = "vllm.entrypoints.openai.api_server"
    assert seen == [["-m", module, "--model", str(tmp_path), "--tensor-parallel-size", "2"]]


def test_the_table_is_of_its_results(tmp_path):
    round_of = {"requests": 22, "finished": 16, "wanted": 16, "requests_per_second": 2.0, "p95_s": 3.0}
    found = {
        "rounds": {"attnres": [round_of] * 3, "base": [{**round_of, "p95_s": 2.0}] * 3},
        "attnres_answers": {"equal": 15, "compared": 16, "partings": [{"margin": 2e-5}]},
        "base_answers": {"equal": 16, "compared": 16, "partings": []},
        "killed": {"answered_before": 3, "lost": 13, "told": {"ReadError": 13}},
    }
    (tmp_path / "transformers.json").write_text(json.dumps(found))
    lines = table_of(tmp_path).splitlines()
    assert "| requests per second, of the base's | 1.00 (1.00 to 1.00) | not run |" in lines
    assert "| 95th percentile of the time, of the base's | 1.50 (1.50 to 1.50) | not run |" in lines
    assert (
        "| equal to `generate` | 15 of 16; others part where two logits differ by at most 0.0000 | not run |" in lines
    )


HEADS = {
    "gemma3_text": {"final_logit_softcapping": 2.0},
    "granite": {"logits_scaling": 3.0},
    "cohere": {},
    "minicpm3": {"dim_model_base": 8},  # scales what the head is given
    "llama": {},
    "opt": {},  # whose head calls a part of the trunk
    "gpt_bigcode": {},  # and here asks for more outputs
}
# Heads with layers of their own, or that look at their inputs or weights
REFUSED_HEADS = (
    *("gemma4_text", "gemma4_unified_text", "hy_v4", "llama4_text", "modernbert-decoder", "roberta-prelayernorm"),
    "xlm-roberta-xl",
)
SERVED = [
    name
    for name, measured in survey()["supported"].items()
    if measured.get("engines") and name not in HEADS and name in CONFIG_MAPPING  # some are of a newer transformers
]


@pytest.mark.parametrize("family", [*HEADS, *(pytest.param(name, marks=pytest.mark.slow) for name in SERVED)])
def test_the_code_of_the_bases_head_makes_the_logits(family):
    """What vLLM's plugin does with the logits of a head that has computed already: right, or refused while loading."""
    from attnres.serving.logits import HeadOfBase

    model = converted(native_model(decoder_config(family, **HEADS.get(family, {}))), 3)
    if family in REFUSED_HEADS:
        with pytest.raises(ValueError, match=f"The head of base `{family}` needs more than .* --continuous-batching"):
            HeadOfBase(model.config, model.get_output_embeddings())
        return
    ids = torch.randint(3, 90, (1, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0]
        hidden = model.base_model(ids, use_cache=False).last_hidden_state[0]
        of_head = HeadOfBase(model.config, model.get_output_embeddings())(hidden)
        torch.testing.assert_close(of_head, logits, rtol=1e-6, atol=1e-6)  # experts may sum up in another order
        assert HeadOfBase(model.config, lambda hidden: None)(hidden) is None
