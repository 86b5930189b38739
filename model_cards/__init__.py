# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Model cards of AttnRes checkpoints, from what lies in their folders.

`card.md.jinja` is the template. The cards of published checkpoints lie beside it.
"""

import hashlib
import shutil
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import HfApi, ModelCard, ModelCardData
from huggingface_hub.repocard import metadata_load
from huggingface_hub.repocard_data import eval_results_to_model_index

from .. import __version__
from ..checkpoint import ZERO_AT_FIRST, open_checkpoint
from ..configuration_attnres import AttnResConfig
from ..depth_reads import Read
from ..fingerprint import checkpoint_fingerprint
from ..outputs import write_file
from ..reports import read_report
from ..untrusted import in_one_line, read_bytes, read_json, read_text


if TYPE_CHECKING:
    from ..modeling_attnres import AttnResPreTrainedModel


PIPELINE_TAGS = {
    "AttnResForCausalLM": "text-generation",
    "AttnResForConditionalGeneration": "image-text-to-text",
    "AttnResForSequenceClassification": "text-classification",
    "AttnResForTokenClassification": "token-classification",
    "AttnResForQuestionAnswering": "question-answering",
    "AttnResModel": "feature-extraction",
}
# Of the base's metadata, what holds for a conversion of it
INHERITED = ("license", "license_name", "license_link", "language")
# What a checkpoint that carries its code consists of, see `saving_attnres.REMOTE_CODE_AUTO_MAP`
CODE_FILES = (
    *("attn_res_fields.py", "base_classes.py", "base_config.py", "configuration_attnres.py", "depth_attention.py"),
    *("depth_backends.py", "depth_forward.py", "depth_pipeline.py", "depth_probe.py", "depth_queries.py"),
    *("depth_reads.py", "depth_stream.py", "generation_attnres.py", "modeling_attnres.py", "saving_attnres.py"),
)


def code_files() -> dict[str, bytes]:
    """The model code that goes with a checkpoint onto the Hub, by file name."""
    package = resources.files(__package__.rpartition(".")[0])
    return {name: package.joinpath(name).read_bytes() for name in CODE_FILES}


def code_metadata() -> dict[str, str]:
    """Which code it is: the version of the package, and a hash over the files."""
    digest = hashlib.sha256(b"".join(code_files().values())).hexdigest()
    return {"attnres_version": __version__, "attnres_code_sha256": digest}


def render_model_card(
    config: AttnResConfig,
    query: torch.Tensor,
    *,
    title: str,
    repo_id: str,
    metadata: dict[str, Any] | None = None,
    report: dict[str, Any] | None = None,
    parity: str | None = None,
    evaluation: str | None = None,
    figures: list[Path] | None = None,
    inspection: dict[str, Any] | None = None,
    differences: bool = False,
    training: dict[str, Any] | None = None,
    multimodal: bool = False,
    with_code: bool = True,
) -> ModelCard:
    """The card of an AttnRes model.

    Args:
        config: of the model, or of the language model in a multimodal one.
        query: the queries, or all that is zero at first in what makes them, `[sites, n]`.
        repo_id: what to load the model by in the examples.
        metadata: entries of the card's metadata, such as `base_model` and `license`.
        report, parity: what `conversion_report.json` holds, and its verification as Markdown.
        evaluation: a table, as Markdown.
        figures: paths of pictures relative to the card.
        inspection: what they were drawn from, see `_inspection`.
        differences: whether there is a plot of the evaluation.
        training: of a fine-tuned model `base`, `mode`, `dataset`, `steps`, and the held-out loss `before` and `after`.
        multimodal: whether it loads with the code of its base and the package alone.
        with_code: whether the code of the model goes with it.
    """
    metadata = {
        **code_metadata(),
        "library_name": "transformers",
        "pipeline_tag": PIPELINE_TAGS[(config.architectures or ["AttnResForCausalLM"])[0]],
        **(metadata or {}),
    }
    tags = metadata.get("tags") or []
    tags = [tags] if isinstance(tags, str) else tags
    metadata["tags"] = list(dict.fromkeys([*tags, "attnres", "attention-residuals"]))
    num_sublayers, size = config.num_sites - 1, config.attn_res_block_size
    counts = config.sublayers_per_layer()
    kinds = "".join("AM" if count == 2 else "S" * count for count in counts)
    legends = {"A": "A: attention, M: MLP", "S": "S: all that a layer adds at once"}
    norms = query.float().norm(dim=-1)
    base_model = metadata.get("base_model")
    return ModelCard.from_template(
        ModelCardData(**metadata),
        template_str=resources.files(__package__).joinpath("card.md.jinja").read_text(encoding="utf-8"),
        title=title,
        repo_id=repo_id,
        config=config,
        base_model=base_model[0] if isinstance(base_model, list) else base_model,
        read=Read.of(config).in_words(),
        query_norm=norms.max().item(),
        num_trained=norms.count_nonzero().item(),
        blocks=[" " * start + kinds[start : start + size] for start in range(0, num_sublayers, size)],
        num_sublayers=num_sublayers,
        legend=", ".join(legend for kind, legend in legends.items() if kind in kinds),
        short=num_sublayers % size,
        report=report,
        parity=parity,
        evaluation=evaluation,
        figures=figures,
        inspection=inspection,
        differences=differences,
        training=training,
        multimodal=multimodal,
        with_code=with_code,
    )


def write_adapter_card(
    folder: str | Path, *, title: str, repo_id: str, metadata: dict[str, Any], training: dict[str, Any]
) -> Path:
    """Write `README.md` of a PEFT adapter in a folder.

    Arguments as for `render_model_card`; `training` also has `has_queries`, whether the base is an AttnRes model.
    """
    tags = [training["mode"], *(("attnres", "attention-residuals") if training["has_queries"] else ())]
    metadata = {"library_name": "peft", "pipeline_tag": "text-generation", **metadata, "tags": tags}
    card = ModelCard.from_template(
        ModelCardData(**metadata),
        template_str=resources.files(__package__).joinpath("adapter.md.jinja").read_text(encoding="utf-8"),
        title=title,
        repo_id=repo_id,
        training=training,
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
) -> Path:
    """Write `README.md` of the AttnRes checkpoint in a folder; other arguments and errors as for `model_card`.

    Args:
        evaluation: a folder of `attnres eval`, whose table and plot go along and whose scores go into the metadata.
    """
    if evaluation is not None:
        from ..eval.report import model_index

        title = (repo_id or Path(folder).absolute().name).split("/")[-1]
        results = model_index(Path(evaluation), Path(folder).absolute().name, checkpoint_fingerprint(folder))
        base_metadata = {**(base_metadata or {}), "model-index": eval_results_to_model_index(title, results)}
        (Path(folder) / "evaluation").mkdir(exist_ok=True)
        for name in ("table.md", "differences.png"):
            if (Path(evaluation) / name).exists():
                shutil.copyfile(Path(evaluation) / name, Path(folder) / "evaluation" / name)
    card = model_card(
        folder, base_metadata=base_metadata, repo_id=repo_id, title=title, on_hub=on_hub, training=training
    )
    path = Path(folder) / "README.md"
    write_file(path, str(card))
    return path


def model_card(
    folder: str | Path,
    *,
    base_metadata: dict[str, Any] | None = None,
    repo_id: str | None = None,
    title: str | None = None,
    on_hub: bool | None = None,
    training: dict[str, Any] | None = None,
) -> ModelCard:
    """The card of the AttnRes checkpoint in a folder, from its config, queries, reports and figures.

    Entries of the metadata of a card that is there already are kept, its text is not. A table at
    `evaluation/table.md` and the pictures in `figures/` and of `attnres inspect -o FOLDER/depth` are shown.

    Args:
        base_metadata: entries to add, such as `base_model` and `license`.
        repo_id: what to load the model by in the examples; by default the name of the folder.
        title: by default the last part of that.
        on_hub: whether that is a repository, where the code of the model goes along; by default if it is given.
        training: as for `render_model_card`.

    Raises:
        ValueError, OSError: if the folder holds no whole AttnRes checkpoint.
    """
    checkpoint = open_checkpoint(folder)
    if not isinstance(checkpoint.text_config, AttnResConfig):
        raise ValueError(f"`{folder}` is a `{checkpoint.config.model_type}` checkpoint, not an AttnRes one.")
    folder = checkpoint.folder
    names = [checkpoint.prefix + name for name in ZERO_AT_FIRST]
    names = [name for name in names if name in checkpoint.weight_map]
    card_path, report_path, table = (
        folder / "README.md",
        folder / "conversion_report.json",
        folder / "evaluation/table.md",
    )
    metadata = read_metadata(card_path)
    metadata = {**metadata, **(base_metadata or {}), **code_metadata()}
    if checkpoint.is_multimodal:
        metadata["pipeline_tag"] = PIPELINE_TAGS["AttnResForConditionalGeneration"]
    report, verification = read_report(report_path) if report_path.exists() else (None, None)
    title = title or (repo_id or folder.absolute().name).split("/")[-1]
    return render_model_card(
        checkpoint.text_config,
        torch.cat([tensor.flatten(1) for tensor in checkpoint.tensors(names).values()], dim=1),
        title=title,
        repo_id=repo_id or title,
        metadata=metadata,
        report=report,
        parity=None if verification is None else verification.to_markdown(),
        evaluation=read_text(table) if table.exists() else None,
        figures=sorted(
            path.relative_to(folder) for part in ("depth", "figures") for path in folder.glob(f"{part}/*.png")
        ),
        inspection=_inspection(folder),
        differences=(folder / "evaluation/differences.png").exists(),
        training=training,
        multimodal=checkpoint.is_multimodal,
        with_code=(repo_id is not None if on_hub is None else on_hub) or (folder / "modeling_attnres.py").exists(),
    )


def _inspection(folder: Path) -> dict[str, Any] | None:
    """Of the depth maps in a folder: the version they were measured with, the checkpoints, and whether this one, as it
    is now, is among them.

    Raises:
        ValueError: if their figures are damaged.
    """
    path = folder / "depth" / "depth.json"
    if not path.exists():
        return None
    read_bytes(path)  # which says what is wrong with a file that is none
    try:
        results = read_json(path)
        models = [
            {"name": model["model"], "state": model.get("fingerprint") or model.get("commit")}
            for model in results["models"]
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"`{path}` is damaged: remove it, or run `attnres inspect` again.") from None
    states = [model["state"] for model in models]
    is_current = checkpoint_fingerprint(folder) in states if any(states) else True  # older figures do not tell
    return {"version": results.get("attnres_version"), "models": models, "is_current": is_current}


def read_metadata(card: Path) -> dict[str, Any]:
    """The metadata of a card; none if there is no card.

    Raises:
        ValueError: if it cannot be read.
    """
    if not card.exists():
        return {}
    read_bytes(card)  # which says what is wrong with a file that is none
    try:
        metadata = metadata_load(card) or {}
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
    """What a conversion's card takes over: the base's licence and languages, and the base itself if it has an id."""
    metadata = read_metadata(base_card)
    inherited = {name: metadata[name] for name in INHERITED if name in metadata}
    return {**inherited, "base_model": base_model} if base_model else inherited


def push_card_if_missing(
    model: "AttnResPreTrainedModel", repo_id: str, private: bool | None, token: str | bool | None
):
    """Give a repository the card of the model that is about to be pushed there, unless it has one."""
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if not api.file_exists(repo_id, "README.md"):
        query = torch.cat([tensor.flatten(1) for tensor in model.trunk.depth_queries.zeros_at_first()], dim=1)
        card = render_model_card(model.config, query.detach().cpu(), title=repo_id.split("/")[-1], repo_id=repo_id)
        api.upload_file(
            path_or_fileobj=str(card).encode(),
            path_in_repo="README.md",
            repo_id=repo_id,
            commit_message="Add the model card",
        )
