# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""PreNorm checkpoint -> AttnRes checkpoint -> PreNorm checkpoint, without changing what they compute."""

import copy
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoProcessor, AutoTokenizer, PreTrainedConfig
from transformers.activations import ACT2FN

from .. import __version__
from ..configuration_attnres import AttnResConfig, check_base_model_type
from ..configuration_attnres import _rename_architectures as rename_architectures
from ..depth_probe import probe_sublayers
from ..model_cards import CODE_FILES, PIPELINE_TAGS, code_files, inherited_metadata, write_model_card
from ..modeling_attnres import (
    REMOTE_CODE_AUTO_MAP,
    AttnResForQuestionAnswering,
    AttnResForSequenceClassification,
    AttnResForTokenClassification,
)
from ..multimodal_attnres import AttnResForConditionalGeneration, AttnResMultimodalConfig
from ..multimodal_attnres import config_class_of as multimodal_config_class
from .checkpoint import (
    QUERY_NAMES,
    REPORT_NAMES,
    Checkpoint,
    check_destination,
    copy_companions,
    open_checkpoint,
    read_config_dict,
    refuse_links_out,
    whole_folder,
    write_weights,
)
from .parity import (
    VerificationReport,
    check_device,
    check_finite_weights,
    compare_with,
    quiet_loading,
    read_sample,
    read_windows,
    run_reference,
)


BASE_CARD_NAME = "README.base.md"
POSITIVE_FIELDS = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "max_position_embeddings", "num_experts_per_tok", "moe_intermediate_size"),
)
HEADS = {
    head.__name__: head
    for head in (AttnResForSequenceClassification, AttnResForTokenClassification, AttnResForQuestionAnswering)
}
MULTIMODAL_NAME = AttnResForConditionalGeneration.__name__
MODEL_TYPES = AttnResConfig.model_type, AttnResMultimodalConfig.model_type
# The first number in the name of a tensor
LAYER_NUMBERS = re.compile(r"^.*?\.(\d+)\.", re.MULTILINE)


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

    def to_dict(self) -> dict:
        verification = None if self.verification is None else self.verification.to_dict()
        return {**asdict(self), "verification": verification}

    def to_markdown(self) -> str:
        lines = [f"# {self.operation}: `{self.source}` to `{self.destination}`", ""]
        if self.base_model_type is not None:
            num_blocks = -(-self.num_sublayers // self.block_size)
            lines.append(
                f"- {self.base_model_type}, {self.num_sublayers} sublayers in {num_blocks} blocks of {self.block_size}"
                + (" (Full AttnRes)" if self.block_size == 1 else "")
            )
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


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    block_size: int | None = None,
    num_blocks: int | None = None,
    full: bool = False,
    revision: str | None = None,
    link: bool = False,
    self_contained: bool = False,
    verify: bool = True,
    verify_text: str | Path | None = None,
    device: str = "auto",
) -> ConversionReport:
    """Write the AttnRes checkpoint that computes what a PreNorm one does: its tensors and queries of zero.

    An AttnRes checkpoint whose queries are zero gets another block size in the same way. Weight files are copied byte
    for byte, so memory does not grow with the model; to verify, one model at a time is loaded.

    Args:
        source: folder or Hub id of a checkpoint of a supported family.
        destination: folder to write, which must not exist or be empty. It is there when everything is done, or not at
            all.
        block_size: sublayers per block.
        num_blocks: number of blocks, 8 if nothing else is asked for.
        full: Full AttnRes, the same as `block_size=1`.
        revision: branch, tag or commit of a Hub id.
        link: hard links in place of copies of the weight files, on one disk.
        self_contained: put the model code into the folder, for programs that do not import this package; they load it
            with `trust_remote_code=True`. Of a checkpoint that carries the code it stays so.
        verify: run both and compare; without, only names, shapes and files are checked.
        verify_text: file with the text to compare on, in place of the built-in one.
        device: where to run them, what `from_pretrained` takes as `device_map`.

    Raises:
        ValueError: for what cannot be converted, and if the result is not equal; nothing is left at `destination`.
        OSError: if files cannot be found, read or written.
    """
    if (block_size is not None) + (num_blocks is not None) + full > 1:
        given = {"block_size": block_size, "num_blocks": num_blocks, "full": full or None}
        given = ", ".join(f"`{name}={value}`" for name, value in given.items() if value is not None)
        raise ValueError(f"{given} contradict: give one of them.")
    if full:
        block_size = 1
    if block_size is None and num_blocks is None:
        num_blocks = 8
    path = check_destination(destination, source)
    check_type(read_config_dict(source, revision))
    checkpoint = open_checkpoint(source, revision)
    if checkpoint.is_multimodal and self_contained:
        raise ValueError(
            f"`{source}` cannot be self-contained: its language model is made by the code of its base, which knows no"
            " code from a folder. Without, it loads where `attnres` is installed and imported."
        )
    refuse_other_naming(checkpoint)
    check_config(checkpoint)
    check_tensors(checkpoint)

    config_class = AttnResMultimodalConfig if checkpoint.is_multimodal else AttnResConfig
    if is_attnres(checkpoint):
        operation = "Change of blocks"
        refuse_trained_queries(checkpoint, "its block size cannot change without changing what it computes")
        refuse_unscaled_eps(checkpoint, "another block size would change what it computes")
        partition = AttnResConfig.from_base_config(
            checkpoint.text_config.to_base_config(), block_size=block_size, num_blocks=num_blocks
        )
        config = copy.deepcopy(checkpoint.config)
        depth_config(config).attn_res_block_size = partition.attn_res_block_size
        added = {}
    else:
        operation = "Conversion"
        config = config_class.from_base_config(
            checkpoint.config, block_size=block_size, num_blocks=num_blocks, attn_res_scale_norm_eps=True
        )
        shape = (depth_config(config).num_sites, depth_config(config).hidden_size)
        query, key_norm = (checkpoint.prefix + name for name in QUERY_NAMES)
        added = {query: torch.zeros(shape), key_norm: torch.ones(shape)}
    check_head(checkpoint, config)
    if self_contained:
        config.auto_map = dict(REMOTE_CODE_AUTO_MAP)
    notes = ["compared on text; what reads images or sound is the base's, byte for byte"]
    return write_checkpoint(
        operation,
        checkpoint,
        path,
        config,
        add=added,
        link=link,
        verify=verify,
        verify_text=verify_text,
        device=device,
        notes=notes if checkpoint.is_multimodal else [],
    )


