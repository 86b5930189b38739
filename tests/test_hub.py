# SPDX-License-Identifier: Apache-2.0
"""To the Hub and back through the real client, against a server on the loopback; and model cards."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from loopback_hub import LoopbackHub
from safetensors.torch import load_file
from tiny_gguf import write_gguf
from tiny_models import WITHOUT_PACKAGE, mostly_slow, randomize_queries, tiny_base_model
from tiny_models import convert as convert_in_memory
from transformers import AutoModelForCausalLM

from attnres import __version__
from attnres.checkpoints.remote_code import code_files
from attnres.conversion import convert, revert
from attnres.data.text import read_sample, train_tokenizer
from attnres.model_cards.card import write_model_card
from attnres.model_cards.hub import plan_push


CODE = set(code_files())
LOAD = """
import torch, transformers
repo_id, output = sys.argv[1:]
kwargs = {"trust_remote_code": True}
config = transformers.AutoConfig.from_pretrained(repo_id, **kwargs)
assert type(config).__name__ == "AttnResConfig"
tokenizer = transformers.AutoTokenizer.from_pretrained(repo_id)
inputs = tokenizer("def main():", return_tensors="pt", add_special_tokens=False)
results = {}
for name, reference in config.auto_map.items():
    if name != "AutoConfig":
        model = getattr(transformers, name).from_pretrained(repo_id, **kwargs).eval()
        assert type(model).__name__ == reference.split(".")[1]
        if name in ("AutoModel", "AutoModelForCausalLM"):
            with torch.no_grad():
                results[name] = model(**inputs)[0]
        if name == "AutoModelForCausalLM":
            results["generated"] = model.generate(**inputs, max_new_tokens=6, do_sample=False)
            model.save_pretrained(output)
again = transformers.AutoModelForCausalLM.from_pretrained(output, **kwargs).eval()
with torch.no_grad():
    assert torch.equal(again(**inputs).logits, results["AutoModelForCausalLM"])
