# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Checkpoint folders, opened: everything about one is checked before it is used but the values of its tensors."""

import contextlib
import fnmatch
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)

from ..base.config import base_config_class, decoder_class, has_own_classes, is_encoder_decoder, rename_architectures
from ..base.probe import STACKS, decoder_on_meta
from ..utils.ranges import in_ranges
from ..utils.untrusted import (
    PICKLES,
    check_folder,
    check_inside,
    in_one_line,
    read_json,
    read_text,
    refuse_pickle,
    stranger_errors_explained,
)
from .location import local_folder, locate, read_config_dict


INDEX_NAME = "model.safetensors.index.json"
REPORT_NAMES = ("conversion_report.json", "conversion_report.md")
# Of the configs of AttnRes models: that of a decoder, and that of a model whose language model has one
DECODER_TYPE = "attnres"
ATTNRES_TYPES = (DECODER_TYPE, "attnres_multimodal")
# The config of the base as it was, which comes back with the base
BASE_CONFIG_NAME = "config.base.json"
# Names of classes without the head of a language model. Others are those of one, if the tensors fit
OTHER_HEADS = re.compile(
    r"For(Sequence|Token|Image|Audio)Classification$|ForQuestionAnswering$|ForMaskedLM$|ForCTC$|^(?!.*LMHead).*Model$"
)
# Weights that are not read: of other formats, and pickles, which can run code when loaded
OTHER_WEIGHTS = {
    *(".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".msgpack", ".h5", ".npz", ".tflite", ".mlmodel"),
    *(".safetensors", ".gguf", ".ggml", ".onnx", ".onnx_data"),
}
# Fields of adapters by which PEFT makes tensors before it reads any
ADAPTER_SIZES = ("r", "init_r", "target_r", "num_virtual_tokens", "encoder_hidden_size", "adapter_len", "n_frequency")
ADAPTER_FILE = "adapter_model.safetensors"
# PEFT's default rank, which an adapter without low-rank updates keeps
SMALL_RANK = 8
QUERY_NAMES = ("depth_queries.query", "depth_queries.key_norm")
# What makes queries of the input, where they see it
PROJECTION_NAMES = tuple(f"depth_queries.projection{part}" for part in ("", "_down", "_up"))
ZERO_AT_FIRST = (QUERY_NAMES[0], *PROJECTION_NAMES[:2])
PICTURES = ("*.png", "*.jpg", "*.jpeg", "*.gif", "*.svg", "*.webp")
# What a checkpoint is made of beside its config and weights, by folder; nothing else is copied or uploaded, as it may
# be anything: keys, logs, notes, states of an optimizer
COMPANIONS = {
    "": (
        *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
        *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "*.model", "*.tiktoken", "tekken.json"),
        *("tokenizer.model.v*", "chat_template.jinja", "chat_template.json", "params.json", "configuration.json"),
        *("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"),
        *("recipe.yaml", "quant*_config.json", BASE_CONFIG_NAME),
        *("hf_quant_config.json", "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"),
        *("configuration_*.py", "modeling_*.py", "tokenization_*.py"),
        *("README*.md", "LICENSE*", "LICENCE*", "NOTICE*", "COPYING*", "USE_POLICY*", "CITATION*", *REPORT_NAMES),
        ".gitattributes",
    ),
    "additional_chat_templates": ("*.jinja",),
    "1_Pooling": ("config.json",),
    "assets": PICTURES,
    "figures": PICTURES,
    "images": PICTURES,
    "depth": PICTURES,  # the page and the JSON quote the text that was read
    "evaluation": ("table.md", "differences.png"),
}


def auto_class_of(base_model_type: str) -> type:
    """The Auto class by which multimodal models of a type are loaded: that of images, or one that has others too."""
    sees = CONFIG_MAPPING[base_model_type] in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if sees else AutoModelForMultimodalLM


def auto_class_for(name: str) -> Any:
    """The Auto class that loads models of one of our classes, such as `AutoModelForMaskedLM`."""
    suffix = name.removeprefix("AttnRes")
    return getattr(transformers, "AutoModel" if suffix == "Model" else f"AutoModel{suffix}", AutoModel)


