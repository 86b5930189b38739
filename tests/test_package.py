# SPDX-License-Identifier: Apache-2.0
"""What is shipped: the files of the distributions, what they need, the version, and the names that editors see."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import attnres


ROOT = Path(__file__).parents[1]
PACKAGES = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
# Run by every Python that finds it: what is not among the dependencies is not installed
SITECUSTOMIZE = """
import os
from importlib import machinery

hidden, find_spec = set(os.environ["HIDDEN"].split()), machinery.PathFinder.find_spec
machinery.PathFinder.find_spec = lambda name, *args: None if name in hidden else find_spec(name, *args)
"""
CONVERT = """
import importlib.util, sys
from transformers import AutoModelForCausalLM, LlamaConfig
import attnres
from attnres.conversion import convert

assert importlib.util.find_spec("pytest") is None, "what is hidden is found"
config = LlamaConfig(
    vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)
AutoModelForCausalLM.from_config(config).save_pretrained("base")
report = convert("base", "converted", num_blocks=2)
model = AutoModelForCausalLM.from_pretrained("converted")
print(report.verification.equal, type(model).__name__, attnres.__version__, attnres.__file__)
"""


def test_type_checkers_see_the_names_that_are_imported_when_they_are_used():
    tree = ast.parse((ROOT / "__init__.pyi").read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    shown = {alias.name: f".{node.module}" for node in imports for alias in node.names}
    assert shown == attnres._PUBLIC_NAMES
    assert all(alias.name == alias.asname for node in imports for alias in node.names)  # or they are private
    assert all(getattr(attnres, name).__name__ == name for name in shown)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attnres-main", "2 copies"])
def test_checkouts_have_any_name(name, tmp_path):
    """GitHub's archives unpack into a folder whose name a package cannot have."""
    (tmp_path / name).mkdir()
    for file in ("pyproject.toml", "__init__.py", "registration.py"):
        shutil.copy(ROOT / file, tmp_path / name)
    shutil.copytree(ROOT / "tests", tmp_path / name / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "2", "tests/test_curves.py"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path / name, timeout=300)
    assert result.returncode == 0 and " passed" in result.stdout, result.stdout


