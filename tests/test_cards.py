# SPDX-License-Identifier: Apache-2.0
"""Model cards, reports and figures say what is so, and what others have written in them does nothing."""

import ast
import contextlib
import io
import json
import math
import os
import re
import shlex
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from matplotlib import pyplot as plt
from tiny_gguf import write_gguf
from tiny_models import convert as convert_in_memory
from tiny_models import tiny_base_model

import attnres.model_cards.card as card_module
from attnres.checkpoints.checkpoint import open_checkpoint
from attnres.checkpoints.reports import ConversionReport, Parity, SourceWeights, VerificationReport
from attnres.conversion import convert, revert
from attnres.data.text import read_sample, train_tokenizer
from attnres.eval.report import forest_plot, model_index, table, write
from attnres.inspection.figures import heat_map, profiles
from attnres.inspection.measure import DepthStatistics, SiteStatistics
from attnres.model_cards.card import model_card, weights_of, write_adapter_card, write_model_card
from attnres.model_cards.example import answered
from attnres.training.curves import plot_curves
from attnres.training.runs import dataset_metadata, metadata_of_base
from attnres.utils import installation
from attnres.utils.markup import code, escaped, plain_markdown, printable, sentence


HARMFUL = {
    "HTML": "<script>alert(1)</script>",
    "a link": "x](javascript:alert(1)) [y](javascript:alert(2))",
    "a picture": "![x](http://evil.example/x.png)",
    "a heading": "a\n\n# Owned\n\n===\n",
    "code": "a`<b onclick=x>`b``c",
    "a fence": "```\n<img src=x onerror=alert(1)>\n```\n~~~\n",
    "a template": "{{ 7 * 7 }}{% raw %}{# x #}${7*7}",
    "Python": '"); import os; os.system("id"); ("\\',
    "a shell": "$(id) `id`; id & id\n id",
    "YAML": "x: [y\n---\nlicense: mit\n--- # '\"",
    "a table": "| cell \\| $x$ \\",
    "an address": "www.evil.example https://evil.example <https://evil.example>",
    "a definition": "[x]\n\n[x]: javascript:alert(1)",
    "an entity": "&lt;b&gt; &#60;i&#62; &nbsp;",
    "a direction": "\u202egnp.exe\u2066\x1b[31m\x85\u2028",
    "backslashes": "\\<b>\\`<i>`\\\\[x](javascript:1)",
}
FIGURES = """
entropy relative_entropy effective_sources small_weights embedding_weight predecessor_weight distance rms
""".split()
SITE = {"sources": ["embedding", "partial"], "weights": [0.5, 0.5], **dict.fromkeys(FIGURES, 0.5)}
TABLE = "| task | ours |\n|---|---|\n| a\\_b | 1 ± 2 * |\n\n- answers of `x` were cut\n"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cards") / "model"
    convert_in_memory(tiny_base_model("llama"), 2).save_pretrained(folder)
    return folder


def a_copy(checkpoint: Path, folder: Path) -> Path:
    return Path(shutil.copytree(checkpoint, folder))


def a_report(text: str = "base", **fields) -> dict:
    figures = {"max_difference": 0.0, "relative_error": 0.0, "kl_divergence": 0.0, "top1_agreement": 1.0}
    limits = {"perplexities": [1.0, 1.0], "rounding": 0.0, "measured": 0.0, "tolerance": 0.0}
    parity = Parity(dtype=text, criterion=text, **figures, **limits)
    return ConversionReport(
        operation=text,
        source=text,
        source_commit=text,
        destination=text,
        model_type="attnres",
        base_model_type="llama",
        num_sublayers=6,
        block_size=2,
        tensors_added={},
        tensors_dropped=[],
        left_behind=[text],
        num_bytes=1,
        seconds=1.0,
        versions={"attnres": text, "transformers": text, "torch": text},
        verification=VerificationReport(text, text, text, 8, [parity, replace(parity, dtype="float32")]),
        notes=[text],
        **{"weights": SourceWeights("gguf", text, text, {text: 3}, True, True), **fields},
    )


