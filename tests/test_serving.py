# SPDX-License-Identifier: Apache-2.0
"""`attnres serve`: real server processes, asked over loopback, and how they end."""

import asyncio
import json
import os
import signal
import subprocess
import sys

import openai
import pytest
import torch
from decoder_configs import decoder_config
from family_survey import converted, native_model
from tiny_models import convert, randomize_queries, tiny_base_model
from transformers import AutoTokenizer
from typer.testing import CliRunner

from attnres.benchmarks.serving import Request, Server, compare, make_requests, send_all, table_of
from attnres.cli import app
from attnres.conversion.parity import read_sample
from attnres.demo import train_tokenizer
from attnres.families import survey


TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"
BATCHED = ["--continuous-batching", "--device", "cpu", "--cb-num-blocks", "64", "--cb-max-batch-tokens", "128"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serving")
    tokenizer = train_tokenizer([read_sample()] * 3, vocab_size=400)
    tokenizer.chat_template = TEMPLATE
    base = tiny_base_model("qwen3", vocab_size=len(tokenizer))
    for name, model in (("base", base), ("attnres", randomize_queries(convert(base, 3)))):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


def serve(folder, options):
    return Server(str(folder / "attnres"), "transformers", options, folder / "log")


@pytest.mark.parametrize(
    "options", [pytest.param(["--device", "cpu"], marks=pytest.mark.slow), BATCHED], ids=["by request", "batched"]
)
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
    assert seen == [("model", ["--port", "1"]), (None, ["--port", "1", "model"]), (None, ["--port", "1"]), (None, [])]


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
SERVED = [name for name, measured in survey()["supported"].items() if measured["engines"] and name not in HEADS]


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
