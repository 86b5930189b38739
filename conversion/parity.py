# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Are two checkpoints the same function? Both run on the same text, and rounding is told from difference.

Two correct programs for one function differ by rounding, and by how much depends on the network: one that amplifies
small changes amplifies rounding. So the tolerance is measured, on the checkpoint at hand.

- In fp32, the first model runs once more with every input of a norm moved by one unit in the last place, up or down at
  random. That is what rounding in another order does, and its effect on the logits is the network's own sensitivity.
- In the checkpoint's own dtype, the error of each model is taken against the first one in fp32. That of the second may
  not be larger than that of the first, but for chance.
"""

import contextlib
import gc
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib import resources
from logging import Handler
from pathlib import Path

import torch
from huggingface_hub.utils import tqdm
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from .checkpoint import Checkpoint, open_checkpoint


WINDOW = 64
MAX_TOKENS = 512
# Times the sensitivity measured with one unit in the last place at every norm. A read over depth rounds about as often
# as a residual stream; over all families and block sizes the figure is 0.4 to 1.3. What is to be found is far larger:
# epsilons left alone come to 100 times the rounding and more in most families (docs/parity.md).
FP32_TOLERANCE = 4
# Times the first model's own error. Two errors of one size: 0.7 to 1.1 in dense families, up to 1.9 with experts
OWN_DTYPE_TOLERANCE = 3
# In a router near-ties fall either way, and a window in which one did differs by far more than rounding
MOE_WINDOWS_APART = 0.25


@dataclass(frozen=True)
class Parity:
    """How far the second model is from the first, in one dtype.

    Differences of logits are absolute; the relative error is the norm of the difference over that of the logits, and
    KL divergence and perplexity are of the next token, in nats. Checkpoints without a language-modelling head are
    compared by their last hidden state, and have neither of the two nor a top-1 agreement.
    """

    dtype: str
    max_difference: float
    relative_error: float
    kl_divergence: float | None
    top1_agreement: float | None
    perplexities: list[float] | None  # of the first and the second
    rounding: float  # what rounding alone does to the figure that decides, see `criterion`
    measured: float
    tolerance: float
    criterion: str

    @property
    def equal(self) -> bool:
        return self.measured <= self.tolerance


@dataclass(frozen=True)
class VerificationReport:
    """Result of `verify`: `equal` if in every dtype the second checkpoint is within rounding of the first."""

    first: str
    second: str
    text: str
    num_tokens: int
    parities: list[Parity] = field(default_factory=list)
    first_difference: str | None = None

    @property
    def equal(self) -> bool:
        return all(parity.equal for parity in self.parities)

    def to_dict(self) -> dict:
        parities = [{**asdict(parity), "equal": parity.equal} for parity in self.parities]
        return {**asdict(self), "parities": parities, "equal": self.equal}

    @classmethod
    def from_dict(cls, values: dict) -> "VerificationReport":
        """The inverse of `to_dict`."""
        parities = [Parity(**{k: v for k, v in parity.items() if k != "equal"}) for parity in values["parities"]]
        return cls(**{k: v for k, v in {**values, "parities": parities}.items() if k != "equal"})

    def to_markdown(self) -> str:
        rows = {
            "largest difference": lambda p: f"{p.max_difference:.1e}",
            "relative error": lambda p: f"{p.relative_error:.1e}",
        }
        if self.parities[0].perplexities is not None:
            rows |= {
                "KL divergence, nats": lambda p: f"{p.kl_divergence:.1e}",
                "same most likely token": lambda p: f"{p.top1_agreement:.2%}",
                "perplexity of the first": lambda p: f"{p.perplexities[0]:.4f}",
                "perplexity of the second": lambda p: f"{p.perplexities[1]:.4f}",
            }
        rows |= {
            "**deciding figure**": lambda p: f"**{p.measured:.1e}**",
            "what rounding does to it": lambda p: f"{p.rounding:.1e}",
            "has to be at most": lambda p: f"{p.tolerance:.1e}",
        }
        criteria = ", ".join(f"in {parity.dtype} {parity.criterion}" for parity in self.parities)
        lines = [
            f"`{self.first}` and `{self.second}` on {self.num_tokens} tokens of {self.text}: "
            + (
                "the same function, up to rounding."
                if self.equal
                else f"they differ, first at {self.first_difference}."
            ),
            "",
            "| | " + " | ".join(parity.dtype for parity in self.parities) + " |",
            "|---|" + "---|" * len(self.parities),
        ]
        lines += [f"| {name} | " + " | ".join(map(cell, self.parities)) + " |" for name, cell in rows.items()]
        lines += ["", f"What decides: {criteria}."]
        return "\n".join(lines)


def verify(
    first: str | Path,
    second: str | Path,
    *,
    text: str | Path | None = None,
    max_tokens: int = MAX_TOKENS,
    revision: str | None = None,
    device: str = "auto",
) -> VerificationReport:
    """Run two checkpoints on the same text and tell whether they are the same function, up to rounding.

    One model is in memory at a time, in fp32 and then in the dtype of the first checkpoint.

    Args:
        first, second: folders or Hub ids.
        text: a file with UTF-8 text; by default a sample of prose, code and several languages that is built in.
        max_tokens: how much of the text to use.
        revision: of `first` if it is a Hub id.
        device: what `from_pretrained` takes as `device_map`.

    Raises:
        ValueError: if the text is empty or too short, or the checkpoints cannot be compared at all.
        OSError: if one cannot be read.
    """
    first, second = open_checkpoint(first, revision), open_checkpoint(second)
    return verify_checkpoints(first, second, text=text, max_tokens=max_tokens, device=device)


@dataclass(frozen=True)
class Reference:
    """What the first checkpoint gives, to hold the second against: outputs of every window, in fp32 and its own dtype.

    `rounding` is the effect of moved norm inputs, the median over windows. Without `own_expected` the two dtypes are
    one: it is fp32, or the checkpoint is quantised, and its weights are made for one dtype.
    """

    first: Checkpoint
    windows: torch.Tensor
    text: str
    dtype: torch.dtype
    own_dtype: torch.dtype
    expected: list[torch.Tensor]
    rounding: float
    own_expected: list[torch.Tensor] | None


def run_reference(
    first: Checkpoint, text: str | Path | None = None, max_tokens: int = MAX_TOKENS, device: str = "auto"
) -> Reference:
    """Run the first checkpoint.

    Raises:
        ValueError: if its model does not run, or gives what is no number.
    """
    windows, text_name = read_windows(first, text, max_tokens)
    check_device(device)
    own_dtype = first.config.dtype or torch.float32
    quantized = getattr(first.config, "quantization_config", None) is not None
    dtype = own_dtype if quantized else torch.float32
    own_expected = None
    # the bar first: among what is quiet are all bars made from then on
    with (
        tqdm(total=(2 if dtype == own_dtype else 3) * len(windows), unit="window", desc="Running") as progress,
        quiet_loading(),
        one_that_runs(first),
    ):
        expected, moved = run(first, dtype, device, windows, progress, also_moved=True)
        rounding = largest_differences(moved, expected).median().item()
        check_finite_outputs(first, expected, dtype)
        if dtype != own_dtype:
            own_expected, _ = run(first, own_dtype, device, windows, progress)
            check_finite_outputs(first, own_expected, own_dtype)
    return Reference(first, windows, text_name, dtype, own_dtype, expected, rounding, own_expected)


@contextlib.contextmanager
def one_that_runs(checkpoint: Checkpoint) -> Iterator[None]:
    """A `ValueError` of one line for whatever a model raises whose config and weights do not go together."""
    try:
        yield
    except (ValueError, OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ValueError(
            f"The model of `{checkpoint.name}` does not run, by its config.json or for want of a package:"
            f" {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error


def check_finite_outputs(checkpoint: Checkpoint, outputs: list[torch.Tensor], dtype: torch.dtype):
    if not all(output.isfinite().all() for output in outputs):
        raise ValueError(
            f"The model of `{checkpoint.name}` gives outputs that are not finite in"
            f" {str(dtype).removeprefix('torch.')}, although its weights are: a number in its config.json is wrong, or"
            " the dtype is too narrow. `--no-verify` converts it unseen."
        )


def check_finite_weights(checkpoint: Checkpoint):
    """Raise a `ValueError` that names the first tensor with NaN or infinity in it; holds one tensor at a time."""
    for shard in tqdm(checkpoint.shards, unit="file", desc="Checking values"):
        with safe_open(checkpoint.folder / shard, framework="pt") as file:
            for name in file.keys():
                tensor = file.get_tensor(name)
                if not tensor.is_floating_point():
                    continue
                # in pieces, in fp32 as not every dtype can tell
                pieces = tensor.flatten().split(2**24)
                bad = sum(int((~piece.float().isfinite()).sum()) for piece in pieces)
                if bad:
                    raise ValueError(
                        f"`{name}` in `{shard}` of `{checkpoint.name}` has values that are not finite, {bad} of"
                        f" {tensor.numel()}, so nothing can be compared. `--no-verify` converts it as it is."
                    )


def verify_checkpoints(
    first: Checkpoint,
    second: Checkpoint,
    *,
    text: str | Path | None = None,
    max_tokens: int = MAX_TOKENS,
    device: str = "auto",
) -> VerificationReport:
    """`verify`, for checkpoints that are open already."""
    config, other = first.text_config, second.text_config
    if config.vocab_size != other.vocab_size:
        raise ValueError(
            f"The checkpoints cannot be compared: vocabularies of {config.vocab_size} and {other.vocab_size} tokens."
        )
    return compare_with(run_reference(first, text, max_tokens, device), second, device)


def compare_with(reference: Reference, second: Checkpoint, device: str = "auto") -> VerificationReport:
    """Run the second checkpoint as the first one has been run."""
    first, windows, reference_dtype = reference.first, reference.windows, reference.dtype
    own_dtype, expected, rounding = reference.own_dtype, reference.expected, reference.rounding
    passes = 1 if reference.own_expected is None else 2
    is_moe = getattr(first.text_config, "num_experts_per_tok", None) is not None
    with (
        tqdm(total=passes * len(windows), unit="window", desc="Verifying") as progress,
        quiet_loading(),
        one_that_runs(second),
    ):
        actual, _ = run(second, reference_dtype, device, windows, progress)
        differences = largest_differences(actual, expected)
        # the windows that have to agree, from the one that agrees best
        count = max(1, math.ceil(len(windows) * (1 - MOE_WINDOWS_APART))) if is_moe else len(windows)
        parity = compare(
            actual,
            expected,
            windows,
            has_logits=first.has_lm_head,
            dtype=reference_dtype,
            rounding=rounding,
            measured=differences.sort().values[count - 1].item(),
            tolerance=FP32_TOLERANCE * rounding,
            criterion="the largest difference" + (f" in {count} of {len(windows)} windows" if is_moe else ""),
        )
        parities = [parity]
        first_difference = None
        if not parity.equal:
            worst = windows[differences.argmax()][None]
            first_difference = find_first_difference(first, second, worst, reference_dtype, device)
        if reference.own_expected is not None:
            del actual
            own_expected = reference.own_expected
            own_actual, _ = run(second, own_dtype, device, windows, progress)
            rounding = median_relative_error(own_expected, expected)
            parities.append(
                compare(
                    own_actual,
                    own_expected,
                    windows,
                    has_logits=first.has_lm_head,
                    dtype=own_dtype,
                    rounding=rounding,
                    measured=median_relative_error(own_actual, expected),
                    tolerance=OWN_DTYPE_TOLERANCE * rounding,
                    criterion="the relative error to the first in float32, in the median window",
                )
            )
            if parity.equal and not parities[1].equal:
                first_difference = f"no layer in fp32, only in {parities[1].dtype}"
    return VerificationReport(
        first=first.title,
        second=second.title,
        text=reference.text,
        num_tokens=windows.numel(),
        parities=parities,
        first_difference=first_difference,
    )


def check_device(device: str):
    """Raise a `ValueError` unless `from_pretrained` can put a model there."""
    if device not in ("auto", "balanced", "balanced_low_0", "sequential"):
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"`device={device!r}` cannot be used here: {str(error).splitlines()[0]}") from None


def read_sample() -> str:
    """The built-in text."""
    return resources.files(__package__).joinpath("sample.txt").read_text(encoding="utf-8")


def read_windows(
    checkpoint: Checkpoint, text: str | Path | None, max_tokens: int = MAX_TOKENS
) -> tuple[torch.Tensor, str]:
    """Token ids of the text, `[windows, length]`, and what to call the text."""
    if text is None:
        content, name = read_sample(), "the built-in text"
    else:
        try:
            content, name = Path(text).read_text(encoding="utf-8"), f"`{Path(text).name}`"
        except UnicodeDecodeError as error:
            raise ValueError(f"`{text}` is not UTF-8 text: {error}.") from None
    if max_tokens < 2:
        raise ValueError(f"`max_tokens={max_tokens}` must be at least 2.")
    bos = []
    tokenizer = checkpoint.tokenizer()
    if tokenizer is not None:
        ids = tokenizer(content, add_special_tokens=False).input_ids
        with_special = tokenizer("a").input_ids
        if with_special and with_special[0] == tokenizer.bos_token_id:
            bos = [tokenizer.bos_token_id]
    else:
        ids = [byte % checkpoint.text_config.vocab_size for byte in content.encode()]
        name += ", its bytes as token ids for want of a tokenizer that loads here"
    ids = ids[:max_tokens]
    if len(ids) < 2:
        raise ValueError(f"The text to verify on has {len(ids)} tokens; give one with at least 2.")
    if max(ids) >= checkpoint.text_config.vocab_size:
        raise ValueError(
            f"The tokenizer of `{checkpoint.name}` gives token {max(ids)}, its model has"
            f" {checkpoint.text_config.vocab_size}."
        )
    length = min(WINDOW, len(ids), getattr(checkpoint.text_config, "max_position_embeddings", None) or WINDOW)
    rows = [bos + ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
    return torch.tensor(rows), name


@contextlib.contextmanager
def quiet_loading() -> Iterator[list[str]]:
    """Without transformers' bars, and with its messages in a list: what they say is looked at and told otherwise."""
    messages: list[str] = []
    handler = Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    logging.disable_default_handler()
    logging.add_handler(handler)
    try:
        yield messages
    finally:
        logging.remove_handler(handler)
        logging.enable_default_handler()
        if bars:
            logging.enable_progress_bar()