def shown(markdown: str) -> tuple[list[str], set[str], list[str]]:
    """Headings, addresses and code of a text as a reader sees it, in which no HTML is left."""
    tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(markdown)
    headings = [tokens[i + 1].content for i, token in enumerate(tokens) if token.type == "heading_open"]
    inline = [child for token in tokens for child in token.children or ()]
    html = [token.content for token in [*tokens, *inline] if token.type.startswith("html")]
    assert html == []
    links = {child.attrs.get("href") or child.attrs.get("src") for child in inline}
    fences = [token.content for token in tokens if token.type in ("fence", "code_block")]
    # GitHub makes links of addresses in text by itself
    text = re.sub(
        r"^(?P<fence>```+).*?^(?P=fence)$|(?<!`)(?P<code>`+)(?!`).+?(?<!`)(?P=code)(?!`)|\]\(.*?\)",
        "",
        markdown,
        flags=re.DOTALL | re.MULTILINE,
    )
    assert not re.search(r"(https?://|www\.)evil", text)
    return headings, links - {None}, fences


@pytest.mark.parametrize("attack", HARMFUL)
def test_what_is_not_ours_does_nothing_in_a_card(attack, checkpoint, tmp_path):
    """In the name of the model, the repository, the base, files, reports, maps and tables; harmless ones go before."""
    harmless = card_with("plain", a_copy(checkpoint, tmp_path / "harmless"))
    text = HARMFUL[attack]
    card = card_with(text, a_copy(checkpoint, tmp_path / "harmful"))
    headings, links, fences = shown(card.text)
    expected, expected_links, _ = shown(harmless.text)
    assert headings[1:] == expected[1:] and len(headings) == len(expected)
    ours = {link for link in expected_links if "plain" not in link}
    assert ours <= links and all(link in ours or link.startswith("figures/") for link in links)
    python, serving, peft, _ = fences  # the name is a string of Python, or a word of a command
    names = [node.value for node in ast.walk(ast.parse(python)) if isinstance(node, ast.Constant)]
    assert names.count(printable(text)) == 2 and ast.parse(peft)
    assert shlex.split(serving.splitlines()[0], comments=True) == ["attnres", "serve", printable(text)]
    metadata = yaml.safe_load(re.match(r"---\n(.*?)\n---\n", str(card), re.DOTALL)[1])
    assert metadata["base_model"] == text and "license" not in metadata
    assert card.data.to_dict()["base_model"] == text


def card_with(text: str, folder: Path) -> ModelCard:
    """A card of a checkpoint in which all that others could name is called so."""
    (folder / "conversion_report.json").write_text(json.dumps(a_report(text).to_dict()))
    (folder / "evaluation").mkdir()
    (folder / "evaluation/table.md").write_text(f"| {text} | x |\n|---|---|\n{text}\n")
    (folder / "depth").mkdir()
    models = [{"model": text, "fingerprint": text}] * 2
    (folder / "depth/depth.json").write_text(json.dumps({"attnres_version": text, "models": models}))
    (folder / "figures").mkdir()
    (folder / "figures" / f"{text.replace('/', '')[:60]}.png").write_bytes(b"")
    training = {"base": text, "mode": "full", "dataset": text, "steps": 1, "before": 2.0, "after": 1.0}
    write_model_card(folder, repo_id=text, title=text, base_metadata={"base_model": text}, training=training)
    return ModelCard.load(folder / "README.md")


@pytest.mark.parametrize("attack", HARMFUL)
def test_what_is_not_ours_does_nothing_elsewhere(attack, tmp_path):
    """In reports of conversions, tables of evaluations and cards of adapters."""
    text = HARMFUL[attack]
    training = {"base": text, "mode": "lora", "has_queries": True, "dataset": text, "steps": 1, "before": None}
    card = write_adapter_card(
        tmp_path, title=text, repo_id=text, metadata={"base_model": text}, training=training
    ).read_text()
    headings, links, (python,) = shown(ModelCard(card).text)
    assert headings[1:] == ["How to use it", "Training"] and links <= {"https://arxiv.org/abs/2603.15031"}
    assert printable(text) in [node.value for node in ast.walk(ast.parse(python)) if isinstance(node, ast.Constant)]

    headings, links, fences = shown(a_report(text).to_markdown())
    assert len(headings) == 2 and headings[1] == "Verification" and not links and not fences

    results = an_evaluation(text)
    markdown = table(results)
    headings, links, fences = shown(markdown)
    assert not headings and not links and not fences
    lines = markdown.split("\n\n")[0].splitlines()
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1  # as many cells in every row
    assert plain_markdown(markdown) == markdown  # so the card shows it as it is


