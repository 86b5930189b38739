# SPDX-License-Identifier: Apache-2.0
"""Exchange with Kimi K3's naming and with fla: round trips, and the other side's rule evaluated by its definition."""

import json
import shutil

import pytest
import torch
import torch.nn.functional as F
from decoder_configs import decoder_config
from rounding import UpToRounding
from safetensors.torch import load_file, save_file
from tiny_models import EVERY_FAMILY, convert, mostly_slow, randomize_queries, relative_error, tiny_base_model
from transformers import AutoModelForCausalLM

from attnres import AttnResConfig, AttnResForCausalLM
from attnres.conversion import export_checkpoint, import_checkpoint
from attnres.conversion.exchange import norm_eps


def tensors(folder):
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def read_json(path):
    return json.loads(path.read_text())


def edit_config(folder, **changes):
    (folder / "config.json").write_text(json.dumps({**read_json(folder / "config.json"), **changes}))


def assert_same_tensors(actual, expected):
    assert actual.keys() == expected.keys()
    for name in expected:
        assert actual[name].dtype == expected[name].dtype and torch.equal(actual[name], expected[name]), name


def trained_model(family, block_size, dtype=torch.float32, **kwargs):
    """An AttnRes model as one trained from scratch, with the epsilon of its key norms that both others have."""
    model = randomize_queries(convert(tiny_base_model(family, **kwargs), block_size, exact=False)).to(dtype)
    model.config.attn_res_norm_eps = norm_eps(model.config)
    return model


def read(sources, norm_weight, proj_weight, eps):
    """A read as both of the others define it: one tensor for the key norm, one for the projection to a score."""
    values = torch.stack(sources)
    keys = values / (values.pow(2).mean(-1, keepdim=True) + eps).sqrt() * norm_weight
    return ((keys @ proj_weight.flatten()).softmax(0)[..., None] * values).sum(0)


# --- Kimi


def kimi_logits(base_model, state, layers_per_block, eps, input_ids):
    """Kimi K3's loop: a stack of closed blocks and a prefix sum, with blocks counted in decoder layers."""
    trunk, outputs = base_model.model, {}

    def keep(name):
        return lambda module, args, output: outputs.__setitem__(
            name, output[0] if isinstance(output, tuple) else output
        )

    def depth_read(blocks, prefix_sum, name):
        return read([*blocks, prefix_sum], state[f"model.{name}_norm.weight"], state[f"model.{name}_proj.weight"], eps)

    # The base's own layers compute attention and MLP; a hook swaps what their norms read
    loop = {"blocks": [], "prefix_sum": None}
    handles = []

    def before_attention(i):
        def hook(norm, args):
            prefix_sum = args[0] if i == 0 else loop["prefix_sum"] + outputs["mlp"]
            hidden_states = prefix_sum
            if loop["blocks"]:
                hidden_states = depth_read(loop["blocks"], prefix_sum, f"layers.{i}.self_attention_res")
            loop["prefix_sum"] = prefix_sum
            if i % layers_per_block == 0:
                loop["blocks"].append(prefix_sum)
                loop["prefix_sum"] = None
            return hidden_states

        return hook

    def before_mlp(i):
        def hook(norm, args):
            prefix_sum = outputs["attention"]
            if loop["prefix_sum"] is not None:
                prefix_sum = loop["prefix_sum"] + prefix_sum
            loop["prefix_sum"] = prefix_sum
            return depth_read(loop["blocks"], prefix_sum, f"layers.{i}.mlp_res")

        return hook

    def before_final_norm(norm, args):
        return depth_read(loop["blocks"], loop["prefix_sum"] + outputs["mlp"], "output_attn_res")

    for i, layer in enumerate(trunk.layers):
        handles.append(layer.input_layernorm.register_forward_pre_hook(before_attention(i)))
        handles.append(layer.post_attention_layernorm.register_forward_pre_hook(before_mlp(i)))
        handles.append(layer.self_attn.register_forward_hook(keep("attention")))
        handles.append(layer.mlp.register_forward_hook(keep("mlp")))
    handles.append(trunk.norm.register_forward_pre_hook(before_final_norm))
    logits = base_model(input_ids, use_cache=False).logits
    for handle in handles:
        handle.remove()
    return logits


