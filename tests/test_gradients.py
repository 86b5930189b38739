# SPDX-License-Identifier: Apache-2.0
"""Gradients are of what forward used, whatever happens to the model before backward, as plain autograd has it.

Everything here is of a model, its loss and its gradients. What they are compared with is the definition in plain
operations (`set_backend("reference")`), under the same treatment.
"""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from peft import LNTuningConfig, LoraConfig, get_peft_model
from rounding import UpToRounding
from test_training import on_processes
from tiny_models import mostly_slow, randomize_queries, tiny_base_model
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.func import functional_call, grad, grad_and_value, vmap
from torch.nn.utils import parametrize
from torch.utils.checkpoint import CheckpointError

import attnres


# The norms: Llama's, (1 + weight), LayerNorm with a bias, and one without parameters
NORMS = mostly_slow(["llama", "gemma", "stablelm", "olmo"], every=2)
# Other code computes each of these reads
READS = {
    "paper": {},
    "heads": {"num_heads": 4, "weights": "sigmoid", "open_block": "each"},
    "input": {"query": "hybrid", "query_rank": 4},
    "kept": {"stream": "kept"},
}
EVERY_READ = mostly_slow(READS, every=3)


@pytest.fixture(params=["torch", pytest.param("triton", marks=pytest.mark.slow)])
def backend(request):
    """Of plain torch, and of kernels, which run interpreted without a GPU."""
    yield from chosen(request.param)


@pytest.fixture
def torch_backend():
    yield from chosen("torch")


def chosen(name):
    before = attnres.get_backend()
    try:
        attnres.set_backend(name)
    except ValueError as error:
        pytest.skip(str(error))
    yield name
    attnres.set_backend(before)


def make_model(family="llama", block_size=3, num_hidden_layers=3, **read):
    fields = {f"attn_res_{name}": value for name, value in read.items()}
    base_model = tiny_base_model(family, num_hidden_layers=num_hidden_layers, hidden_dropout=0.0)
    config = attnres.AttnResConfig.from_base_config(base_model.config, block_size=block_size, **fields)
    model = attnres.AttnResForCausalLM(config)
    model.load_state_dict(base_model.state_dict(), strict=False)
    return randomize_queries(model).train()


def norms_of(model):
    return [module for name, module in model.named_modules() if "layernorm" in name.split(".")[-1]]


def batch():
    return torch.randint(3, 97, (2, 7), generator=torch.Generator().manual_seed(0))


def loss_of(model):
    return model(batch(), labels=batch(), use_cache=False).loss


