# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""An AttnRes checkpoint under load, behind `attnres serve`, and its base beside it; on loopback.

    python -m studies.costs.serving run MODEL BASE [--engine vllm]    # studies/costs/serving/ENGINE.json
    python -m studies.costs.serving table                             # both engines side by side

Many clients at once send prompts of different lengths, at temperature 0. Some read their answer as a stream, some go
away in the middle of one, some send what is no JSON or a prompt longer than the model's context. Every answer that was
finished is compared with what `generate` gives of the same prompt alone.
"""

import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import httpx
import psutil
import torch
import typer
from rich.console import Console
from rich.progress import track
from transformers import AutoModelForCausalLM, AutoTokenizer

import attnres  # noqa: F401
from attnres.utils.files import write_file
from attnres.utils.timing import machine


RESULTS = Path(__file__).parent / "serving"
# What clients do, in turn
KINDS = (("answer",) * 7 + ("stream", "leave", "no_json")) * 4 + ("too_long",)
SENTENCES = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time there was a fisherman who lived by the sea, and every morning before the sun had risen he",
    "Water boils at",
    "The three primary colours are red,",
    "import os\n\nclass Reader:\n    def read(self",
    "In 1969 two people walked on the Moon. One of them was",
    "A recipe for bread: take flour, water, salt and yeast. First",
)
# The servers' own limits of memory. On a CPU both would take most of what there is. vLLM would cast fp32 to bf16
OPTIONS = {
    "transformers": [
        "--continuous-batching",
        "--device",
        "cpu",
        "--cb-num-blocks",
        "512",
        "--cb-max-batch-tokens",
        "512",
    ],
    "vllm": [
        "--max-model-len",
        "2048",
        "--max-num-seqs",
        "64",
        "--gpu-memory-utilization",
        "0.4",
        "--dtype",
        "float32",
    ],
}
ANSWER = "tokens per second: "
console = Console()
app = typer.Typer(add_completion=False, help=__doc__)


@dataclass
class Request:
    number: int
    kind: str
    prompt: str
    max_tokens: int
    status: int | None = None
    text: str | None = None
    seconds: float | None = None
    error: str | None = None


@dataclass
class Server:
    """`attnres serve` on a free port. `memory` has the bytes of the process and its children, every second."""

    model: str
    engine: str
    options: list[str]
    log: Path
    preload: bool = True
    memory: list[int] = field(default_factory=list)

    def __enter__(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "attnres", "serve", *[self.model] * self.preload, "--engine", self.engine]
        command += ["--host", "127.0.0.1", "--port", str(self.port), *self.options]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        self.wait_until_healthy()
        threading.Thread(target=self._watch_memory, daemon=True).start()
        return self

    def wait_until_healthy(self, seconds: int = 600):
        end = time.time() + seconds
        while time.time() < end:
            if self.process.poll() is not None:
                raise RuntimeError(
                    f"The server has ended with {self.process.returncode}: {self.log.read_text()[-2000:]}"
                )
            try:
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
        raise RuntimeError(f"The server is not healthy after {seconds} s.")

    def _watch_memory(self):
        while self.process.poll() is None:
            try:
                processes = [
                    psutil.Process(self.process.pid),
                    *psutil.Process(self.process.pid).children(recursive=True),
                ]
                self.memory.append(sum(process.memory_info().rss for process in processes))
            except psutil.Error:
                pass
            time.sleep(1)

    def end(self, kind: signal.Signals = signal.SIGTERM) -> float:
        """Seconds until the process has ended."""
        start = time.time()
        if kind == signal.SIGKILL:
            os.killpg(self.process.pid, kind)
        else:
            self.process.send_signal(kind)
        self.process.wait(60)
        return time.time() - start

    def __exit__(self, *error):
        if self.process.poll() is None:
            self.end()


def make_requests(number: int, too_long: str = "the " * 9000) -> list[Request]:
    """Each with a prompt of its own; the one that is too long is longer than the context of the real model."""
    requests = []
    for i in range(number):
        prompt = f"{i}. " + " ".join(SENTENCES[(i + j) % len(SENTENCES)] for j in range(1 + i * 7 % 5))
        kind = KINDS[i % len(KINDS)]
        requests.append(Request(i, kind, too_long if kind == "too_long" else prompt, 4 + i * 5 % 21))
    return requests


async def send(client: httpx.AsyncClient, model: str, request: Request):
    body = {"model": model, "prompt": request.prompt, "max_tokens": request.max_tokens, "temperature": 0}
    start = time.perf_counter()
    try:
        if request.kind == "no_json":
            response = await client.post(
                "/v1/completions", content=b'{"prompt": "The', headers={"content-type": "application/json"}
            )
            request.status = response.status_code
        elif request.kind in ("stream", "leave"):
            async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
                request.status, parts = response.status_code, []
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    parts += [choice.get("text") or "" for choice in json.loads(line[6:])["choices"]]
                    if request.kind == "leave" and len(parts) == 2:
                        break
                request.text = "".join(parts)
        else:
            response = await client.post("/v1/completions", json=body)
            request.status = response.status_code
            if response.status_code == 200:
                request.text = response.json()["choices"][0]["text"]
            else:
                request.error = response.text[:200]
    except (httpx.HTTPError, ValueError) as error:
        request.error = repr(error)
    request.seconds = time.perf_counter() - start


async def send_all(url: str, model: str, requests: list[Request]):
    limits = httpx.Limits(max_connections=len(requests), max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=1200, limits=limits) as client:
        await asyncio.gather(*(send(client, model, request) for request in requests))


@torch.no_grad()
def compare(model: str, requests: list[Request]) -> dict:
    """How many answers are those of `generate`, and the margin of the two tokens where one parts."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    alone = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    equal, partings = 0, []
    for request in track(requests, description="Comparing with generate"):
        prompt = tokenizer(request.prompt, return_tensors="pt").input_ids
        answer = alone.generate(prompt, max_new_tokens=request.max_tokens, do_sample=False)[0, prompt.shape[1] :]
        text = tokenizer.decode(answer, skip_special_tokens=True)
        if text == request.text:
            equal += 1
            continue
        place = next(
            (i for i in range(len(answer)) if not request.text.startswith(tokenizer.decode(answer[: i + 1]))), 0
        )
        ids = torch.cat((prompt[0], answer[:place]))[None]
        best = alone(ids).logits[0, -1].topk(2).values
        partings.append({"number": request.number, "place": place, "margin": (best[0] - best[1]).item()})
    return {"compared": len(requests), "equal": equal, "partings": partings}