assert not any(name.split(".")[0] == "attnres" for name in sys.modules)
torch.save({**results, "input_ids": inputs.input_ids}, output + "/results.pt")
"""


@pytest.fixture
def hub(tmp_path):
    with LoopbackHub(tmp_path / "hub") as hub:
        yield hub


def process(hub, *command, code=0, token=None) -> str:
    """Run a command against the Hub and return what it prints."""
    environment = {**os.environ, **hub.env(), "HF_TOKEN": token or hub.token, "COLUMNS": "200"}
    result = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env=environment, timeout=300, stdin=subprocess.DEVNULL
    )
    assert result.returncode == code, result.stderr
    return " ".join((result.stdout + result.stderr).split())


def attnres(hub, *args, **kwargs) -> str:
    return process(hub, sys.executable, "-m", "attnres", *args, **kwargs)


def python(hub, script, *args) -> str:
    return process(hub, sys.executable, "-c", script, *args)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([read_sample()] * 3, vocab_size=400)


@pytest.fixture
def checkpoint(tmp_path, tokenizer):
    model = tiny_base_model("qwen3", vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    (tmp_path / "base/README.md").write_text("---\nlicense: mit\nlanguage: en\n---\n# Base\n")
    convert(tmp_path / "base", tmp_path / "my-model", block_size=3)
    return tmp_path / "my-model"


def assert_loads_without_package(hub, repo_id, local, tmp_path):
    python(hub, WITHOUT_PACKAGE + LOAD, repo_id, tmp_path / "again")
    results = torch.load(tmp_path / "again/results.pt")
    model = AutoModelForCausalLM.from_pretrained(local)
    with torch.no_grad():
        assert torch.equal(model(results["input_ids"]).logits, results["AutoModelForCausalLM"])
        assert torch.equal(model.model(results["input_ids"])[0], results["AutoModel"])
    generated = model.generate(results["input_ids"], max_new_tokens=6, do_sample=False)
    assert torch.equal(generated, results["generated"])


@pytest.mark.slow
def test_push_and_load_without_the_package(hub, checkpoint, tmp_path):
    before = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    printed = attnres(hub, "push", checkpoint, "tester/pushed", "--private")
    assert "tester/pushed" in printed
    assert hub.repos["tester/pushed"]["private"]
    files = hub.files("tester/pushed")
    assert files.keys() - {".gitattributes"} == before.keys() | CODE
    assert all(files[name] == content for name, content in before.items() if name not in ("config.json", "README.md"))
    oid, message = hub.commits("tester/pushed")[-1]
    assert message == f"Upload my-model with the code of attnres {__version__}" and oid in printed
    card = ModelCard(files["README.md"].decode())
    assert card.data["attnres_version"] == __version__ and len(card.data["attnres_code_sha256"]) == 64
    assert 'from_pretrained("tester/pushed", trust_remote_code=True)' in card.text
    assert {path.name: path.read_bytes() for path in checkpoint.iterdir()} == before  # nothing local changed
    assert_loads_without_package(hub, "tester/pushed", checkpoint, tmp_path)

    # what the user has made of the card stays, and is all that is sent again
    path = checkpoint / "README.md"
    path.write_text(path.read_text() + "\nMy own words.\n")
    sent = len(hub.requests)
    attnres(hub, "push", checkpoint, "tester/pushed")
    assert not any("PUT" in request for request in hub.requests[sent:])
    assert "My own words." in hub.files("tester/pushed")["README.md"].decode()


@pytest.mark.slow
def test_nothing_else_is_pushed(hub, checkpoint, tmp_path):
    """What lies in the folder and is not part of a checkpoint stays there, and is listed."""
    own = {path.name for path in checkpoint.iterdir()}
    secrets = (".env", ".netrc", "id_rsa", "run.log", "notes.md", "credentials.json", "training_args.bin")
    secrets += (".ssh/id_rsa", ".git/config", "wandb/run/output.log", "depth/depth.json", "assets/.env")
    for name in secrets:
        (checkpoint / name).parent.mkdir(exist_ok=True, parents=True)
        (checkpoint / name).write_text("SECRET")
    (checkpoint / "depth/depth.json").write_text('{"models": [], "text": "SECRET"}')
    (checkpoint / "depth/weights.png").write_bytes(b"")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/key").write_text("SECRET")
    (checkpoint / "linked").symlink_to(tmp_path / "secret")
    (checkpoint / "key.json").symlink_to(tmp_path / "secret/key")
    left_out = {"linked", "key.json", "wandb/", ".ssh/", ".git/", "assets/", "depth/depth.json"}
    left_out |= {name for name in secrets if "/" not in name}

    printed = attnres(hub, "push", checkpoint, "tester/clean", "--dry-run")
    assert "tester/clean" not in hub.repos
    assert {name for name in left_out if f"Left out {name}: " not in printed} == set()
    pushed = own | CODE | {"depth/weights.png"}
    assert {name for name in pushed if f"Would push {name}, " not in printed} == set()
    assert printed.count("Would push") == len(pushed)
    printed = attnres(hub, "push", checkpoint, "tester/clean")
    assert {name for name in left_out if f"Left out {name}: " not in printed} == set()
    assert hub.files("tester/clean").keys() - {".gitattributes"} == pushed
    assert not any(b"SECRET" in content for content in hub.files("tester/clean").values())

    report = convert(checkpoint, tmp_path / "again", block_size=2, verify=False)
    assert set(report.left_behind) == left_out
    assert not any("SECRET" in path.read_text(errors="ignore") for path in (tmp_path / "again").rglob("*.*"))


@pytest.mark.parametrize(
    "name",
    mostly_slow(
        ["merges.txt", "README.md", "config.json", "model-00001-of-00002.safetensors", "evaluation", "figures/a.png"],
        every=6,
    ),
)
def test_links_out_of_the_folder_are_refused(name, checkpoint, tmp_path):
    """Under a name that belongs to a checkpoint, too; links within the folder are followed."""
    (checkpoint / "LICENSE.real").write_text("A licence.")
    (checkpoint / "LICENSE").symlink_to("LICENSE.real")
    assert plan_push(checkpoint, "tester/x").files["LICENSE"].read_text() == "A licence."
    target, path = tmp_path / "elsewhere", checkpoint / name
    path.parent.mkdir(exist_ok=True)
    if path.exists():
        path.rename(target)
    elif name == "evaluation":
        target.mkdir()
        (target / "table.md").write_text("SECRET")
    else:
        target.write_text("SECRET")
    path.symlink_to(target)
    with pytest.raises(ValueError, match=rf"`{name}` of .* is a link to .*elsewhere`, outside the folder"):
        plan_push(checkpoint, "tester/x")
    if name in ("merges.txt", "figures/a.png"):  # convert would make a file of it, which push takes
        with pytest.raises(ValueError, match=rf"`{name}` of .* is a link to .*, outside the folder"):
            convert(checkpoint, tmp_path / "again", block_size=2)
        assert not (tmp_path / "again").exists()


MODEL_PUSH = """
import sys, torch
from attnres import AttnResForCausalLM
from transformers import AutoTokenizer
model = AttnResForCausalLM.from_pretrained(sys.argv[1])
model.push_to_hub("tester/from-python", private=True)
AutoTokenizer.from_pretrained(sys.argv[1]).push_to_hub("tester/from-python")
assert not model.is_remote_code() and not model.config.auto_map
model.save_pretrained(sys.argv[2])
"""


@pytest.mark.slow
def test_model_push_to_hub(hub, checkpoint, tmp_path):
    model = randomize_queries(AutoModelForCausalLM.from_pretrained(checkpoint))
    model.save_pretrained(checkpoint)
    python(hub, MODEL_PUSH, checkpoint, tmp_path / "later")
    files = hub.files("tester/from-python")
    assert CODE | {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= files.keys()
    assert hub.repos["tester/from-python"]["private"]
    card = ModelCard(files["README.md"].decode())
    assert "attnres" in card.data.tags and "9 of 9 are not zero" in card.text
    assert 'from_pretrained("tester/from-python", trust_remote_code=True)' in card.text
    assert not CODE & {path.name for path in (tmp_path / "later").iterdir()}  # only what is pushed carries the code
    assert_loads_without_package(hub, "tester/from-python", checkpoint, tmp_path)


PUBLISH_BASE = """
import sys
from huggingface_hub import HfApi
api = HfApi()
api.create_repo("tester/base")
for folder in sys.argv[1:]:
    api.upload_folder(repo_id="tester/base", folder_path=folder)
