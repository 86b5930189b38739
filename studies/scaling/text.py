# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The text of our scaling ladder: sources of installed packages, held out by file, and a tokenizer.

python -m studies.scaling.text scaling-work
cd scaling-work && attnres scaling run ../studies/scaling/ladder.yaml -o ../studies/scaling/results
"""

import hashlib
import json
import random
import zlib
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from attnres.data.text import train_tokenizer
from attnres.utils.files import write_file
from studies.common.arms import SKIPPED


PACKAGES = ("networkx", "numpy", "pandas", "scipy", "sympy")
VOCAB_SIZE = 1024
# Characters; a row of the ladder has about 320. Rows follow each other from one document, so of a file of half a
# megabyte the smallest model would see little else
PIECE_LENGTH = 1000
RESULTS = Path(__file__).parent


def split_of(name: str) -> str:
    """By the name of a file alone: a fortieth to tune on, and as many to judge on."""
    return {0: "eval", 1: "tuning"}.get(zlib.crc32(name.encode()) % 40, "train")


def pieces(text: str) -> list[str]:
    """The text cut between lines. A piece is longer than `PIECE_LENGTH` only if it is a single line."""
    found = [""]
    for line in text.splitlines(keepends=True):
        if found[-1] and len(found[-1]) + len(line) > PIECE_LENGTH:
            found.append("")
        found[-1] += line
    return found


def main(folder: Annotated[Path, typer.Argument(help="For the text and the tokenizer.")]):
    """Write train.jsonl, tuning.jsonl, eval.jsonl and tokenizer/."""
    texts: dict[str, list[str]] = {"train": [], "tuning": [], "eval": []}
    hashed = hashlib.sha256()
    for package in PACKAGES:
        files = sorted((file.as_posix(), Path(file.locate())) for file in metadata.files(package) or ())
        for name, path in files:
            if name.endswith(".py") and not SKIPPED & set(Path(name).parts) and path.stat().st_size > 200:
                content = path.read_bytes()
                hashed.update(f"{name} {hashlib.sha256(content).hexdigest()}\n".encode())
                texts[split_of(name)].append(content.decode("utf-8", errors="replace"))
    tokenizer = train_tokenizer(texts["train"][::4], VOCAB_SIZE)
    tokenizer.save_pretrained(folder / "tokenizer")
    manifest = {"packages": {name: metadata.version(name) for name in PACKAGES}, "sha256": hashed.hexdigest()}
    for split, contents in texts.items():
        files = len(contents)
        contents = [piece for content in contents for piece in pieces(content)]
        random.Random(0).shuffle(contents)
        write_file(folder / f"{split}.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in contents))
        tokens = sum(len(ids) for ids in tokenizer(contents).input_ids)
        manifest[split] = {"files": files, "pieces": len(contents), "tokens": tokens}
    kept = RESULTS / "text.json"
    if kept.exists() and json.loads(kept.read_text()) != manifest:
        raise typer.BadParameter(f"The text is not that of {kept}: use the versions of constraints.txt.")
    write_file(kept, json.dumps(manifest, indent=1) + "\n")
    print(json.dumps(manifest, indent=1))


if __name__ == "__main__":
    typer.run(main)