def summary(requests: list[Request], seconds: float, memory: list[int]) -> dict:
    finished = [r for r in requests if r.kind in ("answer", "stream") and r.status == 200 and r.text is not None]
    times = sorted(r.seconds for r in finished)
    return {
        "requests": len(requests),
        "finished": len(finished),
        "wanted": sum(r.kind in ("answer", "stream") for r in requests),
        "status": {
            kind: dict(Counter(str(r.status) for r in requests if r.kind == kind)) for kind in dict.fromkeys(KINDS)
        },
        "seconds": seconds,
        "requests_per_second": len(finished) / seconds,
        "median_s": statistics.median(times),
        "p95_s": times[int(0.95 * (len(times) - 1))],
        "gigabytes": [memory[0] / 1e9, max(memory) / 1e9, memory[-1] / 1e9] if memory else [],
    }


def load(server: Server, requests: list[Request]) -> dict:
    first = len(server.memory)
    start = time.perf_counter()
    asyncio.run(send_all(server.url, server.model, requests))
    seconds = time.perf_counter() - start
    time.sleep(2)
    return summary(requests, seconds, server.memory[first:])


@app.command()
def run(
    model: Annotated[str, typer.Argument(help="Folder of an AttnRes checkpoint.")],
    base: Annotated[str, typer.Argument(help="Folder of its base.")],
    engine: Annotated[str, typer.Option(help="transformers or vllm.")] = "transformers",
    requests: Annotated[int, typer.Option(help="At once.")] = 200,
    rounds: Annotated[int, typer.Option(help="Of each model, alternating.")] = 3,
    minutes: Annotated[float, typer.Option(help="Of further load for the memory, each model.")] = 0,
    results: Annotated[Path, typer.Option(help="Folder for the figures.")] = RESULTS,
    limits: Annotated[str | None, typer.Option(help="Options of the server in place of ours.")] = None,
):
    """Serve both, send requests, compare answers, kill the server and start it again."""
    options = OPTIONS[engine] if limits is None else limits.split()
    results.mkdir(parents=True, exist_ok=True)
    found: dict = {
        "engine": engine,
        "options": options,
        "machine": machine("cpu"),
        "rounds": {"attnres": [], "base": []},
    }
    answers: dict[str, list[Request]] = {}
    for number in range(rounds):
        for name, path in (("attnres", model), ("base", base)):
            with Server(path, engine, options, results / f"{engine}.log") as server:
                warm_up = make_requests(2)
                asyncio.run(send_all(server.url, path, warm_up))
                sent = make_requests(requests)
                figures = load(server, sent)
                if number == 0 and minutes:
                    figures["memory_over_time"] = over_time(server, minutes)
                figures["seconds_to_end"] = server.end()
            found["rounds"][name].append(figures)
            answers.setdefault(name, sent)
            console.print(
                f"{name}: {figures['finished']} of {figures['wanted']} in {figures['seconds']:.1f} s", highlight=False
            )
    for name, path in (("attnres", model), ("base", base)):
        finished = [r for r in answers[name] if r.kind in ("answer", "stream") and r.text is not None]
        found[f"{name}_answers"] = compare(path, finished)
    found["killed"] = kill_and_restart(model, engine, options, results, requests)
    write_file(results / f"{engine}.json", json.dumps(found, indent=1) + "\n")
    (results / f"{engine}.log").unlink()
    console.print(f"Wrote {results / f'{engine}.json'}", highlight=False)