def with_tokenizer(folder: Path, chat_template: str | None = None) -> Path:
    tokenizer = train_tokenizer([read_sample()] * 3, vocab_size=300)
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    convert_in_memory(tiny_base_model("llama", vocab_size=len(tokenizer)), 2).save_pretrained(folder)
    return folder


def test_a_card_has_an_example_with_its_output(tmp_path, run_attnres):
    """The code of the card prints what the card says that it prints, and a later card keeps it."""
    folder = with_tokenizer(tmp_path / "model")
    given = ["--license", "apache-2.0", "--language", "en", "--language", "de", "--dataset", "user/data"]
    assert run_attnres("card", folder, *given, "--example", 'the "key') == 0
    for _ in range(2):
        card = ModelCard.load(folder / "README.md")
        assert (card.data.license, card.data.language) == ("apache-2.0", ["en", "de"])
        assert card.data.datasets == ["user/data"]
        assert "arxiv:2603.15031" in card.data.tags and "\nLicence: apache-2.0.\n" in card.text
        _, _, fences = shown(card.text)
        code = fences[0].replace(f'"{folder.name}"', repr(str(folder)))
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, {})
        assert "\n".join(map(printable, printed.getvalue().split("\n"))) == fences[1] and len(fences[1]) > 1
        assert run_attnres("card", folder) == 0


def test_a_dry_run_shows_the_card_and_the_total(checkpoint, tmp_path, run_attnres, capsys):
    folder = a_copy(checkpoint, tmp_path / "model")
    assert run_attnres("card", folder, "--license", "mit") == 0
    capsys.readouterr()
    assert run_attnres("push", folder, "user/model", "--dry-run") == 0
    printed = capsys.readouterr().out
    sizes = [
        int(size.replace(",", "")) for size in re.findall(r"^Would push \S+, (\S+) bytes$", printed, re.MULTILINE)
    ]
    assert len(sizes) > 20 and f"In all {len(sizes)} files, {sum(sizes):,} bytes" in printed
    assert "\nlicense: mit\n" in printed and 'from_pretrained("user/model", trust_remote_code=True)' in printed
    assert "The card has no language and no base_model: see `attnres card --help`" in printed


def test_an_example_of_a_chat(tmp_path):
    folder = with_tokenizer(tmp_path / "model", "{% for m in messages %}{{ m.content }}.{% endfor %}")
    entry = answered(folder, "the key")
    assert entry["messages"] == [{"role": "user", "content": "the key"}]
    text = model_card(folder, base_metadata={"widget": [entry]}).text
    assert 'messages = [{"role": "user", "content": "the key"}]' in text and "apply_chat_template(messages" in text
    with pytest.raises(ValueError, match="should be one line of text"):
        answered(folder, "a\nb")


@pytest.mark.parametrize("attack", HARMFUL)
def test_an_example_of_others_does_nothing(attack, checkpoint, tmp_path):
    """Its prompt is a string of Python, and nothing in its output ends the block of code."""
    text = HARMFUL[attack]
    example = {"text": text, "output": {"text": f"{text}\n{text}\n```\n# {text}"}}
    card = model_card(a_copy(checkpoint, tmp_path / "model"), base_metadata={"widget": [{}, "x", example]})
    headings, _, (python, output, *_) = shown(card.text)
    names = [node.value for node in ast.walk(ast.parse(python)) if isinstance(node, ast.Constant)]
    assert printable(text) in names
    assert output == "".join(f"{printable(line)}\n" for line in example["output"]["text"].split("\n"))
    assert len(headings) == len(shown(model_card(tmp_path / "model").text)[0])


@pytest.mark.slow
def test_a_gguf_file_says_its_licence(tmp_path):
    """And its languages, as far as its header has them."""
    write_gguf(tmp_path / "tiny.gguf", about={"license": "apache-2.0", "languages": ["en"]})
    convert(tmp_path / "tiny.gguf", tmp_path / "converted", num_blocks=2)
    card = ModelCard.load(tmp_path / "converted/README.md")
    assert (card.data.license, card.data.language) == ("apache-2.0", ["en"])
    assert "Licence: apache-2.0." in card.text and "It was made from the quantised GGUF file `tiny.gguf`" in card.text