"""


@pytest.mark.slow
def test_convert_from_the_hub(hub, checkpoint, tmp_path, tokenizer):
    other = tmp_path / "other"
    tiny_base_model("qwen3", seed=1, vocab_size=len(tokenizer)).save_pretrained(other)
    python(hub, PUBLISH_BASE, tmp_path / "base", other)
    first = hub.commits("tester/base")[-2][0]
    attnres(hub, "convert", "tester/base", tmp_path / "old", "--revision", first, "--block-size", "3")
    assert (tmp_path / "old/model-00001-of-00002.safetensors").read_bytes() == (
        tmp_path / "base/model.safetensors"
    ).read_bytes()
    assert not (tmp_path / "old/model-00001-of-00002.safetensors").is_symlink()
    card = ModelCard.load(tmp_path / "old/README.md")
    assert card.data.base_model == "tester/base" and card.data.license == "mit"
    assert f"Conversion of `tester/base` at revision `{first}`" in card.text.replace("\n", " ")
    # the newest one, by links out of the cache; and again from the cache when the Hub is gone
    attnres(hub, "convert", "tester/base", tmp_path / "new", "--link", "--no-verify")
    weights = (tmp_path / "new/model-00001-of-00002.safetensors").read_bytes()
    assert weights == (other / "model.safetensors").read_bytes()
    assert "they differ, first at" in attnres(hub, "verify", "tester/base", tmp_path / "old", code=1)
    hub.__exit__()
    attnres(hub, "convert", "tester/base", tmp_path / "offline", "--no-verify")


CONVERT_ONCE = """
import sys
from attnres.conversion import convert
convert("tester/base", sys.argv[1], verify=False)
"""


@pytest.mark.slow
def test_the_hub_is_asked_once(hub, checkpoint, tmp_path):
    """Whether it is there, for the config, and for what else is new: whether from Python or from a shell."""
    python(hub, PUBLISH_BASE, tmp_path / "base")
    for number, name in enumerate(("first", "second")):
        hub.requests.clear()
        python(hub, CONVERT_ONCE, tmp_path / name)
        heads = [request for request in hub.requests if request.startswith("HEAD")]
        assert heads.count("HEAD /") == 1 and heads.count("HEAD /tester/base/resolve/main/config.json") == 1
        assert len(heads) == len(set(heads)) and number == (len(heads) == 2)
    hub.requests.clear()
    attnres(hub, "convert", "tester/base", tmp_path / "third", "--no-verify")
    assert Counter(hub.requests) == {"HEAD /": 2, "HEAD /tester/base/resolve/main/config.json": 1}


@pytest.mark.slow
def test_convert_a_gguf_file_of_the_hub(hub, tmp_path):
    """Only that file is fetched; the report names the repository and its commit."""
    (tmp_path / "base/sub").mkdir(parents=True)
    expected = write_gguf(tmp_path / "base/sub/tiny-Q8_0.gguf")
    write_gguf(tmp_path / "base/tiny-F16.gguf", "F16")
    python(hub, PUBLISH_BASE, tmp_path / "base")
    attnres(hub, "convert", "tester/base", tmp_path / "out", "--gguf-file", "sub/tiny-Q8_0.gguf")
    weights = load_file(tmp_path / "out/model-00001-of-00002.safetensors")
    assert weights.keys() == expected.keys() and all(torch.equal(weights[name], expected[name]) for name in expected)
    report = json.loads((tmp_path / "out/conversion_report.json").read_text())
    assert report["source"] == "tester/base" and report["source_commit"] == hub.commits("tester/base")[-1][0]
    assert any("`tiny-Q8_0.gguf`" in note for note in report["notes"])
    assert ModelCard.load(tmp_path / "out/README.md").data.base_model == "tester/base"
    cached = [path.name for path in Path(hub.env()["HF_HOME"]).rglob("*.gguf")]
    assert cached == ["tiny-Q8_0.gguf"]
    printed = attnres(hub, "convert", "tester/base", tmp_path / "no", "--gguf-file", "no.gguf", code=1)
    assert "`tester/base` holds no `no.gguf`" in printed
    printed = attnres(hub, "convert", "tester/nothing", tmp_path / "no", "--gguf-file", "no.gguf", code=1)
    assert "no Hub repository `tester/nothing`" in printed and not (tmp_path / "no").exists()


PUBLISH_OTHERS = """
from huggingface_hub import HfApi
for name in ("gated", "empty"):
    HfApi().create_repo(f"tester/{name}")