def over_time(server: Server, minutes: float) -> list[float]:
    """Gigabytes after each round of requests, for so long."""
    gigabytes, end = [], time.time() + 60 * minutes
    while time.time() < end:
        asyncio.run(send_all(server.url, server.model, make_requests(20)))
        gigabytes.append(server.memory[-1] / 1e9)
    return gigabytes


def kill_and_restart(model: str, engine: str, options: list[str], results: Path, number: int) -> dict:
    """What clients are told when the server is killed in the middle, and whether a new one answers."""
    with Server(model, engine, options, results / f"{engine}.log") as server:
        requests = [request for request in make_requests(number) if request.kind == "answer"]
        threading.Timer(2, lambda: server.end(signal.SIGKILL)).start()
        asyncio.run(send_all(server.url, model, requests))
    lost = [request.number for request in requests if request.text is None]
    with Server(model, engine, options, results / f"{engine}.log") as server:
        again = [request for request in make_requests(number) if request.number in lost[:8]]
        asyncio.run(send_all(server.url, model, again))
    return {
        "answered_before": len(requests) - len(lost),
        "lost": len(lost),
        "told": dict(Counter((r.error or "nothing").split("(")[0] for r in requests if r.text is None)),
        "sent_again": len(again),
        "answered_again": sum(request.text is not None for request in again),
    }


@app.command()
def throughput(
    model: Annotated[str, typer.Argument(help="Folder of an AttnRes checkpoint.")],
    base: Annotated[str, typer.Argument(help="Folder of its base.")],
    pairs: Annotated[int, typer.Option(help="Of measurements, one of each model by turns.")] = 9,
    tokens: Annotated[int, typer.Option(help="Of each answer.")] = 48,
    dtype: Annotated[str, typer.Option(help="Of the weights.")] = "float32",
    base_code: Annotated[str, typer.Option(help="`auto`: vLLM's own; `transformers`: as AttnRes.")] = "auto",
    results: Annotated[Path, typer.Option(help="Folder for the figures.")] = RESULTS,
):
    """Tokens per second of vLLM with 1, 8 and 32 requests at once, without a server around it.

    Both engines are loaded, each in a process of its own, and take turns.
    """
    paths = {"attnres": model, "base": base}
    found: dict = {"tokens": tokens, "dtype": dtype, "base_code": base_code, "machine": machine("cpu")}
    found |= {"speeds": {}, "ratios": {}}
    engines = {}
    try:
        for name, path in paths.items():
            code = base_code if name == "base" else "auto"
            command = [sys.executable, __file__, "tokens-per-second", path, str(tokens), dtype, code]
            engines[name] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            answer_of(engines[name])
            console.print(f"{name} is loaded", highlight=False)
        for number in (1, 8, 32):
            speeds: dict[str, list[float]] = {name: [] for name in paths}
            for _ in range(1 + pairs):
                for name, engine in engines.items():
                    engine.stdin.write(f"{number}\n")
                    engine.stdin.flush()
                    speeds[name].append(answer_of(engine))
            speeds = {name: of_model[1:] for name, of_model in speeds.items()}  # without those of warm-up
            ratios = [ours / of_base for ours, of_base in zip(speeds["attnres"], speeds["base"])]
            found["speeds"][number] = speeds
            found["ratios"][number] = statistics.quantiles(ratios, method="inclusive")
            console.print(f"{number}: {found['ratios'][number]} of the base's tokens per second", highlight=False)
    finally:
        for engine in engines.values():
            engine.stdin.close()
            engine.wait()
    name = "_".join(["throughput", *[dtype] * (dtype != "float32"), *[f"base_{base_code}"] * (base_code != "auto")])
    write_file(results / f"{name}.json", json.dumps(found, indent=1) + "\n")


