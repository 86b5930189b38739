# SPDX-License-Identifier: Apache-2.0
"""Writes `docs/reference/*.md` from the docstrings of the public names, and from the help of the commands.

    python tests/tools/reference_pages.py

In a page, a line such as `<!-- attnres.conversion.convert -->` begins what is written here of that name, and
`<!-- End -->` ends it. Of a class it takes all public members that have a docstring, or those after a colon:
`<!-- attnres.depth.stream.DepthStream: write, read -->`, or `: none`. `<!-- commands -->` begins all commands.
Everything else in a page is written by hand.
"""

import ast
import functools
import re
import tempfile
import textwrap
from pathlib import Path

import griffe
import typer.main
from typer.cli import get_docs_for_click

from attnres.cli import app


ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs/reference").glob("*.md"))
WRITTEN = re.compile(r"^<!-- ([\w.]+)(?:: ([\w, ]+))? -->\n.*?^<!-- End -->$", flags=re.DOTALL | re.MULTILINE)
# An argument as transformers' docstrings write it, whose type the signature has: block_size (`int`, *optional*):
ARGUMENT = re.compile(r"^( *)(\w+) \(`.*\):$", flags=re.MULTILINE)
# Arguments at the left edge, with the indented lines below each, as in docstrings of transformers' classes
BARE_ARGUMENTS = re.compile(r"(?:^\w+:\n(?:^ +.*\n)+)+", flags=re.MULTILINE)
# Of transformers' own site
LINK = re.compile(r"\[(`[^`]+`)\](?!\()")
LINE_LENGTH = 100


def written(page: str) -> str:
    """A page with its generated parts as the docstrings are now."""

    def part(match: re.Match) -> str:
        name, members = match.groups()
        text = commands() if name == "commands" else entry(read_package()[name.removeprefix("attnres.")], members)
        return f"{match[0].splitlines()[0]}\n\n{text}\n\n<!-- End -->"

    return WRITTEN.sub(part, page)


@functools.cache
def read_package() -> griffe.Module:
    """The package, read and not imported. The checkout may have any name, and more in it than the package."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "attnres"
        package.mkdir()
        for path in ROOT.iterdir():
            if path.suffix == ".py" or (path / "__init__.py").exists():
                (package / path.name).symlink_to(path)
        extensions = griffe.load_extensions(HelpOfFields())
        return griffe.load("attnres", search_paths=[folder], resolve_aliases=True, extensions=extensions)


class HelpOfFields(griffe.Extension):
    """The docstring of a dataclass's field is the help in its metadata, where `HfArgumentParser` looks for it."""

    def on_attribute_instance(self, *, node, attr: griffe.Attribute, **kwargs):
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call):
            metadata = next((keyword.value for keyword in node.value.keywords if keyword.arg == "metadata"), None)
            if metadata is not None:
                attr.docstring = griffe.Docstring(ast.literal_eval(metadata)["help"], parent=attr)


def entry(item: griffe.Object | griffe.Alias, members: str | None) -> str:
    """The section of a class or a function: its signature, its text, and the members of a class."""
    texts = [f"### {item.name}", signature(item), text_of(item)]
    if item.is_class:
        chosen = {None: public_members(item), "none": []}.get(members) or re.findall(r"\w+", members or "")
        for member in [item.all_members[name] for name in chosen if members != "none"]:
            texts += [f"#### {item.name}.{member.name}", signature(member), text_of(member)]
    return "\n\n".join(text for text in texts if text)


def public_members(item: griffe.Class) -> list[str]:
    members = (member for member in item.members.values() if member.docstring and not member.name.startswith("_"))
    return [member.name for member in sorted(members, key=lambda member: member.lineno)]


def signature(item: griffe.Object) -> str:
    """In a block of code, on one line or with a line for each argument. `py`, as it is not to be run."""
    if item.is_attribute:
        line = f"{item.name}: {item.annotation}" if item.annotation else ""
        return f"```py\n{line}\n```" if line else ""
    line = (item.final_target if item.is_alias else item).signature()
    if item.is_class:
        line = f"class {line}" if item.parameters else f"class {item.name}({', '.join(map(str, item.bases))})"
    if len(line) > LINE_LENGTH:
        head, rest = line.split("(", 1)
        arguments, tail = rest.rsplit(")", 1)
        line = f"{head}(\n" + "".join(f"    {argument},\n" for argument in split(arguments)) + f"){tail}"
    return f"```py\n{line}\n```"


def split(arguments: str) -> list[str]:
    """At the commas that are not in brackets."""
    found, depth = [""], 0
    for sign in arguments:
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and not depth:
            found.append("")
        else:
            found[-1] += sign
    return [argument.strip() for argument in found]


def text_of(item: griffe.Object) -> str:
    if item.docstring is None:
        return ""
    text = LINK.sub(r"\1", item.docstring.value).replace("```python", "```py")
    with_names_alone = ARGUMENT.sub(r"\1\2:", text)
    if with_names_alone != text and "Args:\n" not in text:
        text = BARE_ARGUMENTS.sub(lambda found: "Args:\n" + textwrap.indent(found[0], "    "), with_names_alone + "\n")
    else:
        text = with_names_alone
    docstring = griffe.Docstring(text, parent=item.docstring.parent)
    options = {"returns_multiple_items": False, "returns_named_value": False, "warnings": False}
    return "\n\n".join(map(section_text, griffe.parse_google(docstring, **options)))


def section_text(section: griffe.DocstringSection) -> str:
    if section.kind is griffe.DocstringSectionKind.text:
        return section.value.strip()
    lines = [f"**{section.kind.value.capitalize()}**", ""]
    for element in section.value:
        description = textwrap.indent(element.description.strip(), "  ").strip()
        lines.append(f"- `{title(element)}`: {description}")
    return "\n".join(lines)


def title(element: griffe.DocstringElement) -> str:
    """The name of an argument, or the type of a result or an error; of several that share a line, all."""
    name, annotation = getattr(element, "name", ""), str(element.annotation)
    if name.endswith(","):  # Griffe takes the second name for a type
        return f"{name} {annotation}"
    return name or annotation.strip("()")


def commands() -> str:
    """All commands with their options, as typer writes them."""
    command = typer.main.get_command(app)
    context = typer.Context(command)
    texts = (
        get_docs_for_click(obj=command.get_command(context, name), ctx=context, indent=1, call_prefix="attnres")
        for name in command.list_commands(context)
    )
    return "\n\n".join(text.strip() for text in texts)


def main():
    for path in PAGES:
        path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