"""


@pytest.fixture(scope="module")
def crowded_hub(tmp_path_factory):
    """With a base and two repositories that are of no use."""
    root = tmp_path_factory.mktemp("crowded")
    tiny_base_model("qwen3").save_pretrained(root / "base")
    convert_in_memory(tiny_base_model("qwen3"), 3).save_pretrained(root / "model")
    with LoopbackHub(root / "hub") as hub:
        python(hub, PUBLISH_BASE + PUBLISH_OTHERS, root / "base")
        hub.repos["tester/gated"]["gated"] = "manual"
        yield hub


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments, message",
    mostly_slow(
        [
            (["convert", "tester/nothing", "OUT"], "no Hub repository `tester/nothing`, or it is private: `hf auth"),
            (["convert", "tester/base", "OUT", "--revision", "v9"], "`tester/base` has no revision `v9`"),
            (["convert", "tester/gated", "OUT"], "`tester/gated` is gated: accept its terms on the Hub, then"),
            (["convert", "tester/empty", "OUT"], "`tester/empty` holds no config.json"),
            (
                ["push", "BASE", "tester/new"],
                "is a `qwen3` checkpoint, not an AttnRes one: `attnres convert` makes one",
            ),
            (["push", "nowhere", "tester/new"], "There is no folder `nowhere`"),
            (["push", "MODEL", "not/a/name"], "not/a/name"),
            (["push", "MODEL", "tester/base"], "The Hub refuses `tester/base`"),
        ],
        every=8,
    ),
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_the_hub_refuses(arguments, message, crowded_hub, tmp_path):
    root = crowded_hub.root.parent
    names = {"OUT": tmp_path / "out", "BASE": root / "base", "MODEL": root / "model"}
    commits = len(crowded_hub.commits("tester/base"))
    arguments = [names.get(argument, argument) for argument in arguments]
    printed = attnres(crowded_hub, *arguments, code=1, token="hf_stranger")
    assert message in printed and "Traceback" not in printed
    assert not (tmp_path / "out").exists()
    assert "tester/new" not in crowded_hub.repos and len(crowded_hub.commits("tester/base")) == commits


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, command",
    [("refused", "convert"), ("refused", "inspect"), ("unknown host", "convert"), ("no answer", "inspect")],
)
def test_a_wrong_name_without_a_hub(kind, command, crowded_hub, tmp_path):
    """One request tells: the client would try six times, for half a minute."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if kind == "no answer":
            silent.listen()
        port = silent.getsockname()[1]
        address = "http://nowhere.invalid" if kind == "unknown host" else f"http://127.0.0.1:{port}"
        arguments = ["tester/nothing", *([tmp_path / "out"] if command == "convert" else [])]
        run = [sys.executable, "-m", "attnres", command, *arguments]
        printed = process(crowded_hub, "env", f"HF_ENDPOINT={address}", *run, code=1)
    assert "There is no folder `tester/nothing`, and the Hub cannot be reached" in printed
    assert "Traceback" not in printed and "Retrying" not in printed