@pytest.mark.one_in(4)
@pytest.mark.parametrize("block_size", [2, 4, 6, 8])
@pytest.mark.parametrize("family", ["llama", "qwen3", "deepseek_v3"])
def test_kimi_computes_the_same(family, block_size, tmp_path, input_ids):
    model = trained_model(family, block_size)
    model.save_pretrained(tmp_path / "attnres")
    export_checkpoint(tmp_path / "attnres", tmp_path / "kimi", "kimi")
    config, state = read_json(tmp_path / "kimi/config.json"), tensors(tmp_path / "kimi")
    assert config["model_type"] == family and config["attn_res_block_size"] == block_size // 2
    base_model, eps = tiny_base_model(family), norm_eps(model.config)
    with torch.no_grad():
        expected = UpToRounding(
            lambda: kimi_logits(base_model, state, block_size // 2, eps, input_ids), model=base_model
        )
        expected.check(model(input_ids).logits)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", mostly_slow([torch.float32, torch.bfloat16], every=2))
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_kimi_round_trip(family, dtype, tmp_path):
    if family == "olmo":
        pytest.skip("its norms have no epsilon in the config")
    trained_model(family, 4, dtype).save_pretrained(tmp_path / "attnres")
    export_checkpoint(tmp_path / "attnres", tmp_path / "kimi", "kimi")
    assert not any("depth_queries" in name for name in tensors(tmp_path / "kimi"))
    import_checkpoint(tmp_path / "kimi", tmp_path / "again")
    assert_same_tensors(tensors(tmp_path / "again"), tensors(tmp_path / "attnres"))
    assert read_json(tmp_path / "again/config.json") == read_json(tmp_path / "attnres/config.json")


@pytest.mark.parametrize("flat", [False, True])
def test_kimi_checkpoint_round_trip(flat, tmp_path):
    """From the other side: bf16 throughout, [1, d] or [d]."""
    model = tiny_base_model("llama").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "kimi")
    edit_config(tmp_path / "kimi", attn_res_block_size=3)
    state = load_file(tmp_path / "kimi/model.safetensors")
    sites = [f"layers.{i}.{name}" for i in range(4) for name in ("self_attention_res", "mlp_res")]
    for site in [*sites, "output_attn_res"]:
        weight = torch.randn(32, dtype=torch.bfloat16)
        state[f"model.{site}_proj.weight"] = weight if flat else weight[None]
        state[f"model.{site}_norm.weight"] = torch.rand(32).bfloat16()
    save_file(state, tmp_path / "kimi/model.safetensors", metadata={"format": "pt"})
    import_checkpoint(tmp_path / "kimi", tmp_path / "attnres")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "attnres")
    assert loaded.config.attn_res_block_size == 6 and loaded.config.attn_res_norm_eps == model.config.rms_norm_eps
    assert not loaded.config.attn_res_scale_norm_eps
    query = loaded.model.depth_queries.query
    assert query.dtype == torch.float32
    assert torch.equal(query[5], state["model.layers.2.mlp_res_proj.weight"].flatten().float())
    export_checkpoint(tmp_path / "attnres", tmp_path / "again", "kimi")
    expected = {name: t[None] if flat and name.endswith("_res_proj.weight") else t for name, t in state.items()}
    assert_same_tensors(tensors(tmp_path / "again"), expected)
    assert read_json(tmp_path / "again/config.json") == read_json(tmp_path / "kimi/config.json")


# --- fla


