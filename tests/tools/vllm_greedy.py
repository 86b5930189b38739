# SPDX-License-Identifier: Apache-2.0
"""What vLLM generates with tiny models, against transformers in fp32.

Not a test that pytest runs: it needs an environment of its own, which `make test-serving` makes.

    python tests/tools/vllm_greedy.py llama qwen3 qwen3_moe [--tensor-parallel 2] [--pipeline-parallel 2] [--lora]

For each base the base itself and the AttnRes model on it, with random queries, run eagerly and compiled, each in an
engine of its own: a minute or two for each. All prompts are generated together, and the first and the last again
alone, the last from what is cached of its prefix. All are compared with what transformers computes of the same tokens:
which token is the likeliest, and the log-probabilities of the whole vocabulary. vLLM knows the models by its plugin,
or by the code that they carry. Then its processes do not import `attnres`.

    python tests/tools/vllm_greedy.py --survey RESULTS.json [types]

For every type whose base has attention that engines can replace, the AttnRes model, eagerly; where it fails, the base
as well. Results are written one by one, and a survey that was stopped goes on. `families_page.py` reads them.
"""

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))


# Longer than a step of the engine and than one of its cache blocks: read in chunks, and found again where it is shared
LONG = "import os\n\nclass Reader:\n    def read(self, size=-1):\n        return os.read(self.fd, size)\n" * 4
PROMPTS = ["def main():", "import os\n\nclass Reader:\n    def read(self", "The", f"{LONG}def a", f"{LONG}def b"]
NUM_TOKENS = 24
# A head size that vLLM has, and no window, which would be shorter than one of its blocks
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "sliding_window": 256,
}
LATENT = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32}
SETTINGS = {
    **dict.fromkeys(("axk1", "deepseek_v3", "longcat_flash"), LATENT),
    "youtu": {**LATENT, "pad_token_id": None},  # transformers empties its row of the embedding while it loads a model
    "dbrx": {
        "d_model": 128,
        "max_seq_len": 256,
        "ffn_config": {"hidden_size": 128, "ffn_hidden_size": 192, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 32},
    "qwen3": {"tie_word_embeddings": True, "layer_types": ["full_attention"] * 4},
    "gemma3_text": {"final_logit_softcapping": 2.0},
    "granite": {"logits_scaling": 3.0},
    "cohere": {"logit_scale": 0.5},
}
SETTINGS_OF_ENGINES = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


def make(family: str, folder: Path, options: dict):
    """Save a base and the AttnRes model on it, a tokenizer, and adapters with random weights for both if asked for."""
    from decoder_configs import decoder_config
    from family_survey import converted, native_model
    from peft import LoraConfig, get_peft_model
    from tiny_models import randomize_queries

    from attnres.configuration_attnres import remote_code_auto_map
    from attnres.data.text import train_tokenizer

    tokenizer = train_tokenizer([Path(os.__file__).read_text()], vocab_size=512)
    settings = {"vocab_size": len(tokenizer), "bos_token_id": 0, **SIZES, **SETTINGS.get(family, {})}
    if "qk_rope_head_dim" in settings:
        del settings["head_dim"]  # is that of the part with positions
    base = native_model(decoder_config(family, **settings))
    model = converted(base, block_size=3, **options["read"])
    randomize_queries(model.base_model)
    if options["remote_code"]:
        model.config.auto_map = remote_code_auto_map(model.config.base_model_type)
    for name, saved in ((family, base), (f"attnres-{family}", model)):
        saved.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        if options["lora"]:
            lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
            get_peft_model(saved, lora).save_pretrained(folder / f"{name}-lora")


def generate(model: str, output: str, mode: str, options: str):
    """Write prompts, tokens and log-probabilities of the engine to a file. Runs in a process of its own."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    limits = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_logprobs": -1}
    limits |= {"enable_prefix_caching": True, "enable_chunked_prefill": True}
    options = json.loads(options)
    remote_code, lora, _ = options.pop("remote_code"), options.pop("lora"), options.pop("read")
    if remote_code or not Path(model).name.startswith("attnres"):
        options |= {"model_impl": "transformers", "trust_remote_code": True}
    if lora:
        options |= {"enable_lora": True, "max_lora_rank": 8}
    engine = LLM(model, dtype="float32", enforce_eager=mode == "eager", **options, **limits)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=-1)
    adapter = LoRARequest("adapter", 1, f"{model}-lora") if lora else None
    results = []
    answers = engine.generate(PROMPTS, params, lora_request=adapter)
    answers += engine.generate([PROMPTS[0], PROMPTS[-1]], params, lora_request=adapter)
    assert answers[-1].num_cached_tokens or mode != "eager", "nothing of the prefix was found in the cache"
    for request in answers:
        (generated,) = request.outputs
        logprobs = [[of_step[token].logprob for token in range(len(of_step))] for of_step in generated.logprobs]
        results.append((list(request.prompt_token_ids), list(generated.token_ids), logprobs))
    Path(output).write_text(json.dumps(results))
    assert not remote_code or "attnres" not in sys.modules


def compare(folder: Path, results: list, lora: bool) -> tuple[int, int, float]:
    """How many tokens are the likeliest, of how many, and the largest difference of a log-probability."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    import attnres  # noqa: F401

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if lora:
        model = PeftModel.from_pretrained(model, f"{folder}-lora").eval()
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
    parser.add_argument("families", nargs="*")
    parser.add_argument("--survey", type=Path, metavar="RESULTS.json")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks")
    parser.add_argument("--pipeline-parallel", type=int, default=1, help="stages")
    parser.add_argument("--modes", nargs="+", default=["eager", "compiled"])
    parser.add_argument("--remote-code", action="store_true", help="in place of the plugin")
    parser.add_argument("--lora", action="store_true", help="with a LoRA adapter")
    parser.add_argument("--read", nargs="+", default=[], metavar="FIELD=VALUE", help="another read: num_heads=4")
    parser.add_argument("--without-base", action="store_true", help="leave out the base itself")
    args = parser.parse_args()
    options = {"tensor_parallel_size": args.tensor_parallel, "pipeline_parallel_size": args.pipeline_parallel}
    read = dict(field.split("=") for field in args.read)
    read = {f"attn_res_{name}": int(value) if value.isdigit() else value for name, value in read.items()}
    options |= {"remote_code": args.remote_code, "lora": args.lora, "read": read}
    if args.survey:
        survey(args.survey, args.families or types_for_engines(), options)
        return
    print("| model | mode | likeliest tokens | log-probabilities off by |\n|---|---|---|---|", flush=True)
    for family in args.families or ["llama", "qwen3", "qwen3_moe"]:
        with tempfile.TemporaryDirectory() as folder:
            make(family, Path(folder), options)
            for model in (family, f"attnres-{family}")[args.without_base :]:
                for mode in args.modes:
                    try:
                        equal, total, difference = measure(Path(folder, model), mode, options)
                    except EngineError as error:
                        raise SystemExit(str(error)) from None
                    print(f"| {model} | {mode} | {equal} of {total} | {difference:.1e} |", flush=True)
                    if equal < total:
                        raise SystemExit(f"vLLM and transformers have other tokens for {model}.")


def measure(model: Path, mode: str, options: dict) -> tuple[int, int, float]:
    """What `compare` says of an engine in a process of its own, whose files lie beside the model.

    Raises:
        EngineError: with what it printed, if it fails.
    """
    folder = model.parent
    settings = {**SETTINGS_OF_ENGINES, "HF_HOME": f"{folder}/huggingface", "VLLM_CACHE_ROOT": f"{folder}/vllm"}
    if max(options["tensor_parallel_size"], options["pipeline_parallel_size"]) > 1:
        settings["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    if options["remote_code"]:
        settings["VLLM_PLUGINS"] = ""
    command = [sys.executable, __file__, "--generate", model, f"{folder}/results", mode, json.dumps(options)]
    run = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True)
    if run.returncode:
        raise EngineError(run.stdout[-30000:] + run.stderr[-8000:])
    return compare(model, json.loads(Path(folder, "results").read_text()), options["lora"])


class EngineError(Exception):
    def reason(self) -> str:
        """The first error that the engine's own process told of, without where."""
        errors = re.findall(r"^(?:.*\] )?((?:\w+\.)*\w*(?:Error|Exception): .+)$", str(self), re.M)
        return errors[0] if errors else str(self).strip().splitlines()[-1]


def types_for_engines() -> list[str]:
    found = json.loads((Path(__file__).parents[2] / "base/families.json").read_text())["supported"]
    return [name for name, measured in found.items() if measured["engines"]]


def survey(results: Path, families: list[str], options: dict):
    """Each type in a child of a process that has imported all, which takes longer than an engine of a tiny model."""
    with tempfile.TemporaryDirectory() as caches:
        os.environ |= {"HF_HOME": f"{caches}/huggingface", "VLLM_CACHE_ROOT": f"{caches}/vllm", **SETTINGS_OF_ENGINES}
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine runs in that child
        import family_survey  # noqa: F401
        import vllm  # noqa: F401

        found = json.loads(results.read_text()) if results.exists() else {}
        for family in families:
            if family in found:
                continue
            found[family] = {}
            with tempfile.TemporaryDirectory() as folder:
                try:
                    in_child(folder, make, family, Path(folder), options)
                    for model in (f"attnres-{family}", family):
                        found[family][model] = surveyed(Path(folder, model), options)
                        if isinstance(found[family][model], dict) and found[family][model]["difference"] < 1e-3:
                            break
                except EngineError as error:
                    found[family]["made"] = error.reason()
            results.write_text(json.dumps(found, indent=1))
            print(family, found[family], flush=True)


def surveyed(model: Path, options: dict) -> dict | str:
    """What `compare` says, or the error of the engine."""
    output = f"{model.parent}/results"
    try:
        in_child(model.parent, generate, str(model), output, "eager", json.dumps(options))
    except EngineError as error:
        return error.reason()

    def write_comparison():
        compared = compare(model, json.loads(Path(output).read_text()), options["lora"])
        Path(output).write_text(json.dumps(dict(zip(("equal", "total", "difference"), compared))))

    in_child(model.parent, write_comparison)
    return json.loads(Path(output).read_text())


def in_child(folder, function, *args):
    """Call a function in a copy of this process. Raises an `EngineError` with what it printed, if it fails."""
    log = Path(folder, "log")

    def run():
        with log.open("w") as file:
            os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
        function(*args)

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    child.join(600)
    if child.exitcode != 0:
        child.kill()
        raise EngineError(log.read_text()[-30000:])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--generate"]:
        generate(*sys.argv[2:])
    else:
        main()