@pytest.mark.slow
def test_no_hub(crowded_hub):
    command = [sys.executable, "-m", "attnres", "push", crowded_hub.root.parent / "model", "tester/new"]
    printed = process(crowded_hub, "env", "HF_ENDPOINT=http://127.0.0.1:9", *command, code=1)
    assert "The Hub cannot be reached: " in printed and "Traceback" not in printed


# --- cards


def test_card_of_a_conversion(checkpoint, tmp_path):
    card = ModelCard.load(checkpoint / "README.md")
    assert card.data.license == "mit" and card.data.language == "en"
    assert card.data.library_name == "transformers" and card.data.pipeline_tag == "text-generation"
    assert set(card.data.tags) == {"attnres", "attention-residuals", "arxiv:2603.15031"}
    assert "8 sublayers (A: attention, M: MLP) in 3 blocks of 3, the last one of 2" in card.text
    assert "block 1  AMA\nblock 2     MAM\nblock 3        AM" in card.text
    assert "All queries of that attention over depth are zero" in card.text
    assert "the same function, up to rounding" in card.text and "| float32 |" in card.text


@pytest.mark.slow
def test_card_is_written_anew(hub, checkpoint):
    path = checkpoint / "README.md"
    card = ModelCard.load(path)
    card.data["datasets"] = ["tester/data"]
    card.data.tags.append("mine")
    card.save(path)
    (checkpoint / "evaluation").mkdir()
    (checkpoint / "evaluation/table.md").write_text("| task | ours |\n")
    (checkpoint / "figures").mkdir()
    (checkpoint / "figures/depth_weights.png").write_bytes(b"")
    (checkpoint / "depth").mkdir()  # as `attnres inspect CHECKPOINT -o CHECKPOINT/depth` writes it
    (checkpoint / "depth/weights.png").write_bytes(b"")
    printed = attnres(hub, "card", checkpoint, "--base-model", "tester/base", "--repo-id", "tester/mine")
    assert "README.md" in printed
    card = ModelCard.load(path)
    assert card.data.base_model == "tester/base" and card.data["datasets"] == ["tester/data"]
    assert "mine" in card.data.tags and card.data.license == "mit"
    assert "[tester/base](https://huggingface.co/tester/base) with" in card.text
    assert "![depth weights](figures/depth_weights.png)" in card.text and "| task | ours |" in card.text
    assert "![weights](depth/weights.png)" in card.text
    convert(checkpoint, checkpoint.parent / "other-blocks", block_size=2, verify=False)  # which reads otherwise
    assert (checkpoint.parent / "other-blocks/figures").exists()
    assert not (checkpoint.parent / "other-blocks/depth").exists()
    assert '"tester/mine"' in card.text
    python(hub, "import sys; from huggingface_hub import ModelCard; ModelCard.load(sys.argv[1]).validate()", path)
    base = checkpoint.parent / "base"
    assert "is a `qwen3` checkpoint, not an AttnRes one" in attnres(hub, "card", base, code=1)


