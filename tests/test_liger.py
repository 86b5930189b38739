# SPDX-License-Identifier: Apache-2.0
"""`use_liger_kernel=True`: Liger's kernels, in Triton's interpreter without a GPU, against the model as it was."""

import importlib
import inspect
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from rounding import FACTOR, UpToRounding, moved
from tiny_models import convert, randomize_queries, tiny_base_config, tiny_base_model
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments

from attnres import AttnResConfig
from attnres.training import AttnResTrainer, lora_config


tl = pytest.importorskip("triton.language")
liger = pytest.importorskip("liger_kernel.transformers")


@pytest.fixture(autouse=True)
def interpreter_with_floats(monkeypatch):
    """Python's numbers arrive in kernels as fp32 scalars, as on a GPU; the interpreter hands them on as they are."""
    if torch.cuda.is_available():
        return
    from triton.runtime import interpreter

    convert_argument = interpreter._implicit_cvt

    def convert_floats(argument):
        if isinstance(argument, float):
            return tl.tensor(interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32), tl.float32)
        return convert_argument(argument)

    monkeypatch.setattr(interpreter, "_implicit_cvt", convert_floats)


@pytest.fixture(autouse=True)
def restored_modules():
    """Liger replaces names in the modules of transformers, for all models that are made later."""
    from transformers.activations import ACT2FN

    families = ("llama", "granite", "nemotron", "qwen3", "phi3", "gpt_oss", "helium")
    modules = [importlib.import_module(f"transformers.models.{family}.modeling_{family}") for family in families]
    before, activations = [dict(vars(module)) for module in modules], list(dict.items(ACT2FN))
    yield
    for module, attributes in zip(modules, before):
        vars(module).update(attributes)
    ACT2FN.update(activations)


@pytest.fixture
def input_ids():
    return torch.randint(3, 97, (2, 5), generator=torch.Generator().manual_seed(0))


def small_model(family, **kwargs):
    return randomize_queries(convert(tiny_base_model(family, num_hidden_layers=2, **kwargs), 3)).train()


def loss_and_grads(model, input_ids, **kwargs):
    model.zero_grad()
    outputs = model(input_ids, labels=input_ids, use_cache=False, **kwargs)
    outputs.loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return outputs, outputs.loss, grads


@pytest.mark.one_in(3)
# Families whose kernels of Liger run in the interpreter: no `tanh` (GEGLU), no driver of a GPU (experts). For Granite,
# which scales its logits, Liger has no fused loss
@pytest.mark.parametrize(
    "family, replaced, is_fused",
    [
        ("llama", "LigerSwiGLUMLP", True),
        ("granite", "LigerSwiGLUMLP", False),
        ("nemotron", None, True),
        pytest.param("qwen3", "LigerSwiGLUMLP", True, marks=pytest.mark.slow),
        pytest.param("phi3", "LigerPhi3SwiGLUMLP", True, marks=pytest.mark.slow),
        pytest.param("gpt_oss", None, True, marks=pytest.mark.slow),
    ],
)
def test_loss_and_gradients_are_the_same(family, replaced, is_fused, input_ids):
    monkey_patch = importlib.import_module("liger_kernel.transformers.monkey_patch")
    apply_to_base = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN[family]
    assert inspect.signature(apply_to_base).parameters["fused_linear_cross_entropy"].default == is_fused
    model = small_model(family)
    expected = UpToRounding(lambda: loss_and_grads(model, input_ids, num_items_in_batch=7)[1:], model=model)
    liger._apply_liger_kernel_to_instance(model=model)
    if replaced is not None:
        assert {layer.mlp._get_name() for layer in model.model.layers} == {replaced}
    outputs, *actual = loss_and_grads(model, input_ids, num_items_in_batch=7)
    assert (outputs.logits is None) == is_fused
    expected.check(actual)
    model.eval()
    with torch.no_grad():
        assert model(input_ids, labels=input_ids).logits.shape == (2, 5, 97)


def test_norms_stay_and_their_epsilons(caplog):
    model = small_model("llama")
    norms = [(type(m), m.variance_epsilon) for m in model.modules() if hasattr(m, "variance_epsilon")]
    liger._apply_liger_kernel_to_instance(model=model, rms_norm=True, rope=False)
    assert "Liger's `rms_norm` is not used" in caplog.text
    assert norms == [(type(m), m.variance_epsilon) for m in model.modules() if hasattr(m, "variance_epsilon")]
    assert not any("forward" in vars(m) for m in model.modules() if hasattr(m, "variance_epsilon"))


