# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Writing the checkpoint that comes of a conversion: what all of them share, from the first check to the card."""

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoProcessor, PreTrainedConfig

from .. import __version__
from ..checkpoints.checkpoint import (
    BASE_CONFIG_NAME,
    REPORT_NAMES,
    Checkpoint,
    load_tokenizer,
    open_checkpoint,
    refuse_links_out,
)
from ..checkpoints.reports import ConversionReport, SourceWeights
from ..configuration_attnres import AttnResConfig
from ..data.text import read_sample
from ..depth.reads import ReadConfig
from ..model_cards.card import inherited_metadata, weights_of, write_model_card
from ..utils.files import atomic_folder
from .checks import check_tensors, depth_config, is_attnres
from .parity import check_device, check_finite_weights, compare_with, read_windows, run_reference
from .running import quiet_loading
from .weights import copy_companions, write_weights


BASE_CARD_NAME = "README.base.md"


def write_checkpoint(
    operation: str,
    source: Checkpoint,
    path: Path,
    config: PreTrainedConfig | dict,
    *,
    add: dict[str, torch.Tensor] | None = None,
    rename: Callable[[str], str | None] = lambda name: name,
    link: bool = False,
    verify: bool = False,
    verify_text: str | Path | None = None,
    device: str = "auto",
    may_differ: bool = False,
    notes: Sequence[str] = (),
    weights: SourceWeights | None = None,
    files: dict[str, Path] | None = None,
) -> ConversionReport:
    """Write, verify, describe: the part that all conversions share.

    Args:
        path: folder to write, as `check_destination` gives it.
        config: of the checkpoint to write; a dict where it is not one of transformers.
        add: tensors to add, by name.
        rename: new names of the others, `None` for those to leave out.
        may_differ: write it also if the verification shows a difference.
        weights: what the source's were made from, where that does not show in its files.
        files: to copy under these names, after the config has been written.
    """
    names, add = cards_to_keep(source, config), add or {}
    weights = weights or weights_of(source)
    notes = notes if weights is None else [weights.note(), *notes]
    check_before_writing(source, names)
    if verify:
        check_before_verifying(source, verify_text, device)
    tensor_bytes = sum(tensor.nbytes for tensor in add.values())
    way_out = " Within one disk `--link` needs next to nothing."
    with atomic_folder(path, tensor_bytes if link else source.num_bytes + tensor_bytes, way_out) as folder:
        reference = run_reference(source, verify_text, device=device) if verify else None
        start = time.perf_counter()
        copy_companions(source, folder, names)
        write_config(config, folder)
        for name, path_of_file in (files or {}).items():
            shutil.copyfile(path_of_file, folder / name)
        write_weights(source, folder, add=add, rename=rename, link=link)
        if not isinstance(config, dict):
            notes = [*notes, *keep_tokenizer(source, folder), *keep_processor(source, folder)]
            written = replace(open_checkpoint(folder), name=str(path))
            check_tensors(written)
        seconds = time.perf_counter() - start

        verification = None if reference is None else compare_with(reference, written, device)
        if not (verification is None or verification.equal or may_differ):
            raise ValueError(
                f"`{path}` would not compute what `{source.name}` does, so it is not written. The first difference is"
                f" at {verification.first_difference}; please report this.\n" + verification.to_markdown()
            )
        report = ConversionReport(
            operation=operation,
            destination=path.name,
            **facts_of_source(source),
            **facts_of_config(source, config),
            tensors_added={name: list(tensor.shape) for name, tensor in add.items()},
            tensors_dropped=sorted(name for name in source.weight_map if rename(name) is None),
            seconds=seconds,
            versions={"attnres": __version__, "transformers": transformers.__version__, "torch": torch.__version__},
            verification=verification,
            notes=list(notes),
            weights=weights,
        )
        write_report_and_card(report, source, config, folder)
    return report


def check_before_writing(source: Checkpoint, names: dict[str, str | None]):
    """Raise a `ValueError` for files that may not be copied, and for a card that cannot be read.

    Args:
        names: as `cards_to_keep` gives them.
    """
    refuse_links_out(source, [name for name in source.companions if names.get(name, name) is not None])
    inherited_metadata(source.folder / "README.md", None)