@pytest.mark.parametrize("block_size, drawn", [(1, False), (8, True), (100, True)])
def test_block_partition(block_size, drawn, tmp_path):
    convert_in_memory(tiny_base_model("llama"), block_size).save_pretrained(tmp_path / "model")
    text = write_model_card(tmp_path / "model").read_text()
    assert ("```\nblock 1  AMAMAMAM\n```" in text) == drawn
    assert ("Full AttnRes" in text) == (block_size == 1)
    assert "## Conversion" not in text


def test_committed_cards_are_valid():
    folder = Path(__file__).parent.parent / "model_cards"
    cards = sorted(folder.glob("*.md"))
    assert cards
    for path in cards:
        card = ModelCard.load(path)
        assert card.data.library_name == ("peft" if "lora" in card.data.tags else "transformers")
        assert "attnres" in card.data.tags and card.data.pipeline_tag


SAVE_AGAIN = """
import sys, attnres, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert type(model).__module__ == "attnres.modeling_attnres"
model.save_pretrained(sys.argv[2])
assert not model.is_remote_code()
"""


@pytest.mark.slow
def test_self_contained(hub, checkpoint, tmp_path):
    """Saved with the package, saved without it, in other blocks: the code stays. Its base does not have it."""
    folder = tmp_path / "self-contained"
    printed = attnres(hub, "convert", tmp_path / "base", folder, "--self-contained", "--no-verify")
    assert "programs that do not import attnres need `trust_remote_code`." in printed
    python(hub, SAVE_AGAIN, folder, tmp_path / "saved")
    convert(folder, tmp_path / "blocks", full=True, verify=False)
    for name in ("self-contained", "saved", "blocks"):
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert set(config["auto_map"]) > {"AutoConfig", "AutoModel", "AutoModelForCausalLM"}
        assert CODE <= {path.name for path in (tmp_path / name).iterdir()}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, tmp_path / "saved")
    assert_loads_without_package(hub, tmp_path / "saved", folder, tmp_path)
    revert(folder, tmp_path / "back", verify=False)
    assert not CODE & {path.name for path in (tmp_path / "back").iterdir()}
    assert "auto_map" not in json.loads((tmp_path / "back/config.json").read_text())


PUSH_ADAPTER = """
import sys
from peft import get_peft_model
import attnres, torch
from attnres.training import lora_config
from transformers import AutoModelForCausalLM
from transformers.dynamic_module_utils import get_relative_import_files
model = AutoModelForCausalLM.from_pretrained("tester/my-model")
adapted = get_peft_model(model, lora_config(r=2)).eval()
with torch.no_grad():
    adapted.base_model.model.model.depth_queries.modules_to_save["default"].query.normal_()
adapted.push_to_hub("tester/adapter")
torch.save(adapted(torch.arange(3, 12)[None]).logits, sys.argv[1])
"""
LOAD_ADAPTER = """
import sys
from peft import AutoPeftModelForCausalLM
import attnres, torch
model = AutoPeftModelForCausalLM.from_pretrained("tester/adapter").eval()
assert torch.equal(model(torch.arange(3, 12)[None]).logits, torch.load(sys.argv[1]))
"""


@pytest.mark.slow
def test_adapters_go_to_the_hub_and_back(hub, checkpoint, tmp_path):
    attnres(hub, "push", checkpoint, "tester/my-model")
    python(hub, PUSH_ADAPTER, tmp_path / "logits.pt")
    assert {"adapter_config.json", "adapter_model.safetensors"} <= hub.files("tester/adapter").keys()
    python(hub, LOAD_ADAPTER, tmp_path / "logits.pt")