def grads_of(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def loss_and_grads(model, before_backward=lambda model: None):
    """Of a copy of the model."""
    model = copy.deepcopy(model)
    loss = loss_of(model)
    before_backward(model)
    loss.backward()
    return loss.detach(), grads_of(model)


@contextlib.contextmanager
def definition():
    before = attnres.get_backend()
    attnres.set_backend("reference")
    try:
        yield
    finally:
        attnres.set_backend(before)


def by_definition(model, before_backward=lambda model: None):
    with definition():
        return UpToRounding(lambda: loss_and_grads(model, before_backward), model=model)


def other_parameters(model):
    return {
        name: (1.3 * p.detach() + 0.05 * torch.randn_like(p)).requires_grad_() for name, p in model.named_parameters()
    }


def model_with(model, parameters):
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.copy_(parameters[name])
    return other


def loss_of_call(parameters, model):
    return functional_call(model, parameters, (batch(),), {"labels": batch(), "use_cache": False}).loss


@pytest.mark.parametrize("family", NORMS)
def test_functional_call(family, backend):
    model = make_model(family)
    parameters = other_parameters(model)
    expected = by_definition(model_with(model, parameters))
    loss = loss_of_call(parameters, model)
    grads = torch.autograd.grad(loss, list(parameters.values()))
    expected.check((loss.detach(), dict(zip(parameters, grads))))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("family", mostly_slow(["llama", "stablelm"], every=2))
def test_frozen_or_not_before_backward(family, backend):
    model = make_model(family)

    def freeze(model):
        for norm in norms_of(model):
            norm.requires_grad_(False)

    def thaw(model):
        model.requires_grad_(True)

    by_definition(model, freeze).check(loss_and_grads(model, freeze))
    freeze(model)
    by_definition(model, thaw).check(loss_and_grads(model, thaw))


@pytest.mark.parametrize("read", EVERY_READ)
def test_changed_in_place_before_backward(read, backend):
    """Plain autograd raises this as well."""

    def step(model):
        with torch.no_grad():
            norms_of(model)[1].weight.mul_(2)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss_and_grads(make_model(**READS[read]), step)


def test_data_swapped_before_backward(backend):
    """As of an average of weights: autograd does not see that, and goes by what is there."""

    def swap(model):
        for parameter in model.parameters():
            parameter.data = 1.5 * parameter.data

    model = make_model()
    by_definition(model, swap).check(loss_and_grads(model, swap))


def test_parameters_gone_until_backward(backend):
    """As of ZeRO-3, which gathers the parameters of a module again when its backward begins."""
    model = make_model()
    expected = by_definition(model)
    kept = {name: parameter.data for name, parameter in model.named_parameters()}
    loss = loss_of(model)
    for parameter in model.parameters():
        parameter.data = torch.empty(0)
    with pytest.raises(RuntimeError):
        loss.backward(retain_graph=True)
    model.zero_grad()
    for name, parameter in model.named_parameters():
        parameter.data = kept[name]
    loss.backward()
    expected.check((loss.detach(), grads_of(model)))


def test_another_epsilon_before_backward(torch_backend):
    def set_epsilon(model):
        for norm in norms_of(model):
            norm.variance_epsilon = 10.0

    model = make_model()
    by_definition(model, set_epsilon).check(loss_and_grads(model, set_epsilon))


class Doubled(nn.Module):
    """A parametrization with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, weight):
        return self.factor * weight


@pytest.mark.parametrize("cached", [False, True])
def test_parametrized_norms(cached, backend):
    model = make_model()
    for norm in norms_of(model):
        parametrize.register_parametrization(norm, "weight", Doubled())

    def leave(model):
        for norm in norms_of(model):
            parametrize.remove_parametrizations(norm, "weight", leave_parametrized=False)

    def results(leave=lambda model: None):
        other = copy.deepcopy(model)
        parameters = dict(other.named_parameters())
        with parametrize.cached() if cached else contextlib.nullcontext():
            loss = loss_of(other)
        leave(other)
        return loss.detach(), dict(zip(parameters, torch.autograd.grad(loss, parameters.values())))

    with definition():
        expected = UpToRounding(results, model=model)
    assert any("factor" in name for name in expected.expected)
    expected.check(results())
    expected.check(results(leave))


@pytest.mark.parametrize("read", EVERY_READ)
def test_torch_func(read, backend):
    """As reads are computed by definition within its transforms."""
    model = make_model(**READS[read])
    parameters = {name: parameter.detach() for name, parameter in other_parameters(model).items()}
    expected = by_definition(model_with(model, parameters))
    grads, loss = grad_and_value(loss_of_call)(parameters, model)
    expected.check((loss, grads))


@pytest.mark.slow
def test_gradients_of_each_sample(torch_backend):
    model = make_model()
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss_of_sample(parameters, ids):
        return functional_call(model, parameters, (ids[None],), {"labels": ids[None], "use_cache": False}).loss

    by_sample = vmap(grad(loss_of_sample), in_dims=(None, 0))(parameters, batch())
    for i, ids in enumerate(batch()):
        expected = UpToRounding(lambda ids=ids: grad(loss_of_sample)(parameters, ids), model=model)
        expected.check({name: of_samples[i] for name, of_samples in by_sample.items()})


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_and_frozen_before_backward(use_reentrant, backend):
    model = make_model()

    def freeze(model):
        for norm in norms_of(model)[::2]:
            norm.requires_grad_(False)

    expected = by_definition(model, freeze)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    if use_reentrant:
        expected.check(loss_and_grads(model, freeze))
    else:  # runs a layer as it is now, and so refuses one that would save something else: plain autograd does, too
        for where in (definition(), contextlib.nullcontext()):
            with where, pytest.raises(CheckpointError, match="different number of tensors"):
                loss_and_grads(model, freeze)


@pytest.mark.parametrize("read", EVERY_READ)
def test_backward_twice(read, backend):
    model = make_model(**READS[read])
    expected = by_definition(model)
    loss = loss_of(model)
    for _ in range(2):
        model.zero_grad()
        loss.backward(retain_graph=True)
        expected.check((loss.detach(), grads_of(model)))
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad_of_query = torch.autograd.grad(loss, model.model.depth_queries.query, create_graph=True)[0]
        grad_of_query.square().sum().backward()


@pytest.mark.parametrize("kind", ["modules_to_save", "ln_tuning"])
def test_norms_that_peft_has_wrapped(kind, torch_backend):
    """Also merged before backward, when the wrapper has other norms."""
    names = ["input_layernorm", "post_attention_layernorm"]
    if kind == "ln_tuning":
        config = LNTuningConfig(task_type="CAUSAL_LM", target_modules=names)
    else:
        config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], modules_to_save=names)
    model = get_peft_model(make_model(), config)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert sum("layernorm" in name for name in trained) == 6
    with torch.no_grad():
        for parameter in trained.values():
            parameter.add_(0.1 * torch.randn_like(parameter))

    def results(is_merged=False):
        loss = loss_of(model)
        if is_merged:
            model.merge_adapter()
        return loss.detach(), dict(zip(trained, torch.autograd.grad(loss, trained.values())))

    with definition():
        expected = UpToRounding(results, model=model)
    expected.check(results())
    if kind == "ln_tuning":
        expected.check(results(is_merged=True))


def _fsdp1(rank, use_orig_params, family="llama"):
    model = make_model(family)
    expected = by_definition(model)
    sharded = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({type(model.model.layers[0])}),
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )
    # Gradients of flat parameters have no names, so they are told by a step
    before, rate = full_state(sharded), 2.0**10
    loss = loss_of(sharded)
    loss.backward()
    torch.optim.SGD(sharded.parameters(), lr=rate).step()
    after = full_state(sharded)
    grads = {name: (before[name] - after[name]) / rate for name in before}
    expected.check((loss.detach(), grads))


def full_state(sharded):
    with FullyShardedDataParallel.summon_full_params(sharded):
        state = {name.replace("_fsdp_wrapped_module.", ""): p for name, p in sharded.named_parameters()}
        return {name: tensor.detach().clone() for name, tensor in state.items()}


@pytest.mark.parametrize("family", ["llama", "stablelm"])
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_fsdp1_of_one_process(use_orig_params, family, torch_backend, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        _fsdp1(0, use_orig_params, family)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_fsdp1():
    on_processes(2, _fsdp1, (True,), (False,))
