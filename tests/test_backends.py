# SPDX-License-Identifier: Apache-2.0
"""`set_backend`: every way to compute the reads against plain torch; Triton's kernels in its interpreter."""

import functools
import importlib
import importlib.util
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import transformers
from peft.utils.other import ModulesToSaveWrapper
from rounding import UpToRounding
from tiny_models import convert, mostly_slow, randomize_queries, tiny_base_model
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import attnres
from attnres.base.classes import ReadingNorm, combined_class
from attnres.depth import backends as depth_backends
from attnres.depth import stream as depth_stream
from attnres.depth import trial as depth_trial
from attnres.depth.definition import depth_attention_reference
from attnres.depth.kernels import fused_read, module_of
from attnres.depth.norms import rms_norm_parameters
from attnres.depth.other_reads import start_stream
from attnres.depth.reads import ReadConfig


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture
def backend(request):
    """The backend of the test's parameter, and plain torch again behind it."""
    attnres.set_backend(request.param)
    yield request.param
    attnres.set_backend("auto")


@pytest.fixture
def few_ids(input_ids):
    """The interpreter needs milliseconds for a token and site."""
    return input_ids[:1, :3]


OTHERS = ["reference", pytest.param("triton", marks=needs_triton)]


def run(model, input_ids):
    """Logits and all gradients, logits of two-phase reads, and a greedy continuation."""
    model.zero_grad()
    logits = model(input_ids, use_cache=False).logits
    logits.float().square().mean().backward()
    grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        two_phases = model(input_ids).logits
    tokens = model.generate(input_ids, max_new_tokens=2, do_sample=False)
    return logits.detach(), grads, two_phases, tokens


@pytest.mark.one_in(2)
@pytest.mark.parametrize("backend", OTHERS, indirect=True)
@pytest.mark.parametrize("block_size", [1, 3])
def test_same_model(backend, block_size, few_ids):
    model = randomize_queries(convert(tiny_base_model("qwen3"), block_size)).train()
    *actual, tokens = run(model, few_ids)
    attnres.set_backend("torch")
    assert torch.equal(tokens, run(model, few_ids)[-1])
    UpToRounding(lambda: run(model, few_ids)[:-1], model=model).check(actual)


@pytest.mark.parametrize("backend", ["reference"], indirect=True)
def test_the_reference_has_no_block_cache(backend, few_ids, monkeypatch):
    monkeypatch.setattr(attnres.BlockCache, "start", None)
    convert(tiny_base_model("qwen3"), 3).generate(few_ids, max_new_tokens=2, do_sample=False)


KERNELS = {"read_closed", "read_closed_backward", "merge", "merge_backward"}


@pytest.fixture
def counted(monkeypatch):
    calls, kernels = [], module_of("triton")

    def count(name, function, *args, **kwargs):
        calls.append(name)
        return function(*args, **kwargs)

    for name in KERNELS:
        monkeypatch.setattr(kernels, name, functools.partial(count, name, getattr(kernels, name)))
    return calls


