# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""GGUF files, read by transformers and written as the safetensors checkpoint that a conversion starts from."""

import contextlib
import functools
import gc
import re
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import ModelCard, ModelCardData, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import is_gguf_available, quantization_config

from ..checkpoints.checkpoint import Checkpoint, open_checkpoint
from ..checkpoints.location import hub_can_be_reached, hub_errors_explained, local_folder
from ..checkpoints.reports import SourceWeights
from ..utils.untrusted import check_inside
from .running import quiet_loading


SUFFIX = ".gguf"
PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
# Kinds of values in a header: numbers as Python's `struct` calls them, and the two of other lengths
NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MAX_FIELD_NAME = 1 << 16
# What holds numbers as they are; all other kinds are quantised
FLOATS = ("F32", "F16", "BF16", "F64")


@dataclass(frozen=True)
class GGUF:
    """A GGUF file: `name` is what the user called it, `commit` the revision that its repository has on the Hub."""

    name: str
    path: Path
    commit: str | None

    def config_dict(self) -> dict[str, Any]:
        """The config that transformers makes of its header, without a look at the weights.

        Raises:
            ValueError: if the file is damaged, or of an architecture of which transformers reads no GGUF files.
        """
        with self._errors_explained():
            check_header(self.path)
            arguments = {"gguf_file": self.path.name, "trust_remote_code": False}
            return AutoConfig.from_pretrained(self.path.parent, **arguments).to_dict()

    @functools.cached_property
    def _reader(self) -> Any:
        import gguf

        with self._errors_explained():
            return gguf.GGUFReader(self.path)

    @property
    def num_bytes(self) -> int:
        """What the weights take in fp32."""
        return 4 * self._num_elements

    @property
    def _num_elements(self) -> int:
        return sum(int(tensor.n_elements) for tensor in self._reader.tensors)

    def kinds(self) -> dict[str, int]:
        """The number of tensors of each type, such as `{"Q4_1": 210, "F32": 61}`."""
        return dict(Counter(tensor.tensor_type.name for tensor in self._reader.tensors).most_common())

    def dequantize(self, folder: Path) -> Checkpoint:
        """Write weights in fp32, config and tokenizer to a folder, and open that.

        Raises:
            ValueError: if the file does not hold the weights of the model that its header describes.
        """
        with self._errors_explained(), quiet_loading():
            model = self._load()
            model.save_pretrained(folder)
            del model
            gc.collect()
            # Of a kind that transformers does not read there is none, as the report will say
            with contextlib.suppress(Exception):
                tokenizer = AutoTokenizer.from_pretrained(
                    self.path.parent, gguf_file=self.path.name, trust_remote_code=False
                )
                tokenizer.save_pretrained(folder)
            self._write_card(folder)
        return replace(open_checkpoint(folder), name=self.name, commit=self.commit)

    def _write_card(self, folder: Path):
        """Write a card with the licence and languages that the header names, if it names any."""
        fields = self._reader.fields
        named = {"license": "general.license", "language": "general.languages"}
        metadata = {name: fields[key].contents() for name, key in named.items() if key in fields}
        if metadata:
            ModelCard(f"---\n{ModelCardData(**metadata).to_yaml()}\n---\n").save(folder / "README.md")

    def _load(self) -> transformers.PreTrainedModel:
        """The model in fp32, with no trace of the file in its config."""
        arguments: dict[str, Any] = {"gguf_file": self.path.name, "dtype": torch.float32, "trust_remote_code": False}
        # Where transformers can keep weights packed, it is told not to
        if hasattr(quantization_config, "GgufConfig"):
            arguments["quantization_config"] = quantization_config.GgufConfig(dequantize=True)
        model, info = AutoModelForCausalLM.from_pretrained(self.path.parent, **arguments, output_loading_info=True)
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if info[kind]:
                raise ValueError(f"{len(info[kind])} {kind.replace('_', ' ')}, among them `{min(info[kind])}`")
        # transformers leaves out what its model has no place for, and says nothing: biases, further layers, factors of
        # rotary embeddings
        if model.num_parameters() != self._num_elements:
            raise ValueError(
                f"its tensors hold {self._num_elements:,} numbers and transformers' `{model.config.model_type}` model"
                f" has {model.num_parameters():,} parameters, so some would be lost. Take the safetensors checkpoint"
            )
        config = type(model.config)(
            **{name: value for name, value in model.config.to_dict().items() if name != "quantization_config"}
        )
        config.name_or_path = ""
        with torch.device("meta"):
            fresh = type(model)(config)
        fresh.load_state_dict(model.state_dict(), assign=True)
        fresh.tie_weights()
        fresh.generation_config = model.generation_config
        return fresh

    def weights(self) -> SourceWeights:
        """What a checkpoint of its weights was made from."""
        kinds = self.kinds()
        return SourceWeights(
            format="gguf",
            file=self.path.name,
            kind=self._kind(kinds),
            tensors=kinds,
            quantized=not set(kinds) <= set(FLOATS),
            dequantized=True,
        )

    def _kind(self, kinds: dict[str, int]) -> str:
        """What the file is called as a whole, such as `Q4_K_M`: as its header says, else its most frequent type."""
        import gguf

        with contextlib.suppress(Exception):  # of a field that is missing, or holds anything
            field = self._reader.fields["general.file_type"]
            kind = gguf.LlamaFileType(int(field.parts[field.data[0]][0])).name
            return kind.removeprefix("MOSTLY_").removeprefix("ALL_")
        return next((kind for kind in kinds if kind not in FLOATS), next(iter(kinds), "empty"))

    @contextlib.contextmanager
    def _errors_explained(self) -> Iterator[None]:
        """One line that names the file, for whatever its readers raise."""
        try:
            yield
        except Exception as error:  # of many kinds, in what reads untrusted bytes
            if isinstance(error, OSError) and error.errno is not None:
                raise  # the disk's
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            raise ValueError(f"`{self.name}` cannot be converted: {kind}{' '.join(str(error).split())}") from error


