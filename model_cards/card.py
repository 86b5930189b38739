# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Model cards of AttnRes checkpoints, made from the files in their folders.

`card.md.jinja` is the template. Cards of some checkpoints are in the same folder.
"""

from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import torch
from huggingface_hub import HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from huggingface_hub.repocard_data import eval_results_to_model_index
from huggingface_hub.utils import validate_repo_id
from safetensors import safe_open
from transformers import AutoModelForImageTextToText

from ..base.probe import STACKS
from ..checkpoints.checkpoint import REPORT_NAMES, ZERO_AT_FIRST, Checkpoint, auto_class_for, open_checkpoint
from ..checkpoints.fingerprint import checkpoint_fingerprint
from ..checkpoints.remote_code import code_metadata
from ..checkpoints.reports import SourceWeights, VerificationReport
from ..configuration_attnres import AttnResConfig
from ..depth.reads import ReadConfig
from ..utils.files import write_file
from ..utils.installation import ADDRESS, how_to_install
from ..utils.markup import Markdown, code, escaped, plain_markdown, render, sentence
from ..utils.ranges import in_ranges
from ..utils.untrusted import file_inside, in_one_line, parse_json, parse_yaml, read_inside
from .example import example_in


if TYPE_CHECKING:
    from ..modeling_attnres import AttnResPreTrainedModel


PIPELINE_TAGS = {
    "AttnResForCausalLM": "text-generation",
    "AttnResForConditionalGeneration": "image-text-to-text",
    "AttnResForMaskedLM": "fill-mask",
    "AttnResForSeq2SeqLM": "text2text-generation",
    "AttnResForSpeechSeq2Seq": "automatic-speech-recognition",
    "AttnResForImageClassification": "image-classification",
    "AttnResForAudioClassification": "audio-classification",
    "AttnResForCTC": "automatic-speech-recognition",
    "AttnResForSequenceClassification": "text-classification",
    "AttnResForTokenClassification": "token-classification",
    "AttnResForQuestionAnswering": "question-answering",
    "AttnResModel": "feature-extraction",
}
TAGS = ("attnres", "attention-residuals", "arxiv:2603.15031")
# In the metadata of a card: what the weights were made from, see `SourceWeights`
WEIGHTS_ENTRY = "attnres_source_weights"
# Of the base's metadata, what holds for a conversion of it
INHERITED = ("license", "license_name", "license_link", "language", WEIGHTS_ENTRY)
# Of a table of `attnres eval`, which has some kilobytes
MAX_TABLE_BYTES = 2**20


@dataclass(frozen=True)
class CardContent:
    """What the card of an AttnRes model says.

    Args:
        config: of the model, or of the language model in a multimodal one.
        query: the queries, or all that is zero at first in what makes them, `[sites, n]`.
        repo_id: what to load the model by in the examples.
        metadata: entries of the card's metadata, such as `base_model` and `license`.
        report, parity: what `conversion_report.json` holds, and its verification as Markdown.
        evaluation: a table, as Markdown, whose links and HTML are shown as text.
        weights: what the model's were made from, where that was not a checkpoint of plain numbers.
        figures: paths of pictures relative to the card.
        inspection: what they were drawn from, see `_inspection`.
        differences: whether there is a plot of the evaluation.
        training: of a fine-tuned model `base`, `mode`, `dataset`, `steps`, and the held-out loss `before` and `after`.
        multimodal: the name of the Auto class by which a multimodal model is loaded, with the code of its base.
        with_code: whether the code of the model goes with it.
    """

    config: AttnResConfig
    query: torch.Tensor
    title: str
    repo_id: str
    metadata: dict[str, Any] = field(default_factory=dict)
    report: dict[str, Any] | None = None
    parity: str | None = None
    evaluation: str | None = None
    weights: SourceWeights | None = None
    figures: list[Path] = field(default_factory=list)
    inspection: dict[str, Any] | None = None
    differences: bool = False
    training: dict[str, Any] | None = None
    multimodal: str | None = None
    with_code: bool = True


def render_model_card(content: CardContent) -> ModelCard:
    """The card of an AttnRes model."""
    config, weights = content.config, content.weights
    architecture = (config.architectures or ["AttnResForCausalLM"])[0]
    metadata = {
        **code_metadata(),
        "library_name": "transformers",
        "pipeline_tag": PIPELINE_TAGS[architecture],
        **content.metadata,
    }
    tags = metadata.get("tags") or []
    tags = [tags] if isinstance(tags, str) else tags
    metadata["tags"] = list(dict.fromkeys([*tags, *TAGS]))
    norms = content.query.float().norm(dim=-1)
    is_made_of_other = is_made_of_other_weights(metadata, content.report, weights)
    is_untrained = not norms.any() and content.training is None
    if weights is not None and is_made_of_other and weights.quantized and is_untrained:
        metadata.setdefault("base_model_relation", "quantized")  # as the Hub has it; otherwise it takes a fine-tune
    shown = {name: value for name, value in vars(content).items() if name not in ("query", "metadata")}
    shown |= {
        "parity": None if content.parity is None else Markdown(content.parity),
        "evaluation": None if content.evaluation is None else plain_markdown(content.evaluation),
        "figures": [_picture(path) for path in content.figures],
    }
    return _rendered(
        "card.md.jinja",
        metadata,
        base_model=linked_base(metadata),
        is_made_of_other=is_made_of_other,
        example=example_in(metadata),
        layers=in_ranges((content.report or {}).get("layers") or []),
        read=sentence(ReadConfig.of(config).in_words()),
        query_norm=norms.max().item(),
        num_trained=norms.count_nonzero().item(),
        stacks=_stacks(config),
        auto_class=auto_class_for(architecture).__name__,
        processor=_processor(architecture, config),
        **shown,
    )


def _processor(architecture: str, config: AttnResConfig) -> str:
    """The Auto class of what makes the inputs of a model."""
    if architecture in ("AttnResForSpeechSeq2Seq", "AttnResForCTC"):
        return "AutoProcessor"
    if hasattr(config, "num_mel_bins") or hasattr(config, "feat_extract_norm"):
        return "AutoFeatureExtractor"
    return "AutoTokenizer" if hasattr(config, "vocab_size") else "AutoImageProcessor"


def _stacks(config: AttnResConfig) -> list[dict[str, Any]]:
    """Of each stack of layers its name, if there are two, and how its sublayers are divided into blocks."""
    stacks, size = config.sublayers_of_stacks(), config.attn_res_block_size
    found = []
    for name, sublayers in zip(("",) if len(stacks) == 1 else STACKS, stacks):
        of_three = "ACM" if name else "SSS"  # behind an encoder
        kinds = "".join({2: "AM", 3: of_three}.get(count, "S" * count) for count in sublayers)
        legends = {
            "A": "A: attention, M: MLP",
            "C": "C: attention to the encoder",
            "S": "S: all that a layer adds at once",
        }
        found.append(
            {
                "name": name,
                "num_sublayers": len(kinds),
                "blocks": [" " * start + kinds[start : start + size] for start in range(0, len(kinds), size)],
                "short": len(kinds) % size,
                "legend": ", ".join(legend for kind, legend in legends.items() if kind in kinds),
            }
        )
    return found


def _rendered(template: str, metadata: dict[str, Any], **values: Any) -> ModelCard:
    """A card of a template, by which everything is escaped that is not ours; metadata are, as YAML."""
    values = {name: _in_words(value) if isinstance(value, SourceWeights) else value for name, value in values.items()}
    try:
        card_data = Markdown(ModelCardData(**metadata).to_yaml())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"The metadata of the card are not valid ({type(error).__name__}: {error}).") from None
    return ModelCard(
        render(
            __package__,
            template,
            card_data=card_data,
            how_to_install=lambda *extra: Markdown(how_to_install(*extra)),
            attnres=Markdown("`attnres`" if ADDRESS is None else f"[`attnres`]({ADDRESS})"),
            license=_license(metadata),
            **values,
        )
    )


def _license(metadata: dict[str, Any]) -> str | None:
    """The licence that metadata name: an identifier, or the name of one that has none."""
    name = metadata.get("license")
    return metadata.get("license_name", name) if name == "other" else name


def _in_words(weights: SourceWeights) -> dict[str, Any]:
    return {**asdict(weights), "in_words": sentence(weights.in_words())}


def is_made_of_other_weights(
    metadata: dict[str, Any], report: dict[str, Any] | None, weights: SourceWeights | None
) -> bool:
    """Whether the base that a card names has other weights than the model was made from: those before quantisation."""
    bases = metadata.get("base_model")
    source = None if report is None else report.get("source")
    return weights is not None and bool(bases) and source not in (bases if isinstance(bases, list) else [bases])


def linked_base(metadata: dict[str, Any]) -> Markdown | None:
    """The base that metadata name, the first of several, with a link if it is an id that the Hub can have."""
    base_model = metadata.get("base_model")
    base_model = next(iter(base_model), None) if isinstance(base_model, list) else base_model
    if not base_model:
        return None
    try:
        validate_repo_id(base_model)
    except HFValidationError:
        return code(base_model)
    return Markdown(f"[{escaped(base_model)}](https://huggingface.co/{quote(base_model)})")


def _picture(path: Path) -> Markdown:
    return Markdown(f"![{escaped(path.stem.replace('_', ' '))}]({quote(path.as_posix())})")


def write_adapter_card(
    folder: str | Path, *, title: str, repo_id: str, metadata: dict[str, Any], training: dict[str, Any]
) -> Path:
    """Write `README.md` of a PEFT adapter in a folder.

    Arguments as for `CardContent`; `training` also has `has_queries`, whether the base is an AttnRes model, and
    `load_in_4bit`, whether it was trained on a base of 4 bits.
    """
    tags = [training["mode"], *(TAGS if training["has_queries"] else ())]
    metadata = {"library_name": "peft", "pipeline_tag": "text-generation", **metadata, "tags": tags}
    card = _rendered(
        "adapter.md.jinja",
        metadata,
        title=title,
        repo_id=repo_id,
        training=training,
        weights=_weights_in(metadata),
    )
    path = Path(folder) / "README.md"
    card.save(path)
    return path


def write_model_card(
    folder: str | Path,
    *,
    base_metadata: dict[str, Any] | None = None,
    repo_id: str | None = None,
    title: str | None = None,
    on_hub: bool | None = None,
    evaluation: str | Path | None = None,
    training: dict[str, Any] | None = None,
    checkpoint: Checkpoint | None = None,
) -> Path:
    """Write `README.md` of the AttnRes checkpoint in a folder; other arguments and errors as for `model_card`.

    Args:
        checkpoint: that in the folder, if it is open already.
        evaluation: a folder of `attnres eval`, whose table and plot go along and whose scores go into the metadata.
    """
    if evaluation is not None:
        from ..eval.report import model_index, read, table

        title = (repo_id or Path(folder).absolute().name).split("/")[-1]
        results = model_index(Path(evaluation), Path(folder).absolute().name, checkpoint_fingerprint(folder))
        base_metadata = {**(base_metadata or {}), "model-index": eval_results_to_model_index(title, results)}
        pictures = read_inside(Path(evaluation), "differences.png")
        _check_folder_inside(Path(folder), "evaluation")
        write_file(Path(folder) / "evaluation/table.md", table(read(Path(evaluation))))
        if pictures is not None:
            write_file(Path(folder) / "evaluation/differences.png", pictures)
    card = model_card(
        checkpoint or folder,
        base_metadata=base_metadata,
        repo_id=repo_id,
        title=title,
        on_hub=on_hub,
        training=training,
    )
    path = Path(folder) / "README.md"
    write_file(path, str(card))
    return path


def model_card(
    source: str | Path | Checkpoint,
    *,
    base_metadata: dict[str, Any] | None = None,
    repo_id: str | None = None,
    title: str | None = None,
    on_hub: bool | None = None,
    training: dict[str, Any] | None = None,
) -> ModelCard:
    """The card of an AttnRes checkpoint, from its config, queries, reports and figures.

    Entries of the metadata of a card that is there already are kept, its text is not. A table at
    `evaluation/table.md` and the pictures in `figures/` and of `attnres inspect -o FOLDER/depth` are shown.

    Args:
        source: its folder, or the checkpoint itself, opened.
        base_metadata: entries to add, such as `base_model` and `license`.
        repo_id: what to load the model by in the examples; by default the name of the folder.
        title: by default the last part of `repo_id`.
        on_hub: whether that is a repository, where the code of the model goes along; by default if it is given.
        training: as for `CardContent`.

    Raises:
        ValueError, OSError: if the folder holds no whole AttnRes checkpoint.
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    if checkpoint.depth_config is None:
        raise ValueError(f"`{checkpoint.name}` is a `{checkpoint.config.model_type}` checkpoint, not an AttnRes one.")
    folder = checkpoint.folder
    weights = weights_of(checkpoint) or _weights_in(base_metadata or {}, dequantized=True)
    report, verification = read_report(folder)
    table = read_inside(folder, "evaluation/table.md", MAX_TABLE_BYTES)
    title = title or (repo_id or folder.absolute().name).split("/")[-1]
    is_on_hub = repo_id is not None if on_hub is None else on_hub
    return render_model_card(
        CardContent(
            config=checkpoint.depth_config,
            query=_queries(checkpoint),
            title=title,
            repo_id=repo_id or title,
            metadata=_metadata(checkpoint, base_metadata or {}, weights),
            report=report,
            parity=None if verification is None else verification.to_markdown(),
            evaluation=None if table is None else table.decode(errors="replace"),
            weights=weights,
            figures=_pictures(folder),
            inspection=_inspection(folder),
            differences=file_inside(folder, "evaluation/differences.png") is not None,
            training=training,
            multimodal=checkpoint.auto_class.__name__ if checkpoint.is_multimodal else None,
            with_code=is_on_hub or (folder / "modeling_attnres.py").exists(),
        )
    )