@needs_triton
@pytest.mark.parametrize("backend", ["triton"], indirect=True)
def test_kernels_are_what_runs(backend, counted, few_ids):
    model = randomize_queries(convert(tiny_base_model("qwen3"), 4))  # one block is read by the last site alone
    run(model, few_ids)
    assert set(counted) == KERNELS
    counted.clear()
    run(model.double(), few_ids)
    assert not counted, "in fp64 plain torch is exact and kernels are not"


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Every tensor says it is on a GPU, and the kernels have not been tried."""
    functions = depth_backends.choose, depth_trial.trial
    for function in functions:
        function.cache_clear()
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True), raising=False)
    monkeypatch.setattr(depth_trial, "seconds_of", lambda name, *args: {"torch": 2.0, "triton": 1.0, "fla": 3.0}[name])
    yield
    for function in functions:
        function.cache_clear()


@pytest.mark.slow
@needs_triton
def test_auto_takes_the_kernels_on_gpus(as_on_a_gpu, counted, few_ids, caplog):
    assert attnres.get_backend() == "auto"
    model = randomize_queries(convert(tiny_base_model("qwen3"), 3))
    run(model, few_ids)
    assert set(counted) == KERNELS and not caplog.records
    counted.clear()
    attnres.set_backend("torch")
    try:
        run(model, few_ids)
    finally:
        attnres.set_backend("auto")
    assert not counted


@pytest.mark.one_in(3)
@needs_triton
@pytest.mark.parametrize("broken", sorted(KERNELS))
@pytest.mark.parametrize("how", mostly_slow(["wrong", "raises"], every=2))
def test_auto_does_without_kernels_that_fail_a_trial(as_on_a_gpu, broken, how, few_ids, monkeypatch, caplog):
    kernels, model = module_of("triton"), randomize_queries(convert(tiny_base_model("qwen3"), 3))
    function = getattr(kernels, broken)

    def break_it(*args, **kwargs):
        if how == "raises":
            raise RuntimeError("PTX assembly aborted")
        results = function(*args, **kwargs)
        return results * 1.001 if isinstance(results, torch.Tensor) else (results[0] * 1.001, *results[1:])

    attnres.set_backend("torch")
    expected = run(model, few_ids)
    attnres.set_backend("auto")
    monkeypatch.setattr(kernels, broken, break_it)
    logits, _, two_phases, _ = run(model, few_ids)
    assert torch.equal(logits, expected[0]) and torch.equal(two_phases, expected[2])
    (record,) = caplog.records
    assert "do without `triton` for torch.float32 on cpu" in record.message
    assert ("PTX assembly aborted" if how == "raises" else f"`{broken}` is off by 1") in record.message


def test_auto_leaves_tensors_without_memory_alone(as_on_a_gpu):
    class Distributed(torch.Tensor):
        pass

    assert not depth_backends.use_kernels(torch.zeros(1).as_subclass(Distributed))


def test_auto_without_triton(as_on_a_gpu, few_ids, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "attnres.depth.triton_kernels", raising=False)
    run(convert(tiny_base_model("qwen3"), 3), few_ids)
    assert not caplog.records


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_trial(dtype, mode):
    with mode():
        depth_trial.check_kernels(module_of("triton"), torch.device("cpu"), dtype)


@needs_triton
@pytest.mark.parametrize("broken", sorted(KERNELS))
def test_trial_of_a_kernel_that_is_wrong(broken, monkeypatch):
    kernels = module_of("triton")
    function = getattr(kernels, broken)

    def wrong(*args, **kwargs):
        results = function(*args, **kwargs)
        return results * 1.001 if isinstance(results, torch.Tensor) else (results[0] * 1.001, *results[1:])

    monkeypatch.setattr(kernels, broken, wrong)
    with pytest.raises(ArithmeticError, match=f"`{broken}` is off by 1"):
        depth_trial.check_kernels(kernels, torch.device("cpu"), torch.float32)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("heads", ["1", "4"])
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_kernels_compile_for_gpus(target, heads, tmp_path):
    """To machine code, which needs no GPU, without spills, and with rows in loads and stores of 16 bytes."""
    tool = Path(__file__).parent / "tools" / "compile_kernels.py"
    command = [sys.executable, tool, "--targets", target, "--hidden", "1024", "--heads", heads]
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    rows = result.stdout.splitlines()[2:]
    assert len(rows) == 10 and all(row.endswith(", 0 B |") for row in rows), result.stdout


@needs_triton
@pytest.mark.parametrize("backend", ["triton"], indirect=True)
def test_frozen_norms_and_queries(backend, few_ids):
    """What an adapter trains is what it gets gradients of."""
    model = randomize_queries(convert(tiny_base_model("qwen3"), 3)).train()
    model.requires_grad_(False)
    model.model.layers[1].self_attn.q_proj.weight.requires_grad_()

    def grads():
        model.zero_grad()
        model(few_ids, labels=few_ids).loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    actual = grads()
    assert list(actual) == ["model.layers.1.self_attn.q_proj.weight"]
    attnres.set_backend("torch")
    UpToRounding(grads, model=model).check(actual)


def test_norms_that_are_left_to_their_module():
    """Only a norm that is Llama's itself, and does nothing else, is computed with the read."""

    class NormWithOptions(LlamaRMSNorm):
        offset = 1.0

    parameters = rms_norm_parameters
    norm = LlamaRMSNorm(8)
    weight, eps = parameters(norm, torch.float32)
    assert weight is norm.weight and eps == norm.variance_epsilon
    assert parameters(None, torch.float32) is None
    assert parameters(GemmaRMSNorm(8), torch.float32) is None
    assert parameters(norm, torch.bfloat16) is None
    assert parameters(NormWithOptions(8), torch.float32) is None
    assert parameters(LlamaRMSNorm(8).double(), torch.float64) is None
    parametrised = nn.utils.parametrize.register_parametrization(LlamaRMSNorm(8), "weight", nn.Identity())
    assert parameters(parametrised, torch.float32) is None
    assert parameters(ModulesToSaveWrapper(norm, "default"), torch.float32) is None
    norm.__class__ = combined_class(ReadingNorm, LlamaRMSNorm)
    assert parameters(norm, torch.float32) is not None
    gemmas = GemmaRMSNorm(8)
    gemmas.__class__ = combined_class(ReadingNorm, GemmaRMSNorm)
    assert parameters(gemmas, torch.float32) is None


