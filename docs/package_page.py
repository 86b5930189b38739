# SPDX-License-Identifier: Apache-2.0
"""Builds the distributions into `dist/`, with a README whose links lead to the project's address: `make build`.

On the page of a package there are no files beside the README. The address is `ADDRESS` of `utils/installation.py`; as
long as it is `None`, the README is taken as it is.
"""

import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path


ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()(?!https?://|#)([^)]+)")
IMAGE = re.compile(r'((?:src|srcset)=")(?!https?://)([^"]+)')


def package_page(readme: str, address: str | None) -> str:
    """The README for readers outside of the repository.

    Args:
        address: of the repository, on a host whose paths are those of GitHub.
    """
    if address is None:
        return readme
    text = LINK.sub(rf"\1{address}/blob/main/\2", readme)
    return IMAGE.sub(rf"\1{address}/raw/main/\2", text).replace("ADDRESS", address)


def build(address: str | None):
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        for name in files.splitlines():
            (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, Path(folder) / name)
        readme = Path(folder) / "README.md"
        readme.write_text(package_page(readme.read_text(encoding="utf-8"), address), encoding="utf-8")
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(ROOT / "dist"), folder]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    build(runpy.run_path(str(ROOT / "utils/installation.py")).get("ADDRESS"))
