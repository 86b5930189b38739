# SPDX-License-Identifier: Apache-2.0
"""The code that goes with a checkpoint: whichever way it was saved, it loads where the package is not installed."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from loopback_hub import LoopbackHub
from rounding import UpToRounding
from safetensors.torch import load_file
from tiny_models import WITHOUT_PACKAGE, randomize_queries, tiny_base_model
from tiny_models import convert as convert_in_memory
from transformers import AutoModelForCausalLM
from transformers.dynamic_module_utils import get_relative_import_files

from attnres import AttnResConfig, AttnResForCausalLM, AttnResModel
from attnres.checkpoints.checkpoint import open_checkpoint
from attnres.checkpoints.remote_code import closure, code_files, flattened, write_code
from attnres.configuration_attnres import remote_code_auto_map
from attnres.conversion import convert, revert
from attnres.model_cards.hub import plan_push


ROOT = Path(__file__).parents[1]
CODE = set(code_files())
# The code that attnres 0.2 wrote, and where it stands in the history
CODE_OF_0_2 = (
    *("attn_res_fields.py", "base_classes.py", "base_config.py", "configuration_attnres.py", "depth_attention.py"),
    *("depth_backends.py", "depth_forward.py", "depth_pipeline.py", "depth_probe.py", "depth_queries.py"),
    *("depth_reads.py", "depth_stream.py", "generation_attnres.py", "library_lookups.py", "modeling_attnres.py"),
    "saving_attnres.py",
)
COMMIT_OF_0_2 = "21867907e1e4762a65337a25274d8adf2ce689d9"
INPUT_IDS = torch.arange(3, 12)[None]


def code_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.py")}


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def run_python(script: str, *args, **env: str) -> str:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **env}
    command = [sys.executable, "-c", script, *map(str, args)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


# --- the closure


@pytest.mark.parametrize("entry", ["modeling_attnres.py", "configuration_attnres.py"])
def test_transformers_finds_all_of_it(entry, tmp_path):
    """From either file, as a config may be loaded and saved alone."""
    write_code(tmp_path)
    found = map(Path, get_relative_import_files(str(tmp_path / entry)))
    assert {entry, *(path.name for path in found)} == CODE == {path.name for path in tmp_path.iterdir()}


def test_only_imports_are_changed():
    """So line numbers in tracebacks are those of the package, and the package is not needed."""
    of_package = {"_".join(path.relative_to(ROOT).parts): path for path in [*ROOT.glob("*.py"), *ROOT.glob("*/*.py")]}
    for name, content in code_files().items():
        compile(content, name, "exec")
        lines = content.decode().splitlines()
        original = of_package[name].read_text(encoding="utf-8").splitlines()
        assert len(lines) == len(original) + (4 if name == "configuration_attnres.py" else 0)
        for line, before in zip(lines, original):
            assert line == before or re.match(r"\s*from \.+[\w.]+ import ", before), f"{name}: {before}"
            assert not re.match(r"\s*from \.(\.|\w+\.)", line), f"{name}: {line}"
        tree = ast.parse(content)
        attempts = [node for node in ast.walk(tree) if isinstance(node, ast.Try)]
        guarded = {id(node) for attempt in attempts for node in ast.walk(attempt)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in guarded:
                names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
                assert getattr(node, "level", 0) or not any(name.split(".")[0] == "attnres" for name in names)


@pytest.mark.parametrize(
    "files, message",
    [
        (
            {"depth/a.py": "def f():\n    from . import b\n"},
            r"depth/a\.py, line 2: `from \. import b` is not followed",
        ),
        ({"depth/a.py": "from .. import b\n"}, r"line 1: `from \. import b` is not followed"),
        ({"depth/a.py": "from ..base import b\n", "base/b.py": ""}, "`base` is no module: import names from modules"),
        ({"depth/a.py": "from .b import c\n"}, "`depth/b` is no module"),
        ({"depth/a.py": "from ..depth_a import b\n", "depth_a.py": ""}, r"would both be `depth_a\.py`"),
        ({"depth/a.py": "x = 1; from .b import c\n", "depth/b.py": ""}, r"`from \.b import` must begin its line"),
        ({"depth/a.py": "from  .b import c\n", "depth/b.py": ""}, r"`from \.b import` must begin its line"),
        ({"depth/a.py": "from .b \\\n    import c\n", "depth/b.py": ""}, r"`from \.b import` must begin its line"),
    ],
)
def test_imports_that_transformers_would_not_follow(files, message, tmp_path):
    for name, content in {"modeling_attnres.py": "from .depth.a import f\n", **files}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        closure(tmp_path)


def test_flattening():
    source = '"""See from .b import c."""\n\nfrom .b import (\n    c,\n)\nif True:\n    from ..base.d import e as f\n'
    expected = source.replace("from .b import (", "from .depth_b import (").replace("..base.d", ".base_d")
    assert flattened(source, ("depth", "a")) == (expected, [("depth", "b"), ("base", "d")])


# --- ways to save


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("remote") / "base"
    tiny_base_model("llama").save_pretrained(folder)
    return folder


@pytest.fixture
def trained():
    return randomize_queries(convert_in_memory(tiny_base_model("llama"), 3))


@pytest.fixture
def unregistered(monkeypatch):
    """Classes of the package whose registration ends with the test."""
    for registered in (AttnResForCausalLM, AttnResModel, AttnResConfig):
        monkeypatch.setattr(registered, "_auto_class", None)


def save_in_every_way(base: Path, folder: Path, model: AttnResForCausalLM) -> dict[str, Path]:
    """Folders of one model each, by how they were written, in the package."""
    ways = {name: folder / name for name in ("converted", "saved", "causal-lm", "trunk", "config", "config-alone")}
    convert(base, ways["converted"], block_size=3, self_contained=True, verify=False)
    again = AutoModelForCausalLM.from_pretrained(ways["converted"])
    again.load_state_dict(model.state_dict())
    again.save_pretrained(ways["saved"])
    AttnResForCausalLM.register_for_auto_class("AutoModelForCausalLM")
    model.save_pretrained(ways["causal-lm"])
    AttnResForCausalLM._auto_class = None
    AttnResModel.register_for_auto_class("AutoModel")
    model.model.save_pretrained(ways["trunk"])
    AttnResModel._auto_class = None
    AttnResConfig.register_for_auto_class()
    config = AttnResConfig.from_pretrained(ways["causal-lm"])
    config.save_pretrained(ways["config-alone"])
    convert_in_memory(tiny_base_model("llama"), 3).save_pretrained(ways["config"])
    AttnResConfig._auto_class = None
    for name in ("config", "config-alone"):
        shutil.copy(ways["causal-lm"] / "model.safetensors", ways[name])
    return ways


def test_every_way_to_save_takes_the_code_along(base, trained, unregistered, tmp_path):
    for name, folder in save_in_every_way(base, tmp_path, trained).items():
        assert code_in(folder) == code_files(), name
        assert json.loads((folder / "config.json").read_text())["auto_map"] == remote_code_auto_map("llama")
        assert set(open_checkpoint(folder).code) == CODE
    trained.config.auto_map = {}
    trained.save_pretrained(tmp_path / "without")
    trained.config.save_pretrained(tmp_path / "without-config")
    for name in ("without", "without-config"):  # what was registered once is not any more
        assert code_in(tmp_path / name) == {} and "auto_map" not in (tmp_path / name / "config.json").read_text()


LOAD_AND_SAVE = """
import glob, os, shutil, torch, transformers
input_ids = torch.arange(3, 12)[None]
for folder in sys.argv[1:]:
    auto = transformers.AutoModel if os.path.basename(folder) == "trunk" else transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder, trust_remote_code=True).eval()
    assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
    with torch.no_grad():
        outputs = model(input_ids)[0]
    model.save_pretrained(folder + "/again")
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    config.save_pretrained(folder + "/config-again")
    for path in glob.glob(folder + "/model*"):
        shutil.copy(path, folder + "/config-again")
    for name in ("again", "config-again"):
        again = auto.from_pretrained(folder + "/" + name, trust_remote_code=True).eval()
        with torch.no_grad():
            assert torch.equal(again(input_ids)[0], outputs)
    torch.save(outputs, folder + "/outputs.pt")