def with_and_without_gradients(reads, *inputs):
    """What `reads` gives without gradients and with them, and these."""
    with torch.no_grad():
        without_gradients = reads(*inputs)
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    mixes = reads(*inputs)
    return without_gradients, mixes, torch.autograd.grad(mixes, inputs, [mix.detach().cos() for mix in mixes])


@pytest.mark.parametrize("backend", OTHERS, indirect=True)
@pytest.mark.parametrize("sums", mostly_slow([False, True], every=2))
@pytest.mark.parametrize("of_embedding", mostly_slow([torch.float32, torch.bfloat16], every=2), ids=str)
def test_reads_of_a_stream(backend, of_embedding, sums):
    """With and without a norm, gradients and a block cache, of outputs as wide as the embedding or wider."""
    generator, norm = torch.Generator().manual_seed(0), LlamaRMSNorm(16, eps=0.5)
    queries, embedding, *outputs = (torch.randn(shape, generator=generator) for shape in [(7, 16), *[(2, 3, 16)] * 7])

    embedding = embedding.to(of_embedding)

    def reads(queries, *outputs):
        stream = attnres.DepthStream(queries, (embedding,), block_size=3, scale_by_sources=sums)
        streams = [stream, *([] if torch.is_grad_enabled() else [stream.keep_in(attnres.BlockCache())])]
        mixes = []
        for output in outputs:
            streams = [stream + output for stream in streams]
            mixes += [stream.read(chosen) for stream in streams for chosen in (norm, None)]
        return mixes

    run = functools.partial(with_and_without_gradients, reads)
    actual = run(queries, *outputs)
    attnres.set_backend("torch")
    UpToRounding(run, queries, *outputs).check(actual)


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("backend", ["triton"], indirect=True)
@pytest.mark.parametrize("block_size", [1, 3])
@pytest.mark.parametrize(
    "read_config",
    [
        ReadConfig(num_heads=2, weights="sigmoid"),
        ReadConfig(weights="softmax1", open_block="each"),
        ReadConfig(stream="kept"),
        ReadConfig(num_heads=2, weights="sigmoid", open_block="each", stream="kept"),
        ReadConfig(num_heads=4),
        ReadConfig(num_heads=2, query="hybrid", weights="softmax1"),
    ],
    ids=str,
)
def test_all_kinds_of_reads(backend, read_config, block_size, counted):
    """By kernels and by torch: what is read with and without gradients, and these."""
    generator, norm = torch.Generator().manual_seed(0), LlamaRMSNorm(16, eps=0.5)
    shapes = [(7, 16), *[(2, 3, 16)] * 7]
    projections = [(7, 16), (7, 16, 16)] if read_config.query != "learned" else []
    inputs = [torch.randn(shape, generator=generator) / 4 for shape in [*shapes, *projections]]

    def reads(queries, embedding, *others):
        outputs, of_query = others[:6], others[6:]
        stream = start_stream(read_config, [queries, *of_query], (embedding,), block_size=block_size, eps=1e-3)
        stream = stream if torch.is_grad_enabled() else stream.keep_in(attnres.BlockCache())
        mixes = [stream.read(norm)]
        for output in outputs:
            stream = stream + output
            mixes.append(stream.read(norm))
        return mixes

    run = functools.partial(with_and_without_gradients, reads)
    actual = run(*inputs)
    assert "merge" in counted and "merge_backward" in counted
    attnres.set_backend("torch")
    UpToRounding(run, *inputs).check(actual)