def rotate(states, theta):
    """Rotary embeddings, halves rotated, `[batch, heads, seq, head_dim]`."""
    seq, dim = states.shape[-2:]
    angles = torch.outer(torch.arange(seq).float(), theta ** (-torch.arange(0, dim, 2).float() / dim))
    cos, sin = angles.cos(), angles.sin()
    first, second = states.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def fla_logits(config, state, input_ids):
    """fla's `TransformerForCausalLM` by its definition, blocks counted in sublayers; nothing of transformers."""
    eps, heads = config["norm_eps"], config["num_heads"]

    def norm(states, name, eps=eps):
        return F.rms_norm(states, states.shape[-1:], state[f"{name}.weight"], eps)

    def linear(states, name):
        return F.linear(states, state[f"{name}.weight"], state.get(f"{name}.bias"))

    def attention(states, name):
        batch, seq, hidden = states.shape
        q, k, v = (
            linear(states, f"{name}.{kind}_proj").view(batch, seq, -1, hidden // heads).transpose(1, 2)
            for kind in "qkv"
        )
        if config["qk_norm"]:
            q, k = norm(q, f"{name}.q_norm", eps=1e-5), norm(k, f"{name}.k_norm", eps=1e-5)
        q, k = rotate(q, config["rope_theta"]), rotate(k, config["rope_theta"])
        k, v = (t.repeat_interleave(heads // k.shape[1], dim=1) for t in (k, v))
        distance = torch.arange(seq)[:, None] - torch.arange(seq)
        mask = (distance >= 0) & (distance < (config["window_size"] or seq))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return linear(mixed.transpose(1, 2).flatten(-2), f"{name}.o_proj")

    def mlp(states, name):
        return linear(
            F.silu(linear(states, f"{name}.gate_proj")) * linear(states, f"{name}.up_proj"), f"{name}.down_proj"
        )

    embeddings = F.embedding(input_ids, state["model.embeddings.weight"])
    outputs = []

    def depth_read(name):
        size = config["attnres_block_size"]
        blocks = [sum(outputs[start : start + size]) for start in range(0, len(outputs), size)]
        return read([embeddings, *blocks], state[f"{name}_norm.weight"], state[f"{name}_proj.weight"], eps)

    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        outputs.append(attention(norm(depth_read(f"{layer}.attn_res"), f"{layer}.attn_norm"), f"{layer}.attn"))
        outputs.append(mlp(norm(depth_read(f"{layer}.mlp_res"), f"{layer}.mlp_norm"), f"{layer}.mlp"))
    head = state.get("lm_head.weight", state["model.embeddings.weight"])
    return norm(depth_read("model.res"), "model.norm") @ head.T


FLA = {
    "plain": {"attnres_block_size": 4},
    "full": {"attnres_block_size": 1},
    "short block": {"attnres_block_size": 6, "num_kv_heads": 2},
    "one block": {"attnres_block_size": 20},
    "bias": {"attnres_block_size": 2, "qkv_bias": True},
    "window": {"attnres_block_size": 2, "window_size": 5},
    "bias and window": {"attnres_block_size": 2, "qkv_bias": True, "window_size": 5},
    "qk norm": {"attnres_block_size": 2, "qk_norm": True, "norm_eps": 1e-5},
    "qk norm and window": {"attnres_block_size": 2, "qk_norm": True, "norm_eps": 1e-5, "window_size": 5},
    "tied": {"attnres_block_size": 2, "tie_word_embeddings": True},
    "ratio": {"attnres_block_size": 2, "intermediate_size": None, "hidden_ratio": 4},
}
BASE_OF_FLA = {"bias": "qwen2", "bias and window": "qwen2", "window": "mistral"} | dict.fromkeys(
    ("qk norm", "qk norm and window"), "qwen3"
)


def make_fla_checkpoint(folder, **changes):
    config = {
        "model_type": "transformer",
        "architectures": ["TransformerForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_heads": 4,
        "num_kv_heads": None,
        "qkv_bias": False,
        "qk_norm": False,
        "window_size": None,
        "rope_theta": 5000.0,
        "intermediate_size": 96,
        "norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "vocab_size": 97,
        **changes,
    }
    hidden, kv = 64, 16 * (config["num_kv_heads"] or 4)
    # fla's rule where the size is not given: 64 * 4 * 2/3, up to a multiple of 256
    intermediate = config["intermediate_size"] or 256
    shapes = {"model.embeddings": [97, hidden], "model.norm": [hidden]}
    shapes |= {"model.res_norm": [hidden], "model.res_proj": [1, hidden]}
    if not config["tie_word_embeddings"]:
        shapes["lm_head"] = [97, hidden]
    for layer in (f"model.layers.{i}" for i in range(4)):
        shapes |= {f"{layer}.{name}": [hidden] for name in ("attn_norm", "mlp_norm", "attn_res_norm", "mlp_res_norm")}
        shapes |= {f"{layer}.{name}": [1, hidden] for name in ("attn_res_proj", "mlp_res_proj")}
        shapes |= {f"{layer}.attn.{name}": [kv, hidden] for name in ("k_proj", "v_proj")}
        shapes |= {f"{layer}.attn.{name}": [hidden, hidden] for name in ("q_proj", "o_proj")}
        shapes |= {f"{layer}.mlp.{name}": [intermediate, hidden] for name in ("gate_proj", "up_proj")}
        shapes[f"{layer}.mlp.down_proj"] = [hidden, intermediate]
        if config["qk_norm"]:
            shapes |= {f"{layer}.attn.{name}": [16] for name in ("q_norm", "k_norm")}
    generator = torch.Generator().manual_seed(0)
    state = {}
    for name, shape in shapes.items():
        weight = torch.randn(shape, generator=generator) * (0.3 if "norm" in name or "res_" in name else 0.1)
        state[f"{name}.weight"] = weight + 1 if "norm" in name else weight
        if config["qkv_bias"] and name.endswith(("q_proj", "k_proj", "v_proj")):
            state[f"{name}.bias"] = torch.randn(shape[0], generator=generator)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return config, state


@pytest.mark.parametrize("kind", mostly_slow(FLA, every=4))
def test_fla(kind, tmp_path, input_ids):
    config, state = make_fla_checkpoint(tmp_path / "fla", **FLA[kind])
    report = import_checkpoint(tmp_path / "fla", tmp_path / "attnres")
    assert report.base_model_type == BASE_OF_FLA.get(kind, "llama")
    assert report.block_size == config["attnres_block_size"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "attnres")
    with torch.no_grad():
        expected = fla_logits(config, state, input_ids)
        UpToRounding(lambda: model(input_ids).logits, model=model).check(expected)
        # the comparison can fail: another partition is another function
        model.config.attn_res_block_size = other = 2 if config["attnres_block_size"] != 2 else 4
        different = type(model)(model.config)
        different.load_state_dict(model.state_dict())
        assert other and relative_error(different.eval()(input_ids).logits, expected) > 1e-2
    export_checkpoint(tmp_path / "attnres", tmp_path / "again", "fla")
    assert_same_tensors(tensors(tmp_path / "again"), state)
    again = read_json(tmp_path / "again/config.json")
    resolved = {"num_kv_heads": 4, "intermediate_size": 256}
    for name, value in config.items():
        if name != "hidden_ratio":
            assert again[name] == (resolved[name] if value is None and name in resolved else value), name


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"attnres_block_size": None}, "`attnres_block_size=None`, so it has no depth attention"),
        ({"hidden_act": "powlu"}, "`hidden_act='powlu'`, no supported base has that activation"),
        ({"qk_norm": True}, "`norm_eps=1e-06`, while its query and key norms use 1e-05; Qwen3 has one"),
        ({"qk_norm": True, "qkv_bias": True, "norm_eps": 1e-5}, "`qk_norm=True`, with biases as well no supported"),
        ({"attnres_block_size": 0}, "`attn_res_block_size=0` must be"),
        ({"num_hidden_layers": 5}, "lacks 4 tensors of depth attention, among them `model.layers.4.attn_res_proj"),
        ({"hidden_size": 128}, r"has shape \[1, 64\], not 128 numbers"),
        # In transformers 5.16 not the config refuses this, but the probe's run of the model
        ({"hidden_size": 60}, r"config.json of .* is not valid|a run of its model without weights failed"),
        ({"num_hidden_layers": "4"}, r"config.json of .* is not valid"),
        ({"intermediate_size": 80}, "is not a complete attnres checkpoint: tensors are missing or have another shape"),
        ({"model_type": "mamba"}, r"\(a `mamba`\) is neither fla's `transformer` nor"),
    ],
    ids=str,
)
def test_what_cannot_be_imported(changes, message, tmp_path):
    make_fla_checkpoint(tmp_path / "fla", attnres_block_size=2)
    edit_config(tmp_path / "fla", **changes)
    with pytest.raises(ValueError, match=message):
        import_checkpoint(tmp_path / "fla", tmp_path / "attnres")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fla"]