def test_what_is_asked_for_and_no_more(input_ids):
    model = small_model("llama")
    expected = UpToRounding(lambda: loss_and_grads(model, input_ids), model=model)
    liger._apply_liger_kernel_to_instance(model=model, swiglu=False, rope=False, fused_linear_cross_entropy=False)
    assert {layer.mlp._get_name() for layer in model.model.layers} == {"LlamaMLP"}
    expected.check(loss_and_grads(model, input_ids))  # and logits with them
    with pytest.raises(ValueError, match="contradict"):
        liger._apply_liger_kernel_to_instance(model=model, cross_entropy=True, fused_linear_cross_entropy=True)


def test_a_base_without_kernels_is_told(input_ids, caplog):
    model = small_model("helium", head_dim=8)
    expected = UpToRounding(lambda: loss_and_grads(model, input_ids)[1:], model=model)
    liger._apply_liger_kernel_to_instance(model=model)
    assert "Liger has no kernels for `helium`, so `use_liger_kernel` does nothing" in caplog.text
    expected.check(loss_and_grads(model, input_ids)[1:])


def test_classifier(input_ids):
    """A head without a loss to fuse."""
    base_config = tiny_base_config("llama", num_hidden_layers=2, num_labels=3)
    model = AutoModelForSequenceClassification.from_config(AttnResConfig.from_base_config(base_config, block_size=3))
    labels = torch.tensor([0, 2])
    expected = UpToRounding(lambda: model(input_ids, labels=labels).loss, model=model)
    liger._apply_liger_kernel_to_instance(model=model)
    expected.check(model(input_ids, labels=labels).loss)


def test_depth_attentions(input_ids):
    """They are there with the logits, and with a loss that has none."""
    model = small_model("llama")

    def run(**kwargs):
        outputs = model(input_ids, output_depth_attentions=True, **kwargs)
        return outputs.loss, outputs.depth_attentions

    expected = UpToRounding(lambda: run(labels=input_ids), model=model)
    liger._apply_liger_kernel_to_instance(model=model, rope=False, swiglu=False)
    expected.check(run(labels=input_ids))
    model.eval()
    assert len(run()[1]) == 5
    outputs = model.generate(
        input_ids, max_new_tokens=2, do_sample=False, output_depth_attentions=True, return_dict_in_generate=True
    )
    assert [len(step) for step in outputs.depth_attentions] == [5, 5]


class Text(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        input_ids = torch.arange(3, 7) + index
        return {"input_ids": input_ids, "labels": input_ids}


@pytest.mark.parametrize(
    "trainer_class, adapter",
    [
        (Trainer, False),
        pytest.param(AttnResTrainer, False, marks=pytest.mark.slow),
        pytest.param(Trainer, True, marks=pytest.mark.slow),
    ],
)
def test_trainer(trainer_class, adapter, tmp_path):
    """Training and evaluation with Liger are those without; adapters around the model do not hide it.

    Without the kernels of sublayers, which take seconds in the interpreter.
    """
    losses = {}
    for kind in ("without", "rounded otherwise", "with"):
        use_liger_kernel = kind == "with"
        torch.manual_seed(0)
        model = small_model("llama")
        if adapter:
            from peft import get_peft_model

            model = get_peft_model(model, lora_config())
        arguments = TrainingArguments(
            output_dir=tmp_path,
            max_steps=2,
            per_device_train_batch_size=1,
            per_device_eval_batch_size=2,
            logging_steps=1,
            learning_rate=1e-3,
            save_strategy="no",
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
            use_liger_kernel=use_liger_kernel,
            liger_kernel_config={"rope": False, "swiglu": False},
        )
        trainer = trainer_class(model=model, args=arguments, train_dataset=Text(), eval_dataset=Text())
        rounding = moved(model, torch.Generator().manual_seed(0)) if kind == "rounded otherwise" else nullcontext()
        with rounding:
            trainer.train()
            figures = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            losses[kind] = torch.tensor([*figures, trainer.evaluate()["eval_loss"]])
        batch = trainer.data_collator([trainer.train_dataset[0]])
        assert (model.train()(**batch).logits is None) == use_liger_kernel, "the loss is not fused"
    last_digits = 2 * torch.finfo(torch.float32).eps * losses["without"].max()
    largest = FACTOR * (losses["rounded otherwise"] - losses["without"]).abs().max() + last_digits
    assert largest < 1e-3  # of losses around 5, after two steps of Adam
    assert (losses["with"] - losses["without"]).abs().max() <= largest
