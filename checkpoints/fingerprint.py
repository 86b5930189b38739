# SPDX-License-Identifier: Apache-2.0
"""What tells one checkpoint from another: a hash over all bytes of its files.

Reading a large checkpoint takes a while, so the hash of each large file is remembered in `HF_HOME/attnres/hashes`, one
small file for each, together with the size, the times of change and the inode that the file had. A remembered hash
counts only if all of these are the same and its own checksum is right; otherwise the file is read again.
"""

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import xxhash
from huggingface_hub.constants import HF_HOME


CHUNK = 1 << 20
# Smaller files are read again each time
REMEMBERED_FROM = 1 << 20
# A file that has just been written can be written again without its times telling: the clock of a file system is
# coarse, two seconds where it is coarsest
SETTLED_NS = 3 * 10**9
# Files beside a checkpoint that describe it
DESCRIPTIONS = (".md", ".png", ".svg", ".html", ".log", ".lock")
# Of folders within a checkpoint, what transformers may load from them
LOADED_FROM_FOLDERS = (".safetensors", ".jinja", ".py")


def checkpoint_fingerprint(folder: str | Path) -> str:
    """A hash over the names and bytes of all that decides what a checkpoint or an adapter computes.

    Model cards, pictures and reports are left out, and so is what lies in folders within, but for weights, templates
    and code.

    Raises:
        OSError: if a file changes while it is read, or cannot be read.
    """
    return _fingerprint(Path(folder), _is_loaded)


def folder_fingerprint(folder: str | Path) -> str:
    """A hash over the names and bytes of all files in a folder; errors as for `checkpoint_fingerprint`."""
    return _fingerprint(Path(folder), lambda path: True)


def _is_loaded(path: Path) -> bool:
    """Whether a file of a checkpoint, relative to its folder, has a part in what it computes."""
    if any(part.startswith(".") for part in path.parts) or path.name.startswith("conversion_report"):
        return False
    if len(path.parts) > 1:
        return path.suffix in LOADED_FROM_FOLDERS
    return path.suffix not in DESCRIPTIONS


def _fingerprint(folder: Path, counts: Callable[[Path], bool]) -> str:
    hashed = xxhash.xxh3_128()
    for path in sorted(_files(folder)):
        if counts(path):
            # JSON, so that no name can look like two
            hashed.update(json.dumps([path.as_posix(), file_hash(folder / path)]).encode())
    return hashed.hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    """All files below a folder, relative to it, those behind links included."""

    def fail(error: OSError):
        raise error

    for place, folders, names in os.walk(folder, followlinks=True, onerror=fail):
        above = {os.path.realpath(path) for path in (Path(place), *Path(place).parents)}
        # A link to a folder above would be followed without end
        folders[:] = [name for name in folders if os.path.realpath(Path(place, name)) not in above]
        yield from (path.relative_to(folder) for name in names if (path := Path(place, name)).is_file())


def file_hash(path: Path, from_memory: bool = True) -> str:
    """XXH3 of a file's bytes, 128 bits, from memory if the file is the one that was read before.

    Args:
        from_memory: `False` reads it in any case: a disk can lose bytes whose file has not changed.

    Raises:
        OSError: if it changes while it is read.
    """
    started = time.time_ns()
    with path.open("rb", buffering=0) as file:
        state = _state(os.fstat(file.fileno()))
        place = _place(path, state) if state["size"] >= REMEMBERED_FROM else None
        if from_memory and place is not None and (known := _recall(place, state)) is not None:
            return known
        hashed, size = xxhash.xxh3_128(), 0
        buffer = memoryview(bytearray(CHUNK))
        while length := file.readinto(buffer):
            hashed.update(buffer[:length])
            size += length
        if _state(os.fstat(file.fileno())) != state or _state(path.stat()) != state or size != state["size"]:
            raise OSError(f"`{path}` changed while it was read. Run again when nothing writes to it.")
    if place is not None and started - max(state["mtime_ns"], state["ctime_ns"]) > SETTLED_NS:
        _remember(place, state, hashed.hexdigest())
    return hashed.hexdigest()


def _state(stat: os.stat_result) -> dict[str, int]:
    """What changes when a file does. The time of change (ctime) cannot be set back as that of the content can."""
    return {
        "device": stat.st_dev,
        "inode": stat.st_ino,
        "size": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
        "ctime_ns": stat.st_ctime_ns,
    }


def _place(path: Path, state: dict[str, int]) -> Path:
    """Where the hash of a file is remembered. Links to one file share it: it is named by what they lead to."""
    name = f"{path.resolve()}\n{state['device']}\n{state['inode']}"
    return Path(HF_HOME, "attnres", "hashes", xxhash.xxh3_128_hexdigest(os.fsencode(name)))


def _recall(place: Path, state: dict[str, int]) -> str | None:
    try:
        content, checksum = place.read_bytes().splitlines()
        if xxhash.xxh3_128_hexdigest(content) != checksum.decode():
            return None
        remembered = json.loads(content)
    except (OSError, ValueError):  # nothing remembered, or damaged
        return None
    return remembered["hash"] if remembered["state"] == state else None


def _remember(place: Path, state: dict[str, int], file_hash: str):
    """Written beside and renamed, each process under a name of its own; without a place to write, the file is read
    again next time.
    """
    content = json.dumps({"hash": file_hash, "state": state}).encode()
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        descriptor, unfinished = tempfile.mkstemp(dir=place.parent, prefix=".")
        try:
            with open(descriptor, "wb") as file:
                file.write(content + b"\n" + xxhash.xxh3_128_hexdigest(content).encode() + b"\n")
            os.replace(unfinished, place)
        except BaseException:
            os.unlink(unfinished)
            raise
