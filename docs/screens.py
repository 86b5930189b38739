# SPDX-License-Identifier: Apache-2.0
"""Draws what the ten minutes show on the screen: `python docs/screens.py MODEL FINETUNED`.

MODEL is the converted checkpoint of docs/ten_minutes.md, and FINETUNED its merged adapter. Needs the extras for
inspection and the demo, and a Chromium with its driver.
"""

import contextlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from selenium import webdriver
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.common.by import By


FOLDER = Path(__file__).parent / "screens"
TEXT = "The capital of Elbia is Lindow. The river Mara flows through Lindow."
ATTNRES = [sys.executable, "-m", "attnres"]
PORT = 7861


def browser(width: int, height: int) -> webdriver.Chrome:
    options = webdriver.ChromeOptions()
    for name in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "hide-scrollbars"):
        options.add_argument(f"--{name}")
    page = webdriver.Chrome(options)
    page.set_window_size(width, height)
    return page


def draw_inspection(models: list[str]):
    """The page of `attnres inspect` for both models."""
    with tempfile.TemporaryDirectory() as folder:
        names = ["--name", "converted", "--name", "fine-tuned"]
        subprocess.run([*ATTNRES, "inspect", *models, *names, "--text", TEXT, "-o", folder], check=True)
        with browser(1000, 1000) as page:
            page.get((Path(folder) / "index.html").as_uri())
            time.sleep(2)
            page.save_screenshot(str(FOLDER / "inspect.png"))


def draw_explorer(model: str):
    """The page of `attnres explore`."""
    command = [*ATTNRES, "explore", model, "--port", str(PORT)]
    with subprocess.Popen(command) as process, browser(1100, 1250) as page:
        try:
            for _ in range(90):
                time.sleep(3)
                with contextlib.suppress(WebDriverException):  # the model is being loaded
                    page.get(f"http://127.0.0.1:{PORT}/")
                    time.sleep(5)
                if page.find_elements(By.CSS_SELECTOR, "#weights img, #weights canvas"):
                    break
            time.sleep(5)
            page.save_screenshot(str(FOLDER / "explore.png"))
        finally:
            process.terminate()


def main(model: str, finetuned: str):
    FOLDER.mkdir(exist_ok=True)
    draw_inspection([model, finetuned])
    draw_explorer(finetuned)


if __name__ == "__main__":
    main(*sys.argv[1:])