def depth_config_of(config: PreTrainedConfig) -> Any:
    """The config of the decoder that reads over depth, an `AttnResConfig`; `None` if there is none."""
    configs = (config, getattr(config, "text_config", None))
    return next((found for found in configs if getattr(found, "model_type", None) == DECODER_TYPE), None)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder with a config and complete safetensors weights.

    Attributes:
        name: the name that the user gave, a folder or a Hub id.
        folder: where its files are.
        commit: commit of a Hub id.
        config_dict: the content of `config.json`.
        weight_map: file of every tensor, by its name.
        companions: other files that belong to the checkpoint, relative to the folder, such as those of a tokenizer.
        code: those of them that its `auto_map` needs.
        left_behind: all other files, such as weights in other formats. A folder without any companion is listed once.
        layers: numbers of the layers that its model is run with; `None` for all.
    """

    name: str
    folder: Path
    commit: str | None
    config_dict: dict
    weight_map: dict[str, str]
    companions: tuple[str, ...]
    code: tuple[str, ...]
    left_behind: tuple[str, ...]
    layers: tuple[int, ...] | None = None

    @functools.cached_property
    def config(self) -> PreTrainedConfig:
        with config_errors_explained(self.name):
            return AutoConfig.from_pretrained(self.folder, trust_remote_code=False)

    @property
    def title(self) -> str:
        """Its id on the Hub, or the name of its folder without the path, for files that others will read."""
        title = self.name if self.commit is not None else Path(self.name).absolute().name
        return title if self.layers is None else f"{title}, layers {in_ranges(self.layers)}"

    @property
    def shards(self) -> list[str]:
        return sorted(set(self.weight_map.values()))

    @property
    def text_config(self) -> PreTrainedConfig:
        """The config of the decoder: that of the language model of a multimodal model, else the config itself."""
        return self.config.text_config if self.is_multimodal else self.config

    @property
    def is_multimodal(self) -> bool:
        """Whether the decoder is the language model of a multimodal model."""
        return "text_config" in type(self.config).sub_configs

    @property
    def is_attnres(self) -> bool:
        return self.config_dict["model_type"] in ATTNRES_TYPES

    @property
    def depth_config(self) -> Any:
        """The `AttnResConfig` of the decoder; `None` if it does not read over depth."""
        return depth_config_of(self.config)

    @property
    def base_model_type(self) -> str:
        return getattr(self.config, "base_model_type", self.config.model_type)

    @functools.cached_property
    def own_class_name(self) -> str | None:
        """Where the base has its own heads, as with encoders, the class of ours for its task; `None` for others.

        `AttnResModel` if it says none.
        """
        architectures = self.config_dict.get("architectures") or ["AttnResModel"]
        if not has_own_classes(self.base_model_type) and not architectures[0].endswith("ForMaskedLM"):
            return None
        renamed = rename_architectures(architectures, self.base_model_type, to_base=False) or []
        return renamed[0]

    @functools.cached_property
    def lm_class(self) -> type[PreTrainedModel]:
        """The class of the base's causal language model, of its multimodal model, or of one with an encoder."""
        base_model_type = self.base_model_type
        if self.is_multimodal:
            return MODEL_FOR_MULTIMODAL_LM_MAPPING[CONFIG_MAPPING[base_model_type]]
        if has_own_classes(base_model_type):
            return decoder_class(base_config_class(base_model_type))
        return MODEL_FOR_CAUSAL_LM_MAPPING[base_config_class(base_model_type)]

    @property
    def auto_class(self) -> Any:
        """The Auto class that loads it: with its head, or without if it has none of a language model."""
        if self.is_multimodal:
            return auto_class_of(self.base_model_type)
        if self.own_class_name is not None:
            return auto_class_for(self.own_class_name)
        return AutoModelForCausalLM if self.has_lm_head else AutoModel

    @functools.cached_property
    def prefix(self) -> str:
        """The prefix of the names of the decoder's tensors. Empty if the checkpoint is only a decoder."""
        if self.is_multimodal:
            return self._prefix_of_language_model()
        # What a class says of its prefix is not always so, and then it is the usual one
        prefixes = (f"{self.lm_class.base_model_prefix}.", "model.")
        return next((p for p in prefixes if any(name.startswith(p) for name in self.weight_map)), "")

    def _prefix_of_language_model(self) -> str:
        """Found by its embedding, as files may have other names than the model that is loaded from them."""
        config = self.text_config
        decoder = decoder_on_meta(config.to_base_config() if config.model_type == DECODER_TYPE else config)
        embedding = decoder.get_input_embeddings().weight
        name = next(name for name, parameter in decoder.named_parameters() if parameter is embedding)
        prefixes = [found.removesuffix(name) for found in self.weight_map if f".{found}".endswith(f".{name}")]
        if len(prefixes) > 1:
            raise ValueError(
                f"`{self.name}` has {len(prefixes)} tensors named `...{name}`, the embedding of its language model,"
                " where there should be one."
            )
        return prefixes[0] if prefixes else ""  # of other names, which transformers knows, or it is missing

    @functools.cached_property
    def query_prefixes(self) -> list[str]:
        """The prefix of the names of the depth queries, of an encoder-decoder one for each stack that it has.

        Without queries, that of the decoder's tensors.
        """
        if is_encoder_decoder(self.base_model_type):
            prefixes = [f"{self.prefix}{stack}." for stack in STACKS]
            return [prefix for prefix in prefixes if any(name.startswith(prefix) for name in self.weight_map)]
        found = [name.removesuffix(QUERY_NAMES[1]) for name in self.weight_map if name.endswith(QUERY_NAMES[1])]
        return [found[0] if found else self.prefix]

    def query_names(self, names: Sequence[str]) -> list[str]:
        """The full names of those tensors of the depth queries that are there, of `ZERO_AT_FIRST` for instance."""
        full = [prefix + name for prefix in self.query_prefixes for name in names]
        return [name for name in full if name in self.weight_map]

    @property
    def has_lm_head(self) -> bool:
        """Whether it has the head of a language model. Otherwise only its trunk is used."""
        architectures = self.config_dict.get("architectures") or [""]  # a list, see `read_config_dict`
        if self.own_class_name is not None:
            return False
        return (self.is_multimodal or bool(self.prefix)) and OTHER_HEADS.search(architectures[0]) is None

    @property
    def num_bytes(self) -> int:
        return sum((self.folder / name).stat().st_size for name in [*self.shards, *self.companions])

    def facts_as_source(self) -> dict[str, Any]:
        """The fields of a `ConversionReport` that describe the source."""
        return {
            "source": self.title,
            "source_commit": self.commit,
            "left_behind": list(self.left_behind),
            "num_bytes": self.num_bytes,
        }

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer; `None` if there is none, or it cannot be loaded without running code of the checkpoint."""
        if not {"tokenizer.json", "tokenizer_config.json", "tokenizer.model"} & set(self.companions):
            return None
        try:
            return load_tokenizer(self.folder)
        except (ValueError, OSError):
            return None

    def tensors(self, names: list[str]) -> dict[str, torch.Tensor]:
        """Load the tensors of these names."""
        found = {}
        for shard in sorted({self.weight_map[name] for name in names}):
            with safe_open(self.folder / shard, framework="pt") as file:
                found.update({name: file.get_tensor(name) for name in names if self.weight_map[name] == shard})
        return found


def different_tensors(first: Checkpoint, second: Checkpoint) -> list[str]:
    """Names of tensors that only one of two checkpoints has, or that are not the same bit for bit, one in memory."""
    different = sorted(first.weight_map.keys() ^ second.weight_map.keys())
    for name in sorted(first.weight_map.keys() & second.weight_map.keys()):
        a, b = (checkpoint.tensors([name])[name] for checkpoint in (first, second))
        if (
            a.dtype != b.dtype
            or a.shape != b.shape
            or not torch.equal(*(t.flatten().view(torch.uint8) for t in (a, b)))
        ):
            different.append(name)
    return different


def open_checkpoint(
    source: str | Path,
    revision: str | None = None,
    *,
    follow_links: bool = False,
    check_type: Callable[[str], None] | None = None,
) -> Checkpoint:
    """Open a checkpoint in a folder or on the Hub, and check everything except the values of its tensors.

    Args:
        source: folder or Hub id.
        revision: branch, tag or commit of a Hub id.
        follow_links: whether links that point out of the folder are allowed. Only for files that are read, not copied.
        check_type: called with the model type before weights are downloaded. It raises if the type is not wanted.

    Raises:
        OSError: if files are missing or cannot be read.
        ValueError: if the files are not valid. The message names the file and the way out.
    """
    location = locate(source, revision)
    config_dict = location.config_dict()
    if check_type is not None:
        check_type(config_dict["model_type"])
    location.download([f"*{suffix}" for suffix in OTHER_WEIGHTS - {".safetensors"}] + ["consolidated*"])
    folder = location.folder
    check_folder(folder, follow_links=follow_links, parsed=("config.json",))
    if (folder / "adapter_config.json").exists():
        raise ValueError(
            f"`{source}` holds both an adapter and full weights, and transformers would load the one onto the other."
            " Remove `adapter_config.json` if the adapter is merged into the weights, or merge it:"
            " `AutoPeftModelForCausalLM.from_pretrained(...).merge_and_unload().save_pretrained(...)`."
        )
    files = sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file() or path.is_symlink()
    )
    weight_map = _read_weight_map(folder, files, source)
    used = {"config.json", INDEX_NAME, *weight_map.values()}
    others = [name for name in files if name not in used]
    code = _code_of(folder, others, config_dict)
    companions = [name for name in others if is_companion(name) or name in code]
    folders = {name.split("/")[0] for name in [*used, *companions] if "/" in name}
    left_behind = {
        name if "/" not in name or name.split("/")[0] in folders else name.split("/")[0] + "/"
        for name in set(others) - set(companions)
    }
    return Checkpoint(
        name=str(source),
        folder=folder,
        commit=location.commit,
        config_dict=config_dict,
        weight_map=weight_map,
        companions=tuple(companions),
        code=tuple(sorted(code)),
        left_behind=tuple(sorted(left_behind)),
    )


def _code_of(folder: Path, files: Sequence[str], config_dict: dict) -> set[str]:
    """Which of the files in a folder are the code that its `auto_map` names, and what that code imports there."""
    auto_map = config_dict.get("auto_map")
    references = auto_map.values() if isinstance(auto_map, dict) else ()
    waiting = [reference.split(".")[0] for reference in references if isinstance(reference, str)]
    found: set[str] = set()
    while waiting:
        name = f"{waiting.pop()}.py"
        if name in found or name not in files:
            continue
        found.add(name)
        with contextlib.suppress(ValueError):  # not text, which whoever runs it will hear
            waiting += re.findall(r"^\s*from\s+\.(\w+)\s+import", read_text(folder / name), re.MULTILINE)
    return found


def is_companion(name: str) -> bool:
    """Whether a file belongs to a checkpoint by its name, relative to the folder."""
    parent, _, base = name.rpartition("/")
    return any(fnmatch.fnmatchcase(base, pattern) for pattern in COMPANIONS.get(parent, ()))


def refuse_links_out(checkpoint: Checkpoint, names: Iterable[str]):
    """Raise a `ValueError` if one of the files is a link out of the folder, see `check_inside`."""
    check_inside(checkpoint.folder, names, checkpoint.name)


@contextlib.contextmanager
def config_errors_explained(name: str) -> Iterator[None]:
    """A `ValueError` of one line that names the checkpoint, for whatever a bad config makes transformers raise."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"config.json of `{name}` is not valid: {in_one_line(error)}") from error


