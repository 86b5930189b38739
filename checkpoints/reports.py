# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""What a conversion and its verification leave to be read, as objects, JSON and Markdown."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from ..base.config import is_encoder_decoder
from ..utils.markup import code, escaped, sentence
from ..utils.ranges import in_ranges


@dataclass(frozen=True)
class SourceWeights:
    """What the weights of a checkpoint were made from, where that was not a checkpoint of plain numbers.

    Args:
        format: `gguf`, or the `quant_method` of a config, such as `fp8`, `gptq`, `awq` and `bitsandbytes`.
        file: name of a GGUF file.
        kind: of it as a whole, such as `Q4_K_M`.
        tensors: number of tensors by the type they have there, such as `{"Q4_K": 210, "F32": 61}`.
        quantized: whether there are other types than floating-point numbers among them.
        dequantized: whether they have been written as plain numbers since; otherwise they are as they were.
    """

    format: str
    file: str | None
    kind: str
    tensors: dict[str, int]
    quantized: bool
    dequantized: bool

    @classmethod
    def from_dict(cls, values: Any) -> "SourceWeights":
        """The inverse of `asdict`.

        Raises:
            TypeError: if it is something else.
        """
        weights = cls(**values)
        counts = weights.tensors.items()  # AttributeError is no TypeError, so
        if not all(isinstance(name, str) and isinstance(count, int) for name, count in counts):
            raise TypeError(f"`tensors={weights.tensors!r}` is not a number of tensors by type")
        return weights

    @property
    def counts(self) -> str:
        return ", ".join(f"{count} of {kind}" for kind, count in self.tensors.items())

    def in_words(self) -> str:
        """With names as they are: whoever shows it puts them through `markup.sentence`."""
        tensors = f"{self.kind}; tensors: {self.counts}"
        if self.file is None:
            return f"{self.format} weights ({tensors})"
        return f"the {'quantised ' if self.quantized else ''}GGUF file `{self.file}` ({tensors})"

    def note(self) -> str:
        """What a report says of it."""
        if not self.dequantized:
            return f"weights are quantised: {self.in_words()}, byte for byte as in the source"
        if not self.quantized:
            return f"weights were read from {self.in_words()} and are kept in fp32"
        return (
            f"weights were quantised: they come from {self.in_words()} and were dequantised to fp32. Both models"
            " that are compared here have these weights, not those from before the quantisation"
        )


@dataclass(frozen=True)
class Parity:
    """How far the second model is from the first, in one dtype.

    Checkpoints without a language-modelling head are compared by their last hidden state. They have no KL divergence,
    top-1 agreement or perplexities.

    Attributes:
        dtype: the dtype in which both models ran.
        max_difference: largest absolute difference of a logit.
        relative_error: norm of the difference of the logits, relative to the norm of the logits.
        kl_divergence: mean KL divergence of the next token, in nats.
        top1_agreement: fraction of the tokens at which both models have the same most likely next token.
        perplexities: perplexity of the first and of the second model.
        rounding: the effect of rounding alone on the figure that decides.
        measured: the figure that decides.
        tolerance: largest value of it that counts as equal.
        criterion: what the figure is, in words.
        decides: whether this dtype decides. With experts only fp32 does, and half precision is for information.
    """

    dtype: str
    max_difference: float
    relative_error: float
    kl_divergence: float | None
    top1_agreement: float | None
    perplexities: list[float] | None
    rounding: float
    measured: float
    tolerance: float
    criterion: str
    decides: bool = True

    @property
    def equal(self) -> bool:
        return self.measured <= self.tolerance

    @property
    def verdict(self) -> str:
        """What decides, such as `largest difference 1.1e-4, tolerance 2.7e-4 (float32)`."""
        measured, tolerance = (
            f"{value:.1e}".replace("e-0", "e-").replace("0.0e+00", "0") for value in (self.measured, self.tolerance)
        )
        return f"{self.criterion.removeprefix('the ')} {measured}, tolerance {tolerance} ({self.dtype})"


