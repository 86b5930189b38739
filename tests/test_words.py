# SPDX-License-Identifier: Apache-2.0
"""Phrases that the pages do without, because plain English has a shorter or clearer one."""

import re
from pathlib import Path

import pytest
from families_page import COMMANDS_HEAD, HEAD


ROOT = Path(__file__).parent.parent
# Each with what to write instead
PHRASES = {
    r"alike": "in the same way, similar",
    r"anew": "again",
    r"without a word": "without a message",
    r"(?:goes|go|went|going) on where": "resumes, continues",
    r"(?<!instead )of (?:its|their|one's|our|my|your) own(?=[.,;:)|])": "separate, your own ...",
    r"in front of": "before",
    r"beside": "next to, in addition to, compared with",
    r"behind (?:the |each |a )?(?:sublayer|layer|block|norm|stage)s?": "after",
    r"(?:lies?|lay) (?:in|beside|there|elsewhere)": "is in",
    r"(?:is|are) (?:looked at|said of|told)": "name who does it",
    r"less (?:PreNorm|the base)": "minus",
    r"hand(?:s|ed)? on": "pass on",
    r"that there (?:is|are)(?: not)?(?=[.,;:)])": "a name, or unknown",
    r"be it": "even if",
    r"for want of": "because there is no",
    r"so it is with": "as with",
    r"in silence": "without an error",
    r"shall": "should",
}
PAGES = sorted({*ROOT.glob("docs/**/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"})
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in PAGES}
TEXTS["docs/families.md"] = HEAD + COMMANDS_HEAD  # the rest are error messages, as they were recorded
TEXTS["docs/architecture.md"] = re.sub(
    "<!-- Made by tests/tools/rooms.py -->.*?<!-- End -->", "", TEXTS["docs/architecture.md"], flags=re.DOTALL
)
# Code, comments, quotations, and headings of members
LEFT_OUT = re.compile(r"```.*?```|`[^`]*`|<!--.*?-->|^> .*?$|\"[^\"\n]*\"|^#### .*?$", flags=re.DOTALL | re.MULTILINE)


def phrases_in(text: str) -> list[str]:
    """The phrases that a text should not have, each with what to write instead."""
    text = " ".join(LEFT_OUT.sub(" ", text).split())
    return [
        f"{match[0]!r}: write {instead}"
        for phrase, instead in PHRASES.items()
        for match in re.finditer(rf"\b{phrase}(?!\w)", text, flags=re.IGNORECASE)
    ]


@pytest.mark.parametrize("page", TEXTS)
def test_pages_are_without(page):
    assert not phrases_in(TEXTS[page])


def test_phrases_are_found():
    assert len(phrases_in("All are alike,\nand it goes on\nwhere it was, in code of its own.")) == 3
    assert not phrases_in('`alike`, "anew", ```\nbeside\n``` and a partial sum of its own block\n> alike')