def test_data_of_the_hub_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("local").mkdir()
    assert dataset_metadata("user/data") == {"datasets": ["user/data"]}
    assert dataset_metadata("local") == dataset_metadata("of/no/repository") == {}


def test_the_address_of_the_project_is_in_one_place(checkpoint, tmp_path, monkeypatch):
    folder = a_copy(checkpoint, tmp_path / "model")
    text = model_card(folder).text
    assert "The package `attnres` is" in text and "pip install '.[serving]' in a clone of attnres" in text
    for module in (installation, card_module):
        monkeypatch.setattr(module, "ADDRESS", "https://example.com/attnres")
    text = model_card(folder).text
    assert "The package [`attnres`](https://example.com/attnres) is" in text
    assert "pip install 'attnres[serving] @ git+https://example.com/attnres'" in text


def test_a_table_has_the_columns_that_say_something():
    """Metrics as lm-eval calls them, the settings in a line, and no column that is empty or the same everywhere."""
    results = an_evaluation("x")
    first = results["rows"][0] | {"metric": "acc", "filter": "none", "benchmark": {"name": "First", "paper": None}}
    second = first | {"metric": "bits_per_byte", "benchmark": {"name": "Second", "paper": None}}
    text = table(results | {"rows": [first, second]})
    assert text.splitlines()[0] == "| benchmark | metric | documents | x | x again | x again - x | p |"
    assert "| Second | 2^-bits_per_byte | 4 | 50.0 ± 10.0 |" in text and "paper" not in text
    assert (
        "- Settings: all documents, 0 examples in the prompt, x on x, batch size x, seed 0, attnres x, Python x"
        in text
    )
    second["benchmark"] = {"name": "Second", "paper": [1.0, 2.0]}
    second["num_fewshot"] = {"x": 5}
    header, _, *rows = table(results | {"rows": [first, second]}).splitlines()[:4]
    assert "| metric | examples | documents |" in header and header.endswith("| paper: PreNorm | paper: AttnRes |")
    assert rows[0].endswith("|  |  |") and rows[1].endswith("| 1.0 | 2.0 |")


def test_a_table_without_rows_says_what_is_missing():
    results = an_evaluation("x") | {"rows": [], "skipped": {"QuaRTz": "it needs evals: `pip install --no-deps evals`"}}
    skipped = "- QuaRTz was skipped: it needs evals: `pip install --no-deps evals`"
    assert table(results).splitlines() == ["No benchmark was run.", "", skipped]


def test_a_published_figure_is_what_its_metric_names(tmp_path):
    """Percentages, but bits of texts; nothing of a perplexity, of which only a likelihood is kept."""
    results = an_evaluation("x")
    results["models"][0]["identity"]["model"] = {"fingerprint": "abc"}
    row = results["rows"][0] | {"benchmark": {"name": "Texts", "tasks": ["t"], "paper": None}, "filter": "none"}
    metrics = ("acc", "bits_per_byte", "word_perplexity")
    results["rows"] = [row | {"metric": metric, "bits_per_byte": [0.98765, 1.0]} for metric in metrics]
    write(results | {"schema": 2}, tmp_path)
    found = {result.metric_type: result.metric_value for result in model_index(tmp_path, "x", "abc")}
    assert found == {"acc": 50.0, "bits_per_byte": 0.9877}


def test_a_score_of_a_single_document_has_no_error():
    results = an_evaluation("x")
    results["rows"][0]["scores"] = [[0.5, math.nan], [1.0, math.nan]]
    results["rows"][0]["comparisons"][0]["interval"] = [math.nan, math.nan]
    assert "| 50.0 | 100.0 | +10.0 |" in table(results) and "nan" not in table(results)


def test_names_are_no_formulas_in_figures(tmp_path):
    text = "_$x^$ \\$ {{ $\\frac$"
    assert forest_plot(an_evaluation(text), tmp_path) and plot_curves({text: []}, tmp_path / "loss", title=text)
    kinds = enumerate(("attention", "mlp", "final"))
    sites = [SiteStatistics(site=i, kind=kind, layer=0, **SITE) for i, kind in kinds]
    statistics = DepthStatistics(text, "llama", block_size=1, num_blocks=2, text=text, num_tokens=8, sites=sites)
    for figure in (heat_map([statistics]), profiles([statistics])):
        figure.savefig(tmp_path / "figure.png")
        plt.close(figure)