def _queries(checkpoint: Checkpoint) -> torch.Tensor:
    """All that is zero at first in what makes its queries, `[sites, n]`."""
    tensors = checkpoint.tensors(checkpoint.query_names(ZERO_AT_FIRST))
    of_stacks = [
        [tensors[name] for name in tensors if name.startswith(prefix)] for prefix in checkpoint.query_prefixes
    ]
    return _joined(of_stacks)


def _joined(of_stacks: list[list[torch.Tensor]]) -> torch.Tensor:
    """What is zero at first in the queries of all stacks, `[sites, n]`."""
    return torch.cat([torch.cat([tensor.flatten(1) for tensor in of_stack], dim=1) for of_stack in of_stacks])


def _metadata(checkpoint: Checkpoint, base_metadata: dict[str, Any], weights: SourceWeights | None) -> dict[str, Any]:
    """The metadata of its card as it is, with those of the base, of the code and of the weights."""
    metadata = {**read_metadata(checkpoint.folder / "README.md"), **base_metadata, **code_metadata()}
    metadata.pop(WEIGHTS_ENTRY, None)
    if weights is not None:
        metadata[WEIGHTS_ENTRY] = asdict(weights)
    if checkpoint.is_multimodal:
        sees = checkpoint.auto_class is AutoModelForImageTextToText
        metadata["pipeline_tag"] = PIPELINE_TAGS["AttnResForConditionalGeneration"] if sees else "audio-text-to-text"
    return metadata


