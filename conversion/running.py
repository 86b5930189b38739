# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Running the model of a checkpoint on windows of text, as it is or with every input of a norm moved by rounding."""

import contextlib
import gc
import inspect
import tempfile
from collections.abc import Callable, Iterator
from logging import NOTSET, WARNING, Handler, disable, root

import torch
from huggingface_hub.utils import tqdm
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ..base.config import SEQ2SEQ_CLASSES, has_own_classes
from ..checkpoints.checkpoint import Checkpoint
from ..utils.untrusted import in_one_line
from .layers import select_layers


@contextlib.contextmanager
def quiet_loading() -> Iterator[list[str]]:
    """Without transformers' bars, and with its warnings in a list for the caller, even where none are printed."""
    messages: list[str] = []
    handler = Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    bars, level, disabled = logging.is_progress_bar_enabled(), logging.get_verbosity(), root.manager.disable
    logging.disable_progress_bar()
    logging.disable_default_handler()
    logging.add_handler(handler)
    logging.set_verbosity(min(level, WARNING))
    disable(NOTSET)
    try:
        yield messages
    finally:
        disable(disabled)
        logging.set_verbosity(level)
        logging.remove_handler(handler)
        logging.enable_default_handler()
        if bars:
            logging.enable_progress_bar()


@contextlib.contextmanager
def model_errors_explained(checkpoint: Checkpoint) -> Iterator[None]:
    """A `ValueError` of one line for whatever a model raises whose config and weights do not go together."""
    try:
        yield
    except (ValueError, OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ValueError(
            f"The model of `{checkpoint.name}` does not run, because of its config.json or a missing package:"
            f" {in_one_line(error)}"
        ) from error


@contextlib.contextmanager
def loaded(checkpoint: Checkpoint, dtype: torch.dtype, device: str) -> Iterator[PreTrainedModel]:
    """The checkpoint's model, as `from_pretrained` gives it, or some of its layers; the last one makes room first."""
    gc.collect()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as offload_folder:
        try:
            model, info = checkpoint.auto_class.from_pretrained(
                checkpoint.folder,
                dtype=dtype,
                device_map=device,
                trust_remote_code=False,
                use_safetensors=True,
                offload_folder=offload_folder,
                output_loading_info=True,
            )
        except RuntimeError as error:
            raise ValueError(f"`{checkpoint.name}` does not load: {error}") from error
        missing = sorted(info["missing_keys"])
        if missing:
            raise ValueError(
                f"`{checkpoint.name}` lacks {len(missing)} tensors of a {type(model).__name__}, among them"
                f" `{missing[0]}`."
            )
        yield (model if checkpoint.layers is None else select_layers(model, checkpoint.layers)).eval()


@torch.inference_mode()
def run(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: str,
    windows: torch.Tensor,
    progress: tqdm,
    also_moved: bool = False,
) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
    """Logits, or last hidden states, of every window, see `output_of`, on the CPU.

    The model is gone when this returns. With `also_moved` the second list holds the outputs with moved norm inputs.
    """

    def outputs_of(model: PreTrainedModel) -> list[torch.Tensor]:
        outputs = []
        for window in windows:
            outputs.append(output_of(model, window[None], checkpoint)[0].cpu())
            progress.update()
        return outputs

    with loaded(checkpoint, dtype, device) as model:
        outputs = outputs_of(model)
        if not also_moved:
            return outputs, None
        with norm_inputs_moved_by_one_ulp(model):
            return outputs, outputs_of(model)


def output_of(model: PreTrainedModel, inputs: torch.Tensor, checkpoint: Checkpoint) -> torch.Tensor:
    """Logits, or last hidden states, `[batch, seq, vocab or hidden]`, and `[batch, labels]` of a classifier.

    Args:
        inputs: token ids, `[batch, seq]`, or images, `[batch, channels, height, width]`.
    """
    inputs = inputs.to(model.device)
    if has_own_classes(checkpoint.base_model_type):
        given = {model.main_input_name: inputs.to(model.dtype) if inputs.is_floating_point() else inputs}
        is_of_task = checkpoint.own_class_name not in ("AttnResModel", *SEQ2SEQ_CLASSES)
        if "decoder_input_ids" in inspect.signature(model.forward).parameters and not is_of_task:
            given["decoder_input_ids"] = tokens_of_decoder(inputs, checkpoint)
        output = model(**given)
    else:
        output = model(input_ids=inputs, use_cache=False)
    if "start_logits" in output:
        return torch.stack([output.start_logits, output.end_logits], -1)
    return output.logits if "logits" in output else output.last_hidden_state


def tokens_of_decoder(inputs: torch.Tensor, checkpoint: Checkpoint) -> torch.Tensor:
    """What the decoder of an encoder-decoder is given: the same tokens, or with sound random ones of one seed."""
    if not inputs.is_floating_point():
        return inputs
    generator, vocab_size = torch.Generator().manual_seed(0), checkpoint.config.vocab_size
    return torch.randint(vocab_size, (len(inputs), 32), generator=generator).to(inputs.device)


def norms_of(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The norms of a model by name, of which most stand behind the residual stream or behind a read over depth."""
    modules = model.base_model.named_modules()
    return {
        name: module
        for name, module in modules
        if "norm" in type(module).__name__.lower() and not [*module.children()]
    }


@contextlib.contextmanager
def hooks_removed_afterwards(handles: list) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def norm_inputs_moved_by_one_ulp(model: PreTrainedModel) -> contextlib.AbstractContextManager:
    """While it is on, every value that a norm reads is replaced by a neighbour in its dtype, above or below."""
    generator = torch.Generator().manual_seed(0)

    def move(norm, inputs):
        up = torch.randint(0, 2, inputs[0].shape, generator=generator).to(inputs[0].device)
        moved = torch.nextafter(inputs[0], torch.where(up.bool(), torch.inf, -torch.inf).to(inputs[0].dtype))
        return moved, *inputs[1:]

    return hooks_removed_afterwards([norm.register_forward_pre_hook(move) for norm in norms_of(model).values()])


@contextlib.contextmanager
def norm_outputs(model: PreTrainedModel) -> Iterator[dict[str, torch.Tensor]]:
    """While it is on, what the norms give is collected by their names, in the order in which they run."""
    outputs = {}

    def keep(name: str) -> Callable:
        return lambda norm, inputs, output: outputs.__setitem__(name, output.detach().float().cpu())

    with hooks_removed_afterwards([norm.register_forward_hook(keep(name)) for name, norm in norms_of(model).items()]):
        yield outputs
