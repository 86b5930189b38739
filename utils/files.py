# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Output files that are there in full or not at all: written beside, then renamed."""

import contextlib
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError


def write_file(path: Path, content: str | bytes):
    """Write a file, text as UTF-8, in place of what may be there; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextlib.contextmanager
def hidden_folder(path: Path, kind: str, num_bytes: int, way_out: str = "") -> Iterator[Path]:
    """A new folder beside `path` for what is not finished, removed at the end.

    Where a process was killed it stays, until the next one that writes to the same place.

    Raises:
        OSError: if another process has it, or the disk has no room for `num_bytes`.
    """
    hidden = path.with_name(f".{path.name}.{kind}")
    path.parent.mkdir(parents=True, exist_ok=True)
    # The lock of what is unfinished has had this name from the start
    lock = FileLock(path.with_name(f".{path.name}.lock" if kind == "unfinished" else f".{path.name}.{kind}.lock"))
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise OSError(f"Another process is writing `{path}`.") from None
    try:
        shutil.rmtree(hidden, ignore_errors=True)
        free = shutil.disk_usage(path.parent).free
        if num_bytes > free:
            raise OSError(
                f"`{path}` needs {num_bytes / 1e9:.1f} GB, but its disk has {free / 1e9:.1f} GB free.{way_out}"
            )
        hidden.mkdir()
        yield hidden
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


@contextlib.contextmanager
def atomic_folder(path: Path, num_bytes: int = 0, way_out: str = "") -> Iterator[Path]:
    """A hidden folder beside `path` to write to. It takes the place of `path` when all went well, or it is removed."""
    with hidden_folder(path, "unfinished", num_bytes, way_out) as unfinished:
        yield unfinished
        if path.exists():
            path.rmdir()  # an empty folder; what has been put there meanwhile makes this fail
        unfinished.rename(path)


def check_destination(destination: str | Path, source: str | Path) -> Path:
    """The folder to write, after a look that nothing is there and that nothing of the source would be touched.

    Raises:
        ValueError: otherwise.
    """
    path, folder = Path(destination).expanduser().absolute(), Path(source).expanduser()
    if path.is_symlink():
        raise ValueError(f"`{destination}` is a link, to `{path.readlink()}`; name the folder itself.")
    if folder.is_dir() and path.resolve() == folder.resolve():
        raise ValueError(f"`{destination}` is the source itself; name another folder.")
    if folder.is_dir() and folder.resolve() in path.resolve().parents:
        raise ValueError(f"`{destination}` is inside the source; name a folder outside it.")
    if path.exists() and not path.is_dir():
        raise ValueError(f"`{destination}` is a file; name a folder.")
    if path.exists() and any(path.iterdir()):
        raise ValueError(f"`{destination}` is not empty; name a new folder or delete it first.")
    return path


def check_writable(folder: Path):
    """Raise an `OSError` or a `ValueError` unless files can be written to a folder, which may have to be made."""
    place = folder.expanduser().absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise ValueError(f"`{place}` is a file; name a folder.")
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise OSError(f"`{folder}` cannot be written: {error.strerror}.") from None


@contextlib.contextmanager
def only_run_in(folder: Path, lock: str = ".lock") -> Iterator[None]:
    """Inside, this process alone writes to a folder, which is made if it is not there.

    The lock is one of the operating system, which lets go of it when a process ends, however it does.

    Raises:
        OSError: if another run is writing there.
    """
    (folder / lock).parent.mkdir(parents=True, exist_ok=True)
    held = FileLock(folder / lock)
    try:
        held.acquire(blocking=False)
    except Timeout:
        raise OSError(f"Another run is writing `{folder}`. Wait until it is done, or name another folder.") from None
    try:
        yield
    finally:
        held.release()


@contextlib.contextmanager
def disk_errors_explained(folder: Path) -> Iterator[None]:
    """An `OSError` of one line for what libraries raise if files cannot be written in full.

    Args:
        folder: of a run that goes on where it was when it is started again.
    """
    try:
        yield
    except Exception as error:
        # torch writes in C++, whose errors have no number
        of_torch = isinstance(error, RuntimeError) and any(
            word in str(error) for word in ("PytorchStreamWriter", "inline_container")
        )
        if of_torch or isinstance(error, SafetensorError):
            reason = "a file could not be written in full"
        elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            reason = os.strerror(error.errno)
        else:
            raise
        raise OSError(
            f"`{folder}` cannot be written: {reason}. Make room there, or raise the limit of the size of files, and"
            " run the same command again: it resumes from its last complete checkpoint."
        ) from error


def read_json_lines(path: Path) -> list[Any]:
    """What a JSONL file holds, one value a line; an empty list if there is no such file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def append_json(path: Path, value: Any):
    """Add a line to a JSONL file."""
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    write_file(path, f"{before}{json.dumps(value)}\n")