def _check_folder_inside(folder: Path, name: str):
    """Raise a `ValueError` if what is to be a folder in a folder is a link, out of it maybe."""
    if (folder / name).is_symlink():
        raise ValueError(f"`{folder / name}` is a link, to `{(folder / name).readlink()}`. Remove it.")


def _pictures(folder: Path) -> list[Path]:
    """The pictures to show, relative to the folder; errors as for `file_inside`."""
    paths = sorted(path.relative_to(folder) for part in ("depth", "figures") for path in folder.glob(f"{part}/*.png"))
    return [path for path in paths if file_inside(folder, path.as_posix()) is not None]


def read_report(folder: Path) -> tuple[dict[str, Any] | None, VerificationReport | None]:
    """What `conversion_report.json` of a checkpoint holds, and its verification.

    Raises:
        ValueError: if it is damaged, or errors as for `read_inside`.
    """
    content = read_inside(folder, REPORT_NAMES[0])
    if content is None:
        return None, None
    try:
        report = parse_json(content, "it")
        verification = report["verification"]
        verification = None if verification is None else VerificationReport.from_dict(verification)
        if verification is not None:
            verification.to_markdown()  # which needs all of it
        report["versions"]["attnres"], report["operation"], report["source"]
        in_ranges(report.get("layers") or [])
        if report.get("weights") is not None:
            SourceWeights.from_dict(report["weights"])
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"`{folder / REPORT_NAMES[0]}` is damaged ({type(error).__name__}: {error}). Remove it."
        ) from None
    return report, verification


