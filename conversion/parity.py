# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Are two checkpoints the same function? Both run on the same text, and rounding is told from difference.

Two correct programs for one function differ by rounding, and by how much depends on the network: one that amplifies
small changes amplifies rounding. So the tolerance is measured, on the checkpoint at hand.

- In fp32, the first model runs once more with every input of a norm moved by one unit in the last place, up or down at
  random. That is what rounding in another order does, and its effect on the logits is the network's own sensitivity.
- In the checkpoint's own dtype, the error of each model is taken against the first one in fp32. That of the second may
  not be larger than that of the first, but for chance.

Experts add chance: where two are at a near-tie in the router, rounding chooses between them. In fp32 that is rare, so
a few windows may differ. In half precision it happens in most windows, to few of their tokens, so the error is that of
the median token. It decides only if the models cannot be compared in fp32; otherwise it is reported.
"""

import contextlib
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub.utils import tqdm
from safetensors import safe_open

from ..base.config import has_own_classes
from ..base.probe import decoder_on_meta, example_inputs
from ..checkpoints.checkpoint import Checkpoint, open_checkpoint
from ..checkpoints.reports import Parity, VerificationReport
from ..data.text import read_sample
from ..utils.devices import check_device
from .running import (
    loaded,
    model_errors_explained,
    norm_inputs_moved_by_one_ulp,
    norm_outputs,
    output_of,
    quiet_loading,
    run,
)


WINDOW = 64
MAX_TOKENS = 512
NUM_IMAGES = 4
# Times the sensitivity measured with one unit in the last place at every norm. A read over depth rounds about as often
# as a residual stream; over all families and block sizes the figure is 0.4 to 1.3. What is to be found is far larger:
# epsilons left alone come to 100 times the rounding and more in most families (docs/parity.md).
FP32_TOLERANCE = 4
# Times the first model's own error. Two errors of one size: 0.7 to 1.1 in dense families
OWN_DTYPE_TOLERANCE = 3
# In a router near-ties fall either way, and a window in which one did differs by far more than rounding
MOE_WINDOWS_APART = 0.25


def verify(
    first: str | Path,
    second: str | Path,
    *,
    text: str | Path | None = None,
    max_tokens: int = MAX_TOKENS,
    revision: str | None = None,
    device: str = "auto",
) -> VerificationReport:
    """Run two checkpoints on the same text, and find out whether they compute the same, up to rounding.

    One model is in memory at a time, in fp32 and then in the dtype of the first checkpoint.

    Args:
        first, second: folders or Hub ids.
        text: a file with UTF-8 text. By default a built-in sample of prose, code and several languages.
        max_tokens: number of tokens to use.
        revision: branch, tag or commit of `first`, if it is a Hub id.
        device: where to run the models, as `device_map` in `from_pretrained`.

    Raises:
        ValueError: if the text is empty or too short, or the checkpoints cannot be compared at all.
        OSError: if one cannot be read.
    """
    first, second = open_checkpoint(first, revision, follow_links=True), open_checkpoint(second, follow_links=True)
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
    windows, text_name = windows_of(first, text, max_tokens)
    check_device_map(device)
    own_dtype = first.config.dtype or torch.float32
    quantized = getattr(first.config, "quantization_config", None) is not None
    dtype = own_dtype if quantized else torch.float32
    own_expected = None
    # the bar first: among what is quiet are all bars made from then on
    with (
        tqdm(total=(2 if dtype == own_dtype else 3) * len(windows), unit="window", desc="Running") as progress,
        quiet_loading(),
        model_errors_explained(first),
    ):
        expected, moved = run(first, dtype, device, windows, progress, also_moved=True)
        rounding = rounding_of(first, dtype, moved, expected)
        check_finite_outputs(first, expected, dtype)
        if dtype != own_dtype:
            own_expected, _ = run(first, own_dtype, device, windows, progress)
            check_finite_outputs(first, own_expected, own_dtype)
    return Reference(first, windows, text_name, dtype, own_dtype, expected, rounding, own_expected)


def rounding_of(
    first: Checkpoint, dtype: torch.dtype, moved: list[torch.Tensor], expected: list[torch.Tensor]
) -> float:
    """What rounding does to the figure by which models are compared in the dtype of the reference."""
    if chooses_often(first, dtype):
        return median_token_error(moved, expected)
    return largest_differences(moved, expected).median().item()


def chooses_often(checkpoint: Checkpoint, dtype: torch.dtype) -> bool:
    """Whether near-ties between experts, which rounding decides, are in most windows."""
    return has_experts(checkpoint.text_config.to_dict()) and torch.finfo(dtype).bits < 32


def has_experts(config: dict) -> bool:
    """Whether a model has several experts. The numbers of these have many names, some of them in nested configs."""
    return any(
        has_experts(value)
        if isinstance(value, dict)
        else "expert" in str(name) and isinstance(value, int) and not isinstance(value, bool) and value > 1
        for name, value in config.items()
    )


def check_finite_outputs(checkpoint: Checkpoint, outputs: list[torch.Tensor], dtype: torch.dtype):
    if not all(output.isfinite().all() for output in outputs):
        raise ValueError(
            f"The model of `{checkpoint.name}` gives outputs that are not finite in"
            f" {str(dtype).removeprefix('torch.')}, although its weights are: a number in its config.json is wrong, or"
            " the dtype is too narrow. `--no-verify` skips this check."
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
                if tensor.ndim == 0 and not tensor.isnan():
                    continue  # a bound, as of what is clipped, may be infinite
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
    sizes = getattr(config, "vocab_size", None), getattr(other, "vocab_size", None)  # models of images have none
    if sizes[0] != sizes[1]:
        raise ValueError(f"The checkpoints cannot be compared: vocabularies of {sizes[0]} and {sizes[1]} tokens.")
    return compare_with(run_reference(first, text, max_tokens, device), second, device)


def compare_with(reference: Reference, second: Checkpoint, device: str = "auto") -> VerificationReport:
    """Run the second checkpoint as the first one has been run."""
    first, windows, reference_dtype = reference.first, reference.windows, reference.dtype
    own_dtype, expected, rounding = reference.own_dtype, reference.expected, reference.rounding
    passes = 1 if reference.own_expected is None else 2
    with (
        tqdm(total=passes * len(windows), unit="window", desc="Verifying") as progress,
        quiet_loading(),
        model_errors_explained(second),
    ):
        actual, _ = run(second, reference_dtype, device, windows, progress)
        parity = compare(
            actual,
            expected,
            windows,
            has_logits=first.has_lm_head,
            dtype=reference_dtype,
            rounding=rounding,
            tolerance=FP32_TOLERANCE * rounding,
            **measured_in_reference_dtype(reference, actual),
        )
        parities = [parity]
        first_difference = None
        if not parity.equal:
            worst = windows[largest_differences(actual, expected).argmax()][None]
            first_difference = find_first_difference(first, second, worst, reference_dtype, device)
        if reference.own_expected is not None:
            del actual
            own_actual, _ = run(second, own_dtype, device, windows, progress)
            parities.append(compare_in_own_dtype(reference, own_actual))
            if parity.equal and parities[1].decides and not parities[1].equal:
                first_difference = f"no layer in fp32, only in {parities[1].dtype}"
    return VerificationReport(
        first=first.title,
        second=second.title,
        text=reference.text,
        num_tokens=0 if windows.is_floating_point() else windows.numel(),
        parities=parities,
        first_difference=first_difference,
    )


def measured_in_reference_dtype(reference: Reference, actual: list[torch.Tensor]) -> dict:
    """The figure that decides, and its name."""
    if chooses_often(reference.first, reference.dtype):
        error = median_token_error(actual, reference.expected)
        return {"measured": error, "criterion": "the relative error in the median token"}
    differences, num_windows = largest_differences(actual, reference.expected), len(actual)
    if not has_experts(reference.first.text_config.to_dict()):
        return {"measured": differences.max().item(), "criterion": "the largest difference"}
    # the windows that have to agree, from the one that agrees best
    count = max(1, math.ceil(num_windows * (1 - MOE_WINDOWS_APART)))
    measured = differences.sort().values[count - 1].item()
    return {"measured": measured, "criterion": f"the largest difference in {count} of {num_windows} windows"}


def compare_in_own_dtype(reference: Reference, actual: list[torch.Tensor]) -> Parity:
    """Both models in the dtype of the first, by their errors to the first one in fp32."""
    is_chance = chooses_often(reference.first, reference.own_dtype)
    error, what = (median_token_error, "token") if is_chance else (median_relative_error, "window")
    assert reference.own_expected is not None
    rounding, measured = error(reference.own_expected, reference.expected), error(actual, reference.expected)
    return compare(
        actual,
        reference.own_expected,
        reference.windows,
        has_logits=reference.first.has_lm_head,
        dtype=reference.own_dtype,
        rounding=rounding,
        measured=measured,
        tolerance=OWN_DTYPE_TOLERANCE * rounding,
        criterion=f"the relative error to the first in float32, in the median {what}",
        decides=not is_chance or not math.isfinite(measured),
    )


def check_device_map(device: str):
    """Raise a `ValueError` unless `from_pretrained` can put a model there."""
    if device not in ("auto", "balanced", "balanced_low_0", "sequential"):
        check_device(device)


def windows_of(
    checkpoint: Checkpoint, text: str | Path | None, max_tokens: int = MAX_TOKENS
) -> tuple[torch.Tensor, str]:
    """What the models run on, and what to call it: token ids, see `read_windows`, or random images or recordings.

    Raises:
        ValueError: for a text where the models read none.
    """
    main_input = checkpoint.lm_class.main_input_name
    if not has_own_classes(checkpoint.base_model_type) or main_input == "input_ids":
        return read_windows(checkpoint, text, max_tokens)
    kind = "images" if main_input == "pixel_values" else "recordings"
    if text is not None:
        raise ValueError(f"`{checkpoint.name}` reads {kind}, and cannot be verified on the text `{text}`.")
    config = checkpoint.config
    base_config = config.to_base_config() if checkpoint.is_attnres else config
    shape = example_inputs(decoder_on_meta(base_config))[main_input].shape[1:]
    inputs = torch.randn(NUM_IMAGES, *shape, generator=torch.Generator().manual_seed(0))
    return inputs, f"{NUM_IMAGES} random {kind}"


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
        ids = tokenizer(content, add_special_tokens=False, verbose=False).input_ids
        with_special = tokenizer("a").input_ids
        if with_special and with_special[0] == tokenizer.bos_token_id:
            bos = [tokenizer.bos_token_id]
    else:
        ids = [byte % checkpoint.text_config.vocab_size for byte in content.encode()]
        name += ", with its bytes as token ids because no tokenizer loads here"
    ids = ids[:max_tokens]
    if len(ids) < 2:
        raise ValueError(f"The text to verify on has {len(ids)} tokens; give one with at least 2.")
    if max(ids) >= checkpoint.text_config.vocab_size:
        raise ValueError(
            f"The tokenizer of `{checkpoint.name}` gives token {max(ids)}, but its model has only"
            f" {checkpoint.text_config.vocab_size}."
        )
    length = min(WINDOW, len(ids), getattr(checkpoint.text_config, "max_position_embeddings", None) or WINDOW)
    rows = [bos + ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
    return torch.tensor(rows), name


@torch.inference_mode()
def find_first_difference(
    first: Checkpoint, second: Checkpoint, inputs: torch.Tensor, dtype: torch.dtype, device: str
) -> str:
    """The first norm, in the order of execution, whose output is not the same in both models."""

    def run_twice(checkpoint: Checkpoint) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        collected = []
        with loaded(checkpoint, dtype, device) as model:
            for context in (contextlib.nullcontext(), norm_inputs_moved_by_one_ulp(model)):
                with context, norm_outputs(model) as outputs:
                    output_of(model, inputs, checkpoint)
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
    return "the head"


def largest_differences(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> torch.Tensor:
    """Per window, `[windows]`."""
    return torch.stack([(a.float() - b.float()).abs().max() for a, b in zip(actual, expected)])


def relative_error(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    error = sum((a.float() - b.float()).square().sum(dtype=torch.float64) for a, b in zip(actual, expected))
    size = sum(b.float().square().sum(dtype=torch.float64) for b in expected)
    return math.sqrt(error / size) if error else 0.0


def median_relative_error(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return torch.tensor([relative_error([a], [b]) for a, b in zip(actual, expected)]).median().item()


def median_token_error(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Of the relative errors of all tokens: most choose the experts that they would have chosen."""
    of_windows = []
    for a, b in zip(actual, expected):
        errors, sizes = (a.double() - b.double()).norm(dim=-1), b.double().norm(dim=-1)
        of_windows.append(torch.where(errors == 0, 0, errors / sizes))
    return torch.cat(of_windows).median().item()


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
