# SPDX-License-Identifier: Apache-2.0
"""What can be chosen of a conversion, in groups: keywords of `convert`, and the objects that are made of them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypedDict

from typing_extensions import Self


class WritingOptions(TypedDict, total=False):
    """Keywords of `convert`, as type checkers see them: how the checkpoint is written, and how it is compared."""

    link: bool
    verify: bool
    verify_text: str | Path | None
    device: str


class ReadOptions(TypedDict, total=False):
    """The same of the read over depth."""

    num_heads: int | None
    query: str | None
    query_rank: int | None
    weights: str | None
    open_block: str | None
    stream: str | None


class ConvertOptions(WritingOptions, ReadOptions, total=False):
    """Both."""


class _OfOptions:
    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Of those keywords that are its fields."""
        names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        return cls(**{name: options[name] for name in names if name in options})


@dataclass(frozen=True)
class Blocks:
    """How layers are divided into blocks: at most one of the three.

    Raises:
        ValueError: if more than one is given.
    """

    block_size: int | None = None
    num_blocks: int | None = None
    full: bool = False

    def __post_init__(self):
        given = {name: value for name, value in vars(self).items() if value is not None and value is not False}
        if len(given) > 1:
            listed = ", ".join(f"`{name}={value}`" for name, value in given.items())
            raise ValueError(f"{listed} contradict: give one of them.")

    def as_arguments(self) -> dict[str, int]:
        """That of `AttnResConfig.from_base_config`; none if nothing was chosen."""
        given = {"block_size": 1 if self.full else self.block_size, "num_blocks": self.num_blocks}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class ReadChoice(_OfOptions):
    """The read over depth, as far as it is chosen."""

    num_heads: int | None = None
    query: str | None = None
    query_rank: int | None = None
    weights: str | None = None
    open_block: str | None = None
    stream: str | None = None

    def as_fields(self) -> dict[str, Any]:
        """Those of `AttnResConfig` that are chosen."""
        return {f"attn_res_{name}": value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Choice:
    """What is asked for of a conversion."""

    blocks: Blocks
    read: ReadChoice
    self_contained: bool = False

    @property
    def is_empty(self) -> bool:
        return self == Choice(Blocks(), ReadChoice())


@dataclass(frozen=True)
class Writing(_OfOptions):
    """How a checkpoint is written, and how it is compared with its source.

    Args:
        may_differ: write it also if the verification shows a difference.
    """

    link: bool = False
    verify: bool = True
    verify_text: str | Path | None = None
    device: str = "auto"
    may_differ: bool = False