def weights_of(checkpoint: Checkpoint) -> SourceWeights | None:
    """What the weights of a checkpoint were made from, as its report, its card or its config says.

    `None` if they were plain numbers from the start, as far as that shows. Errors as for `read_report`.
    """
    report, _ = read_report(checkpoint.folder)
    if report is not None and report.get("weights") is not None and report["weights"]["dequantized"]:
        return SourceWeights.from_dict(report["weights"])
    return _weights_in(read_metadata(checkpoint.folder / "README.md"), dequantized=True) or quantized_now(checkpoint)


def _weights_in(metadata: dict[str, Any], dequantized: bool | None = None) -> SourceWeights | None:
    """What a card's metadata say of it; nothing if that is something else."""
    try:
        weights = SourceWeights.from_dict(metadata[WEIGHTS_ENTRY])
    except (KeyError, TypeError, AttributeError):
        return None
    return weights if dequantized in (None, weights.dequantized) else None


def quantized_now(checkpoint: Checkpoint) -> SourceWeights | None:
    """What a checkpoint is, if its config says that it is quantised."""
    config = checkpoint.config_dict
    quantization = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if not isinstance(quantization, dict):
        return None
    method = str(quantization.get("quant_method", "quantised"))
    bits = next((n for n in (4, 8) if quantization.get(f"load_in_{n}bit")), quantization.get("bits"))
    types: Counter[str] = Counter()
    for shard in checkpoint.shards:
        with safe_open(checkpoint.folder / shard, framework="pt") as file:
            types.update(file.get_slice(name).get_dtype() for name in file.keys())
    kind = f"{bits} bits" if isinstance(bits, int) else method
    return SourceWeights(method, None, kind, dict(types.most_common()), quantized=True, dequantized=False)


