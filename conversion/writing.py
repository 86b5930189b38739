# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Writing the checkpoint that comes of a conversion: what all of them share, from the first check to the card."""

import functools
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import ModelCard, ModelCardData
from transformers import AutoProcessor, PreTrainedConfig

from .. import __version__
from ..base.probe import probe_sublayers
from ..checkpoints.checkpoint import (
    BASE_CONFIG_NAME,
    REPORT_NAMES,
    Checkpoint,
    depth_config_of,
    load_tokenizer,
    open_checkpoint,
    refuse_links_out,
)
from ..checkpoints.remote_code import code_files
from ..checkpoints.reports import ConversionReport, SourceWeights
from ..data.text import read_sample
from ..depth.reads import ReadConfig
from ..model_cards.card import inherited_metadata, weights_of, write_model_card
from ..utils.files import atomic_folder
from ..utils.markup import code, escaped
from ..utils.ranges import in_ranges
from .checks import check_tensors
from .options import Writing
from .parity import check_device_map, check_finite_weights, compare_with, run_reference, windows_of
from .running import quiet_loading
from .weights import copy_companions, write_weights


BASE_CARD_NAME = "README.base.md"


@dataclass(frozen=True)
class Conversion:
    """What is to be written of a source.

    Args:
        operation: what to call it.
        config: of the checkpoint to write; a dict where it is not one of transformers.
        add: tensors to add, by name.
        rename: new names of the others, `None` for those to leave out.
        notes: for the report.
        weights: what the source's were made from, where that does not show in its files.
        files: to copy under these names, after the config has been written.
        layers: numbers of the source's layers that it has; `None` for all. The result is compared with these.
    """

    operation: str
    source: Checkpoint
    config: PreTrainedConfig | dict
    add: dict[str, torch.Tensor] = field(default_factory=dict)
    rename: Callable[[str], str | None] = lambda name: name
    notes: Sequence[str] = ()
    weights: SourceWeights | None = None
    files: dict[str, Path] = field(default_factory=dict)
    layers: tuple[int, ...] | None = None

    @property
    def depth_config(self) -> Any:
        """The config of the decoder to write, if that reads over depth; `None` also for one not of transformers."""
        return None if isinstance(self.config, dict) else depth_config_of(self.config)

    @functools.cached_property
    def names(self) -> dict[str, str | None]:
        """New names of the source's tensors."""
        return {name: self.rename(name) for name in self.source.weight_map}

    def num_bytes(self, link: bool) -> int:
        """How much is written."""
        added = sum(tensor.nbytes for tensor in self.add.values())
        return added if link else self.source.num_bytes + added

    def facts(self) -> dict[str, Any]:
        """What a report says of source and result; where that has no blocks, the sublayers are the source's."""
        config, depth = self.config, self.depth_config or self.source.depth_config
        config_dict = config if isinstance(config, dict) else config.to_dict()
        dropped = {name for name, new in self.names.items() if new is None}
        return {
            **self.source.facts_as_source(),
            "operation": self.operation,
            "model_type": config_dict["model_type"],
            "base_model_type": config_dict.get("base_model_type"),
            "num_sublayers": sum(probe_sublayers(config) if depth is None else depth.sublayers_per_layer()),
            "block_size": None if self.depth_config is None else depth.attn_res_block_size,
            "read": "" if self.depth_config is None else ReadConfig.of(depth).in_words(),
            "tensors_added": {name: list(tensor.shape) for name, tensor in self.add.items() if name not in dropped},
            "tensors_dropped": sorted(dropped - self.add.keys()),
            "layers": None if self.layers is None else list(self.layers),
        }


