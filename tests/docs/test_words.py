"""The length of the documentation: it is to be read."""

import re
from pathlib import Path

import pytest

DOCS = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists()) / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
GENERATED = re.compile(r"^<!-- ([\w: ]+) -->\n.*?^<!-- /\1 -->$", re.MULTILINE | re.DOTALL)
WRITTEN = {path.relative_to(DOCS).as_posix(): GENERATED.sub("", path.read_text()) for path in PAGES}
WORDS = {page: len(re.findall(r"\S*\w\S*", text)) for page, text in WRITTEN.items()}
"""With a letter or a digit: the borders of tables are none. What is generated is not counted."""
IN_ALL = 25_500
A_PAGE = 1_750
REFERENCE = {
    "architecture.md",
    "compatibility.md",
    "hooks.md",
    "metrics.md",
    "reference/settings.md",
    "reference/strategies.md",
}
"""Pages to look things up in."""


@pytest.mark.parametrize("page", sorted(WORDS.keys() - REFERENCE))
def test_a_page_is_read_in_one_go(page):
    assert WORDS[page] <= A_PAGE or page.startswith("api/"), f"docs/{page} has {WORDS[page]} words: cut it to {A_PAGE}"


def test_all_pages_together_are_no_longer_than_a_short_book():
    assert sum(WORDS.values()) <= IN_ALL, f"docs/ has {sum(WORDS.values())} words: cut it to {IN_ALL}"
