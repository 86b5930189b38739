# SPDX-License-Identifier: Apache-2.0
"""Every example of the README runs, in order, in one process."""

import re
import shlex
from pathlib import Path

import pytest
from tiny_models import FAMILIES
from typer.testing import CliRunner

from attnres.cli import app
from attnres.modeling_attnres import AttnResForCausalLM


README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_python_examples(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(AttnResForCausalLM, "_auto_class", None)
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) >= 7
    namespace = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    assert (tmp_path / "self-contained" / "modeling_attnres.py").exists()


def test_multimodal_example(tmp_path, monkeypatch, capsys):
    """The page's code prints what stands below it."""
    page = (Path(__file__).parent.parent / "docs/multimodal.md").read_text(encoding="utf-8")
    code, printed = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", page, flags=re.DOTALL).groups()
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "multimodal.md", "exec"), {})
    assert capsys.readouterr().out == printed


def test_every_family_is_listed():
    assert set(re.findall(r"^\| (\w+) \| \de-", README, flags=re.MULTILINE)) == FAMILIES.keys()


@pytest.mark.parametrize("command", sorted(set(re.findall(r"`(attnres [a-z]+[^`]*)`", README))))
def test_commands_exist(command):
    subcommand = shlex.split(command)[1]
    result = CliRunner().invoke(app, [subcommand, "--help"])
    assert result.exit_code == 0
    for option in re.findall(r"--[a-z-]+", command):
        assert option in result.output