def _inspection(folder: Path) -> dict[str, Any] | None:
    """Of the depth maps in a folder: the version they were measured with, the checkpoints, and whether this one, as it
    is now, is among them.

    Raises:
        ValueError: if their figures are damaged, or errors as for `read_inside`.
    """
    path = folder / "depth" / "depth.json"
    content = read_inside(folder, "depth/depth.json")
    if content is None:
        return None
    try:
        results = parse_json(content, f"`{path}`")
        models = [
            {"name": model["model"], "state": model.get("fingerprint") or model.get("commit")}
            for model in results["models"]
        ]
        version = results.get("attnres_version")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"`{path}` is damaged: remove it, or run `attnres inspect` again.") from None
    states = [model["state"] for model in models]
    is_current = checkpoint_fingerprint(folder) in states if any(states) else True  # older figures do not tell
    return {"version": version, "models": models, "is_current": is_current}


def read_metadata(card: Path) -> dict[str, Any]:
    """The metadata of a card; none if there is no card.

    Raises:
        ValueError: if it cannot be read, or errors as for `read_inside`.
    """
    content = read_inside(card.parent, card.name)
    if content is None:
        return {}
    try:
        block = REGEX_YAML_BLOCK.search(content.decode("utf-8-sig"))
        metadata = (parse_yaml(block[2], "its metadata") if block else None) or {}
        if not isinstance(metadata, dict) or not all(isinstance(name, str) for name in metadata):
            raise ValueError("its metadata is no mapping of names")
        for name in ("tags", "base_model", "language"):
            value = metadata.get(name) or []
            if not all(isinstance(item, str) for item in (value if isinstance(value, list) else [value])):
                raise ValueError(f"`{name}: {value!r:.60}` in its metadata is no text and no list of texts")
        ModelCardData(**metadata)
    except Exception as error:  # of many kinds, of what is in it
        raise ValueError(f"`{card}` cannot be read, mend or remove it: {in_one_line(error)}") from None
    return metadata


def inherited_metadata(base_card: Path, base_model: str | None) -> dict[str, Any]:
    """What a card takes over from that of the base: licence, languages, and what the base's weights were made from,
    as the report beside it says as well; and the base itself if it has an id. Errors as for `read_metadata`.
    """
    metadata = read_metadata(base_card)
    report, _ = read_report(base_card.parent)
    if report is not None and report.get("weights") is not None:
        metadata[WEIGHTS_ENTRY] = report["weights"]
    inherited = {name: metadata[name] for name in INHERITED if name in metadata}
    return {**inherited, "base_model": base_model} if base_model else inherited


def push_card_if_missing(
    model: "AttnResPreTrainedModel", repo_id: str, private: bool | None, token: str | bool | None
):
    """Give a repository the card of the model that is about to be pushed there, unless it has one."""
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if not api.file_exists(repo_id, "README.md"):
        query = _joined([stack.depth_queries.zero_initialized() for stack in model.stacks])
        content = CardContent(model.config, query.detach().cpu(), title=repo_id.split("/")[-1], repo_id=repo_id)
        card = render_model_card(content)
        api.upload_file(
            path_or_fileobj=str(card).encode(),
            path_in_repo="README.md",
            repo_id=repo_id,
            commit_message="Add the model card",
        )