def answer_of(engine: subprocess.Popen) -> float:
    """The next number that it prints; vLLM's processes print as well."""
    for line in engine.stdout:  # type: ignore[union-attr]
        if line.startswith(ANSWER):
            return float(line.removeprefix(ANSWER))
    raise RuntimeError(f"{' '.join(map(str, engine.args))} ended: see above.")  # type: ignore[arg-type]


@app.command(hidden=True)
def tokens_per_second(model: str, tokens: int, dtype: str, code: str):
    """For every number of requests that comes in, a line with the tokens per second."""
    from vllm import LLM, SamplingParams

    limits = {"max_model_len": 512, "max_num_seqs": 32, "gpu_memory_utilization": 0.3}
    engine = LLM(model, dtype=dtype, model_impl=code, **limits)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    print(f"{ANSWER}0", flush=True)
    for line in sys.stdin:
        number = int(line)
        prompts = [f"{i}. {SENTENCES[i % len(SENTENCES)]}" for i in range(number)]
        start = time.perf_counter()
        engine.generate(prompts, params, use_tqdm=False)
        print(f"{ANSWER}{number * tokens / (time.perf_counter() - start)}", flush=True)


def table_of(results: Path) -> str:
    lines = ["| | transformers | vLLM |", "|---|---|---|"]
    found = [
        json.loads(path.read_text()) if path.exists() else None
        for path in (results / "transformers.json", results / "vllm.json")
    ]

    def ratio(of_engine: dict, key: str) -> str:
        pairs = zip(of_engine["rounds"]["attnres"], of_engine["rounds"]["base"])
        ratios = sorted(ours[key] / base[key] for ours, base in pairs)
        return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"

    def answers(of_engine: dict, name: str) -> str:
        compared = of_engine[f"{name}_answers"]
        margins = [parting["margin"] for parting in compared["partings"]]
        parted = f"; others part where two logits differ by at most {max(margins):.4f}" if margins else ""
        return f"{compared['equal']} of {compared['compared']}{parted}"

    rows = {
        "requests at once": lambda f: f"{f['rounds']['attnres'][0]['requests']}",
        "finished, of those wanted": lambda f: ", ".join(
            f"{r['finished']} of {r['wanted']}" for r in f["rounds"]["attnres"]
        ),
        "equal to `generate`": lambda f: answers(f, "attnres"),
        "the same of the base": lambda f: answers(f, "base"),
        "requests per second, of the base's": lambda f: ratio(f, "requests_per_second"),
        "95th percentile of the time, of the base's": lambda f: ratio(f, "p95_s"),
        "killed: answered before, lost, told": lambda f: (
            f"{f['killed']['answered_before']}, {f['killed']['lost']}, {', '.join(f['killed']['told'])}"
        ),
    }
    for label, cell in rows.items():
        lines.append(f"| {label} | " + " | ".join("not run" if f is None else cell(f) for f in found) + " |")
    return "\n".join(lines)


@app.command()
def table(results: Annotated[Path, typer.Option(help="Folder with the figures.")] = RESULTS):
    """Print the figures of both engines side by side, in Markdown."""
    print(table_of(results))


if __name__ == "__main__":
    app()
