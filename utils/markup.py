# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Names and texts of others in our Markdown, HTML and figures, shown as text that does nothing.

Names of folders, files, data sets and bases, and the texts of reports, may come from anybody.
"""

import json
import re
import shlex
from importlib import resources
from typing import Any

from jinja2 import Environment


# Whose meaning a backslash takes, in CommonMark; `_` has none within a word
_MARKS = re.compile(r"[\\`*\[\]<>&|~$#]|(?<![^\W_])_|_(?![^\W_])")
# Addresses that GitHub's Markdown makes links of
_ADDRESSES = re.compile(r"\b(?:(https?|ftp)://|(www)\.)", re.IGNORECASE)
# Code between single backticks
_CODE = re.compile(r"(?<!`)`[^`\n]+`(?!`)")
_ESCAPED = r"\\[!-/:-@\[-`{-~]"
_LINE_STARTS = re.compile(r"^(\s*)(#|~{3,}|[=-]+\s*$)", re.MULTILINE)


class Markdown(str):
    """Text that is Markdown already, with nothing of others in it that is not escaped."""


def printable(text: Any) -> str:
    """On one line, with a space for what cannot be seen: line breaks, controls, and marks that turn the direction."""
    return "".join(character if character.isprintable() else " " for character in str(text))


def escaped(text: Any) -> Markdown:
    """Text that Markdown shows as it is, anywhere but at the start of a line."""
    return Markdown(_without_addresses(_MARKS.sub(r"\\\g<0>", printable(text))))


def code(text: Any) -> Markdown:
    """Text as code on a line, but not in a table, whose cells end at every `|`."""
    text = printable(text)
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    pad = " " if longest or not text.strip() else ""
    return Markdown("`" * (longest + 1) + pad + text + pad + "`" * (longest + 1))


def fenced(text: Any) -> Markdown:
    """Text of several lines as a block of code, which nothing in it ends."""
    lines = "\n".join(map(printable, str(text).split("\n")))
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", lines)), default=0))
    return Markdown(f"{fence}\n{lines}\n{fence}")


def sentence(text: Any) -> Markdown:
    """Text of ours with names of others in it: what is between single backticks stays code, all else is escaped."""
    return _around(_CODE, printable(text), escaped)


def plain_markdown(text: str) -> Markdown:
    """Markdown of others with its paragraphs, lists and tables, and without HTML, links, pictures and headings.

    What we have escaped ourselves stays as it is.
    """
    lines = "\n".join(map(printable, text.split("\n")))
    lines = _around(
        re.compile(f"{_ESCAPED}|{_CODE.pattern}"),
        lines,
        lambda part: _without_addresses(re.sub(r"[<\[\]`$\\]", r"\\\g<0>", part)),
    )
    return Markdown(_LINE_STARTS.sub(r"\1\\\2", lines))


def figure_text(text: Any) -> str:
    """Text that matplotlib draws as it is: dollars are no formulas, and no name is left out of a legend."""
    text = printable(text).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def render(package: str, template: str, **values: Any) -> str:
    """A template of a package, in which values that are not `Markdown` or numbers are escaped.

    Further filters: `code`, `fenced` for a block of it, `python` for a string of Python, and `shell` for a word of a
    command.
    """
    environment = Environment(finalize=_finalized)
    environment.filters |= {
        "code": code,
        "fenced": fenced,
        "python": lambda text: Markdown(json.dumps(printable(text), ensure_ascii=False)),
        "shell": lambda text: Markdown(shlex.quote(printable(text))),
    }
    source = resources.files(package).joinpath(template).read_text(encoding="utf-8")
    return environment.from_string(source).render(values)


def _finalized(value: Any) -> Any:
    return value if isinstance(value, Markdown | int | float) else escaped(value)


def _without_addresses(text: str) -> str:
    return _ADDRESSES.sub(lambda match: rf"{match[1]}\://" if match[1] else rf"{match[2]}\.", text)


def _around(kept: re.Pattern, text: str, change: Any) -> Markdown:
    """Change what lies between the matches of a pattern."""
    parts, end = [], 0
    for match in kept.finditer(text):
        parts += [change(text[end : match.start()]), match[0]]
        end = match.end()
    return Markdown("".join([*parts, change(text[end:])]))
