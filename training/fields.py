# SPDX-License-Identifier: Apache-2.0
"""The fields of a run for people: a table of them, and a commented file to edit."""

import dataclasses
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich import box
from rich.console import Group
from rich.table import Column, Table
from rich.text import Text
from transformers import TrainingArguments

from ..utils.files import write_file
from .arguments import AttnResTrainingArguments, FinetuneArguments, PretrainArguments
from .config import FINETUNE_DEFAULTS, WITHOUT_EFFECT
from .pretrain import PRETRAIN_DEFAULTS


CONFIGS = Path(__file__).with_name("configs")
# By kind of run: its fields, its defaults in place of transformers', and the file to start from
KINDS = {
    "finetune": (FinetuneArguments, FINETUNE_DEFAULTS, "laptop_cpu"),
    "pretrain": (PretrainArguments, PRETRAIN_DEFAULTS, "pretrain_cpu"),
}
SENTENCE = re.compile(r"(.+?(?<!e\.g)[.!])(?= [A-Z`(]|$)", re.DOTALL)


@dataclass(frozen=True)
class Field:
    """A field of a run: its name, its default as in YAML (empty if it is required) and its help."""

    name: str
    default: str
    help: str


def fields_of(kind: str) -> tuple[list[Field], list[Field]]:
    """The fields of `finetune` or `pretrain`: those of `attnres`, and those of transformers' `TrainingArguments`."""
    of_run, defaults, _ = KINDS[kind]
    of_transformers = {field.name for field in dataclasses.fields(TrainingArguments)}
    of_training = [field for field in dataclasses.fields(AttnResTrainingArguments) if field.init]
    ours = [*dataclasses.fields(of_run), *(field for field in of_training if field.name not in of_transformers)]
    names = {field.name for field in ours} | WITHOUT_EFFECT.keys()
    others = [field for field in of_training if field.name not in names]
    return [_field(field, defaults) for field in ours], [_field(field, defaults) for field in others]


def _field(field: dataclasses.Field, defaults: dict[str, Any]) -> Field:
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    default = defaults.get(field.name, default)
    text = " ".join(field.metadata.get("help", "").replace("%%", "%").split())
    return Field(field.name, "" if default is dataclasses.MISSING else as_yaml(default), text)


def as_yaml(value: Any) -> str:
    """A value in one line."""
    value = getattr(value, "value", value)  # of an enumeration
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n").removesuffix("\n...")


def fields_table(kind: str) -> Group:
    """All fields with their defaults and the first sentence of their help, those of the run first."""
    tables = []
    for title, fields in zip(("Fields of attnres", "Fields of transformers' TrainingArguments"), fields_of(kind)):
        table = Table(
            Column("field: default", max_width=40, overflow="fold"), "what it is", box=box.SIMPLE, title=title
        )
        for field in fields:
            sentence = SENTENCE.match(field.help)
            text = field.help if sentence is None else sentence.group(1)
            table.add_row(Text(f"{field.name}: {field.default or '(required)'}"), Text(text))
        tables.append(table)
    return Group(*tables)


def starting_file(kind: str) -> str:
    """A YAML file of a small run, with a comment on each field of `attnres`."""
    ours, others = fields_of(kind)
    start = yaml.safe_load((CONFIGS / f"{KINDS[kind][2]}.yaml").read_text(encoding="utf-8"))
    lines = [
        f"# A run of `attnres {kind}`. Edit it, then: attnres {kind} THIS_FILE",
        f"# Fields that are commented out have their defaults. `attnres {kind} --fields` lists all fields.",
    ]
    for field in [*ours, *(field for field in others if field.name in start)]:
        lines += ["", *textwrap.wrap(field.help, 100, initial_indent="# ", subsequent_indent="# ")]
        if field.name in start:
            lines += yaml.safe_dump({field.name: start[field.name]}, sort_keys=False).splitlines()
        else:
            lines.append(f"# {field.name}: {field.default}")
    return "\n".join(lines) + "\n"


def write_starting_file(kind: str, path: Path):
    """Write it.

    Raises:
        ValueError: if there is something already.
    """
    if path.exists():
        raise ValueError(f"`{path}` exists already and is not overwritten: name another file.")
    write_file(path, starting_file(kind))
