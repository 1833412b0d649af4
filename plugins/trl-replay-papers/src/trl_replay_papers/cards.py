"""Method cards: what a method does, when to use it, what of it is faithful, as `card.md` in the method's folder."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import trl_replay_curricula

SECTIONS = (
    "When to use it",
    "Settings that go with it",
    "Faithful",
    "Adapted",
    "Composes with",
    "Measured here",
    "Source",
)
"""The headings of a card, in their order."""
LEVELS = ("groups", "rows in a group", "rows of any group", "prompts", "prompts and groups", "advantages", "loss")
"""What a method replays or changes."""


@dataclass(frozen=True)
class Card:
    """One card.

    Attributes:
        name (`str`): The preset's.
        title (`str`): What it is, in a few words.
        summary (`str`): What it does, in up to three lines.
        level (`str`): One of `LEVELS`.
        sections (`dict[str, str]`): Text by heading.
    """

    name: str
    title: str
    summary: str
    level: str
    sections: dict[str, str]


def text_of(name: str) -> str:
    """The card of a method, as Markdown; those of curricula come with them."""
    own = Path(__file__).parent / name / "card.md"
    return own.read_text(encoding="utf-8") if own.is_file() else trl_replay_curricula.card(name)


def parsed(text: str) -> Card:
    """A card taken apart.

    Raises:
        ValueError: It has not the form of a card; says what is missing.
    """
    head = re.match(r"# `(\w+)`: (.+)\n\n((?:.+\n)+)\nLevel: (.+)\n\n", text)
    if head is None:
        raise ValueError("A card begins with '# `name`: title', what it does, and 'Level: …'.")
    name, title, summary, level = head.groups()
    parts = re.split(r"^## (.+)\n", text[head.end() :], flags=re.MULTILINE)
    sections = {heading: body.strip() for heading, body in zip(parts[1::2], parts[2::2], strict=True)}
    if tuple(sections) != SECTIONS:
        raise ValueError(f"The card of {name!r} has the headings {list(sections)}, not {list(SECTIONS)}.")
    if level not in LEVELS:
        raise ValueError(f"The card of {name!r} has the level {level!r}, not one of {', '.join(LEVELS)}.")
    return Card(name, title, " ".join(summary.split()), level, sections)