def test_one_version():
    citation = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    changes = re.search(r"^## (\d[^ \n]*)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert citation[1] == changes[1] == attnres.__version__


@pytest.fixture(scope="module")
def distributions(tmp_path_factory) -> dict[str, Path]:
    """The source distribution, the wheel made of it, and a wheel made of the tree itself."""
    folder = tmp_path_factory.mktemp("package")
    ignored = shutil.ignore_patterns(
        ".*", "__pycache__", "*.egg-info", "build", "dist", "attnres-demo", "attnres-real"
    )
    shutil.copytree(ROOT, folder / "tree", ignore=ignored)
    for options in (("--outdir", "dist"), ("--wheel", "--outdir", "direct")):
        command = [sys.executable, "-m", "build", "--no-isolation", *options, "tree"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    (source,), (wheel,), (direct,) = (folder.glob(name) for name in ("dist/*.tar.gz", "dist/*.whl", "direct/*.whl"))
    return {"source": source, "wheel": wheel, "direct": direct}


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def shipped_files() -> set[str]:
    """All files in the folders of the package, but for results of benchmarks; at the root, its modules and data."""
    files = {path for pattern in ("*.py", "*.pyi", "py.typed", "*.json") for path in ROOT.glob(pattern)}
    files |= {path for folder in PACKAGES for path in (ROOT / folder).rglob("*") if path.is_file()}
    relative = {path.relative_to(ROOT) for path in files}
    return {
        path.as_posix()
        for path in relative
        if "__pycache__" not in path.parts and (path.parts[0] != "benchmarks" or path.suffix in (".py", ".jinja"))
    }


@pytest.mark.slow
def test_the_wheel_has_the_package_and_nothing_else(distributions):
    files = contents(distributions["wheel"])
    info = f"attnres-{attnres.__version__}.dist-info"
    about = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt")
    expected = {f"attnres/{path}" for path in shipped_files()} | {f"{info}/{name}" for name in about}
    assert set(files) == expected
    assert {"attnres/base/families.json", "attnres/py.typed", "attnres/data/sample.txt"} < expected
    assert files == contents(distributions["direct"])


@pytest.mark.slow
def test_the_source_distribution_has_what_the_wheel_is_made_of(distributions):
    with tarfile.open(distributions["source"]) as archive:
        names = [member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()]
    about = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md"}
    files = {name for name in names if not name.startswith("attnres.egg-info/")}
    assert files == shipped_files() | about | {"pyproject.toml", "setup.cfg"}


def needed_by(requirements: list[str]) -> set[str]:
    """The names of the distributions that are installed for requirements, without any extra of theirs."""
    needed, left = set(), [(Requirement(requirement), "") for requirement in requirements]
    while left:
        requirement, extra = left.pop()
        name = canonicalize_name(requirement.name)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        known = name in needed
        needed.add(name)
        if known and not requirement.extras:
            continue
        try:
            further = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        left += [(Requirement(text), extra) for text in further for extra in ("", *requirement.extras)]
    return needed


@pytest.mark.slow
def test_the_wheel_runs_with_its_plain_dependencies_alone(distributions, tmp_path):
    installed, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", installed]
    subprocess.run([*command, distributions["wheel"]], check=True, capture_output=True)
    (distribution,) = metadata.distributions(path=[str(installed)])
    needed = needed_by(distribution.requires)
    assert {"torch", "transformers", "numpy"} < needed and not needed & {"datasets", "lm-eval", "peft", "pytest"}
    hidden = [
        module
        for module, names in metadata.packages_distributions().items()
        if not {canonicalize_name(name) for name in names} & {*needed, "attnres"}
    ]
    for folder in (elsewhere, tmp_path / "hides"):
        folder.mkdir()
    (tmp_path / "hides" / "sitecustomize.py").write_text(SITECUSTOMIZE, encoding="utf-8")
    path = os.pathsep.join(map(str, (tmp_path / "hides", installed)))
    environment = {**os.environ, "PYTHONPATH": path, "HIDDEN": " ".join(hidden)}

    def run(*arguments: str) -> str:
        result = subprocess.run(
            [sys.executable, *arguments], cwd=elsewhere, env=environment, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    equal, model_class, version, file = run("-c", CONVERT).split()
    assert (equal, model_class, version) == ("True", "AttnResForCausalLM", attnres.__version__)
    assert Path(file) == installed / "attnres" / "__init__.py"
    assert "convert" in run("-m", "attnres", "--help")
    run("-m", "attnres", "revert", "converted", "base-again")
    assert (elsewhere / "base-again" / "model.safetensors").read_bytes() == (
        elsewhere / "base" / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("kind", ["ours", "a clone", "theirs before", "theirs after"])
def test_files_of_another_distribution_are_told_of(kind, tmp_path):
    """As fast-attnres has them, whose module has the same name; installed before this one, or after it."""
    installed = tmp_path / "site" / "attnres"
    shutil.copytree(ROOT, installed, ignore=lambda _, names: {name for name in names if not name.endswith(".py")})
    files = [f"attnres/{path.name},sha256=a,1\n" for path in installed.iterdir()]
    if kind != "a clone":
        info = installed.parent / f"attnres-{attnres.__version__}.dist-info"
        info.mkdir()
        (info / "RECORD").write_text("".join(files) + "attnres/eval/__init__.py,sha256=a,1\n")
    if kind != "ours":
        for name in ("api.py", "multiquery.py"):
            (installed / name).touch()
    if kind == "theirs after":
        (installed / "__init__.py").write_text('__version__ = "2.1.0"\n__all__ = ["attnres"]\n')
    environment = {**os.environ, "PYTHONPATH": str(installed.parent)}
    program = (
        ["-m", "attnres", "--help"] if kind == "theirs after" else ["-c", "import attnres; print(attnres.__file__)"]
    )
    done = subprocess.run([sys.executable, *program], cwd=tmp_path, env=environment, capture_output=True, text=True)
    if kind == "theirs after":
        assert done.returncode == 1 and done.stdout == "" and len(done.stderr.splitlines()) == 1
        assert done.stderr.startswith(f"Error: `{installed}` is not this package alone: its `__init__.py`")
        return
    assert done.returncode == 0 and done.stdout == f"{installed / '__init__.py'}\n"
    if kind == "theirs before":
        assert "RuntimeWarning: " in done.stderr and "fast-attnres" in done.stderr
        assert "`api.py`, `multiquery.py` came with something else" in done.stderr
    else:
        assert done.stderr == ""


def test_nobody_is_sent_to_a_name_that_is_not_ours():
    """`pip install attnres` gives nothing, or a stranger's package, until it is published."""
    pattern = re.compile(r"pip install (-\S+ )*['\"]?attnres\b")
    names = [path for kind in ("*.py", "*.md", "*.jinja", "*.yml", "*.yaml") for path in ROOT.rglob(kind)]
    found = [
        (path.relative_to(ROOT).as_posix(), line)
        for path in names
        if not {".venv", "build", "tests"} & {*path.relative_to(ROOT).parts} and path.is_file()
        for line in path.read_text(encoding="utf-8").splitlines()
        if pattern.search(line) and "uninstall" not in line and " @ git+" not in line
    ]
    assert found == []


def test_the_page_of_the_package_has_no_relative_links(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    from package_page import package_page

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert package_page(readme, None) == readme
    page = package_page(readme, "https://example.com/a/b")
    targets = re.findall(r'\]\(([^)]+)\)|(?:src|srcset)="([^"]+)"', re.sub("```.*?```", "", page, flags=re.DOTALL))
    found = [link or image for link, image in targets]
    assert len(found) > 20 and all(target.startswith(("https://", "#")) for target in found)
    assert "https://example.com/a/b/blob/main/docs/tutorial.md" in found
    assert "https://example.com/a/b/raw/main/docs/schematic-light.svg" in found
    assert "git+https://example.com/a/b" in page and "ADDRESS" not in page
