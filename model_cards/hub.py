# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""`attnres push`: a checkpoint onto the Hub, with the code that loads it where this package is not installed."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import validate_repo_id

from ..checkpoints.checkpoint import COMPANIONS, INDEX_NAME, Checkpoint, open_checkpoint, refuse_links_out
from ..checkpoints.location import HTTPError
from ..checkpoints.remote_code import code_files, code_metadata
from ..configuration_attnres import remote_code_auto_map
from .card import model_card, read_metadata


@dataclass(frozen=True)
class Push:
    """What `push` would upload.

    Args:
        files: by name in the repository: contents that are made for it, and paths of files that go as they are.
        left_out: other files of the folder, which are not part of a checkpoint; folders end with a slash.
    """

    title: str
    files: Mapping[str, bytes | Path]
    left_out: tuple[str, ...]

    @property
    def card(self) -> str:
        content = self.files["README.md"]
        return (content if isinstance(content, bytes) else content.read_bytes()).decode()

    @property
    def missing(self) -> list[str]:
        """What the metadata of a card should have and this one has not."""
        metadata = ModelCard(self.card).data.to_dict()
        return [name for name in ("license", "language", "base_model") if not metadata.get(name)]

    def num_bytes(self, name: str) -> int:
        content = self.files[name]
        return len(content) if isinstance(content, bytes) else content.stat().st_size


def plan_push(folder: str | Path, repo_id: str) -> Push:
    """Find what `push` would upload, without asking the Hub. Arguments and errors as there."""
    validate_repo_id(repo_id)
    if not Path(folder).is_dir():
        raise OSError(f"There is no folder `{folder}`.")
    checkpoint = open_checkpoint(folder)
    if checkpoint.depth_config is None:
        raise ValueError(
            f"`{folder}` is a `{checkpoint.config.model_type}` checkpoint, not an AttnRes one:"
            f" `attnres convert` makes one, `hf upload {repo_id} {folder}` uploads it as it is."
        )
    # Of code that came with it, maybe of another version, no file is to be beside the code of this one
    before = set() if checkpoint.is_multimodal else set(checkpoint.code)
    own = {"config.json", *checkpoint.shards, *checkpoint.companions} - before
    if (checkpoint.folder / INDEX_NAME).exists():
        own.add(INDEX_NAME)
    refuse_links_out(checkpoint, sorted(own | COMPANIONS.keys()))
    files = {name: checkpoint.folder / name for name in sorted(own)}
    files["README.md"] = str(card_for(checkpoint, repo_id)).encode()
    if not checkpoint.is_multimodal:  # of which only the language model has code here
        auto_map = remote_code_auto_map(checkpoint.depth_config.base_model_type)
        config = {**checkpoint.config_dict, "auto_map": auto_map}
        files |= {"config.json": json.dumps(config, indent=2).encode() + b"\n", **code_files()}
    left_out = {*checkpoint.left_behind, *(before - files.keys())}
    return Push(checkpoint.title, files, tuple(sorted(left_out)))


def push(folder: str | Path, repo_id: str, *, private: bool = False, token: str | None = None) -> CommitInfo:
    """Upload an AttnRes checkpoint, its tokenizer, card and code in one commit, and nothing else from the folder.

    Files that the repository has already are not sent again. The version of the code is in the card's metadata and in
    the message of the commit.

    Args:
        folder: of the checkpoint. Nothing in it changes.
        repo_id: `user/name`; the repository is created if it does not exist.
        private: create it private.
        token: access token; by default that of `hf auth login`.

    Raises:
        ValueError: if the folder does not hold a whole AttnRes checkpoint, or a file of it is a link out of it.
        OSError: if the Hub refuses or cannot be reached.
    """
    plan = plan_push(folder, repo_id)
    operations = [CommitOperationAdd(name, content) for name, content in plan.files.items()]
    api = HfApi(token=token)
    version = code_metadata()
    try:
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        return api.create_commit(
            repo_id,
            operations,
            commit_message=f"Upload {plan.title} with the code of attnres {version['attnres_version']}",
            commit_description=f"SHA-256 of the code files: {version['attnres_code_sha256']}",
        )
    except HfHubHTTPError as error:
        raise OSError(f"The Hub refuses `{repo_id}`: {error}") from error
    except HTTPError as error:
        raise OSError(f"The Hub cannot be reached: {error}") from error


def card_for(checkpoint: Checkpoint, repo_id: str) -> ModelCard:
    """The checkpoint's card with examples that name the repository; one that somebody has edited keeps its text."""
    path = checkpoint.folder / "README.md"
    if path.exists():
        read_metadata(path)  # which says what is wrong with it
        card = ModelCard.load(path)
        if card.text != model_card(checkpoint).text:
            for name, value in code_metadata().items():
                card.data[name] = value
            return card
    return model_card(checkpoint, repo_id=repo_id)
