# SPDX-License-Identifier: Apache-2.0
"""A hook of MkDocs: pages and files that lie outside of `docs/`.

The Markdown files are written for a reader on GitHub, whose links are relative to where a file lies in the repository.
On the site the README is the first page, and what the pages link to outside of `docs/` is copied.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File, Files, InclusionLevel


ROOT = Path(__file__).resolve().parents[1]
# Where they are on the site, by where they are in the repository
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
# Code, which stays as it is, or the target of a link or an image
CODE_OR_TARGET = re.compile(r"```.*?```|`[^`]*`|(?<=\]\()[^)\s]+(?=\))", flags=re.DOTALL)


def on_files(files: Files, config) -> Files:
    for path, uri in PAGES.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    linked = [file for file in files if file.src_uri.endswith(".md")]
    for page in linked:  # grows: what is linked may be a page with links
        for uri in targets(page):
            path = ROOT / repository_path(uri)
            if files.get_file_from_path(uri) is None and path.is_file():
                file = File.generated(config, uri, abs_src_path=str(path), inclusion=InclusionLevel.NOT_IN_NAV)
                files.append(file)
                if uri.endswith(".md"):
                    linked.append(file)
    return files


def on_page_markdown(markdown: str, page, config, files) -> str:
    return CODE_OR_TARGET.sub(lambda match: site_target(match.group(), page.file.src_uri), markdown)


def site_target(target: str, page: str) -> str:
    """The target of a link in a page of the site."""
    path, sign, heading = target.partition("#")
    if not path or target.startswith(("`", "https://", "http://", "mailto:")):
        return target
    return posixpath.relpath(site_uri(path, page), posixpath.dirname(page) or ".") + sign + heading


def targets(page: File) -> set[str]:
    """What a page links to, by where it is on the site."""
    found = CODE_OR_TARGET.findall(Path(page.abs_src_path).read_text(encoding="utf-8"))
    return {
        site_uri(target.partition("#")[0], page.src_uri)
        for target in found
        if not target.startswith(("`", "#", "https://", "http://", "mailto:"))
    }


def site_uri(target: str, page: str) -> str:
    """Where on the site is what a page of the site, written for the repository, calls `target`."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(repository_path(page)), target))
    return PAGES.get(path) or path.removeprefix("docs/")


def repository_path(uri: str) -> str:
    """Where in the repository is what is there on the site."""
    for path, page in PAGES.items():
        if page == uri:
            return path
    return f"docs/{uri}" if (ROOT / "docs" / uri).exists() else uri