def load_config(source: str | Path, revision: str | None = None) -> PreTrainedConfig:
    """The configuration of a checkpoint, whose own code is not run.

    Raises:
        OSError: if there is none.
        ValueError: if it is not valid.
    """
    read_config_dict(source, revision)  # tells at once what is wrong with it
    place = local_folder(source, revision) or source
    with config_errors_explained(str(source)):
        return AutoConfig.from_pretrained(place, revision=revision or "main", trust_remote_code=False)


def read_decoder_config(model: str, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The config of a decoder, that inside of it if the model is made of several; otherwise as `read_config`."""
    return read_config(model, revision, trust_remote_code).get_text_config(decoder=True)


def read_config(model: str, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The config of a model.

    Args:
        model: a folder or a Hub id.
        revision: branch, tag or commit of a Hub id.
        trust_remote_code: whether to run code that the model brings. Its classes are registered with the Auto classes
            of this process, so that `AttnResConfig.from_base_config` takes the config.

    Raises:
        ValueError: if its config is one that transformers refuses, or its code is for a model type of transformers.
        OSError: if there is no such config.
    """
    if not trust_remote_code:
        return load_config(model, revision)
    read_config_dict(model, revision)  # tells at once what is wrong with it
    with config_errors_explained(model):
        config = AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=True)
    auto_map = getattr(config, "auto_map", None) or {}
    if "AutoModelForCausalLM" in auto_map:
        if config.model_type in CONFIG_MAPPING_NAMES:
            raise ValueError(
                f"The code of `{model}` calls its model type {config.model_type!r}, as transformers calls one of its"
                " own. Give it another `model_type` in its code and in config.json, or leave out"
                " `trust_remote_code` to probe transformers' model."
            )
        AutoConfig.register(config.model_type, type(config), exist_ok=True)
        for auto_class in (AutoModel, AutoModelForCausalLM):
            if auto_class.__name__ in auto_map:
                reference = auto_map[auto_class.__name__]
                model_class = get_class_from_dynamic_module(reference, model, revision=revision)
                auto_class.register(type(config), model_class, exist_ok=True)
    return config