def check_type(config_dict: dict):
    """Raise a `ValueError` if no checkpoint of this type can be converted."""
    model_type = config_dict["model_type"]
    if model_type in MODEL_TYPES:
        return
    if isinstance(config_dict.get("text_config"), dict):
        multimodal_config_class(model_type)
    else:
        check_base_model_type(model_type)


def depth_config(config: PreTrainedConfig) -> AttnResConfig | None:
    """The config of the decoder that reads over depth, `None` if there is none."""
    config = getattr(config, "text_config", config)
    return config if isinstance(config, AttnResConfig) else None


def revert(
    source: str | Path,
    destination: str | Path,
    *,
    force: bool = False,
    revision: str | None = None,
    link: bool = False,
    verify: bool = True,
    verify_text: str | Path | None = None,
    device: str = "auto",
) -> ConversionReport:
    """Write the PreNorm checkpoint that an AttnRes one was made of: its tensors, bit for bit, without the queries.

    That is the same function if every query is zero. Otherwise what they have learned is lost: only with `force`, and
    the report tells how much that changes. Other arguments and errors as for `convert`.
    """
    path = check_destination(destination, source)
    model_type = read_config_dict(source, revision)["model_type"]
    if model_type not in MODEL_TYPES:
        raise ValueError(f"`{source}` is a `{model_type}` checkpoint, not an AttnRes one; there is nothing to revert.")
    checkpoint = open_checkpoint(source, revision)
    check_config(checkpoint)
    if not force:
        refuse_trained_queries(
            checkpoint, "without them it computes something else. `--force` writes it and measures the loss"
        )
        refuse_unscaled_eps(checkpoint, "its base computes something else, if by little. `--force` writes it")
    check_tensors(checkpoint)
    return write_checkpoint(
        "Reversal",
        checkpoint,
        path,
        checkpoint.config.to_base_config(),
        rename=lambda name: None if name.endswith(QUERY_NAMES) else name,
        link=link,
        verify=verify,
        verify_text=verify_text,
        device=device,
        may_differ=force,
    )