@pytest.mark.parametrize(
    "family, block_size, naming, kwargs, message",
    [
        ("llama", 3, "kimi", {}, "blocks of 3 sublayers; Kimi counts decoder layers"),
        ("llama", 3, "fla", {}, "blocks of 3 sublayers; there the size is 1 or even"),
        (
            "mixtral",
            2,
            "fla",
            {},
            "its one architecture has the parts of llama, mistral, qwen2, qwen3, not of mixtral",
        ),
        ("llama", 2, "fla", {"head_dim": 16}, "4 heads of 16 do not make a hidden size of 32"),
        ("llama", 2, "fla", {"hidden_act": "gelu"}, "`hidden_act='gelu'`"),
        ("llama", 2, "fla", {"mlp_bias": True}, "`mlp_bias=True`"),
        (
            "llama",
            2,
            "fla",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "`linear`",
        ),
        ("qwen3", 2, "fla", {"use_sliding_window": False}, "use 1e-05, these `rms_norm_eps=1e-06`"),
        ("qwen3", 2, "fla", {"rms_norm_eps": 1e-5}, "some layers have a sliding window, others not"),
        ("llama", 2, "onnx", {}, "`naming='onnx'` is not known; it is one of kimi, fla"),
    ],
)
def test_what_cannot_be_exported(family, block_size, naming, kwargs, message, tmp_path):
    trained_model(family, block_size, **kwargs).save_pretrained(tmp_path / "attnres")
    with pytest.raises(ValueError, match=message):
        export_checkpoint(tmp_path / "attnres", tmp_path / "out", naming)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["attnres"]


