# SPDX-License-Identifier: Apache-2.0
"""Which types of models can be a base: what was measured of every type of transformers."""

import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Column, Table


# Written by `tests/tools/families_page.py`
RESULTS = Path(__file__).with_name("families.json")
# Written by `tests/tools/encoders_page.py`
ENCODERS = Path(__file__).with_name("encoders.json")
KINDS = ("supported", "refused", "others")
FEATURES = ("packing", "compile", "tp", "checkpointing", "engines")


def survey(types: Sequence[str] | None = None) -> dict[str, Any]:
    """What was measured of types of models.

    Args:
        types: model types as in transformers; `None`: all decoders and encoders.

    Returns:
        `transformers`: the version that was measured. `supported`: by type, what was measured of it, of an encoder
        also which `heads` it has; `refused` and `others`: by type, the reason why it cannot be a base, and what it is
        if it is neither.

    Raises:
        ValueError: for a type that was not measured.
    """
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    encoders = json.loads(ENCODERS.read_text(encoding="utf-8"))
    of_encoders = {name for kind in KINDS for name in encoders.get(kind, ())}
    for kind in KINDS:  # of some the decoder alone is no base, and the whole model is
        others = {name: value for name, value in found[kind].items() if name not in of_encoders}
        found[kind] = others | encoders.get(kind, {})
    known = sorted(name for kind in KINDS for name in found[kind])
    for name in types or []:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3)
            raise ValueError(
                f"`{name}` is not a type of transformers {found['transformers']}, whose types were measured: see what"
                " `--probe` says of a checkpoint." + (f" Did you mean {' or '.join(close)}?" if close else "")
            )
    wanted = set(types or known)
    chosen = {kind: {name: value for name, value in found[kind].items() if name in wanted} for kind in KINDS}
    return {"transformers": found["transformers"], **chosen}


def survey_table(types: Sequence[str] | None = None) -> tuple[Table, str]:
    """The same as a table of 80 columns, in the order of `types`, and a sentence below it on all that were measured.

    Arguments and errors as for `survey`.
    """
    found = survey()
    chosen = survey(types)
    supported, reasons = chosen["supported"], chosen["refused"] | chosen["others"]
    table = Table(Column("type", no_wrap=True), "converts", "why not, or what else works", box=box.SIMPLE)
    for name in types or sorted(supported | reasons):
        if name in reasons:
            table.add_row(name, "no", escape(reasons[name]))
        else:
            can = supported[name].get("heads") or [feature for feature in FEATURES if supported[name][feature]]
            table.add_row(name, "yes", ", ".join(can))
    counts = [len(found[kind]) for kind in KINDS]
    return table, (
        f"Of the {sum(counts)} types of decoders and encoders in transformers {found['transformers']}, {counts[0]} can"
        " be converted. `--json` has what was measured of each."
    )
