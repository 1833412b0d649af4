"""The README is short, and says what the documentation says."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def rows(text: str) -> list[list[str]]:
    """The cells of all tables, headings included."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_the_readme_is_short() -> None:
    assert README.count("\n") < 120


def test_the_readme_has_the_numbers_of_the_evidence_page() -> None:
    measured = [row for row in rows(README) if re.search(r"stock GRPO|\*\*replay\*\*|uncorrected", row[0])]
    evidence = rows((ROOT / "docs" / "evidence.md").read_text())
    assert len(measured) == 3
    assert [row for row in measured if row not in evidence] == []


def test_every_page_of_the_documentation_is_in_the_navigation_and_the_readmes_links_lead_to_pages() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    pages -= {page for page in pages if page.startswith("outreach/")}  # drafts, which the site leaves out
    assert [page for page in pages if not re.search(rf": {re.escape(page)}$", navigation, re.MULTILINE)] == []
    linked = re.findall(r"^\[docs/\S+\]: \S+/blob/main/(docs/\S+)$", README, re.MULTILINE)
    assert len(linked) > 15
    assert [page for page in linked if not (ROOT / page).is_file()] == []
