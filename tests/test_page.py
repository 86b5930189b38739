# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The page of `attnres inspect` in a real browser: clicks, taps, keys, a phone's width, light and dark."""

import json
import re

import pytest
import torch
from tiny_models import convert, randomize_queries, tiny_base_model

from attnres.data.text import read_sample, train_tokenizer
from attnres.inspection import inspect
from attnres.inspection.page import write_page


pytestmark = pytest.mark.slow
HARMFUL = "</script><b id='harm'>'\"&"
NUM_SITES = 9


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    tokenizer = train_tokenizer([read_sample()] * 3, vocab_size=400)
    base = tiny_base_model("qwen3", vocab_size=len(tokenizer))
    for name, model in (("before", convert(base, 3)), ("after", randomize_queries(convert(base, 3)))):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    options = {"max_tokens": 128, "length": 64, "gradients": True, "ablation": True, "device": "cpu"}
    inspect([str(folder / "before"), str(folder / "after")], folder / "depth", **options)
    assert (folder / "depth/index.html").exists()
    results = json.loads((folder / "depth/depth.json").read_text())
    for model in results["models"]:
        model["excerpt"]["tokens"][1] = HARMFUL
    return results


@pytest.fixture
def page(browser, results, tmp_path):
    """The page of two models, opened from the file system."""
    write_page(results, tmp_path / "index.html")
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.set_window_size(1280, 1000)
    browser.get((tmp_path / "index.html").as_uri())
    wait_for_frames(browser)
    yield browser
    assert [entry["message"] for entry in browser.get_log("browser")] == []  # no error, nothing refused


def find(page, selector):
    return page.find_element("css selector", selector)


def all_of(page, selector):
    return page.find_elements("css selector", selector)


def wait_for_frames(page):
    """A new size of the window draws the map again in the frame after: what was found before is gone then."""
    page.execute_async_script("const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(done))")


def select(page, name, text):
    from selenium.webdriver.support.select import Select

    Select(find(page, f"#{name}")).select_by_visible_text(text)


def keys(page, *names):
    from selenium.webdriver import ActionChains, Keys

    actions = ActionChains(page)
    for name in names:
        actions.send_keys(getattr(Keys, name))
    actions.perform()


def test_it_asks_for_nothing(page, results, tmp_path):
    content = (tmp_path / "index.html").read_text()
    assert set(re.findall(r"https?://[^\s\"']+", content)) == {"http://www.w3.org/2000/svg"}
    assert page.execute_script("return performance.getEntriesByType('resource').length") == 0


def test_texts_do_no_harm(page):
    assert all_of(page, "#harm") == []
    assert find(page, "#token-1").text == HARMFUL


@pytest.mark.slow
def test_cells_are_clicked(page, results):
    before, after = results["models"]
    cells = all_of(page, "#map rect[data-site]")
    assert len(cells) == sum(len(site["weights"]) for site in before["sites"])
    select(page, "model", after["model"])
    find(page, "#map rect[data-site='7'][data-source='2']").click()
    weight = after["sites"][7]["weights"][2]
    assert find(page, "#cell").text == f"MLP of layer 3 (site 7), source block 2: mean weight {weight:.3f}"
    assert find(page, "#site").get_attribute("value") == "7"
    select(page, "model", "after minus before")
    difference = weight - before["sites"][7]["weights"][2]
    assert find(page, "#cell").text.endswith(f"mean weight {difference:.3f} (after minus before)")
    select(page, "quantity", "rise of the loss without the source")
    rise = after["sites"][7]["ablation"][2] - before["sites"][7]["ablation"][2]
    assert f"{rise:.3f}" in find(page, "#cell").text or f"{rise:.1e}".replace("e-0", "e-") in find(page, "#cell").text