assert not any(name.split(".")[0] == "attnres" for name in sys.modules)
"""


def check_outputs(folder: Path, model: torch.nn.Module):
    """What `LOAD_AND_SAVE` has left."""
    with torch.no_grad():
        assert torch.equal(torch.load(folder / "outputs.pt"), model.eval()(INPUT_IDS)[0]), folder.name
    code = code_in(folder)
    assert code and code_in(folder / "again") == code_in(folder / "config-again") == code
    for name in ("again", "config-again"):
        saved, first = (json.loads((place / "config.json").read_text()) for place in (folder / name, folder))
        assert saved["auto_map"] == remote_code_auto_map("llama")
        assert {k: v for k, v in saved.items() if k != "dtype"} == {k: v for k, v in first.items() if k != "dtype"}
    saved, first = map(tensors_in, (folder / "again", folder))
    assert saved.keys() == first.keys() and all(torch.equal(saved[name], first[name]) for name in first)


@pytest.mark.slow
def test_every_way_to_save_loads_without_the_package(base, trained, unregistered, tmp_path):
    """And saved again there, the model or its config alone, it is the same."""
    ways = save_in_every_way(base, tmp_path, trained)
    run_python(WITHOUT_PACKAGE + LOAD_AND_SAVE, *ways.values(), HF_MODULES_CACHE=str(tmp_path / "modules"))
    untrained = convert_in_memory(tiny_base_model("llama"), 3)
    for name, folder in ways.items():
        check_outputs(folder, {"converted": untrained, "trunk": trained.model}.get(name, trained))


PUSH = """
import sys
from attnres.model_cards.hub import push
push(sys.argv[1], "tester/pushed")
"""
PUSH_AGAIN = """
import os, transformers
from huggingface_hub import snapshot_download
model = transformers.AutoModelForCausalLM.from_pretrained("tester/pushed", trust_remote_code=True)
model.push_to_hub("tester/again")
model.config.push_to_hub("tester/config")
snapshot_download("tester/again", local_dir=sys.argv[1])
"""


@pytest.mark.slow
def test_pushed_and_pushed_again_without_the_package(trained, tmp_path):
    trained.save_pretrained(tmp_path / "model")
    with LoopbackHub(tmp_path / "hub") as hub:
        run_python(PUSH, tmp_path / "model", **hub.env())
        run_python(WITHOUT_PACKAGE + PUSH_AGAIN, tmp_path / "again", **hub.env())
        for repo_id in ("tester/pushed", "tester/again", "tester/config"):
            files = hub.files(repo_id)
            assert {name: content for name, content in files.items() if name.endswith(".py")} == code_files(), repo_id
            assert json.loads(files["config.json"])["auto_map"] == remote_code_auto_map("llama")
    shutil.rmtree(tmp_path / "again/.cache", ignore_errors=True)
    run_python(WITHOUT_PACKAGE + LOAD_AND_SAVE, tmp_path / "again", HF_MODULES_CACHE=str(tmp_path / "modules"))
    check_outputs(tmp_path / "again", trained)


# --- folders that attnres 0.2 wrote


def write_old_names(folder: Path):
    """Of 0.2 the names, and who imports whom, as far as it is needed to find all."""
    others = [name.removesuffix(".py") for name in CODE_OF_0_2 if name != "modeling_attnres.py"]
    for name in others:
        (folder / f"{name}.py").write_text("OLD = True\n")
    imports = "".join(f"from .{name} import OLD\n" for name in others)
    (folder / "modeling_attnres.py").write_text(imports)


@pytest.fixture
def folder_of_0_2(base, tmp_path) -> Path:
    convert(base, tmp_path / "0.2", block_size=3, self_contained=True, verify=False)
    for name in CODE:
        (tmp_path / "0.2" / name).unlink()
    write_old_names(tmp_path / "0.2")
    return tmp_path / "0.2"


def test_no_old_code_is_left(folder_of_0_2, tmp_path):
    """By another conversion, by way back, and in what is pushed."""
    assert set(open_checkpoint(folder_of_0_2).code) == set(CODE_OF_0_2)
    convert(folder_of_0_2, tmp_path / "blocks", block_size=2, verify=False)
    convert(folder_of_0_2, tmp_path / "whole", self_contained=True, verify=False)
    for name in ("blocks", "whole"):
        assert code_in(tmp_path / name) == code_files()
    revert(folder_of_0_2, tmp_path / "back", verify=False)
    assert code_in(tmp_path / "back") == {}
    plan = plan_push(folder_of_0_2, "tester/x")
    assert {name: content for name, content in plan.files.items() if name.endswith(".py")} == code_files()
    assert set(plan.left_out) == set(CODE_OF_0_2) - CODE and plan.left_out
    # saved over it, the new files are beside old ones that none of them imports
    AutoModelForCausalLM.from_pretrained(folder_of_0_2).save_pretrained(folder_of_0_2)
    assert set(open_checkpoint(folder_of_0_2).code) == CODE
    plan = plan_push(folder_of_0_2, "tester/x")
    assert {name: content for name, content in plan.files.items() if name.endswith(".py")} == code_files()
    assert set(plan.left_out) == set(CODE_OF_0_2) - CODE
    convert(folder_of_0_2, tmp_path / "again", block_size=2, verify=False)
    assert code_in(tmp_path / "again") == code_files()


def test_code_that_no_config_names_is_left(folder_of_0_2, tmp_path):
    config = json.loads((folder_of_0_2 / "config.json").read_text())
    del config["auto_map"]
    (folder_of_0_2 / "config.json").write_text(json.dumps(config))
    convert(folder_of_0_2, tmp_path / "blocks", block_size=2, verify=False)
    revert(folder_of_0_2, tmp_path / "back", verify=False)
    assert code_in(tmp_path / "blocks") == code_in(tmp_path / "back") == {}
    assert "trust_remote_code=True)" not in (tmp_path / "blocks/README.md").read_text()


@pytest.fixture
def real_folder_of_0_2(folder_of_0_2, trained) -> Path:
    """With the code of 0.2 itself, and trained queries."""
    trained.config.auto_map = remote_code_auto_map("llama")
    trained.save_pretrained(folder_of_0_2)
    for name in CODE | set(CODE_OF_0_2):
        (folder_of_0_2 / name).unlink(missing_ok=True)
    for name in CODE_OF_0_2:
        command = ["git", "-C", str(ROOT), "show", f"{COMMIT_OF_0_2}:{name}"]
        found = subprocess.run(command, capture_output=True)
        if found.returncode:
            pytest.skip("the history does not go back to attnres 0.2")
        (folder_of_0_2 / name).write_bytes(found.stdout)
    return folder_of_0_2


BESIDE = """
import sys, torch, transformers
folder = sys.argv[1]
model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
import attnres
ours = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
assert type(ours).__module__ == "attnres.modeling_attnres", type(ours).__module__
with torch.no_grad():
    outputs = [each(torch.arange(3, 12)[None]).logits for each in (model, ours)]
