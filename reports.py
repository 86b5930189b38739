# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""What a conversion and its verification leave to be read, as objects, JSON and Markdown."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .untrusted import read_json


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


@dataclass(frozen=True)
class ConversionReport:
    """What `convert`, `revert`, `import_checkpoint` or `export_checkpoint` did; it lies in the checkpoint it wrote."""

    operation: str
    source: str
    source_commit: str | None
    destination: str
    model_type: str
    base_model_type: str | None
    num_sublayers: int
    block_size: int | None
    tensors_added: dict[str, list[int]]  # their shapes
    tensors_dropped: list[str]
    left_behind: list[str]
    num_bytes: int
    seconds: float
    versions: dict[str, str]
    verification: VerificationReport | None
    notes: list[str]
    read: str = ""  # in words, where it is not the paper's own

    def to_dict(self) -> dict:
        verification = None if self.verification is None else self.verification.to_dict()
        return {**asdict(self), "verification": verification}

    def to_markdown(self) -> str:
        lines = [f"# {self.operation}: `{self.source}` to `{self.destination}`", ""]
        if self.base_model_type is not None and self.block_size is not None:
            num_blocks = -(-self.num_sublayers // self.block_size)
            lines.append(
                f"- {self.base_model_type}, {self.num_sublayers} sublayers in {num_blocks} blocks of {self.block_size}"
                + (" (Full AttnRes)" if self.block_size == 1 else "")
            )
        if self.read:
            lines.append(f"- read over depth: {self.read}")
        if self.source_commit is not None:
            lines.append(f"- revision of the source: `{self.source_commit}`")
        if self.tensors_added:
            lines.append(f"- added: {len(self.tensors_added)} tensors of depth attention")
        if self.tensors_dropped:
            lines.append(f"- dropped: {len(self.tensors_dropped)} tensors of depth attention")
        lines += [f"- left behind: `{name}`" for name in self.left_behind]
        lines.append(f"- {self.num_bytes / 1e9:.3f} GB in {self.seconds:.1f} s before verification")
        lines += [f"- {note}" for note in self.notes]
        lines += ["", "## Verification", ""]
        lines.append("Not done." if self.verification is None else self.verification.to_markdown())
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return "\n".join([*lines, "", f"{versions}."]) + "\n"


def read_report(path: Path) -> tuple[dict[str, Any], VerificationReport | None]:
    """A conversion's report from its JSON file, and its verification if it was verified.

    Raises:
        ValueError: if it is damaged.
    """
    values = read_json(path)
    try:
        of_verification = values["verification"]
        texts = [values[name] for name in ("operation", "source")] + list(values["versions"].values())
        verification = None if of_verification is None else VerificationReport.from_dict(of_verification)
        if verification is not None:
            verification.to_markdown()  # which needs most of it
        if not all(isinstance(text, str) for text in texts):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise ValueError(f"`{path}` is damaged: remove it, and the card does without.") from None
    return values, verification
