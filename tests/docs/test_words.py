"""How long the documentation is: it is to be read."""

from __future__ import annotations

from pathlib import Path

import pytest

DOCS = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists()) / "docs"
PAGES = [path for path in sorted(DOCS.rglob("*.md")) if path.parent.name != "outreach"]
WORDS = {path.relative_to(DOCS).as_posix(): len(path.read_text().split()) for path in PAGES}
IN_ALL = 38_000
A_PAGE = 1_500
REFERENCE = {
    "compatibility.md",
    "hooks.md",
    "known-failures.md",
    "metrics.md",
    "reference/settings.md",
    "reference/strategies.md",
}
"""Pages to look things up in."""
LONGER = {"evidence-defaults.md": 1850, "evidence-methods.md": 1550, "evidence-processes.md": 1750}
"""Pages that are to be cut: these counts, rounded up, may only shrink."""
LONGER_IN_ALL = 39_500
"""About what all pages have: to shrink to `IN_ALL`, and then to go."""


@pytest.mark.parametrize("page", sorted(WORDS.keys() - REFERENCE))
def test_a_page_is_read_in_one_go(page: str) -> None:
    limit = LONGER.get(page, A_PAGE)
    assert WORDS[page] <= limit or page.startswith("api/"), f"docs/{page} has {WORDS[page]} words: cut it to {limit}"


def test_all_pages_together_are_no_longer_than_a_short_book() -> None:
    limit = max(IN_ALL, LONGER_IN_ALL)
    assert sum(WORDS.values()) <= limit, f"docs/ has {sum(WORDS.values())} words: cut it to {limit}"
