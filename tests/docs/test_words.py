"""The length of the documentation: it is to be read."""

import re
from pathlib import Path

import pytest

DOCS = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists()) / "docs"
WORDS = {
    path.relative_to(DOCS).as_posix(): len(re.findall(r"\S*\w\S*", path.read_text()))
    for path in sorted(DOCS.rglob("*.md"))
}
"""With a letter or a digit: the borders of tables are none. Generated ones count."""
IN_ALL = 22_000
A_PAGE = 1_500
LONGER = {"architecture.md", "hooks.md"}
"""Pages to look things up in."""


@pytest.mark.parametrize("page", sorted(WORDS.keys() - LONGER))
def test_a_page_is_read_in_one_go(page):
    assert WORDS[page] <= A_PAGE, f"docs/{page} has {WORDS[page]} words: cut it to {A_PAGE}"


def test_all_pages_together_are_no_longer_than_a_short_book():
    assert sum(WORDS.values()) <= IN_ALL, f"docs/ has {sum(WORDS.values())} words: cut it to {IN_ALL}"