@pytest.mark.parametrize(
    "model_type, message",
    [
        ("phi", "kimi has two queries a layer, and layers of `phi` read 1 times"),
        ("biogpt", "kimi has queries in `model.layers`, and `biogpt` names its layers otherwise"),
    ],
)
def test_layers_that_the_namings_do_not_have(model_type, message, tmp_path):
    config = AttnResConfig.from_base_config(decoder_config(model_type), block_size=2)
    config.attn_res_norm_eps = norm_eps(config)
    AttnResForCausalLM(config).save_pretrained(tmp_path / "attnres")
    with pytest.raises(ValueError, match=message):
        export_checkpoint(tmp_path / "attnres", tmp_path / "out", "kimi")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["attnres"]


def test_an_infinite_number_in_a_config(tmp_path):
    config = AttnResConfig.from_base_config(decoder_config("bamba"), block_size=2)
    config.attn_res_norm_eps = norm_eps(config)
    assert config.time_step_limit[1] == float("inf")
    AttnResForCausalLM(config).save_pretrained(tmp_path / "attnres")
    export_checkpoint(tmp_path / "attnres", tmp_path / "kimi", "kimi")
    import_checkpoint(tmp_path / "kimi", tmp_path / "again")
    assert AttnResConfig.from_pretrained(tmp_path / "again").time_step_limit == config.time_step_limit


def test_epsilons_that_cannot_be_expressed(tmp_path):
    convert(tiny_base_model("llama", rms_norm_eps=1e-5), 2).save_pretrained(tmp_path / "attnres")
    with pytest.raises(
        ValueError,
        match="express. Its reads are multiplied by their number of sources. The epsilon of its key norms is 1e-06,"
        " and that of its others 1e-05. What that changes .* without both",
    ):
        export_checkpoint(tmp_path / "attnres", tmp_path / "out", "fla")
    report = export_checkpoint(tmp_path / "attnres", tmp_path / "out", "fla", force=True)
    assert len(report.notes) == 2


def test_kimi_checkpoints_are_not_mistaken_for_their_base(tmp_path):
    trained_model("llama", 4).save_pretrained(tmp_path / "attnres")
    export_checkpoint(tmp_path / "attnres", tmp_path / "kimi", "kimi")
    from attnres import AttnResForCausalLM
    from attnres.conversion import convert as convert_folder

    with pytest.raises(ValueError, match="in Kimi's naming, whose block size counts layers. `attnres import` makes"):
        AttnResForCausalLM.from_pretrained(tmp_path / "kimi")
    with pytest.raises(ValueError, match="use `attnres import`"):
        convert_folder(tmp_path / "kimi", tmp_path / "out")
    shutil.copytree(tmp_path / "attnres", tmp_path / "plain")
    with pytest.raises(ValueError, match="is neither fla's `transformer` nor"):
        import_checkpoint(tmp_path / "plain", tmp_path / "out")