def an_evaluation(text: str) -> dict:
    comparison = {"difference": 0.1, "interval": [0.0, 0.2], "p_value": 0.01, "p_holm": 0.01}
    row = {
        "benchmark": {"name": text, "tasks": ["x"], "paper": None, "license": text},
        "metric": text,
        "filter": text,
        "runs": [[{"dtype": text, "hardware": text, "batch_size": text, "python": text}]] * 2,
        "num_fewshot": {"x": 0},
        "num_documents": 4,
        "generation": {"x": {"max_gen_toks": 5}},
        "scores": [[0.5, 0.1], [0.6, 0.1]],
        "cut_off": [1, 1],
        "empty": [1, 1],
        "bits_per_byte": [1.0, 1.0],
        "comparisons": [comparison],
    }
    options = {"limit": None, "apply_chat_template": False, "max_gen_toks": None, "seed": 0, "processes": 1}
    model = {"name": text, "identity": {"options": options, "versions": {"attnres": text}}}
    other = {**model, "name": f"{text} again"}
    return {"models": [model, other], "rows": [row], "skipped": {text: text}}


def test_text_is_shown_as_it_is():
    for text in HARMFUL.values():
        for of_text in (escaped, code):
            (_, inline, _) = MarkdownIt("commonmark").parse(f"a {of_text(text)}")
            read = "".join(child.content for child in inline.children)
            assert " ".join(read.split()) == " ".join(f"a {printable(text)}".split())
        assert sentence(sentence("a b")) == "a b" and plain_markdown(plain_markdown(text)) == plain_markdown(text)
    assert plain_markdown(TABLE) == TABLE and sentence("`_a_` is _a_b_") == r"`_a_` is \_a_b\_"


def fifo(path: Path):
    os.mkfifo(path)


def link_to(target: str):
    return lambda path: path.symlink_to(target)


FILES = {
    "a link out": (link_to("/etc/passwd"), "is a link to `/etc/passwd`, outside the folder"),
    "a link out by its parents": (link_to("../../secret.md"), ", outside the folder"),
    "a device": (link_to("/dev/zero"), (", outside the folder", "is a pipe, a socket or a device")),
    "a link to nowhere": (link_to("nowhere"), "is a broken link"),
    "a link to itself": (lambda path: path.symlink_to(path.name), "is a broken link"),
    "a pipe": (fifo, "is a pipe, a socket or a device"),
    "a folder": (lambda path: path.mkdir(), "is a folder, not a file"),
    "a large file": (
        lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 2**27),
        "more than the limit of",
    ),
}
READ = ("evaluation/table.md", "conversion_report.json", "depth/depth.json", "README.md")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("kind", FILES)
def test_no_file_is_read_but_those_of_the_folder(kind, name, checkpoint, tmp_path, run_attnres, capsys):
    folder = a_copy(checkpoint, tmp_path / "a/model")
    make, message = FILES[kind]
    for outside in (tmp_path, folder.parent):  # where the link leads from the folder, and from those in it
        (outside / "secret.md").write_text("secret")
    (folder / name).parent.mkdir(exist_ok=True)
    make(folder / name)
    before = sorted(path.name for path in folder.rglob("*"))
    assert run_attnres("card", folder) == 1
    error = " ".join(capsys.readouterr().err.split())
    messages = message if isinstance(message, tuple) else (message,)
    assert any(text in error for text in messages) and Path(name).name in error and "Traceback" not in error
    assert sorted(path.name for path in folder.rglob("*")) == before


def test_links_within_the_folder_and_those_of_the_cache_are_followed(checkpoint, tmp_path):
    folder = a_copy(checkpoint, tmp_path / "models--a--b/snapshots/0123")
    blobs = tmp_path / "models--a--b/blobs"
    (folder / "evaluation").mkdir()
    blobs.mkdir()
    (blobs / "abc").write_text(TABLE)
    (folder / "evaluation/table.md").symlink_to("../../../blobs/abc")
    assert "| task | ours |" in write_model_card(folder).read_text()