def check_header(path: Path):
    """Raise a `ValueError` for a header that announces more than the file holds, of which readers would make lists.

    https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
    """
    size = path.stat().st_size
    with path.open("rb") as file:

        def number(kind: str) -> Any:
            found = file.read(struct.calcsize(kind))
            if len(found) < struct.calcsize(kind):
                raise ValueError("its header is cut off")
            return struct.unpack(f"<{kind}", found)[0]

        def skip(num_bytes: int):
            if num_bytes > size - file.tell():
                raise ValueError(f"its header announces {num_bytes:,} bytes, but there are fewer")
            file.seek(num_bytes, 1)

        def value(kind: int) -> int | float | None:
            """A number; strings and lists are passed over."""
            if kind == STRING:
                skip(number("Q"))
            elif kind == ARRAY:
                of_items, count = number("I"), number("Q")
                if of_items in NUMBERS:
                    skip(struct.calcsize(NUMBERS[of_items]) * count)
                elif of_items != STRING or count > size:  # lists of lists are in no file
                    raise ValueError(f"its header announces a list of {count:,} of kind {of_items}")
                else:
                    for _ in range(count):
                        skip(number("Q"))
            elif kind in NUMBERS:
                return number(NUMBERS[kind])
            else:
                raise ValueError(f"its header has a value of an unknown kind, {kind}")
            return None

        if file.read(4) != b"GGUF":
            raise ValueError("it is not a GGUF file")
        number("I")  # the version
        num_tensors, num_fields = number("Q"), number("Q")
        if max(num_tensors, num_fields) > size:
            raise ValueError(f"its header announces {num_tensors:,} tensors and {num_fields:,} fields")
        for _ in range(num_fields):
            length = number("Q")
            if length > MAX_FIELD_NAME:
                raise ValueError(f"its header has a name of {length:,} bytes")
            name = file.read(length).decode(errors="replace")
            found = value(number("I"))
            # A block has several tensors
            if name.endswith(".block_count") and found is not None and found > num_tensors:
                raise ValueError(f"its header announces {found:,} blocks (`{name}`) and {num_tensors:,} tensors")


def find_gguf(source: str | Path, gguf_file: str | None, revision: str | None) -> GGUF | None:
    """The GGUF file that is meant; `None` if it is not one but a checkpoint.

    Raises:
        ValueError: if it is meant and cannot be: no such file, or no package that reads it.
        OSError: if the Hub does not have it.
    """
    path = Path(source).expanduser()
    if gguf_file is None:
        if path.suffix.lower() != SUFFIX or path.is_dir():
            return None
        if not path.is_file():
            raise OSError(f"There is no file `{source}`.")
        if revision is not None:
            raise ValueError(f"`revision={revision!r}` is for Hub ids; `{source}` is a file.")
        found = GGUF(str(source), path, None)
    elif path.is_file():
        raise ValueError(f"`{source}` is a file itself; leave `gguf_file={gguf_file!r}` out.")
    else:
        found = _in_folder_or_repository(source, gguf_file, revision)
    if PART.search(found.path.name):
        merged = PART.sub(SUFFIX, found.path.name)
        raise ValueError(
            f"`{found.path.name}` is one part of several; join them first: `llama-gguf-split --merge {found.path.name}"
            f" {merged}`."
        )
    if not is_gguf_available():
        raise ValueError(f"To read `{found.name}`, install `gguf`: `pip install gguf`.")
    return found


def _in_folder_or_repository(source: str | Path, gguf_file: str, revision: str | None) -> GGUF:
    if Path(gguf_file).is_absolute() or ".." in Path(gguf_file).parts or not gguf_file.lower().endswith(SUFFIX):
        raise ValueError(f"`gguf_file={gguf_file!r}` must be the name of a GGUF file in `{source}`.")
    folder = local_folder(source, revision)
    if folder is not None:
        path = folder / gguf_file
        if not path.is_file():
            there = sorted(found.relative_to(folder).as_posix() for found in folder.rglob(f"*{SUFFIX}"))
            raise ValueError(f"`{source}` holds no `{gguf_file}`; its GGUF files are {', '.join(there) or 'none'}.")
        check_inside(folder, [gguf_file], str(source))
        return GGUF(str(path), path, None)
    with hub_errors_explained(source, revision):
        try:
            path = Path(
                hf_hub_download(str(source), gguf_file, revision=revision, local_files_only=not hub_can_be_reached())
            )
        except LocalEntryNotFoundError:
            raise
        except EntryNotFoundError:
            raise OSError(f"`{source}` holds no `{gguf_file}`.") from None
    commit = path.parents[len(Path(gguf_file).parts) - 1].name
    return GGUF(str(source), path, commit)