def refuse_trained_queries(checkpoint: Checkpoint, consequence: str):
    """Raise a `ValueError` that says how large the queries are, unless all are zero."""
    name = checkpoint.prefix + QUERY_NAMES[0]
    if name not in checkpoint.weight_map:
        raise ValueError(f"`{checkpoint.name}` lacks the tensor `{name}`, so it is no whole AttnRes checkpoint.")
    query = checkpoint.tensors([name])[name].float()
    norms = query.norm(dim=-1)
    if norms.count_nonzero():
        raise ValueError(
            f"`{checkpoint.name}` has trained queries, {norms.count_nonzero()} of {len(norms)} are not zero, the"
            f" largest of norm {norms.max():.3g} at site {norms.argmax()}: {consequence}."
        )


def refuse_unscaled_eps(checkpoint: Checkpoint, consequence: str):
    """Raise a `ValueError` if the checkpoint was not converted but trained from scratch."""
    if not checkpoint.text_config.attn_res_scale_norm_eps:
        raise ValueError(
            f"`{checkpoint.name}` has `attn_res_scale_norm_eps=False`, as models trained from scratch do:"
            f" {consequence}."
        )


def refuse_other_naming(checkpoint: Checkpoint):
    """Raise a `ValueError` for an AttnRes checkpoint of another implementation, which has queries to be kept."""
    for name in checkpoint.weight_map:
        if name.endswith("_res_proj.weight"):
            raise ValueError(
                f"`{checkpoint.name}` has depth queries of another implementation (`{name}`): use `attnres import`."
            )


def check_config(checkpoint: Checkpoint):
    """Raise a `ValueError` for values that configuration classes let through and no model can have."""
    config, name = checkpoint.text_config, checkpoint.name

    def refuse(field: str, value: Any, allowed: str):
        raise ValueError(f"config.json of `{name}` is not valid: `{field}={value!r}` must be {allowed}.")

    for field in POSITIVE_FIELDS:
        value = vars(config).get(config.attribute_map.get(field, field))  # some are of single layers
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            refuse(field, value, "a number >= 1")
    for field, value in vars(config).items():
        is_eps = field.endswith(("_eps", "epsilon")) and field != "attn_res_scale_norm_eps"
        if is_eps and value is not None and (not isinstance(value, int | float) or not 0 <= value < 1):
            refuse(field, value, "a number >= 0 and below 1")
    for field in ("hidden_act", "hidden_activation"):
        value = getattr(config, field, None)
        if value is not None and value not in ACT2FN:
            refuse(field, value, f"one of {', '.join(ACT2FN)}")
    dtype = checkpoint.config.dtype
    if dtype is not None and not getattr(dtype, "is_floating_point", False):
        refuse("dtype", dtype, "one of float32, bfloat16, float16")
    names = [name for name in checkpoint.weight_map if name.startswith(checkpoint.prefix)]
    depth = 1 + max((int(number) for number in LAYER_NUMBERS.findall("\n".join(names))), default=-1)
    # Fewer may be meant, as some carry layers that predict further tokens; and LongCat-Flash counts halves of layers
    if config.num_hidden_layers > 2 * depth or config.num_hidden_layers > depth < num_layers_of(config):
        refuse("num_hidden_layers", config.num_hidden_layers, f"at most {depth}, the layers that the weights have")
    if checkpoint.is_multimodal:
        allowed = [MULTIMODAL_NAME if is_attnres(checkpoint) else checkpoint.lm_class.__name__]
    else:
        allowed = [name for name in PIPELINE_TAGS if name != MULTIMODAL_NAME]
        if not is_attnres(checkpoint):
            allowed = rename_architectures(allowed, config.model_type, to_base=True)
    architectures = checkpoint.config.architectures
    if architectures and architectures[0] not in allowed:
        refuse("architectures", architectures, f"one of {', '.join(allowed)}")


