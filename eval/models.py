# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Models to evaluate, what tells one from another, and how lm-eval is given them."""

import collections
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from lm_eval.api.model import LM
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from ..checkpoints.checkpoint import check_adapter, check_is_whole, load_tokenizer
from ..checkpoints.fingerprint import checkpoint_fingerprint
from ..checkpoints.location import hub_commit, read_config_dict
from ..data.rows import template_time_limit
from ..utils.untrusted import check_folder, stranger_errors_explained


@dataclass(frozen=True)
class EvalOptions:
    """What scores depend on, besides the model. `evaluate` fills in the digests of its folders, and the
    number of processes: lm-eval draws examples from one stream in each.
    """

    limit: int | None = None
    apply_chat_template: bool = False
    max_gen_toks: int | None = None
    seed: int = 0
    dtype: str = "auto"
    backend: str = "hf"
    data_digest: str | None = None
    tasks_digest: str | None = None
    processes: int = 1


@dataclass(frozen=True)
class EvalModel:
    """A checkpoint to evaluate, a folder or a Hub id, with an adapter on it if `peft` names one."""

    path: str
    peft: str | None = None
    revision: str | None = None
    peft_revision: str | None = None

    @property
    def name(self) -> str:
        name = Path(self.path).absolute().name if Path(self.path).exists() else self.path
        return name if self.peft is None else f"{name}+{Path(self.peft).name}"

    def resolved(self) -> "EvalModel":
        """With folders that do not depend on where the process is, and with the commits of what is on the Hub.

        Raises:
            OSError: if there is neither such a folder nor such a repository.
            ValueError: if a folder holds what is not read from strangers, see `check_folder`.
        """
        commit = hub_commit(self.path, self.revision)
        read_config_dict(self.path, commit)
        if commit is None:
            check_folder(self.path, follow_links=True)
        resolved = replace(self, path=_absolute(self.path) if commit is None else self.path, revision=commit)
        if self.peft is None:
            return resolved
        commit = hub_commit(self.peft, self.peft_revision, file="adapter_config.json")
        if commit is None:
            check_adapter(self.peft)
        return replace(resolved, peft=_absolute(self.peft) if commit is None else self.peft, peft_revision=commit)

    def fingerprint(self) -> dict[str, Any]:
        """What tells this model from another one: the fingerprint of a folder, the id and commit of a repository."""
        described = {"model": (self.path, self.revision), "peft": (self.peft, self.peft_revision)}
        return {kind: path and _fingerprint(path, commit) for kind, (path, commit) in described.items()}


def _absolute(folder: str) -> str:
    return str(Path(folder).expanduser().absolute())


def _fingerprint(path: str, commit: str | None) -> dict[str, str]:
    # The same files elsewhere are the same model
    return {"id": path, "commit": commit} if commit else {"fingerprint": checkpoint_fingerprint(path)}


def check_chat_template(model: EvalModel):
    """Raise a `ValueError` if a model has no chat template."""
    if not load_tokenizer(model.path, model.revision).chat_template:
        raise ValueError(
            f"`{model.path}` has no chat template, and the prompts are to be put into one. Evaluate it without"
            " `--apply-chat-template` and the suite `chat`, or add its chat_template.jinja."
        )


class TransformersLM(HFLM):
    """lm-eval's wrapper of transformers models, which tells as well which answers the limit of length has cut off."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # One for each answer, until it is reported to the cache hook
        self.cut_off: collections.deque[bool] = collections.deque()

    def apply_chat_template(self, *args, **kwargs) -> str:
        with template_time_limit():
            return super().apply_chat_template(*args, **kwargs)

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **kwargs) -> torch.Tensor:
        start = context.shape[1]
        if self.backend == "seq2seq":
            # lm-eval counts the longest prompt of the batch, which is not the decoder's; its own first token is
            start, max_length = 0, 1 + max(1, max_length - context.shape[1])
        sequences = super()._model_generate(context, max_length, stop, **kwargs)
        end = self.model.generation_config.eos_token_id
        ends = set(end if isinstance(end, list) else [end])
        for answer in sequences[:, start:].tolist():
            text = self.tok_decode(answer, skip_special_tokens=False)
            has_ended = not ends.isdisjoint(answer) or any(word in text for word in stop)
            self.cut_off.append(sequences.shape[1] >= max_length and not has_ended)
        return sequences


def has_encoder(model: EvalModel) -> bool:
    """Whether it is an encoder-decoder."""
    return read_config_dict(model.path, model.revision).get("is_encoder_decoder") is True


def load_model(model: EvalModel, options: EvalOptions, device: str, batch_size: int | str) -> LM:
    """lm-eval's own wrapper of a transformers model, or of one in vLLM."""
    peft = model.peft
    if model.peft_revision is not None:
        peft = snapshot_download(model.peft, revision=model.peft_revision)
        check_adapter(peft)
    arguments: dict[str, Any] = {
        "pretrained": model.path,
        "revision": model.revision or "main",
        "dtype": options.dtype,
    }
    if options.backend == "vllm":
        if peft is not None:
            arguments["lora_local_path"] = peft
        return get_model("vllm").create_from_arg_obj(arguments, {"batch_size": batch_size, "device": device})
    arguments |= {"trust_remote_code": False, "use_safetensors": True}
    what = f"`{model.path}` does not load" if peft is None else f"`{model.peft}` does not fit `{model.path}`"
    backend, auto_class = (
        ("seq2seq", AutoModelForSeq2SeqLM) if has_encoder(model) else ("causal", AutoModelForCausalLM)
    )
    check_is_whole(model.path, auto_class, model.revision)
    with stranger_errors_explained(what):
        lm = TransformersLM(**arguments, peft=peft, device=device, batch_size=batch_size, backend=backend)
    if hasattr(lm, "accelerator"):
        # lm-eval divides the documents among processes only where there are several GPUs in one machine; elsewhere
        # each process would do all of them and think itself the first
        lm._rank, lm._world_size = lm.accelerator.process_index, lm.accelerator.num_processes
    return lm