HOOKS = ("forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook")


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("backend", ["triton"], indirect=True)
def test_norms_with_hooks_are_called(backend, counted):
    """And computed with the read all the same."""
    model, seen = convert(tiny_base_model("llama"), 3), []
    norm = model.model.layers[1].input_layernorm
    hooks = [getattr(norm, f"register_{name}")(lambda *args, name=name: seen.append(name)) for name in HOOKS]
    input_ids = torch.ones(1, 2, dtype=torch.long)
    with torch.no_grad():
        model(input_ids)
        assert seen == ["forward_pre_hook", "forward_hook"]
    model(input_ids).logits.sum().backward()
    assert seen[2:] == list(HOOKS)
    with_hooks = counted.copy()
    for hook in hooks:
        hook.remove()
    counted.clear()
    with torch.no_grad():
        model(input_ids)
    model(input_ids).logits.sum().backward()
    assert len(seen) == 6 and counted == with_hooks


def norm_classes():
    """All classes of norms in transformers that call their epsilon as Llama's does."""
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        for name, body in re.findall(r"^class (\w*Norm)\(nn.Module\):\n(.*?)(?=^\S)", path.read_text(), re.M | re.S):
            if "self.variance_epsilon = " in body:
                yield f"transformers.models.{path.parent.name}.{path.stem}", name, body


@pytest.mark.slow
def test_norms_that_kernels_take_for_llamas():
    """Of all models, and of each text of a class once: what is computed with the read is what the module computes."""
    taken = {}
    for module, name, body in norm_classes():
        norm = getattr(importlib.import_module(module), name)(32)
        if rms_norm_parameters(norm, torch.float32) is not None:
            taken[body] = norm
    assert len(taken) >= 3
    for norm in taken.values():
        check_that_it_is_llamas(norm)


def test_norms_that_are_not_llamas():
    """By their names and attributes they could be: these norm groups of features, and can be given a gate."""
    for name in ("mamba2.modeling_mamba2.MambaRMSNormGated", "zamba2.modeling_zamba2.Zamba2RMSNormGated"):
        module, _, name = name.rpartition(".")
        norm = getattr(importlib.import_module(f"transformers.models.{module}"), name)(8, 4)
        assert norm.variance_epsilon and rms_norm_parameters(norm, torch.float32) is None
    norm = LlamaRMSNorm(8)
    norm.__class__ = combined_class(ReadingNorm, LlamaRMSNorm)
    assert rms_norm_parameters(norm, torch.float32) == (norm.weight, norm.variance_epsilon)


def check_that_it_is_llamas(norm):
    hidden_states = torch.randn(2, 3, norm.weight.shape[0]) + 1
    with torch.no_grad():
        norm.weight.normal_()
        norm.variance_epsilon = 0.3

        def llamas(x):
            return norm.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.3)

        UpToRounding(llamas, hidden_states).check(norm(hidden_states))


