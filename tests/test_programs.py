# SPDX-License-Identifier: Apache-2.0
"""`attnres run` and `attnres chat` as users call them: real processes on checkpoints in folders."""

import os
import shutil
import signal
import subprocess
import sys
import venv

import pytest
from safetensors.torch import load_file, save_file
from tiny_models import convert, randomize_queries, tiny_base_model

from attnres.data.text import read_sample, train_tokenizer


ATTNRES = [sys.executable, "-m", "attnres"]
TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"
LOAD = """
import sys
from transformers import AutoModelForCausalLM

print(type(AutoModelForCausalLM.from_pretrained("converted")).__name__)
sys.exit(7)
"""
PARENT = """
import subprocess, sys

sys.exit(subprocess.run([sys.executable, *sys.argv[1:]]).returncode)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs")
    tokenizer = train_tokenizer([read_sample()], vocab_size=300)
    base = tiny_base_model("llama", vocab_size=len(tokenizer))
    base.save_pretrained(folder / "untaught")
    tokenizer.save_pretrained(folder / "untaught")
    tokenizer.chat_template = TEMPLATE
    for name, model in (("base", base), ("converted", randomize_queries(convert(base, 3)))):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    shutil.copytree(folder / "converted", folder / "half")
    tensors = load_file(folder / "half/model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "half/model.safetensors", metadata={"format": "pt"})
    (folder / "load.py").write_text(LOAD)
    (folder / "parent.py").write_text(PARENT)
    return folder


def run(folder, *words, **variables):
    """What came of `attnres run -- WORDS` in the folder."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [*ATTNRES, "run", "--", *map(str, words)]
    return subprocess.run(command, cwd=folder, env={**environment, **variables}, capture_output=True, text=True)


def test_a_script_that_does_not_import_attnres(folder):
    """Alone, it cannot load the checkpoint (see test_faq.py). Started by a program of `attnres run`, it can."""
    known = run(folder, "parent.py", "load.py")
    assert (known.returncode, known.stdout) == (7, "AttnResForCausalLM\n"), known.stderr


@pytest.mark.parametrize("words", [["python", "-c"], [sys.executable, "-c"], ["-m", "parent", "-c"]])
def test_programs_and_modules(folder, words):
    """Python is that of attnres, also where no environment is active, and nothing that takes long is imported."""
    code = "import sys; print(sys.executable, 'attnres' in sys.modules, {'torch', 'transformers'} & {*sys.modules})"
    result = run(folder, *words, code, PATH=os.defpath)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"{sys.executable} True set()\n"


def test_a_signal_ends_the_program(folder):
    assert run(folder, "python", "-c", "import os; os.kill(os.getpid(), 15)").returncode == -signal.SIGTERM


def test_other_hooks_of_python(folder, tmp_path):
    """What the user has on `PYTHONPATH` stays, a `sitecustomize` included, and our folder is not on the path."""
    (tmp_path / "sitecustomize.py").write_text("hooked = __file__")
    code = "import os, sys, sitecustomize; print(sitecustomize.hooked, [p for p in sys.path if 'every_python' in p])"
    result = run(folder, "python", "-c", code, PYTHONPATH=str(tmp_path))
    assert (result.stdout, result.stderr) == (f"{tmp_path / 'sitecustomize.py'} []\n", "")
    (tmp_path / "sitecustomize.py").unlink()
    result = run(folder, "python", "-c", "import sitecustomize; print(sitecustomize.__doc__[:20])")
    assert (result.stdout, result.stderr) == ("Python imports this \n", "")


def test_an_environment_without_attnres(folder, tmp_path):
    """A program of another environment runs, with a warning if it has transformers."""
    venv.create(tmp_path / "other")
    python = tmp_path / "other/bin/python"
    result = run(folder, python, "-c", "print(1)")
    assert (result.returncode, result.stdout, result.stderr) == (0, "1\n", "")
    (site_packages,) = tmp_path.glob("other/lib/python*/site-packages")
    (site_packages / "transformers.py").touch()
    result = run(folder, python, "-c", "print(1)")
    assert (result.returncode, result.stdout) == (0, "1\n")
    assert f"attnres is not installed for {python}" in result.stderr


def test_no_such_program(run_attnres, capsys):
    assert run_attnres("run", "--", "no-such-program", "-x") == 1
    assert "There is no program `no-such-program`" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["converted", "base"])
def test_chat(folder, name):
    """Two messages, until the input ends, offline: the model and the settings are those that were named."""
    pytest.importorskip("uvicorn")
    command = [*ATTNRES, "chat", name, "max_new_tokens=3", "do_sample=False", "--device", "cpu"]
    messages = "Hello\nn\nAgain\nn\n"
    result = subprocess.run(command, cwd=folder, input=messages, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0 and "Traceback" not in result.stderr, result.stderr
    assert result.stdout.count("3 tokens in") == 2 and result.stdout.count(f"<{name}>:") == 2
    assert "INFO" not in result.stdout + result.stderr


@pytest.mark.parametrize(
    "words, message",
    [
        (["untaught"], "has no chat template"),
        (["converted", "max_new_token=3"], "`max_new_token` is not a field"),
        (["converted", "max_new_tokens"], "missing `=`"),
        (["half"], "no values for 1 of its tensors (model.layers.1.mlp.up_proj.weight), which would be random"),
    ],
)
def test_chat_that_cannot_begin(folder, words, message, run_attnres, capsys, monkeypatch):
    pytest.importorskip("uvicorn")
    monkeypatch.chdir(folder)
    assert run_attnres("chat", *words) in (1, 2)
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_checkpoint_that_lacks_tensors_is_not_served(folder, run_attnres, capsys):
    pytest.importorskip("uvicorn")
    assert run_attnres("serve", folder / "half") == 1
    assert "1 of its tensors (model.layers.1.mlp.up_proj.weight)" in " ".join(capsys.readouterr().err.split())
