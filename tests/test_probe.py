# SPDX-License-Identifier: Apache-2.0
"""`attnres families`: what was measured of every type, and a probe of a checkpoint that brings its own code."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from decoder_configs import DECODERS, NOT_DECODERS, decoder_config
from families_page import PAGE, RECORD, page
from family_survey import converted
from literal_definition import literal_logits, relative
from rounding import UpToRounding
from tiny_models import mostly_slow, tiny_base_config
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, __version__, initialization
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

from attnres import AttnResConfig
from attnres.base import probe as depth_probe
from attnres.base.probe import probe_sublayers, run_probes
from attnres.checkpoints.checkpoint import read_decoder_config
from attnres.conversion import convert, revert
from attnres.conversion.probe_report import describe_probe


CONFIG = """
from transformers import PreTrainedConfig


class TinyConfig(PreTrainedConfig):
    model_type = "tiny_NAME"
    vocab_size: int = 50
    hidden_size: int = 16
    num_hidden_layers: int = 3
"""
MODEL = """
import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .configuration_tiny import TinyConfig


class TinyNorm(nn.LayerNorm):
    pass


class TinyLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm = TinyNorm(config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states):
        output = torch.tanh(self.proj(self.norm(hidden_states))).cumsum(1)
        return hidden_states + output


class TinyPreTrainedModel(PreTrainedModel):
    config_class = TinyConfig
    base_model_prefix = "model"


class TinyModel(TinyPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([TinyLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = TinyNorm(config.hidden_size)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids=None, use_cache=None, **kwargs):
        hidden_states = self.embed(input_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states))


class TinyForCausalLM(TinyPreTrainedModel, GenerationMixin):
    def __init__(self, config):
        super().__init__(config)
        self.model = TinyModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids=None, use_cache=None, **kwargs):
        return CausalLMOutputWithPast(logits=self.lm_head(self.model(input_ids, **kwargs).last_hidden_state))