def fla_by_definition(wrong: float = 0.0):
    """What fla has as a kernel for GPUs, with its arguments: `fla.ops.attnres.fused_attnres`."""

    def fused_attnres(query, residuals, rms_weight, rms_eps=1e-6):
        assert all(source.is_contiguous() for source in residuals)
        return depth_attention_reference(query * rms_weight, residuals, rms_eps)[0] * (1 + wrong)

    return types.SimpleNamespace(fused_attnres=fused_attnres)


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("block_size", [1, 3])
def test_fla(as_on_a_gpu, block_size, few_ids, monkeypatch):
    """It is taken where it is the fastest, for reads in training."""
    monkeypatch.setitem(sys.modules, "fla.ops.attnres", fla_by_definition())
    model = randomize_queries(convert(tiny_base_model("qwen3"), block_size)).train()
    attnres.set_backend("torch")
    *_, tokens = run(model, few_ids)
    attnres.set_backend("auto")
    monkeypatch.setattr(depth_trial, "seconds_of", lambda name, *args: 1.0 if name == "fla" else 2.0)
    assert depth_backends.backend_of(torch.zeros(1)) == "fla"
    reads = []
    monkeypatch.setattr(depth_stream, "fused_read", lambda *args: reads.append(args) or fused_read(*args))
    *actual, tokens_of_fla = run(model, few_ids)
    assert torch.equal(tokens, tokens_of_fla)
    assert len(reads) == model.config.num_sites - 1  # the first site has one source
    attnres.set_backend("torch")
    try:
        UpToRounding(lambda: run(model, few_ids)[:-1], model=model).check(actual)
    finally:
        attnres.set_backend("auto")


@needs_triton
def test_choice(as_on_a_gpu, monkeypatch, caplog):
    """The fastest that is right; what is wrong is said, what is not installed is not."""
    here = torch.device("cpu"), torch.float32
    assert depth_backends.choose(*here) == "triton" and not caplog.records
    assert depth_trial.trial(*here)["fla"] == "not installed"
    for wrong, chosen in ((0.0, "fla"), (0.001, "torch")):
        for function in (depth_backends.choose, depth_trial.trial):
            function.cache_clear()
        monkeypatch.setitem(sys.modules, "fla.ops.attnres", fla_by_definition(wrong))
        monkeypatch.setattr(depth_trial, "seconds_of", lambda name, *args: 1.0 if name == "fla" else float(len(name)))
        assert depth_backends.choose(*here) == chosen
    assert "do without `fla`" in caplog.text and "its mix is off by 1.0e-03" in caplog.text


def test_time_of_a_trial():
    """On a CPU, where there is nothing to choose. It draws no random numbers of the run that it is a part of."""
    state = torch.get_rng_state()
    assert 1e-4 < depth_trial.seconds_of("torch", torch.device("cpu"), torch.float32) < 60
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.slow
def test_environment_variable(tmp_path):
    (tmp_path / "peft.py").touch()  # whose import takes ten seconds

    def run_env(**environment):
        command = [sys.executable, "-m", "attnres", "env"]
        environment["PYTHONPATH"] = str(tmp_path)
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environment
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    plain = run_env()
    assert plain.returncode == 0 and "  cpu: torch, as kernels are for GPUs\n" in plain.stdout
    assert f"torch {torch.__version__}\n" in plain.stdout and "flash-linear-attention not installed" in plain.stdout
    forced = run_env(ATTNRES_BACKEND="reference")
    assert forced.returncode == 0 and "  cpu: reference, as was chosen\n" in forced.stdout
    assert "ATTNRES_BACKEND=reference chooses how reads over depth are computed" in forced.stderr
    unknown = run_env(ATTNRES_BACKEND="cuda")
    assert (
        unknown.returncode == 0
        and "  not known: ValueError: `cuda` is not a backend; there are auto" in unknown.stdout
    )
    assert "Traceback" not in unknown.stderr


def test_bad_backends(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="`cuda` is not a backend; there are auto, reference, torch, triton, fla"):
        attnres.set_backend("cuda")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="`triton` needs a GPU, or TRITON_INTERPRET=1"):
            attnres.set_backend("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "attnres.depth.triton_kernels", raising=False)
    with pytest.raises(ValueError, match="needs Triton: pip install triton"):
        attnres.set_backend("triton")
    assert attnres.get_backend() == "auto"
