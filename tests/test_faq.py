# SPDX-License-Identifier: Apache-2.0
"""Every error that `docs/faq.md` quotes is one that users get, word for word."""

import importlib.util
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from peft import PeftModel, get_peft_model
from tiny_models import convert as converted
from tiny_models import randomize_queries, tiny_base_model

from attnres.conversion import convert, revert
from attnres.data.text import read_sample, train_tokenizer
from attnres.training import lora_config
from attnres.utils.installation import mixed_up


PAGE = Path(__file__).parent.parent / "docs/faq.md"
QUOTED = re.findall(r"^```text\n(.*?)\n```$", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
LOAD = "from transformers import AutoModelForCausalLM; AutoModelForCausalLM.from_pretrained('{}')"


def is_quoted(error: str, quote: str) -> bool:
    """Whether the error has all words of the quote in their order, and anything for each `...`, but for `(...)`."""
    parts = re.split(r"(?<!\()\.\.\.(?!\))", quote)
    pattern = ".*".join(re.escape(" ".join(part.split())) for part in parts)
    return re.search(pattern, " ".join(error.split())) is not None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faq")
    tokenizer = train_tokenizer([read_sample()], vocab_size=300)
    base = tiny_base_model("llama", vocab_size=len(tokenizer))
    trained = randomize_queries(converted(base, 3))
    for name, model in (("base", base), ("trained", trained), ("other", converted(base, 2))):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    get_peft_model(trained, lora_config(r=2)).save_pretrained(folder / "adapter")
    convert(folder / "base", folder / "self-contained", block_size=3, self_contained=True, verify=False)
    (folder / "elsewhere/attnres").mkdir(parents=True)
    return folder


def python(folder, code: str, **variables) -> str:
    """What a process says on its standard error."""
    command = [sys.executable, "-c", code]
    environment = {**os.environ, **variables}
    return subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    ).stderr


def raised(function, *args, **kwargs) -> str:
    with pytest.raises((ValueError, RuntimeError, ModuleNotFoundError)) as error:
        function(*args, **kwargs)
    return str(error.value)


@pytest.fixture
def says(folder, run_attnres, capsys, monkeypatch):
    """By the first words of a quoted error, what a user does to get it."""
    monkeypatch.chdir(folder)

    def run(*words) -> str:
        run_attnres(*words)
        return capsys.readouterr().err

    def hook() -> str:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "transformers" or None)
        path = PAGE.parent.parent / "cli/every_python/sitecustomize.py"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            exec(compile(path.read_text(), str(path), "exec"), {"__file__": str(path), "__name__": "no_such_module"})
        return "".join(f"{warning.category.__name__}: {warning.message}" for warning in caught)

    def load_adapter():
        from transformers import AutoModelForCausalLM

        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("other"), "adapter")

    return {
        "The checkpoint you are": lambda: python(folder, LOAD.format("trained")),
        "ImportError: cannot": lambda: python(folder / "elsewhere", "from attnres import AttnResConfig"),
        "The repository": lambda: python(folder, LOAD.format("self-contained")),
        "... is not this package": lambda: mixed_up("FOLDER", "its `__init__.py` is of something else"),
        "UserWarning": hook,
        "... is an AttnRes": lambda: raised(convert, "self-contained", "out"),
        "... at site ...: its": lambda: raised(convert, "trained", "out", num_blocks=2),
        "... at site ...: without": lambda: raised(revert, "trained", "out"),
        "The adapter's": lambda: raised(load_adapter),
        "... is a PEFT": lambda: run("chat", "adapter"),
        "... has no chat": lambda: run("chat", "base"),
        "vllm is not": lambda: run("serve", "base", "--engine", "vllm"),
    }


@pytest.mark.slow
@pytest.mark.parametrize("quote", QUOTED)
def test_quoted_errors(quote, says):
    (say,) = [say for words, say in says.items() if words in quote]
    if "unknown location" in quote and "_editable_" not in str(sys.meta_path):
        pytest.skip("only where the package is installed in place")
    if "vllm" in quote and importlib.util.find_spec("vllm"):
        pytest.skip("vLLM is installed")
    error = say()
    assert is_quoted(error, quote), error
