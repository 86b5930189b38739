# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run: what a whole one consists of, on what it was trained, and which one a run goes on from.

Beside the files of a checkpoint lies one that is written last, with the hashes of all others and of what decides the
weights: the model that the run began with, and its rows. Without it, or with another byte in a file, a checkpoint is
not whole, and an earlier one is taken. On other rows or another model, a run is refused.
"""

import json
import shutil
from pathlib import Path

import xxhash
from datasets import Dataset

from ..checkpoints.fingerprint import checkpoint_fingerprint, file_hash, folder_fingerprint
from ..checkpoints.location import hub_commit
from ..utils.files import write_file
from ..utils.untrusted import read_json


MANIFEST = "files.json"
PREFIX = "checkpoint-"
DAMAGED = "damaged-"
# What the hashes of a run are of, in words
PARTS = {
    "model": "a model with other files",
    "rows": "other rows to train on",
    "held_out": "other rows to evaluate on",
}


def rows_fingerprint(rows: Dataset) -> str:
    """A hash over the numbers in all rows, whatever files they lie in."""
    hashed = xxhash.xxh3_128(json.dumps([len(rows), sorted(rows.column_names)]).encode())
    for batch in rows.with_format("arrow").iter(batch_size=1000):
        for name in sorted(rows.column_names):
            column = batch.column(name).combine_chunks()
            for numbers in (column.value_lengths(), column.flatten()):
                hashed.update(numbers.to_numpy(zero_copy_only=False).astype("int64").tobytes())
    return hashed.hexdigest()


def model_fingerprint(model: str, revision: str | None = None) -> str:
    """What tells a model from another one: the fingerprint of its folder, or its commit on the Hub."""
    folder = Path(model).expanduser()
    return checkpoint_fingerprint(folder) if folder.is_dir() else str(hub_commit(model, revision))


def source_fingerprint(dataset: str) -> str | None:
    """A hash over the file or the folder that rows are read from; `None` of a data set on the Hub."""
    path = Path(dataset).expanduser()
    if path.is_dir():
        return folder_fingerprint(path)
    return file_hash(path) if path.is_file() else None


def write_manifest(folder: Path, run: dict[str, str | None]):
    """Write down what a checkpoint consists of, when all of it is there.

    Args:
        run: the hashes of what it was trained on, by the names in `PARTS`.
    """
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST)
    files = {path.relative_to(folder).as_posix(): file_hash(path) for path in paths}
    write_file(folder / MANIFEST, json.dumps({"run": run, "files": files}, indent=1) + "\n")


def damage_of(folder: Path) -> str | None:
    """Why a checkpoint is not whole, or `None` if it is: every byte is as it was written."""
    try:
        files = read_json(folder / MANIFEST)["files"]
        for name, expected in files.items():
            if not (folder / name).is_file():
                return f"{name} is missing"
            if file_hash(folder / name, from_memory=False) != expected:
                return f"{name} has changed since it was written"
        best = read_json(folder / "trainer_state.json").get("best_model_checkpoint")
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} or trainer_state.json is damaged"
    # At the end of a run the best model is loaded from there
    best = None if best is None else folder.parent / Path(best).name
    if best is not None and best.name != folder.name and (damage := damage_of(best)) is not None:
        return f"{best.name}, the best model so far, is damaged: {damage}"
    return None


def numbered_checkpoints(output: Path) -> list[Path]:
    """Those of a run, the last one first."""
    found = [path for path in output.glob(f"{PREFIX}*") if path.name[len(PREFIX) :].isdecimal() and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name[len(PREFIX) :]), reverse=True)


def last_whole_checkpoint(output: Path, num_processes: int, verify: bool = True) -> str | None:
    """The last one with all that was written, byte for byte: a kill or a disk may have left a part of one.

    Args:
        num_processes: whose generators have a state in it; 0 in those of the loop over stages.
        verify: `False` does not read the files.

    Raises:
        ValueError: if there is none, but one of another number of processes.
    """
    others = set()
    for path in numbered_checkpoints(output):
        states = {state.name for state in path.glob("rng_state*.pth")}
        if states != names_of_states(num_processes):
            # or others were killed before they wrote theirs
            if states == names_of_states(len(states)) and (path / "trainer_state.json").exists():
                others.add(len(states))
        elif not verify or damage_of(path) is None:
            return str(path)
    if others - {0}:
        raise ValueError(
            f"`output_dir: {output}` has checkpoints of {max(others)} processes, and this run has"
            f" {num_processes}: start {max(others)} processes, or delete the checkpoints to start over."
        )
    return None


def names_of_states(num_processes: int) -> set[str]:
    """The files in which the Trainer keeps the states of generators."""
    return {"rng_state.pth"} if num_processes == 1 else {f"rng_state_{i}.pth" for i in range(num_processes)}


def pass_over(output: Path, checkpoint: str | None):
    """Say why later checkpoints than the one that a run goes on from are not taken.

    What was whole once is renamed, so that the run does not write over it.
    """
    goes_on = "starts over" if checkpoint is None else f"continues from {Path(checkpoint).name}"
    for path in numbered_checkpoints(output):
        if path.name == Path(checkpoint or "").name:
            break
        kept = ""
        reason = damage_of(path)
        if (path / MANIFEST).exists():
            renamed = path.with_name(DAMAGED + path.name)
            shutil.rmtree(renamed, ignore_errors=True)
            path.rename(renamed)
            kept = f" It is kept as `{renamed.name}`."
        print(f"{path.name} is damaged: {reason}. The run {goes_on}.{kept}")


def check_same_run(output: Path, checkpoint: str | None, run: dict[str, str | None]):
    """Raise a `ValueError` if a checkpoint was trained on something else than `run` names, see `write_manifest`."""
    before = {} if checkpoint is None else read_json(Path(checkpoint) / MANIFEST)["run"]
    for name, found in run.items():
        if name in before and before[name] != found:
            raise ValueError(
                f"`output_dir: {output}` holds an unfinished run that began with {PARTS[name]} and would come to other"
                " weights: restore them, or name another folder."
            )