@dataclass(frozen=True)
class VerificationReport:
    """Result of `verify`. `equal` is true if the models differ only by rounding, in every dtype that decides.

    Attributes:
        first, second: names of the checkpoints.
        text: the text, in words.
        num_tokens: how many tokens of it were used; 0 of models of images, and then `text` says which they read.
        parities: the comparison in each dtype.
        first_difference: the first norm whose output differs, in words; `None` if the models are equal.
    """

    first: str
    second: str
    text: str
    num_tokens: int
    parities: list[Parity] = field(default_factory=list)
    first_difference: str | None = None

    @property
    def equal(self) -> bool:
        return all(parity.equal for parity in self.parities if parity.decides)

    @property
    def verdict(self) -> str:
        """One line: whether the second computes the same, and the figures and tolerances that decide it."""
        figures = [parity.verdict for parity in self.parities if parity.decides]
        if self.equal:
            return f"Passed: {'; '.join(figures)}"
        return f"Failed: {'; '.join(figures)}. The first difference is at {self.first_difference}"

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
        decisive = [parity for parity in self.parities if parity.decides]
        criteria = ", ".join(f"in {escaped(p.dtype)} {sentence(p.criterion)}" for p in decisive)
        read = f"{self.num_tokens:d} tokens of " if self.num_tokens else ""
        lines = [
            f"{code(self.first)} and {code(self.second)} on {read}{sentence(self.text)}: "
            + (
                "the same function, up to rounding."
                if self.equal
                else f"they differ, first at {sentence(self.first_difference)}."
            ),
            "",
            "| | " + " | ".join(escaped(parity.dtype) for parity in self.parities) + " |",
            "|---|" + "---|" * len(self.parities),
        ]
        lines += [f"| {name} | " + " | ".join(map(cell, self.parities)) + " |" for name, cell in rows.items()]
        lines += ["", f"What decides: {criteria}."]
        lines += [
            f"For information: in {escaped(p.dtype)} {sentence(p.criterion)}, as rounding chooses between experts at"
            " near-ties."
            for p in self.parities
            if not p.decides
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class ConversionReport:
    """What `convert`, `revert`, `import_checkpoint` or `export_checkpoint` did. It is also saved in the checkpoint.

    Attributes:
        operation: what was done, in words.
        source: Hub id or name of the folder that was converted.
        source_commit: commit of a Hub id.
        destination: the folder that was written.
        model_type, base_model_type: types of the model that was written and of its base.
        num_sublayers: number of sublayers.
        block_size: sublayers per block; `None` without reads over depth.
        tensors_added: shapes of the tensors that were added, by name.
        tensors_dropped: names of the tensors that were left out.
        left_behind: files of the source that were not copied.
        num_bytes: size of the source.
        seconds: time before verification.
        versions: of `attnres`, torch and transformers.
        verification: result of the comparison; `None` if it was skipped.
        notes: what else there is to know, in words.
        read: the read over depth in words, if it is not the paper's.
        weights: what the weights were made from, if they were quantised or in a GGUF file.
        layers: numbers of the layers of the source that it has; `None` for all.
    """

    operation: str
    source: str
    source_commit: str | None
    destination: str
    model_type: str
    base_model_type: str | None
    num_sublayers: int
    block_size: int | None
    tensors_added: dict[str, list[int]]
    tensors_dropped: list[str]
    left_behind: list[str]
    num_bytes: int
    seconds: float
    versions: dict[str, str]
    verification: VerificationReport | None
    notes: list[str]
    read: str = ""
    weights: SourceWeights | None = None
    layers: list[int] | None = None

    def to_dict(self) -> dict:
        verification = None if self.verification is None else self.verification.to_dict()
        return {**asdict(self), "verification": verification}

    @property
    def verdict(self) -> str:
        """That of the verification, in one line."""
        return "Not verified: the models were not compared" if self.verification is None else self.verification.verdict

    def summary_in_markdown(self) -> str:
        """What was done, without the figures of the verification."""
        lines = [f"# {escaped(self.operation)}: {code(self.source)} to {code(self.destination)}", ""]
        if self.base_model_type is not None and self.block_size is not None:
            blocks = f"{-(-self.num_sublayers // self.block_size)} blocks"
            if is_encoder_decoder(self.base_model_type):
                blocks = "an encoder and a decoder, in blocks"  # of which both may have a short one at the end
            lines.append(
                f"- {escaped(self.base_model_type)}, {self.num_sublayers} sublayers in {blocks} of"
                f" {self.block_size}" + (" (Full AttnRes)" if self.block_size == 1 else "")
            )
        if self.layers is not None:
            lines.append(f"- {len(self.layers)} layers, those of the source: {in_ranges(self.layers)}")
        if self.read:
            lines.append(f"- read over depth: {sentence(self.read)}")
        if self.source_commit is not None:
            lines.append(f"- revision of the source: {code(self.source_commit)}")
        if self.tensors_added:
            lines.append(f"- added: {len(self.tensors_added)} tensors{_of_depth_attention(self.tensors_added)}")
        if self.tensors_dropped:
            lines.append(f"- dropped: {len(self.tensors_dropped)} tensors{_of_depth_attention(self.tensors_dropped)}")
        lines += [f"- left behind: {code(name)}" for name in self.left_behind]
        lines.append(f"- {self.num_bytes / 1e9:.3f} GB in {self.seconds:.1f} s before verification")
        lines += [f"- {sentence(note)}" for note in self.notes]
        return "\n".join(lines)

    def to_markdown(self) -> str:
        lines = [self.summary_in_markdown(), "", "## Verification", ""]
        lines.append("Not done." if self.verification is None else self.verification.to_markdown())
        versions = ", ".join(f"{name} {escaped(version)}" for name, version in self.versions.items())
        return "\n".join([*lines, "", f"{versions}."]) + "\n"


def _of_depth_attention(names: Iterable[str]) -> str:
    """What the names of tensors say of where they belong."""
    return " of depth attention" if all("depth_queries" in name or "_res_" in name for name in names) else ""