"""
WRITE, LAYER_LOOP = "return hidden_states + output", "for layer in self.layers:"
# What is put in the place of one of these lines
RIGHT = {
    "as it is": WRITE,
    "scaled stream": "return 0.5 * hidden_states + output",
    "detached branch": "return hidden_states + output.detach()",
    "cast stream": "return hidden_states.float() + output.double()",
    "in-place addition": "hidden_states += output\n        return hidden_states",
    "view": "return (hidden_states.view(-1, 16) + output.view(-1, 16)).view(output.shape)",
    "a chunk is read": "return hidden_states + output * hidden_states.chunk(2, -1)[0].mean(-1, keepdim=True)",
    "two additions": "return hidden_states + output + self.proj(self.norm(hidden_states + output))",
    "positions that decide": (
        "position_ids = torch.arange(output.shape[1])\n        assert position_ids.max() + 1 == output.shape[1]\n"
        "        output[:, position_ids.remainder(2).bool()] *= 2\n        return hidden_states + output"
    ),
    "outputs that decide": (
        "if output.isnan().any() or output.abs().max() > 1e4 or output.norm().item() > 1e4:\n"
        "            raise ValueError\n        return hidden_states + output"
    ),
}
WRONG = {
    "norm of the sum": "return self.norm(hidden_states + output)",
    "stream scaled by feature": "return hidden_states * self.proj.bias + output",
    "detached stream": "return hidden_states.detach() + output",
    "chunks": "return torch.cat([chunk + 1 for chunk in hidden_states.chunk(2, -1)], -1)",
    "two streams": "return hidden_states + output, output",
    "in place by name": "return hidden_states.add_(output)",
    "reused layer": "for layer in [*self.layers, self.layers[0]]:",
    "skipped layer": "for layer in self.layers[1:]:",
    "last layer skipped": "for layer in self.layers[:-1]:",
    "normed between layers": "for layer in self.layers:\n            hidden_states = self.norm(hidden_states)",
    "loop without an end": (
        "while not (output < 1).all():\n            output = output / 2\n        return hidden_states + output"
    ),
}
# What the reason has to say, if it is not the line itself
REASONS = {
    "two streams": "its TinyLayer hands on two residual streams",
    "in place by name": "has no attribute 'add_'",
    "reused layer": "its TinyLayer runs more than once",
    "skipped layer": "not in the order of the layers",
    "last layer skipped": "2 of its 3 layers have run",
    "loop without an end": "(RuntimeError: a loop goes on until a condition on what it has computed holds)",
    "normed between layers": "its model does more to the residual stream than to hand it on, in front of layer 1",
}


def write_base(tmp_path: Path, name: str, line: str = WRITE, model_type: str | None = None) -> Path:
    """A folder with a decoder of its own code, in which a line was put in the place of another."""
    folder = tmp_path / name.replace(" ", "_")
    folder.mkdir()
    model_type = model_type or f"tiny_{''.join(letter for letter in name if letter.isalpha())}"
    old = LAYER_LOOP if line.startswith("for layer") else WRITE
    assert old in MODEL
    (folder / "configuration_tiny.py").write_text(CONFIG.replace("tiny_NAME", model_type))
    (folder / "modeling_tiny.py").write_text(MODEL.replace(old, line))
    auto_map = {
        "AutoConfig": "configuration_tiny.TinyConfig",
        "AutoModel": "modeling_tiny.TinyModel",
        "AutoModelForCausalLM": "modeling_tiny.TinyForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "auto_map": auto_map}))
    return folder


@pytest.fixture
def modules_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("name", RIGHT)
def test_own_code_that_adds_and_reads(name, tmp_path, modules_cache):
    """Exact, with queries of zero and with random ones."""
    config = read_decoder_config(str(write_base(tmp_path, name, RIGHT[name])), trust_remote_code=True)
    lines = describe_probe(config)
    per_layer = 2 if name == "two additions" else 1
    assert lines[0].startswith(f"{config.model_type}: 3 layers, {3 * per_layer + 1} sites.")
    assert sum(" writes " in line for line in lines) == per_layer
    torch.manual_seed(0)
    native = AutoModelForCausalLM.from_config(config).double().eval()
    ids = torch.randint(50, (2, 7))
    model = converted(native, 2)
    # That base rounds its stream to fp32 on the way to a sum in fp64; the sources keep all their digits
    rounding = 1e-7 if name == "cast stream" else 1e-12
    with torch.no_grad():
        assert relative(model(ids).logits, native(ids).logits) < rounding
        model.model.depth_queries.query.normal_()
        expected, _ = literal_logits(native, model, ids)
        assert relative(model(ids).logits, expected) < rounding
        assert relative(model(ids).logits, native(ids).logits) > 1e-3


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "loop without an end" else name for name in WRONG]
)
def test_own_code_that_does_more(name, tmp_path, modules_cache):
    config = read_decoder_config(str(write_base(tmp_path, name, WRONG[name])), trust_remote_code=True)
    reason = REASONS.get(name, f"`{WRONG[name]}`")
    for refuse in (describe_probe, AttnResConfig.from_base_config):
        with pytest.raises(ValueError, match="is not supported: ") as error:
            refuse(config)
        assert reason in str(error.value)


@pytest.mark.slow
def test_own_code_is_converted(tmp_path, modules_cache):
    """Where its classes are registered, a folder without its code as well."""
    config = read_decoder_config(str(write_base(tmp_path, "converted")), trust_remote_code=True)
    native = AutoModelForCausalLM.from_config(config).eval()
    native.save_pretrained(tmp_path / "base")
    report = convert(tmp_path / "base", tmp_path / "attnres", block_size=2)
    assert report.verification.equal and report.num_sublayers == 3
    ids = torch.randint(50, (2, 7))
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(tmp_path / "attnres")(ids).logits
        UpToRounding(lambda: native(ids).logits, model=native).check(logits)
    revert(tmp_path / "attnres", tmp_path / "reverted")
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "reverted")) is type(native)


def test_own_code_does_not_take_the_place_of_transformers(tmp_path, modules_cache):
    folder = write_base(tmp_path, "llama", model_type="llama")
    with pytest.raises(ValueError, match="calls its model type 'llama', as transformers calls one of its own"):
        read_decoder_config(str(folder), trust_remote_code=True)
    assert AutoConfig.for_model("llama").__class__ is LlamaConfig
    assert read_decoder_config(str(folder)).__class__ is LlamaConfig


def attnres(*args) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "attnres", *map(str, args)], capture_output=True, text=True)


@pytest.mark.slow
def test_probe_command(tmp_path):
    tiny_base_config("llama").save_pretrained(tmp_path / "llama")
    done = attnres("families", "--probe", tmp_path / "llama")
    assert done.returncode == 0, done.stderr
    first, layers, file, *lines = done.stdout.splitlines()
    assert first.startswith("llama: ") and layers.endswith(": LlamaDecoderLayer")
    assert file.endswith("models/llama/modeling_llama.py")
    assert [line.split()[1] for line in lines] == ["reads", "writes", "reads", "writes"]
    number, _, code = lines[0].split(maxsplit=2)
    assert Path(file.strip()).read_text().splitlines()[int(number) - 1].strip() == code

    folder = write_base(tmp_path, "own")
    refused = attnres("families", "--probe", folder)
    assert refused.returncode == 1 and "trust_remote_code=True" in refused.stderr
    assert not refused.stdout and "Traceback" not in refused.stderr
    done = attnres("families", "--probe", folder, "--trust-remote-code")
    assert "return hidden_states + output" in done.stdout, done.stderr

    both = attnres("families", "llama", "--probe", folder)
    assert both.returncode == 2 and "takes no model types" in both.stderr


@pytest.mark.slow
def test_families_command():
    done = attnres("families", "llama", "bert")
    assert done.returncode == 0, done.stderr
    words = " ".join(done.stdout.split())
    assert "llama yes packing" in words and "bert no its BertLayer does more" in words
    unknown = attnres("families", "lama")
    assert unknown.returncode == 1 and "Did you mean llama" in unknown.stderr


@pytest.mark.slow
def test_record_and_page():
    """What is shown is what was measured last, of all types, and with the reasons that the probe gives today."""
    recorded = json.loads(RECORD.read_text())
    assert PAGE.read_text() == page(recorded)
    assert {*recorded["supported"], *recorded["refused"], *recorded["others"]} == {*DECODERS, *NOT_DECODERS}
    if recorded["transformers"] == __version__:
        for name, reason in recorded["refused"].items():
            with pytest.raises(ValueError, match="is not supported: ") as error:
                run_probes(decoder_config(name))
            assert str(error.value).partition("is not supported: ")[2] == f"{reason}."


# Whose models have rotary embeddings that are computed anew from the largest position
DYNAMIC_ROPE = mostly_slow(
    ["llama", "qwen2", "qwen3", "mistral", "gpt_neox", "stablelm", "falcon", "persimmon", "olmo", "internlm3"], every=6
)


@pytest.mark.parametrize("model_type", DYNAMIC_ROPE)
def test_rotary_embeddings_that_depend_on_positions(model_type, tmp_path):
    """Their branches are taken on real positions, and a conversion computes the same on both sides of the limit."""
    rope = {"rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    dynamic = {**rope, "rope_type": "dynamic", "factor": 2.0}
    long = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    long = {**rope, **long, "original_max_position_embeddings": 16}
    for parameters in (dynamic, long):
        config = decoder_config(model_type, rope_parameters=parameters, max_position_embeddings=16)
        assert probe_sublayers(config) == probe_sublayers(decoder_config(model_type))
        native = AutoModelForCausalLM.from_config(config).double().eval()
        model = converted(native, 2)
        for length in (7, 24, 7):
            ids = torch.randint(50, (2, length))
            with torch.no_grad():
                assert relative(model(ids).logits, native(ids).logits) < 1e-12


def test_a_probe_uses_up_no_random_numbers_and_says_nothing(tmp_path, modules_cache, capfd):
    """Neither of a router, nor of what is refused, which torch would log with the stack."""
    state = torch.get_rng_state()
    noise = "return hidden_states + output + torch.randn(3, 1) * torch.rand_like(output)"
    describe_probe(read_decoder_config(str(write_base(tmp_path, "noise", noise)), trust_remote_code=True))
    wrong = "return hidden_states + output * torch.ones(5)"
    config = read_decoder_config(str(write_base(tmp_path, "wrong shape", wrong)), trust_remote_code=True)
    with pytest.raises(ValueError, match="is not supported: a run of its model without weights failed"):
        describe_probe(config)
    assert torch.equal(torch.get_rng_state(), state)
    assert capfd.readouterr() == ("", "")


def test_the_same_base_is_probed_once(probed_anew, tmp_path, modules_cache, monkeypatch):
    """Until its values or its code change. Errors are not kept, and nothing of code that came with a checkpoint."""
    runs, run_probes = [], depth_probe.run_probes
    monkeypatch.setattr(depth_probe, "run_probes", lambda config: runs.append(config) or run_probes(config))
    config = decoder_config("llama")
    AttnResConfig.from_base_config(config, 3).save_pretrained(tmp_path / "attnres")
    config.save_pretrained(tmp_path / "base")
    saved, of_base = (AutoConfig.from_pretrained(tmp_path / name) for name in ("attnres", "base"))
    saved.attn_res_sublayers = None
    expected = saved.sublayers_per_layer()
    expected_of_base = probe_sublayers(of_base)
    assert len(runs) == 1 and expected_of_base == expected
    expected_of_base.append(1)
    assert probe_sublayers(config) == expected and len(runs) == 1
    probe_sublayers(decoder_config("llama", num_hidden_layers=config.num_hidden_layers + 1))
    assert len(runs) == 2
    with monkeypatch.context() as patched:
        patched.setattr(LlamaMLP, "forward", lambda self, x: x * 2)
        assert probe_sublayers(config) == expected and len(runs) == 3
        patched.setattr(LlamaDecoderLayer, "forward", lambda self, hidden_states, **kwargs: hidden_states * 2 + 1)
        for _ in range(2):
            with pytest.raises(ValueError, match="LlamaDecoderLayer does more to the residual stream"):
                probe_sublayers(config)
        assert len(runs) == 5
    assert probe_sublayers(config) == expected and len(runs) == 5
    own = read_decoder_config(str(write_base(tmp_path, "as it is", WRITE)), trust_remote_code=True)
    assert probe_sublayers(own) == probe_sublayers(own) and len(runs) == 7


@contextlib.contextmanager
def setting(switch, value, default):
    switch(value)
    try:
        yield
    finally:
        switch(default)


AROUND = {
    "inference mode": torch.inference_mode,
    "gradients": torch.enable_grad,
    "no gradients": torch.no_grad,
    "meta": lambda: torch.device("meta"),
    "meta as default": lambda: setting(torch.set_default_device, "meta", None),
    "fake tensors": FakeTensorMode,
    "swapped parameters": lambda: setting(torch.__future__.set_swap_module_params_on_conversion, True, False),
    "bf16": lambda: setting(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "no initial values": initialization.no_init_weights,
    "no ties": initialization.no_tie_weights,
}


@pytest.mark.one_in(7)
@pytest.mark.parametrize("model_type", ["llama", "longcat_flash"])  # the second chooses experts by their numbers
@pytest.mark.parametrize("mode", AROUND.values(), ids=AROUND)
def test_probe_within_other_modes(model_type, mode):
    config = decoder_config(model_type)
    expected = [layer.num_writes for layer in run_probes(config)[0].probed]
    with mode():
        assert [layer.num_writes for layer in run_probes(config)[0].probed] == expected