def write_checkpoint(conversion: Conversion, path: Path, how: Writing) -> ConversionReport:
    """Write, verify, describe: the part that all conversions share.

    Args:
        path: folder to write, as `check_destination` gives it.
    """
    source = conversion.source
    cards = cards_to_keep(conversion)
    weights = conversion.weights or weights_of(source)
    notes = [*([] if weights is None else [weights.note()]), *conversion.notes]
    check_before_writing(source, cards)
    if how.verify:
        check_before_verifying(source, how.verify_text, how.device)
    way_out = " On the same disk `--link` needs almost no room."
    with atomic_folder(path, conversion.num_bytes(how.link), way_out) as folder:
        compared = replace(source, layers=conversion.layers)
        reference = run_reference(compared, how.verify_text, device=how.device) if how.verify else None
        start = time.perf_counter()
        notes += write_files(conversion, cards, folder, link=how.link)
        written = None
        if not isinstance(conversion.config, dict):
            written = replace(open_checkpoint(folder), name=str(path))
            check_tensors(written)
        seconds = time.perf_counter() - start
        verification = None
        if reference is not None and written is not None:
            verification = compare_with(reference, written, how.device)
            if not (verification.equal or how.may_differ):
                raise ValueError(
                    f"`{path}` would not compute the same as `{compared.title}`, so it is not written."
                    f" {verification.verdict}. Please report this."
                )
        report = ConversionReport(
            destination=path.name,
            **conversion.facts(),
            seconds=seconds,
            versions={"attnres": __version__, "transformers": transformers.__version__, "torch": torch.__version__},
            verification=verification,
            notes=notes,
            weights=weights,
        )
        write_report_and_card(report, conversion, folder, written)
    return report


def write_files(conversion: Conversion, cards: dict[str, str | None], folder: Path, *, link: bool) -> list[str]:
    """Write config, weights and companions.

    Returns:
        What had to be done so that tokenizer and processor load, for the report.
    """
    source, config = conversion.source, conversion.config
    copy_companions(source, folder, cards)
    write_config(config, folder)
    for name, path in conversion.files.items():
        shutil.copyfile(path, folder / name)
    write_weights(source, folder, add=conversion.add, names=conversion.names, link=link)
    return [] if isinstance(config, dict) else [*keep_tokenizer(source, folder), *keep_processor(source, folder)]


def check_before_writing(source: Checkpoint, names: dict[str, str | None]):
    """Raise a `ValueError` for files that may not be copied, and for a card that cannot be read.

    Args:
        names: as `cards_to_keep` gives them.
    """
    refuse_links_out(source, [name for name in source.companions if names.get(name, name) is not None])
    inherited_metadata(source.folder / "README.md", None)


def check_before_verifying(source: Checkpoint, verify_text: str | Path | None, device: str):
    """Raise a `ValueError` for a text, a device or weights with which nothing can be compared."""
    windows_of(source, verify_text)
    check_device_map(device)
    check_finite_weights(source)


def write_config(config: PreTrainedConfig | dict, folder: Path):
    """Write `config.json`, and beside it the code of the model if the config names it."""
    if isinstance(config, dict):
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        return
    config.save_pretrained(folder)


def write_report_and_card(report: ConversionReport, conversion: Conversion, folder: Path, written: Checkpoint | None):
    """Write the report as JSON and Markdown, and the model card of an AttnRes checkpoint."""
    (folder / REPORT_NAMES[0]).write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
    (folder / REPORT_NAMES[1]).write_text(report.to_markdown(), encoding="utf-8")
    if conversion.depth_config is not None:
        source = conversion.source
        has_same_base = source.is_attnres and conversion.layers is None
        base_model = None if has_same_base else source.commit and source.name
        inherited = inherited_metadata(folder / BASE_CARD_NAME, base_model)
        write_model_card(folder, base_metadata=inherited, repo_id=report.destination, on_hub=False, checkpoint=written)
    elif conversion.layers is not None:
        metadata = inherited_metadata(folder / BASE_CARD_NAME, conversion.source.commit and conversion.source.name)
        write_card_of_layers(report, metadata, folder)


