# SPDX-License-Identifier: Apache-2.0
"""What tells checkpoints apart, and a memory of hashes that is never believed against the files."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from attnres.checkpoints import fingerprint
from attnres.checkpoints.fingerprint import checkpoint_fingerprint, file_hash, folder_fingerprint


SIZE = 3 << 20  # large enough to be remembered


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """The folder of remembered hashes; files count as settled at once, so that tests need not wait."""
    monkeypatch.setattr(fingerprint, "HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(fingerprint, "SETTLED_NS", -(10**18))
    return tmp_path / "home/attnres/hashes"


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(SIZE))
    return folder


def flip(path: Path, place: int):
    """Change one byte where it is, and give the file its old times of reading and writing again, as `touch -r`."""
    before = path.stat()
    with path.open("rb") as file:
        file.seek(place)
        changed = bytes([file.read(1)[0] ^ 1])
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # the clock of a file system is coarse
        with path.open("r+b") as file:
            file.seek(place)
            file.write(changed)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("place", [0, SIZE // 2, SIZE - 1])
def test_every_byte_counts(checkpoint, memory, place):
    """The same size, the same time of writing, one byte in the middle, and the old hash remembered."""
    before = checkpoint_fingerprint(checkpoint)
    assert list(memory.iterdir()) and checkpoint_fingerprint(checkpoint) == before
    flip(checkpoint / "model.safetensors", place)
    assert checkpoint_fingerprint(checkpoint) != before


def test_what_is_remembered_is_read_from_memory(checkpoint, memory, monkeypatch):
    before = checkpoint_fingerprint(checkpoint)
    hashed = []
    monkeypatch.setattr(fingerprint, "_remember", lambda *args: hashed.append(args))
    assert checkpoint_fingerprint(checkpoint) == before and not hashed
    os.utime(checkpoint / "model.safetensors")
    assert checkpoint_fingerprint(checkpoint) == before and len(hashed) == 1


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff\xfe", b'{"hash": "0", "state": {}}\n0\n', "truncate", "flip"])
def test_damaged_memory_is_not_believed(checkpoint, memory, damage):
    before = checkpoint_fingerprint(checkpoint)
    entry = next(memory.iterdir())
    content = entry.read_bytes()
    if damage == "truncate":
        damage = content[: len(content) // 2]
    elif damage == "flip":  # one digit of the hash
        damage = content[:10] + (b"1" if content[10:11] == b"0" else b"0") + content[11:]
    entry.write_bytes(damage)
    assert checkpoint_fingerprint(checkpoint) == before
    assert entry.read_bytes() == content  # and it is written anew


def test_memory_that_cannot_be_written(checkpoint, memory):
    memory.parent.mkdir(parents=True)
    memory.write_text("a file where the folder should be")
    assert checkpoint_fingerprint(checkpoint) == checkpoint_fingerprint(checkpoint)


def test_fresh_files_are_not_remembered(checkpoint, memory, monkeypatch):
    """They could be written again without their times telling."""
    monkeypatch.setattr(fingerprint, "SETTLED_NS", 10**12)
    checkpoint_fingerprint(checkpoint)
    assert not memory.exists()


def test_links(checkpoint, memory, tmp_path):
    """As in the Hub's cache: what a link leads to counts, and a link that leads elsewhere is another file."""
    snapshot, blobs = tmp_path / "snapshot", tmp_path / "blobs"
    snapshot.mkdir()
    blobs.mkdir()
    for path in checkpoint.iterdir():
        shutil.copy(path, blobs / path.name)
        (snapshot / path.name).symlink_to(blobs / path.name)
    before = checkpoint_fingerprint(snapshot)
    assert before == checkpoint_fingerprint(checkpoint)
    other = blobs / "other"
    other.write_bytes(b"\1" + bytes(SIZE - 1))
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(other)
    assert checkpoint_fingerprint(snapshot) != before
    # hard links share their content: a change through one name is seen through the other
    hard = tmp_path / "hard"
    hard.mkdir()
    for path in checkpoint.iterdir():
        os.link(path, hard / path.name)
    assert checkpoint_fingerprint(hard) == before
    flip(checkpoint / "model.safetensors", SIZE // 2)
    assert checkpoint_fingerprint(hard) != before
    # folders behind links count, and those that lead in a circle end
    (hard / "code").symlink_to(tmp_path / "code")
    (tmp_path / "code").mkdir()
    (hard / "circle").symlink_to(hard)
    with_code = checkpoint_fingerprint(hard), folder_fingerprint(hard)
    (tmp_path / "code/model.py").write_text("x = 1")
    assert checkpoint_fingerprint(hard) != with_code[0] and folder_fingerprint(hard) != with_code[1]


def test_what_does_not_count(checkpoint, memory):
    """Cards, pictures and reports beside a checkpoint, and what tools keep in hidden folders."""
    before = checkpoint_fingerprint(checkpoint)
    names = "README.md conversion_report.json depth/depth.json depth/weights.png evaluation/table.md .cache/x/y.json"
    for name in names.split():
        (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
        (checkpoint / name).write_text("something")
    assert checkpoint_fingerprint(checkpoint) == before
    # and what does: any other file, also of kinds that are not known here, and the name of each
    for name in ("tokenizer.tiktoken", "vocabulary.bpe", "model.gguf", "additional_chat_templates/tools.jinja"):
        (checkpoint / name).parent.mkdir(exist_ok=True)
        (checkpoint / name).write_text("x")
        now = checkpoint_fingerprint(checkpoint)
        assert now != before, name
        before = now
    (checkpoint / "vocabulary.bpe").rename(checkpoint / "vocabulary.bp")
    assert checkpoint_fingerprint(checkpoint) != before


@pytest.mark.parametrize("change", ["grow", "replace", "in place"])
def test_a_file_that_changes_while_it_is_read(checkpoint, memory, monkeypatch, change):
    path = checkpoint / "model.safetensors"
    real = fingerprint.xxhash.xxh3_128

    class Hash:
        """Changes the file behind the reader's back."""

        def __init__(self):
            self.hash, self.updates = real(), 0

        def update(self, content):
            self.hash.update(content)
            self.updates += 1
            if self.updates == 2:
                if change == "grow":
                    with path.open("ab") as file:
                        file.write(b"more")
                elif change == "replace":
                    (checkpoint / "new").write_bytes(bytes(SIZE))
                    (checkpoint / "new").replace(path)
                else:
                    flip(path, 0)

    monkeypatch.setattr(fingerprint.xxhash, "xxh3_128", Hash)
    with pytest.raises(OSError, match="changed while it was read"):
        file_hash(path)
    assert not memory.exists()


def test_many_processes_at_once(checkpoint, tmp_path):
    """They share one memory, and each finds the right hash."""
    expected = checkpoint_fingerprint(checkpoint)
    code = (
        "import sys; from attnres.checkpoints import fingerprint; fingerprint.SETTLED_NS = -10**18\n"
        "for _ in range(50): print(fingerprint.checkpoint_fingerprint(sys.argv[1]))\n"
        "[path.unlink(missing_ok=True) for path in __import__('pathlib').Path(sys.argv[2]).glob('*')]"
    )
    memory = tmp_path / "home/attnres/hashes"
    command = [sys.executable, "-c", code, str(checkpoint), str(memory)]
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home")}
    processes = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for process in processes:
        assert set(process.communicate(timeout=300)[0].split()) == {expected} and process.returncode == 0
    assert not list(memory.glob(".*"))  # nothing unfinished


@pytest.mark.slow
def test_a_gigabyte_is_read_once(tmp_path, memory):
    path = tmp_path / "large"
    with path.open("wb") as file:
        for _ in range(1024):
            file.write(os.urandom(1 << 20))
    started = time.perf_counter()
    first = file_hash(path)
    read = time.perf_counter()
    assert file_hash(path) == first
    print(f"{1.07 / (read - started):.2f} GB/s, then {time.perf_counter() - read:.5f} s")