def check_head(checkpoint: Checkpoint, config: AttnResConfig):
    """Raise a `ValueError` if a checkpoint has another head than the AttnRes model for the same task."""
    architecture = (config.architectures or [None])[0]
    if architecture not in HEADS:
        return
    with torch.device("meta"):
        model = HEADS[architecture](config)
    trunk = {id(tensor) for tensor in model.base_model.state_dict(keep_vars=True).values()}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in trunk:
            continue
        found = checkpoint.tensors([name])[name].shape if name in checkpoint.weight_map else None
        if found != tensor.shape:
            is_there = "is not there" if found is None else f"has the shape {list(found)}"
            raise ValueError(
                f"The head of `{checkpoint.name}` is not that of an {architecture}, in which `{name}` has the shape"
                f" {list(tensor.shape)}: here it {is_there}. Convert the model that it was trained from, and train a"
                " head on that."
            )


def num_layers_of(config: PreTrainedConfig) -> int:
    return len(config.sublayers_per_layer() if isinstance(config, AttnResConfig) else probe_sublayers(config))


def check_tensors(checkpoint: Checkpoint):
    """Raise a `ValueError` unless every tensor that the architecture needs is there, in its shape; reads none."""
    message = None
    with quiet_loading() as messages:
        try:
            _, info = checkpoint.auto_class.from_pretrained(
                checkpoint.folder, device_map="meta", output_loading_info=True, trust_remote_code=False
            )
        except (RuntimeError, ValueError) as error:
            # The names are in the report that transformers logs, a table of tensor, status and details
            rows = re.findall(
                r"^(\S.*?) +\| (?:MISSING|MISMATCH|CONVERSION) +\|(.*)", "\n".join(messages), re.MULTILINE
            )
            if rows:
                named = f"`{rows[0][0]}` {rows[0][1].strip()}".strip()
                message = f"tensors are missing or have another shape, among them {named}"
            else:
                message = f"it does not load: {' '.join(str(error).split())}"
        except Exception as error:
            message = f"no model can be built of its config.json: {type(error).__name__}: {error}"
        else:
            missing = sorted(info["missing_keys"])
            if missing:
                message = f"{len(missing)} tensors are missing, among them `{missing[0]}`"
    if message is not None:
        raise ValueError(f"`{checkpoint.name}` is not a whole {checkpoint.config.model_type} checkpoint: {message}.")


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
) -> ConversionReport:
    """Write, verify, describe: the part that all conversions share.

    Args:
        path: folder to write, as `check_destination` gives it.
        config: of the checkpoint to write; a dict where it is not one of transformers.
        add: tensors to add, by name.
        rename: new names of the others, `None` for those to leave out.
        may_differ: write it also if the verification shows a difference.
    """
    # What can be wrong shows before work starts
    names = cards_to_keep(source, config)
    refuse_links_out(source, [name for name in source.companions if names.get(name, name) is not None])
    inherited_metadata(source.folder / "README.md", None)
    if verify:
        read_windows(source, verify_text)
        check_device(device)
        check_finite_weights(source)
    add = add or {}
    tensor_bytes = sum(tensor.nbytes for tensor in add.values())
    with whole_folder(path, tensor_bytes if link else source.num_bytes + tensor_bytes) as folder:
        reference = run_reference(source, verify_text, device=device) if verify else None
        start = time.perf_counter()
        copy_companions(source, folder, names)
        if isinstance(config, dict):
            (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        else:
            config.save_pretrained(folder)
        if isinstance(config, AttnResConfig) and getattr(config, "auto_map", None):
            for name, content in code_files().items():
                (folder / name).write_bytes(content)
        write_weights(source, folder, add=add, rename=rename, link=link)
        if not isinstance(config, dict):
            notes = [*notes, *keep_tokenizer(source, folder), *keep_processor(source, folder)]
            written = replace(open_checkpoint(folder), name=str(path))
            check_tensors(written)
        seconds = time.perf_counter() - start

        verification = None
        if reference is not None:
            verification = compare_with(reference, written, device)
            if not verification.equal and not may_differ:
                raise ValueError(
                    f"`{path}` would not compute what `{source.name}` does, so it is not written. The first"
                    f" difference is at {verification.first_difference}; please report this.\n"
                    + verification.to_markdown()
                )
        config_dict = config if isinstance(config, dict) else config.to_dict()
        of_depth = None if isinstance(config, dict) else depth_config(config)
        report = ConversionReport(
            operation=operation,
            source=source.title,
            source_commit=source.commit,
            destination=path.name,
            model_type=config_dict["model_type"],
            base_model_type=config_dict.get("base_model_type"),
            num_sublayers=(of_depth or depth_config(source.config)).num_sites - 1,
            block_size=None if of_depth is None else of_depth.attn_res_block_size,
            tensors_added={name: list(tensor.shape) for name, tensor in add.items()},
            tensors_dropped=sorted(name for name in source.weight_map if rename(name) is None),
            left_behind=list(source.left_behind),
            num_bytes=source.num_bytes,
            seconds=seconds,
            versions={
                "attnres": __version__,
                "transformers": transformers.__version__,
                "torch": torch.__version__,
            },
            verification=verification,
            notes=list(notes),
        )
        (folder / REPORT_NAMES[0]).write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
        (folder / REPORT_NAMES[1]).write_text(report.to_markdown(), encoding="utf-8")
        if of_depth is not None:
            base_model = source.commit and source.name
            inherited = inherited_metadata(folder / BASE_CARD_NAME, None if is_attnres(source) else base_model)
            write_model_card(folder, base_metadata=inherited, repo_id=path.name)
    return report


def is_attnres(checkpoint: Checkpoint) -> bool:
    return checkpoint.config_dict["model_type"] in MODEL_TYPES


def cards_to_keep(source: Checkpoint, config: PreTrainedConfig | dict) -> dict[str, str | None]:
    """Where the source's cards and reports go, `None` for nowhere.

    A base's card steps aside for that of the conversion, and comes back with the base. Depth maps are of the source,
    model code of an AttnRes checkpoint.
    """
    maps = (name for name in source.companions if name.startswith("depth/") and is_attnres(source))
    names: dict[str, str | None] = dict.fromkeys(("README.md", BASE_CARD_NAME, *REPORT_NAMES, *maps))
    if not isinstance(config, dict) and depth_config(config) is not None:
        if not is_attnres(source):
            return names | {"README.md": BASE_CARD_NAME}
        return names | {"README.md": "README.md", BASE_CARD_NAME: BASE_CARD_NAME}
    return names | {BASE_CARD_NAME: "README.md", **dict.fromkeys(CODE_FILES)}


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
        expected = tokenizer(sample).input_ids
        try:
            written = AutoTokenizer.from_pretrained(folder)
            if written.__class__ is tokenizer.__class__ and written(sample).input_ids == expected:
                return []
        except (ValueError, OSError, KeyError):
            pass  # no tokenizer is known for the model type
        tokenizer.save_pretrained(folder)
        if AutoTokenizer.from_pretrained(folder)(sample).input_ids != expected:
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
            written = AutoProcessor.from_pretrained(folder)
            if type(written) is type(expected) and written.to_dict() == expected.to_dict():
                return []
        except (ValueError, OSError, KeyError):
            pass  # none is known for the model type
        expected.save_pretrained(folder)
        if type(AutoProcessor.from_pretrained(folder)) is not type(expected):
            raise ValueError(f"The processor of `{source.name}` does not load once copied.")
    return [f"processor saved anew as `{type(expected).__name__}`: the files do not name its class"]