def check_before_verifying(source: Checkpoint, verify_text: str | Path | None, device: str):
    """Raise a `ValueError` for a text, a device or weights with which nothing can be compared."""
    read_windows(source, verify_text)
    check_device(device)
    check_finite_weights(source)


def write_config(config: PreTrainedConfig | dict, folder: Path):
    """Write `config.json`, and beside it the code of the model if the config names it."""
    if isinstance(config, dict):
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        return
    config.save_pretrained(folder)


def facts_of_source(source: Checkpoint) -> dict[str, Any]:
    return {
        "source": source.title,
        "source_commit": source.commit,
        "left_behind": list(source.left_behind),
        "num_bytes": source.num_bytes,
    }


def facts_of_config(source: Checkpoint, config: PreTrainedConfig | dict) -> dict[str, Any]:
    """Types and blocks of what is written; where that has no blocks, the number of sublayers is the source's."""
    config_dict = config if isinstance(config, dict) else config.to_dict()
    of_depth = written_depth_config(config)
    return {
        "model_type": config_dict["model_type"],
        "base_model_type": config_dict.get("base_model_type"),
        "num_sublayers": (of_depth or depth_config(source.config)).num_sites - 1,
        "block_size": None if of_depth is None else of_depth.attn_res_block_size,
        "read": "" if of_depth is None else ReadConfig.of(of_depth).in_words(),
    }


def written_depth_config(config: PreTrainedConfig | dict) -> AttnResConfig | None:
    """`depth_config` of a checkpoint to write; `None` also for one that is not transformers'."""
    return None if isinstance(config, dict) else depth_config(config)


def write_report_and_card(report: ConversionReport, source: Checkpoint, config: PreTrainedConfig | dict, folder: Path):
    """Write the report as JSON and Markdown, and the model card of an AttnRes checkpoint."""
    (folder / REPORT_NAMES[0]).write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
    (folder / REPORT_NAMES[1]).write_text(report.to_markdown(), encoding="utf-8")
    if written_depth_config(config) is not None:
        base_model = source.commit and source.name
        inherited = inherited_metadata(folder / BASE_CARD_NAME, None if is_attnres(source) else base_model)
        write_model_card(folder, base_metadata=inherited, repo_id=report.destination, on_hub=False)


def cards_to_keep(source: Checkpoint, config: PreTrainedConfig | dict) -> dict[str, str | None]:
    """Where the source's cards and reports go, `None` for nowhere.

    A base's card and config step aside for those of the conversion, and come back with the base. Depth maps are of the
    source, model code of an AttnRes checkpoint.
    """
    maps = (name for name in source.companions if name.startswith("depth/") and is_attnres(source))
    code = source.code if is_attnres(source) else ()  # which goes along with the config, see `write_config`
    stay = ("README.md", BASE_CARD_NAME, BASE_CONFIG_NAME, *REPORT_NAMES, *maps, *code)
    names: dict[str, str | None] = dict.fromkeys(stay)
    if written_depth_config(config) is not None:
        if not is_attnres(source):
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
            return ["no tokenizer came with it that loads here, and without running code of its own"]
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
    return [f"tokenizer saved anew as `{tokenizer.__class__.__name__}`: the files do not name their class"]


def keep_processor(source: Checkpoint, folder: Path) -> list[str]:
    """The same for what makes inputs of images or sound."""
    if not {"preprocessor_config.json", "processor_config.json"} & set(source.companions):
        return []
    with quiet_loading():
        try:
            expected = AutoProcessor.from_pretrained(source.folder, trust_remote_code=False)
        except (ValueError, OSError, ImportError, KeyError) as error:
            reason = " ".join(str(error).split())[:200]
            return [f"its processor does not load here, so it was copied unseen: {reason}"]
        try:
            written = AutoProcessor.from_pretrained(folder, trust_remote_code=False)
            if type(written) is type(expected) and written.to_dict() == expected.to_dict():
                return []
        except (ValueError, OSError, KeyError):
            pass  # none is known for the model type
        expected.save_pretrained(folder)
        if type(AutoProcessor.from_pretrained(folder, trust_remote_code=False)) is not type(expected):
            raise ValueError(f"The processor of `{source.name}` does not load once copied.")
    return [f"processor saved anew as `{type(expected).__name__}`: the files do not name its class"]
