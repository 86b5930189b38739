# SPDX-License-Identifier: Apache-2.0
"""All commands as one program: panels and examples in the help, JSON alone on stdout, exit codes, no colours in pipes.

What the commands do is tested where that is; the slow ones are stood in for by what they return, and by what they
print meanwhile.
"""

import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import torch
from tiny_models import tiny_base_model
from typer.main import get_command

from attnres.cli import COMMANDS, app
from attnres.cli.console import console
from attnres.data.text import read_sample, train_tokenizer


PROGRAM = get_command(app)
NAMES = sorted(PROGRAM.commands)
WITHOUT_JSON = ["chat", "demo", "explore", "run", "serve"]
SITE = {"weights": [0.5, 0.5], "relative_entropy": 0.75, "predecessor_weight": 0.5}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "base"
    tokenizer = train_tokenizer([read_sample()], vocab_size=300)
    tiny_base_model("llama", vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def run_json(run_attnres, capsys):
    """The exit code, and what is on stdout, which has to be one JSON object with keys that the help names."""

    def run(command, *arguments):
        capsys.readouterr()
        code = run_attnres(command, *arguments, "--json")
        result = json.loads(capsys.readouterr().out)
        return code, result

    return run


def json_help(command: str) -> str:
    option = next(option for option in PROGRAM.commands[command].params if "--json" in option.opts)
    return option.help


def are_documented(keys, command: str) -> bool:
    return set(keys) <= set(re.findall(r"\w+", json_help(command)))


def test_panels(run_attnres, capsys):
    """The help of the program has every command in a panel of its own kind."""
    assert run_attnres("--help") == 0
    shown = capsys.readouterr().out
    places = [shown.index(f"─ {panel} ─") for panel in COMMANDS]
    assert places == sorted(places) and "\x1b" not in shown
    assert sum(map(len, COMMANDS.values())) == len(NAMES)


@pytest.mark.parametrize("command", NAMES)
def test_help(command, run_attnres, capsys):
    """It ends with an example, which is a call that the program takes, and has no colours where it is piped."""
    assert run_attnres(command, "--help") == 0
    shown = capsys.readouterr().out
    example = " ".join(shown[shown.index("Example: ") :].split()).removeprefix("Example: ")
    program, named, *arguments = shlex.split(example)
    assert (program, named) == ("attnres", command) and "\x1b" not in shown
    PROGRAM.commands[command].make_context(command, arguments)  # fails for what it does not take


def test_help_shows_what_to_type(run_attnres, capsys):
    """Arguments without braces, flags without a type, numbers without the names that Python has for them."""
    for command, usage in {
        "convert": "[OPTIONS] SOURCE OUTPUT",
        "finetune": "[OPTIONS] CONFIG.yaml [FIELD=VALUE]...",
        "eval": "[OPTIONS] MODEL...",
        "inspect": "[OPTIONS] MODEL [OTHER]",
        "families": "[OPTIONS] [TYPE]...",
    }.items():
        assert run_attnres(command, "--help") == 0
        lines = [line.strip(" │") for line in capsys.readouterr().out.splitlines()]
        assert f"Usage: attnres {command} {usage}" in lines
    assert run_attnres("convert", "--help") == 0
    shown = capsys.readouterr().out
    assert not re.search(r"<\w+>|x>=|[{}]", shown)
    assert re.search(r"--num-blocks +NUMBER +Make", shown) and re.search(r"--full +Use", shown)
    assert re.search(r"--weights +softmax\|sigmoid\|softmax1 +Turn", shown)
    assert run_attnres("convert", "a", "b", "--num-blocks", 0) == 2
    assert "greater than or equal to 1" in capsys.readouterr().err


@pytest.mark.parametrize("command", NAMES)
def test_unknown_option(command, run_attnres, capsys):
    assert run_attnres(command, "--no-such-option") == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "--no-such-option" in printed.err and "\x1b" not in printed.err


def test_the_same_words_for_the_same_things():
    """An option of one name has one short form, and what is read and written has one name as well."""
    short_forms = {}
    for command in PROGRAM.commands.values():
        for option in command.params:
            for name in option.opts:
                if name.startswith("--"):
                    short_forms.setdefault(name, set()).add(tuple(o for o in option.opts if not o.startswith("--")))
    assert {name: forms for name, forms in short_forms.items() if len(forms) > 1} == {}
    assert short_forms["--output"] == {("-o",)}
    for name in ("convert", "revert", "import", "export"):
        arguments = [param for param in PROGRAM.commands[name].params if param.param_type_name == "argument"]
        assert [argument.metavar for argument in arguments] == ["SOURCE", "OUTPUT"]
    options = {name: {opt for param in PROGRAM.commands[name].params for opt in param.opts} for name in NAMES}
    assert [name for name in NAMES if "--json" not in options[name]] == WITHOUT_JSON


@pytest.mark.slow
def test_colours_and_json_in_a_pipe(tmp_path):
    """In a process of its own: what libraries say when they are imported is not on stdout either."""
    (tmp_path / "peft.py").touch()  # whose import takes ten seconds
    command = [sys.executable, "-m", "attnres", "env", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert are_documented(found, "env") and {"torch", "transformers"} <= found["packages"].keys()
    assert (
        found["errors"] == {} and found["reads"][0].startswith("cpu: ") and "\x1b" not in result.stdout + result.stderr
    )


def run_env_with(tmp_path, *options, **packages):
    """The output of `attnres env` where these packages are broken: what stands in for them runs this."""
    for name, statement in packages.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(statement)
    command = [sys.executable, "-m", "attnres", "env", *options]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0 and "Traceback" not in result.stderr, result.stderr
    return result.stdout


@pytest.mark.slow
def test_environment_without_transformers_that_can_be_imported(tmp_path):
    """The very case that the command is for."""
    error = "tokenizers>=99 is required,\\nbut 0.23 was found"
    broken = {
        "transformers": f"raise ImportError('{error}')",
        "datasets": "import sys; sys.exit('no arrow')",
        "peft": "",
    }
    rows = run_env_with(tmp_path, **broken).splitlines()
    reason = "cannot be imported: ImportError: tokenizers>=99 is required, but 0.23 was found"
    assert re.fullmatch(rf"transformers [\w.+]+, {reason}", rows[1])
    assert re.fullmatch(r"torch [\w.+]+", rows[2])
    assert any(re.fullmatch(r"datasets [\w.+]+, cannot be imported: SystemExit: no arrow", row) for row in rows)
    assert rows[-1].startswith("  not known: ImportError: tokenizers>=99")


def test_environment_without_torch_that_can_be_imported(tmp_path):
    found = json.loads(run_env_with(tmp_path, "--json", torch="print('half way'); raise OSError('libcudart.so.99')"))
    assert are_documented(found, "env") and found["reads"] is None
    assert found["packages"]["torch"] and found["errors"]["torch"] == "OSError: libcudart.so.99"


def test_families(base, run_json, run_attnres, capsys):
    code, found = run_json("families", "llama", "bert")
    assert code == 0 and are_documented(found, "families")
    assert list(found["supported"]) == ["llama"] and "bert" in {**found["refused"], **found["others"]}
    code, found = run_json("families", "--probe", base)
    assert code == 0 and (found["model_type"], found["layers"][0]["first"]) == ("llama", 0)
    assert {line["what"] for line in found["layers"][0]["lines"]} == {"reads", "writes"}
    assert run_attnres("families", "llama", "--probe", base, "--json") == 2
    assert run_attnres("families", "lama", "--json") == 1
    printed = capsys.readouterr()
    assert printed.out == "" and "Did you mean llama" in printed.err


def test_a_checkpoint_through_all_conversions(base, tmp_path, run_json, run_attnres, capsys):
    """Converted, compared, described, exported, imported, planned to be pushed, and reverted."""
    steps = {
        "convert": (base, tmp_path / "a", "--no-verify", "--num-blocks", 2),
        "revert": (tmp_path / "a", tmp_path / "b", "--no-verify"),
        "export": (tmp_path / "a", tmp_path / "k", "--to", "kimi", "--force"),
        "import": (tmp_path / "k", tmp_path / "i"),
    }
    for command, arguments in steps.items():
        code, found = run_json(command, *arguments)
        assert code == 0 and found["wrote"] == [str(arguments[1])] and arguments[1].is_dir()
        keys = {"operation", "source", "destination", "verification", "notes", "wrote"}
        assert keys <= found.keys() and are_documented(keys, command)
    code, found = run_json("verify", base, tmp_path / "a", "--max-tokens", 32)
    assert code == 0 and found["equal"] is True and {"first", "second", "first_difference", "parities"} <= found.keys()
    code, found = run_json("card", tmp_path / "a", "--base-model", "tester/base")
    assert code == 0 and found == {"wrote": [str(tmp_path / "a" / "README.md")]}
    (tmp_path / "a" / "notes.txt").write_text("x")
    code, found = run_json("push", tmp_path / "a", "tester/a", "--dry-run")
    assert code == 0 and found.keys() == {"files", "bytes", "left_out", "card", "url", "commit"}
    assert are_documented(found, "push") and found["bytes"] == sum(found["files"].values())
    assert found["left_out"] == ["notes.txt"] and found["files"]["config.json"] > 0 and found["commit"] is None

    assert run_attnres("convert", base, tmp_path / "a", "--json") == 1
    printed = capsys.readouterr()
    assert printed.out == "" and "is not empty" in " ".join(printed.err.split())


def test_paths_are_said_at_the_end(base, tmp_path, run_attnres, capsys):
    assert run_attnres("convert", base, tmp_path / "out", "--no-verify") == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == f"Wrote {tmp_path / 'out'}" and "\x1b" not in printed


@pytest.mark.slow
def test_a_verdict_is_one_line(base, tmp_path, run_attnres, capsys):
    assert run_attnres("convert", base, tmp_path / "out", "--num-blocks", 2) == 0
    figures = r"largest difference \d\.\de-\d+, tolerance \d\.\de-\d+ \(float32\)"
    assert re.search(rf"^Passed: {figures}$", capsys.readouterr().out, re.MULTILINE)
    assert run_attnres("convert", base, tmp_path / "unseen", "--no-verify") == 0
    assert "\nNot verified: the models were not compared\n" in capsys.readouterr().out
    other = tiny_base_model("llama", vocab_size=300)
    torch.nn.init.normal_(other.lm_head.weight)
    other.save_pretrained(tmp_path / "other")
    shutil.copy(base / "tokenizer.json", tmp_path / "other")
    assert run_attnres("verify", base, tmp_path / "other", "--max-tokens", 64) == 1
    failed = rf"^Failed: {figures}\. The first difference is at .+$".replace("e-", "e[-+]")
    assert re.search(failed, capsys.readouterr().out, re.MULTILINE)


def test_table_of_families_fits_a_terminal(run_attnres, capsys, monkeypatch):
    monkeypatch.setattr(console, "_width", 80)
    assert run_attnres("families") == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= 80
    rows = {line.split()[0]: line.split()[1:3] for line in lines[3:-3] if line[:3].strip()}
    assert rows["llama"] == ["yes", "packing,"] and rows["bert"] == ["no", "its"]
    assert (
        rows["vit"] == rows["whisper"] == ["yes", "Model,"]
        and rows["distilbert"] == ["no", "its"]
        and len(rows) == 399
    )


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--quiet", None, "--verbose"])
def test_quiet_and_verbose(option, base, tmp_path):
    """In a process of its own: what libraries print is decided before they are imported."""
    command = [sys.executable, "-m", "attnres", "convert", base, tmp_path / "a", "--num-blocks", "2"]
    result = subprocess.run([*command, *[option] * bool(option)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    if option == "--quiet":
        assert re.fullmatch(rf"Passed: .*\nWrote {tmp_path / 'a'}\n", result.stdout)
    assert ("deciding figure" in result.stdout) == (option == "--verbose")
    if option == "--verbose":
        assert "loading configuration file" in result.stderr  # by transformers at its level `info`
    else:
        assert "Passed: " in result.stdout and result.stderr == ""  # no bars either, where it is not a terminal


def test_quiet_commands_print_errors(base, tmp_path, run_attnres, capsys):
    assert run_attnres("convert", base, tmp_path / "d", "--quiet", "--verbose") == 2
    assert "contradict" in capsys.readouterr().err
    assert run_attnres("verify", base, tmp_path / "nope", "--quiet") == 1
    assert "There is no folder" in capsys.readouterr().err


def stand_in(result):
    """Of a function: it prints, and returns the result."""

    def function(*args, **kwargs):
        print("on the way")
        return result

    return function


def test_what_takes_long(base, tmp_path, monkeypatch, run_json, capsys):
    """Of training and measuring, JSON is on stdout alone, and what is printed meanwhile on stderr."""
    from attnres import eval, inspection, training
    from attnres.benchmarks import twin

    history = [{"step": 0, "eval_loss": 2.0}, {"step": 5, "eval_loss": 1.0}]
    tuned = training.FinetuneResult(tmp_path / "final", history, 7, None, [tmp_path / "loss.png"])
    monkeypatch.setattr(training, "finetune", stand_in(tuned))
    (tmp_path / "run.yaml").write_text("{}")
    code, found = run_json("finetune", tmp_path / "run.yaml")
    assert code == 0 and are_documented(found, "finetune") and found["losses"] == [2.0, 1.0]
    assert found["wrote"] == [str(tmp_path / "final"), str(tmp_path / "loss.png")]

    results = {"schema": 2, "models": [], "rows": [], "skipped": {"IFEval": "its data is not there"}}
    monkeypatch.setattr(eval, "evaluate", stand_in(results))
    (tmp_path / "results.json").write_text("{}")
    code, found = run_json("eval", base, "--suite", "quick", "-o", tmp_path)
    assert code == 3 and are_documented(found.keys() - {"schema"}, "eval")
    assert found["wrote"] == [str(tmp_path / "results.json")]
    monkeypatch.setattr(eval, "prefetch", stand_in((["model"], {})))
    code, found = run_json("eval", "model", "--suite", "quick", "--prefetch")
    assert code == 0 and found == {"there": ["model"], "skipped": {}} and are_documented(found, "eval")
    monkeypatch.setattr(eval.report, "rebuild", stand_in([tmp_path / "table.md"]))
    assert run_json("report", tmp_path) == (0, {"wrote": [str(tmp_path / "table.md")]})

    model = {"model": "a", "num_tokens": 9, "sites": [{**SITE, "weights": [1.0]}, SITE]}
    monkeypatch.setattr(inspection, "inspect", stand_in({"models": [model]}))
    code, found = run_json("inspect", base, "-o", tmp_path)
    assert code == 0 and len(found["wrote"]) == 6
    assert found["models"] == [{"model": "a", "num_tokens": 9, "relative_entropy": 0.75, "newest_source_weight": 0.5}]

    measured = {"settings": {}, "machine": {}, "time": [], "activations": [], "peaks": []}
    monkeypatch.setattr(twin, "bench", stand_in(measured))
    code, found = run_json("bench", "-o", tmp_path)
    assert code == 0 and are_documented(found, "bench") and found["wrote"][0] == str(tmp_path / "bench.json")


def test_json_of_what_is_not_a_number(tmp_path, monkeypatch, run_attnres, capsys):
    """A run that has diverged: JSON has no `NaN`, and programs in other languages do not read one."""
    from attnres import training

    history = [{"step": 0, "eval_loss": math.nan}, {"step": 5, "eval_loss": math.inf}]
    tuned = training.FinetuneResult(tmp_path / "final", history, 7, None, [])
    monkeypatch.setattr(training, "finetune", stand_in(tuned))
    (tmp_path / "run.yaml").write_text("{}")
    assert run_attnres("finetune", tmp_path / "run.yaml", "--json") == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["losses"] == [None, None]


def test_json_of_what_is_for_people(tmp_path, run_attnres, capsys):
    assert run_attnres("finetune", tmp_path / "run.yaml", "--show-batch", "--json") == 2
    assert "--show-batch is for people" in " ".join(capsys.readouterr().err.split())


# What each command is given first, a path that is not there or a folder that cannot be written
MISTYPED = [
    (["demo", "--model", "./nope"], "There is no folder `./nope`"),
    (["families", "--probe", "./nope"], "There is no folder `./nope`"),
    (["convert", "./nope", "out"], "There is no folder `./nope`"),
    (["convert", "nope.gguf", "out"], "There is no file `nope.gguf`"),
    (["convert", "base", "base/out"], "is inside the source"),
    (["convert", "base", "out", "--verify-text", "nope.txt"], "There is no file `nope.txt`"),
    (["convert", "base", "file/out"], "is a file; name a folder"),
    (["revert", "./nope", "out"], "There is no folder `./nope`"),
    (["verify", "base", "./nope"], "There is no folder `./nope`"),
    (["import", "./nope", "out"], "There is no folder `./nope`"),
    (["export", "./nope", "out", "--to", "fla"], "There is no folder `./nope`"),
    (["pretrain", "nope.yaml"], "There is no file `nope.yaml`"),
    (["finetune", "run.yaml"], "There is no folder `./nope`"),
    (["finetune", "run.yaml", "model=base", "dataset=nope.jsonl"], "There is no file or folder `nope.jsonl`"),
    (["finetune", "run.yaml", "model=base", "output_dir=file/out"], "is a file; name a folder"),
    (["eval", "base", "./nope", "--suite", "quick"], "There is no folder `./nope`"),
    (["eval", "base", "--suite", "quick", "-o", "file/out"], "is a file; name a folder"),
    (["report", "nope"], "There is no folder `nope`"),
    (["inspect", "base", "--base", "./nope"], "There is no folder `./nope`"),
    (["inspect", "base", "--file", "nope.txt"], "There is no file `nope.txt`"),
    (["inspect", "base", "-o", "file/out"], "is a file; name a folder"),
    (["explore", "base", "./nope"], "There is no folder `./nope`"),
    (["bench", "--model", "./nope"], "There is no folder `./nope`"),
    (["plan", "./nope"], "There is no folder `./nope`"),
    (["scaling", "run", "nope.yaml"], "There is no file `nope.yaml`"),
    (["serve", "./nope"], "is not a checkpoint"),
    (["chat", "./nope"], "There is no folder `./nope`"),
    (["card", "./nope"], "There is no folder `nope`"),
    (["push", "./nope", "someone/x"], "There is no folder `nope`"),
]
# Packages that are not installed, and who says so
MISSING = {
    "inspect": "matplotlib",
    "explore": "gradio",
    "finetune": "trl",
    "eval": "lm_eval",
    "bench": "matplotlib",
    "chat": "openai",
    "scaling": "scipy",
}
BEFORE_TORCH = """
import importlib.util, json, sys
import attnres.cli.checks
from attnres.cli import main

def run(arguments):
    sys.argv = ["attnres", *arguments]
    try:
        main()
    except SystemExit as end:
        print(json.dumps([end.code, "torch" in sys.modules or "transformers" in sys.modules]))
    print("---", file=sys.stderr)

cases, missing = json.loads(sys.argv[1])
for arguments in cases:
    run(arguments)
for command, name in missing.items():
    attnres.cli.checks.find_spec = lambda other: None if other == name else importlib.util.find_spec(other)
    run([command, *{"finetune": ["good.yaml"], "scaling": ["fit"], "bench": []}.get(command, ["base"])])
"""


def test_paths_and_packages_are_checked_before_torch_is_imported(base, tmp_path):
    """In a process of its own, in which nothing has imported torch yet; and nothing is written."""
    shutil.copytree(base, tmp_path / "base")
    (tmp_path / "file").write_text("")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n')
    for name, model in (("run", "./nope"), ("good", "base")):
        fields = {"model": model, "dataset": "rows.jsonl", "output_dir": "out"}
        (tmp_path / f"{name}.yaml").write_text(json.dumps(fields))
    before = sorted(tmp_path.rglob("*"))
    cases = json.dumps([[arguments for arguments, _ in MISTYPED], MISSING])
    command = [sys.executable, "-c", BEFORE_TORCH, cases]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    ends = [json.loads(line) for line in result.stdout.splitlines()]
    errors = result.stderr.split("---\n")
    assert ends == [[1, False]] * (len(MISTYPED) + len(MISSING)), result.stdout + result.stderr
    messages = [message for _, message in MISTYPED] + [f"{name} is not installed" for name in MISSING.values()]
    for message, error in zip(messages, errors):
        assert message in error and error.count("\n") == 1, (message, error)
    assert sorted(tmp_path.rglob("*")) == before