ours.save_pretrained(folder + "/new")
torch.save(outputs, folder + "/outputs.pt")
"""


LOAD_WITHOUT = """
import torch, transformers
folder = sys.argv[1]
for place in (folder, folder + "/again"):
    model = transformers.AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True).eval()
    with torch.no_grad():
        outputs = model(torch.arange(3, 12)[None]).logits
    if place == folder:
        model.save_pretrained(folder + "/again")
torch.save(outputs, folder + "/outputs.pt")
"""


@pytest.mark.slow
def test_a_checkpoint_of_0_2_loads(real_folder_of_0_2, trained, tmp_path):
    """Where the package is not installed, and beside it. Saved there it keeps its code, or gets ours."""
    modules = {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    with torch.no_grad():
        expected = UpToRounding(lambda: trained(INPUT_IDS).logits, model=trained)
        run_python(BESIDE, real_folder_of_0_2, **modules)
        by_its_code, by_ours = torch.load(real_folder_of_0_2 / "outputs.pt")
        assert torch.equal(by_ours, trained(INPUT_IDS).logits)
        expected.check(by_its_code)  # which reads in other sums
        assert code_in(real_folder_of_0_2 / "new") == code_files()
        run_python(WITHOUT_PACKAGE + LOAD_WITHOUT, real_folder_of_0_2, **modules)
        assert code_in(real_folder_of_0_2 / "again") == code_in(real_folder_of_0_2)
        assert torch.equal(torch.load(real_folder_of_0_2 / "outputs.pt"), by_its_code)


@pytest.mark.slow
def test_a_checkpoint_of_0_2_is_pushed_without_its_code(real_folder_of_0_2, trained, tmp_path):
    """The program says exactly which files stay, and none of them is on the Hub."""
    with LoopbackHub(tmp_path / "hub") as hub:
        command = "import sys; sys.argv[0] = 'attnres'; from attnres.cli import main; main()"
        environment = {**hub.env(), "COLUMNS": "200"}
        for options in (["--dry-run"], []):
            printed = run_python(command, "push", real_folder_of_0_2, "tester/old", *options, **environment)
            left_out = set(re.findall(r"Left out (\S+): ", printed))
            assert left_out == set(CODE_OF_0_2) - CODE
        files = hub.files("tester/old")
        assert not left_out & files.keys()
        assert {name: content for name, content in files.items() if name.endswith(".py")} == code_files()