def test_an_evaluation_is_not_written_through_links(checkpoint, tmp_path, monkeypatch):
    """Nor is its table copied from what is called so: it is made of the results."""
    folder, evaluation = a_copy(checkpoint, tmp_path / "model"), tmp_path / "evaluation"
    evaluation.mkdir()
    (evaluation / "table.md").symlink_to("/etc/passwd")
    results = an_evaluation("bench")
    monkeypatch.setattr("attnres.eval.report.read", lambda folder: results)
    monkeypatch.setattr("attnres.eval.report.model_index", lambda *arguments: [])
    (tmp_path / "elsewhere").mkdir()
    (folder / "evaluation").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="evaluation` is a link"):
        write_model_card(folder, evaluation=evaluation)
    assert not list((tmp_path / "elsewhere").iterdir())
    (folder / "evaluation").unlink()
    (folder / "evaluation").mkdir()
    (tmp_path / "mine.md").write_text("mine")
    (folder / "evaluation/table.md").symlink_to(tmp_path / "mine.md")
    text = write_model_card(folder, evaluation=evaluation).read_text()
    assert "| bench |" in text and "root:" not in text
    assert (tmp_path / "mine.md").read_text() == "mine"
    (evaluation / "differences.png").symlink_to("/etc/passwd")
    with pytest.raises(ValueError, match="is a link to .*, outside the folder"):
        write_model_card(folder, evaluation=evaluation)


@pytest.mark.parametrize(
    "name, content",
    [
        ("conversion_report.json", "[" * 100_000),
        ("conversion_report.json", "{}"),
        ("conversion_report.json", json.dumps({**a_report().to_dict(), "weights": {"tensors": 3}})),
        (
            "conversion_report.json",
            json.dumps(a_report().to_dict()).replace('"max_difference": 0.0', '"max_difference": "x"'),
        ),
        ("README.md", "---\n3: 4\n---\n"),
        ("README.md", "---\ntags: 5\n---\n"),
        ("README.md", f"---\na: {'[' * 3000}\n---\n"),
        ("README.md", "---\nmodel-index: 3\n---\n"),
        ("depth/depth.json", "[" * 100_000),
        ("depth/depth.json", '{"models": [{"model": "x"}], "attnres_version": ' + "[" * 5000),
    ],
)
def test_damaged_files_are_named(name, content, checkpoint, tmp_path, run_attnres, capsys):
    folder = a_copy(checkpoint, tmp_path / "model")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(content)
    assert run_attnres("card", folder) == 1
    error = capsys.readouterr().err
    assert "Traceback" not in error and len(error) < 1000
    assert Path(name).name in error or "metadata of the card" in error


# --- what a model was made from


def test_a_model_of_a_quantised_file_says_so_wherever_it_goes(tmp_path):
    """In the card, both reports, those of what is made of it, and the card's metadata; the base is not its base."""
    write_gguf(tmp_path / "tiny.Q4_1.gguf", "Q4_1")
    report = convert(tmp_path / "tiny.Q4_1.gguf", tmp_path / "attnres", num_blocks=2, verify=False)
    expected = SourceWeights("gguf", "tiny.Q4_1.gguf", "Q4_1", {"Q4_1": 23, "F32": 7}, True, True)
    assert report.weights == expected
    written = json.loads((tmp_path / "attnres/conversion_report.json").read_text())
    assert written["weights"] == asdict(expected)
    words = "the quantised GGUF file `tiny.Q4_1.gguf` (Q4_1; tensors: 23 of Q4_1, 7 of F32)"
    assert words in (tmp_path / "attnres/conversion_report.md").read_text()

    def card(folder: str, **options) -> str:
        text = write_model_card(tmp_path / folder, **options).read_text()
        return " ".join(text.replace("\\", "").split())

    text = card("attnres")
    assert f"It was made from {words}, whose weights were dequantised to fp32." in text
    assert "exactly what its PreNorm base" not in text and "the quantised file does not come back" in text
    assert "base_model" not in text
    text = card("attnres", base_metadata={"base_model": "tester/base"})
    assert "[tester/base](https://huggingface.co/tester/base), in a quantised form, with" in text
    assert "does not compute exactly what [tester/base](https://huggingface.co/tester/base) computes" in text
    data = ModelCard.load(tmp_path / "attnres/README.md").data
    assert data.base_model_relation == "quantized" and data.attnres_source_weights == asdict(expected)

    convert(tmp_path / "attnres", tmp_path / "other-blocks", full=True, verify=False)
    assert words in card("other-blocks") and "base_model_relation: quantized" in card("other-blocks")
    report = revert(tmp_path / "attnres", tmp_path / "reverted", verify=False)
    assert report.weights == expected and any(words in note for note in report.notes)
    convert(tmp_path / "reverted", tmp_path / "again", verify=False)
    assert words in card("again")
    # what is trained on it takes that over, from its card or, where there is none, from its report
    training = {"base": "x", "mode": "full", "has_queries": True, "dataset": "x", "steps": 1, "before": None}
    for base in ("attnres", "reverted"):
        metadata = metadata_of_base(str(tmp_path / base))
        assert metadata["attnres_source_weights"] == asdict(expected)
        trained = a_copy(tmp_path / "attnres", tmp_path / f"of-{base}")
        for name in ("README.md", "conversion_report.json"):
            (trained / name).unlink()
        assert words in card(trained.name, base_metadata=metadata, training=training)
        adapter = write_adapter_card(tmp_path, title="x", repo_id="x", metadata=metadata, training=training)
        assert f"The weights of the base were made from {words}, dequantised to fp32." in adapter.read_text()
    (tmp_path / "attnres/conversion_report.json").unlink()  # the card knows it as well
    assert weights_of(open_checkpoint(tmp_path / "attnres")) == expected