@pytest.mark.slow
def test_cells_by_keyboard(page, results):
    page.execute_script("document.getElementById('map').focus()")
    assert page.execute_script("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
    keys(page, "ARROW_UP", "ARROW_UP", "ARROW_RIGHT")
    assert find(page, "#cell").text.startswith("attention of layer 3 (site 6), source block 1")
    keys(page, *["ARROW_UP"] * 20)
    assert find(page, "#cell").text.startswith("attention of layer 0 (site 0), source embedding")
    assert ", its only source" in find(page, "#cell").text
    select(page, "kind", "before MLP")
    assert len(all_of(page, "#site option")) == 4 and find(page, "#cell").text.startswith("MLP of layer 3")


def bars(page):
    return [float(output.text) for output in all_of(page, "#bars output")]


@pytest.mark.slow
def test_tokens_show_their_own_weights(page, results):
    from selenium.webdriver import ActionChains

    before, after = results["models"]
    select(page, "model", after["model"])
    select(page, "site", "MLP of layer 2 (site 5)")
    weights = [[thousandths / 1000 for thousandths in token] for token in after["excerpt"]["weights"][5]]
    find(page, "#token-3").click()
    token = after["excerpt"]["tokens"][3].strip()
    assert bars(page) == weights[3]
    assert find(page, "#bars-title").text == f"\u201c{token}\u201d, token 4 of 64, at MLP of layer 2 (site 5)"
    ActionChains(page).move_to_element(find(page, "#token-5")).perform()
    assert bars(page) == weights[5]
    keys(page, "END")  # the box has the focus since the click
    assert bars(page) == weights[-1]
    keys(page, "HOME", "ARROW_RIGHT", "ARROW_RIGHT")
    assert bars(page) == weights[2] != weights[-1]
    assert all_of(page, "#tokens [aria-selected=true]")[0].get_attribute("id") == "token-2"
    select(page, "model", "after minus before")
    both = zip(before["excerpt"]["weights"][5][2], after["excerpt"]["weights"][5][2])
    assert bars(page) == [thousandths / 1000 for pair in both for thousandths in pair]


def test_it_says_what_zero_queries_mean(page):
    """Of the model that was only converted, and not of the other one."""
    sentence = find(page, "#zero").text
    assert sentence.startswith(
        "All queries of \u201cbefore\u201d are zero, so each read gives all its sources equal weights"
    )


def test_colours_span_the_weights(page, results):
    """From the smallest to the largest weight of reads with a choice, in both models."""
    select(page, "model", "after")
    sites = [site for model in results["models"] for site in model["sites"] if len(site["weights"]) > 1]
    weights = [weight for site in sites for weight in site["weights"]]
    shown = [span.text for span in all_of(page, "#scale span")]
    assert shown == [f"{min(weights):.3f}", f"{max(weights):.3f} (root scale)"]
    largest = max(results["models"][1]["sites"][1:], key=lambda site: max(site["weights"]))
    source = largest["weights"].index(max(largest["weights"]))
    cell = find(page, f"#map rect[data-site='{largest['site']}'][data-source='{source}']")
    assert cell.get_attribute("fill") == "rgb(253 231 37)"  # the end of the scale


@pytest.mark.slow
def test_everything_is_reached_by_tab(page):
    page.execute_script("document.activeElement.blur()")
    reached = []
    for _ in range(7):
        keys(page, "TAB")
        reached.append(page.execute_script("return document.activeElement.id"))
    assert reached == ["model", "quantity", "kind", "site", "map", "tokens", "bars"]


@pytest.mark.slow
def test_profiles(page, results):
    assert len(all_of(page, "#charts figure")) == 5
    select(page, "model", results["models"][1]["model"])
    gradient = all_of(page, "#charts figure")[-1]
    points = gradient.find_element("css selector", "polyline").get_attribute("points").split()
    assert len(points) == 4  # one for every attention
    heights = [float(point.split(",")[1]) for point in points]
    values = [site["gradient_rms"] for site in results["models"][1]["sites"] if site["kind"] == "attention"]
    order = sorted(range(4), key=lambda i: values[i])
    assert order == sorted(range(4), key=lambda i: -heights[i])  # the larger, the higher


@pytest.mark.parametrize("scheme, background", [("light", "rgb(255, 255, 255)"), ("dark", "rgb(22, 24, 27)")])
def test_on_a_phone(page, scheme, background):
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    metrics = {"width": 375, "height": 700, "deviceScaleFactor": 2, "mobile": True}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    wait_for_frames(page)
    assert page.execute_script("return document.documentElement.scrollWidth") == 375
    assert page.execute_script("return getComputedStyle(document.body).backgroundColor") == background
    find(page, "#map rect[data-site='3'][data-source='1']").click()
    assert find(page, "#cell").text.startswith("MLP of layer 1 (site 3)")
    clipped = """
        const outside = text => {
          const own = text.getBoundingClientRect(), svg = text.closest("svg").getBoundingClientRect();
          return own.left < svg.left - 0.5 || own.right > svg.right + 0.5 || own.bottom > svg.bottom + 0.5;
        };
        return [...document.querySelectorAll("svg text")].filter(outside).map(text => text.textContent);
    """
    assert page.execute_script(clipped) == []
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


@pytest.mark.slow
def test_a_cell_outlives_another_height(page):
    """As when the address bar of a phone hides under a finger; another width draws the map again."""
    cell = find(page, "#map rect[data-site='3'][data-source='1']")
    page.set_window_size(1280, 700)
    wait_for_frames(page)
    cell.click()
    assert find(page, "#cell").text.startswith("MLP of layer 1 (site 3)")
    page.set_window_size(900, 700)
    wait_for_frames(page)
    drawn, shown = page.execute_script("return [map.viewBox.baseVal.width, map.getBoundingClientRect().width]")
    assert drawn == pytest.approx(shown) and shown < 900


def test_the_largest_page_stays_small(tmp_path):
    """57 sites of Full AttnRes on made-up weights: as much as fits is embedded."""
    from attnres.inspection.run import EXCERPT_TOKENS, EXCERPT_WEIGHTS

    weights_per_token = sum(range(1, 58))
    tokens = min(EXCERPT_TOKENS, EXCERPT_WEIGHTS // weights_per_token)
    torch.manual_seed(0)
    weights = [(torch.rand(tokens, site + 1) * 200).int().tolist() for site in range(57)]
    sites = [{"site": site, "weights": [0.1] * (site + 1)} for site in range(57)]
    excerpt = {"tokens": [" word"] * tokens, "weights": weights}
    write_page({"schema": 2, "models": [{"model": "m", "sites": sites, "excerpt": excerpt}]}, tmp_path / "index.html")
    assert tokens == 256 and (tmp_path / "index.html").stat().st_size < 2_000_000


@pytest.mark.slow
def test_two_models_open_on_their_difference(page, results):
    assert find(page, "#model").get_attribute("value") == "2"
    assert find(page, "#cell").text.endswith("(after minus before)")
    assert len(all_of(page, "#bars .legend span")) == 2


@pytest.mark.slow
def test_a_model_of_one_layer(browser, results, tmp_path):
    """Three sites: lines of one point are drawn as a point, filled in one model and hollow in the other."""
    models = []
    for model in results["models"]:
        sites = model["sites"][:2] + [model["sites"][2] | {"kind": "final", "layer": None}]
        excerpt = model["excerpt"] | {"weights": model["excerpt"]["weights"][:3]}
        models.append(model | {"sites": sites, "num_blocks": 1, "excerpt": excerpt})
    write_page({**results, "models": models}, tmp_path / "index.html")
    browser.get((tmp_path / "index.html").as_uri())
    points = browser.find_elements("css selector", "#charts figure:first-child circle")
    assert [point.get_attribute("fill") for point in points] == ["var(--mlp)", "var(--panel)"]
    assert browser.get_log("browser") == []


@pytest.mark.slow
def test_a_model_whose_attention_and_mlp_share_a_read(browser, results, tmp_path):
    """Every second site is not read, and what is shown of the others is their own."""
    models = []
    for model in results["models"]:
        weights = model["excerpt"]["weights"][::2]
        models.append(model | {"sites": model["sites"][::2], "excerpt": model["excerpt"] | {"weights": weights}})
    write_page({**results, "models": models}, tmp_path / "index.html")
    browser.get((tmp_path / "index.html").as_uri())
    select(browser, "model", models[1]["model"])
    assert [option.text for option in all_of(browser, "#kind option")] == ["all", "before attention"]
    select(browser, "site", "attention of layer 2 (site 4)")
    find(browser, "#token-3").click()
    assert bars(browser) == [weight / 1000 for weight in results["models"][1]["excerpt"]["weights"][4][3]]
    find(browser, "#map rect[data-site='6'][data-source='1']").click()
    weight = results["models"][1]["sites"][6]["weights"][1]
    assert find(browser, "#cell").text == f"attention of layer 3 (site 6), source block 1: mean weight {weight:.3f}"
    # Blocks of three: in front of sites 4 and 6, which are the first ones read in theirs
    lines = [float(line.get_attribute("y1")) for line in all_of(browser, "#map .boundary")]
    rows = [float(find(browser, f"#map rect[data-site='{site}']").get_attribute("y")) for site in (4, 6)]
    assert lines == rows and browser.get_log("browser") == []


@pytest.mark.slow
def test_a_model_that_reads_each_output(browser, tmp_path):
    """More sources than blocks: the map has a column for each, and every read that there is can be clicked."""
    base = tiny_base_model("qwen3", vocab_size=400)
    model = convert(base, 3, attn_res_open_block="each", attn_res_num_heads=2)
    tokenizer = train_tokenizer([read_sample()] * 3, vocab_size=400)
    for part in (randomize_queries(model), tokenizer):
        part.save_pretrained(tmp_path / "model")
    results = inspect([str(tmp_path / "model")], tmp_path / "depth", max_tokens=64, length=32, device="cpu")
    browser.get((tmp_path / "depth/index.html").as_uri())
    numbers = [len(site["weights"]) for site in results["models"][0]["sites"]]
    assert max(numbers) > results["models"][0]["num_blocks"] + 1
    cells = [f"#map rect[data-site='{site}'][data-source]" for site in range(NUM_SITES)]
    assert [len(all_of(browser, cell)) for cell in cells] == numbers
    assert browser.get_log("browser") == []
