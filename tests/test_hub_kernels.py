# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels as a kernel repository: written, loaded by the package `kernels`, and used by models."""

import functools
import importlib.util
import inspect
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from loopback_hub import LoopbackHub
from tiny_models import convert, randomize_queries, tiny_base_model


if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from export_kernels import BACKENDS, MODULE, NAME, export

import attnres
from attnres.depth import backends as depth_backends
from attnres.depth.kernels import FUNCTIONS, KERNELS_VERSION, module_of


ROOT = Path(__file__).parent.parent
TOOL = ROOT / "tests" / "tools" / "export_kernels.py"
PAGE = ROOT / "docs" / "how_to" / "backends.md"
# transformers imports the package wherever it is installed, so it is in a folder that only these tests see
BESIDE = Path(sys.prefix, "beside")


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    return export(tmp_path_factory.mktemp("repository") / NAME)


@pytest.fixture
def package(monkeypatch):
    """The package `kernels`, and at the end again the backend of before."""
    monkeypatch.syspath_prepend(str(BESIDE))
    yield pytest.importorskip("kernels", reason="the package kernels is not installed beside the environment")
    attnres.set_backend("auto")


def variant(repository, *names):
    """Where the files are that load here. A build of torch for GPUs takes those for GPUs on a CPU as well."""
    backend = "cuda" if torch.version.cuda else "rocm" if torch.version.hip else "cpu"
    return repository.joinpath("build", f"torch-{backend}", *names)


@pytest.fixture
def changed(repository, tmp_path):
    """Makes a repository with more code at its end. The id is another one, as that of other code is."""

    def change(code):
        folder = tmp_path / NAME
        shutil.copytree(variant(repository), variant(folder))
        with variant(folder, "__init__.py").open("a") as file:
            file.write(code)
        path = variant(folder, "metadata.json")
        path.write_text(json.dumps(json.loads(path.read_text()) | {"id": f"_{tmp_path.name}"}))
        return str(folder)

    return change


def run(model, input_ids):
    """Logits and all gradients, and logits with a block cache."""
    model.zero_grad()
    logits = model(input_ids, use_cache=False).logits
    logits.square().mean().backward()
    with torch.no_grad():
        return [logits, *(parameter.grad.clone() for parameter in model.parameters()), model(input_ids).logits]


