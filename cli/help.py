# SPDX-License-Identifier: Apache-2.0
"""The look of `--help`: plain types, arguments without braces, and colours that light and dark terminals can show."""

import contextlib
from typing import Any

from typer.core import TyperArgument, TyperCommand, TyperGroup


# How the help names a value, by the annotation of the option
TYPE_NAMES = {"int": "NUMBER", "float": "NUMBER", "str": "TEXT", "list[str]": "TEXT", "Path": "PATH"}


def _show_plainly(param: Any):
    """Typer has no setting for this. It shows `<bool>` for flags, `[x>=1]` for numbers, and `{SOURCE}`."""
    if isinstance(param, TyperArgument):
        name = param.metavar or param.name.upper()
        if not param.required:
            name = f"[{name}]"
        several = param.nargs != 1 and " " not in name
        param.get_usage_pieces = lambda ctx: [name + "..." * several]  # type: ignore[method-assign]
        param.display_type_rich = lambda ctx: None  # type: ignore[method-assign]
        return
    param.min = param.max = None  # only shown; the annotation checks them
    if param.metavar is None:
        if param.is_flag:
            param.metavar = ""
        elif param.type_descriptor.is_choice:
            param.metavar = param.display_type(None).strip("<>")
        else:
            param.metavar = TYPE_NAMES[param.bare_type()]


class _Plain:
    def get_params(self, ctx):
        params = super().get_params(ctx)
        with contextlib.suppress(AttributeError):  # a later typer may have other names, and then its own look
            for param in params:
                _show_plainly(param)
        return params

    def format_help(self, ctx, formatter):
        from typer import rich_utils  # which `attnres COMMAND` does without

        rich_utils.STYLE_TYPES = rich_utils.STYLE_USAGE = "bold"  # yellow cannot be read on white
        super().format_help(ctx, formatter)


class Command(_Plain, TyperCommand):
    pass


class Group(_Plain, TyperGroup):
    pass