def load_tokenizer(source: str | Path, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint, whose own code is not run.

    Raises:
        ValueError: if there is none that loads here.
    """
    place = local_folder(source, revision) or source
    with stranger_errors_explained(f"`{source}` has no tokenizer that loads here"):
        return AutoTokenizer.from_pretrained(place, revision=revision or "main", trust_remote_code=False)


def load_language_model(source: str | Path, *, follow_links: bool = True, **kwargs: Any) -> PreTrainedModel:
    """A language model from safetensors, without code of the checkpoint's own.

    Args:
        follow_links: as for `open_checkpoint`.
        kwargs: of `from_pretrained`.

    Raises:
        ValueError: if it is not whole, or has its weights in a pickle.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        check_folder(folder, follow_links=follow_links)
        source = folder
    check_is_whole(source, revision=kwargs.get("revision"))
    with stranger_errors_explained(f"`{source}` does not load"):
        return AutoModelForCausalLM.from_pretrained(source, trust_remote_code=False, use_safetensors=True, **kwargs)


def check_is_whole(source: str | Path, auto_class: Any = AutoModelForCausalLM, revision: str | None = None):
    """Raise a `ValueError` if tensors are missing, which would be random, or have other shapes than the config.

    Nothing is loaded, because memory would be taken for the shapes of the config.
    """
    with stranger_errors_explained(f"`{source}` does not load"):
        _, info = auto_class.from_pretrained(
            source,
            revision=revision or "main",
            device_map="meta",
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"`{source}` does not load: it has no values for {len(missing)} of its tensors ({', '.join(missing[:3])}"
            f"{' ...' if len(missing) > 3 else ''}), which would be random."
        )


def check_adapter(folder: str | Path):
    """Look at the folder of a PEFT adapter before PEFT does.

    Raises:
        ValueError: for what `check_folder` refuses, and for sizes in its config that its tensors do not have.
        OSError: if files are missing.
    """
    folder = Path(folder).expanduser()
    check_folder(folder, follow_links=True)
    if not (folder / "adapter_config.json").exists():
        raise OSError(f"`{folder}` holds no adapter_config.json, so it is not a PEFT adapter.")
    if not (folder / ADAPTER_FILE).exists():
        raise OSError(f"`{folder}` holds no {ADAPTER_FILE}, so it is not a complete PEFT adapter.")
    config = read_json(folder / "adapter_config.json")
    tensor_names(folder / ADAPTER_FILE)  # whether it is whole
    with safe_open(folder / ADAPTER_FILE, framework="pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}
    ranks = {shape[0] for name, shape in shapes.items() if "lora_A" in name or "lora_embedding_A" in name}
    largest = max(ranks or {size for shape in shapes.values() for size in shape}, default=0)
    sizes = {name: config.get(name) for name in ADAPTER_SIZES}
    pattern = config.get("rank_pattern")
    sizes |= {f"rank_pattern[{name}]": size for name, size in pattern.items()} if isinstance(pattern, dict) else {}
    for name, size in sizes.items():
        if isinstance(size, int | float) and size > max(largest, SMALL_RANK):
            raise ValueError(
                f"adapter_config.json of `{folder}` is not valid: `{name}={size}` is more than its tensors have,"
                f" {largest}."
            )


def _read_weight_map(folder: Path, files: list[str], source: str | Path) -> dict[str, str]:
    """The file of every tensor, as transformers would find them, checked against the files themselves."""
    if "model.safetensors" in files:  # comes before an index, as in transformers
        return dict.fromkeys(tensor_names(folder / "model.safetensors"), "model.safetensors")
    if INDEX_NAME not in files:
        pickled = [name for name in files if Path(name).suffix in PICKLES]
        if pickled:
            refuse_pickle(source, pickled[0])
        raise OSError(f"`{source}` holds neither model.safetensors nor {INDEX_NAME}.")
    weight_map = read_json(folder / INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"`{folder / INDEX_NAME}` has no `weight_map`.")
    for name in sorted(set(map(str, weight_map.values()))):
        if name not in files:  # which also keeps names like `../x` out
            raise OSError(f"`{INDEX_NAME}` of `{source}` names the file `{name}`, which is not there.")
        listed = {tensor for tensor, file in weight_map.items() if file == name}
        present = set(tensor_names(folder / name))
        if listed - present:
            raise ValueError(
                f"`{name}` of `{source}` lacks the tensor `{min(listed - present)}`, which the index lists."
            )
        if present - listed:
            raise ValueError(
                f"`{name}` of `{source}` holds the tensor `{min(present - listed)}`, which the index does not list"
                " as its own. Rewrite the index: `from_pretrained(...).save_pretrained(...)`."
            )
    return weight_map


def tensor_names(path: Path) -> list[str]:
    """The tensors of a safetensors file, after a look whether it is whole."""
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except SafetensorError as error:
        raise ValueError(f"`{path}` is truncated or not a safetensors file ({error}). Download it again.") from None