def write_card_of_layers(report: ConversionReport, metadata: dict[str, Any], folder: Path):
    """Write a short card for an ordinary model with other layers than that of its source, whose card steps aside."""
    text = (
        f"# {escaped(report.destination)}\n\nIts layers are the layers {in_ranges(report.layers or [])} of"
        f" {code(report.source)}, as they are there."
    )
    if (folder / BASE_CARD_NAME).exists():
        text += f" The card of that model is `{BASE_CARD_NAME}`."
    ModelCard(f"---\n{ModelCardData(**metadata).to_yaml()}\n---\n\n{text}\n").save(folder / "README.md")


def cards_to_keep(conversion: Conversion) -> dict[str, str | None]:
    """Where the source's cards and reports go, `None` for nowhere.

    A base's card and config step aside for those of the conversion, and come back with the base. Depth maps are of the
    source, model code of an AttnRes checkpoint.
    """
    source = conversion.source
    maps = (name for name in source.companions if name.startswith("depth/") and source.is_attnres)
    # Which goes along with a config that names it, see `write_config`
    code = (*source.code, *code_files()) if source.is_attnres else ()
    stay = ("README.md", BASE_CARD_NAME, BASE_CONFIG_NAME, *REPORT_NAMES, *maps, *code)
    names: dict[str, str | None] = dict.fromkeys(stay)
    if conversion.layers is not None:  # another model, of which none of them is true
        results = (name for name in source.companions if name.startswith("evaluation/"))
        return names | dict.fromkeys(results) | {"README.md": BASE_CARD_NAME}
    if conversion.depth_config is not None:
        if not source.is_attnres:
            return names | {"README.md": BASE_CARD_NAME}
        return names | {name: name for name in ("README.md", BASE_CARD_NAME, BASE_CONFIG_NAME)}
    return names | {BASE_CARD_NAME: "README.md"}


def keep_tokenizer(source: Checkpoint, folder: Path) -> list[str]:
    """See to it that `AutoTokenizer` gives the source's tokenizer, which it may have found by the model type alone.

    Returns:
        What had to be done, for the report.
    """
    sample = read_sample()
    with quiet_loading():
        tokenizer = source.tokenizer()
        if tokenizer is None:
            return ["it has no tokenizer that loads here without running its own code"]
        expected = tokenizer(sample, verbose=False).input_ids
        try:
            written = load_tokenizer(folder)
            if written.__class__ is tokenizer.__class__ and written(sample).input_ids == expected:
                return []
        except (ValueError, OSError, KeyError):
            pass  # no tokenizer is known for the model type
        tokenizer.save_pretrained(folder)
        if load_tokenizer(folder)(sample).input_ids != expected:
            raise ValueError(f"The tokenizer of `{source.name}` does not give the same tokens once copied.")
    return [f"tokenizer saved again as `{tokenizer.__class__.__name__}`: the files do not name their class"]


def keep_processor(source: Checkpoint, folder: Path) -> list[str]:
    """The same for what makes inputs of images or sound."""
    if not {"preprocessor_config.json", "processor_config.json"} & set(source.companions):
        return []
    with quiet_loading():
        try:
            expected = AutoProcessor.from_pretrained(source.folder, trust_remote_code=False)
        except (ValueError, OSError, ImportError, KeyError) as error:
            reason = " ".join(str(error).split())[:200]
            return [f"its processor does not load here, so it was copied without a check: {reason}"]
        try:
            written = AutoProcessor.from_pretrained(folder, trust_remote_code=False)
            if type(written) is type(expected) and written.to_dict() == expected.to_dict():
                return []
        except (ValueError, OSError, KeyError):
            pass  # none is known for the model type
        expected.save_pretrained(folder)
        if type(AutoProcessor.from_pretrained(folder, trust_remote_code=False)) is not type(expected):
            raise ValueError(f"The processor of `{source.name}` does not load once copied.")
    return [f"processor saved again as `{type(expected).__name__}`: the files do not name its class"]
