# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""How this package gets where it is needed, and who else installs a module of its name. Imports nothing."""

# The project's public address, such as "https://github.com/user/attnres". Whoever publishes the project fills it in:
# cards then link to it, and what tells how to install the package needs no clone
ADDRESS: str | None = None
SOURCE = "in a clone of attnres"
OTHERS = "fast-attnres"


def how_to_install(extra: str | None = None) -> str:
    """The command, and where to run it: `attnres` is not on PyPI, so that name would give an error or a stranger's."""
    brackets = "" if extra is None else f"[{extra}]"
    if ADDRESS is None:
        return f"pip install '.{brackets}' {SOURCE}"
    requirement = f"attnres{brackets} @ git+{ADDRESS}"
    return f"pip install '{requirement}'"


def mixed_up(folder: str, found: str) -> str:
    """What to say of a folder of this package in which somebody else has installed something."""
    return (
        f"`{folder}` is not this package alone: {found}. {OTHERS}, for one, installs a module of the same name, and"
        f" the two cannot be in one environment. Make a new one and {how_to_install()}, or here: pip uninstall attnres"
        f" {OTHERS}, remove what is left of the folder, and install again."
    )