def environment(**variables):
    paths = [*variables.pop("paths", ()), os.environ.get("PYTHONPATH", ""), str(BESIDE)]
    path = os.pathsep.join(filter(None, paths))
    return os.environ | {"PYTHONPATH": path, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"} | variables


def test_functions_are_those_of_our_kernels():
    """When this fails, `KERNELS_VERSION` has to go up: repositories have the functions of before."""
    found = {name: ", ".join(inspect.signature(getattr(module_of("triton"), name)).parameters) for name in FUNCTIONS}
    assert found == FUNCTIONS and KERNELS_VERSION == 1


def test_layout(repository, package):
    files = {path.relative_to(repository).as_posix(): path for path in repository.rglob("*") if path.is_file()}
    code = {"__init__.py", "triton_kernels.py"}
    in_builds = {f"build/torch-{backend}/{name}" for backend in BACKENDS for name in (*code, "metadata.json")}
    of_tests = {"tests/conftest.py", "tests/test_triton_kernels.py"}
    others = {"README.md", "LICENSE", "build.toml", *of_tests}
    assert files.keys() == {f"torch-ext/{MODULE}/{name}" for name in code} | in_builds | others
    assert variant(repository, "triton_kernels.py").read_bytes() == (ROOT / "depth/triton_kernels.py").read_bytes()
    general = pytest.importorskip("tomllib").loads(files["build.toml"].read_text())["general"]
    assert general["name"] == NAME and general["version"] == KERNELS_VERSION
    ids = set()
    for backend in general["backends"]:
        folder = repository / "build" / f"torch-{backend}"
        for name in code:
            assert (folder / name).read_bytes() == files[f"torch-ext/{MODULE}/{name}"].read_bytes()
        metadata = package.Metadata.read_from_file(folder / "metadata.json")
        metadata.digest.validate(metadata.digest.hash_variant(metadata.digest.algorithm, folder))
        assert metadata.name.python_name == MODULE and metadata.version == KERNELS_VERSION
        ids.add(metadata.id)
    assert len(ids) == len(BACKENDS) and all(name.isidentifier() for name in ids)


def test_what_is_there_is_not_touched(tmp_path, monkeypatch):
    (tmp_path / "mine").touch()
    monkeypatch.setattr(sys, "argv", [str(TOOL), str(tmp_path)])
    with pytest.raises(SystemExit, match=f"Error: `{re.escape(str(tmp_path))}` is not empty"):
        runpy.run_path(str(TOOL), run_name="__main__")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.slow
@pytest.mark.parametrize("which", ["refused or large", ""])
def test_tests_run_with_the_folder_alone(which, repository, tmp_path):
    """Where attnres cannot be imported."""
    (tmp_path / "attnres.py").write_text("raise ImportError('hidden')")
    command = [sys.executable, "-B", "-m", "pytest", "-p", "no:cacheprovider", "-k", which, "tests"]
    variables = os.environ | {"PYTHONPATH": str(tmp_path)}
    result = subprocess.run(command, cwd=repository, env=variables, capture_output=True, text=True)
    assert result.returncode == 0 and re.search(r"\b\d+ passed", result.stdout), result.stdout + result.stderr
    assert "skipped" not in result.stdout


@pytest.mark.slow
def test_same_model(repository, package, input_ids, monkeypatch):
    """The same kernels from there, so equal in every bit."""
    model, few_ids = randomize_queries(convert(tiny_base_model("qwen3"), 3)).train(), input_ids[:1, :3]
    attnres.set_backend("triton")
    expected = run(model, few_ids)
    attnres.set_backend(str(repository))
    assert attnres.get_backend() == str(repository)
    loaded = package.get_local_kernel(repository)
    calls = []

    def count(name, function, *args, **kwargs):
        calls.append(name)
        return function(*args, **kwargs)

    for name in FUNCTIONS:
        monkeypatch.setattr(loaded, name, functools.partial(count, name, getattr(loaded, name)))
    depth_backends.kernels_for(few_ids.float())
    calls.clear()  # those of the comparison with the definition
    for result, other in zip(run(model, few_ids), expected, strict=True):
        assert torch.equal(result, other)
    assert set(calls) == FUNCTIONS.keys()
    lines = depth_backends.describe()
    assert lines[0] == f"cpu: {repository}, as was chosen"
    assert lines[-1] == f"kernels of {repository}: {variant(repository)}"

    calls.clear()
    run(model.double(), few_ids)
    attnres.set_backend("triton")
    run(model.float(), few_ids)
    assert not calls, "in fp64, and after another choice, others compute"


OTHER_SIGNATURE = """
def merge(query, mix, state, sources, eps, dtype, norm=None, factor=1, num_heads=1, weights="softmax"):
    return triton_kernels.merge(query, mix, state, sources, dtype, eps, norm, factor, num_heads, weights)
"""


@pytest.mark.parametrize(
    "code, error",
    [
        ("KERNELS_VERSION = 0", "are of version 0, but attnres needs version 1. Name another revision"),
        ("KERNELS_VERSION = 2", "are of version 2, but attnres needs version 1"),
        ("del KERNELS_VERSION", "have no KERNELS_VERSION, but attnres needs version 1"),
        ("del merge", "have no function merge(query, mix, state, sources, dtype, eps, norm"),
        (
            "read_closed = None",
            "have no function read_closed(queries, sources, eps, num_heads, weights). Name another",
        ),
        (OTHER_SIGNATURE, "have no function merge(query, mix, state, sources, dtype, eps, norm"),
        ("raise OSError('no compiler')", "cannot be loaded: OSError: no compiler"),
    ],
)
def test_other_functions_are_refused(code, error, changed, package):
    folder = changed(code)
    with pytest.raises(ValueError, match=re.escape(f"The kernels of `{folder}` {error}")):
        attnres.set_backend(folder)
    assert attnres.get_backend() == "auto"


WRONG = """
import functools

@functools.wraps(merge)
def wrong(*args, **kwargs):
    return triton_kernels.merge(*args, **kwargs) * 1.001

merge = wrong
"""


def test_wrong_results_are_an_error(changed, package, input_ids):
    """The functions are there, and what they compute is compared before it is used."""
    folder = changed(WRONG)
    attnres.set_backend(folder)
    model = convert(tiny_base_model("qwen3"), 3)
    error = f"The kernels of `{folder}`, for torch.float32 on cpu: `merge` is off by 1.0e-03; `attnres.set_backend"
    for _ in range(2):
        with pytest.raises(ArithmeticError, match=re.escape(error)):
            model(input_ids[:1, :3])
    attnres.set_backend("torch")
    model(input_ids[:1, :3])


@pytest.mark.parametrize("name", ["cuda", "./missing", "owner/", "owner/name/more", "@v1", "-/name", ""])
def test_names_that_are_none(name):
    with pytest.raises(
        ValueError, match=f"`{re.escape(name)}` is not a backend; there are .*`owner/name` of a kernel"
    ):
        attnres.set_backend(name)


def test_folders_that_are_not_loaded(repository, package, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(repository, tmp_path / "owner" / "name")
    with pytest.raises(ValueError, match="`owner` cannot be loaded: FileNotFoundError: Cannot find a build variant"):
        attnres.set_backend("owner")
    # An id is never a folder, whose code would run without a question of trust
    with pytest.raises(ValueError, match="`owner/name` cannot be loaded: (?s:.*)name it `./owner/name`"):
        attnres.set_backend("owner/name")
    attnres.set_backend("./owner/name")


def test_what_is_missing(repository, monkeypatch):
    monkeypatch.setitem(sys.modules, "kernels", None)
    with pytest.raises(ValueError, match="The backend `owner/name` needs the package kernels: pip install kernels"):
        attnres.set_backend("owner/name")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=f"`{repository}` needs a GPU, or TRITON_INTERPRET=1"):
            attnres.set_backend(str(repository))
    assert attnres.get_backend() == "auto"


ON_THE_HUB = """
import sys
import torch, transformers.integrations
from huggingface_hub import HfApi

before = "kernels" in sys.modules
import attnres
from attnres.depth import backends
attnres.set_backend("torch")
assert before == ("kernels" in sys.modules)

HfApi().create_branch("tester/kernels", branch="other", revision="v1", repo_type="kernel")
where = {"repo_id": "tester/kernels", "repo_type": "kernel", "revision": "other"}
HfApi().upload_file(path_or_fileobj=b"", path_in_repo="other", **where)
HfApi().create_repo("tester/empty", repo_type="kernel")

def try_out(name, **options):
    attnres.set_backend("torch")
    try:
        attnres.set_backend(name, **options)
        backends.kernels_for(torch.zeros(1)).merge
        print(attnres.get_backend(), "from", backends.describe()[-1].rpartition("snapshots/")[2].partition("/")[0])
    except ValueError as error:
        print(str(error).replace("\\n", " "))

try_out("tester/kernels")
try_out("tester/kernels", trust_remote_code=True)
try_out("tester/kernels@other", trust_remote_code=True)
try_out("tester/kernels@main", trust_remote_code=True)
try_out("tester/empty", trust_remote_code=True)
try_out("publisher/kernels")
"""


@pytest.mark.slow
def test_on_the_hub(repository, package, tmp_path):
    """By `get_kernel`, with its rules: of a publisher that is trusted, or if the user says so."""
    with LoopbackHub(tmp_path) as hub:
        hub.trusted.add("publisher")
        command = [sys.executable, "-c", ON_THE_HUB]
        # Without telemetry, kernels 0.17.2 ends its user agent with a space, which httpcore refuses to send
        variables = environment(**hub.env()) | {"HF_HUB_DISABLE_TELEMETRY": "0"}
        upload = re.search(r"```bash\n(hf upload .*)\n```", PAGE.read_text(encoding="utf-8"))[1]
        for owner in ("tester", "publisher"):
            words = shlex.split(upload.replace(f"owner/{NAME}", f"{owner}/kernels"))
            subprocess.run(words, cwd=repository.parent, env=variables, capture_output=True, check=True)
        result = subprocess.run(command, env=variables, capture_output=True, text=True)
        refs = {name: hub.repos[name]["refs"] for name in ("tester/kernels", "publisher/kernels")}
        files = hub.files("tester/kernels", "v1")
    assert result.returncode == 0, result.stderr
    untrusted, trusted, other, main, empty, publisher = result.stdout.splitlines()
    assert "`tester/kernels` cannot be loaded: ValueError" in untrusted and "trust_remote_code=True" in untrusted
    assert trusted == f"tester/kernels from {refs['tester/kernels']['refs/heads/v1']}"
    assert other == f"tester/kernels@other from {refs['tester/kernels']['refs/heads/other']}"
    assert not any("cache" in path for path in files)
    assert "`tester/kernels@main` cannot be loaded: " in main
    assert "`tester/empty` cannot be loaded: ValueError: Version 1 not found" in empty
    assert publisher == f"publisher/kernels from {refs['publisher/kernels']['refs/heads/v1']}"


@pytest.mark.slow
def test_example_of_the_page(package, tmp_path):
    """The commands of the page, in a fresh folder, and the end of what they print."""
    section = PAGE.read_text(encoding="utf-8").partition("## Kernels from the Hub")[2]
    commands = re.search(r"```bash\n(python .*?)```", section, flags=re.DOTALL)[1]
    expected = re.search(r"```text\n(.*?)```", section, flags=re.DOTALL)[1]
    commands = "set -e\n" + commands.replace("tests/tools/", f"{TOOL.parent}/").replace(
        "-m pytest", "-m pytest -k no_t"
    )
    result = subprocess.run(["bash", "-c", commands], cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.replace(f"{tmp_path}/", ".../").endswith(expected)
