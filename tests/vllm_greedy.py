# SPDX-License-Identifier: Apache-2.0
"""What vLLM generates with tiny models, against transformers in fp32.

Not a test that pytest runs: it needs an environment of its own, which `make test-serving` makes.

    python tests/vllm_greedy.py llama qwen3 qwen3_moe [--tensor-parallel 2] [--pipeline-parallel 2] [--remote-code]

For each base the base itself and the AttnRes model on it, with random queries, run eagerly and compiled, each in an
engine of its own: a minute or two for each. All prompts are generated together, and the first one again alone. Both
are compared with what transformers computes of the same tokens: which token is the likeliest, and the
log-probabilities of the whole vocabulary. vLLM knows the models by its plugin, or by the code that they carry. Then
its processes do not import `attnres`.
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
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "sliding_window": 64,
}
SETTINGS = {
    "qwen3": {"tie_word_embeddings": True, "layer_types": ["full_attention"] * 4},
    "gemma3_text": {"final_logit_softcapping": 2.0},
    "granite": {"logits_scaling": 3.0},
    "cohere": {"logit_scale": 0.5},
}


def make(family: str, folder: Path, remote_code: bool):
    """Save a base and the AttnRes model on it, and a tokenizer for both."""
    import torch
    from decoder_configs import decoder_config
    from tiny_models import convert, randomize_queries
    from transformers import AutoModelForCausalLM

    from attnres.demo import train_tokenizer
    from attnres.modeling_attnres import REMOTE_CODE_AUTO_MAP

    tokenizer = train_tokenizer([Path(os.__file__).read_text()], vocab_size=512)
    torch.manual_seed(0)
    settings = {"vocab_size": len(tokenizer), "bos_token_id": 0, **SIZES, **SETTINGS.get(family, {})}
    base = AutoModelForCausalLM.from_config(decoder_config(family, **settings)).eval()
    model = randomize_queries(convert(base, block_size=3))
    if remote_code:
        model.config.auto_map = dict(REMOTE_CODE_AUTO_MAP)
    for name, saved in ((family, base), (f"attnres-{family}", model)):
        saved.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def generate(model: str, output: str, mode: str, options: str):
    """Write prompts, tokens and log-probabilities of the engine to a file. Runs in a process of its own."""
    from vllm import LLM, SamplingParams

    limits = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 256, "max_logprobs": -1}
    options = json.loads(options)
    remote_code = options.pop("remote_code")
    if remote_code or not Path(model).name.startswith("attnres"):
        options |= {"model_impl": "transformers", "trust_remote_code": True}
    engine = LLM(model, dtype="float32", enforce_eager=mode == "eager", **options, **limits)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=-1)
    results = []
    for request in engine.generate(PROMPTS, params) + engine.generate(PROMPTS[:1], params):
        (generated,) = request.outputs
        logprobs = [[of_step[token].logprob for token in range(len(of_step))] for of_step in generated.logprobs]
        results.append((list(request.prompt_token_ids), list(generated.token_ids), logprobs))
    Path(output).write_text(json.dumps(results))
    assert not remote_code or "attnres" not in sys.modules


def compare(model: Path, results: list) -> tuple[int, int, float]:
    """How many tokens are the likeliest, of how many, and the largest difference of a log-probability."""
    import torch
    from transformers import AutoModelForCausalLM

    import attnres  # noqa: F401

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
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks")
    parser.add_argument("--pipeline-parallel", type=int, default=1, help="stages")
    parser.add_argument("--modes", nargs="+", default=["eager", "compiled"])
    parser.add_argument("--remote-code", action="store_true", help="in place of the plugin")
    parser.add_argument("--without-base", action="store_true", help="leave out the base itself")
    args = parser.parse_args()
    settings = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    options = {"tensor_parallel_size": args.tensor_parallel, "pipeline_parallel_size": args.pipeline_parallel}
    if max(options.values()) > 1:
        settings["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    if args.remote_code:
        settings["VLLM_PLUGINS"] = ""
    options["remote_code"] = args.remote_code
    print("| model | mode | likeliest tokens | log-probabilities off by |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        settings |= {"HF_HOME": f"{folder}/huggingface", "VLLM_CACHE_ROOT": f"{folder}/vllm"}
        for family in args.families:
            make(family, Path(folder), args.remote_code)
            for model in (Path(folder, family), Path(folder, f"attnres-{family}"))[args.without_base :]:
                for mode in args.modes:
                    command = [sys.executable, __file__, "--generate", model, f"{folder}/results", mode]
                    command.append(json.dumps(options))
                    run = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True)
                    if run.returncode:
                        raise SystemExit(run.stdout[-30000:] + run.stderr[-8000:])
                    equal, total, difference = compare(model, json.loads(Path(folder, "results").read_text()))
                    print(f"| {model.name} | {mode} | {equal} of {total} | {difference:.1e} |", flush=True)
                    if equal < total:
                        raise SystemExit(f"vLLM and transformers have other tokens for {model.name}.")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--generate"]:
        generate(*sys.argv[2:])
    else:
        main()
