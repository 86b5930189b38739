# SPDX-License-Identifier: Apache-2.0
"""Every example of the README and of the pages runs, in order, in one process for each, and prints what stands there.

Commands and options that they name exist, and so does what they link to.
"""

import re
import shlex
from pathlib import Path

import pytest
from tiny_models import FAMILIES
from typer.testing import CliRunner

from attnres.cli import app
from attnres.modeling_attnres import AttnResForCausalLM


ROOT = Path(__file__).parent.parent
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))
}
# A block of code, and of what it prints if that stands below it
EXAMPLE = re.compile(r"```python\n(.*?)```(?:\n\n```\n(.*?)```)?", flags=re.DOTALL)


@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if EXAMPLE.search(text)])
def test_examples(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(AttnResForCausalLM, "_auto_class", None)
    namespace = {}
    for code, printed in EXAMPLE.findall(PAGES[page]):
        capsys.readouterr()
        exec(compile(code, page, "exec"), namespace)
        if printed:
            assert capsys.readouterr().out == printed


def test_every_page_is_linked_from_the_first():
    for page in PAGES:
        if page.startswith("docs/"):
            assert f"]({page}" in PAGES["README.md"], page


@pytest.mark.parametrize("page", PAGES)
def test_links(page):
    text = re.sub(r"```.*?```", "", PAGES[page], flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("https://"):
            continue
        path, _, heading = target.partition("#")
        linked = (ROOT / page).parent / path
        assert linked.exists(), target
        if heading:  # as on GitHub
            headings = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert heading in [re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings], target


def test_every_family_is_listed():
    assert set(re.findall(r"^\| (\w+) \| \de-", PAGES["docs/parity.md"], flags=re.MULTILINE)) == FAMILIES.keys()


@pytest.mark.parametrize("command", sorted(set(re.findall(r"`(attnres [a-z]+[^`]*)`", "".join(PAGES.values())))))
def test_commands_exist(command):
    subcommand = shlex.split(command)[1]
    result = CliRunner().invoke(app, [subcommand, "--help"])
    assert result.exit_code == 0
    for option in re.findall(r"--[a-z-]+", command):
        assert option in result.output
