# SPDX-License-Identifier: Apache-2.0
"""The page of `attnres explore`: its figures against the model's own outputs, and clicks in a real browser."""

import os
import re
import signal
import socket
import subprocess
import sys

import pytest
import torch
from decoder_configs import decoder_config
from loopback_hub import LoopbackHub
from tiny_models import convert, randomize_queries, tiny_base_model
from transformers import AutoTokenizer

from attnres.configuration_attnres import AttnResConfig
from attnres.data.text import read_sample, train_tokenizer
from attnres.depth.recorder import DepthRecorder
from attnres.modeling_attnres import AttnResForCausalLM


gradio = pytest.importorskip("gradio", reason="gradio is in the extra `demo`")

from attnres.inspection.explorer import MAX_TOKENS, Explorer, draw, launch, write_space  # noqa: E402


TEXT = "It was a bright cold day."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("explorer")
    tokenizer = train_tokenizer([read_sample()] * 3, vocab_size=400)
    base = tiny_base_model("qwen3", vocab_size=len(tokenizer))
    base.save_pretrained(folder / "base")
    models = {
        "zero": convert(base, 3),
        "queries": randomize_queries(convert(base, 3)),
        "heads": randomize_queries(convert(base, 3, attn_res_num_heads=2)),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    models["zero"].save_pretrained(folder / "no_tokenizer")
    return folder


@pytest.mark.parametrize("name", ["queries", "heads"])
def test_reading(folder, name):
    path = str(folder / name)
    explorer = Explorer([path], device="cpu")
    reading = explorer.read(path, TEXT)
    model, tokenizer = explorer.load(path)
    assert "".join(reading.tokens) == TEXT

    with torch.no_grad():
        outputs = model(reading.ids, output_depth_attentions=True)
    for site, weights in enumerate(outputs.depth_attentions):
        expected = weights[0].mean(1) if weights[0].ndim == 3 else weights[0]
        torch.testing.assert_close(reading.weights[site], expected, rtol=1e-5, atol=1e-6)
        assert reading.site(site).weights == pytest.approx(expected.mean(0).tolist(), abs=1e-5)
        assert reading.of_token(2).sites[site].weights == reading.weights[site][2].tolist()
    assert [site for _, site in reading.choices()] == list(range(1, 9))

    def most_probable(logits):
        probabilities, tokens = logits[0, -1].softmax(-1).topk(6)
        names = [tokenizer.decode([i]) for i in tokens.tolist()]
        names = [f"token {i}" if "\ufffd" in name else repr(name) for i, name in zip(tokens.tolist(), names)]
        assert len(set(names)) == 6
        return dict(zip(names, probabilities.tolist()))

    assert reading.predictions == pytest.approx(most_probable(outputs.logits), abs=1e-5)
    with torch.no_grad():
        masked = model(reading.ids, use_cache=False, depth_recorder=DepthRecorder(masked_source={7: 1}))
    without = explorer.without(reading, 7, 1)
    assert without == pytest.approx(most_probable(masked.logits), abs=1e-5) and without != reading.predictions


READS = {
    "full": {},
    "kept": {"attn_res_stream": "kept", "attn_res_num_heads": 2},
    "sigmoid": {"attn_res_weights": "sigmoid"},
    "softmax1": {"attn_res_weights": "softmax1", "attn_res_open_block": "each"},
    "input": {"attn_res_query": "input"},
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("base", ["qwen3", "gpt_neox", "qwen3_moe"])
@pytest.mark.parametrize("read", READS)
def test_every_read(folder, tmp_path, base, read):
    """Every source that the page offers can be left out, also where attention and MLP share a read."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "zero")
    config = decoder_config(base, vocab_size=len(tokenizer))
    config = AttnResConfig.from_base_config(config, block_size=1 if read == "full" else 3, **READS[read])
    torch.manual_seed(0)
    model = AttnResForCausalLM(config)
    randomize_queries(model.base_model)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    explorer = Explorer([str(tmp_path)], device="cpu")
    reading = explorer.read(str(tmp_path), TEXT)
    assert reading.choices()
    for _, site in reading.choices():
        assert reading.weights[site].shape == (len(reading.tokens), len(reading.site(site).sources))
        for source in range(len(reading.site(site).sources)):
            predicted = explorer.without(reading, site, source)
            assert len(predicted) == 6 and all(0 < probability <= 1 for probability in predicted.values())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("text", [" ", "\n\n", "$\\frac{1}$ _^%", "ก😀", "\x00"])
def test_strange_texts_are_drawn(folder, tmp_path, text):
    path = str(folder / "queries")
    reading = Explorer([path], device="cpu").read(path, text)
    for token in range(len(reading.tokens)):
        draw(reading.of_token(token)).savefig(tmp_path / "weights.png")


def test_long_and_empty_texts(folder):
    explorer = Explorer([str(folder / "zero")], device="cpu")
    assert len(explorer.read(str(folder / "zero"), TEXT * 100).tokens) <= MAX_TOKENS
    with pytest.raises(ValueError, match="Type a text first"):
        explorer.read(str(folder / "zero"), "")


def test_one_model_is_kept(folder):
    explorer = Explorer([str(folder / "zero"), str(folder / "queries")], device="cpu")
    assert list(explorer.names.values()) == ["zero", "queries"]
    first = explorer.load(str(folder / "zero"))
    assert explorer.load(str(folder / "zero")) is first
    explorer.load(str(folder / "queries"))
    assert explorer.load(str(folder / "zero")) is not first
    with pytest.raises(KeyError):  # a path that the page does not offer
        explorer.load(str(folder / "heads"))


def test_wrong_arguments(folder):
    with pytest.raises(ValueError, match="qwen3, not an AttnRes model"):
        Explorer([str(folder / "zero"), str(folder / "base")])
    with pytest.raises(ValueError, match="is empty: name at least one"):
        Explorer([])
    with pytest.raises(ValueError, match="`dtype='float31'` is not a dtype"):
        Explorer([str(folder / "zero")], dtype="float31")
    with pytest.raises(OSError, match="no folder"):
        Explorer(["./nope"])
    with pytest.raises(ValueError, match="no tokenizer that loads here"):
        Explorer([str(folder / "zero"), str(folder / "no_tokenizer")])
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(OSError, match="port"):
        launch(Explorer([str(folder / "zero")], device="cpu"), port=server.getsockname()[1], block=False)


def test_space(folder, tmp_path):
    with pytest.raises(ValueError, match="is a folder, which a Space cannot read: `attnres push` it first"):
        write_space(Explorer([str(folder / "zero")]), tmp_path / "space")
    assert not (tmp_path / "space").exists()

    explorer = Explorer([str(folder / "zero")])
    explorer.commits = {"user/model": "0" * 40}
    wrote = write_space(explorer, tmp_path / "space")
    assert {path.name for path in wrote} == {path.name for path in (tmp_path / "space").iterdir()}
    compile((tmp_path / "space/app.py").read_text(), "app.py", "exec")
    assert "Explorer(['user/model'])" in (tmp_path / "space/app.py").read_text()
    card = (tmp_path / "space/README.md").read_text()
    assert f"sdk_version: {gradio.__version__}\n" in card and "models:\n- user/model\n" in card
    with pytest.raises(ValueError, match="is not empty"):
        write_space(explorer, tmp_path / "space")


@pytest.mark.slow
def test_a_space_runs(folder, tmp_path):
    """Its files as the Hub runs them, with a checkpoint that has been pushed."""
    with LoopbackHub(tmp_path / "hub") as hub:
        environment = {**os.environ, **hub.env(), "HF_TOKEN": hub.token, "COLUMNS": "200"}

        def attnres(*arguments):
            command = [sys.executable, "-m", "attnres", *map(str, arguments)]
            done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
            assert done.returncode == 0, done.stderr
            return done.stdout + done.stderr

        attnres("push", folder / "queries", "tester/model")
        assert "in place of ADDRESS" in attnres("explore", "tester/model", "--space", tmp_path / "space")
        app = subprocess.Popen(
            [sys.executable, "-u", "app.py"],
            cwd=tmp_path / "space",
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert any(re.match(r"The page is at http://.*:\d+/ until", line) for line in app.stdout)
        finally:
            app.send_signal(signal.SIGINT)
            app.communicate(timeout=60)


@pytest.fixture(scope="module")
def address(folder):
    app = launch(Explorer([str(folder / "queries"), str(folder / "zero")], device="cpu"), block=False)
    yield app.local_url
    app.close()


@pytest.mark.slow
def test_in_the_browser(browser, address, folder):
    from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
    from selenium.webdriver import Keys
    from selenium.webdriver.support.wait import WebDriverWait

    # The page replaces its elements at any time, also between finding one and using it
    replaced = (NoSuchElementException, StaleElementReferenceException)

    def text_of(name):
        return browser.find_element("css selector", f"#{name}").text

    def picture():
        return browser.find_element("css selector", "#weights img").get_attribute("src")

    def wait_until(condition):
        WebDriverWait(browser, 60, ignored_exceptions=replaced).until(lambda _: condition())

    def click(find):
        # As a person does who waits until nothing lies over it: while the page computes, it shows a bar there
        wait_until(
            lambda: browser.find_elements("css selector", ".wrap.generating, .wrap.translucent:not(.hide)") == []
        )
        wait_until(lambda: find().click() or True)

    def choose(name, option):
        def options():
            found = browser.find_elements("css selector", f"#{name} [role=option]")
            return [element for element in found if element.text.strip(" ✓\n") == option]

        click(lambda: browser.find_element("css selector", f"#{name} input"))
        wait_until(options)
        click(lambda: options()[0])

    explorer = Explorer([str(folder / "queries")], device="cpu")
    browser.set_window_size(1280, 1000)
    browser.get(address)
    wait_until(lambda: browser.find_elements("css selector", "#weights img") and "%" in text_of("after"))

    field = browser.find_element("css selector", "#text textarea")
    field.clear()
    field.send_keys(TEXT)
    click(lambda: browser.find_element("css selector", "#read"))
    wait_until(lambda: "bright" in text_of("tokens").replace("\n", ""))
    reading = explorer.read(str(folder / "queries"), TEXT)
    wait_until(lambda: all(name in text_of("before") for name in list(reading.predictions)[:3]))

    choose("site", "MLP of layer 3 (site 7)")
    choose("source", "block 2")
    largest = reading.weights[7][:, 2].max().item()
    wait_until(lambda: f"Weight of block 2 by token: from 0 to {largest:.2f}" in text_of("tokens"))
    without = explorer.without(reading, 7, 2)
    most_probable = list(without)[0]
    wait_until(
        lambda: most_probable in text_of("after") and f"{round(without[most_probable] * 100)}%" in text_of("after")
    )

    means = picture()
    click(lambda: browser.find_elements("css selector", "#tokens [role=button]")[3])
    wait_until(lambda: picture() != means)

    harmful = "<img src=x onerror=alert(1)><b id='harm'>"
    field.clear()
    field.send_keys(harmful)
    click(lambda: browser.find_element("css selector", "#read"))
    wait_until(lambda: "onerror" in text_of("tokens").replace("\n", ""))
    assert browser.find_elements("css selector", "#harm, img[src=x]") == []

    choose("checkpoint", "zero")
    wait_until(lambda: "All queries of this model are zero" in text_of("zero"))
    field.send_keys(Keys.CONTROL, "a")
    field.send_keys(Keys.DELETE)
    click(lambda: browser.find_element("css selector", "#read"))
    wait_until(lambda: "Type a text first" in browser.find_element("css selector", "body").text)

    browser.set_window_size(500, 900)
    fits = "return window.innerWidth < 600 && document.documentElement.scrollWidth <= window.innerWidth"
    wait_until(lambda: browser.execute_script(fits))
    loaded = browser.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert all(name.startswith(address) for name in loaded)  # nothing of somebody else's
    assert [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