@contextlib.contextmanager
def loaded(checkpoint: Checkpoint, dtype: torch.dtype, device: str) -> Iterator[PreTrainedModel]:
    """The checkpoint's model, as `from_pretrained` gives it; the last one makes room for it first."""
    gc.collect()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as offload_folder:
        try:
            model, info = checkpoint.auto_class.from_pretrained(
                checkpoint.folder,
                dtype=dtype,
                device_map=device,
                trust_remote_code=False,
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
        yield model.eval()


@torch.inference_mode()
def run(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: str,
    windows: torch.Tensor,
    progress: tqdm,
    also_moved: bool = False,
) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
    """Logits, or last hidden states, of every window, `[seq, vocab or hidden]` each, on the CPU.

    The model is gone when this returns. With `also_moved` the second list holds the outputs with moved norm inputs.
    """

    def outputs_of(model: PreTrainedModel) -> list[torch.Tensor]:
        outputs = []
        for ids in windows:
            output = model(input_ids=ids[None].to(model.device), use_cache=False)
            outputs.append((output.logits if "logits" in output else output.last_hidden_state)[0].cpu())
            progress.update()
        return outputs

    with loaded(checkpoint, dtype, device) as model:
        outputs = outputs_of(model)
        if not also_moved:
            return outputs, None
        with norm_inputs_moved_by_one_ulp(model):
            return outputs, outputs_of(model)


def norms_of(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The norms of a model by name, of which most stand behind the residual stream or behind a read over depth."""
    modules = model.base_model.named_modules()
    return {
        name: module
        for name, module in modules
        if "norm" in type(module).__name__.lower() and not [*module.children()]
    }


@contextlib.contextmanager
def hooks(handles: list) -> Iterator[None]:
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

    return hooks([norm.register_forward_pre_hook(move) for norm in norms_of(model).values()])


@contextlib.contextmanager
def norm_outputs(model: PreTrainedModel) -> Iterator[dict[str, torch.Tensor]]:
    """While it is on, what the norms give is collected by their names, in the order in which they run."""
    outputs = {}

    def keep(name: str) -> Callable:
        return lambda norm, inputs, output: outputs.__setitem__(name, output.detach().float().cpu())

    with hooks([norm.register_forward_hook(keep(name)) for name, norm in norms_of(model).items()]):
        yield outputs


@torch.inference_mode()
def find_first_difference(
    first: Checkpoint, second: Checkpoint, ids: torch.Tensor, dtype: torch.dtype, device: str
) -> str:
    """The first norm, in the order of execution, whose output is not the same in both models."""

    def run_twice(checkpoint: Checkpoint) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        collected = []
        with loaded(checkpoint, dtype, device) as model:
            for context in (contextlib.nullcontext(), norm_inputs_moved_by_one_ulp(model)):
                with context, norm_outputs(model) as outputs:
                    model(input_ids=ids.to(model.device), use_cache=False)
                collected.append(outputs)
        return collected[0], collected[1]

    expected, moved = run_twice(first)
    actual, _ = run_twice(second)
    for name in expected:
        if name not in actual:
            return f"`{name}`, which only the first one has"
        if actual[name].shape != expected[name].shape:
            return f"`{name}`, by its shape"
        tolerance = FP32_TOLERANCE * relative_error([moved[name]], [expected[name]])
        if relative_error([actual[name]], [expected[name]]) > tolerance:
            return f"`{name}`"
    return "the language-modelling head"


def largest_differences(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> torch.Tensor:
    """Per window, `[windows]`."""
    return torch.stack([(a.float() - b.float()).abs().max() for a, b in zip(actual, expected)])


def relative_error(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    error = sum((a.float() - b.float()).square().sum(dtype=torch.float64) for a, b in zip(actual, expected))
    size = sum(b.float().square().sum(dtype=torch.float64) for b in expected)
    return math.sqrt(error / size) if error else 0.0


def median_relative_error(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return torch.tensor([relative_error([a], [b]) for a, b in zip(actual, expected)]).median().item()


def compare(
    actual: list[torch.Tensor],
    expected: list[torch.Tensor],
    windows: torch.Tensor,
    *,
    has_logits: bool,
    dtype: torch.dtype,
    **decision,
) -> Parity:
    """The figures of `Parity` for the outputs of two models."""
    kl, agreement, perplexities = None, None, None
    if has_logits:
        divergences, same, losses = [], [], ([], [])
        for ids, a, b in zip(windows, actual, expected):
            log_a, log_b = (logits.double().log_softmax(-1) for logits in (a, b))
            divergences.append((log_b.exp() * (log_b - log_a)).sum(-1))
            same.append(a.argmax(-1) == b.argmax(-1))
            for loss, log_probs in zip(losses, (log_b, log_a)):
                loss.append(-log_probs[:-1].gather(-1, ids[1:, None]))
        kl = torch.cat(divergences).mean().item()
        agreement = torch.cat(same).double().mean().item()
        perplexities = [torch.cat(loss).mean().exp().item() for loss in losses]
    return Parity(
        dtype=str(dtype).removeprefix("torch."),
        max_difference=largest_differences(actual, expected).max().item(),
        relative_error=relative_error(actual, expected),
        kl_divergence=kl,
        top1_agreement=agreement,
        perplexities=perplexities,
        **decision,
    )
