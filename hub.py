# Copyright 2026 The attnres authors.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""`attnres push`: a checkpoint onto the Hub, with the code that loads it where this package is not installed."""

import json
from pathlib import Path

from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import validate_repo_id

from .configuration_attnres import AttnResConfig
from .conversion.checkpoint import INDEX_NAME, Checkpoint, open_checkpoint
from .model_cards import code_files, code_metadata, model_card
from .modeling_attnres import REMOTE_CODE_AUTO_MAP


# That of httpx or httpx2, whichever huggingface_hub stands on
HTTPError = HfHubHTTPError.__bases__[0]


def push(folder: str | Path, repo_id: str, *, private: bool = False, token: str | None = None) -> CommitInfo:
    """Upload an AttnRes checkpoint, its tokenizer, card and code in one commit.

    Files that the repository has already are not sent again. The version of the code is in the card's metadata and in
    the message of the commit.

    Args:
        folder: of the checkpoint. Nothing in it changes.
        repo_id: `user/name`; the repository is created if it does not exist.
        private: create it private.
        token: access token; by default that of `hf auth login`.

    Raises:
        ValueError: if the folder does not hold a whole AttnRes checkpoint.
        OSError: if the Hub refuses or cannot be reached.
    """
    validate_repo_id(repo_id)
    if not Path(folder).is_dir():
        raise OSError(f"There is no folder `{folder}`.")
    checkpoint = open_checkpoint(folder)
    if not isinstance(checkpoint.config, AttnResConfig):
        raise ValueError(
            f"`{folder}` is a `{checkpoint.config.model_type}` checkpoint, not an AttnRes one:"
            f" `attnres convert` makes one, `hf upload {repo_id} {folder}` uploads it as it is."
        )
    config = {**checkpoint.config_dict, "auto_map": REMOTE_CODE_AUTO_MAP}
    contents = {
        "config.json": json.dumps(config, indent=2).encode() + b"\n",
        "README.md": str(card_for(checkpoint, repo_id)).encode(),
        **code_files(),
    }
    files = {*checkpoint.shards, *checkpoint.companions} - contents.keys()
    if (checkpoint.folder / INDEX_NAME).exists():
        files.add(INDEX_NAME)
    operations = [CommitOperationAdd(name, content) for name, content in contents.items()]
    operations += [CommitOperationAdd(name, checkpoint.folder / name) for name in sorted(files)]
    api = HfApi(token=token)
    version = code_metadata()
    try:
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        return api.create_commit(
            repo_id,
            operations,
            commit_message=f"Upload {checkpoint.title} with the code of attnres {version['attnres_version']}",
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
        card = ModelCard.load(path)
        if card.text != model_card(checkpoint.folder).text:
            for name, value in code_metadata().items():
                card.data[name] = value
            return card
    return model_card(checkpoint.folder, repo_id=repo_id)