def test_the_repository_of_a_quantised_file_is_its_base(checkpoint, tmp_path):
    """What was made from a repository of GGUF files computes what that computes, and the Hub infers the relation."""
    folder = a_copy(checkpoint, tmp_path / "model")
    (folder / "conversion_report.json").write_text(json.dumps(a_report("tester/model-GGUF").to_dict()))
    text = write_model_card(folder, base_metadata={"base_model": "tester/model-GGUF"}).read_text()
    assert "](https://huggingface.co/tester/model-GGUF) with [Attention" in text and "base_model_relation" not in text
    # and so does a model that was trained after it
    training = {"base": "x", "mode": "full", "dataset": "x", "steps": 1, "before": None}
    text = write_model_card(folder, base_metadata={"base_model": "tester/model"}, training=training).read_text()
    assert "in a quantised form" in text and "base_model_relation" not in text


@pytest.mark.parametrize("kind, quantized", [("F16", False), ("Q8_0", True)])
def test_kinds_of_files(kind, quantized, tmp_path):
    write_gguf(tmp_path / "tiny.gguf", kind, file_type=15)
    report = convert(tmp_path / "tiny.gguf", tmp_path / "attnres", verify=False)
    assert report.weights.kind == "Q4_K_M" and report.weights.quantized == quantized  # as the header says
    text = " ".join((tmp_path / "attnres/README.md").read_text().split())
    assert ("whose weights were dequantised to fp32" in text) == quantized
    assert ("whose weights are kept in fp32" in text) != quantized
    text = write_model_card(tmp_path / "attnres", base_metadata={"base_model": "tester/base"}).read_text()
    assert ("base_model_relation" in text) == quantized


@pytest.mark.parametrize(
    "config, kind",
    [
        ({"quant_method": "gptq", "bits": 4}, "4 bits"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "4 bits"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "<b>"}, "<b>"),
    ],
)
def test_weights_that_are_still_quantised(config, kind, checkpoint, tmp_path):
    folder = a_copy(checkpoint, tmp_path / "model")
    config_dict = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config_dict, "quantization_config": config}))
    found = weights_of(open_checkpoint(folder))
    assert (found.format, found.kind, found.file) == (config["quant_method"], kind, None) and not found.dequantized
    assert found.tensors == {"F32": len(open_checkpoint(folder).weight_map)}
    text = write_model_card(folder, base_metadata={"base_model": "tester/base"}).read_text()
    assert f"quantised, like those of its base: {escaped(found.format)} weights ({escaped(kind)}; tensors: " in text
    assert "in a quantised form" in text and "base_model_relation: quantized" in text


def test_the_cards_of_this_repository_say_it():
    """SmolLM2's cards are of models that were made from a file of 4 bits."""
    for path in Path(__file__).parent.parent.glob("model_cards/smollm2*.md"):
        text = " ".join(path.read_text().split())
        assert "SmolLM2-135M-Instruct.Q4_1.gguf` (Q4_1; tensors: 210 of Q4_1, 61 of F32, 1 of Q8_0)" in text.replace(
            "\\", ""
        )
        assert "exactly what its PreNorm base computes" not in text
        entry = ModelCard.load(path).data.attnres_source_weights
        assert entry["kind"] == "Q4_1" and entry["dequantized"]
